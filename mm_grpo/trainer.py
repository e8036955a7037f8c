"""The loop: prompts → completions → rewards → advantages → update → weights back to the engine.

`GRPOTrainer._step` is the algorithm on one page. What each part does is written in its own file: prompts to
advantages in rollout/collect.py, the update in learner/learner.py, the weight sync in parity/sync.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mm_grpo.build import build_parts, plan_run
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import Source, load_eval, load_train
from mm_grpo.distributed.ranks import start
from mm_grpo.environments.toolbox import Toolbox, toolbox_of
from mm_grpo.errors import ConfigError
from mm_grpo.health.duplicate_completions import duplicate_completions
from mm_grpo.health.guards import Guards
from mm_grpo.health.logp_gap import logp_gap
from mm_grpo.health.unread_images import is_due, unread_images, with_other_pixels
from mm_grpo.health.update_happens import update_happens
from mm_grpo.parity.gaps import check_start, first_with_image, gap_of
from mm_grpo.parity.sync import Canary
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.collect import Collector, Rollout
from mm_grpo.rollout.evaluate import Best, Evaluation, Headline, as_metrics, better, evaluate
from mm_grpo.rollout.turns import sampler_of
from mm_grpo.run.checkpoint import Checkpoints, steps_between
from mm_grpo.run.folder import RunFolder, folders_of
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.metrics import read_metrics
from mm_grpo.run.progress import Progress
from mm_grpo.run.same_run import refuse_another_run, rewards_of, rows_of
from mm_grpo.run.stop_signals import StopSignals, interrupted
from mm_grpo.run.summary import summary_of
from mm_grpo.run.trackers import Trackers
from mm_grpo.timing import timed

EVENTS = ("on_train_begin", "on_step_end", "on_train_end")


class GRPOTrainer:
    """Fine-tunes a vision-language model with GRPO.

    `config` is the whole run. `train` and `eval` override `data.train` and `data.eval` with rows, a
    `datasets.Dataset`, a path, a `Mixture` of these (mm_grpo/data/mixture.py), or for `eval` a dict of named sets
    (the first is the headline). `rewards` overrides the config's list and mixes names, mappings and callables.
    `model` is a transformers model to train in place of the weights at `model.path` (in place; `model.lora` and the
    rest of the section apply to it); `processor` one of ours. `tools` are functions that the model
    may call, `environment_factory` makes an object whose methods it may call. Callbacks are objects with any of
    `on_train_begin(trainer)`, `on_step_end(trainer, metrics)` and `on_train_end(trainer)`.

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
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        callbacks: Sequence[Any] = (),
        resume: bool = False,
    ) -> None:
        if not isinstance(config, GRPOConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; it must be a GRPOConfig: write GRPOConfig.from_dict(...) or"
                " GRPOConfig.from_yaml(path)"
            )
        self.config, self.resume = config, resume
        config.check()
        self.ranks = start(config.model.device, config.run.process_timeout)
        check_callbacks(callbacks)
        self.callbacks = tuple(callbacks) if self.ranks.first else ()
        config.require_eval(given=eval is not None)
        self.toolbox = toolbox = toolbox_of(config, tools, environment_factory)
        self.scorer = Scorer(_reward_entries(config, rewards, toolbox))
        self.train_set = load_train(config, train, needs=self.scorer.check)
        self.eval_sets = load_eval(config, eval, needs=self.scorer.check)
        if toolbox is not None:
            asking = self.scorer.asking_for(("environment", "environments"), self.train_set.columns)
            toolbox.place(asking, processes=self.ranks.world)
        self.plan = plan_run(config, self.train_set, several_turns=toolbox is not None)
        self.scorer.conversational = self.train_set.conversational
        self.scorer.max_steps = self.plan.max_steps
        self.headline = Headline.of(config, [spec.name for spec in self.scorer.specs])
        sets = (self.train_set, *self.eval_sets.values())
        if self.ranks.first:
            self.scorer.start()  # workers import their rewards while the model loads
        self.save_every = steps_between(config.run.save_every, self.plan.max_steps)
        with self.ranks.fail_together("looking at run.dir"):
            self.folder = RunFolder(
                config.run.dir,
                overwrite=config.run.overwrite,
                inputs=inputs_of(config, train=train, eval=eval, rewards=rewards),
                resume=resume,
                writes=folders_of(config, saves=self.save_every > 0),
            )
            if self.ranks.first:
                self.folder.check()
        self.trackers = Trackers.prepare(config.run.trackers if self.ranks.first else [])

        # adapters are drawn from the run's seed, and the caller's random numbers go on as they were
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.run.seed % 2**63)
            parts = build_parts(
                config,
                self.plan.updates,
                sets,
                model=model,
                processor=processor,
                ranks=self.ranks,
                toolbox=toolbox,
            )
        self.processor, self.model, self.prompt_builder = parts.processor, parts.model, parts.prompt_builder
        self.learner, self.engine, self.sync = parts.learner, parts.engine, parts.sync
        mixture = self.plan.order.sentence
        self._limits = (*([mixture] if mixture else []), *parts.sentences)
        self.sampler = sampler_of(
            config, self.processor, self.engine, toolbox, self.plan.seeds, lambda: self.sync.version
        )
        self.collector = Collector(
            config,
            self.train_set,
            self.plan,
            self.prompt_builder,
            self.sampler,
            self.scorer,
            self.ranks,
            version=lambda: self.sync.version,
            reference_logprobs=self.learner.reference_logprobs,
        )
        self.checkpoints = Checkpoints(self.folder.paths, self.learner, config)
        self.guards = Guards(config, self.scorer.specs)
        self.tokens_seen = 0
        self.signals = StopSignals(quiet=not self.ranks.first)
        self._trained = False

    def train(self) -> dict[str, Any]:
        """Run to `max_steps`; returns what `summary.json` holds.

        Every process calls it; the first one writes the run folder. Raises GuardStop when a guard stops the
        run; the folder then holds every finished step, and the trainer is closed. A run without one update ends
        so too, after everything was saved. SIGINT, SIGTERM and SIGHUP end it after the running step, with a
        checkpoint and RunInterrupted. A trainer trains once: ConfigError the second time.
        """
        if self._trained:
            raise ConfigError(
                "train() was called on this trainer before, and its weights are those of then; to go on, make a "
                "GRPOTrainer(config, ..., resume=True), with a higher run.max_steps if the run had ended"
            )
        self._trained = True
        try:
            with ExitStack() as held:
                with self.ranks.fail_together("taking run.dir"):
                    if self.ranks.first:
                        held.enter_context(self.folder.claim())
                with self.signals:
                    return self._train()
        except BaseException:
            self.close()
            raise

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline."""
        run = (self.prompt_builder, self.sampler, self.scorer, self.config, step, self.ranks)
        sets = self.eval_sets.items()
        return {name: evaluate(rows, *run, part=(i, len(sets))) for i, (name, rows) in enumerate(sets)}

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters of `model.lora` to `path`, in fp32, as `peft.PeftModel.from_pretrained` reads them."""
        if self.config.model.lora is None:
            raise ConfigError("model.lora = null: the run has no adapters to save; save the model")
        self.learner.save_adapter(path)

    def close(self) -> None:
        """Free what the rollout engine holds and end the processes of rewards and tools; the model stays."""
        self.prompt_builder.close()
        self.scorer.close()
        if self.toolbox is not None:
            self.toolbox.close()
        self.engine.close()

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """Prompts, completions, rewards, advantages, update and sync of one step; returns its metrics.

        The engine sleeps while the learner works; a step that fails leaves it asleep, to be closed.
        """
        collect, ranks, algorithm = self.collector, self.ranks, self.config.algorithm
        rollout, times, guards = Rollout(step), dict[str, float](), self.guards
        with timed(times, "step_time"):
            for _ in range(self.config.rollout.max_attempts):  # more than one with dynamic sampling alone
                prompts = collect.prompts(rollout)
                completions = collect.completions(rollout, prompts)
                collect.rewards(rollout, completions)
                if not rollout.zero_std_slots:
                    break
            groups = collect.advantages(rollout)
            with ranks.fail_together("guards"):
                self._log_rollouts(rollout)  # the evidence, before a guard may stop the run
                guards.apply("duplicate_completions", duplicate_completions(rollout.sampled), step)

            with timed(times, "time/sync"), ranks.fail_together("weight sync"):
                canary = self.sync.canary(groups)
                images = self._image_metrics(step, canary)
            self.engine.sleep()
            with timed(times, "time/learner"):
                report = self.learner.update(groups)
            with ranks.fail_together("guards"):
                guards.apply("logp_gap", logp_gap(report.mean_gap, report.max_gap, self.sync.limit), step)
                for record in report.updates:
                    guards.apply("update_happens", update_happens(record), step)

            with timed(times, "time/sync"), ranks.fail_together("weight sync"):
                self.engine.wake()
                synced = self.sync.update(step, canary, noise=report.max_gap)
                guards.apply("logp_gap", synced.problem, step)
            if algorithm.sync_ref_model and step % algorithm.ref_model_sync_steps == 0:
                self.learner.refresh_reference()
        self.tokens_seen += rollout.tokens
        counted = {
            "num_tokens": self.tokens_seen,
            **self.plan.order.epochs(step),
            "prompts/dropped": rollout.dropped,
            "prompts/images": rollout.images,
            "prompts/images_decoded": rollout.decoded,
        }
        # a reward may log any name it likes, and a KL in rewards has the name of one in the loss; ours win
        return {
            **rollout.metrics, **report.metrics, **synced.metrics, **images, **counted, **rollout.times, **times
        }  # fmt: skip

    def _log_rollouts(self, rollout: Rollout) -> None:
        """Every group that was sampled, on the first process, as often as the config says."""
        step, every = rollout.step, self.config.run.log_rollouts_every
        if not self.ranks.first or not (step % every == 0 or step in (1, self.plan.max_steps)):
            return
        with timed(rollout.times, "time/log"):
            groups = sorted(rollout.sampled, key=lambda group: (group.slot, group.attempt))
            self.folder.write_rollouts(step, groups)

    def _image_metrics(self, step: int, canary: Canary | None) -> dict[str, float]:
        """On some steps: how far other pixels move the learner's log-probs of the canary, in nats per token."""
        prompt = with_other_pixels(canary.prompt) if canary is not None and is_due(step) else None
        if canary is None or prompt is None:
            return {}
        change = gap_of([canary.logprobs], self.learner.score(prompt, [canary.token_ids])).mean
        self.guards.apply("unread_images", unread_images(change, prompt.uid), step)
        return {"images/logp_change": change} if math.isfinite(change) else {}

    # the run around the steps ----------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        started = time.perf_counter()
        run, first, max_steps = self.folder, self.ranks.first, self.plan.max_steps
        done, kept, log = self._restore()
        with self.ranks.fail_together("starting"):
            if first:
                run.start(self.config.to_yaml(), rewards=self._rewards)
                run.cut_after(done, log)
                if done and run.paths.metrics.exists():
                    self.guards.replay(read_metrics(run.paths.metrics))
        self.collector.begin(done + 1)
        self._call("on_train_begin")
        batch, memory = self.config.batch_sentence(processes=self.ranks.world), self.learner.memory_sentence()
        headline = "\n".join(filter(None, (batch, *self._limits, memory)))
        headline += "\n" + self.checkpoints.sentence(self.save_every)
        with (
            Progress(max_steps, headline=headline, first=done, quiet=not first) as progress,
            self.trackers.open(self.config) as trackers,
        ):
            try:
                if self.config.run.parity_check:
                    with self.ranks.fail_together("the parity check"):
                        self._check_parity()
                if not kept:
                    before = after = self.evaluate()
                    best = better(None, before, 0)
                    if first and (measured := as_metrics(before)):
                        run.append_metrics(0, measured)
                        trackers.log(0, measured)
                else:
                    before, after = (
                        {n: Evaluation(**e) for n, e in kept[k].items()} for k in ("before", "after")
                    )
                    best = Best(**kept["best"]) if kept.get("best") else None
                if (stopped := self.ranks.max(self.signals.asked, "stopping")) and done < max_steps:
                    raise interrupted(stopped, done, done, run.paths.root)
                for step in range(done + 1, max_steps + 1):
                    metrics = self._step(step)
                    last, every = step == max_steps, self.config.run.eval_every
                    if last or (every and step % every == 0):
                        clock = time.perf_counter()
                        after = self.evaluate(step)
                        best = better(best, after, step)
                        metrics |= as_metrics(after) | {"time/eval": time.perf_counter() - clock}
                    with self.ranks.fail_together("writing metrics.jsonl"):
                        if first:
                            run.append_metrics(step, metrics)
                    trackers.log(step, metrics)
                    progress.advance(step, metrics)
                    self._call("on_step_end", metrics)
                    with self.ranks.fail_together("guards"):
                        if first:
                            self.guards.observe(step, metrics)
                    stopped, every = self.ranks.max(self.signals.asked, "stopping"), self.save_every
                    if every and (last or stopped or step % every == 0):
                        extra = self._extra(before, after, best)
                        self.checkpoints.save(step, extra, spared=best.step if best else None)
                    if stopped and not last:
                        raise interrupted(stopped, step, step if every else None, run.paths.root)
                with self.ranks.fail_together("saving the model"):
                    if first and self.config.run.save_model:
                        run.replace_folder("model", self.save)
                        if self.config.model.lora is not None:
                            run.replace_folder("adapter", self.save_adapter)
                summary = summary_of(
                    self.headline, before, after, best, time.perf_counter() - started, max_steps
                )
                if first:
                    run.write_summary(summary)
            finally:
                self.prompt_builder.close()
                self.scorer.close()
                if self.toolbox is not None:
                    self.toolbox.close()
                if first and self.config.run.report:
                    run.write_report()
        self._call("on_train_end")
        with self.ranks.fail_together("guards"):
            if first:
                self.guards.finish(max_steps)
        return summary

    # resuming --------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, Mapping[str, Any], bytes | None]:
        """Take up the newest checkpoint when asked to: the steps that are done, what was kept beside, and the log."""
        found = self.checkpoints.newest() if self.resume else None
        if found is None:
            path = self.folder.paths.metrics
            rows = sum(row["step"] > 0 for row in read_metrics(path)) if path.exists() else 0
            if self.resume and rows and not self.save_every:
                raise ConfigError(
                    f"run.dir = '{self.folder.paths.root}' has {rows} finished steps and no checkpoint, for "
                    "run.save_every is 0; start again with run.overwrite=true, and set run.save_every"
                )
            return 0, {}, None
        allowed = self.config.run.allow_changed_rewards
        refuse_another_run(
            found,
            self._rows,
            self._rewards,
            self.plan.max_steps,
            tools=self._tools,
            allow_changed_rewards=allowed,
        )
        self.checkpoints.load(found)
        self.tokens_seen = found.extra["tokens_seen"]
        with self.ranks.fail_together("weight sync"):
            self.sync.send(found.step)
        return found.step, found.extra, found.log

    @cached_property
    def _rewards(self) -> list[dict[str, Any]]:
        return rewards_of(self.scorer.specs)

    @property
    def _tools(self) -> list[dict[str, Any]]:
        return [] if self.toolbox is None else list(self.toolbox.schemas)

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
            "rewards": self._rewards,
            "tools": self._tools,
            "best": asdict(best) if best else None,
            **{key: {n: asdict(e) for n, e in sets.items()} for key, sets in found.items()},
        }

    def _check_parity(self) -> None:
        """Compare engine and learner on the first prompt with an image among the first P, else on the first."""
        places = islice(
            self.prompt_builder.first(self.train_set, self.plan.order), self.config.rollout.prompts_per_step
        )
        step, slot, prompt = first_with_image(places)
        seeds = self.plan.seeds.group(step, slot)
        check_start(self.engine, self.learner, self.config, prompt, seeds, self.sync.version)

    # small parts -----------------------------------------------------------------------------

    def _call(self, event: str, *args: Any) -> None:
        for callback in self.callbacks:
            method: Callable[..., Any] | None = getattr(callback, event, None)
            if method is not None:
                method(self, *args)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(
                f"callbacks: {callback!r} has none of the methods {', '.join(EVENTS)}, and would never be called"
            )


def _reward_entries(
    config: GRPOConfig, given: Sequence[Any] | None, toolbox: Toolbox | None
) -> Sequence[Any]:
    """The rewards that are given or the config's, and the environment's own."""
    own = [] if toolbox is None else toolbox.rewards
    if given is None:
        config.require_rewards(given=bool(own))
        return [*config.rewards, *own]
    if not given and not own:
        raise ConfigError("rewards=[] has no reward; give at least one name, mapping or function")
    return [*given, *own]
