"""The loop: rows → prompts → completions → rewards → groups → updates → weights back to the engine.

`GRPOTrainer` puts the parts together and reads top to bottom. What each part does is written in its
own file; here is only the order in which they are called, and what is kept of each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from mm_grpo.learner.distributed import start
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.resolve import describe
from mm_grpo.rewards.scoring import Scorer
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.prompting import StepPrompts
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.evaluation import Evaluation, as_metrics, evaluate
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.metrics import read_metrics
from mm_grpo.run.parity import check_start, first_with_image, require_answers
from mm_grpo.run.progress import Progress
from mm_grpo.run.setup import load_sides
from mm_grpo.run.step_metrics import step_metrics
from mm_grpo.run.trackers import Trackers
from mm_grpo.types import Completion, Group, Prompt

Answered = tuple[int, Prompt, tuple[Completion, ...]]
"""A slot, its prompt and its completions."""


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
        self.config, self.resume = config, resume
        rollout = config.rollout
        config.check()
        self.ranks = start(config.model.device, config.run.process_timeout)
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

        sides = load_sides(config, updates, model=model, processor=processor, ranks=self.ranks)
        self.processor, self.model, self.prompter = sides.processor, sides.model, sides.prompter
        self.learner, self.engine, self.sync = sides.learner, sides.engine, sides.sync
        self.sampling = Sampling(rollout.max_completion_length, rollout.temperature)
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
                else:
                    before, after = (
                        {n: Evaluation(**e) for n, e in kept[k].items()} for k in ("before", "after")
                    )
                for step in range(done + 1, self.max_steps + 1):
                    metrics = self._step(step, run)
                    last, every = step == self.max_steps, self.config.run.eval_every
                    if last or (every and step % every == 0):
                        clock = time.perf_counter()
                        after = self.evaluate(step)
                        metrics |= as_metrics(after) | {"time/eval": time.perf_counter() - clock}
                    if first:
                        run.metrics.append(step, metrics)
                    trackers.log(step, metrics)
                    progress.step(step, metrics)
                    self._call("on_step_end", metrics)
                    if (every := self.config.run.save_every) and (last or step % every == 0):
                        self.checkpoints.save(step, self._extra(before, after))
                with self.ranks.together("saving the model"):
                    if first and self.config.run.save_model:
                        run.replace_folder("model", self.save)
                summary = _summary(before, after, time.perf_counter() - started, self.max_steps)
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
            name: evaluate(
                dataset, self.prompter.process, self.engine, self.scorer, self.config, step, self.ranks
            )
            for name, dataset in self.eval_sets.items()
        }

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int, run: RunFolder) -> dict[str, float]:
        """Rollout, rewards, update and sync of one step; returns its metrics.

        Each process samples and learns from its own slots. The first one scores and logs those of all, so
        rewards, advantages and guards see the step as one process would.
        """
        ranks, times = self.ranks, dict[str, float]()
        actions = self.config.run.guards
        with _timed(times, "step_time"):
            with _timed(times, "time/data"), ranks.together("prompts"):
                asked = self.prompter.step(self.train_set, self.order, step, ranks.rank, ranks.world)
            counts = ranks.sum({"prompts": len(asked.prompts), "dropped": asked.dropped}, "prompts")
            self.prompter.require_some(step, int(counts["prompts"]), int(counts["dropped"]))
            with _timed(times, "time/rollout"), ranks.together("rollout"):
                seeds = [self.seeds.group(step, slot) for slot in asked.slots]
                requests = requests_for(asked.prompts, seeds, self.sampling)
                completions = self.engine.generate(requests) if requests else []
                require_answers(requests, completions, self.sync.version)
            answered = self._answered(asked, completions)
            scored, metrics = self._score(step, answered, run, times)
            groups = [Group(slot, prompt, ours, *scored[slot]) for slot, prompt, ours in answered]
            with _timed(times, "time/learner"):
                witness = self.sync.witness(groups)
                report = self.learner.step(groups)
            with ranks.together("guards"):
                act("logp_gap", logp_gap(report.mean_gap, report.max_gap, self.sync.limit), actions)
                for record in report.updates:
                    act("update_happens", update_happens(record), actions)
            with _timed(times, "time/sync"), ranks.together("weight sync"):
                synced = self.sync.update(step, witness, noise=report.max_gap)
                act("logp_gap", synced.problem, actions)
        counted = {
            "num_tokens": self.tokens_seen,
            "epoch": self.order.epoch(step),
            "prompts/dropped": int(counts["dropped"]),
        }
        # a reward may log any name it likes; ours win
        return {**metrics, **report.metrics, **synced.metrics, **counted, **times}

    def _answered(self, asked: StepPrompts, completions: Sequence[Completion]) -> list[Answered]:
        size = self.config.rollout.num_generations
        cuts = [tuple(completions[i * size : (i + 1) * size]) for i in range(len(asked.prompts))]
        return list(zip(asked.slots, asked.prompts, cuts, strict=True))

    def _score(
        self, step: int, answered: Sequence[Answered], run: RunFolder, times: dict[str, float]
    ) -> tuple[dict[int, tuple[Any, Any]], dict[str, float]]:
        """Rewards and advantages by slot, over all processes; metrics on the first, which does the work."""
        sent = [(s, replace(p, vision={}), c) for s, p, c in answered] if self.ranks.world > 1 else answered
        shares = self.ranks.collect(sent, "completions")
        scored: dict[int, tuple[Any, Any]] = {}
        metrics: dict[str, float] = {}
        with self.ranks.together("rewards"):
            if shares is not None:
                whole = sorted((a for share in shares for a in share), key=lambda a: a[0])
                groups, metrics = self._judge(step, whole, run, times)
                scored = {g.slot: (g.rewards, g.advantages) for g in groups}
        return self.ranks.share(scored, "rewards"), metrics

    def _judge(
        self, step: int, whole: Sequence[Answered], run: RunFolder, times: dict[str, float]
    ) -> tuple[list[Group], dict[str, float]]:
        """Score the completions of a step, give them advantages, log them and look at them."""
        completions = [c for *_, ours in whole for c in ours]
        with _timed(times, "time/rewards"):
            repeated = [prompt for _, prompt, ours in whole for _ in ours]
            scores = self.scorer.score(repeated, completions, step)
        totals = iter(scores.totals)
        rewards = [tuple(next(totals) for _ in ours) for *_, ours in whole]
        advantages = group_advantages(rewards, self.config.algorithm.scale_rewards)
        groups = [Group(*a, r, v) for a, r, v in zip(whole, rewards, advantages, strict=True)]
        every = self.config.run.log_rollouts_every
        if every and (step % every == 0 or step in (1, self.max_steps)):
            with _timed(times, "time/log"):
                run.write_rollouts(step, groups, scores.parts, scores.extra)
        act("duplicate_completions", duplicate_completions(groups), self.config.run.guards)
        self.tokens_seen += sum(len(p.token_ids) for p in repeated) + sum(
            len(c.token_ids) for c in completions
        )
        return groups, {**scores.metrics, **step_metrics(groups)}

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
        self.checkpoints.load(found)
        self.tokens_seen = found.extra["tokens_seen"]
        with self.ranks.together("weight sync"):
            self.sync.send(found.step)
        return found.step, found.extra

    def _extra(self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's state."""
        found = {"before": before, "after": after}
        return {
            "tokens_seen": self.tokens_seen,
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
