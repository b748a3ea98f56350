"""Runs a plan for real: binds each kind of operation to its kernel and captures the step.

In one CUDA graph, or in pieces where the host has work in the middle of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sparda.engine.graph import Replayable, captured
from sparda.engine.kinds import bindings
from sparda.engine.lanes import Binding, CudaLanes, Lanes, SerialLanes, issue
from sparda.engine.pieces import HostLanes, Pieces
from sparda.engine.plan import HOST, Plan
from sparda.engine.run import Run
from sparda.engine.tiers import Tiers
from sparda.engine.trace import SelectionTrace
from sparda.engine.weights import Weights


class Decoder:
    """One batch that decodes greedily under one plan.

    ``tokens`` int64 [B] holds the token each sequence feeds next; a step reads it and leaves the sampled one there.
    Selection reads the model's own scores, or ``trace`` in their place.
    """

    def __init__(self, plan: Plan, weights: Weights, tiers: Tiers, trace: SelectionTrace | None = None) -> None:
        self.run = Run(plan, weights, tiers, trace)
        self.plan, self.tiers, self.trace = plan, tiers, trace
        self.graph: Replayable | None = None
        self.bindings: Mapping[str, Binding] = bindings(self.run)

    @property
    def tokens(self) -> Tensor:
        return self.run.tokens

    @property
    def logits(self) -> Tensor:
        """[B, vocab] of the last step."""
        return self.run.logits

    @property
    def chosen_slots(self) -> Tensor:
        return self.run.chosen_slots

    @property
    def chosen_count(self) -> Tensor:
        return self.run.chosen_count

    def issue(self, lanes: Lanes | None = None) -> None:
        """Run one step without a graph, on one stream unless ``lanes`` says otherwise."""
        issue(self.plan, self.bindings, lanes or SerialLanes())

    def capture(self) -> None:
        """Capture the step, in pieces where the plan has work for the host. Runs one first: kernels are compiled."""
        self.issue()
        if HOST in self.plan.streams:
            self.graph = Pieces(self.plan, self.bindings, HostLanes(self.plan.streams))
        else:
            self.graph = captured(lambda: self.issue(CudaLanes()))

    def step(self) -> None:
        """Decode one token per sequence; returns when it is enqueued."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.issue()
