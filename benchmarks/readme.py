"""Writes the tables of README.md from the last results, and that of speed in the README of the project.

    python benchmarks/readme.py [FOLDER of the JSON files [FOLDER of those of gpu_proof.py]]

A table stands between `<!-- name -->` and `<!-- /name -->`; `name` is that of the results' file. To add one: a
function in TABLES and a pair of markers. The tables of gpu_proof.py, in GPU_TABLES, are made of all its results at
once, where there are any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FRONT = HERE.parent / "README.md"
RESULTS = HERE / "results" / "cpu"
GPU_RESULTS = HERE / "results" / "gpu"
MIB = 1 << 20
GB = 10**9

Row = Mapping[str, Any]
Result = Mapping[str, Any]
"""What gpu_proof.py writes of a stage."""

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
    heads = ["ours, s", "TRL, s", "TRL / ours", "with blocks kept", "ours / bound", "TRL / bound"]
    table = [["shape", "G", "T", "L", *heads]]
    for r in rows:
        table.append(
            [
                SHAPES.get(r["shape"]) or str(r["shape"]),
                *(str(r[k]) for k in "GTL"),
                f"{r['seconds_ours']:.3f}",
                f"{r['seconds_trl']:.3f}",
                *(ranged(r, key) for key in ("ratio", "kept_ratio", "ours_bound", "trl_bound")),
            ]
        )
    return table


def ranged(row: Row, key: str) -> str:
    """A median with the least and the most that were measured."""
    if key not in row:
        return "not measured"
    return f"{row[key]:.2f} ({row[f'{key}_low']:.2f} to {row[f'{key}_high']:.2f})"


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
                    ranged(r, f"{part}_ratio"),
                ]
            )
    return table


def generation(rows: Sequence[Row]) -> list[list[str]]:
    table = [["run", "P", "G", "T", "L", "ours, s", "TRL, s", "TRL / ours", "ours, tokens/s"]]
    for r in rows:
        times = (f"{r['seconds_ours']:.3f}", f"{r['seconds_trl']:.3f}", ranged(r, "ratio"))
        table.append([r["workload"], *(str(r[k]) for k in "PGTL"), *times, f"{r['rate_ours']:,.0f}"])
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


def spread(rows: Sequence[Row]) -> list[list[str]]:
    heads = ["prompts run", "images encoded", "tokens", "again, s", "once, s", "again / once"]
    table = [["packs", "G", "T", "L", *heads]]
    for r in rows:
        counts = [
            f"{r[f'{what}_again']:,.0f}, {r[f'{what}_once']:,.0f}" for what in ("prompts", "images", "tokens")
        ]
        times = [f"{r['seconds_again']:.2f}", f"{r['seconds_once']:.2f}"]
        ratio = f"{r['seconds_again'] / r['seconds_once']:.2f}"
        table.append([*(str(r[k]) for k in ("packs", "G", "T", "L")), *counts, *times, ratio])
    return table


def packs(rows: Sequence[Row]) -> list[list[str]]:
    table = [["layout", "P", "G", "packs", "tokens", "fill", "pack fill", "s", "apart / it"]]
    for r in rows:
        shape = [str(r["P"]), str(r["G"]), f"{r['packs']:.0f}", f"{r['tokens']:,.0f}"]
        fills = [f"{r['fill']:.3f}", f"{r['pack_fill']:.3f}"]
        ratio = f"{rows[0]['seconds'] / r['seconds']:.2f}"
        table.append([r["layout"], *shape, *fills, f"{r['seconds']:.2f}", ratio])
    return table


def turns(rows: Sequence[Row]) -> list[list[str]]:
    table = [["shown", "part", "ours, s", "batched, s", "alone, s", "batched / ours", "alone / ours"]]
    for r in rows:
        for part in ("generate", "learner", "step"):
            seconds = (f"{r[f'{part}_{name}']:.3f}" for name in ("ours", "batched", "alone"))
            ratios = (f"{r[f'{part}_{name}_ratio']:.2f}" for name in ("batched", "alone"))
            table.append([str(r["shown"]), part, *seconds, *ratios])
    return table


TABLES: dict[str, Callable[[Sequence[Row]], list[list[str]]]] = {
    "learner": learner,
    "memory": memory,
    "step": step,
    "generation": generation,
    "overhead": overhead,
    "scaling": scaling,
    "images": images,
    "hybrid": hybrid,
    "packs": packs,
    "spread": spread,
    "turns": turns,
}


def gpu_stages(results: Sequence[Result]) -> list[list[str]]:
    """Every stage: what became of it, where, and with what."""
    table = [["stage", "status", "cases", "s", "device", "torch", "reason"]]
    for r in results:
        about, reason = r["versions"], r["reason"].replace("|", "/").splitlines()
        rows = [str(len(r["rows"])), f"{r['seconds']:.0f}"]
        found = [str(about.get("device", "")), str(about.get("torch", ""))]
        table.append([f"`{r['stage']}`", r["status"], *rows, *found, reason[0][:200] if reason else ""])
    return table


def gpu_attention(results: Sequence[Result]) -> list[list[str]]:
    table = [
        ["heads", "dtype", "L", "G", "T", "flex, s", "plain, s", "plain / flex", "flex off", "plain off"]
    ]
    for r in _rows_of(results, "attention", "seconds_flex"):
        shape = [f"{r['heads']} / {r['kv_heads']} x {r['size']}", r["dtype"], *(str(r[k]) for k in "LGT")]
        times = [f"{r['seconds_flex']:.4f}", f"{r['seconds_plain']:.4f}", f"{r['ratio']:.2f}"]
        table.append([*shape, *times, f"{r['distance_flex']:.1e}", f"{r['distance_plain']:.1e}"])
    return table


def gpu_learner(results: Sequence[Result]) -> list[list[str]]:
    """Pairs of bytes are those measured and those of the estimate."""
    parts = ("weights", "optimizer", "passes", "peak")
    table = [["model", "case", "L", "s", "tokens/s", "MFU", *(f"{part}, GB" for part in parts)]]
    for stage in (r["stage"] for r in results if r["stage"].startswith("learner-")):
        for r in _rows_of(results, stage):
            name = [stage.removeprefix("learner-"), r["case"]]
            if "fault" in r:
                table.append([*name, "", r["fault"].splitlines()[0][:80], *[""] * (2 + len(parts))])
                continue
            figures = [
                str(r["L"]),
                f"{r['seconds']:.3f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['mfu']:.0%}",
            ]
            sizes = [f"{r['bytes_' + p] / GB:.1f} / {r['estimate_' + p] / GB:.1f}" for p in parts]
            table.append([*name, *figures, *sizes])
    return table


def gpu_trl(results: Sequence[Result]) -> list[list[str]]:
    table = [["case", "L", "ours, s", "TRL, s", "TRL / ours", "our MFU", "TRL's MFU"]]
    for r in _rows_of(results, "trl", "L"):
        sides = ("ours", "trl")
        times = [_figure(r, f"seconds_{s}", "{:.3f}") or r.get(f"fault_{s}", "") for s in sides]
        shares = [_figure(r, f"mfu_{side}", "{:.0%}") for side in sides]
        table.append([r["case"], str(r["L"]), *times, _figure(r, "ratio", "{:.2f}"), *shares])
    return table


def gpu_runs(results: Sequence[Result]) -> list[list[str]]:
    phases = ("step", "rollout", "learner", "sync", "sleep", "wake")
    memory = ("learner", "rollout")
    table = [
        [
            "run",
            "samples/s",
            *(f"{phase}, s" for phase in phases),
            "log-prob gap",
            "canary moved",
            "canary gap",
        ]
    ]
    table[0] += [f"{phase}, GB" for phase in memory]
    for stage in ("run", "vllm-sleep-1", "vllm-sleep-2"):
        for r in _rows_of(results, stage, "seconds_step"):
            times = [f"{r['seconds_' + p]:.2f}" if f"seconds_{p}" in r else "" for p in phases]
            canary = [f"{r[k]:.1e}" if k in r else "" for k in ("canary_moved", "canary_gap_mean")]
            sizes = [f"{r['bytes_' + p] / GB:.1f} / {r['estimate_' + p] / GB:.1f}" for p in memory]
            rate = f"{r['samples_per_second']:.2f}"
            table.append([r["case"], rate, *times, f"{r['logp_gap_mean']:.1e}", *canary, *sizes])
    return table


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
"""What is asked first of a GPU, all of the 3B: stage (and case), key (or a ratio of two), format."""


def gpu_headline(results: Sequence[Result]) -> list[list[str]]:
    """A figure a line; a cell stays empty until it is measured."""
    table = [["Qwen2.5-VL-3B", "measured"]]
    for title, place, key, form in HEADLINES:
        stage, _, case = place.partition("/")
        rows = [r for r in _rows_of(results, stage) if not case or r["case"] == case]
        table.append([title, _figure(rows[0], key, form) if rows else ""])
    return table


def _figure(row: Row, key: str, form: str) -> str:
    """A value, or the ratio of two; "" where a row has none."""
    keys = key.split("/")
    if any(k not in row for k in keys):
        return ""
    return form.format(row[keys[0]] / (row[keys[1]] if len(keys) > 1 else 1))


def _rows_of(results: Sequence[Result], stage: str, key: str = "case") -> list[Row]:
    """The rows of a stage that hold a key."""
    return [row for r in results if r["stage"] == stage for row in r["rows"] if key in row]


GPU_TABLES: dict[str, Callable[[Sequence[Result]], list[list[str]]]] = {
    "gpu-headline": gpu_headline,
    "gpu-stages": gpu_stages,
    "gpu-attention": gpu_attention,
    "gpu-learner": gpu_learner,
    "gpu-trl": gpu_trl,
    "gpu-runs": gpu_runs,
}


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


def written(page: str, results: Path, gpu_results: Path | None = None) -> str:
    """The page with each table made anew from the folders' JSON; a table without results stays as it is."""
    for name, make in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            page = _with_table(page, name, make(json.loads(file.read_text(encoding="utf-8"))["rows"]))
    files = sorted(gpu_results.glob("*.json")) if gpu_results else []
    of_gpu = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for name, make_of_all in GPU_TABLES.items() if of_gpu else ():
        table = make_of_all(of_gpu)
        if len(table) > 1:
            page = _with_table(page, name, table)
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
    text = written(page.read_text(encoding="utf-8"), results, gpu_results)
    page.write_text(text, encoding="utf-8")
    if results == RESULTS:
        FRONT.write_text(front(FRONT.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
