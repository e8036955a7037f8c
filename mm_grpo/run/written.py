"""What runs write in a folder: the names, which of them are there, and how they are removed.

What carries no mark of a run (claim.py) is never a run's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mm_grpo.config import GRPOConfig
from mm_grpo.files import unfinished_writes
from mm_grpo.run.claim import Mark
from mm_grpo.run.paths import EVALUATION_NAME, IMAGE_NAME, STEP_NAME, RunPaths, left_in

FILES = (
    "config.yaml",
    "expected_curve.json",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "error.txt",
    "report.html",
    "rollouts",
    "tensorboard",
)
FOLDERS = ("checkpoints", "model", "adapter")
TRACES = ("trace.json", "torch_trace.json")
"""Folders and files that are written by some runs only, and most likely somebody else's in a folder without them."""


def names_of(config: GRPOConfig, *, saves: bool) -> list[str]:
    """Those of FOLDERS and TRACES that a run of this config writes; `saves` says whether it writes checkpoints."""
    model = config.run.save_model
    written = {"checkpoints": saves, "model": model, "adapter": model and config.model.lora is not None}
    written |= {"trace.json": bool(config.run.profile), "torch_trace.json": config.run.profile == "torch"}
    return [name for name, does in written.items() if does]


def is_there(path: Path) -> bool:
    """Whether something is at `path`; an empty folder is nothing."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def held(paths: RunPaths, mark: Mark | None) -> list[str]:
    """What of a run is there, in words; empty when the folder is new, or its run never took a step."""
    if mark is None:
        return []
    found = []
    if (
        mark.owns("metrics.jsonl")
        and paths.metrics.is_file()
        and (rows := paths.metrics.read_bytes().count(b"\n"))
    ):
        found.append(f"{rows} row{'s' if rows > 1 else ''} in metrics.jsonl")
    if mark.owns("summary.json") and paths.summary.is_file():
        found.append("summary.json")
    found += [
        f"{f.name}/"
        for f in (paths.checkpoints, paths.model, paths.adapter)
        if mark.owns(f.name) and is_there(f)
    ]
    return found


def remove_run(paths: RunPaths, mark: Mark) -> None:
    """Remove what runs wrote by the `mark` and nothing else; folders only once they are empty."""
    written: dict[str, Iterable[Path]] = {
        **{
            file.name: [file]
            for file in (
                paths.config,
                paths.expected,
                paths.environment,
                paths.metrics,
                paths.events,
                paths.summary,
                paths.error,
                paths.report,
                paths.trace,
                paths.torch_trace,
            )
        },
        "rollouts": [
            *(f for f in paths.rollouts.glob("step-*.jsonl") if STEP_NAME.fullmatch(f.stem)),
            *(f for f in paths.rollouts.glob("eval-*.jsonl") if EVALUATION_NAME.fullmatch(f.stem)),
            *(f for f in paths.images.glob("*.png") if IMAGE_NAME.fullmatch(f.name)),
        ],
        "checkpoints": [
            *(f for f in paths.checkpoints.glob("step-*") if STEP_NAME.fullmatch(f.name)),
            *left_in(paths.checkpoints),
        ],
        "tensorboard": list(paths.tensorboard.glob("events.out.tfevents.*")),
        "model": files_in(paths.model, mark),
        "adapter": files_in(paths.adapter, mark),
    }
    for name, found in written.items():
        if mark.owns(name):
            remove(found)
    for folder in (paths.rollouts, paths.checkpoints, paths.tensorboard, paths.model, paths.adapter):
        for left in sorted([folder, *folder.rglob("*")], reverse=True):  # what is inside before what it is in
            if left.is_dir() and not left.is_symlink() and not any(left.iterdir()):
                left.rmdir()


def files_in(folder: Path, mark: Mark, *, own: bool = True) -> list[Path]:
    """The files in `model` or `adapter` that runs wrote, or with `own=False` all others; a link is one itself."""
    if folder.is_symlink():
        return [folder] if own else []
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in files if mark.owns(f"{folder.name}/{path.relative_to(folder)}") is own]


def unfinished(paths: RunPaths, mark: Mark) -> Iterator[Path]:
    """Files of a run that was killed while it wrote them, under their temporary names."""
    for folder in (paths.root, paths.rollouts, paths.images):
        for path, name in unfinished_writes(folder).items():
            ours = (
                name in (*FILES, *TRACES) and mark.owns(name) if folder == paths.root
                else mark.owns("rollouts") and (
                    STEP_NAME.fullmatch(Path(name).stem)
                    or EVALUATION_NAME.fullmatch(Path(name).stem)
                    or IMAGE_NAME.fullmatch(name)
                )
            )  # fmt: skip
            if ours:
                yield path


def remove(found: Iterable[Path]) -> None:
    """Remove files and folders."""
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
