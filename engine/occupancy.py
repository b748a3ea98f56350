"""How operations fill a GPU: the thread blocks that attention is cut into, and the multiprocessors these leave free."""

from __future__ import annotations

import math

MAX_SPLITS = 32
"""Most thread blocks that share one KV head: beyond it, merging their results costs more than it saves."""
MIN_BLOCKS = 4
"""Fewest blocks worth a thread block of their own: with fewer, starting and merging it outweigh its reading."""


def attention_splits(heads: int, top_k: int, sms: int) -> int:
    """Thread blocks to give each of ``heads`` (sequence, KV head) pairs that attend over ``top_k`` blocks each.

    As many as fit the ``sms`` multiprocessors at once, so that none waits for a second turn; at most 32, each with at
    least four blocks to read, and none without any. Raises ValueError unless all three are at least 1.
    """
    if min(heads, top_k, sms) < 1:
        raise ValueError(f"heads, top_k and sms must be at least 1, got {heads}, {top_k} and {sms}")
    splits = max(1, min(sms // heads, top_k // MIN_BLOCKS, MAX_SPLITS))
    return math.ceil(top_k / math.ceil(top_k / splits))


def free_beside_attention(heads: int, top_k: int, sms: int) -> int:
    """Multiprocessors that an attention leaves to others for as long as it runs: each thread block has one to itself.

    0 where its thread blocks come in several turns.
    """
    return max(0, sms - heads * attention_splits(heads, top_k, sms))
