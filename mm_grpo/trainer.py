"""The loop: prompts → completions → rewards → advantages → update → weights back to the engine.

`GRPOTrainer._step` is the body of the loop in examples/loop.py, with the checks of a long run between its lines.
Prompts to advantages are written in rollout/collect.py, the update in learner/learner.py, the sync in parity/sync.py.
The parts come from open_run.py. What is saved and published is in exports.py, resuming in run/resume.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.data.images import PICTURES
from mm_grpo.data.sources import Source
from mm_grpo.errors import ConfigError
from mm_grpo.exports import Exports
from mm_grpo.open_run import OpenRun, explain_arguments
from mm_grpo.processors.base import Processor
from mm_grpo.rollout.collect import Rollout
from mm_grpo.rollout.evaluate import Evaluation
from mm_grpo.timing import timed


class GRPOTrainer(Exports):
    """Trainer of a vision-language model with GRPO.

    `config` is the whole run. `train` and `eval` override `data.train` and `data.eval` with rows, a
    `datasets.Dataset`, a path, a `Mixture` of these (mm_grpo/data/mixture.py), or for `eval` a dict of named sets
    (the first is the headline). `rewards` overrides the config's list and mixes names, mappings and callables.
    `model` is a transformers model to train in place of the weights at `model.path`; `model.lora` and the rest of the
    section apply to it. `processor` is one of ours. `tools` are functions that the model may call,
    `environment_factory` makes an object whose methods it may call. `callbacks` are objects with any of the methods
    that run/callbacks.py names.

    The constructor checks everything that can be checked before a model is loaded, then loads it.
    Raises UserError (ConfigError, DataError, RewardError) for what the user can correct.
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
        parts = OpenRun(
            config, train=train, eval=eval, rewards=rewards, model=model, processor=processor, tools=tools,
            environment_factory=environment_factory, callbacks=callbacks, resume=resume,
        )  # fmt: skip
        super().__init__(parts)
        self.plan, self.runner, self.collector = parts.plan, parts.runner, parts.collector
        self.pipeline, self.engine, self.sync = parts.pipeline, parts.engine, parts.sync
        self.guards, self.signals = parts.guards, parts.signals
        self.tokens_seen = self.resumed_at = 0
        self.stop_reason, self._trained = "", False

    def train(self) -> dict[str, Any]:
        """Run to `max_steps`; return the contents of `summary.json`. Collective.

        The first process writes the run folder. Raises GuardStop when a guard stops the run; the folder then holds
        every finished step, and the trainer is closed. A run without one update ends so too, after everything was
        saved. SIGINT, SIGTERM and SIGHUP end it after the running step, with a checkpoint and RunInterrupted. A trainer
        trains once: ConfigError the second time.
        """
        if self._trained:
            raise ConfigError(
                "train() was called on this trainer before, and its weights are those of then; to go on, make a "
                "GRPOTrainer(config, ..., resume=True), with a higher run.max_steps if the run had ended"
            )
        self._trained = True
        try:
            with self.parts.running():
                return self._train()
        except BaseException:
            self.close()
            raise

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the run as a finished one after the running step; called in `on_save`, after the next step.

        For callbacks. The weights of that step are evaluated and saved as the last ones, and summary.json has the
        reason as `stopped`. With `resume=True` the run goes on to `max_steps`.
        """
        self.stop_reason = reason or "a callback stopped it"

    def evaluate(self, step: int = 0) -> dict[str, Evaluation]:
        """Answer every evaluation set with the current weights, by name; the first set is the headline. Collective."""
        self.callbacks.refuse_collective("evaluate", self.ranks.world)
        self.pipeline.drain()
        return self.evaluations.answer(self.runner, step)

    def close(self) -> None:
        """Free what the rollout engine holds and end the processes of rewards and tools; the model stays."""
        self.parts.close()
        self.engine.close()

    # one step --------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, float]:
        """Make the groups of one step, learn from them and send the weights; return the step's metrics.

        The engine sleeps while the learner works, unless it samples ahead, and new weights wake it. A step that fails
        leaves it as it is.
        """
        times = dict[str, float]()
        with timed(times, "step_time"):
            # prompts, completions, rewards, advantages: `collect_step`, or its result if it was sampled ahead
            rollout = self.pipeline.take(step)
            groups = rollout.groups
            self.collector.observe(rollout, self.ranks)
            self._log_rollout(step, rollout)
            with timed(times, "time/sync"), self.ranks.fail_together("weight sync"):
                # before the update: the engine's scores under the old weights prove later that new ones arrived
                canary = self.sync.canary(groups)
                measured = self.parts.measures.before_sleep(step, canary)
            self.pipeline.sleep()
            measured |= self.parts.measures.before_update(step, groups)

            with timed(times, "time/learner"):
                report = self.learner.update(groups)
            self.parts.check_update(step, report)

            self.pipeline.drain()
            with timed(times, "time/sync"), self.ranks.fail_together("weight sync"):
                gap = report.gaps.get(self.sync.version)
                synced = self.sync.update(step, canary, noise=0.0 if gap is None else gap.max)
                self.guards.apply("logp_gap", synced.problem, step)
            # after the checks: the engine would answer them only behind what is sampled next
            self.pipeline.landed(step)
        self.tokens_seen += rollout.tokens
        counters = {
            **self.engine.metrics(),
            "num_tokens": self.tokens_seen,
            **self.plan.order.epochs(step),
            "prompts/dropped": rollout.dropped,
            "prompts/images": rollout.images,
            **{f"prompts/{noun}_decoded": rollout.decoded[noun] for noun in PICTURES},
        }
        # a reward may log any name it likes, and a KL in rewards has the name of one in the loss; ours win
        return {
            **rollout.metrics, **report.metrics, **synced.metrics, **measured, **counters, **rollout.times, **times
        }  # fmt: skip

    def _log_rollout(self, step: int, rollout: Rollout) -> None:
        """Write the step's rollout file and call `on_rollouts`."""
        with self.ranks.fail_together("guards"):
            # before any guard: a run that a guard stops here keeps the groups that show why
            if self.ranks.first:
                with timed(rollout.times, "time/log"):
                    sampled = sorted(rollout.sampled, key=lambda group: (group.slot, group.attempt))
                    self.folder.write_rollouts(step, sampled, self.scorer.specs)
        self._call("on_rollouts", step=step, groups=rollout.sampled)

    # the run around the steps ----------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        started, eval_every = time.perf_counter(), self.config.run.eval_every or 0
        last_step = self.plan.max_steps
        self._load_checkpoint()
        step = self.resumed_at
        self._call("on_train_begin", step=step)
        # the workers end first: the page is written, and the terminal closed, when nothing runs any more
        with self.parts.display(step, self.tokens_seen) as self.progress, closing(self.parts):
            self._before_steps()
            for step in range(self.resumed_at + 1, last_step + 1):
                due = step == last_step or (eval_every > 0 and step % eval_every == 0)
                metrics = self._step(step)
                metrics |= self._evaluate(step) if due else {}
                self._call("on_step_end", step=step, metrics=metrics)
                stops = bool(self.ranks.max(bool(self.stop_reason), "stopping"))
                metrics |= self._evaluate(step) if stops and not due else {}
                self._call("on_log", step=step, metrics=metrics)
                self._save_checkpoint(step, last=stops or step == last_step)
                if stops:
                    self.progress.print(f"stopped after step {step}: {self.stop_reason}")
                    break
            summary = self._finish(step, started, self.stop_reason)
        self._call("on_train_end", step=step, summary=summary)
        return summary

    def _load_checkpoint(self) -> None:
        """Continue from the newest checkpoint when the run resumes, and start the run folder."""
        with self.ranks.fail_together("the parity check"):
            # before a checkpoint is loaded: now learner and engine both have the weights on disk
            self.sync.calibrate(self.parts.first_prompt[2])
        self.resumed_at = step = self.state.load(self.parts.resume)
        self.tokens_seen = self.state.extra.get("tokens_seen", 0)
        if step:
            with self.ranks.fail_together("weight sync"):
                self.guards.apply("logp_gap", self.sync.update(step, None).problem, step)
        self.parts.start_folder(step)
        self.plan.order.restore(self.state.extra)

    def _before_steps(self) -> None:
        """Compare engine and learner, evaluate or restore the evaluations, and start the pipeline."""
        with self.ranks.fail_together("the parity check"):
            self.parts.check_start()
        if self.resumed_at:
            self.evaluations.restore(self.state.extra)
        elif metrics := self._evaluate(0):
            self._call("on_log", step=0, metrics=metrics)
        signal = self.ranks.max(self.signals.number, "stopping")
        if signal and self.resumed_at < self.plan.max_steps:
            raise self.signals.interruption(signal, self.resumed_at, self.resumed_at, self.folder.paths.root)
        self.progress.begin()
        with self.ranks.fail_together("resuming"):
            ahead = self.parts.steps_ahead()
        self.pipeline.begin(self.resumed_at, ahead)

    def _save_checkpoint(self, step: int, *, last: bool) -> None:
        """Write a checkpoint when one is due. Raises RunInterrupted after a signal, unless the run is over anyway."""
        signal = self.ranks.max(self.signals.number, "stopping")
        path = self.state.save(step, self.tokens_seen, self.pipeline.finished, due=last or bool(signal))
        if path is not None:
            self._call("on_save", step=step, path=path)
        if signal and not last:
            raise self.signals.interruption(signal, step, step if path else None, self.folder.paths.root)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate after `step`, 0 before the first, and show the result; return the metrics."""
        if not self.evaluations.sets:
            return {}
        if step == 0:
            self.parts.phase("evaluating before the first step")
        started = time.perf_counter()
        self.pipeline.drain()
        self.progress.step = step
        metrics = self.evaluations.run(step, self.runner, self.folder, self.progress.evaluating)
        self.progress.print_after(self.evaluations.sentence(step))
        metrics["time/eval"] = time.perf_counter() - started
        self._call("on_evaluate", step=step, metrics=metrics, evaluations=self.evaluations.after)
        return metrics

    def _call(self, event: str, **values: Any) -> None:
        """Call the callbacks of the first process; what one raises ends the run on all of them."""
        with self.ranks.fail_together(event):
            self.callbacks.call(event, trainer=self, **values)
