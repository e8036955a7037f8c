"""checkpoints/step-000010/: everything that a killed run needs to go on.

A checkpoint is a folder with one `state-RANK-of-WORLD.safetensors` per process (see learner/state.py), the log up to
its step (`metrics.jsonl`), and `manifest.json` (manifest.py), which says what the checkpoint is of and has the size and
XXH3 of each file. It is filled beside, under a name that starts with a dot, and renamed when all of it is on the disk
(checkpoint_writer.py): a folder with the right name is whole, or was damaged later, which the marks tell.

A thread writes it while the run goes on, from copies of all that the next step changes, where there is room. The
training thread only makes the copies, and waits where a checkpoint is due before the last one is written. The thread's
collectives go over a group of its own; whether all processes are done is asked for in the training thread.

Any number of processes may resume it. The files have to lie where every process sees them.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import load_model
from mm_grpo.learner.optimizer import trainable
from mm_grpo.learner.state import Snapshot, frozen_digest, load_state, load_weights, state_file
from mm_grpo.rollout.background import Background
from mm_grpo.run.checkpoint_writer import CheckpointContents, write_checkpoint
from mm_grpo.run.environment import free_memory
from mm_grpo.run.manifest import (
    FORMAT,
    Checkpoint,
    checkpoints_in,
    inspect_checkpoint,
    read_checkpoint,
)
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.same_run import deciding_fields, differing_field
from mm_grpo.timing import span

MOST_STEPS = 100
"""Steps that a killed run redoes at most, where run.save_every is null."""
PATIENCE = 2.0
"""Seconds after which it is said that a run waits for a checkpoint at its end."""
logger = logging.getLogger("mm_grpo")


class Checkpoints:
    """The checkpoints of one run, written and read by all processes of `learner.ranks` together.

    `call` is called in the training thread with the event `on_save`, its `step` and its `path` when one is whole.
    """

    def __init__(
        self,
        paths: RunPaths,
        learner: Learner,
        config: GRPOConfig,
        call: Callable[..., None] | None = None,
    ) -> None:
        self.folder, self.log, self.learner, self.config = paths.checkpoints, paths.metrics, learner, config
        self.ranks, self._call = learner.ranks, call
        self._thread = Background(1, "mm_grpo checkpoint")
        self._copies = Snapshot()
        self._writing: tuple[int, futures.Future[Path]] | None = None

    def save(self, step: int, extra: Mapping[str, Any], *, spared: int | None = None) -> Path:
        """`begin`, and wait until the checkpoint is whole; returns its folder."""
        self.begin(step, extra, spared=spared)
        self.finish(wait=True)
        return self.folder / f"step-{step:06d}"

    def begin(self, step: int, extra: Mapping[str, Any], *, spared: int | None = None) -> None:
        """Take up the state after `step` and write the checkpoint, once the one before it is written. Collective.

        It is whole once `finish` has said so, and weights may change as soon as this returns.
        What is removed then is said at `write_checkpoint`; `spared` is the step of one that stays. Raises
        ConfigError when this checkpoint, or the one before it, cannot be written.
        """
        self._end()
        identity = self._identity  # every process takes part in it
        background = self._in_background
        with span("snapshot"), self.ranks.fail_together("a checkpoint"):
            contents = self._contents(step, extra, identity, spared, copied=background)
        if background:
            thread = self._thread
            write = partial(write_checkpoint, self.folder, contents, self._thread_ranks, thread.require_open)
            future = thread.submit(write)
        else:
            future = futures.Future()
            future.set_result(write_checkpoint(self.folder, contents, self.ranks))
        self._writing = step, future

    def finish(self, *, wait: bool) -> None:
        """End the checkpoint that is being written, if it is on the disk on all processes, or with `wait`. Collective.

        Raises ConfigError when it cannot be written.
        """
        if self._writing is not None:
            with span("checkpoint"):
                if wait or not self.ranks.max(not self._writing[1].done(), "a checkpoint"):
                    self._end()

    def close(self) -> None:
        """Wait for what is being written, at the end of a run that failed; interrupted, leave it without its name.

        That it cannot be written either is a warning, for the run has an error of its own.
        """
        if self._writing is not None:
            step, future = self._writing
            self._wait(
                future, f"the checkpoint of step {step} is being written; Ctrl-C ends the run without it"
            )
            if (error := future.exception()) is not None:
                logger.warning("%s", error)
        self._thread.close()
        self._copies.clear()

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
        """Within it this process has the weights of a checkpoint, or for 0 those of `model.path`, then its own."""
        trained = trainable(self.learner.module)
        own = {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained.items()}
        try:
            if step:
                found = read_checkpoint(self.folder / f"step-{step:06d}")
                load_weights(trained, [found.path / str(mark["name"]) for mark in found.manifest["files"]])
            else:
                dtype = str(self.learner.model.dtype).removeprefix("torch.")
                section = self.config.model.model_copy(update={"device": "cpu", "dtype": dtype})
                with torch.random.fork_rng(devices=[]):  # adapters are drawn, and are 0 all the same
                    base = load_model(section, self.learner.processor.family)
                for name, parameter in base.named_parameters():
                    if name in trained:
                        trained[name].data.copy_(parameter)
            yield
        finally:
            for name, kept in own.items():
                trained[name].data.copy_(kept)

    # writing ---------------------------------------------------------------------------------

    def _contents(
        self,
        step: int,
        extra: Mapping[str, Any],
        identity: Mapping[str, Any],
        spared: int | None,
        *,
        copied: bool,
    ) -> CheckpointContents:
        """What this process writes of the checkpoint; copied, it stays what it is when the weights change."""
        optimizer = self.learner.optimizer
        state = state_file(optimizer)
        if copied:
            state = state.copied(self._copies)
        manifest = {
            "format": FORMAT,
            "step": step,
            "extra": dict(extra),
            **identity,
            "updates": optimizer.updates,
            "adam_steps": optimizer.adam_steps,
        }
        log = self.log.read_bytes() if self.ranks.first and self.log.is_file() else None
        keep = self.config.run.keep_checkpoints
        return CheckpointContents(step, manifest, state, log, keep, spared)

    def _end(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and say that it is whole."""
        if self._writing is None:
            return
        step, future = self._writing
        with span("writing ends"):
            self._wait(future)
        path = future.result()
        if self._call is not None:
            self._call("on_save", step=step, path=path)

    def _wait(self, future: futures.Future[Path], message: str = "") -> None:
        """Wait for the thread; `message` is said where that takes long."""
        try:
            if message and futures.wait([future], PATIENCE).not_done and self.ranks.first:
                logger.warning(message)
            futures.wait([future])
        except KeyboardInterrupt:
            self._thread.close()  # what it writes gets no name any more
            raise
        finally:
            self._writing = None

    @cached_property
    def _thread_ranks(self) -> Ranks:
        """The ranks of the thread that writes. Collective."""
        return self.ranks.second()

    @cached_property
    def _in_background(self) -> bool:
        """Whether a thread writes: where the host has room for the copies. Collective."""
        size = 4 * sum(tensor.numel() for tensor in state_file(self.learner.optimizer).tensors.values())
        host, free = platform.node(), free_memory()
        sizes = self.ranks.all_gather((host, size), "a checkpoint")
        needed = sum(size for where, size in sizes if where == host)
        short = free is not None and needed > free
        if short:
            logger.warning(
                "copies for a checkpoint take %.3g GB of the host's memory, and %.3g GB are free; "
                "checkpoints are written while the run waits",
                needed / 1e9,
                (free or 0) / 1e9,
            )
        return not self.ranks.max(short, "a checkpoint")

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
        }


def steps_between(every: int | None, max_steps: int, most: int | None = MOST_STEPS) -> int:
    """Steps from one checkpoint (or evaluation) to the next, 0 for none: what a field says, or what null stands for."""
    return max(1, min(most or max_steps, max_steps // 10)) if every is None else every
