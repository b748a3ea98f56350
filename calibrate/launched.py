"""Which kernels each kind of operation launches: how a profiler's records are known for operations.

A profiler names a kernel by its function and knows of no layer. Held to the kernels themselves by a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sparda.engine.errors import SpardaError

KERNELS: Mapping[str, tuple[str, ...]] = {
    "embed": ("_embed_kernel",),
    "norm": ("_add_norm_kernel",),
    "qkv": ("_linear_kernel",),
    "append": ("_append_kernel",),
    "oproj": ("_linear_kernel",),
    "ffn_norm": ("_add_norm_kernel",),
    "gateup": ("_linear_kernel",),
    "down": ("_linear_kernel",),
    "final_norm": ("_add_norm_kernel",),
    "lm_head": ("_linear_kernel",),
    "sample": ("_chunk_kernel", "_pick_kernel", "_advance_kernel"),
    "attention": ("_block_attention_kernel",),
    "biased_attention": ("_block_attention_kernel",),
    "dense_attention": ("_block_attention_kernel",),
    "score": ("_forecast_kernel",),
    "headscore": ("_stats_kernel", "_pool_kernel"),
    "select": ("select_kernel",),
    "prefetch": ("_prefetch_kernel",),
    "writeback": ("_write_newest_kernel",),
    "bias": ("_bias_kernel",),
    "shortlist": ("_shortlist_kernel",),
    "shallow_score": ("_hidden_kernel", "_block_kernel"),
}
"""Kernel functions by kind, in the order in which an operation launches them, each once."""

MERGE = "_merge_kernel"
MERGING = ("attention", "biased_attention", "dense_attention")
"""Kinds that launch MERGE too where their sums are split between thread blocks: all operations of a kind or none."""

FIRST = "_embed_kernel"
"""What every step launches first, and nothing else does."""

IGNORED: Mapping[str, str] = {
    "Memset": "a buffer that the graph itself clears",
}
"""Beginnings of names that belong to no operation, and what they are."""

FUNCTIONS = frozenset(name for names in KERNELS.values() for name in names) | {MERGE}

_SUFFIX = re.compile(r"(_[0-9A-Za-z]+)*")


def function_of(kernel: str) -> str | None:
    """The function of a kernel as a profiler names it, maybe with a suffix of a compiler; None where it is ignored.

    Raises SpardaError for a kernel that no operation launches.
    """
    if kernel in FUNCTIONS:
        return kernel
    fitting = [f for f in FUNCTIONS if kernel.startswith(f) and _SUFFIX.fullmatch(kernel[len(f) :])]
    if fitting:
        return max(fitting, key=len)
    if kernel.startswith(tuple(IGNORED)):
        return None
    raise SpardaError(
        f"kernel {kernel!r} belongs to no operation; known are {', '.join(sorted(FUNCTIONS))}. Say in "
        "calibrate/launched.py which kind launches it, or that it is ignored."
    )
