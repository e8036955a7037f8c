"""The harness of the benchmarks: command line, the table that grows as cases are measured, and the file of results.

A benchmark is a function that measures a case, its cases, and the columns of its table (tables.py). `run` prints the
rows of each case as it is done and, with --json FILE, writes {"versions": {...}, "rows": [{...}]}. `--device` and
`--dtype` choose the machine. To add a benchmark: a script that calls `run`, its columns in tables.py, its call in the
Makefile's `bench`. What needs a GPU is a stage of gpu_proof.py.

A ratio of one sitting says little of the next: times differ from one process to the next, by what the allocator does
with large blocks, and from one day to the next. With a `summary` the file keeps every sitting of equal versions, and
its rows hold medians and ranges over all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import Machine
from tables import TABLES, Row

from mm_grpo import __version__

C = TypeVar("C")
Sitting = Mapping[str, Any]
"""{"rows": [...]}, and what sets a sitting apart from others."""
Summary = Callable[[Sequence[Sitting]], list[dict[str, Any]]]


def run(
    name: str,
    cases: Iterable[C],
    measure: Callable[[C], Row | Sequence[Row]],
    args: argparse.Namespace,
    versions: Mapping[str, Any],
    *,
    summary: Summary | None = None,
    sitting: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Measure the cases, print the table `name` row by row, and write the results to `args.json`; returns all rows."""
    warnings.filterwarnings("ignore")
    table, rows = TABLES[name], list[Row]()
    widths = [max(len(head), 9) + 2 for head in table.columns]
    print(f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads")
    print("".join(map(str.rjust, table.columns, widths)))
    for case in cases:
        result = measure(case)
        new = [result] if isinstance(result, Mapping) else list(result)
        for cells in table.cells(new):
            print("".join(map(str.rjust, cells, widths)), flush=True)
        rows += new
    if args.json is not None:
        write(args.json, versions, rows, summary, sitting or {})
    return rows


def write(
    path: Path, versions: Mapping[str, Any], rows: Sequence[Row], summary: Summary | None, sitting: Sitting
) -> None:
    """Write rows to a file; with a `summary` as one more sitting, with the summary of all as the file's rows."""
    result: dict[str, Any] = {"versions": dict(versions), "rows": [rounded(row) for row in rows]}
    if summary is not None:
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        sittings = earlier.get("sittings", []) if earlier.get("versions") == result["versions"] else []
        sittings = [*sittings, {**sitting, "rows": result["rows"]}]
        result |= {"rows": [rounded(row) for row in summary(sittings)], "sittings": sittings}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def ranged(key: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of some values under `key`, the smallest and largest under `key_low` and `key_high`."""
    return {key: statistics.median(values), f"{key}_low": min(values), f"{key}_high": max(values)}


def by_workload(sittings: Sequence[Sitting]) -> list[dict[str, Any]]:
    """Return a row for each workload: medians of its numbers, with ranges of its ratios; `sittings` counts them."""
    workloads: dict[str, list[Row]] = {}
    for sitting in sittings:
        for row in sitting["rows"]:
            workloads.setdefault(row["workload"], []).append(row)
    rows = []
    for same in workloads.values():
        summary: dict[str, Any] = {"sittings": len(same)}
        for key, value in same[-1].items():
            values = [row[key] for row in same]
            if key.endswith("ratio"):
                summary |= ranged(key, values)
            else:
                summary[key] = statistics.median(values) if isinstance(value, float) else value
        rows.append(summary)
    return rows


def arguments(description: str | None, *, machine: bool = True) -> argparse.ArgumentParser:
    """A parser with --json and, where the script leaves it open, --device and --dtype."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=_file, metavar="FILE", help="write versions and rows to this file")
    parser.set_defaults(device="cpu", dtype="float32")
    if machine:
        parser.add_argument("--device", type=_device, default="cpu", help="cpu (the default) or cuda")
        parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, *packages: str) -> argparse.Namespace:
    """The arguments of a script that needs `packages`; a mistake is told in one line, with exit code 2."""
    args = parser.parse_args(argv)
    for package in packages:
        if importlib.util.find_spec(package) is None:
            parser.error(f"needs the package {package}, which is not installed; `make setup` installs it")
    return args


def positive(text: str) -> int:
    """The value of an argument that counts something: an integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= 1")
    return int(text)


def positives(text: str) -> list[int]:
    """The value of an argument that lists such numbers, with commas."""
    return [positive(part) for part in text.split(",")]


def _device(text: str) -> str:
    try:
        if torch.device(text).type not in ("cpu", "cuda"):
            raise RuntimeError("it is neither a CPU nor a GPU of NVIDIA's")
        torch.empty((), device=text)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used here ({cause}); legal are cpu and, with a GPU, cuda"
        ) from error
    return text


def _file(text: str) -> Path:
    """A file that can be written: told before anything is measured, for the rows are written at the end."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written ({error.strerror})") from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be written")
    return path


def machine_of(args: argparse.Namespace) -> Machine:
    return Machine(torch.device(args.device), getattr(torch, args.dtype))


def versions(machine: Machine | None = None, *packages: str) -> dict[str, Any]:
    """What a figure depends on besides the code: packages, processors, threads."""
    found: dict[str, Any] = {"mm_grpo": __version__, "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "transformers", *packages)}
    found |= {"cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    if machine is not None:
        gpu = machine.device.type == "cuda"
        found["device"] = torch.cuda.get_device_name(machine.device) if gpu else "cpu"
        found["dtype"] = str(machine.dtype).removeprefix("torch.")
    return found


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with six digits of each number."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
