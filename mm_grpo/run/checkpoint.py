"""checkpoints/step-000010/: everything that a killed run needs to go on.

A checkpoint is a folder with one `state-RANK-of-WORLD.safetensors` per process (see learner/state.py), the log up to
its step (`metrics.jsonl`), and `manifest.json` (manifest.py), which says what the checkpoint is of and has the size and
XXH3 of each file. It is filled beside, under a name that starts with a dot, and renamed when all of it is on the disk
(checkpoint_writer.py): a folder with the right name is whole, or was damaged later, which the marks tell.

Any number of processes may resume it. The files have to lie where every process sees them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.optimizer import trainable
from mm_grpo.learner.state import frozen_digest, load_state, load_weights, state_file
from mm_grpo.run.checkpoint_writer import CheckpointContents, write_checkpoint
from mm_grpo.run.manifest import (
    FORMAT,
    Checkpoint,
    checkpoints_in,
    inspect_checkpoint,
    read_checkpoint,
)
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.same_run import deciding_fields, differing_field

MOST_STEPS = 100
"""Steps that a killed run redoes at most, where run.save_every is null."""
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
        identity = self._identity  # every process takes part in it
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
            contents = CheckpointContents(
                step,
                manifest,
                state_file(optimizer),
                self.log.read_bytes() if first and self.log.is_file() else None,
                self.config.run.keep_checkpoints,
                spared,
            )
        return write_checkpoint(self.folder, contents, self.ranks)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when there is none at all.

        Damaged ones are passed over with a warning. Raises ConfigError when all are damaged.
        """
        faults: list[str] = []
        for path in reversed(checkpoints_in(self.folder).values()):
            # every process looks at its share of the files
            manifest, own = inspect_checkpoint(path, self.ranks.shard)
            found = [each for each in self.ranks.all_gather(own, "looking for a checkpoint") if each]
            fault = next(iter(found), None)
            if fault is None:
                for each in faults:
                    logger.warning("%s; resuming from %s", each, path.name)
                return Checkpoint(path, manifest)
            faults.append(fault)
        if faults:
            raise ConfigError(
                f"no checkpoint in '{self.folder}' is whole: {'; '.join(faults)}; put back what was changed, or start "
                "again with run.overwrite=true"
            )
        return None

    def load(self, checkpoint: Checkpoint) -> None:
        """Put the learner into the state of a checkpoint. ConfigError when it is another run's or model's."""
        manifest, identity = checkpoint.manifest, self._identity
        with self.ranks.fail_together("resuming"):
            self._refuse_others(checkpoint, identity)
            files = [checkpoint.path / str(mark["name"]) for mark in manifest["files"]]
            own = files[self.ranks.rank] if len(files) == self.ranks.world else None
            load_state(self.learner.optimizer, files, manifest["updates"], manifest["adam_steps"], own)

    def sentence(self, every: int) -> str:
        """What the run keeps to resume from, said at its start, with the bytes on disk of one checkpoint."""
        if not every:
            return "checkpoints: none (run.save_every = 0); a run that is killed starts again"
        size = 12 * sum(
            p.numel() for p in trainable(self.learner.module).values()
        )  # weights and two means, fp32
        keep = self.config.run.keep_checkpoints
        steps = "step" if every == 1 else f"{every} steps"
        return f"checkpoints: {size / 1e9:.3g} GB every {steps}, newest {keep} and best kept, for --resume"

    @contextmanager
    def weights_of(self, step: int) -> Iterator[None]:
        """Within it this process has the weights of a checkpoint, then its own."""
        trained = trainable(self.learner.module)
        own = {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained.items()}
        try:
            found = read_checkpoint(self.folder / f"step-{step:06d}")
            load_weights(trained, [found.path / str(mark["name"]) for mark in found.manifest["files"]])
            yield
        finally:
            for name, kept in own.items():
                trained[name].data.copy_(kept)

    # reading ---------------------------------------------------------------------------------

    def _refuse_others(self, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
        manifest, where = checkpoint.manifest, f"'{checkpoint.path}'"
        if differing := differing_field(identity["config"], manifest["config"]):
            field, value, known = differing
            raise ConfigError(
                f"{field} = {json.dumps(value)}: the checkpoint {where} was made with {json.dumps(known)}, and "
                "what follows would be another run; put it back, or start a new run"
            )
        mine, theirs = identity["parameters"], manifest["parameters"]
        names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        if names:
            name = names[0]
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the checkpoint {where} is of another model: {name} has "
                f"shape {theirs.get(name, 'none')} there and {mine.get(name, 'none')} here "
                f"({len(names)} of {len(mine)} trained tensors differ)"
            )
        if manifest["frozen"] != identity["frozen"]:
            raise ConfigError(
                f"model.path = '{self.config.model.path}': the weights that are not trained differ from those that "
                f"the checkpoint {where} was trained with; give the same base model"
            )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint is of. Only the first process looks at the frozen weights, and tells the others."""
        parameters = {n: list(p.shape) for n, p in trainable(self.learner.module).items()}
        frozen = frozen_digest(self.learner.model) if self.ranks.first else ""
        return {
            "config": deciding_fields(self.config),
            "parameters": parameters,
            "frozen": self.ranks.broadcast(frozen, "frozen weights"),
            "dtype": str(self.learner.model.dtype).removeprefix("torch."),
        }


def steps_between(every: int | None, max_steps: int, most: int | None = MOST_STEPS) -> int:
    """Steps from one checkpoint (or evaluation) to the next, 0 for none: what a field says, or what null stands for."""
    return max(1, min(most or max_steps, max_steps // 10)) if every is None else every
