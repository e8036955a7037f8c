"""Opening of a run: its rows, plan, run folder, model and engine, and what watches, saves and shows it.

Everything that can be checked without the model is checked before the model loads. build.py makes the parts of the
algorithm alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mm_grpo.build import Parts, build_parts, pipeline_of, plan_run, processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.sources import Source, load_eval, load_train, warn_of_shared_rows
from mm_grpo.distributed.ranks import Ranks, start
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.health.checks import finite_loss, sampled_gap, update_happens
from mm_grpo.health.guards import Guards
from mm_grpo.learner.step_report import LearnerReport
from mm_grpo.migrate.arguments import explain_arguments as explain_arguments  # for the trainer, too
from mm_grpo.pages.curves import read_expected_curve
from mm_grpo.pages.report import LivePage
from mm_grpo.parity.gaps import check_start, first_with_media
from mm_grpo.parity.images import ImageMeasures
from mm_grpo.preflight.gold_warnings import warn_of_golds
from mm_grpo.preflight.memory import run_sentence
from mm_grpo.preflight.out_of_memory import memory_explained, refuse_too_large
from mm_grpo.preflight.understood import brief_lines, other_uses
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.collect import Collector, Rollout
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.pipeline import scheduled_version
from mm_grpo.rollout.runner import RolloutRunner
from mm_grpo.rollout.turns import sampler_of
from mm_grpo.run.callbacks import Callbacks
from mm_grpo.run.checkpoint import steps_between
from mm_grpo.run.evaluations import Evaluations, default_control
from mm_grpo.run.folder import RunFolder, outputs_of
from mm_grpo.run.inflight_state import unpack_ahead
from mm_grpo.run.inputs import Inputs, inputs_of
from mm_grpo.run.manifest import Checkpoint
from mm_grpo.run.metrics import iter_metrics
from mm_grpo.run.paths import REPORT_EVERY, RunPaths, dated
from mm_grpo.run.progress import Progress, progress_of_run
from mm_grpo.run.resume import RunState
from mm_grpo.run.same_run import identity_of, left_out_before, rewards_of
from mm_grpo.run.stop_signals import StopSignals
from mm_grpo.run.trackers import Trackers
from mm_grpo.terminal import print_phase
from mm_grpo.trained.warm_mark import changes_of_form, read_mark
from mm_grpo.types import Prompt


class OpenRun:
    """Parts of a run, ready for its first step. The arguments are those of `GRPOTrainer`.

    Every process makes one. Raises UserError (ConfigError, DataError, RewardError) for what the user can correct.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        train: Source | None,
        eval: Source | Mapping[str, Source] | None,
        rewards: Sequence[Any] | None,
        model: Any,
        processor: Processor | None,
        tools: Sequence[Callable[..., Any]] | None,
        environment_factory: Callable[[], Any] | None,
        callbacks: Sequence[Any],
        resume: bool,
    ) -> None:
        # the order matters: messages appear, and processes meet, in it
        config.check()
        self.ranks = ranks = start(config.model.device, config.run.process_timeout)
        with ranks.fail_together("looking at run.dir"):
            run_dir = dated(config.run.dir, newest=resume) if ranks.first else ""
        config = config.with_values({"run.dir": ranks.broadcast(run_dir, "run.dir")})
        self.callbacks = Callbacks(callbacks, quiet=not ranks.first)
        with ranks.fail_together("reading the mark of a warm start"):
            mark = read_mark(config.model.path) if model is None and ranks.first else None
        for sentence in changes_of_form(config, mark):
            logging.getLogger("mm_grpo").warning("%s", sentence)
        self.warmed = warmed = ranks.broadcast(mark is not None, "the mark of a warm start")
        self.toolbox = toolbox = toolbox_of(config, tools, environment_factory)
        several_turns = toolbox is not None
        self.phase("reading the rows")
        self.scorer = scorer = Scorer(reward_entries(config, rewards, toolbox), several_turns=several_turns)
        self.train_set, eval_sets, loaded = self._read_rows(config, train, eval, processor, resume)
        self.plan = plan = plan_run(config, self.train_set, several_turns=several_turns)
        headline = EvalMetric.of(config, [spec.name for spec in scorer.specs])
        eval_every = steps_between(config.run.eval_every, plan.max_steps, None) if eval_sets else 0
        blind = config.run.eval_blind or (default_control(eval_sets) if warmed else None)
        if blind != config.run.eval_blind:
            self.phase(f"model.path was warmed: the blind control is measured (run.eval_blind: {blind})")
        self.config = config = config.with_values({"run.eval_every": eval_every, "run.eval_blind": blind})
        self.evaluations = Evaluations(config, eval_sets, headline, several_turns=several_turns)
        if ranks.first:
            # its worker processes import the rewards while the model loads
            scorer.start(conversational=self.train_set.conversational, max_steps=plan.max_steps)
        save_every = steps_between(config.run.save_every, plan.max_steps)
        inputs = inputs_of(config, train=train, eval=eval, rewards=rewards)
        self.folder = folder = check_folder(config, inputs, ranks, resume=resume, saves=save_every > 0)
        self.trackers = Trackers(config.run.trackers if ranks.first else [])
        if ranks.first:
            uses = other_uses(config, self.train_set, toolbox)
            for line in brief_lines(self.train_set, scorer.specs, uses):
                print_phase(line)
        self.parts = parts = self._load(model, processor, loaded)
        self.processor, self.model, self.engine = parts.processor, parts.model, parts.engine
        self.learner, self.sync = parts.learner, parts.sync
        sampler = sampler_of(
            config, self.processor, self.engine, toolbox, plan.seeds, lambda: self.sync.version
        )
        self.runner = RolloutRunner(parts.prompt_builder, sampler, scorer, ranks)
        staleness = config.rollout.max_staleness
        self.collector = Collector(
            config, self.train_set, plan.order, plan.seeds,
            # steps ahead are sampled in another thread, and its collectives need another group
            replace(self.runner, ranks=ranks.second()) if staleness else self.runner,
            version=partial(scheduled_version, staleness=staleness),
            reference_logprobs=self.learner.reference_logprobs,
        )  # fmt: skip
        self.pipeline = pipeline_of(self.collector, self.engine, ranks)
        self.guards = Guards(config, scorer.specs, folder.append_event if ranks.first else None)
        self.measures = ImageMeasures(config, self.learner, self.guards, folder, ranks)
        self.resume: bool | Checkpoint = resume  # a checkpoint: of another run's folder (replay.py)
        user_features = config.algorithm.features
        classes = map(type, self.learner.features[len(self.learner.features) - len(user_features) :])
        features = list(zip(user_features, classes, strict=True))
        sets = {"train": self.train_set, **{f"eval.{name}": rows for name, rows in eval_sets.items()}}
        self.state = RunState(
            folder.paths, self.learner, config, self.evaluations, sets, plan.order,
            # it reads every row
            cache(partial(identity_of, sets, scorer.specs, toolbox, features)),
            max_steps=plan.max_steps, save_every=save_every,
        )  # fmt: skip
        self.signals = StopSignals(quiet=not ranks.first)

    def phase(self, text: str) -> None:
        """Print on the first process what takes long before the first step."""
        if self.ranks.first:
            print_phase(text)

    @cached_property
    def first_prompt(self) -> tuple[int, int, Prompt]:
        """Step, slot and prompt of the first row with an image or a video among the first P, else of the first row."""
        prompts = self.parts.prompt_builder.first(self.train_set, self.plan.order)
        return first_with_media(islice(prompts, self.config.rollout.prompts_per_step))

    def check_start(self) -> None:
        """Compare engine and learner on the first prompt, and note the start of the run. Every process calls it."""
        facts = {
            "processes": self.ranks.world,
            "rows_changed": len(self.state.changed_rows),
            "warmed": self.warmed,
        }
        if self.config.run.guards.get("logp_gap") != "off":
            self.phase("checking that engine and learner agree on the first prompt")
            step, slot, prompt = self.first_prompt
            seeds = self.plan.seeds.group(step, slot)
            parity = check_start(self.engine, self.learner, self.config, prompt, seeds, self.sync.version)
            facts |= {f"gap_{name}": value for name, value in asdict(parity.sampled).items()}
        if self.ranks.first:
            self.folder.note_start(self.state.step, **facts)

    def check_update(self, step: int, report: LearnerReport) -> None:
        """Apply the guards of an update: engine against learner, weights that moved, a finite loss."""
        with self.ranks.fail_together("guards"):
            for version, gap in report.gaps.items():
                problem = sampled_gap(gap, self.sync.limit, self.sync.moved_since(version))
                self.guards.apply("logp_gap", problem, step)
            for record in report.updates:
                self.guards.apply("update_happens", update_happens(record), step)
            self.guards.apply("update_happens", finite_loss(report.metrics["loss"]), step)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the run folder's lock, note stop signals, and explain errors of a full GPU in the block."""
        with ExitStack() as stack:
            with self.ranks.fail_together("taking run.dir"):
                if self.ranks.first:
                    stack.enter_context(self.folder.claim())
            with self.signals, memory_explained(self.config, processes=self.ranks.world):
                yield

    def start_folder(self, step: int) -> None:
        """Start the run folder after `step` steps: cut its logs there, and replay them to the guards."""
        folder, last, root = self.folder, self.plan.max_steps, self.folder.paths.root
        if self.resume is True:
            remaining = "nothing is left" if step == last else f"{last - step} of {last} steps are left"
            resuming = f"resuming {root} after step {step}: {remaining}"
            self.phase(resuming if step else f"{root} has no checkpoint to resume; starting at step 1")
        with self.ranks.fail_together("starting"):
            if self.ranks.first:
                rewards = rewards_of(self.scorer.specs)
                folder.start(self.config.to_yaml(), rewards=rewards, sampler=self.engine.sampler_version)
                folder.cut_after(step, self.state.log)
                if step and folder.paths.metrics.exists():
                    self.guards.replay(iter_metrics(folder.paths.metrics))

    def steps_ahead(self) -> dict[int, Rollout]:
        """Return the steps that were sampled ahead of the loaded checkpoint, this process's part."""
        self.collector.changed_rows = self.state.changed_rows
        return unpack_ahead(self.state.extra, self.collector, self.processor, self.ranks)

    @contextmanager
    def display(self, step: int, tokens: int) -> Iterator[Progress]:
        """Show the run after `step` steps on terminal, page and trackers in the block; write the page at the end."""
        config, first = self.config, self.ranks.first
        pages = [LivePage(self.folder.paths, REPORT_EVERY)] if config.run.report and first else []
        sentences = (
            config.batch_sentence(processes=self.ranks.world),
            *self.plan.sentences,
            self.evaluations.plan,
            *self.parts.sentences,
            run_sentence(self.learner),
            self.state.checkpoints.sentence(self.state.save_every),
        )
        headline = "\n".join(filter(None, sentences))
        progress = progress_of_run(
            self.plan.max_steps, headline=headline, first=step, tokens=tokens, quiet=not first
        )
        self.callbacks.surround([self.folder, *pages, self.trackers], [progress, self.guards])
        with progress, self.trackers.open(config):
            try:
                yield progress
            finally:
                for page in pages:
                    page.write()

    def close(self) -> None:
        """End the threads and processes of prompts, rewards and tools; the engine and the model stay."""
        self.pipeline.close()
        self.parts.prompt_builder.close()
        self.scorer.close()
        if self.toolbox is not None:
            self.toolbox.close()

    def _read_rows(
        self, config: GRPOConfig, train: Any, eval: Any, processor: Processor | None, resume: bool
    ) -> tuple[Rows, dict[str, Rows], Processor]:
        """Read the training rows and the evaluation sets, and prepare the toolbox for them. Collective.

        Between, the processor is loaded if none is passed in, because its rule of sizes may refuse images.
        """
        ranks, toolbox, scorer = self.ranks, self.toolbox, self.scorer
        options: dict[str, Any] = {"needs": scorer.check, "turns": toolbox is not None}
        train_set, sets = load_train(config, train, **options), load_eval(config, eval, **options)
        loaded = processor if processor is not None else processor_of(config)
        checkpoints = RunPaths(Path(config.run.dir)).checkpoints
        before = ranks.broadcast(
            left_out_before(checkpoints) if resume and ranks.first else None, "rows left out"
        )
        usable = partial(
            readable, on_bad_media=config.data.on_bad_media, ranks=ranks, processor=loaded, before=before
        )
        train_set, eval_sets = usable(train_set), {name: usable(rows) for name, rows in sets.items()}
        if ranks.first:
            warn_of_shared_rows(train_set, eval_sets)
            warn_of_golds((train_set, *eval_sets.values()), scorer.specs)
        if toolbox is not None:
            asking = scorer.asking_for(("environment", "environments"), train_set.columns)
            toolbox.place(asking, processes=ranks.world)
            toolbox.look(train_set)
        return train_set, eval_sets, loaded

    def _load(self, model: Any, processor: Processor | None, loaded: Processor) -> Parts:
        """Load the model and start the engine. Collective."""
        config, ranks = self.config, self.ranks
        if model is None:
            refuse_too_large(config, processes=ranks.world)
        # adapters are drawn from the run's seed, and the caller's random numbers continue as they were
        with torch.random.fork_rng(devices=[]), memory_explained(config, processes=ranks.world):
            torch.default_generator.manual_seed(config.run.seed % 2**63)
            return build_parts(
                config,
                self.plan.updates,
                (self.train_set, *self.evaluations.datasets),
                model=model,
                processor=processor,
                loaded=loaded,
                ranks=ranks,
                toolbox=self.toolbox,
                phase=self.phase,
            )


def check_folder(config: GRPOConfig, inputs: Inputs, ranks: Ranks, *, resume: bool, saves: bool) -> RunFolder:
    """Return the run folder, checked but not yet written to. Collective."""
    run = config.run
    with ranks.fail_together("looking at run.dir"):
        folder = RunFolder(
            run.dir,
            overwrite=run.overwrite,
            inputs=inputs,
            resume=resume,
            writes=outputs_of(config, saves=saves),
            expected=run.expected_curve,
        )
        if run.expected_curve is not None:
            read_expected_curve(run.expected_curve)
        if ranks.first:
            folder.check()
    return folder
