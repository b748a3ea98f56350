"""Device side of select_blocks: exact top-k by radix search, difference with the residents, eviction.

Source: SparDA, arXiv 2606.04511. One program owns one (sequence, KV head), so all its reads and writes of the maps are
ordered inside that program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _largest(keys: tl.tensor, count: tl.tensor, start: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Mask of the `count` (1 or more) largest uint32 keys [WIDTH], the lowest index first among equal ones.

    A radix search for the count-th largest key, two bits a pass from bit `start` (even) + 1 down; no key may have a
    higher bit set. It stops early once the keys that share the prefix are exactly those still to be taken.
    """
    prefix = tl.full([], 0, tl.uint32)
    left = count
    same = count * 0 + WIDTH
    shift = start
    while (shift == start) | ((shift >= 0) & (same > left)):
        # 0..3 for the keys with the prefix; larger (or wrapped round) for all others.
        digit = (keys >> shift) - (prefix << 2)
        if WIDTH >= 2048:
            # Add up each thread's own keys in 32 bits first: 64-bit adds cost twice as much.
            small = tl.where(digit == 3, 1, 0) + tl.where(digit == 2, 1 << 10, 0) + tl.where(digit == 1, 1 << 20, 0)
            narrow = tl.sum(tl.reshape(small, [WIDTH // 1024, 1024]), axis=0).to(tl.int64)
            wide = (narrow & 1023) + (((narrow >> 10) & 1023) << 20) + ((narrow >> 20) << 40)
        else:
            wide = (
                tl.where(digit == 3, 1, 0).to(tl.int64)
                + (tl.where(digit == 2, 1, 0).to(tl.int64) << 20)
                + (tl.where(digit == 1, 1, 0).to(tl.int64) << 40)
            )
        totals = tl.sum(wide, axis=0)
        threes = (totals & 1048575).to(tl.int32)
        twos = ((totals >> 20) & 1048575).to(tl.int32)
        ones = (totals >> 40).to(tl.int32)
        in_three = threes >= left
        in_two = (threes + twos >= left) & (threes < left)
        in_one = (threes + twos + ones >= left) & (threes + twos < left)
        chosen = tl.where(in_three, 3, tl.where(in_two, 2, tl.where(in_one, 1, 0)))
        above = tl.where(in_three, 0, tl.where(in_two, threes, tl.where(in_one, threes + twos, threes + twos + ones)))
        left = left - above
        zeros = same - threes - twos - ones
        same = tl.where(in_three, threes, tl.where(in_two, twos, tl.where(in_one, ones, zeros)))
        prefix = (prefix << 2) + chosen.to(tl.uint32)
        shift = shift - 2
    top = keys >> (shift + 2)
    mask = (top >= prefix).to(tl.int32)
    if same > left:
        equal = (top == prefix).to(tl.int32)
        mask = tl.where(top > prefix, 1, tl.where(tl.cumsum(equal, 0) <= left, equal, 0))
    return mask


@triton.jit
def _score_keys(values: tl.tensor, forced: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """Order-preserving uint32 keys of fp32 values: 0 where the block does not exist, all ones where it is forced."""
    # NaN counts as -inf and -0 as +0, so that the order is total and equal scores have equal keys.
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) | -2147483648)
    bits = tl.where(forced, -1, bits)
    return tl.where(exists, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _evict(
    scratch: tl.tensor,
    held: tl.tensor,
    hit: tl.tensor,
    stamped: tl.tensor,
    now: tl.tensor,
    need: tl.tensor,
    slots: tl.tensor,
    BLOCKS_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
) -> tl.tensor:
    """0/1 mask [SLOTS_PAD] of the `need` least recently selected slots that no hit uses; scratch [slots] is zero."""
    s = tl.arange(0, SLOTS_PAD)
    tl.debug_barrier()
    tl.store(scratch + held, tl.full([BLOCKS_PAD], 1, tl.int32), mask=hit)
    tl.debug_barrier()
    free = (tl.load(scratch + s, mask=s < slots, other=1) == 0) & (s < slots)
    # Oldest first: the age plus one, zero where the slot is not free.
    ages = tl.where(free, tl.maximum(now - stamped, 0) + 1, 0)
    oldest = tl.max(ages, axis=0)
    start = need * 0
    while (oldest >> start) > 3:
        start += 2
    return _largest(ages.to(tl.uint32, bitcast=True), need, start, SLOTS_PAD)


# Known divisibility of a row length would give each thread neighbouring elements, a layout that the radix passes would
# have to convert; element by element they need one small exchange between warps and nothing else.
@triton.jit(do_not_specialize=["blocks", "slots", "phase", "pool_base"])
def select_kernel(
    scores: tl.tensor,
    step: tl.tensor,
    positions: tl.tensor,
    block_of_slot: tl.tensor,
    stamp: tl.tensor,
    slot_of_block: tl.tensor,
    chosen_slots: tl.tensor,
    chosen_count: tl.tensor,
    miss_src: tl.tensor,
    miss_dst: tl.tensor,
    miss_count: tl.tensor,
    victims: tl.tensor,
    kv_heads: tl.tensor,
    blocks: tl.tensor,
    slots: tl.tensor,
    phase: tl.tensor,
    pool_rows: tl.tensor,
    pool_base: tl.tensor,
    PERIODS: tl.constexpr,
    TOP_K: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
):
    pair = tl.program_id(0)
    row = pair.to(tl.int64)
    now = tl.load(step)
    t = tl.load(positions + pair // kv_heads)
    existing = tl.minimum(t // BLOCK + 1, blocks)
    m = tl.arange(0, BLOCKS_PAD)
    s = tl.arange(0, SLOTS_PAD)
    period = ((now + phase) % PERIODS).to(tl.int64)
    values = tl.load(scores + (period * tl.num_programs(0) + row) * blocks + m, mask=m < existing, other=float("-inf"))
    held = tl.load(slot_of_block + row * blocks + m, mask=m < blocks, other=-1)
    # Read before anything is written: a slot selected in this step is never a victim, so its old values do not matter.
    block_held = tl.load(block_of_slot + row * slots + s, mask=s < slots, other=-1)
    stamped = tl.load(stamp + row * slots + s, mask=s < slots, other=0)
    scratch = victims + row * slots
    tl.store(scratch + s, tl.zeros([SLOTS_PAD], tl.int32), mask=s < slots)

    forced = (m < INIT) | (m >= existing - 1 - LOCAL)
    count = tl.minimum(existing, TOP_K)
    chosen = _largest(_score_keys(values, forced, m < existing), count, count * 0 + 30, BLOCKS_PAD)
    # The next token's block must own a slot before that token's key is written.
    opened = tl.where((t + 1) % BLOCK == 0, (t + 1) // BLOCK, -1)
    opens = (m == opened) & (m < blocks)
    wanted = (chosen != 0) | opens
    missing = (wanted & (held < 0)).to(tl.int32)
    running = tl.cumsum(chosen + (missing << 16), 0)
    rank = (running & 65535) - chosen
    # Blocks that this token or the next opens have no rows in host memory; they come last among the missing.
    sums = tl.sum(missing + tl.where((m * BLOCK < t) & (missing != 0), 1 << 16, 0), axis=0)
    need = sums & 65535
    fetch = sums >> 16

    hit = wanted & (held >= 0)
    tl.store(stamp + row * slots + held, tl.zeros([BLOCKS_PAD], tl.int32) + now, mask=hit)
    tl.store(chosen_slots + row * TOP_K + rank, held, mask=hit & (chosen != 0))
    tl.store(chosen_count + row, count)
    if need > 0:
        evicted = _evict(scratch, held, hit, stamped, now, need, slots, BLOCKS_PAD, SLOTS_PAD)
        place = tl.cumsum(evicted, 0) - evicted
        tl.debug_barrier()
        # The missing blocks in ascending order, each with its place among the chosen; the i-th takes the i-th victim
        # in slot order. From here on the work is one item a slot rather than one a block.
        item = m | tl.where(chosen != 0, rank << 16, -2147483648)
        tl.store(scratch + (running >> 16) - 1, item, mask=missing != 0)
        tl.debug_barrier()
        taken = evicted != 0
        item = tl.load(scratch + place, mask=taken, other=0)
        entering = item & 65535
        old = slot_of_block + row * blocks + block_held
        # A victim's old block is not wanted, hence never one of those entering.
        tl.store(old, tl.full([SLOTS_PAD], -1, tl.int32), mask=taken & (block_held >= 0))
        tl.store(slot_of_block + row * blocks + entering, s, mask=taken)
        tl.store(block_of_slot + row * slots + s, entering, mask=taken)
        tl.store(stamp + row * slots + s, tl.zeros([SLOTS_PAD], tl.int32) + now, mask=taken)
        tl.store(chosen_slots + row * TOP_K + (item >> 16), s, mask=taken & (item >= 0))
        if fetch > 0:
            begin = tl.atomic_add(miss_count, fetch, sem="relaxed")
            listed = taken & (place < fetch)
            source = (pool_base.to(tl.int64) + row * blocks + entering) % pool_rows
            tl.store(miss_src + begin + place, source.to(tl.int32), mask=listed)
            tl.store(miss_dst + begin + place, (row * slots + s).to(tl.int32), mask=listed)
