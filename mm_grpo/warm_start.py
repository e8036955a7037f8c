"""Warm start: teach the gold answers of rows before a run (`mm-grpo warm`).

A base that never says an answer earns no reward, so GRPO cannot teach it. Here the learner of the run to come learns
the gold answer of each row: a group of one completion with advantage 1. Under the loss type cispo its loss is -log p,
because the ratio of a first pass is 1. So its gradient is that of the cross-entropy, over the whole vocabulary at
temperature 1. Rows, order, processor, chat template, packs, adapters and processes are those of the run, so the form
that is taught is the form in which the run begins. Rewards are not called, and no engine samples.

The run folder is `run.dir` with WARM at its end: `model/` is for `model.path`, `checkpoints/` for --resume and export.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch

from mm_grpo.build import load_policy, processor_of
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sources import Source, load_train
from mm_grpo.distributed.ranks import start
from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.health.checks import finite_loss, update_happens
from mm_grpo.health.guards import Guards
from mm_grpo.learner.learner import Learner
from mm_grpo.open_run import check_folder
from mm_grpo.preflight.out_of_memory import memory_explained, refuse_too_large
from mm_grpo.preflight.warm_answers import GoldAnswers, Lists
from mm_grpo.processors.base import Processor
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.rollout.prompts import PromptBuilder, StepPrompts, TooLong, context_of
from mm_grpo.run.checkpoint import Checkpoints, steps_between
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.metrics import iter_metrics
from mm_grpo.run.paths import dated
from mm_grpo.run.progress import progress_of_run
from mm_grpo.run.stop_signals import StopSignals
from mm_grpo.run.trackers import Trackers
from mm_grpo.terminal import print_phase
from mm_grpo.timing import timed
from mm_grpo.trained.warm_mark import write_mark
from mm_grpo.types import Completion, Group

WARM = "-warm"
MEAN_STEPS = 10
"""Most steps at the start and at the end whose mean NLL is reported; each at most half of them."""


def warm_config(config: GRPOConfig) -> GRPOConfig:
    """Return the config of the warm start before the run of `config`: its folder, and the loss -log p."""
    algorithm = AlgorithmConfig(loss_type="cispo", epsilon_high=1.0, importance_sampling_mode="none")
    rollout = config.rollout.model_copy(update={"engine": "transformers", "max_staleness": 0})
    optim = config.optim.model_copy(update={"updates_per_step": 1})
    changed = config.model_copy(update={"algorithm": algorithm, "rollout": rollout, "optim": optim})
    # it always saves a model, so one that no run wrote is refused there
    return changed.with_values({"run.dir": config.run.dir.rstrip("/") + WARM, "run.save_model": True})


def warm(
    config: GRPOConfig,
    *,
    answer: str,
    steps: int | None = None,
    lists: Lists | None = None,
    train: Source | None = None,
    model: Any = None,
    processor: Processor | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Teach a model the gold answers in the column `answer`, and save it for `model.path`. Collective.

    A step learns `rollout.prompts_per_step` rows; `steps` are by default one pass over the rows. `train`, `model` and
    `processor` are as of `GRPOTrainer`; a `model` that is passed in is trained in place. Returns the number of steps,
    the seconds, the mean NLL per token in the first and in the last steps, and the path of the model. Raises UserError
    for what the user can correct, and GuardStop if an update did not happen.
    """
    config.check()
    if config.rollout.tools or config.rollout.environment is not None:
        raise ConfigError(
            "rollout.tools, rollout.environment: a warm start teaches one answer to a prompt, and no calls of tools; "
            "leave them out of its config"
        )
    if (steps is not None and steps < 1) or lists not in (None, "first", "each"):
        raise ConfigError(f"steps = {steps}, lists = {lists!r}: must be 1 or more, and first, each or None")
    base, config = config.model.path, warm_config(config)
    ranks = start(config.model.device, config.run.process_timeout)
    phase = print_phase if ranks.first else lambda text: None
    with ranks.fail_together("looking at run.dir"):
        run_dir = dated(config.run.dir, newest=resume) if ranks.first else ""
    config = config.with_values({"run.dir": ranks.broadcast(run_dir, "run.dir")})
    golds = GoldAnswers(config, answer, lists)
    loaded = processor if processor is not None else processor_of(config)
    if not hasattr(loaded, "answer_ids"):
        raise ConfigError(
            f"model.processor: {type(loaded).__qualname__} has no answer_ids, which a warm start calls"
        )
    phase("reading the rows")
    rows = readable(load_train(config, train), config.data.on_bad_media, ranks, loaded)
    golds.check(rows)
    order = rows.order(config.rollout.prompts_per_step, config.run.seed, config.data.shuffle)
    folder = check_folder(config, inputs_of(config, train=train), ranks, resume=resume, saves=True)
    trackers, identity = Trackers(config.run.trackers if ranks.first else []), golds.identity(rows)
    with memory_explained(config, processes=ranks.world):
        if model is None:
            refuse_too_large(config, processes=ranks.world)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.run.seed % 2**63)  # adapters are drawn from it
            model, processor, device = load_policy(config, model, processor, loaded, ranks=ranks, phase=phase)
        steps = steps or order.steps_per_epoch
        learner = Learner(model.to(device), processor, config, steps, ranks, as_sampled=False)
        builder = PromptBuilder(processor, config, context_of(model.config))
        warming = _WarmStart(config, learner, builder, rows, order, golds, folder, identity)
        with closing(builder), ExitStack() as stack:
            with ranks.fail_together("taking run.dir"):
                if ranks.first:
                    stack.enter_context(folder.claim())
            stack.enter_context(trackers.open(config))
            return warming.run(base, steps, resume, trackers)


@dataclass
class _WarmStart:
    """The steps of a warm start. Every process calls its methods."""

    config: GRPOConfig
    learner: Learner
    builder: PromptBuilder
    rows: Rows
    order: PromptOrder
    golds: GoldAnswers
    folder: RunFolder
    identity: Mapping[str, Any]
    tokens: int = 0

    def __post_init__(self) -> None:
        self.ranks, self.processor = self.learner.ranks, cast("HFProcessor", self.learner.processor)
        self.checkpoints = Checkpoints(self.folder.paths, self.learner, self.config)
        self.guards = Guards(self.config, [], self.folder.append_event if self.ranks.first else None)

    def run(self, base: str, steps: int, resume: bool, trackers: Trackers) -> dict[str, Any]:
        """Make the steps that are left, and save the model; return the result of `warm`."""
        started, ranks, paths = time.perf_counter(), self.ranks, self.folder.paths
        save_every, first = steps_between(self.config.run.save_every, steps), self._begin(resume)
        headline = (
            f"{self.order.sentence(steps)}\n{self.config.rollout.prompts_per_step} rows a step, learning rate "
            f"{self.config.learning_rate:g}; loss is the NLL of the answers, in nats per token"
        )
        options = {"headline": headline, "first": first, "tokens": self.tokens, "quiet": not ranks.first}
        with StopSignals(quiet=not ranks.first) as signals, progress_of_run(steps, **options) as progress:
            for step in range(first + 1, steps + 1):
                metrics = self._step(step)
                with ranks.fail_together("writing metrics.jsonl"):
                    for log in (self.folder, trackers, progress) if ranks.first else ():
                        log.on_log(step, metrics)
                signal = ranks.max(signals.number, "stopping")
                due = step == steps or bool(signal) or (save_every > 0 and step % save_every == 0)
                if save_every and due:
                    extra = {"tokens": self.tokens, "warm": self.identity, "rewards": [], "best": None}
                    self.checkpoints.save(step, extra)
                if signal and step < steps:
                    raise signals.interruption(signal, step, step if save_every else None, paths.root)
        result: dict[str, Any] = {"steps": steps, "seconds": time.perf_counter() - started}
        with ranks.fail_together("saving the model"):
            if ranks.first:
                # steps of which every row was dropped have no loss
                losses = [row["loss"] for row in iter_metrics(paths.metrics) if row["learner/updates"]]
                if not losses:
                    raise GuardStop(f"the warm start made no update in {steps} steps: every row was dropped")
                window = min(MEAN_STEPS, -(-len(losses) // 2))
                result["nll"] = fmean(losses[:window]), fmean(losses[-window:])
        with ranks.fail_together("saving the model"):
            save = partial(self._save, base, steps, result)
            self.folder.replace_folders({"model": save}, first=ranks.first)
            result["model"] = str(paths.model)
        return ranks.broadcast(result, "the result")

    def _begin(self, resume: bool) -> int:
        """Load the newest checkpoint if the warm start resumes, and start the run folder; return the steps made."""
        checkpoint, step, log = self.checkpoints.newest() if resume else None, 0, None
        if checkpoint is not None:
            for name, value in self.identity.items():
                if checkpoint.extra["warm"][name] != value:
                    raise ConfigError(
                        f"--resume: {name} differs from that of the checkpoint '{checkpoint.path}'; put it back, or "
                        "start again with run.overwrite=true"
                    )
            self.checkpoints.load(checkpoint)
            step, log, self.tokens = checkpoint.step, checkpoint.log, checkpoint.extra["tokens"]
        with self.ranks.fail_together("starting"):
            if self.ranks.first:
                self.folder.start(self.config.to_yaml())
                self.folder.cut_after(step, log)
        return step

    def _step(self, step: int) -> dict[str, float]:
        """Learn the rows of one step; return its metrics."""
        ranks, times = self.ranks, dict[str, float]()
        with timed(times, "step_time"):
            with ranks.fail_together("prompts"):
                next_rows = self._local_rows(step + 1).values()
                prompts = self.builder.prompts(self.rows, self._local_rows(step), next_rows)
                groups = self._groups(step, prompts)
            if step == 1:
                self._show(groups)
            report = self.learner.update(groups)
            with ranks.fail_together("guards"):
                for record in report.updates:
                    self.guards.apply("update_happens", update_happens(record), step)
                self.guards.apply("update_happens", finite_loss(report.metrics["loss"]), step)
        tokens = sum(len(g.prompt.token_ids) + len(g.completions[0].token_ids) for g in groups)
        counts = ranks.sum({"tokens": tokens, "rows": len(groups)}, "tokens")
        self.tokens += int(counts["tokens"])
        dropped = self.config.rollout.prompts_per_step - counts["rows"]
        # those of sampling and clipping compare the learner with an engine or an earlier policy, and there is none
        names = [name for name in report.metrics if not name.startswith(("sampling/", "clip_ratio/"))]
        counters = {"num_tokens": self.tokens, **self.order.epochs(step), "prompts/dropped": dropped}
        return {**{name: report.metrics[name] for name in names}, **counters, **times}

    def _local_rows(self, step: int) -> dict[int, int]:
        return dict(self.ranks.shard(list(enumerate(self.order.rows(step)))))

    def _groups(self, step: int, prompts: StepPrompts) -> list[Group]:
        """Return a group of one completion, the gold answer, for each prompt; none for an answer that is dropped."""
        groups, limit = [], self.config.rollout.max_completion_length
        for slot, prompt in zip(prompts.slots, prompts.prompts, strict=True):
            turn = ((step - 1) * self.order.prompts_per_step + slot) // self.order.n_rows
            text = self.golds.text(prompt, turn)
            ids = self.processor.answer_ids(prompt, text)
            if len(ids) > limit:
                error = TooLong(
                    f"{prompt.uid}: --answer {self.golds.column}: the answer has {len(ids)} tokens, and "
                    f"rollout.max_completion_length allows {limit}; raise it, or leave the row out with "
                    "data.on_overlong=drop"
                )
                if self.builder.dropped_by(error) is None:
                    raise error
                continue
            answer = Completion(ids, (0.0,) * len(ids), text, "stop", seed=0)
            groups.append(Group(slot, prompt, (answer,), rewards=(1.0,), advantages=(1.0,)))
        return groups

    def _show(self, groups: Sequence[Group]) -> None:
        """Log the groups of the first step as rollouts, which an export is proved on, and show the first answer."""
        shares = self.ranks.gather([group.without_local_state() for group in groups], "the first answers")
        with self.ranks.fail_together("the first answers"):
            if shares is not None and (first := [group for share in shares for group in share]):
                self.folder.write_rollouts(1, first)
                ids = first[0].completions[0].token_ids
                text = self.processor.tokenizer.decode(ids)
                print_phase(
                    f"{first[0].prompt.uid} teaches {text!r} ({len(ids)} tokens, the last one ends it)"
                )

    def _save(self, base: str, steps: int, result: Mapping[str, Any], folder: Path | None) -> None:
        self.learner.save(folder)
        if folder is not None:
            nll = result["nll"][1]
            write_mark(folder, self.config, base=base, answer=self.golds.column, steps=steps, nll=nll)
