"""Whether a batch fits in the memory that is there now, asked before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from sparda.engine.config import Config, Workload
from sparda.engine.errors import SpardaError
from sparda.engine.memory import memory_of
from sparda.engine.partial import SAMPLE
from sparda.engine.policies import side_data
from sparda.engine.prefill import prefill_bytes
from sparda.engine.shapes import ModelShape, SparseSpec

GIB = 1 << 30
HOST_SPARE = 0.95
"""Share of the available host memory that may be pinned: locking the last of it stops the machine."""


def check_room(shape: ModelShape, spec: SparseSpec, workload: Workload, config: Config, device: torch.device) -> None:
    """Refuse a batch that does not fit beside the weights, which are on the device already.

    Counts the KV cache, what a policy keeps besides, the buffers of a step and the prefill of one prompt as long as
    the context. Raises SpardaError with what is needed, what is there and what to lower.
    """
    memory = memory_of(shape, spec, workload, config)
    sample = SAMPLE if "partial" in side_data(config) else 0
    kept = memory.resident_bytes + memory.compressed_bytes + memory.side_bytes
    kept += prefill_bytes(shape, workload.context_tokens, sample=sample)
    if device.type == "cuda":
        _require("GPU memory", kept + memory.workspace_bytes, gpu_free_bytes(device), workload)
        _require("host memory to pin", memory.pinned_bytes, host_free_bytes(), workload)
    else:
        _require("host memory", kept + memory.pinned_bytes, host_free_bytes(), workload)


def gpu_free_bytes(device: torch.device) -> int:
    """What the driver has free and what torch holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def host_free_bytes() -> int | None:
    """Host memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return int(kib * 1024 * HOST_SPARE)


def _require(what: str, needed: int, there: int | None, workload: Workload) -> None:
    if there is not None and needed > there:
        raise SpardaError(
            f"{workload.batch} rows of {workload.context_tokens} tokens need {needed / GIB:.1f} GiB of {what}, and "
            f"{there / GIB:.1f} GiB can be had; lower the rows, the longest prompt or the new tokens."
        )
