"""Writes the tables of README.md from the last results, and the table of speed in the README of the project.

    python benchmarks/readme.py [FOLDER of the JSON files [FOLDER of the results of gpu_proof.py]]

A table stands between `<!-- name -->` and `<!-- /name -->`; `name` is that of the results' file. tables.py has the
columns. The two tables of gpu_proof.py are made of all its results at once, if there are any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tables import TABLES, Row, cell

HERE = Path(__file__).parent
FRONT = HERE.parent / "README.md"
RESULTS = HERE / "results" / "cpu"
GPU_RESULTS = HERE / "results" / "gpu"

Result = Mapping[str, Any]
"""The file that gpu_proof.py writes of a stage."""

LEARNER, WHOLE = "learner-qwen2_5_vl-3b", "G 8, 448 px, checkpointing, whole packs"
HEADLINES = (
    ("samples per second and GPU, vLLM", "vllm-sleep-2", "samples_per_second", "{:.2f}"),
    ("samples per second and GPU, embedded engine", "run", "samples_per_second", "{:.2f}"),
    (
        "MFU of an update, LoRA",
        f"{LEARNER}/lora, {WHOLE}",
        "mfu",
        "{:.0%}",
    ),
    (
        "MFU of an update, all weights",
        f"{LEARNER}/full, {WHOLE}",
        "mfu",
        "{:.0%}",
    ),
    ("TRL's time / ours, loss and backward", "trl/G 8, 448 px, checkpointing", "ratio", "{:.2f}"),
    ("peak while it learns / its estimate", "vllm-sleep-2", "bytes_learner/estimate_learner", "{:.2f}"),
    ("peak while it samples / its estimate", "vllm-sleep-2", "bytes_rollout/estimate_rollout", "{:.2f}"),
    ("seconds of a weight sync", "vllm-sleep-2", "seconds_sync", "{:.2f}"),
    ("seconds of a wake", "vllm-sleep-2", "seconds_wake", "{:.2f}"),
)
"""The first questions to a GPU, all of the 3B: stage (and case), key (or a ratio of two), format."""


def sizes(*parts: str) -> list[str]:
    return [f"{part} {{bytes_{part}:.3g}} / {{estimate_{part}:.3g}} bytes" for part in parts]


FIGURES: dict[str, tuple[str, ...]] = {
    "learner": (
        "{seconds:.3f} s", "{tokens_per_second:,.0f} tokens/s", "MFU {mfu:.0%}",
        *sizes("weights", "optimizer", "passes", "peak"),
    ),
    "trl": (
        "ours {seconds_ours:.3f} s", "TRL {seconds_trl:.3f} s", "TRL / ours {ratio:.2f}", "our MFU {mfu_ours:.0%}",
        "TRL's MFU {mfu_trl:.0%}", "ours: {fault_ours}", "TRL: {fault_trl}",
    ),
    "attention": (
        "flex {seconds_flex:.4f} s, off by {distance_flex:.1e}",
        "plain {seconds_plain:.4f} s, off by {distance_plain:.1e}", "plain / flex {ratio:.2f}",
    ),
    "run": (
        "{samples_per_second:.2f} samples/s",
        *(f"{phase} {{seconds_{phase}:.2f}} s" for phase in ("step", "rollout", "learner", "sync", "sleep", "wake")),
        "log-prob gap {logp_gap_mean:.1e}", "canary moved {canary_moved:.1e}", "canary gap {canary_gap_mean:.1e}",
        *sizes("learner", "rollout"),
    ),
    "tests": ("{passed} of {tests} passed", "{skipped} skipped"),
}  # fmt: skip
"""Figures of a case by the first word of its stage ("run" for vllm); sizes are measured / estimated."""


def gpu_headline(stages: Sequence[Result]) -> list[list[str]]:
    """Return the answers to HEADLINES; a cell stays empty until it is measured."""
    table = [["Qwen2.5-VL-3B", "measured"]]
    for title, place, key, form in HEADLINES:
        stage, _, case = place.partition("/")
        rows = [row for s in stages if s["stage"] == stage for row in s["rows"]]
        values = [_figure(row, key, form) for row in rows if not case or row.get("case") == case]
        table.append([title, next(filter(None, values), "")])
    return table


def _figure(row: Row, key: str, form: str) -> str:
    """Return a value, or the ratio of two; "" if the row lacks one."""
    top, _, bottom = key.partition("/")
    if top not in row or (bottom and bottom not in row):
        return ""
    return form.format(row[top] / row[bottom] if bottom else row[top])


def gpu(stages: Sequence[Result]) -> list[list[str]]:
    """Return a row for each stage with its status, and a row for each of its cases with the figures."""
    table = [["stage", "case", "figures, or the reason"]]
    for stage in stages:
        versions, reason = stage["versions"], stage["reason"].replace("|", "/").splitlines()
        about = f"{versions.get('device', '')}, torch {versions.get('torch', '')}, {stage['seconds']:.0f} s"
        table.append(
            [f"`{stage['stage']}`", stage["status"], "; ".join([about, *(r[:200] for r in reason[:1])])]
        )
        formats = FIGURES[stage["stage"].split("-")[0].replace("vllm", "run")]
        for row in stage["rows"]:
            figures = [cell((text, ""), row) for text in formats]
            faults = row.get("fault", "").replace("|", "/").splitlines()[:1]
            table.append(["", str(row["case"]), "; ".join(filter(None, [*figures, *faults]))])
    return table


GPU_TABLES = {"gpu-headline": gpu_headline, "gpu": gpu}


def front(page: str, results: Path) -> str:
    """The project's README with its table of speed: of each row the least and the most that were measured."""

    def rows(name: str) -> list[Row]:
        found: list[Row] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        return found

    table = [["", "TRL's time / ours"]]
    for r in rows("learner"):
        what = "a 448 x 448 image" if r["kind"] == "image" else "a few words"
        table.append(
            [f"loss and backward, {r['G']} answers of {r['T']} tokens to {what}", least_to_most(r, "ratio")]
        )
    for r in rows("step"):
        if r["workload"] != "shapes":
            what = f"a whole step, {r['G']} answers of {r['T']} tokens to such images"
            table.append([what, least_to_most(r, "step_ratio")])
    return _with_table(page, "speed", table)


def least_to_most(row: Row, key: str) -> str:
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return f"{low:.2f} to {high:.2f}" if high < 2 else f"{low:.1f} to {high:.1f}"


def markdown(table: Sequence[Sequence[str]]) -> str:
    """
    >>> print(markdown([["G", "s"], ["8", "0.1"]]))
    | G | s |
    |---|---|
    | 8 | 0.1 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def updated(page: str, results: Path, gpu_results: Path | None = None) -> str:
    """Return the page with its tables made from the folders' JSON; a table without results stays as it is."""
    for name, table in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            page = _with_table(page, name, table.with_heads(rows))
    files = sorted(gpu_results.glob("*.json")) if gpu_results else []
    stages = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for name, make in GPU_TABLES.items() if stages else ():
        page = _with_table(page, name, make(stages))
    return page


def _with_table(page: str, name: str, table: Sequence[Sequence[str]]) -> str:
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    assert found and closed, f"README.md has no place for the table '{name}'"
    return f"{before}{start}{markdown(table)}\n{end}{after}"


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    page, results = HERE / "README.md", Path(given[0]) if given else RESULTS
    gpu_results = Path(given[1]) if len(given) > 1 else GPU_RESULTS
    if not results.is_dir():
        print(
            f"{results}: there is no such folder of results; `make bench` writes {RESULTS}", file=sys.stderr
        )
        sys.exit(2)
    text = updated(page.read_text(encoding="utf-8"), results, gpu_results)
    page.write_text(text, encoding="utf-8")
    if results == RESULTS:
        FRONT.write_text(front(FRONT.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
