"""The loop: rows → prompts → completions → rewards → groups → updates → weights back to the engine.

`GRPOTrainer` puts the parts together and reads top to bottom. What each part does is written in its
own file; here is only the order in which they are called, and what is kept of each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sets import Source, load_eval, load_train
from mm_grpo.errors import ConfigError
from mm_grpo.health.action import act
from mm_grpo.health.logp_gap import logp_gap
from mm_grpo.health.update_happens import update_happens
from mm_grpo.learner.distributed import start
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.resolve import describe
from mm_grpo.rewards.scoring import Scorer
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.collecting import Collector
from mm_grpo.run.evaluation import Best, Evaluation, as_metrics, better, evaluate
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.metrics import read_metrics
from mm_grpo.run.parity import check_start, first_with_image
from mm_grpo.run.progress import Progress
from mm_grpo.run.resuming import refuse_another_run, rows_of
from mm_grpo.run.setup import load_sides
from mm_grpo.run.timing import timed
from mm_grpo.run.trackers import Trackers

EVENTS = ("on_train_begin", "on_step_end", "on_train_end")


class GRPOTrainer:
    """Fine-tunes a vision-language model with GRPO.

    `config` is the whole run. `train` and `eval` override `data.train` and `data.eval` with rows, a
    `datasets.Dataset`, a path, or for `eval` a dict of named sets (the first is the headline).
    `rewards` overrides the config's list and mixes names, mappings and callables. `model` is a
    transformers model to train in place of the one at `model.path`; `processor` one of ours. Callbacks
    are objects with any of `on_train_begin(trainer)`, `on_step_end(trainer, metrics)` and
    `on_train_end(trainer)`.

    The constructor checks everything that can be checked before a model is loaded, then loads it.
    Raises UserError (ConfigError, DataError, RewardError) for what the user can mend.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        train: Source | None = None,
        eval: Source | Mapping[str, Source] | None = None,
        rewards: Sequence[Any] | None = None,
        model: Any = None,
        processor: Processor | None = None,
        callbacks: Sequence[Any] = (),
        resume: bool = False,
    ) -> None:
        if not isinstance(config, GRPOConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; it must be a GRPOConfig: write GRPOConfig.from_dict(...) or"
                " GRPOConfig.from_yaml(path)"
            )
        self.config, self.resume = config, resume
        rollout = config.rollout
        config.check()
        self.ranks = start(config.model.device, config.run.process_timeout)
        _refuse_deaf(callbacks)
        self.callbacks = tuple(callbacks) if self.ranks.first else ()
        config.require_eval(given=eval is not None)
        self.train_set = load_train(config, train)
        self.eval_sets = load_eval(config, eval)
        self.max_steps = config.run.max_steps or math.ceil(len(self.train_set) / rollout.prompts_per_step)
        self.seeds = SeedPlan(
            run_seed=config.run.seed,
            prompts=rollout.prompts_per_step,
            generations=rollout.num_generations,
            attempts=rollout.max_attempts,
            max_steps=self.max_steps,
        )
        updates = self.max_steps * config.optim.updates_per_step * config.algorithm.num_iterations
        if config.optim.warmup_steps > updates:
            raise ConfigError(
                f"optim.warmup_steps = {config.optim.warmup_steps}: the run makes {updates} updates, so the learning "
                "rate would never be reached; lower it, or raise run.max_steps"
            )
        self.order = PromptOrder(
            len(self.train_set), rollout.prompts_per_step, config.run.seed, shuffle=config.data.shuffle
        )
        self.scorer = Scorer(
            _reward_entries(config, rewards),
            conversational=self.train_set.conversational,
            max_steps=self.max_steps,
        )
        for dataset in (self.train_set, *self.eval_sets.values()):
            self.scorer.check(dataset.columns)
        if self.ranks.first:
            self.scorer.start()  # workers import their rewards while the model loads
        reads = [p for p in (config.model.path, config.data.train) if isinstance(p, str)]
        with self.ranks.together("looking at run.dir"):
            held = {"resume": True} if resume or not self.ranks.first else {"overwrite": config.run.overwrite}
            self.folder = RunFolder.prepare(config.run.dir, reads=reads, **held)
        self.trackers = Trackers.prepare(config.run.trackers if self.ranks.first else [])

        # adapters are drawn from the run's seed, and the caller's random numbers go on as they were
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.run.seed % 2**63)
            sides = load_sides(config, updates, model=model, processor=processor, ranks=self.ranks)
        self.processor, self.model, self.prompter = sides.processor, sides.model, sides.prompter
        self.learner, self.engine, self.sync = sides.learner, sides.engine, sides.sync
        self.collector = Collector(
            config, self.train_set, self.order, self.seeds, sides, self.scorer, self.ranks
        )
        self.checkpoints = Checkpoints(self.folder.paths, self.learner, config)
        self.tokens_seen = 0

    def train(self) -> dict[str, Any]:
        """Run to `max_steps`; returns what `summary.json` holds.

        Every process calls it; the first one writes the run folder. Raises GuardStop when a guard stops the
        run; the folder then holds every finished step.
        """
        started = time.perf_counter()
        run, first = self.folder, self.ranks.first
        done, kept = self._restore()
        with self.ranks.together("starting"):
            if first:
                specs = [{"name": s.name, **describe(s)} for s in self.scorer.specs]
                run.start(self.config.to_yaml(), rewards=specs)
                run.cut_after(done)
        self._call("on_train_begin")
        headline = self.config.batch_sentence(processes=self.ranks.world)
        with (
            Progress(self.max_steps, headline=headline, first=done, quiet=not first) as progress,
            self.trackers.open(self.config) as trackers,
        ):
            try:
                if self.config.run.parity_check:
                    with self.ranks.together("the parity check"):
                        self._check_parity()
                if not kept:
                    before = after = self.evaluate()
                    best = better(None, before, 0)
                else:
                    before, after = (
                        {n: Evaluation(**e) for n, e in kept[k].items()} for k in ("before", "after")
                    )
                    best = Best(**kept["best"]) if kept.get("best") else None
                for step in range(done + 1, self.max_steps + 1):
                    metrics = self._step(step, run)
                    last, every = step == self.max_steps, self.config.run.eval_every
                    if last or (every and step % every == 0):
                        clock = time.perf_counter()
                        after = self.evaluate(step)
                        best = better(best, after, step)
                        metrics |= as_metrics(after) | {"time/eval": time.perf_counter() - clock}
                    if first:
                        run.metrics.append(step, metrics)
                    trackers.log(step, metrics)
                    progress.step(step, metrics)
                    self._call("on_step_end", metrics)
                    if (every := self.config.run.save_every) and (last or step % every == 0):
                        extra = self._extra(before, after, best)
                        self.checkpoints.save(step, extra, spared=best.step if best else None)
                with self.ranks.together("saving the model"):
                    if first and self.config.run.save_model:
                        run.replace_folder("model", self.save)
                summary = _summary(before, after, best, time.perf_counter() - started, self.max_steps)
                if first:
                    run.write_summary(summary)
            finally:
                self.scorer.close()
                if first and self.config.run.report:
                    run.write_report()
        self._call("on_train_end")
        return summary

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline."""
        return {
            name: evaluate(dataset, self.prompter, self.engine, self.scorer, self.config, step, self.ranks)
            for name, dataset in self.eval_sets.items()
        }

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int, run: RunFolder) -> dict[str, float]:
        """Rollout, rewards, update and sync of one step; returns its metrics."""
        ranks, times = self.ranks, dict[str, float]()
        actions, algorithm = self.config.run.guards, self.config.algorithm
        with timed(times, "step_time"):
            collected = self.collector.step(step, run)
            with timed(times, "time/learner"):
                witness = self.sync.witness(collected.groups)
                report = self.learner.step(collected.groups)
            with ranks.together("guards"):
                act("logp_gap", logp_gap(report.mean_gap, report.max_gap, self.sync.limit), actions)
                for record in report.updates:
                    act("update_happens", update_happens(record), actions)
            with timed(times, "time/sync"), ranks.together("weight sync"):
                synced = self.sync.update(step, witness, noise=report.max_gap)
                act("logp_gap", synced.problem, actions)
            if algorithm.sync_ref_model and step % algorithm.ref_model_sync_steps == 0:
                self.learner.refresh_reference()
        self.tokens_seen += collected.tokens
        counted = {
            "num_tokens": self.tokens_seen,
            "epoch": self.order.epoch(step),
            "prompts/dropped": collected.dropped,
        }
        # a reward may log any name it likes, and a KL in rewards has the name of one in the loss; ours win
        return {
            **collected.metrics, **report.metrics, **synced.metrics, **counted, **collected.times, **times
        }  # fmt: skip

    # resuming --------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, Mapping[str, Any]]:
        """Take up the newest checkpoint when asked to: the steps that are done, and what was kept beside."""
        found = self.checkpoints.newest() if self.resume else None
        if found is None:
            rows = len(read_metrics(self.folder.paths.metrics)) if self.folder.paths.metrics.exists() else 0
            if self.resume and rows and not self.config.run.save_every:
                raise ConfigError(
                    f"run.dir = '{self.folder.paths.root}' has {rows} finished steps and no checkpoint, for "
                    "run.save_every is 0; start again with run.overwrite=true, and set run.save_every"
                )
            return 0, {}
        refuse_another_run(found, self._rows, self.max_steps)
        self.checkpoints.load(found)
        self.tokens_seen = found.extra["tokens_seen"]
        with self.ranks.together("weight sync"):
            self.sync.send(found.step)
        return found.step, found.extra

    @cached_property
    def _rows(self) -> dict[str, Any]:
        return rows_of(self.train_set, self.eval_sets)

    def _extra(
        self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], best: Best | None
    ) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's state."""
        found = {"before": before, "after": after}
        return {
            "tokens_seen": self.tokens_seen,
            "rows": self._rows,
            "best": asdict(best) if best else None,
            **{key: {n: asdict(e) for n, e in sets.items()} for key, sets in found.items()},
        }

    def _check_parity(self) -> None:
        """Compare engine and learner on the first prompt with an image among the first P, else on the first."""
        places = islice(self.prompter.first(self.train_set, self.order), self.config.rollout.prompts_per_step)
        step, slot, prompt = first_with_image(places)
        seeds = self.seeds.group(step, slot)
        check_start(self.engine, self.learner, self.config, prompt, seeds, self.sync.version)

    # small parts -----------------------------------------------------------------------------

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            method: Callable[..., Any] | None = getattr(callback, event, None)
            if method is not None:
                method(self, *args)


def _refuse_deaf(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(
                f"callbacks: {callback!r} has none of the methods {', '.join(EVENTS)}, and would never be called"
            )


def _reward_entries(config: GRPOConfig, given: Sequence[Any] | None) -> Sequence[Any]:
    if given is None:
        config.require_rewards()
        return config.rewards
    if not given:
        raise ConfigError("rewards=[] has no reward; give at least one name, mapping or function")
    return given


def _summary(
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    best: Best | None,
    seconds: float,
    steps: int,
) -> dict[str, Any]:
    """What `summary.json` holds: accuracies in [0, 1] of the headline set and of each set, seconds, steps.

    A set whose accuracy could not be measured is left out of `eval`.
    """
    headline = next(iter(before), None)
    return {
        "accuracy_before": before[headline].accuracy if headline else None,
        "accuracy_after": after[headline].accuracy if headline else None,
        "accuracy_best": best.accuracy if best else None,
        "best_step": best.step if best else None,
        "seconds": round(seconds, 3),
        "steps": steps,
        "eval": {
            n: {"before": before[n].accuracy, "after": after[n].accuracy, "rows": before[n].rows}
            for n in before
            if before[n].accuracy is not None and after[n].accuracy is not None
        },
    }
