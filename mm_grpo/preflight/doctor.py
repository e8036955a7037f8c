"""`mm-grpo doctor`: load engine and learner and compare them, before and after a real weight update.

Checked on the config's first prompts: equal tokens, equal log-probs, one seed for each generation, and that a
learner's update reaches the engine. The update is a real learner step with made-up advantages of +1 and -1. It is
repeated at a growing learning rate until log-probs have moved so far that an engine which missed the update would be
past the limit. The changed model is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from rich.console import Console

from mm_grpo.build import Parts, build_parts, plan_run
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks, start
from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.errors import DataError, GuardStop
from mm_grpo.health.checks import duplicate_completions
from mm_grpo.parity.gaps import PromptParity, compare, gap_of, past_limit
from mm_grpo.preflight.memory import in_gb
from mm_grpo.preflight.out_of_memory import refuse_too_large
from mm_grpo.rollout.engine import Sampling, requests_for, require_answers
from mm_grpo.terminal import print_line
from mm_grpo.types import Completion, Group, Prompt

CLEAR_MOVE_FACTOR = 3.0  # the update is large enough when it has moved log-probs by this many times the limit
FIRST_RATE, LAST_RATE, RATE_FACTOR = 1e-6, 1e-2, 3.0


@dataclass
class ForcedUpdate:
    """Weight update that the doctor makes."""

    learner_steps: int = 0
    learning_rate: float = 0.0
    logp_moved: float = 0.0  # mean move of the learner's log-probs, in nats per token
    tensors: int = 0  # sent to the engine
    bytes: int = 0


@dataclass
class DoctorReport:
    """Comparison of engine and learner."""

    engine: str
    model: str
    dtype: str = ""
    device: str = ""
    limit: float = 0.0
    ids_equal: bool = False  # True once the engine has answered with the learner's prompt ids
    before: list[PromptParity] = field(default_factory=list)  # the update, one entry a prompt
    after: list[PromptParity] = field(default_factory=list)
    update: ForcedUpdate | None = None
    failures: list[str] = field(default_factory=list)  # messages; empty if the two sides agree

    @property
    def ok(self) -> bool:
        return not self.failures


def examine(config: GRPOConfig, count: int) -> DoctorReport:
    """Compare engine and learner of `config` on its first `count` prompts. Collective.

    Raises UserError for a fault of the user's; every other fault is in the report's `failures`.
    """
    report = DoctorReport(config.rollout.engine, config.model.path)
    ranks = start(config.model.device, config.run.process_timeout)
    try:
        with ranks.fail_together("doctor"):
            _examine(config, count, report, ranks)
    except GuardStop as stop:
        report.failures.append(str(stop))
    return report


def _examine(config: GRPOConfig, count: int, report: DoctorReport, ranks: Ranks) -> None:
    config.check()
    rollout = config.rollout
    rows = load_train(config)
    plan, toolbox = plan_run(config, rows, at_least_an_epoch=True), toolbox_of(config, None, None)
    refuse_too_large(config, processes=ranks.world)
    # with this schedule and loss every step updates; the model stays the same
    optim = {"optim.lr_scheduler_type": "constant", "optim.warmup_steps": 0, "optim.updates_per_step": 1}
    slots = {"rollout.prompts_per_step": max(rollout.prompts_per_step, count)}  # all in one update
    updating = config.with_values({**optim, **slots, "algorithm": {"beta": config.algorithm.beta}})
    parts = build_parts(updating, 100, [rows], ranks=ranks, toolbox=toolbox)
    model, limit = parts.model, parts.sync.limit
    report.dtype, report.device = str(model.dtype).removeprefix("torch."), str(model.device)
    report.limit = limit
    first_slots = list(islice(parts.prompt_builder.first(rows, plan.order), count))
    if not first_slots:
        limit_name = parts.prompt_builder.limit_name
        raise DataError(f"data.train: all {len(rows)} prompts are longer than {limit_name}; raise the limit")
    prompts = [prompt for _, _, prompt in first_slots]
    seeds = [plan.seeds.group(step, slot) for step, slot, _ in first_slots]
    requests = requests_for(prompts, seeds, Sampling(rollout.max_completion_length, rollout.temperature))

    def sample() -> list[tuple[Completion, ...]]:
        completions = parts.engine.generate(requests)
        require_answers(requests, completions, parts.sync.version)
        size = rollout.num_generations
        return [tuple(completions[i : i + size]) for i in range(0, len(completions), size)]

    answers = sample()
    report.ids_equal = True  # require_answers raises if they differ
    groups = [_group(i, p, a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    report.before = [compare(parts.engine, parts.learner, g.prompt, g.completions) for g in groups]
    report.failures += [m for p in report.before for m in past_limit(p, limit)]
    report.failures += filter(None, (duplicate_completions([group]) for group in groups))

    parts.engine.sleep()
    report.update = update = _update(parts, groups, config.learning_rate, limit)
    if not update.logp_moved >= CLEAR_MOVE_FACTOR * limit:
        report.failures.append(
            f"{update.learner_steps} updates at learning rates up to {update.learning_rate:.3g} moved log-probs by "
            f"{update.logp_moved:.3g} per token, and {CLEAR_MOVE_FACTOR * limit:.3g} would show an update: too much "
            "is frozen"
        )
    update.tensors, update.bytes = parts.sync.send(1)
    report.after = [
        compare(parts.engine, parts.learner, g.prompt, new, scored=[c.token_ids for c in g.completions])
        for g, new in zip(groups, sample(), strict=True)
    ]
    new_gaps = [m for p in report.after for m in past_limit(p, limit)]
    if new_gaps and not report.failures:
        report.failures.append("the two sides agreed before the weight update: it did not reach the engine")
    report.failures += new_gaps
    parts.engine.close()


def _group(slot: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
    """Give completions advantages of +1 and -1, in turn over the distinct ones so that copies do not cancel."""
    distinct = list(dict.fromkeys(c.token_ids for c in completions))
    advantages = tuple(1.0 if distinct.index(c.token_ids) % 2 == 0 else -1.0 for c in completions)
    return Group(slot, prompt, completions, advantages, advantages)


def _update(parts: Parts, groups: Sequence[Group], rate: float, limit: float) -> ForcedUpdate:
    """Step the learner until its log-probs of the groups' completions have clearly moved."""

    def score() -> list[list[float]]:
        learner = parts.learner
        return [x for g in groups for x in learner.score(g.prompt, [c.token_ids for c in g.completions])]

    update, before, optimizer = ForcedUpdate(), score(), parts.learner.optimizer
    rate = max(rate, FIRST_RATE)
    clear_move = CLEAR_MOVE_FACTOR * limit
    # `not >=`: a NaN does not end the loop
    while not update.logp_moved >= clear_move and (rate <= LAST_RATE or update.learner_steps == 0):
        optimizer.config = optimizer.config.with_values({"learning_rate": rate})
        ranks = parts.learner.ranks
        parts.learner.update([g for g in groups if g.slot % ranks.world == ranks.rank])
        update.learner_steps, update.learning_rate = update.learner_steps + 1, rate
        update.logp_moved = ranks.broadcast(gap_of(before, score()).mean, "doctor")
        rate *= RATE_FACTOR
    return update


def show(report: DoctorReport, console: Console | None = None) -> None:
    """Print `report`, failures last and in red."""
    console = console or Console(highlight=False)
    lines = [
        f"engine {report.engine}, model {report.model} ({report.dtype} on {report.device}), limit "
        f"{report.limit:g} nats per token",
        f"prompt ids equal: {'yes' if report.ids_equal else 'not shown'}",
    ]
    if report.before:
        lines += ["gaps of log-probs per token (mean / max) of given completions, and of the samples:"]
    for before, after in zip_longest(report.before, report.after):
        gaps = f"{_gaps(before)}; after the update {_gaps(after) if after else '-'}"
        media = f"{before.media} image(s) or video(s)"
        counts = f"{before.prompt_tokens} tokens, {media}, {before.distinct} of {before.completions}"
        lines += [f"  {before.uid}: {counts} completions distinct; {gaps}"]
    if (update := report.update) is not None:
        lines += [
            f"weight update: {update.learner_steps} learner step(s) up to learning rate {update.learning_rate:.3g} "
            f"moved log-probs by {update.logp_moved:.3g} per token; sent {update.tensors} tensors, "
            f"{in_gb(update.bytes)}"
        ]
    for line in lines:
        print_line(line, console)
    for failure in report.failures:
        print_line(failure, console, style="red")
    print_line("ok" if report.ok else f"{len(report.failures)} problem(s)", console)


def _gaps(parity: PromptParity) -> str:
    return ", ".join(f"{gap.mean:.0e} / {gap.max:.0e}" for gap in (parity.score, parity.sampled))
