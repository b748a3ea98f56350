"""What carries out each kind of operation: modules with KINDS, the kinds they know, and bind(run)."""

from __future__ import annotations

from types import ModuleType

from sparda.engine.kinds import attention, blocks, copies, eviction, gather, model, partial, report, selection, shallow
from sparda.engine.lanes import Binding
from sparda.engine.run import Run

MODULES: tuple[ModuleType, ...] = (
    model, attention, selection, copies, partial, report, gather, blocks, eviction, shallow,
)  # fmt: skip


def bindings(run: Run) -> dict[str, Binding]:
    """A callable for every kind in the run's plan. Modules whose kinds it has not get no buffers."""
    wanted = {op.kind for op in run.plan}
    found: dict[str, Binding] = {}
    for module in MODULES:
        if wanted & set(module.KINDS):
            found |= module.bind(run)
    return found
