"""Tables of the benchmarks: the columns that a script prints, and that readme.py writes into README.md.

A column is its head and a format of the row's values. Of several formats the first counts whose values the row has.
To add a table: an entry in TABLES under the name of its results' file, and a pair of markers in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
MIB = 1 << 20
SHAPES = {
    "vqa": "image, short answers",
    "wide": "image, many answers",
    "long": "image, long answers",
    "text": "text, long answers",
}
SWEEPS = {
    "completions": "completions of a prompt with an image",
    "completions_text": "completions of a text as long",
    "prompt": "tokens of the prompt",
    "side": "patches of the image",
    "images": "images of the prompt",
}


def ranged(key: str) -> tuple[str, str]:
    """Return the formats of a median with its range; a row of one sitting has the value alone."""
    return f"{{{key}:.2f}} ({{{key}_low:.2f}} to {{{key}_high:.2f}})", f"{{{key}:.2f}}"


def same(rows: Sequence[Row]) -> Iterable[Row]:
    return rows


def by_part(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield a row for each part of a step: `generate_ours` of the result is `ours` of its part `generate`."""
    for row in rows:
        for part in ("generate", "learner", "step"):
            values = {k.removeprefix(f"{part}_"): v for k, v in row.items() if k.startswith(f"{part}_")}
            yield {**row, "part": part, **values}


def shapes_by_name(rows: Sequence[Row]) -> Iterable[Row]:
    return ({**row, "shape": SHAPES.get(row["shape"], row["shape"])} for row in rows)


def in_mib(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield the rows with their bytes in MiB."""
    sizes = ("bytes_head_and_gradient", "bytes_logits", "extra_ours", "extra_trl", "chunk_bytes")
    return ({**row, **{key: row[key] / MIB for key in sizes}} for row in rows)


def lines_of_sweeps(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield the fitted line of each sweep, with the points that it was fitted to."""
    for line in (row for row in rows if row["x"] is None):
        points = [row for row in rows if row["sweep"] == line["sweep"] and row["x"] is not None]
        yield {
            **line,
            "sweep": SWEEPS[line["sweep"]],
            "points": ", ".join(f"{p['x']:,}" for p in points),
            "measured": ", ".join(f"{p['seconds']:.2f}" for p in points),
        }


def against_first(rows: Sequence[Row]) -> Iterable[Row]:
    """Yield the rows with the time of the first over their own."""
    return ({**row, "speed": rows[0]["seconds"] / row["seconds"]} for row in rows)


@dataclass(frozen=True)
class Table:
    """Columns of a table by head, and the function that makes its rows from those of the results."""

    columns: Mapping[str, str | tuple[str, ...]]
    rows: Callable[[Sequence[Row]], Iterable[Row]] = same

    def cells(self, rows: Sequence[Row]) -> list[list[str]]:
        """Return the text of each cell, by row; "not measured" if the row lacks the value."""
        return [[cell(formats, row) for formats in self.columns.values()] for row in self.rows(rows)]

    def with_heads(self, rows: Sequence[Row]) -> list[list[str]]:
        return [[*self.columns], *self.cells(rows)]


def cell(formats: str | tuple[str, ...], row: Row) -> str:
    """Return the first of the formats whose values the row has.

    >>> cell(("{ratio_low:.1f}", "{ratio:.1f}"), {"ratio": 2.0})
    '2.0'
    """
    for text in (formats,) if isinstance(formats, str) else formats:
        try:
            return text.format_map(row)
        except KeyError:
            continue
    return "not measured"


SIZES = {key: f"{{{key}}}" for key in "GTL"}
SECONDS = {"ours, s": "{seconds_ours:.3f}", "TRL, s": "{seconds_trl:.3f}"}
TABLES: dict[str, Table] = {
    "learner": Table(
        {
            "shape": "{shape}", **SIZES, **SECONDS, "TRL / ours": ranged("ratio"),
            "with blocks kept": ranged("kept_ratio"),
            "ours / bound": ranged("ours_bound"), "TRL / bound": ranged("trl_bound"),
        },
        shapes_by_name,
    ),
    "hybrid": Table(
        {
            "shape": "{shape}", **SIZES, "ours, s": "{seconds_ours:.3f}", "plain, s": "{seconds_plain:.3f}",
            "TRL, s": "{seconds_trl:.3f}", "plain / ours": "{plain_ratio:.2f}", "TRL / ours": "{trl_ratio:.2f}",
        },
        shapes_by_name,
    ),
    "videos": Table(
        {
            "frames": "{frames}", "side": "{side}", **SIZES, "ours, s": "{seconds_ours:.3f}",
            "plain, s": "{seconds_plain:.3f}", "plain / ours": "{ratio:.2f}",
        }
    ),
    "memory": Table(
        {
            "V": "{V:,}", "M": "{M}", "D": "{D}", "head and gradient": "{bytes_head_and_gradient:.1f}",
            "all logits": "{bytes_logits:.1f}", "ours": "{extra_ours:.1f}", "TRL": "{extra_trl:.1f}",
            "TRL / ours": "{ratio:.2f}", "our chunk": "{chunk_bytes:.0f}",
        },
        in_mib,
    ),
    "step": Table(
        {
            "run": "{workload}", "P": "{P}", "G": "{G}", "T": "{T}", "part": "{part}",
            "ours, s": "{ours:.3f}", "TRL, s": "{trl:.3f}", "TRL / ours": ranged("ratio"),
        },
        by_part,
    ),
    "generation": Table(
        {
            "run": "{workload}", "P": "{P}", **SIZES, **SECONDS, "TRL / ours": ranged("ratio"),
            "ours, tokens/s": "{rate_ours:,.0f}",
        }
    ),
    "overhead": Table({"part": "`{part}`", "ms": "{ms:.1f}", "of the step": "{share:.1%}"},
        lambda rows: ({**row, "ms": row["seconds"] * 1e3} for row in rows),
    ),
    "scaling": Table(
        {
            "against": "{sweep}", "points": "{points}", "measured, s": "{measured}",
            "line, s": "{intercept:.3f} + {slope:.3g} each", "share": ("{share:.3f}", ""),
            "in tokens": ("{token_share:.3f}", ""), "in products": ("{flop_share:.3f}", ""),
        },
        lines_of_sweeps,
    ),
    "images": Table(
        {
            "threads": "{workers}", "images of a step": "{P}", "waiting, s": "{wait:.2f}",
            "step, s": "{step:.2f}", "waiting of the step": "{share:.1%}",
        }
    ),
    "clips": Table(
        {
            "threads": "{workers}", "clips of a step": "{P}", "waiting, s": "{wait:.2f}",
            "step, s": "{step:.2f}", "waiting of the step": "{share:.1%}",
        }
    ),
    "packs": Table(
        {
            "layout": "{layout}", "P": "{P}", "G": "{G}", "packs": "{packs:.0f}", "tokens": "{tokens:,.0f}",
            "fill": "{fill:.3f}", "pack fill": "{pack_fill:.3f}", "s": "{seconds:.2f}",
            "apart / it": "{speed:.2f}",
        },
        against_first,
    ),
    "spread": Table(
        {
            "packs": "{packs}", **{key: f"{{{key}}}" for key in "GTL"},
            "prompts run": "{prompts_again:,.0f}, {prompts_once:,.0f}",
            "images encoded": "{images_again:,.0f}, {images_once:,.0f}",
            "tokens": "{tokens_again:,.0f}, {tokens_once:,.0f}",
            "again, s": "{seconds_again:.2f}", "once, s": "{seconds_once:.2f}", "again / once": "{ratio:.2f}",
        },
        lambda rows: ({**row, "ratio": row["seconds_again"] / row["seconds_once"]} for row in rows),
    ),
    "turns": Table(
        {
            "shown": "{shown}", "part": "{part}", "ours, s": "{ours:.3f}", "batched, s": "{batched:.3f}",
            "alone, s": "{alone:.3f}", "batched / ours": "{batched_ratio:.2f}",
            "alone / ours": "{alone_ratio:.2f}",
        },
        by_part,
    ),
}  # fmt: skip
