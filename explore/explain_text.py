"""An explanation in words and numbers."""

from __future__ import annotations

from sparda.explore.explain import RULE, SLOWED_PART, Explanation, Gain, Path, Regime
from sparda.explore.text import columns, count, percent, wrapped


def explanation_text(e: Explanation, measured_us: dict[str, float] | None = None) -> str:
    """Parts, critical path, regime and gains; beside the parts those of a measured step, if given."""
    return "\n".join(
        [
            "Where the time goes; the parts add up to the step:",
            "",
            _parts(e, measured_us),
            "",
            wrapped(path_sentence(e.path)),
            "",
            wrapped(regime_sentence(e.regime)),
            "",
            "One thing made better at a time, simulated again:",
            *(wrapped(gain_sentence(g), "  ") for g in e.gains),
        ]
    )


def _parts(e: Explanation, measured_us: dict[str, float] | None) -> str:
    headers = ["part", "us", "of step"]
    rows = [[part, f"{us:.0f}", percent(us / e.step_us)] for part, us in e.parts_us.items() if us or measured_us]
    if measured_us is None:
        return columns(headers, rows)
    step = sum(measured_us.values())
    for row in rows:
        us = measured_us.get(row[0], 0.0)
        row += ["-", "-"] if row[0] == SLOWED_PART else [f"{us:.0f}", percent(us / step)]
    # What slowed a measured operation is in the operation's own part: nobody measured it alone in that same step.
    return columns([*headers, "measured us", "of its step"], rows)


def path_sentence(p: Path) -> str:
    """The critical path in a sentence."""
    where = ", ".join(f"{us:.0f} us on {stream}" for stream, us in p.us.items() if us)
    turns = {0: "never changes streams", 1: "changes streams once"}.get(p.changes, f"changes streams {p.changes} times")
    copies = f"{p.copies_us:.0f} us of it are copies" if p.copies_us else "no copy is on it"
    return (
        f"Critical path: {count(p.operations, 'operation')}, {where or '0 us'}, and {p.gaps_us:.0f} us between and "
        f"after them. It {turns}; {copies}."
    )


def regime_sentence(r: Regime) -> str:
    """What bounds the step, the numbers that say so, and the rule."""
    return (
        f"This step is {r.word}. At the HBM's full rate the weights take {_ms(r.weights_us)} and keys and values "
        f"{_ms(r.kv_us)}; the main stream spends {_ms(r.latency_us)} on all else and waits {_ms(r.copies_us)} for "
        f"copies. The link needs {_ms(r.link_us)} for its bytes, the main stream {_ms(r.main_us)} for its own work. "
        f"Rule: {RULE}."
    )


def gain_sentence(g: Gain) -> str:
    """What one improvement would bring."""
    change = percent(-g.gain, sign=True) if abs(g.gain) >= 0.0005 else "no change"
    return f"With {g.about}, the step takes {_ms(g.step_us)}, {change}."


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms"
