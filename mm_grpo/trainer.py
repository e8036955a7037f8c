"""The loop: prompts → completions → rewards → advantages → update → weights back to the engine.

`GRPOTrainer._step` is the algorithm on one page. What each part does is written in its own file: prompts to
advantages in rollout/collect.py, the update in learner/learner.py, the weight sync in parity/sync.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mm_grpo.build import build_parts, pipeline_of, plan_run
from mm_grpo.config import GRPOConfig
from mm_grpo.data.pass_rate_order import PassRateOrder
from mm_grpo.data.sources import Source, load_eval, load_train, warn_of_shared_rows
from mm_grpo.distributed.ranks import start
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.errors import ConfigError
from mm_grpo.health.checks import finite_loss, sampled_gap, update_happens
from mm_grpo.health.guards import Guards
from mm_grpo.health.image_files import readable
from mm_grpo.migrate.arguments import explain_arguments
from mm_grpo.pages.curves import read_expected_curve
from mm_grpo.pages.report import LivePage, Report
from mm_grpo.parity.gaps import check_start, first_with_image
from mm_grpo.parity.images import ImageMeasures
from mm_grpo.preflight.memory import run_sentence
from mm_grpo.preflight.out_of_memory import memory_explained, refuse_too_large
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.collect import Collector
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.evaluate import Evaluation
from mm_grpo.rollout.pipeline import scheduled_version
from mm_grpo.rollout.turns import sampler_of
from mm_grpo.run.callbacks import Callbacks
from mm_grpo.run.checkpoint import Checkpoints, steps_between
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.folder import RunFolder, outputs_of
from mm_grpo.run.inflight_state import pack_ahead, unpack_ahead
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.manifest import checkpoints_in
from mm_grpo.run.metrics import iter_metrics
from mm_grpo.run.paths import REPORT_EVERY, dated
from mm_grpo.run.progress import progress_of_run
from mm_grpo.run.same_run import refuse_another_run, rewards_of, rows_of, tool_sources_of
from mm_grpo.run.stop_signals import StopSignals, interrupted
from mm_grpo.run.summary import summary_of, warnings_of
from mm_grpo.run.trackers import Trackers
from mm_grpo.terminal import print_phase
from mm_grpo.timing import timed
from mm_grpo.types import Prompt


class GRPOTrainer:
    """Fine-tunes a vision-language model with GRPO.

    `config` is the whole run. `train` and `eval` override `data.train` and `data.eval` with rows, a
    `datasets.Dataset`, a path, a `Mixture` of these (mm_grpo/data/mixture.py), or for `eval` a dict of named sets
    (the first is the headline). `rewards` overrides the config's list and mixes names, mappings and callables.
    `model` is a transformers model to train (in place; `model.lora` and the rest of the section apply to it) and not
    the weights at `model.path`; `processor` one of ours. `tools` are functions that the model may call,
    `environment_factory` makes an object whose methods it may call. `callbacks` are objects with any of the methods
    that run/callbacks.py names.

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
        environment_factory: Callable[[], Any] | None = None,
        callbacks: Sequence[Any] = (),
        resume: bool = False,
    ) -> None:
        config.check()
        self.ranks = start(config.model.device, config.run.process_timeout)
        with self.ranks.fail_together("looking at run.dir"):
            run_dir = dated(config.run.dir, newest=resume) if self.ranks.first else ""
        config = config.with_values({"run.dir": self.ranks.broadcast(run_dir, "run.dir")})
        self.config, self.resume, self.resumed_at = config, resume, 0
        self.callbacks = Callbacks(callbacks, quiet=not self.ranks.first)
        self.toolbox = toolbox_of(config, tools, environment_factory)
        self._phase("reading the rows")
        self._read(train, eval, rewards)
        config = self.config
        self.folder = self._look_at_folder(inputs_of(config, train=train, eval=eval, rewards=rewards))
        self.trackers = Trackers.prepare(config.run.trackers if self.ranks.first else [])
        self._load(model, processor)
        self.checkpoints = Checkpoints(self.folder.paths, self.learner, config, self._call)
        log = self.folder.append_event if self.ranks.first else None
        self.guards = Guards(config, self.scorer.specs, log)
        self.images = ImageMeasures(config, self.learner, self.guards, self.folder, self.ranks)
        self.tokens_seen = 0
        self.signals = StopSignals(quiet=not self.ranks.first)
        self._trained, self.stop_reason = False, ""

    def _read(self, train: Any, eval: Any, rewards: Sequence[Any] | None) -> None:
        """Read the rows and plan the steps. The workers of rewards import them while the model loads."""
        config, toolbox = self.config, self.toolbox
        several_turns = toolbox is not None
        self.scorer = scorer = Scorer(reward_entries(config, rewards, toolbox), several_turns=several_turns)
        drop, turns = config.data.on_bad_image, several_turns
        self.train_set = readable(
            load_train(config, train, needs=scorer.check, turns=turns), drop, self.ranks
        )
        sets = load_eval(config, eval, needs=scorer.check, turns=turns)
        self.eval_sets = {name: readable(rows, drop, self.ranks) for name, rows in sets.items()}
        if self.ranks.first:
            warn_of_shared_rows(self.train_set, self.eval_sets)
        if toolbox is not None:
            asking = scorer.asking_for(("environment", "environments"), self.train_set.columns)
            toolbox.place(asking, processes=self.ranks.world)
            toolbox.look(self.train_set)
        self.plan = plan_run(config, self.train_set, several_turns=several_turns)
        self.save_every = steps_between(config.run.save_every, self.plan.max_steps)
        scorer.conversational, scorer.max_steps = self.train_set.conversational, self.plan.max_steps
        headline = EvalMetric.of(config, [spec.name for spec in scorer.specs])
        every = steps_between(config.run.eval_every, self.plan.max_steps, None) if self.eval_sets else 0
        self.config = config = config.with_values({"run.eval_every": every})
        self.evaluations = Evaluations(config, self.eval_sets, headline, several_turns=several_turns)
        if self.ranks.first:
            scorer.start()

    def _look_at_folder(self, inputs: Iterable[tuple[str, str | PathLike[str]]]) -> RunFolder:
        """The run folder, found fit to be written to, which it is not yet."""
        run = self.config.run
        with self.ranks.fail_together("looking at run.dir"):
            folder = RunFolder(
                run.dir,
                overwrite=run.overwrite,
                inputs=inputs,
                resume=self.resume,
                writes=outputs_of(self.config, saves=self.save_every > 0),
                expected=run.expected_curve,
            )
            if run.expected_curve is not None:
                read_expected_curve(run.expected_curve)
            if self.ranks.first:
                folder.check()
        return folder

    def _load(self, model: Any, processor: Processor | None) -> None:
        """Load the model and start the engine."""
        config, plan = self.config, self.plan
        if model is None:
            refuse_too_large(config, processes=self.ranks.world)
        # adapters are drawn from the run's seed, and the caller's random numbers go on as they were
        with torch.random.fork_rng(devices=[]), memory_explained(config, processes=self.ranks.world):
            torch.default_generator.manual_seed(config.run.seed % 2**63)
            parts = build_parts(
                config,
                plan.updates,
                (self.train_set, *self.evaluations.datasets),
                model=model,
                processor=processor,
                ranks=self.ranks,
                toolbox=self.toolbox,
                phase=self._phase,
            )
        self.processor, self.model, self.prompt_builder = parts.processor, parts.model, parts.prompt_builder
        self.learner, self.engine, self.sync = parts.learner, parts.engine, parts.sync
        self._limits = (*plan.sentences, self.evaluations.plan, *parts.sentences)
        self.sampler = sampler_of(
            config, self.processor, self.engine, self.toolbox, plan.seeds, lambda: self.sync.version
        )
        self.collector = Collector(
            config, self.train_set, plan.order, plan.seeds, self.prompt_builder, self.sampler, self.scorer,
            self.ranks.second() if config.rollout.max_staleness else self.ranks,
            version=partial(scheduled_version, staleness=config.rollout.max_staleness),
            reference_logprobs=self.learner.reference_logprobs,
        )  # fmt: skip
        self._pass_rates = plan.order if isinstance(plan.order, PassRateOrder) else None
        self.pipeline = pipeline_of(self.collector, self.engine, self.ranks)

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
                with self.signals, memory_explained(self.config, processes=self.ranks.world):
                    return self._train()
        except BaseException:
            self.close()
            raise

    def stop(self, reason: str = "a callback stopped it") -> None:
        """Called by a callback, end the run as a finished one, after the step that runs, or called in `on_save`
        after the next.

        The weights of that step are evaluated and saved as those of the last one are, and summary.json has the reason
        as `stopped`. With `resume=True` the run goes on to `max_steps`.
        """
        self.stop_reason = reason or "a callback stopped it"

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline. Collective."""
        self.callbacks.refuse_collective("evaluate", self.ranks.world)
        self.pipeline.drain()
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

    def show(self) -> Report:
        """The page of the run so far, which a notebook shows; report.html has more of it."""
        return Report([self.folder.paths])

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
        self.prompt_builder.close()
        self.scorer.close()
        if self.toolbox is not None:
            self.toolbox.close()

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """Prompts, completions, rewards, advantages, update and sync of one step; returns its metrics.

        The engine sleeps while the learner works, unless it samples ahead, and new weights wake it; a step that fails
        leaves it as it is.
        """
        ranks, guards = self.ranks, self.guards
        times = dict[str, float]()
        with timed(times, "step_time"):
            rollout = self.pipeline.take(step)  # prompts, completions, rewards, advantages (`collect_step`)
            groups = rollout.groups
            if self._pass_rates is not None:
                shares = ranks.broadcast(self.collector.pass_rates(rollout), "pass rates")
                self._pass_rates.observe(step, shares)
            with ranks.fail_together("guards"):
                if ranks.first:  # every group that was sampled: the evidence, before a guard may stop the run
                    with timed(rollout.times, "time/log"):
                        sampled = sorted(rollout.sampled, key=lambda group: (group.slot, group.attempt))
                        self.folder.write_rollouts(step, sampled, self.scorer.specs)
            self._call("on_rollouts", step=step, groups=rollout.sampled)
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

            self.pipeline.drain()
            with timed(times, "time/sync"), ranks.fail_together("weight sync"):
                own = report.gaps.get(self.sync.version)
                synced = self.sync.update(step, canary, noise=0.0 if own is None else own.max)
                guards.apply("logp_gap", synced.problem, step)
            self.pipeline.landed(step)  # after the checks, which would wait behind what is sampled next
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

    # the run around the steps ----------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        started, every, last = time.perf_counter(), self.config.run.eval_every or 0, self.plan.max_steps
        done, kept = self._begin()
        with self._watched(done):
            self._before_steps(done, kept)
            step = done
            for step in range(done + 1, last + 1):
                due = step == last or (every > 0 and step % every == 0)
                metrics = self._step(step)
                metrics |= self._evaluate(step) if due else {}
                self._call("on_step_end", step=step, metrics=metrics)
                ended = bool(self.ranks.max(bool(self.stop_reason), "stopping"))
                metrics |= self._evaluate(step) if ended and not due else {}
                self._call("on_log", step=step, metrics=metrics)
                self._save_checkpoint(step, last=ended or step == last)
                if ended:
                    self.progress.print(f"stopped after step {step}: {self.stop_reason}")
                    break
            summary = self._finish(step, started)
        self._call("on_train_end", step=step, summary=summary)
        return summary

    def _begin(self) -> tuple[int, Mapping[str, Any]]:
        """Take up a checkpoint where one is asked for, and begin the folder: the steps done, and what was kept."""
        run = self.folder
        with self.ranks.fail_together("the parity check"):
            self.sync.calibrate(self._first_prompt[2])  # before a checkpoint is loaded
        done, kept, log = self._restore()
        self.resumed_at = done
        if self.resume:
            last = self.plan.max_steps
            left = "nothing is left" if done == last else f"{last - done} of {last} steps are left"
            found = f"resuming {run.paths.root} after step {done}: {left}"
            self._phase(
                found if done else f"{run.paths.root} has no checkpoint to resume; starting at step 1"
            )
        with self.ranks.fail_together("starting"):
            if self.ranks.first:
                rewards = rewards_of(self.scorer.specs)
                run.start(self.config.to_yaml(), rewards=rewards, sampler=self.engine.sampler)
                run.cut_after(done, log)
                if done and run.paths.metrics.exists():
                    self.guards.replay(iter_metrics(run.paths.metrics))
        if self._pass_rates is not None:
            self._pass_rates.restore(kept)
        return done, kept

    @contextmanager
    def _watched(self, done: int) -> Iterator[None]:
        """What shows the run while it goes on: page, terminal and trackers."""
        config, run, first = self.config, self.folder, self.ranks.first
        pages = [LivePage(run.paths, REPORT_EVERY)] if config.run.report else []
        self._call("on_train_begin", step=done)
        batch, memory = config.batch_sentence(processes=self.ranks.world), run_sentence(self.learner)
        on_disk = self.checkpoints.sentence(self.save_every)
        headline = "\n".join(filter(None, (batch, *self._limits, memory, on_disk)))
        self.progress = progress_of_run(
            self.plan.max_steps, headline=headline, first=done, tokens=self.tokens_seen, quiet=not first
        )
        self.callbacks.surround([run, *pages, self.trackers], [self.progress, self.guards])
        with self.progress, self.trackers.open(config):
            try:
                yield
            finally:
                self._close_workers()
                for page in pages if first else ():
                    page.write()

    def _before_steps(self, done: int, kept: Mapping[str, Any]) -> None:
        """Compare engine and learner, evaluate or take up what was found, and fill the pipeline."""
        if self.config.run.guards.get("logp_gap") != "off":
            self._phase("checking that engine and learner agree on the first prompt")
            with self.ranks.fail_together("the parity check"):
                self._check_parity()
        if kept:
            self.evaluations.restore(kept)
        elif measured := self._evaluate(0):
            self._call("on_log", step=0, metrics=measured)
        if (stopped := self.ranks.max(self.signals.asked, "stopping")) and done < self.plan.max_steps:
            raise interrupted(stopped, done, done, self.folder.paths.root)
        self.progress.begin()
        with self.ranks.fail_together("resuming"):
            ahead = unpack_ahead(kept, self.collector, self.processor, self.ranks)
        self.pipeline.begin(done, ahead)

    def _save_checkpoint(self, step: int, *, last: bool) -> None:
        """Write a checkpoint where one is due. Raises RunInterrupted after a signal, unless the run is over anyhow."""
        stopped, every = self.ranks.max(self.signals.asked, "stopping"), self.save_every
        best = found.step if (found := self.evaluations.best) else None
        if every and (last or stopped or best == step or step % every == 0):
            self.checkpoints.save(step, self._extra(), spared=best)
        if stopped and not last:
            raise interrupted(stopped, step, step if every else None, self.folder.paths.root)

    def _finish(self, step: int, started: float) -> dict[str, Any]:
        """Save the model and write the summary of a run that ended after `step`."""
        run, saved = self.folder, self.config.run.save_model
        kept, why = self.evaluations.kept_step(step, checkpoints_in(run.paths.checkpoints))
        with self.ranks.fail_together("saving the model"):
            if self.ranks.first and saved:
                with self.checkpoints.weights_of(kept) if kept != step else nullcontext():
                    run.replace_folder("model", self.save)
                    if self.config.model.lora is not None:
                        run.replace_folder("adapter", self.save_adapter)
                self.callbacks.call("on_save", trainer=self, step=kept, path=run.paths.model)
        seconds = time.perf_counter() - started
        summary = summary_of(self.evaluations, seconds, step, self.stop_reason or None)
        summary |= {"model": {"step": kept, "why": why} if saved else None}
        summary["warned"] = warnings_of(run.paths) if self.ranks.first else {}
        if self.ranks.first:
            run.write_summary(summary)
        return summary

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate after `step`, 0 before the first, and say how it went; returns the metrics."""
        if not self.eval_sets:
            return {}
        if step == 0:
            self._phase("evaluating before the first step")
        clock = time.perf_counter()
        self.pipeline.drain()
        parts = (self.prompt_builder, self.sampler, self.scorer, self.ranks)
        self.progress.step = step
        metrics = self.evaluations.run(step, parts, self.folder, self.progress.evaluating)
        self.progress.print_after(self.evaluations.sentence(step))
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
            found, max_steps=self.plan.max_steps, allow_changed_code=self.config.run.allow_changed_code,
            **self._identity,
        )  # fmt: skip
        self.checkpoints.load(found)
        self.tokens_seen = found.extra["tokens_seen"]
        with self.ranks.fail_together("weight sync"):
            self.guards.apply("logp_gap", self.sync.update(found.step, None).problem, found.step)
        return found.step, found.extra, found.log

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """The rows, rewards, tools and loss features of the user's that a run is resumed with."""
        tools, named = self.toolbox, self.config.algorithm.features
        features = [
            (name, type(f)) for name, f in zip(named, self.learner.features[-len(named) :], strict=False)
        ]
        return {
            "rows": rows_of(self.train_set, self.eval_sets),
            "rewards": rewards_of(self.scorer.specs),
            "tools": [] if tools is None else list(tools.schemas),
            "tool_sources": tool_sources_of([*features, *([] if tools is None else tools.sources)]),
        }

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the learner's state."""
        return {
            "tokens_seen": self.tokens_seen,
            **self._identity,
            **self.evaluations.state(),
            **({} if self._pass_rates is None else self._pass_rates.state()),
            **pack_ahead(self.pipeline.finished(), self.ranks),
        }

    @cached_property
    def _first_prompt(self) -> tuple[int, int, Prompt]:
        """Step, slot and prompt of the first row with an image among the first P, else of the first row."""
        places = self.prompt_builder.first(self.train_set, self.plan.order)
        return first_with_image(islice(places, self.config.rollout.prompts_per_step))

    def _check_parity(self) -> None:
        """Compare engine and learner on the first prompt."""
        step, slot, prompt = self._first_prompt
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
