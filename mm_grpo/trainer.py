"""The loop: prompts → completions → rewards → advantages → update → weights back to the engine.

`GRPOTrainer._step` is the algorithm on one page. What each part does is written in its own file: prompts to
advantages in rollout/collect.py, the update in learner/learner.py, the weight sync in parity/sync.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mm_grpo.build import build_parts, pipeline_of, plan_run
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import Source, load_eval, load_train
from mm_grpo.distributed.ranks import start
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.errors import ConfigError
from mm_grpo.health.duplicate_completions import duplicate_completions
from mm_grpo.health.guards import Guards
from mm_grpo.health.logp_gap import sampled_gap
from mm_grpo.health.update_happens import finite_loss, update_happens
from mm_grpo.migrate.arguments import explain_arguments
from mm_grpo.pages.report import LivePage, check_expected
from mm_grpo.parity.gaps import check_start, first_with_image
from mm_grpo.parity.images import ImageMeasures
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.collect import Collector, Rollout
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.evaluate import Evaluation
from mm_grpo.rollout.pipeline import scheduled_version
from mm_grpo.rollout.turns import sampler_of
from mm_grpo.run.ahead import pack_ahead, unpack_ahead
from mm_grpo.run.callbacks import Callbacks
from mm_grpo.run.checkpoint import Checkpoints, steps_between
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.metrics import finite_or_text, iter_metrics
from mm_grpo.run.paths import REPORT_EVERY
from mm_grpo.run.profile import Profile
from mm_grpo.run.progress import Progress
from mm_grpo.run.same_run import refuse_another_run, rewards_of, rows_of, tool_sources_of
from mm_grpo.run.stop_signals import StopSignals, interrupted
from mm_grpo.run.summary import sight_of, summary_of
from mm_grpo.run.trackers import Trackers
from mm_grpo.run.written import names_of
from mm_grpo.terminal import print_phase
from mm_grpo.timing import span, timed


class GRPOTrainer:
    """Fine-tunes a vision-language model with GRPO.

    `config` is the whole run. `train` and `eval` override `data.train` and `data.eval` with rows, a
    `datasets.Dataset`, a path, a `Mixture` of these (mm_grpo/data/mixture.py), or for `eval` a dict of named sets
    (the first is the headline). `rewards` overrides the config's list and mixes names, mappings and callables.
    `model` is a transformers model to train (in place; `model.lora` and the rest of the section apply to it) and not
    the weights at `model.path`; `processor` one of ours. `tools` are functions that the model may call,
    `environment_factory` makes an object whose methods it may call; several are given by name, and chosen by a row's
    column `environment`. `callbacks` are objects with any of the methods that run/callbacks.py names.

    The constructor checks everything that can be checked before a model is loaded, then loads it.
    Raises UserError (ConfigError, DataError, RewardError) for what the user can mend.
    """

    @explain_arguments
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
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        callbacks: Sequence[Any] = (),
        resume: bool = False,
    ) -> None:
        self.config, self.resume = config, resume
        config.check()
        self.ranks = start(config.model.device, config.run.process_timeout)
        self.callbacks = Callbacks(callbacks, quiet=not self.ranks.first)
        config.require_eval(given=eval is not None)
        self.toolbox = toolbox = toolbox_of(config, tools, environment_factory)
        self._phase("reading the rows")
        self.scorer = Scorer(reward_entries(config, rewards, toolbox), several_turns=toolbox is not None)
        self.train_set = load_train(config, train, needs=self.scorer.check)
        self.eval_sets = load_eval(config, eval, needs=self.scorer.check)
        if toolbox is not None:
            asking = self.scorer.asking_for(("environment", "environments"), self.train_set.columns)
            toolbox.place(asking, processes=self.ranks.world)
        self.plan = plan_run(config, self.train_set, several_turns=toolbox is not None)
        self.scorer.conversational, self.scorer.max_steps = self.train_set.conversational, self.plan.max_steps
        headline = EvalMetric.of(config, [spec.name for spec in self.scorer.specs])
        self.evaluations = Evaluations(config, self.eval_sets, headline, several_turns=toolbox is not None)
        if self.ranks.first:
            self.scorer.start()  # workers import their rewards while the model loads
        self.save_every = steps_between(config.run.save_every, self.plan.max_steps)
        with self.ranks.fail_together("looking at run.dir"):
            self.folder = RunFolder(
                config.run.dir,
                overwrite=config.run.overwrite,
                inputs=inputs_of(config, train=train, eval=eval, rewards=rewards),
                resume=resume,
                writes=names_of(config, saves=self.save_every > 0),
                keep_rollouts=config.run.keep_rollouts,
                expected=config.run.expected_curve,
            )
            if config.run.expected_curve is not None:
                check_expected(config.run.expected_curve)
            if self.ranks.first:
                self.folder.check()
        self.trackers = Trackers.prepare(config.run.trackers if self.ranks.first else [])

        # adapters are drawn from the run's seed, and the caller's random numbers go on as they were
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.run.seed % 2**63)
            parts = build_parts(
                config,
                self.plan.updates,
                (self.train_set, *self.evaluations.datasets),
                model=model,
                processor=processor,
                ranks=self.ranks,
                toolbox=toolbox,
                phase=self._phase,
            )
        self.processor, self.model, self.prompt_builder = parts.processor, parts.model, parts.prompt_builder
        self.learner, self.engine, self.sync = parts.learner, parts.engine, parts.sync
        self._limits = (self.plan.order.sentence, *parts.sentences)
        self.sampler = sampler_of(
            config, self.processor, self.engine, toolbox, self.plan.seeds, lambda: self.sync.version
        )
        self.collector = Collector(
            config, self.train_set, self.plan, self.prompt_builder, self.sampler, self.scorer,
            self.ranks.second() if config.rollout.max_staleness else self.ranks,
            version=partial(scheduled_version, staleness=config.rollout.max_staleness),
            reference_logprobs=self.learner.reference_logprobs,
        )  # fmt: skip
        self.pipeline = pipeline_of(self.collector, self.engine, self.ranks, lambda: self.sync.version)
        self.checkpoints = Checkpoints(self.folder.paths, self.learner, config, self._call)
        log = self.folder.append_event if self.ranks.first else None
        self.guards = Guards(config, self.scorer.specs, log)
        self.images = ImageMeasures(config, self.learner, self.guards, self.folder, self.ranks)
        self.tokens_seen = 0
        self.signals = StopSignals(quiet=not self.ranks.first)
        self._trained, self.stop_reason = False, ""

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

    def stop(self, reason: str = "a callback stopped it") -> None:
        """Called by a callback, end the run as a finished one, after the step that runs: in `on_save`, after the next.

        The weights of that step are evaluated and saved as those of the last one are, and summary.json has the reason
        as `stopped`. With `resume=True` the run goes on to `max_steps`.
        """
        self.stop_reason = reason or "a callback stopped it"

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline. Collective."""
        self.callbacks.refuse_collective("evaluate", self.ranks.world)
        self.pipeline.settle()
        return self.evaluations.answer((self.prompt_builder, self.sampler, self.scorer, self.ranks), step)

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    def save_model(self, output_dir: str | Path) -> None:
        """`save`, under the name that it has in transformers' and TRL's trainers."""
        self.save(output_dir)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters of `model.lora` to `path`, in fp32, as `peft.PeftModel.from_pretrained` reads them."""
        if self.config.model.lora is None:
            raise ConfigError("model.lora = null: the run has no adapters to save; save the model")
        self.learner.save_adapter(path)

    def push_to_hub(
        self, name: str, private: bool = True, *, adapter: bool = False, overwrite: bool = False
    ) -> str:
        """Send the model as it is now to the Hub's repository `name`; returns the address of the commit.

        With `adapter` the adapters of `model.lora` in its place. It is written to a temporary folder first, loaded with
        plain transformers and compared, as `mm-grpo export` does, on prompts that the run has logged. Every process
        calls it, and the first one sends. Raises ConfigError without a token, offline, or when the two differ.
        """
        from mm_grpo.trained.hub import push_trained

        address, rewards = "", [spec.name for spec in self.scorer.specs]
        with self.ranks.fail_together("pushing to the Hub"):
            if self.ranks.first:
                parts = (self.model, self.processor, self.config, self.folder.paths)
                address = push_trained(
                    name, *parts, rewards, private=private, adapter=adapter, overwrite=overwrite
                )
        return self.ranks.broadcast(address, "pushing to the Hub")

    def close(self) -> None:
        """Free what the rollout engine holds and end the processes of rewards and tools; the model stays."""
        self._close_workers()
        self.engine.close()

    def _close_workers(self) -> None:
        self.pipeline.close()
        self.sync.close()
        self.prompt_builder.close()
        self.scorer.close()
        if self.toolbox is not None:
            self.toolbox.close()

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """Prompts, completions, rewards, advantages, update and sync of one step; returns its metrics.

        The engine sleeps while the learner works, unless it samples ahead; a step that fails leaves it as it is.
        """
        ranks, algorithm, guards = self.ranks, self.config.algorithm, self.guards
        times = dict[str, float]()
        with timed(times, "step_time"):
            rollout = self.pipeline.take(step)  # prompts, completions, rewards, advantages (`collect_step`)
            groups = rollout.groups
            with ranks.fail_together("guards"):
                self._log_rollouts(rollout)  # the evidence, before a guard may stop the run
                self.trackers.log_rollouts(step, rollout.sampled)
                self.callbacks.call("on_rollouts", trainer=self, step=step, groups=rollout.sampled)
                guards.apply("duplicate_completions", duplicate_completions(rollout.sampled), step)

            with timed(times, "time/sync"), ranks.fail_together("weight sync"):
                canary = self.sync.canary(groups)
                images = self.images.unread(step, canary)
            self.pipeline.sleep()
            images |= self.images.sight(step, groups)
            with timed(times, "time/learner"):
                report = self.learner.update(groups)
            with ranks.fail_together("guards"):
                for version, gap in report.gaps.items():
                    moved = self.sync.moved_since(version)
                    guards.apply("logp_gap", sampled_gap(gap, self.sync.limit, moved), step)
                for record in report.updates:
                    guards.apply("update_happens", update_happens(record), step)
                guards.apply("update_happens", finite_loss(report.metrics["loss"]), step)

            self.pipeline.drain(step)
            with timed(times, "time/sync"), ranks.fail_together("weight sync"):
                self.pipeline.wake()
                own = report.gaps.get(self.sync.version)
                synced = self.sync.update(step, canary, noise=0.0 if own is None else own.max)
                guards.apply("logp_gap", synced.problem, step)
            self.pipeline.landed(step)  # after the checks, which would wait behind what is sampled next
            if algorithm.sync_ref_model and step % algorithm.ref_model_sync_steps == 0:
                self.learner.refresh_reference()
        self.tokens_seen += rollout.tokens
        counted = {
            **self.engine.metrics(),
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
        """Every group that was sampled, on the first process."""
        if self.ranks.first:
            with timed(rollout.times, "time/log"):
                groups = sorted(rollout.sampled, key=lambda group: (group.slot, group.attempt))
                self.folder.write_rollouts(rollout.step, groups, self.scorer.specs)

    # the run around the steps ----------------------------------------------------------------

    def _train(self) -> dict[str, Any]:  # noqa: C901, PLR0915
        started = time.perf_counter()
        run, first, max_steps = self.folder, self.ranks.first, self.plan.max_steps
        done, kept, log = self._restore()
        with self.ranks.fail_together("starting"):
            if first:
                run.start(self.config.to_yaml(), rewards=self._rewards)
                run.cut_after(done, log)
                if done and run.paths.metrics.exists():
                    self.guards.replay(iter_metrics(run.paths.metrics))
        self.collector.begin(done + 1)
        page = LivePage(run.paths, REPORT_EVERY if self.config.run.report else None)
        profile = Profile(self.config.run.profile, run.paths if first else None, max_steps - done)
        self._call("on_train_begin", step=done)
        batch, memory = self.config.batch_sentence(processes=self.ranks.world), self.learner.memory_sentence()
        on_disk = self.checkpoints.sentence(self.save_every), run.rollout_budget.sentence
        headline = "\n".join(filter(None, (batch, *self._limits, memory, *on_disk)))
        with (
            Progress(
                max_steps, headline=headline, first=done, tokens=self.tokens_seen, quiet=not first
            ) as progress,
            self.trackers.open(self.config) as trackers,
        ):
            try:
                if not kept:
                    self.evaluations.begin(self.prompt_builder, self.ranks)
                if self.config.run.guards.get("logp_gap") != "off":
                    self._phase("checking that engine and learner agree on the first prompt")
                    with self.ranks.fail_together("the parity check"):
                        self._check_parity()
                if kept:
                    self.evaluations.restore(kept)
                elif measured := self._evaluate(0, progress):
                    if first:
                        run.append_metrics(0, measured)
                        page.after(0, measured)
                    trackers.log(0, measured)
                if (stopped := self.ranks.max(self.signals.asked, "stopping")) and done < max_steps:
                    raise interrupted(stopped, done, done, run.paths.root)
                progress.begin()
                with self.ranks.fail_together("resuming"):
                    ahead = unpack_ahead(kept, self.collector, self.processor, self.ranks)
                self.pipeline.begin(done, ahead)
                profile.start()
                step = done
                for step in range(done + 1, max_steps + 1):
                    last, every = step == max_steps, self.config.run.eval_every
                    if due := last or (every > 0 and step % every == 0):
                        self.evaluations.begin(self.prompt_builder, self.ranks)
                    metrics = self._step(step)
                    metrics |= self._evaluate(step, progress) if due else {}
                    self._call("on_step_end", step=step, metrics=metrics)
                    ended = bool(self.ranks.max(bool(self.stop_reason), "stopping"))
                    if ended and not due:
                        metrics |= self._evaluate(step, progress)
                    last = last or ended
                    with span("metrics"), self.ranks.fail_together("writing metrics.jsonl"):
                        if first:
                            run.append_metrics(step, finite_or_text(metrics))
                            page.after(step, metrics)
                    trackers.log(step, metrics)
                    progress.advance(step, metrics)
                    with self.ranks.fail_together("guards"):
                        if first:
                            self.guards.observe(step, metrics)
                    stopped, every = self.ranks.max(self.signals.asked, "stopping"), self.save_every
                    best = found.step if (found := self.evaluations.best) else None
                    if every and (last or stopped or best == step or step % every == 0):
                        with span("checkpoint"):
                            self.checkpoints.begin(step, self._extra(), spared=best)
                    self.checkpoints.finish(wait=bool(last or stopped))
                    if stopped and not last:
                        raise interrupted(stopped, step, step if every else None, run.paths.root)
                    if ended:
                        progress.print(f"stopped after step {step}: {self.stop_reason}")
                        break
                profile.stop(progress.print)
                with self.ranks.fail_together("saving the model"):
                    if first and self.config.run.save_model:
                        self.folder.replace_folder("model", self.save)
                        if self.config.model.lora is not None:
                            self.folder.replace_folder("adapter", self.save_adapter)
                        self.callbacks.call("on_save", trainer=self, step=step, path=run.paths.model)
                sight, seconds = sight_of(run.paths.metrics, self.ranks), time.perf_counter() - started
                summary = summary_of(self.evaluations, seconds, step, self.stop_reason or None, sight)
                summary |= profile.summary()
                if first:
                    run.write_summary(summary)
            finally:
                profile.stop()
                self.checkpoints.close()
                self._close_workers()
                if first:
                    page.write()
        self._call("on_train_end", step=step, summary=summary)
        with self.ranks.fail_together("guards"):
            if first:
                self.guards.finish(step)
        return summary

    def _evaluate(self, step: int, progress: Progress) -> dict[str, float]:
        """Evaluate after `step`, 0 before the first, and say how it went; returns the metrics."""
        if not self.eval_sets:
            return {}
        if step == 0:
            self._phase("evaluating before the first step")
        clock = time.perf_counter()
        self.pipeline.settle()
        parts = (self.prompt_builder, self.sampler, self.scorer, self.ranks)
        metrics = self.evaluations.run(step, parts, self.folder, progress.evaluating)
        progress.print(self.evaluations.sentence(step))
        metrics["time/eval"] = time.perf_counter() - clock
        self._call("on_evaluate", step=step, metrics=metrics, evaluations=self.evaluations.after)
        return metrics

    # resuming --------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, Mapping[str, Any], bytes | None]:
        """Take up the newest checkpoint when asked to: the steps that are done, what was kept beside, and the log."""
        found = self.checkpoints.newest() if self.resume else None
        if found is None:
            path = self.folder.paths.metrics
            rows = sum(row["step"] > 0 for row in iter_metrics(path)) if path.exists() else 0
            if self.resume and rows and not self.save_every:
                raise ConfigError(
                    f"run.dir = '{self.folder.paths.root}' has {rows} finished steps and no checkpoint, for "
                    "run.save_every is 0; start again with run.overwrite=true, and set run.save_every"
                )
            return 0, {}, None
        refuse_another_run(
            found, self._rows, self._rewards, self.plan.max_steps, **self._tools,
            allow_changed_code=self.config.run.allow_changed_code,
        )  # fmt: skip
        self.checkpoints.load(found)
        self.tokens_seen = found.extra["tokens_seen"]
        with self.ranks.fail_together("weight sync"):
            self.sync.send(found.step)
        return found.step, found.extra, found.log

    @cached_property
    def _rewards(self) -> list[dict[str, Any]]:
        return rewards_of(self.scorer.specs)

    @cached_property
    def _tools(self) -> dict[str, Any]:
        """The schemas of the tools, and the identity of their code."""
        if self.toolbox is None:
            return {"tools": [], "tool_sources": []}
        return {"tools": list(self.toolbox.schemas), "tool_sources": tool_sources_of(self.toolbox.sources)}

    @cached_property
    def _rows(self) -> dict[str, Any]:
        return rows_of(self.train_set, self.eval_sets)

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's state."""
        return {
            "tokens_seen": self.tokens_seen,
            "rows": self._rows,
            "rewards": self._rewards,
            **self._tools,
            **self.evaluations.state(),
            **pack_ahead(self.pipeline.finished(), self.ranks),
        }

    def _check_parity(self) -> None:
        """Compare engine and learner on the first prompt with an image among the first P, else on the first."""
        places = self.prompt_builder.first(self.train_set, self.plan.order)
        step, slot, prompt = first_with_image(islice(places, self.config.rollout.prompts_per_step))
        seeds = self.plan.seeds.group(step, slot)
        check_start(self.engine, self.learner, self.config, prompt, seeds, self.sync.version)

    # small parts -----------------------------------------------------------------------------

    def _call(self, event: str, **values: Any) -> None:
        """Call the callbacks of the first process; what one raises ends the run on all of them."""
        with self.ranks.fail_together(event):
            self.callbacks.call(event, trainer=self, **values)

    def _phase(self, text: str) -> None:
        """Say on the first process what takes long before the first step."""
        if self.ranks.first:
            print_phase(text)
