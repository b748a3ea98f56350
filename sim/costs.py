"""What the simulator asks of a calibrated machine: how long an operation takes alone, and beside others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sparda.engine.plan import Op, Plan


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, its memory, its link and its host, as far as a decode step meets them. Bandwidths in GB/s (1e9 B/s).

    ``link_h2d_gb_s`` is what thread blocks that read host memory get, ``engine_h2d_gb_s`` what a copy engine gets;
    ``sm_read_gb_s`` what one multiprocessor reads from GPU memory, ``shared_kib_per_sm`` its shared memory. 0: not
    known.
    """

    name: str
    gpu: str
    sms: int
    hbm_gb_s: float
    link_h2d_gb_s: float
    link_d2h_gb_s: float
    hbm_capacity_bytes: int
    host_pinned_bytes: int
    engine_h2d_gb_s: float = 0.0
    sm_read_gb_s: float = 0.0
    shared_kib_per_sm: int = 0


class CostModel(Protocol):
    """Costs of operations on one machine. Times in nanoseconds, rates in bytes per nanosecond (= GB/s)."""

    @property
    def machine(self) -> Machine: ...

    def alone_ns(self, op: Op, plan: Plan) -> float:
        """Duration of an operation (any kind but ``prefetch``) with the machine to itself; on the GPU, in a graph.

        Of the host's own operations, the host's time; of the copy engine's, from its start to its last byte.
        """
        ...

    def slowdown(self, op: Op, plan: Plan, ctas: int) -> float:
        """Factor >= 1 on a compute operation's duration while a prefetch of ``ctas`` CTAs runs beside it."""
        ...

    def transfer_start_ns(self, plan: Plan) -> float:
        """From a prefetch's start to its first byte; paid even with nothing to move."""
        ...

    def transfer_gb_s(self, plan: Plan, ctas: int) -> float:
        """Rate of a prefetch alone while ``ctas`` of its CTAs run, for the configuration's stages; at most the link."""
        ...

    def transfer_share(self, op: Op, plan: Plan, ctas: int) -> float:
        """Factor in (0, 1] on the rate of ``ctas`` prefetch CTAs while compute operation ``op`` runs beside them."""
        ...

    def places(self, op: Op, plan: Plan) -> int | None:
        """Prefetch CTAs that can start while compute operation ``op`` runs; None where it hinders none for long.

        Those that find no place start when ``op`` ends.
        """
        ...

    def join_ns(self, op: Op, plan: Plan) -> float:
        """Extra latency of operation ``op`` because it waits for another stream (an edge of the CUDA graph).

        Of the host's operations: from the end of what they wait for to the moment when the host has seen it.
        """
        ...

    def issue_ns(self, op: Op, plan: Plan) -> float:
        """The host's time to issue the action that ``op`` begins, in a step cut into actions (``engine.actions``).

        A copy engine's operation may begin as soon as the host turns to it.
        """
        ...

    def step_ns(self, plan: Plan) -> float:
        """What every step pays outside its operations: graph launch, first and last kernel."""
        ...
