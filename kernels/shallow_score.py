"""Block scores of a small network: layer-normed hidden state and query-key product, one GELU layer, one output.

For block m, z = LayerNorm([h; q * k_m]) with h the layer's normed hidden state, q the rotated queries averaged over
each group and k_m the mean of the compressed keys that lie in the block; the score is w2 . GELU(W1 z + b1). LayerNorm's
own scale and shift are folded into W1 and b1. With mu and r the mean and inverse deviation of [h; q * k_m],

    W1 z = r * (W1_h h + W1_p (q * k_m) - mu * (row sums of W1)),

so what depends on h is computed once a sequence, and no z is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.pooling import check_windows, visible_keys, visible_rows

EPS = 1e-5
"""Added to LayerNorm's variance."""

VALUES = (torch.bfloat16, torch.float32)
"""Types of hidden state, queries, keys and W1; all alike."""

_TILE_BLOCKS = 32
_TILE_UNITS = 16
_TILE_INPUTS = 128
_TILE_DIMS = {torch.bfloat16: 64, torch.float32: 16}
"""Of a head, by type: an fp32 product holds its operands in registers."""


@triton.jit
def _hidden_kernel(
    h: tl.tensor,
    hidden: tl.tensor,
    step: tl.tensor,
    state: tl.tensor,
    base: tl.tensor,
    sums: tl.tensor,
    batch: tl.tensor,
    h_stride: tl.tensor,
    hidden_stride: tl.tensor,
    UNITS: tl.constexpr,
    D_MODEL: tl.constexpr,
    EVERY: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """base = W1_h h, and the sums of h and its squares; says in state[1] which sequences this step scores."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < batch
    now = tl.load(step)
    # Zero where a sequence has no scores yet; then it is due whatever the step.
    known = tl.load(state + row, mask=real, other=1)
    turn = now == 0
    if EVERY > 0:
        turn = now % EVERY == 0
    due = tl.where(turn, 1, tl.where(known == 0, 1, 0))
    # Every program of these rows comes to the same answer: none of them writes state[0].
    tl.store(state + batch + row, due, mask=real)
    if tl.max(due, axis=0) > 0:
        unit = tl.program_id(0) * TILE + tl.arange(0, TILE)
        acc = tl.zeros([ROWS, TILE], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for first in tl.range(0, D_MODEL, CHUNK):
            d = first + tl.arange(0, CHUNK)
            x = tl.load(
                h + row.to(tl.int64)[:, None] * h_stride + d[None, :],
                mask=real[:, None] & (d < D_MODEL)[None, :],
                other=0.0,
            )
            w = tl.load(
                hidden + unit.to(tl.int64)[:, None] * hidden_stride + d[None, :],
                mask=(unit < UNITS)[:, None] & (d < D_MODEL)[None, :],
                other=0.0,
            )
            acc += tl.dot(x.to(DOT), tl.trans(w).to(DOT), input_precision="ieee")
            wide = x.to(tl.float32)
            total += tl.sum(wide, axis=1)
            squares += tl.sum(wide * wide, axis=1)
        tl.store(base + row[:, None] * UNITS + unit[None, :], acc, mask=real[:, None] & (unit < UNITS)[None, :])
        if tl.program_id(0) == 0:
            tl.store(sums + row * 2, total, mask=real)
            tl.store(sums + row * 2 + 1, squares, mask=real)


@triton.jit
def _in_reserve(sequence: tl.tensor, block: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Whether a hash of (sequence, block) lies below ``limit`` of 2^31: the same blocks at every step.

    MurmurHash3's finalizer (public domain), of the sequence by an odd factor plus the block.
    """
    x = sequence.to(tl.uint32) * 0x9E3779B1 + block.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x >> 1).to(tl.int64) < limit


@triton.jit
def _block_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    hidden: tl.tensor,
    hidden_bias: tl.tensor,
    hidden_sum: tl.tensor,
    output: tl.tensor,
    base: tl.tensor,
    sums: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    key_rows: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_h: tl.tensor,
    hidden_stride: tl.tensor,
    reserved: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    D_MODEL: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    if tl.load(state + tl.num_programs(1) + b) != 0:
        # Nobody reads state[0] in this kernel, so it may say from here on that there are scores.
        tl.store(state + b, 1)
        m = tl.program_id(0) * TILE + tl.arange(0, TILE)
        t = tl.load(positions + b)
        visible = visible_rows(t, key_rows, KERNEL, STRIDE)
        g = tl.arange(0, GROUP_PAD)
        unit = tl.arange(0, UNITS)
        inside: tl.constexpr = (BLOCK - KERNEL) // STRIDE + 1
        RATIO: tl.constexpr = BLOCK // STRIDE
        known = tl.minimum(tl.maximum(visible - m * RATIO, 0), inside)
        acc = tl.zeros([TILE, UNITS], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        squares = tl.zeros([TILE], tl.float32)
        # Not pipelined: two tiles of weights in flight would leave no room for a second thread block.
        for first in tl.range(0, HEADS * DIM, CHUNK, num_stages=1):
            head = first // DIM
            d = first % DIM + tl.arange(0, CHUNK)
            rows = q + b * q_stride_b + (head * GROUP + g)[:, None] * q_stride_h + d[None, :]
            queries = tl.load(rows, mask=(g < GROUP)[:, None], other=0.0).to(tl.float32)
            query = tl.sum(queries, axis=0) / GROUP
            own = keys + (b * HEADS + head) * key_rows * DIM
            key = tl.zeros([TILE, CHUNK], tl.float32)
            for i in tl.static_range(inside):
                j = (m * RATIO + i).to(tl.int64)
                key += tl.load(own + j[:, None] * DIM + d[None, :], mask=(i < known)[:, None], other=0.0).to(tl.float32)
            product = key / tl.maximum(known, 1).to(tl.float32)[:, None] * query[None, :]
            w = tl.load(hidden + unit.to(tl.int64)[None, :] * hidden_stride + (D_MODEL + head * DIM + d)[:, None])
            acc += tl.dot(product.to(DOT), w.to(DOT), input_precision="ieee")
            total += tl.sum(product, axis=1)
            squares += tl.sum(product * product, axis=1)
        width: tl.constexpr = D_MODEL + HEADS * DIM
        mean = (total + tl.load(sums + b * 2)) / width
        variance = tl.maximum((squares + tl.load(sums + b * 2 + 1)) / width - mean * mean, 0.0)
        inverse = tl.rsqrt(variance + eps)
        acc += tl.load(base + b * UNITS + unit)[None, :] - mean[:, None] * tl.load(hidden_sum + unit)[None, :]
        x = acc * inverse[:, None] + tl.load(hidden_bias + unit)[None, :]
        gelu = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        score = tl.sum(gelu * tl.load(output + unit)[None, :], axis=1)
        score = tl.where((known > 0) & (m <= t // BLOCK), score, float("-inf"))
        # Blocks of the reserve that do not exist yet are marked too: the choice may outlive many new blocks.
        score = tl.where(_in_reserve(b, m, reserved), float("inf"), score)
        for head in tl.range(0, HEADS):
            tl.store(out + (b * HEADS + head) * blocks + m, score, mask=m < blocks)


def _check(tensors: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]], strided: tuple[str, ...]) -> None:
    """Raise ValueError unless each tensor is of its shape and type and contiguous (``strided``: the last dimension)."""
    for name, (tensor, shape, dtype) in tensors.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: {shape} {dtype}")
        if tensor.stride(-1) != 1 or (name not in strided and not tensor.is_contiguous()):
            raise ValueError(f"{name}: given strides {tensor.stride()}, allowed: contiguous")


def shallow_scores(
    h: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    hidden_bias: torch.Tensor,
    hidden_sum: torch.Tensor,
    output: torch.Tensor,
    step: torch.Tensor,
    state: torch.Tensor,
    base: torch.Tensor,
    sums: torch.Tensor,
    out: torch.Tensor,
    *,
    every: int,
    reserve: float,
    block: int,
    kernel: int,
    stride: int,
) -> None:
    """Write every block's score, the same for all KV heads, in the steps that are due; leave ``out`` alone in others.

    Due are the steps divisible by ``every`` (0: step 0 alone), and for a sequence any while its state[0] is 0. A block
    scores -inf where none of the compressed keys that lie wholly in it is complete within the t tokens before the
    newest, or where it does not exist yet; +inf where it is in the reserve, which a hash of (sequence, block) decides
    once and for all.

    Args:
        h: [B, d_model] bf16 or fp32, as are q, keys and hidden; last dimension contiguous.
        q: [B, Hq, D] rotated queries, last dimension contiguous; heads h*G .. h*G+G-1 share KV head h.
        keys: [B, H, C, D] compressed keys.
        positions: [B] int32, the newest token's position t.
        hidden: W1, [U, d_model + H * D], U a power of two; last dimension contiguous.
        hidden_bias: b1, [U] fp32.
        hidden_sum: [U] fp32, the sums of the rows of ``hidden``.
        output: w2, [U] fp32.
        step: [1] int32.
        state: [2, B] int32, this function's own; zeros at first, and state[0, b] to score sequence b in the next step.
        base: [B, U] fp32 scratch.
        sums: [B, 2] fp32 scratch.
        out: [B, H, M] fp32.
        every: steps from one score to the next; 0 for never again.
        reserve: share of blocks in the reserve, 0 to 1.
        block: tokens of a block.
        kernel: tokens of a compressed key.
        stride: tokens between compressed keys.

    Raises:
        ValueError: a shape, dtype, stride or size is not as above, or no compressed key lies in a block.

    """
    check_windows(block, kernel, stride)
    if kernel > block or every < 0 or not 0.0 <= reserve <= 1.0:
        raise ValueError(
            f"kernel, every, reserve: given {kernel}, {every}, {reserve}, allowed: 1..{block}, 0.., 0 to 1"
        )
    batch, heads, dim, units = keys.shape[0], keys.shape[1], keys.shape[3], hidden.shape[0]
    group, d_model, blocks = q.shape[1] // heads, h.shape[1], out.shape[2]
    if units & (units - 1) or units < 16 or dim & (dim - 1) or dim < 16 or h.dtype not in VALUES:
        raise ValueError(f"U, D, h: given {units}, {dim}, {h.dtype}, allowed: powers of two from 16 up, bf16 or fp32")
    fp32, int32 = torch.float32, torch.int32
    _check(
        {
            "h": (h, (batch, d_model), h.dtype),
            "q": (q, (batch, heads * group, dim), h.dtype),
            "keys": (keys, (batch, heads, keys.shape[2], dim), h.dtype),
            "positions": (positions, (batch,), int32),
            "hidden": (hidden, (units, d_model + heads * dim), h.dtype),
            "hidden_bias": (hidden_bias, (units,), fp32),
            "hidden_sum": (hidden_sum, (units,), fp32),
            "output": (output, (units,), fp32),
            "step": (step, (1,), int32),
            "state": (state, (2, batch), int32),
            "base": (base, (batch, units), fp32),
            "sums": (sums, (batch, 2), fp32),
            "out": (out, (batch, heads, blocks), fp32),
        },
        ("h", "q", "hidden"),
    )
    # Triton's interpreter multiplies the bits of bf16 as integers; fp32 gives it the products of the tensor cores.
    compiled = isinstance(_hidden_kernel, triton.runtime.JITFunction)
    dot = tl.bfloat16 if compiled and h.dtype == torch.bfloat16 else tl.float32
    tile = min(_TILE_UNITS, units)
    _hidden_kernel[(units // tile, triton.cdiv(batch, 16))](
        h, hidden, step, state, base, sums, batch, h.stride(0), hidden.stride(0), UNITS=units, D_MODEL=d_model,
        EVERY=every, ROWS=16, TILE=tile, CHUNK=_TILE_INPUTS, DOT=dot, num_warps=4,
    )  # fmt: skip
    _block_kernel[(triton.cdiv(blocks, _TILE_BLOCKS), batch)](
        q, keys, positions, hidden, hidden_bias, hidden_sum, output, base, sums, state, out, blocks, keys.shape[2],
        q.stride(0), q.stride(1), hidden.stride(0), _reserve_limit(reserve), EPS, HEADS=heads, GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group), DIM=dim, D_MODEL=d_model, UNITS=units, BLOCK=block, KERNEL=kernel,
        STRIDE=stride, TILE=_TILE_BLOCKS, CHUNK=min(dim, _TILE_DIMS[h.dtype]), DOT=dot, num_warps=8,
    )  # fmt: skip


def _reserve_limit(reserve: float) -> int:
    return round(reserve * 2**31)


def reserve_of(batch: int, blocks: int, reserve: float) -> torch.Tensor:
    """The blocks of each sequence's reserve, boolean [B, blocks], by plain PyTorch."""
    sequence, block = torch.arange(batch)[:, None], torch.arange(blocks)

    def times(x: torch.Tensor, factor: int) -> torch.Tensor:
        """The product's low 32 bits, from 16 bits at a time: int64 would overflow."""
        return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & 0xFFFFFFFF

    x = (times(sequence, 0x9E3779B1) + block) & 0xFFFFFFFF
    x = times(x ^ (x >> 16), 0x85EBCA6B)
    x = times(x ^ (x >> 13), 0xC2B2AE35)
    return ((x ^ (x >> 16)) >> 1) < _reserve_limit(reserve)


def shallow_reference(
    h: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor,
    hidden_bias: torch.Tensor, output: torch.Tensor, *, blocks: int, reserve: float, block: int, kernel: int,
    stride: int,
) -> torch.Tensor:  # fmt: skip
    """The scores of shallow_scores by plain PyTorch, with z as it is defined: fp32 [B, H, blocks]."""
    batch, heads, rows, dim = keys.shape
    query = q.float().view(batch, heads, -1, dim).mean(2)
    ratio, inside = block // stride, (block - kernel) // stride + 1
    out = torch.full((batch, blocks), float("-inf"), device=h.device)
    for b, t in enumerate(positions.tolist()):
        visible = min(visible_keys(t, kernel=kernel, stride=stride), rows)
        for m in range(min(t // block + 1, blocks)):
            own = keys[b, :, m * ratio : max(m * ratio, min(m * ratio + inside, visible))].float()
            if own.shape[1]:
                features = torch.cat([h[b].float(), (query[b] * own.mean(1)).flatten()])
                z = torch.nn.functional.layer_norm(features, features.shape, eps=EPS)
                unit = torch.nn.functional.gelu(hidden.float() @ z + hidden_bias)
                out[b, m] = unit @ output
    out.masked_fill_(reserve_of(batch, blocks, reserve).to(h.device), float("inf"))
    return out[:, None].expand(batch, heads, blocks).contiguous()
