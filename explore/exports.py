"""A CTA table in the formats others read: Markdown, JSON, TOML, CSV and a POSIX shell function."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable, Mapping

from sparda.engine.errors import SpardaError
from sparda.engine.loader import to_plain
from sparda.explore.quality import Quality
from sparda.explore.table import CtaTable, TableRow
from sparda.explore.table_text import table_markdown, table_text
from sparda.explore.text import percent, tokens_label

FUNCTION = "sparda_prefetch_ctas"


def table_json(table: CtaTable) -> str:
    """The table as one JSON object: ``to_plain`` of CtaTable, with a schema."""
    return json.dumps({"schema": 1, **table.to_dict()}, indent=1) + "\n"


def table_csv(table: CtaTable) -> str:
    """One line for each row; columns are TableRow's fields, tied CTA counts separated by spaces.

    With a quality profile those of Quality too, ``quality.recall`` and so on.
    """
    out = io.StringIO()
    rated = [n for n in Quality.__dataclass_fields__ if n != "spread"] if table.rated else []
    unrated = () if rated else ("quality", "floor_reason")
    names = [n for n in TableRow.__dataclass_fields__ if n != "quality" and n not in unrated]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["profile", "tier", "gpu", "model", *names, *(f"quality.{n}" for n in rated)])
    for row in table.rows:
        plain = to_plain(row)
        values = [*(plain[n] for n in names), *(getattr(row.quality, n, None) for n in rated)]
        writer.writerow(
            [
                table.profile,
                table.tier,
                table.gpu,
                table.model,
                *(" ".join(map(str, v)) if isinstance(v, list) else v for v in values),
            ]
        )
    return out.getvalue()


def table_toml(table: CtaTable) -> str:
    """The table as TOML: keys of CtaTable, then an array of tables ``rows``."""
    plain = {"schema": 1, **table.to_dict()}
    rows = plain.pop("rows")
    text = _toml_lines(plain)
    assert isinstance(rows, list)
    return text + "".join(f"\n[[rows]]\n{_toml_lines(row)}" for row in rows)


def _toml_lines(table: Mapping[str, object]) -> str:
    # Scalars and flat lists of them are written alike in JSON and TOML; TOML has no null, so such a key is left out.
    return "".join(f"{k} = {_toml_value(v)}\n" for k, v in table.items() if v is not None)


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(value, ensure_ascii=False)


def gpu_names(table: CtaTable) -> list[str]:
    """Names under which the shell function knows the profile's GPU: exact ones, since a near one is another GPU."""
    names = [table.gpu, table.gpu.removeprefix("NVIDIA "), table.profile, table.profile.split(".")[0]]
    return list(dict.fromkeys(n for n in names if n))


def shell_snippet(table: CtaTable) -> str:
    """Lines for a launch script: PREFETCH_CTAS, which the public SparDA launcher reads, set from the table."""
    gpu = shlex.quote(table.gpu)
    return f'PREFETCH_CTAS=$({FUNCTION} {gpu} "${{BATCH:-16}}" "${{CONTEXT:-131072}}") && export PREFETCH_CTAS\n'


def table_shell(table: CtaTable) -> str:
    """A POSIX shell function GPU BATCH CONTEXT -> CTA count, for the table's reference miss rate.

    Between cells it takes the next larger context and batch, above the last cell the last one.
    """
    # With a selection every cell has the one miss rate that follows from it.
    rows = [r for r in table.rows if table.selection or r.miss_rate == table.miss_rate]
    contexts = sorted({r.context_tokens for r in rows})
    body = _branches("$3", [(c, _batches([r for r in rows if r.context_tokens == c])) for c in contexts])
    names = "|".join(shlex.quote(n) for n in gpu_names(table))
    here = f"no table for GPU '$1'; this one is for {_in_double(table.gpu)}"
    return "\n".join(
        [
            f"# {FUNCTION} GPU BATCH CONTEXT_TOKENS: CTAs of the prefetch kernel, {_shell_misses(table)}.",
            f"# Profile {table.label}, model {table.model}. Counts go with {_lookaheads(rows)}.",
            "# Between cells the next larger one counts, above the largest the largest. Source this file, then:",
            *(f"#   {line}" for line in shell_snippet(table).splitlines()),
            f"{FUNCTION}() {{",
            '    case "$1" in',
            f"    {names}) ;;",
            f'    *) echo "{FUNCTION}: {here}" >&2; return 1 ;;',
            "    esac",
            '    case "$#:$2:$3" in',
            "    3:*[!0-9:]*|3::*|3:*:)",
            f"        echo \"{FUNCTION}: batch '$2' and context '$3' must be whole numbers\" >&2; return 1 ;;",
            "    3:*) ;;",
            f'    *) echo "usage: {FUNCTION} GPU BATCH CONTEXT_TOKENS" >&2; return 1 ;;',
            "    esac",
            *("    " + line for line in body),
            "}",
            "",
        ]
    )


def _shell_misses(table: CtaTable) -> str:
    return "resident blocks as the table has them" if table.selection else f"{percent(table.miss_rate)} misses"


def _lookaheads(rows: list[TableRow]) -> str:
    """The lookahead that the counts were chosen with, and where it is another."""
    known = [r.lookahead for r in rows]
    usual = max(sorted(set(known)), key=known.count)
    others: dict[tuple[int, int], list[str]] = {}
    for r in rows:
        if r.lookahead != usual:
            others.setdefault((r.lookahead, r.context_tokens), []).append(str(r.batch))
    return "; ".join(
        [
            f"lookahead {usual}",
            *(f"{n} at {tokens_label(c)} for batch {', '.join(batches)}" for (n, c), batches in others.items()),
        ]
    )


def _in_double(text: str) -> str:
    """``text`` inside a double-quoted shell word."""
    return "".join("\\" + c if c in '\\"$`' else c for c in text)


def _batches(rows: list[TableRow]) -> list[str]:
    return _branches("$2", [(r.batch, [f"echo {r.prefetch_ctas}"]) for r in sorted(rows, key=lambda r: r.batch)])


def _branches(value: str, branches: list[tuple[int, list[str]]]) -> list[str]:
    """Shell lines that take the first branch whose limit is at least ``value``, else the last."""
    *upper, (_, rest) = branches
    if not upper:
        return rest
    lines = []
    for place, (limit, body) in enumerate(upper):
        lines.append(f'{"elif" if place else "if"} [ "{value}" -le {limit} ]; then')
        lines += ["    " + line for line in body]
    return [*lines, "else", *("    " + line for line in rest), "fi"]


FORMATS: dict[str, Callable[[CtaTable], str]] = {
    "text": lambda t: table_text(t) + "\n",
    "md": table_markdown,
    "json": table_json,
    "toml": table_toml,
    "csv": table_csv,
    "sh": table_shell,
}


def export(table: CtaTable, fmt: str) -> str:
    """The table in one of FORMATS."""
    if fmt not in FORMATS:
        raise SpardaError(f"table format {fmt!r} is not known; allowed are {', '.join(FORMATS)}.")
    return FORMATS[fmt](table)
