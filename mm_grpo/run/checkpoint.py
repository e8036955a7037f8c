"""checkpoints/step-000010/: everything that a killed run needs to go on.

A checkpoint is a folder with one `state-RANK-of-WORLD.safetensors` per process (see learner/state.py), the log up to
its step (`metrics.jsonl`), and `manifest.json` (manifest.py) with the identity of its run and the size and XXH3 of each
file. Each process writes its share under a name that starts with a dot, and the first renames the folder when all of it
is on the disk. So a folder with the right name was complete, and the digests show later damage.

Any number of processes may resume it. Every process has to see the files.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_write, remove
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.optimizer import trainable
from mm_grpo.learner.shards import is_sharded, local_part
from mm_grpo.learner.state import StateFile, frozen_digest, load_state, load_weights, mark_of, state_file
from mm_grpo.run.manifest import (
    FORMAT,
    LOG,
    MANIFEST,
    Checkpoint,
    checkpoints_in,
    inspect_checkpoint,
    manifest_text,
    read_checkpoint,
    step_of,
)
from mm_grpo.run.paths import RunPaths, left_in
from mm_grpo.run.same_run import deciding_fields, refuse_other_fields

MAX_INTERVAL = 100
"""Most steps between two checkpoints, and so the most that a killed run repeats, if run.save_every is null."""
logger = logging.getLogger("mm_grpo")


class Checkpoints:
    """Checkpoints of one run, written and read by all processes of `learner.ranks` together."""

    def __init__(self, paths: RunPaths, learner: Learner, config: GRPOConfig) -> None:
        self.folder, self.log, self.learner, self.config = paths.checkpoints, paths.metrics, learner, config
        self.ranks = learner.ranks

    def save(self, step: int, extra: Mapping[str, Any], *, spared: int | None = None) -> Path:
        """Write the checkpoint of `step`; return its path when it is on the disk. Collective.

        Older ones are removed (`write_checkpoint`), except that of step `spared`. ConfigError when it cannot be
        written.
        """
        identity = self._identity  # a collective: outside of the block that only some may leave
        optimizer, first = self.learner.optimizer, self.ranks.first
        with self.ranks.fail_together("a checkpoint"):
            manifest = {
                "format": FORMAT,
                "step": step,
                "extra": dict(extra),
                **identity,
                "updates": optimizer.updates,
                "adam_steps": optimizer.adam_steps,
            }
            state = state_file(optimizer)
            log = self.log.read_bytes() if first and self.log.is_file() else None
        keep = self.config.run.keep_checkpoints
        return write_checkpoint(self.folder, manifest, state, log, self.ranks, keep=keep, spared=spared)

    def newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; None when there are no checkpoints. Collective.

        Damaged ones are skipped with a warning. Raises ConfigError when all are damaged.
        """
        faults: list[str] = []
        for path in reversed(checkpoints_in(self.folder).values()):
            # every process checks its share of the files
            manifest, local_fault = inspect_checkpoint(path, self.ranks.shard)
            path_faults = filter(None, self.ranks.all_gather(local_fault, "looking for a checkpoint"))
            fault = next(path_faults, None)
            if fault is None:
                for older_fault in faults:
                    logger.warning("%s; resuming from %s", older_fault, path.name)
                return Checkpoint(path, manifest)
            faults.append(fault)
        if faults:
            raise ConfigError(
                f"no checkpoint in '{self.folder}' is whole: {'; '.join(faults)}; put back what was changed, or start "
                "again with run.overwrite=true"
            )
        return None

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into the learner. ConfigError when it is another run's or model's. Collective."""
        manifest, identity = checkpoint.manifest, self._identity
        with self.ranks.fail_together("resuming"):
            self._refuse_others(checkpoint, identity)
            files = [checkpoint.path / str(mark["name"]) for mark in manifest["files"]]
            local_file = files[self.ranks.rank] if len(files) == self.ranks.world else None
            load_state(self.learner.optimizer, files, manifest["updates"], manifest["adam_steps"], local_file)

    def sentence(self, every: int) -> str:
        """Say at the start which checkpoints the run keeps, and the size of one on disk."""
        if not every:
            return "checkpoints: none (run.save_every = 0); a run that is killed starts again"
        # weights and Adam's two means in fp32: 12 bytes
        size = 12 * sum(p.numel() for p in trainable(self.learner.module).values())
        keep = self.config.run.keep_checkpoints
        steps = "step" if every == 1 else f"{every} steps"
        return f"checkpoints: {size / 1e9:.3g} GB every {steps}, newest {keep} and best kept, for --resume"

    @contextmanager
    def weights_of(self, step: int) -> Iterator[None]:
        """Give this process the weights of a checkpoint in the block, and its own ones back after it."""
        trained = trainable(self.learner.module)
        backup = {name: local_part(p).detach().to("cpu", copy=True) for name, p in trained.items()}
        try:
            checkpoint = read_checkpoint(self.folder / f"step-{step:06d}")
            files = [checkpoint.path / str(mark["name"]) for mark in checkpoint.manifest["files"]]
            load_weights(trained, files)
            yield
        finally:
            for name, weights in backup.items():
                local_part(trained[name]).data.copy_(weights)

    # reading ---------------------------------------------------------------------------------

    def _refuse_others(self, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
        manifest, where = checkpoint.manifest, f"'{checkpoint.path}'"
        origin = f"the checkpoint {where} was made with"
        remedy = "what follows would be another run: put it back, or start a new one"
        refuse_other_fields(identity["config"], manifest["config"], origin, remedy)
        shapes, old_shapes = identity["parameters"], manifest["parameters"]
        names = sorted(n for n in shapes.keys() | old_shapes.keys() if shapes.get(n) != old_shapes.get(n))
        if names:
            name = names[0]
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the checkpoint {where} is of another model: {name} has "
                f"shape {old_shapes.get(name, 'none')} there and {shapes.get(name, 'none')} here "
                f"({len(names)} of {len(shapes)} trained tensors differ)"
            )
        if manifest["frozen"] != identity["frozen"]:
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the weights that are not trained are not the ones that "
                f"the checkpoint {where} was trained with; give the same base model"
            )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Config, trained tensors and frozen weights of the run. Collective: the first process hashes for all."""
        parameters = {n: list(p.shape) for n, p in trainable(self.learner.module).items()}
        hashes = self.ranks.first or is_sharded(self.learner.model)
        frozen = frozen_digest(self.learner.model) if hashes else ""
        return {
            "config": deciding_fields(self.config),
            "parameters": parameters,
            "frozen": self.ranks.broadcast(frozen, "frozen weights"),
            "dtype": str(self.learner.model.dtype).removeprefix("torch."),
        }


def steps_between(every: int | None, max_steps: int, most: int | None = MAX_INTERVAL) -> int:
    """Return the steps from one checkpoint (or evaluation) to the next, 0 for none, with null resolved."""
    return max(1, min(most or max_steps, max_steps // 10)) if every is None else every


def write_checkpoint(
    folder: Path,
    manifest: Mapping[str, Any],
    state: StateFile,
    log: bytes | None,
    ranks: Ranks,
    *,
    keep: int,
    spared: int | None,
) -> Path:
    """Write a checkpoint to `folder`, and remove all of later steps, and all but the `keep` newest. Collective.

    The first process adds the files to `manifest` and writes it, and `log`, the text of metrics.jsonl. The checkpoint
    of step `spared` stays too. Raises ConfigError if it cannot be written; older checkpoints are then untouched.
    """
    path = folder / f"step-{manifest['step']:06d}"
    tmp = folder / f".{path.name}.new"

    @contextmanager
    def together() -> Iterator[None]:
        """Raise a ConfigError on all processes if one of them cannot write."""
        with ranks.fail_together("a checkpoint"):
            try:
                yield
            except OSError as error:
                saved = [*checkpoints_in(folder).values()]
                last = f"the last good one is {saved[-1].name}" if saved else "there is none before it"
                raise ConfigError(
                    f"run.dir = '{folder.parent}': a checkpoint cannot be written ({error.strerror or error}); "
                    f"{last}. Make room, or lower run.keep_checkpoints, and resume"
                ) from None

    try:
        with together():
            if ranks.first:
                for unfinished in left_in(folder):
                    with suppress(OSError):  # another process may use it, on a shared disk
                        remove(unfinished)
                folder.mkdir(exist_ok=True)  # without parents: a removed run folder does not come back
                tmp.mkdir()
        with together():
            if not tmp.is_dir():
                raise ConfigError(
                    f"run.dir = '{folder.parent}': process {ranks.rank} does not see the folder that the first "
                    "process made there; name one that all hosts share"
                )
            name = f"state-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
            entry = state.write(tmp / name)
        entries = ranks.all_gather(entry, "a checkpoint")
        with together():
            if ranks.first:
                _finish(tmp, path, {**manifest, "files": entries}, log)
                _remove_old(folder, manifest["step"], keep, spared)
    except BaseException:
        if ranks.first:
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return path


def _finish(tmp: Path, path: Path, manifest: Mapping[str, Any], log: bytes | None) -> None:
    if log is not None:
        atomic_write(tmp / LOG, log)
    log_mark = None if log is None else mark_of(tmp / LOG)
    atomic_write(tmp / MANIFEST, manifest_text({**manifest, "log": log_mark}))
    _sync(tmp)
    remove(path)  # a damaged one: otherwise the run would have resumed from it
    os.replace(tmp, path)
    _sync(path.parent)


def _remove_old(folder: Path, step: int, keep: int, spared: int | None) -> None:
    checkpoints = [*checkpoints_in(folder).values()]
    past = [path for path in checkpoints if step_of(path) <= step]
    # Checkpoints of later steps are damaged: otherwise the run would have resumed from one of them.
    for old in [*past[:-keep], *checkpoints[len(past) :]]:
        if step_of(old) != spared:
            removed = old.with_name(f".{old.name}.old")
            with suppress(OSError):  # then it stays as it is
                os.replace(old, removed)
            shutil.rmtree(removed, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Write a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
