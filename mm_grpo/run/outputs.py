"""What runs write in a folder: the names, which of them are there, and how they are removed.

What carries no mark of a run (lock.py) is never a run's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from mm_grpo.config import GRPOConfig
from mm_grpo.files import remove, unfinished_writes
from mm_grpo.run.lock import RunMark
from mm_grpo.run.paths import IMAGE_NAME, ROLLOUT_NAME, STEP_NAME, RunPaths, left_in

FILES = (
    "config.yaml",
    "expected_curve.json",
    "environment.json",
    "metrics.jsonl",
    "events.jsonl",
    "summary.json",
    "error.txt",
    "report.html",
)
FOLDERS = ("rollouts", "tensorboard")
SOME_FOLDERS = ("checkpoints", "model", "adapter")
TRACE = "torch_trace.json"
"""Written by some runs only, as SOME_FOLDERS are."""


def names_of(config: GRPOConfig, *, saves: bool) -> list[str]:
    """Those of SOME_FOLDERS and TRACE that a run of this config writes; `saves` says whether it writes checkpoints."""
    model = config.run.save_model
    written = {"checkpoints": saves, "model": model, "adapter": model and config.model.lora is not None}
    written[TRACE] = config.run.profile == "torch"
    return [name for name, does in written.items() if does]


def is_there(path: Path) -> bool:
    """Whether something is at `path`; an empty folder is nothing."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def held(paths: RunPaths, mark: RunMark | None) -> list[str]:
    """What of a run is there, in words; empty when the folder is new, or its run never took a step."""
    if mark is None:
        return []
    rows = paths.metrics.read_bytes().count(b"\n") if paths.metrics.is_file() else 0
    found = {"metrics.jsonl": f"{rows} rows in metrics.jsonl"} if rows else {}
    found |= {"summary.json": "summary.json"} if paths.summary.is_file() else {}
    found |= {name: f"{name}/" for name in SOME_FOLDERS if is_there(paths.root / name)}
    return [words for name, words in found.items() if mark.owns(name)]


def remove_run(paths: RunPaths, mark: RunMark) -> None:
    """Remove what runs wrote by the `mark` and nothing else; folders only once they are empty."""
    for path in (*unfinished(paths, mark), *_written(paths, mark)):
        remove(path)
    for name in (*FOLDERS, *SOME_FOLDERS):
        top = paths.root / name
        for left in sorted([top, *top.rglob("*")], reverse=True):  # what is inside before what it is in
            if left.is_dir() and not left.is_symlink() and not any(left.iterdir()):
                left.rmdir()


def files_in(folder: Path, mark: RunMark, *, own: bool = True) -> list[Path]:
    """The files in `model` or `adapter` that runs wrote, or with `own=False` all others; a link is one itself."""
    if folder.is_symlink():
        return [folder] if own else []
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in files if mark.owns(f"{folder.name}/{path.relative_to(folder)}") is own]


def unfinished(paths: RunPaths, mark: RunMark) -> list[Path]:
    """Files of a run that was killed while it wrote them, under their temporary names."""
    found = {path: name for path, name in unfinished_writes(paths.root).items() if mark.owns(name)}
    if mark.owns("rollouts"):
        inner = unfinished_writes(paths.rollouts) | unfinished_writes(paths.images)
        found |= {path: name for path, name in inner.items() if _is_rollout(name)}
    return list(found)


def _written(paths: RunPaths, mark: RunMark) -> Iterator[Path]:
    rollouts = (*paths.rollouts.glob("*.jsonl"), *paths.images.glob("*.png"))
    checkpoints = (path for path in paths.checkpoints.glob("step-*") if STEP_NAME.fullmatch(path.name))
    outputs: dict[str, Iterable[Path]] = {
        **{name: [paths.root / name] for name in (*FILES, TRACE)},
        "rollouts": (path for path in rollouts if _is_rollout(path.name)),
        "checkpoints": (*checkpoints, *left_in(paths.checkpoints)),
        "tensorboard": paths.tensorboard.glob("events.out.tfevents.*"),
        "model": files_in(paths.model, mark),
        "adapter": files_in(paths.adapter, mark),
    }
    for name, found in outputs.items():
        if mark.owns(name):
            yield from found


def _is_rollout(name: str) -> bool:
    return bool(ROLLOUT_NAME.fullmatch(name) or IMAGE_NAME.fullmatch(name))
