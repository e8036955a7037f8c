"""What this package does on a GPU, in stages that one command runs: `make gpu-proof`.

    python benchmarks/gpu_proof.py [--part 1] [--stages run,trl] [--minutes 9] [--folder DIR] [--peak-tflops 989]
    python benchmarks/gpu_proof.py --dry [--without vllm]

    learner-MODEL     updates of Qwen2.5-VL-3B and Qwen3-VL-4B with random weights: seconds, tokens/s, share of the
                      GPU's peak (MFU), memory
    run               a short run of the 3B with the embedded engine, every guard on
    trl               loss and backward of the same batch by TRL's trainer, each side alone
    vllm-sleep-LEVEL  the run with vLLM on the same GPU, which sleeps while the learner works
    attention         FlexAttention against plain attention at the packs of the learner: exactness, seconds, bytes
    tests             pytest tests/gpu

A part is some of them, what is asked for most first, in the ten minutes that a borrowed machine may give: its results
and logs are DIR/part-N.tar.gz at its end. Compiled kernels stay in DIR, for the stages and parts that follow.

Each stage runs in a process of its own, at most LIMIT seconds, and writes DIR/STAGE.json after each of its cases:
{"stage", "status", "reason", "versions", "seconds", "rows"}. The status is one of

    done         a case that needs more memory than the GPU has is a row that says so
    failed       a case went wrong: its row has a `fault`, and the cases after it were run all the same
    not run      packages are missing; the reason names them
    unfinished   the time was over

Called again, it leaves out stages that are `done`, and in the others the cases that are, unless versions or device
have changed or --fresh is given. The exit code is 1 where a stage failed or is unfinished.

A dry run takes the same way on a CPU with tiny models, writes to a temporary folder unless told otherwise, and its
figures mean nothing. To add a stage: a function for each case in gpu_learner.py or gpu_runs.py, a name in its STAGES,
and its packages in NEEDS.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

try:
    from common import Machine
    from harness import positive, rounded, versions
except ModuleNotFoundError as error:
    sys.exit(f"{error}: `make gpu-wheels` collects what a machine without an index lacks")

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT = 530
"""Seconds that one stage may take."""
LEAST = 30
"""Seconds below which none is started: imports alone take that long."""
NEEDS: dict[str, tuple[str, ...]] = {
    "learner-qwen2_5_vl-3b": ("peft",),
    "run": (),
    "trl": ("trl", "datasets"),
    "vllm-sleep-2": ("vllm",),
    "attention": (),
    "learner-qwen3_vl-4b": ("peft",),
    "tests": ("pytest", "pytest_timeout", "hypothesis"),
    "vllm-sleep-1": ("vllm",),
}
"""The stages, in order, and the packages that each imports beside mm_grpo's own."""
PARTS = {1: list(NEEDS)[:1], 2: list(NEEDS)[1:3], 3: list(NEEDS)[3:]}
NAMED = ("accelerate", "peft", "trl", "vllm", "deepspeed", "flash_attn", "fla", "triton")
"""Packages, as they are imported, whose versions stand in every result; null is one that is not installed."""
PEAKS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}
"""Data sheets' TFLOP/s of dense products in bfloat16, of the SXM cards."""
OUT_OF_MEMORY = "out of memory"
ALLOCATOR = "expandable_segments:True"
"""What the command mm-grpo sets of PYTORCH_CUDA_ALLOC_CONF, where nobody else has."""

Result = dict[str, Any]


# results -------------------------------------------------------------------------------------


def read(file: Path) -> Result:
    """What a result's file holds, or {}."""
    found: Result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def earlier(stage: str, args: argparse.Namespace, now: Mapping[str, Any]) -> Result:
    """The result of an earlier call of this kind with the versions and the device of `now`, or {}."""
    found = read(args.folder / f"{stage}.json")
    return found if (found.get("dry"), found.get("versions")) == (args.dry, now) else {}


def write(file: Path, result: Mapping[str, Any]) -> None:
    """Beside and renamed: a process may be ended at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(file)


def finished(row: Mapping[str, Any]) -> bool:
    """Whether a case needs no second try."""
    return "fault" not in row or row["fault"] == OUT_OF_MEMORY


def missing(stage: str, without: Iterable[str]) -> list[str]:
    """Packages that a stage needs and that are not installed, or are to count as such."""
    names = NEEDS[stage]
    return [name for name in names if name in without or importlib.util.find_spec(name) is None]


def machine_of(args: argparse.Namespace) -> Machine:
    return Machine(torch.device("cpu" if args.dry else "cuda"), torch.bfloat16)


def _versions(args: argparse.Namespace) -> dict[str, Any]:
    found = versions(machine_of(args)) | {"cuda": torch.version.cuda}
    sources = packages_distributions()  # vLLM's for a CPU has another name
    found |= {name: version(sources[name][0]) if name in sources else None for name in NAMED}
    return found | {"allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)}


def _empty(stage: str, args: argparse.Namespace, now: Mapping[str, Any], **more: Any) -> Result:
    start = {"stage": stage, "status": "running", "reason": "", "dry": args.dry, "versions": now}
    return {**start, "seconds": 0.0, "rows": [], **more}


# one stage, in a process of its own ----------------------------------------------------------


def setting_of(args: argparse.Namespace) -> Any:
    """The machine in bfloat16, and the FLOP/s that utilisation is a share of."""
    from gpu_models import Setting

    machine = machine_of(args)
    name = "" if args.dry else torch.cuda.get_device_name(machine.device)
    known = [peak for card, peak in PEAKS.items() if card in name]
    if args.peak_tflops:
        return Setting(machine, args.peak_tflops * 1e12, "given", args.dry)
    if known:
        return Setting(machine, known[0] * 1e12, "data sheet", args.dry)
    if args.dry:  # a product in bfloat16 takes a CPU ten seconds
        return Setting(machine, Machine(machine.device, torch.float32).rate(2), "measured", True)
    return Setting(machine, machine.rate(30), "measured", False)


def run_stage(stage: str, args: argparse.Namespace) -> None:
    """Run the cases of a stage that have no result yet, and write each as soon as it is there."""
    import gpu_learner
    import gpu_runs

    cases = (gpu_learner.STAGES | gpu_runs.STAGES)[stage]
    if args.dry:  # the first and the last, which differ most; those of TRL do not
        last = [] if stage == "trl" else [*cases][-1:]
        cases = {name: cases[name] for name in dict.fromkeys([*cases][:1] + last)}
    setting, file, now = setting_of(args), args.folder / f"{stage}.json", _versions(args)
    kept = {row["case"]: row for row in earlier(stage, args, now).get("rows", ()) if finished(row)}
    result = _empty(stage, args, now, rows=[kept[name] for name in cases if name in kept])
    write(file, result)
    for name, run in cases.items():
        if name not in kept:
            result["rows"].append(run_case(name, run, setting))
            print(f"{stage}: {name}: {result['rows'][-1].get('fault', 'done')}", flush=True)
        result["seconds"] = sum(row["case_seconds"] for row in result["rows"])
        write(file, result)
    faults = [f"{row['case']}: {row['fault']}" for row in result["rows"] if not finished(row)]
    write(file, result | {"status": "failed" if faults else "done", "reason": "; ".join(faults)})


def run_case(name: str, run: Callable[[Any], Mapping[str, Any]], setting: Any) -> dict[str, Any]:
    """The row of a case. Whatever goes wrong in it is its `fault`: the cases after it are run all the same."""
    start = time.perf_counter()
    gc.collect()
    gpu = setting.machine.device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        row = dict(run(setting))
    except torch.OutOfMemoryError:
        row = {"fault": OUT_OF_MEMORY}
    except Exception as error:
        row = {"fault": f"{type(error).__name__}: {error}"[:1000]}
    return rounded({"case": name, **row, "case_seconds": time.perf_counter() - start})


# all of them ---------------------------------------------------------------------------------


def start(stages: list[str], args: argparse.Namespace, seconds: float) -> tuple[str, str]:
    """Run stages in a process of their own, ended with all that it started after `seconds`.

    Returns the status and the reason of a stage that this leaves without a verdict.
    """
    command = [
        sys.executable,
        __file__,
        "--child",
        "--stages",
        ",".join(stages),
        "--folder",
        str(args.folder),
    ]
    command += ["--dry"] if args.dry else []
    command += ["--peak-tflops", str(args.peak_tflops)] if args.peak_tflops else []
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {
        **{name: str(args.folder / folder) for name, folder in kept.items()},
        "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    log = args.folder / f"{stages[0]}.log"
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return (
                "unfinished",
                f"ran past {seconds:.0f} s; called again, it goes on after the cases that are done",
            )
        finally:
            _end(process)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = " / ".join(line for line in lines[-8:] if line.strip())
    return "failed", f"exit code {code}: {told}"[:1000]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what the process started and left behind, and the process itself where it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(args: argparse.Namespace) -> bool:
    """Every stage that is asked for and not done; whether all are done, or cannot be run here."""
    args.folder.mkdir(parents=True, exist_ok=True)
    deadline, now, due = time.monotonic() + 60 * args.minutes, _versions(args), list[str]()
    for stage in args.stages:
        file, lacking = args.folder / f"{stage}.json", missing(stage, args.without)
        found = {} if args.fresh else earlier(stage, args, now)
        if found.get("status") == "done":
            continue
        if lacking:
            reason = f"not installed: {', '.join(lacking)}"
            write(file, _empty(stage, args, now, status="not run", reason=reason))
        else:
            write(file, _empty(stage, args, now, rows=found.get("rows", [])))
            due.append(stage)
    # imports are most of a dry run, so its stages share a process
    for stages in ([due] if due else []) if args.dry else [[stage] for stage in due]:
        status, reason = "unfinished", f"the {args.minutes} minutes were over"
        left = deadline - time.monotonic()
        if left > LEAST:
            status, reason = start(stages, args, min(LIMIT, left))
        for file in (args.folder / f"{stage}.json" for stage in stages):
            if (found := read(file))["status"] == "running":
                write(file, found | {"status": status, "reason": reason})
        for stage in stages:
            show(args.folder, stage)
    for stage in args.stages:
        if stage not in due:
            show(args.folder, stage)
    whole = [part for part, stages in PARTS.items() if {*stages} <= {*args.stages}]
    print(f"results: {', '.join(str(archive(part, args.folder)) for part in whole) or args.folder}")
    found_status = {read(args.folder / f"{stage}.json")["status"] for stage in args.stages}
    return found_status <= {"done", "not run"}


def archive(part: int, folder: Path) -> Path:
    """Results and logs of a part in one file."""
    target = folder / f"part-{part}.tar.gz"
    with tarfile.open(target, "w:gz") as packed:
        for file in sorted(folder.iterdir()):
            if file.stem in PARTS[part] and file.suffix in (".json", ".log"):
                packed.add(file, file.name)
    return target


def show(folder: Path, stage: str) -> None:
    found = read(folder / f"{stage}.json")
    print(f"{stage:<24}{found['status']:<11}{found.get('seconds', 0):>7.0f} s  {found['reason']}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", type=int, choices=PARTS, help="stages of ten minutes, and one archive of them"
    )
    parser.add_argument("--stages", type=_stages, help="of those above, with commas")
    parser.add_argument("--folder", type=Path, help="of the results (benchmarks/results/gpu)")
    parser.add_argument("--minutes", type=positive, help="for all stages together (9 for a part, else 40)")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="of the GPU in bfloat16; else its data sheet's, or what it is seen to reach",
    )
    parser.add_argument("--without", type=_packages, default=[], help="packages that count as not installed")
    parser.add_argument("--fresh", action="store_true", help="measure again what is done")
    parser.add_argument(
        "--dry", action="store_true", help="tiny models on the CPU, to see that the stages run"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.dry and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here; --dry runs tiny models on the CPU")
    if args.folder is None:
        args.folder = Path(tempfile.mkdtemp(prefix="gpu-proof-")) if args.dry else RESULTS
    args.folder = args.folder.absolute()
    args.stages = args.stages or PARTS.get(args.part, list(NEEDS))
    args.minutes = args.minutes or (9 if args.part else 40)
    if args.dry and RESULTS in (args.folder, *args.folder.parents):
        parser.error(f"--folder {args.folder}: a dry run's figures mean nothing; name another folder")
    if args.child:
        for stage in args.stages:
            run_stage(stage, args)
    elif not run_all(args):
        sys.exit(1)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in NEEDS:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(NEEDS)}")
    return names


def _packages(text: str) -> list[str]:
    names = text.split(",")
    every = sorted({package for packages in NEEDS.values() for package in packages})
    for name in names:
        if name not in every:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(every)}")
    return names


if __name__ == "__main__":
    main()
