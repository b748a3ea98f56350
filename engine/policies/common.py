"""What every policy's step has in common: prologue, projections, attention block, feed-forward, epilogue."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparda.engine.config import Config, Workload
from sparda.engine.plan import COPY, HOST, MAIN, PREFETCH, Plan, PlanBuilder
from sparda.engine.shapes import ModelShape, SparseSpec
from sparda.engine.work import Sizes


@dataclass(slots=True)
class StepBuilder:
    """Builds one step layer by layer; a policy decides where selection and fetching go."""

    shape: ModelShape
    spec: SparseSpec
    workload: Workload
    config: Config
    ops: PlanBuilder = field(default_factory=PlanBuilder)
    sizes: Sizes = field(init=False)
    _last_append: int = 0
    _last_attended: int = -1
    _early: set[int] = field(default_factory=set)
    """Layers that are reported before the layer two before them has attended."""
    _staged: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By layer the upload and the scatter of what was gathered for it."""

    def __post_init__(self) -> None:
        # One for the whole step: it remembers what every layer asks for again.
        self.sizes = Sizes(self.shape, self.spec, self.workload, self.config)

    @property
    def by_host(self) -> bool:
        """Whether missing blocks come by way of the host, which must be told of them."""
        return self.config.path not in ("", "uva")

    def prologue(self) -> None:
        self.ops.add("embed", self.sizes.embed())

    def project(self, layer: int, queries: int) -> int:
        """Norm, fused projection, rope + append of one layer; ``queries`` selection queries after Q, K, V."""
        width = self.shape.q_width + (2 + queries) * self.shape.kv_width
        self.ops.add("norm", self.sizes.norm(), layer=layer)
        self.ops.add("qkv", self.sizes.linear(width, self.shape.d_model), layer=layer)
        self._last_append = self.ops.add("append", self.sizes.append(width), layer=layer)
        return self._last_append

    def choose(self, kind: str, layer: int, streams: tuple[str, str], after: int) -> int:
        """Score (``score`` or ``headscore``) and select the blocks of ``layer``, each on its stream of ``streams``.

        Returns the select's index.
        """
        work = self.sizes.score() if kind == "score" else self.sizes.headscore()
        scored = self.ops.add(kind, work, layer=layer, stream=streams[0], after=[after])
        return self.ops.add("select", self.sizes.select(), layer=layer, stream=streams[1], after=[scored])

    def report(self, layer: int, stream: str, after: int) -> int:
        """Tell the host what ``layer`` lacks, on the stream that chose its blocks.

        Returns the index that ``fetch`` is to wait for: of the report, or of the choice where the host has no part.
        """
        if not self.by_host:
            return after
        if layer - 2 > self._last_attended:
            self._early.add(layer)
        return self.ops.add("report", self.sizes.report(), layer=layer, stream=stream, after=[after])

    def fetch(self, layer: int, stream: str, after: int) -> int:
        """Bring in what ``layer`` lacks, by the configured path, once ``report`` (``after``) is done.

        Kernels of the path run on ``stream``. Returns the index of the last operation. By way of the host the plan's
        order counts: the host issues nothing that comes later in the plan before it has done its own part here.
        """
        if not self.by_host:
            return self.ops.add("prefetch", self.sizes.prefetch(), layer=layer, stream=stream, after=[after])
        if self.config.path == "gather":
            return self._gather(layer, stream, after)
        listed = self.ops.add("enlist", self.sizes.enlist(), layer=layer, stream=HOST, after=[after])
        # By now all that has used these slots is done: the report came after it. So the copies wait for nothing else.
        return self.ops.add(self.config.path, self.sizes.copy_blocks(), layer=layer, stream=COPY, after=[listed])

    def _gather(self, layer: int, stream: str, after: int) -> int:
        """Gather on the host, upload, and spread over the slots; the index of the last.

        There are two staging buffers on either side, used in turn by even and odd layers. Where a layer's report came
        after the attention of the layer two before it, which had waited for that layer's blocks, its buffers are free
        again with no further wait; where choices run farther ahead, the host's waits for the upload out of it and the
        GPU's for the scatter.
        """
        upload, scatter = self._staged.get(layer - 2, (None, None)) if layer in self._early else (None, None)
        read = [after] if upload is None else [after, upload]
        gathered = self.ops.add("gather", self.sizes.gather(), layer=layer, stream=HOST, after=read)
        spread = [gathered] if scatter is None else [gathered, scatter]
        uploaded = self.ops.add("upload", self.sizes.upload(), layer=layer, stream=COPY, after=spread)
        scattered = self.ops.add("scatter", self.sizes.scatter(), layer=layer, stream=stream, after=[uploaded])
        self._staged[layer] = (uploaded, scattered)
        return scattered

    def attend(self, layer: int, after: list[int], kind: str = "attention") -> None:
        """Attention (also ``biased_attention``) over the chosen blocks once ``after`` is done, then all after it."""
        work = self.sizes.attention() if kind == "attention" else self.sizes.biased_attention()
        self.ops.add(kind, work, layer=layer, after=after)
        self._close(layer)

    def attend_densely(self, layer: int) -> None:
        """Attention over every block of the context, output projection, feed-forward."""
        self.ops.add("dense_attention", self.sizes.dense_attention(), layer=layer)
        self._close(layer)

    def _close(self, layer: int) -> None:
        s, add = self.shape, self.ops.add
        self._last_attended = layer
        add("oproj", self.sizes.linear(s.d_model, s.q_width), layer=layer)
        add("ffn_norm", self.sizes.norm(), layer=layer)
        add("gateup", self.sizes.gated(s.ffn, s.d_model), layer=layer)
        add("down", self.sizes.linear(s.d_model, s.ffn), layer=layer)

    def epilogue(self, offloaded_layers: int) -> Plan:
        """Final norm, head, sampling; the newest token of every offloaded layer goes to host memory meanwhile."""
        waits: list[int] = []
        if offloaded_layers:
            work = self.sizes.writeback(offloaded_layers)
            waits = [self.ops.add("writeback", work, stream=PREFETCH, after=[self._last_append])]
        self.ops.add("final_norm", self.sizes.norm())
        self.ops.add("lm_head", self.sizes.linear(self.shape.vocab, self.shape.d_model))
        self.ops.add("sample", self.sizes.sample(), stream=MAIN, after=waits)
        return self.ops.plan(self.shape, self.spec, self.workload, self.config)
