"""Stages of gpu_proof.py that run whole programs: tests/gpu, TRL's trainer beside ours, and short training runs.

A run trains Qwen2.5-VL-3B with random weights for a few steps on pictures of the shapes task, with every guard and the
parity check on. Rewards are 0 and 1 in turn, so each group has a spread. It has to end, each update has to be above 0,
and sampled weights have to have changed; seconds are medians over the steps after the first, by phase as the trainer's
own metrics cut a step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Stopwatch
from gpu_models import MAX_PIXELS, Setting, config_and_processor, make_model, write_without_weights
from workloads import alternate

from mm_grpo.data.shapes import shapes_rows
from mm_grpo.preflight.memory import ModelSizes, device_memory, largest_of, memory_of_run

Row = dict[str, Any]
Case = Callable[[Setting], Row]

ROOT = Path(__file__).parents[1]
MODEL = "qwen2_5_vl-3b"
PHASES = ("step_time", "time/rollout", "time/learner", "time/sync", "time/data", "time/rewards", "time/log")
SAMPLE = 512
"""Elements of each weight that are compared before and after a run."""
RATE = 1e-4
"""Learning rate: its first update moves a weight of ordinary size by more than half a step of bfloat16."""


def gpu_tests(setting: Setting) -> Row:
    """`pytest tests/gpu`: how many passed, and what failed. On a CPU all are skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # shapes of real models are the stage `attention`, and each compiles for some 20 s
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={report}"]
        command += ["-k", "not shapes_of_real_models"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            return {"fault": f"pytest wrote no report (exit code {done.returncode}): {done.stdout[-600:]}"}
        return read_junit(report, gpu=setting.machine.device.type == "cuda")


def read_junit(report: Path, *, gpu: bool) -> Row:
    """Counts and seconds of a junit report; `failed` maps the names of failed tests to the first lines of why."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    wrong = {
        case.get("name", ""): str(found.get("message")).splitlines()[0][:300]
        for case in cases
        for found in (*case.findall("failure"), *case.findall("error"))
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    row: Row = {
        "tests": len(cases), "passed": len(cases) - len(wrong) - skipped, "skipped": skipped,
        "failed": wrong, "seconds": sum(float(case.get("time", 0)) for case in cases),
    }  # fmt: skip
    if wrong or not cases:
        row["fault"] = f"{len(wrong)} of {len(cases)} tests failed: {', '.join(wrong)}"
    elif gpu and not row["passed"]:
        row["fault"] = f"all {len(cases)} tests were skipped, on a GPU"
    return row


# TRL -----------------------------------------------------------------------------------------

# gradient checkpointing on both sides is what both take on a card of 80 GB
SIDES = {
    "G 8, 448 px, checkpointing": (8, 256, 448, True),
    "G 8, 448 px": (8, 256, 448, False),
    "G 16, 448 px, checkpointing": (16, 256, 448, True),
    "G 8, 1024 px, checkpointing": (8, 256, 1024, True),
}


def trl(setting: Setting, name: str, shape: tuple[int, int, int, bool]) -> Row:
    """Loss and backward of one group by our learner, then by TRL's trainer on the same batch (learner.py)."""
    import learner as side_by_side

    size, given = setting.of("3b", "tiny"), setting.of(shape[:3], (2, 4, 56))
    row = side_by_side.apart(name, setting.of(3, 1), size, setting.machine, given, shape[3])
    mfu = {
        f"mfu_{side}": row["flops"] / row[f"seconds_{side}"] / setting.peak
        for side in ("ours", "trl")
        if f"seconds_{side}" in row
    }
    return row | {"peak": setting.peak, **mfu}


# runs ----------------------------------------------------------------------------------------


class Synced:
    """Keeps the reports of the trainer's verified syncs, and the most that was held before one: what learning took."""

    def __init__(self, sync: Any, device: torch.device) -> None:
        self.reports: list[Any] = []
        self.held = 0
        inner = sync.update

        def update(*args: Any, **kwargs: Any) -> Any:
            self.held = max(self.held, _held(device))
            report = inner(*args, **kwargs)
            self.reports.append(report)
            return report

        sync.update = update


class Freed:
    """Keeps the bytes of the GPU that each `sleep` of an engine gave back, and the most that was held before one: what
    sampling took. None on a CPU."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.bytes: list[int] = []
        self.held = 0
        inner = engine.sleep

        def sleep() -> None:
            self.held = max(self.held, _held(device))
            if device.type == "cuda":
                torch.cuda.empty_cache()  # not vLLM's, and its own call would free it too
            before = _held(device)
            inner()
            self.bytes.append(before - _held(device))

        engine.sleep = sleep


def _held(device: torch.device) -> int:
    """Bytes of a GPU that are taken, torch's cache of freed blocks among them."""
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    return total - free


def run(setting: Setting, engine: str, sleep_level: int = 0) -> Row:
    """A few steps of a whole run; with vLLM the seconds of sleep, wake and sync, and what the canary saw."""
    from mm_grpo import GRPOConfig, GRPOTrainer

    machine = setting.machine
    steps, side = setting.of(3, 2), setting.of(448, 84)
    prompts, count, tokens = setting.of((32, 8, 256), (2, 4, 8))
    config, processor = config_and_processor(MODEL, setting)
    dtype = str(machine.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        write_without_weights(config, processor, folder)
        model = make_model(config, processor, machine)
        if engine == "vllm":  # reads its weights from disk, and the learner too
            model.save_pretrained(folder)
            model = None
        else:
            model.generation_config.save_pretrained(folder)
        given = GRPOConfig.from_dict(
            {
                "model": {"path": str(folder), "device": str(machine.device), "dtype": dtype},
                "data": {"max_pixels": min(side**2, MAX_PIXELS)},
                "rollout": {
                    "engine": engine, "prompts_per_step": prompts, "num_generations": count,
                    "max_completion_length": tokens, "vllm": {"sleep_level": sleep_level},
                },
                "optim": {"learning_rate": RATE, "warmup_steps": 0},
                "run": {
                    "dir": str(Path(made) / "run"), "max_steps": steps, "save_model": False, "save_every": 0,
                },
            }
        )  # fmt: skip
        rows = shapes_rows(split="train", size=prompts * steps, image_size=side, max_objects=1)
        row: Row = {"model": MODEL, "engine": engine, "sleep_level": sleep_level, "dtype": dtype}
        started = time.perf_counter()
        trainer = GRPOTrainer(given, train=rows, rewards=[alternate], model=model)
        machine.wait()
        row |= {"steps": steps, "seconds_start": time.perf_counter() - started}
        synced, watch = Synced(trainer.sync, machine.device), Stopwatch()
        watch.wrap(trainer.engine, "sleep", "sleep")
        watch.wrap(trainer.engine, "wake", "wake")
        freed = Freed(trainer.engine, machine.device)
        before = _sample(trainer.learner.model)
        trainer.train()
        row["weights_changed"] = float((_sample(trainer.learner.model) != before).float().mean())
        lines = (Path(made) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row |= _of_metrics([json.loads(line) for line in lines])
    row |= {
        "P": prompts,
        "G": count,
        "T": tokens,
        "samples_per_second": prompts * count / row["seconds_step"],
    }
    if engine == "vllm":
        row |= {f"seconds_{what}": seconds / steps for what, seconds in watch.take().items()}
        row |= {"bytes_freed": min(freed.bytes), **_of_canary(synced.reports)}
    found = memory_of_run(
        ModelSizes.of(trainer.model), largest_of(trainer.processor, given), given, device_memory(machine.device),
        processes=1, checkpointing=trainer.learner.checkpointing, gpu=machine.device.type == "cuda",
    )  # fmt: skip
    row |= {"bytes_learner": synced.held, "bytes_rollout": freed.held}
    row |= {"estimate_learner": sum(found.learner.values()), "estimate_rollout": sum(found.rollout.values())}
    if row["weights_changed"] == 0 or row["update_norm_least"] == 0:
        row["fault"] = "an update changed no weight"
    return row


def _sample(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([p.flatten()[:SAMPLE].float().cpu() for p in model.parameters()])


def _of_metrics(lines: list[dict[str, Any]]) -> Row:
    later = lines[1:] or lines
    row: Row = {
        f"seconds_{phase.removeprefix('time/').removesuffix('_time')}": statistics.median(
            line[phase] for line in later
        )
        for phase in PHASES
    }
    gap = "sampling/sampling_logp_difference/"
    return row | {
        "update_norm_least": min(line["learner/update_norm"] for line in lines),
        "logp_gap_mean": max(line[gap + "mean"] for line in lines),
        "logp_gap_max": max(line[gap + "max"] for line in lines),
        "tokens": lines[-1]["num_tokens"],
    }


def _of_canary(reports: list[Any]) -> Row:
    """What the syncs sent, and of the canary: how far the learner moved and how far the engine is from it, in nats."""
    return {
        "sync_bytes": max(r.bytes for r in reports),
        "canary_moved": min(r.move for r in reports),
        "canary_gap_mean": max(r.score.mean for r in reports),
        "canary_gap_max": max(r.score.max for r in reports),
        "canary_problems": [r.problem for r in reports if r.problem],
    }


STAGES: dict[str, dict[str, Case]] = {
    "tests": {"tests/gpu": gpu_tests},
    "trl": {name: partial(trl, name=name, shape=shape) for name, shape in SIDES.items()},
    "run": {"embedded engine": partial(run, engine="transformers")},
    **{
        f"vllm-sleep-{level}": {f"sleep level {level}": partial(run, engine="vllm", sleep_level=level)}
        for level in (2, 1)
    },
}
