"""The loop: rows → prompts → completions → rewards → groups → updates → weights back to the engine.

`GRPOTrainer` puts the parts together and reads top to bottom. What each part does is written in its
own file; here is only the order in which they are called, and what is kept of each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from mm_grpo.algorithm.advantages import group_advantages
from mm_grpo.config import GRPOConfig
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sets import Source, load_eval, load_train
from mm_grpo.errors import ConfigError
from mm_grpo.health.action import act
from mm_grpo.health.duplicate_completions import duplicate_completions
from mm_grpo.health.logp_gap import logp_gap
from mm_grpo.health.update_happens import update_happens
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.resolve import describe
from mm_grpo.rewards.scoring import Scorer, Scores
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.prompting import StepPrompts
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.evaluation import Evaluation, as_metrics, evaluate
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.parity import check_start, first_with_image, require_answers
from mm_grpo.run.progress import Progress
from mm_grpo.run.setup import load_sides
from mm_grpo.run.step_metrics import step_metrics
from mm_grpo.run.trackers import Trackers
from mm_grpo.types import Completion, Group


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
    ) -> None:
        self.config, self.callbacks = config, tuple(callbacks)
        rollout = config.rollout
        config.check()
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
        self.scorer.start()  # workers import their rewards while the model loads
        reads = [p for p in (config.model.path, config.data.train) if isinstance(p, str)]
        self.folder = RunFolder.prepare(config.run.dir, overwrite=config.run.overwrite, reads=reads)
        self.trackers = Trackers.prepare(config.run.trackers)

        sides = load_sides(config, updates, model=model, processor=processor)
        self.processor, self.model, self.prompter = sides.processor, sides.model, sides.prompter
        self.learner, self.engine, self.sync = sides.learner, sides.engine, sides.sync
        self.sampling = Sampling(rollout.max_completion_length, rollout.temperature)
        self.tokens_seen = 0

    def train(self) -> dict[str, Any]:
        """Run to `max_steps`; returns what `summary.json` holds.

        Raises GuardStop when a guard stops the run; the run folder then holds every finished step.
        """
        started = time.perf_counter()
        run = self.folder.start(
            self.config.to_yaml(), rewards=[{"name": s.name, **describe(s)} for s in self.scorer.specs]
        )
        self._call("on_train_begin")
        headline = self.config.batch_sentence(processes=1)
        with (
            Progress(self.max_steps, headline=headline) as progress,
            self.trackers.open(self.config) as trackers,
        ):
            try:
                if self.config.run.parity_check:
                    self._check_parity()
                before = after = self.evaluate()
                for step in range(1, self.max_steps + 1):
                    metrics = self._step(step, run)
                    every = self.config.run.eval_every
                    if step == self.max_steps or (every and step % every == 0):
                        clock = time.perf_counter()
                        after = self.evaluate(step)
                        metrics |= as_metrics(after) | {"time/eval": time.perf_counter() - clock}
                    run.metrics.append(step, metrics)
                    trackers.log(step, metrics)
                    progress.step(step, metrics)
                    self._call("on_step_end", metrics)
                if self.config.run.save_model:
                    run.replace_folder("model", self.save)
                summary = _summary(before, after, time.perf_counter() - started, self.max_steps)
                run.write_summary(summary)
            finally:
                self.scorer.close()
                if self.config.run.report:
                    run.write_report()
        self._call("on_train_end")
        return summary

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline."""
        return {
            name: evaluate(dataset, self.prompter.process, self.engine, self.scorer, self.config, step)
            for name, dataset in self.eval_sets.items()
        }

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int, run: RunFolder) -> dict[str, float]:
        """Rollout, rewards, update and sync of one step; returns its metrics."""
        times: dict[str, float] = {}
        with _timed(times, "step_time"):
            with _timed(times, "time/data"):
                asked = self.prompter.step(self.train_set, self.order, step)
            with _timed(times, "time/rollout"):
                seeds = [self.seeds.group(step, slot) for slot in asked.slots]
                requests = requests_for(asked.prompts, seeds, self.sampling)
                completions = self.engine.generate(requests)
                require_answers(requests, completions, self.sync.version)
            with _timed(times, "time/rewards"):
                repeated = [p for p in asked.prompts for _ in range(self.config.rollout.num_generations)]
                scores = self.scorer.score(repeated, completions, step)
            groups = self._groups(asked, completions, scores)
            every = self.config.run.log_rollouts_every
            if every and (step % every == 0 or step in (1, self.max_steps)):
                with _timed(times, "time/log"):
                    run.write_rollouts(step, groups, scores.parts, scores.extra)
            actions = self.config.run.guards
            act("duplicate_completions", duplicate_completions(groups), actions)
            with _timed(times, "time/learner"):
                witness = self.sync.witness(groups)
                report = self.learner.step(groups)
            act("logp_gap", logp_gap(report.mean_gap, report.max_gap, self.sync.limit), actions)
            for record in report.updates:
                act("update_happens", update_happens(record), actions)
            with _timed(times, "time/sync"):
                synced = self.sync.update(step, witness, noise=report.max_gap)
            act("logp_gap", synced.problem, actions)
        self.tokens_seen += sum(len(p.token_ids) for p in repeated) + sum(
            len(c.token_ids) for c in completions
        )
        counts = {
            "num_tokens": self.tokens_seen,
            "epoch": self.order.epoch(step),
            "prompts/dropped": asked.dropped,
        }
        # a reward may log any name it likes; ours win
        ours = {**step_metrics(groups), **report.metrics, **synced.metrics, **counts, **times}
        return {**scores.metrics, **ours}

    def _groups(self, asked: StepPrompts, completions: Sequence[Completion], scores: Scores) -> list[Group]:
        """Group completions by slot and give them advantages."""
        size = self.config.rollout.num_generations
        cuts = [slice(i * size, (i + 1) * size) for i in range(len(asked.prompts))]
        rewards = [tuple(scores.totals[cut]) for cut in cuts]
        advantages = group_advantages(rewards, self.config.algorithm.scale_rewards)
        return [
            Group(slot, prompt, tuple(completions[cut]), reward, advantage)
            for slot, prompt, cut, reward, advantage in zip(
                asked.slots, asked.prompts, cuts, rewards, advantages, strict=True
            )
        ]

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


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start


def _reward_entries(config: GRPOConfig, given: Sequence[Any] | None) -> Sequence[Any]:
    if given is None:
        config.require_rewards()
        return config.rewards
    if not given:
        raise ConfigError("rewards=[] has no reward; give at least one name, mapping or function")
    return given


def _summary(
    before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], seconds: float, steps: int
) -> dict[str, Any]:
    """What `summary.json` holds: accuracies in [0, 1] of the headline set and of each set, seconds, steps."""
    headline = next(iter(before), None)
    return {
        "accuracy_before": before[headline].accuracy if headline else None,
        "accuracy_after": after[headline].accuracy if headline else None,
        "seconds": round(seconds, 3),
        "steps": steps,
        "eval": {
            n: {"before": before[n].accuracy, "after": after[n].accuracy, "rows": before[n].rows}
            for n in before
        },
    }
