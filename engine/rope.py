"""A model's rotary scaling as what the engine's rope takes: one divisor per frequency, one amplitude. No torch here.

Formulas: linear (position interpolation), Llama 3.1's wavelength bands, YaRN (arXiv 2309.00071, section 3) and LongRoPE
(arXiv 2402.13753), as Hugging Face's configurations state them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparda.engine.errors import SpardaError

TYPES = ("default", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Fields of ``ModelShape``: frequency i is theta^(-2i / head_dim) / factors[i]; cosine and sine times amplitude."""

    theta: float
    factors: tuple[float, ...] = ()
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """The ``rope_scaling`` or ``rope_parameters`` table of a configuration; ``where`` begins every complaint.

    ``max_context`` is the model's ``max_position_embeddings``, which stands in for a missing original length.
    """

    table: Mapping[str, object]
    theta: float
    head_dim: int
    max_context: int
    where: str

    @property
    def kind(self) -> str:
        """Its type under the new key or the old one; a table without either scales nothing."""
        return str(self.table.get("rope_type") or self.table.get("type") or "default")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises SpardaError where it is missing without a default, or not one."""
        value = self.table.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise SpardaError(f"{self.where}: {key} of {self.kind} rope is {value!r}; a positive number is wanted.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """head_dim / 2 positive numbers. Raises SpardaError where they are not that."""
        value, half = self.table.get(key), self.head_dim // 2
        if not isinstance(value, list | tuple) or len(value) != half:
            given = f"{len(value)} values" if isinstance(value, list | tuple) else repr(value)
            raise SpardaError(f"{self.where}: {key} of longrope is {given}; a list of {half} numbers is wanted.")
        if any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < math.inf for v in value):
            raise SpardaError(f"{self.where}: {key} of longrope holds something else than positive numbers.")
        return tuple(float(v) for v in value)

    @property
    def original(self) -> float:
        """Tokens that the model was first trained on."""
        length = self.number("original_max_position_embeddings", float(self.max_context))
        if length <= 1.0:
            raise SpardaError(f"{self.where}: original_max_position_embeddings is {length:g}; it must be above 1.")
        return length


def rope_of(scaling: Scaling) -> Rope:
    """Divisors and amplitude of a scaling.

    Raises SpardaError for a type that is not one of ``TYPES`` or lacks what its formula needs. ``dynamic`` is refused
    because its frequencies change as the context grows, and cached keys are rotated once.
    """
    s = scaling
    if s.theta <= 1.0:
        raise SpardaError(f"{s.where}: rope_theta is {s.theta:g}; it must be above 1.")
    if s.kind == "default":
        return Rope(s.theta)
    if s.kind == "linear":
        return Rope(s.theta, (s.number("factor"),) * (s.head_dim // 2))
    if s.kind == "llama3":
        return Rope(s.theta, _llama3(s))
    if s.kind == "yarn":
        return Rope(s.theta, _yarn(s), _yarn_amplitude(s))
    if s.kind == "longrope":
        # One table serves prompts of every length, since cached keys cannot be rotated again when a context grows past
        # the original length: so the long factors are taken wherever the model reaches beyond it.
        key = "long_factor" if s.max_context > s.original else "short_factor"
        return Rope(s.theta, s.numbers(key), _longrope_amplitude(s))
    raise SpardaError(f"{s.where}: rope of type {s.kind!r} is not known; known types: {', '.join(TYPES)}.")


def _frequencies(s: Scaling) -> list[float]:
    """Radians per token of each pair, unscaled."""
    return [s.theta ** (-2 * i / s.head_dim) for i in range(s.head_dim // 2)]


def _llama3(s: Scaling) -> tuple[float, ...]:
    """Long waves are slowed by the factor, short ones left alone, with a linear blend of frequencies between."""
    factor, low, high = s.number("factor"), s.number("low_freq_factor"), s.number("high_freq_factor")
    if low >= high:
        raise SpardaError(f"{s.where}: low_freq_factor {low:g} is not below high_freq_factor {high:g}.")
    turns = [s.original * f / (2 * math.pi) for f in _frequencies(s)]
    kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
    return tuple(1.0 / (k + (1.0 - k) / factor) for k in kept)


def _yarn(s: Scaling) -> tuple[float, ...]:
    """A ramp over the pairs: those that turn more than beta_fast times are kept, below beta_slow interpolated."""
    factor = _yarn_factor(s)

    def pair(turns: float) -> float:
        return s.head_dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = pair(s.number("beta_fast", 32.0)), pair(s.number("beta_slow", 1.0))
    if s.table.get("truncate") is not False:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, s.head_dim - 1.0)
    width = high - low or 0.001
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(s.head_dim // 2)]
    return tuple(1.0 / (r / factor + (1.0 - r)) for r in ramp)


def _yarn_factor(s: Scaling) -> float:
    return s.number("factor", s.max_context / s.original)


def _yarn_amplitude(s: Scaling) -> float:
    if s.table.get("attention_factor") is not None:
        return s.number("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(1.0, _yarn_factor(s))) + 1.0

    if s.table.get("mscale") and s.table.get("mscale_all_dim"):
        return scale(s.number("mscale")) / scale(s.number("mscale_all_dim"))
    return scale(1.0)


def _longrope_amplitude(s: Scaling) -> float:
    if s.table.get("attention_factor") is not None:
        return s.number("attention_factor")
    factor = s.number("factor", s.max_context / s.original)
    return math.sqrt(1.0 + math.log(factor) / math.log(s.original)) if factor > 1.0 else 1.0
