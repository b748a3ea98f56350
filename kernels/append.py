"""Enter the new token: rotary embedding, its key and value into the device cache, its compressed key if one completes.

Source: SparDA, arXiv 2606.04511 (compressed keys are means of rotated keys over a sliding window; the forecast reads
extra rotated query heads of the same fused projection).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparda.kernels.launch import dependent


@triton.jit
def _summed(source: tl.tensor, stride: tl.tensor, like: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The parts of a projection, added up in order and rounded to the type that ``like`` points to."""
    total = tl.load(source)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * stride)
    return total.to(like.dtype.element_ty)


@triton.jit
def _append_kernel(
    parts: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slot_of_block: tl.tensor,
    cache: tl.tensor,
    keys: tl.tensor,
    q_out: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    slots: tl.tensor,
    key_rows: tl.tensor,
    width: tl.tensor,
    part_stride: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_h: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    key_stride_c: tl.tensor,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    KERNEL_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    t = tl.load(positions + b)
    d = tl.arange(0, HALF)
    c = tl.load(cos + t.to(tl.int64) * HALF + d)
    s = tl.load(sin + t.to(tl.int64) * HALF + d)
    is_key = (head >= heads) & (head < heads + kv_heads)
    # Columns are q heads, k heads, v heads, extra heads; programs are q heads, KV heads, extra heads.
    column = tl.where(head < heads + kv_heads, head, head + kv_heads)
    source = parts + b * width + column * DIM + d
    low = _summed(source, part_stride, cache, PARTS).to(tl.float32)
    high = _summed(source + HALF, part_stride, cache, PARTS).to(tl.float32)
    first = (low * c - high * s).to(cache.dtype.element_ty)
    second = (high * c + low * s).to(cache.dtype.element_ty)
    if is_key:
        h = (head - heads).to(tl.int64)
        pair = b * kv_heads + h
        slot = tl.load(slot_of_block + pair * blocks + t // BLOCK).to(tl.int64)
        # Without a slot there is nowhere to write; skipping keeps a neighbour's memory intact.
        resident = d < tl.where(slot >= 0, HALF, 0)
        place = cache + (pair * slots + slot) * (2 * BLOCK * DIM) + (t % BLOCK) * DIM + d
        value = source + kv_heads * DIM
        tl.store(place, first, mask=resident)
        tl.store(place + HALF, second, mask=resident)
        tl.store(place + BLOCK * DIM, _summed(value, part_stride, cache, PARTS), mask=resident)
        tl.store(place + BLOCK * DIM + HALF, _summed(value + HALF, part_stride, cache, PARTS), mask=resident)
        begin = t + 1 - KERNEL
        j = begin // STRIDE
        if (begin >= 0) & (begin % STRIDE == 0) & (j < key_rows):
            # The window's older rows come from the cache; the newest is still in registers, so no barrier is needed.
            i = tl.arange(0, KERNEL_PAD)
            token = begin + i
            older = i < KERNEL - 1
            at = tl.load(slot_of_block + pair * blocks + token // BLOCK, mask=older, other=-1).to(tl.int64)
            rows = cache + (pair * slots + at) * (2 * BLOCK * DIM) + (token % BLOCK) * DIM
            ok = (older & (at >= 0))[:, None]
            lows = tl.load(rows[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
            highs = tl.load(rows[:, None] + HALF + d[None, :], mask=ok, other=0.0).to(tl.float32)
            mean_low = (tl.sum(lows, axis=0) + first.to(tl.float32)) / KERNEL
            mean_high = (tl.sum(highs, axis=0) + second.to(tl.float32)) / KERNEL
            target = keys + b * key_stride_b + h * key_stride_h + j.to(tl.int64) * key_stride_c + d
            tl.store(target, mean_low.to(keys.dtype.element_ty))
            tl.store(target + HALF, mean_high.to(keys.dtype.element_ty))
    else:
        row = tl.where(head < heads, head, head - kv_heads)
        target = q_out + b * q_stride_b + row * q_stride_h + d
        tl.store(target, first)
        tl.store(target + HALF, second)


def _check(
    parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slot_of_block: torch.Tensor,
    cache: torch.Tensor, keys: torch.Tensor, q_out: torch.Tensor, heads: int, kv_heads: int,
) -> None:  # fmt: skip
    """Raise ValueError unless the tensors of append_token fit together."""
    batch, _, slots, _, block, dim = cache.shape
    rows = q_out.shape[1] if q_out.ndim == 3 else 0
    shapes = (
        ("parts", parts, (parts.shape[0], batch, (rows + 2 * kv_heads) * dim), torch.float32),
        ("cos", cos, (cos.shape[0], dim // 2), torch.float32),
        ("sin", sin, (cos.shape[0], dim // 2), torch.float32),
        ("positions", positions, (batch,), torch.int32),
        ("slot_of_block", slot_of_block, (batch, kv_heads, slot_of_block.shape[-1]), torch.int32),
        ("cache", cache, (batch, kv_heads, slots, 2, block, dim), cache.dtype),
        ("keys", keys, (batch, kv_heads, keys.shape[-2], dim), cache.dtype),
        ("q_out", q_out, (batch, rows, dim), cache.dtype),
    )
    for name, tensor, shape, dtype in shapes:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise ValueError(f"{name}: given {tuple(tensor.shape)} {tensor.dtype}, allowed: {shape} {dtype}")
    whole = (("parts", parts), ("cos", cos), ("sin", sin), ("slot_of_block", slot_of_block), ("cache", cache))
    for name, tensor in whole:
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: given strides {tensor.stride()}, allowed: contiguous")
    if rows < heads or dim & (dim - 1):
        raise ValueError(f"q_out: given {tuple(q_out.shape)}, allowed: at least {heads} rows of a power of two")


def append_token(
    parts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_of_block: torch.Tensor,
    cache: torch.Tensor,
    keys: torch.Tensor,
    q_out: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    kernel: int,
    stride: int,
) -> None:
    """Rotate the new token's heads, store its key and value, and finish a compressed key (SparDA, arXiv 2606.04511).

    The projection's parts are added up in order and rounded to the type of the cache. Rotation pairs dimension i with
    i + D/2 (NeoX), in fp32, and is rounded too. When token t completes the window of compressed key
    j = (t + 1 - kernel) / stride, that key becomes the fp32 mean of the window's rotated keys.

    Args:
        parts: [S, B, (Hq + 2H + E) * D] fp32, contiguous, as ``linear_parts`` leaves them; columns: Hq query, H key,
            H value and E extra query heads.
        cos: [positions, D/2] fp32, contiguous.
        sin: [positions, D/2] fp32, contiguous.
        positions: [B] int32, the new token's position t.
        slot_of_block: [B, H, M] int32, contiguous. The blocks of the window must be resident; a missing one is skipped.
        cache: [B, H, S, 2, block, D] bf16 or fp32, contiguous, keys then values; slot_of_block says where.
        keys: [B, H, Cmax, D] compressed keys like cache, last dimension contiguous; row j written if j < Cmax.
        q_out: [B, Hq + E, D] out, of the type of cache: rotated query heads, then rotated extra heads.
        heads: Hq.
        kv_heads: H.
        kernel: tokens of a compressed key.
        stride: tokens between compressed keys.

    Raises:
        ValueError: a shape, dtype or stride is not as above.

    """
    _check(parts, cos, sin, positions, slot_of_block, cache, keys, q_out, heads, kv_heads)
    if not 1 <= stride <= kernel:
        raise ValueError(f"stride: given {stride}, allowed: 1..kernel = {kernel}")
    _append_kernel[(cache.shape[0], q_out.shape[1] + kv_heads)](
        parts, cos, sin, positions, slot_of_block, cache, keys, q_out, heads, kv_heads, slot_of_block.shape[2],
        cache.shape[2], keys.shape[2], parts.stride(1), parts.stride(0), *q_out.stride()[:2], *keys.stride()[:3],
        BLOCK=cache.shape[4], KERNEL=kernel, KERNEL_PAD=triton.next_power_of_2(kernel), STRIDE=stride,
        DIM=cache.shape[5], PARTS=parts.shape[0], num_warps=2, **dependent(cache),
    )  # fmt: skip


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """NeoX rotation of x [n, D] by cos, sin [D/2] in fp32, rounded to the type of x."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def append_reference(
    parts: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slot_of_block: torch.Tensor,
    cache: torch.Tensor, keys: torch.Tensor, q_out: torch.Tensor, *, heads: int, kv_heads: int, kernel: int,
    stride: int,
) -> None:  # fmt: skip
    """What append_token does, by plain PyTorch, in place, for the same arguments."""
    block, dim = cache.shape[4], cache.shape[5]
    fused = parts.sum(0).to(cache.dtype)
    for b, t in enumerate(positions.tolist()):
        q, k, v, extra = fused[b].view(-1, dim).split([heads, kv_heads, kv_heads, q_out.shape[1] - heads], dim=0)
        q_out[b] = _rotate(torch.cat((q, extra)), cos[t], sin[t])
        rotated = _rotate(k, cos[t], sin[t])
        begin = t + 1 - kernel
        for h in range(kv_heads):
            slots = slot_of_block[b, h].tolist()
            cache[b, h, slots[t // block], 0, t % block] = rotated[h]
            cache[b, h, slots[t // block], 1, t % block] = v[h]
            if begin >= 0 and begin % stride == 0 and begin // stride < keys.shape[2]:
                window = [cache[b, h, slots[i // block], 0, i % block].float() for i in range(begin, t + 1)]
                keys[b, h, begin // stride] = torch.stack(window).mean(0).to(keys.dtype)
