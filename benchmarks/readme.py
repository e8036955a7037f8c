"""Writes the tables of README.md from the last results, so that the page is never out of step with them.

    python benchmarks/readme.py [FOLDER of the JSON files]

A table stands between `<!-- name -->` and `<!-- /name -->`; `name` is that of the results' file. To add one: a
function in TABLES and a pair of markers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu"
MIB = 1 << 20

Row = Mapping[str, Any]

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


def learner(rows: Sequence[Row]) -> list[list[str]]:
    table = [["shape", "G", "T", "L", "ours, s", "TRL, s", "TRL / ours", "ours / bound", "TRL / bound"]]
    for r in rows:
        ours, trl, bound = r["seconds_ours"], r["seconds_trl"], r["seconds_bound"]
        table.append(
            [
                SHAPES.get(r["shape"]) or str(r["shape"]),
                *(str(r[k]) for k in "GTL"),
                f"{ours:.3f}",
                f"{trl:.3f}",
                f"{r['ratio']:.2f}",
                f"{ours / bound:.2f}",
                f"{trl / bound:.2f}",
            ]
        )
    return table


def memory(rows: Sequence[Row]) -> list[list[str]]:
    table = [["V", "M", "D", "head and gradient", "all logits", "ours", "TRL", "TRL / ours", "our chunk"]]
    for r in rows:
        sizes = ("bytes_head_and_gradient", "bytes_logits", "extra_ours", "extra_trl")
        table.append(
            [
                f"{r['V']:,}",
                str(r["M"]),
                str(r["D"]),
                *(f"{r[k] / MIB:.1f}" for k in sizes),
                f"{r['ratio']:.2f}",
                f"{r['chunk_bytes'] / MIB:.0f}",
            ]
        )
    return table


def step(rows: Sequence[Row]) -> list[list[str]]:
    table = [["run", "P", "G", "T", "part", "ours, s", "TRL, s", "TRL / ours"]]
    for r in rows:
        for part in ("generate", "learner", "step"):
            table.append(
                [
                    r["workload"],
                    *(str(r[k]) for k in "PGT"),
                    part,
                    f"{r[part + '_ours']:.3f}",
                    f"{r[part + '_trl']:.3f}",
                    f"{r[part + '_ratio']:.2f}",
                ]
            )
    return table


def overhead(rows: Sequence[Row]) -> list[list[str]]:
    table = [["part", "ms", "of the step"]]
    return table + [[f"`{r['part']}`", f"{r['seconds'] * 1e3:.1f}", f"{r['share']:.1%}"] for r in rows]


def scaling(rows: Sequence[Row]) -> list[list[str]]:
    table = [["against", "points", "measured, s", "line, s", "share", "in tokens", "in products"]]
    for line in (r for r in rows if r["x"] is None):
        points = [r for r in rows if r["sweep"] == line["sweep"] and r["x"] is not None]
        table.append(
            [
                SWEEPS[line["sweep"]],
                ", ".join(f"{r['x']:,}" for r in points),
                ", ".join(f"{r['seconds']:.2f}" for r in points),
                f"{line['intercept']:.3f} + {line['slope']:.3g} each",
                *(f"{line[k]:.3f}" if k in line else "" for k in ("share", "token_share", "flop_share")),
            ]
        )
    return table


def hybrid(rows: Sequence[Row]) -> list[list[str]]:
    table = [["shape", "G", "T", "L", "ours, s", "plain, s", "TRL, s", "plain / ours", "TRL / ours"]]
    for r in rows:
        seconds = (f"{r[key]:.3f}" for key in ("seconds_ours", "seconds_plain", "seconds_trl"))
        ratios = (f"{r[key]:.2f}" for key in ("plain_ratio", "trl_ratio"))
        name = SHAPES.get(r["shape"]) or str(r["shape"])
        table.append([name, *(str(r[k]) for k in "GTL"), *seconds, *ratios])
    return table


def images(rows: Sequence[Row]) -> list[list[str]]:
    table = [["threads", "images of a step", "waiting, s", "step, s", "waiting of the step"]]
    for r in rows:
        times = (f"{r['wait']:.2f}", f"{r['step']:.2f}", f"{r['share']:.1%}")
        table.append([str(r["workers"]), str(r["P"]), *times])
    return table


TABLES: dict[str, Callable[[Sequence[Row]], list[list[str]]]] = {
    "learner": learner,
    "memory": memory,
    "step": step,
    "overhead": overhead,
    "scaling": scaling,
    "images": images,
    "hybrid": hybrid,
}


def markdown(table: Sequence[Sequence[str]]) -> str:
    """
    >>> print(markdown([["G", "s"], ["8", "0.1"]]))
    | G | s |
    |---|---|
    | 8 | 0.1 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def written(page: str, results: Path) -> str:
    """The page with each table made anew from the folder's JSON; a table without one stays as it is."""
    for name, make in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, found, rest = page.partition(start)
            _, closed, after = rest.partition(end)
            assert found and closed, f"README.md has no place for the table '{name}'"
            table = markdown(make(json.loads(file.read_text(encoding="utf-8"))["rows"]))
            page = f"{before}{start}{table}\n{end}{after}"
    return page


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    page, results = HERE / "README.md", Path(given[0]) if given else RESULTS
    if not results.is_dir():
        print(
            f"{results}: there is no such folder of results; `make bench` writes {RESULTS}", file=sys.stderr
        )
        sys.exit(2)
    page.write_text(written(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
