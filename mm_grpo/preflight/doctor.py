"""`mm-grpo doctor`: loads both parts of a run and compares them, before and after a real weight update.

On the config's own first prompts: does the engine run the learner's tokens, do log-probs agree, has each
generation its own seed, does an update of the learner arrive. The update is a real learner step with
made-up advantages of +1 and -1, repeated at a growing learning rate until it has moved log-probs so far
that an engine which missed it would be past the limit. The model is changed by this and not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from rich.console import Console

from mm_grpo.build import Parts, build_parts, plan_run
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.errors import DataError, GuardStop
from mm_grpo.health.checks import duplicate_completions
from mm_grpo.parity.gaps import PromptParity, compare, gap_of, past_limit
from mm_grpo.preflight.memory import in_gb
from mm_grpo.preflight.out_of_memory import refuse_too_large
from mm_grpo.rollout.engine import Sampling, requests_for, require_answers
from mm_grpo.terminal import print_line
from mm_grpo.types import Completion, Group, Prompt

PROMPTS = 4
CLEARLY = 3.0
"""The update is large enough when it has moved log-probs by this many times the limit."""
FIRST_RATE, LAST_RATE, FACTOR = 1e-6, 1e-2, 3.0


@dataclass
class ForcedUpdate:
    """The weight update of the examination. `logp_moved` is in nats per token."""

    learner_steps: int = 0
    learning_rate: float = 0.0
    logp_moved: float = 0.0
    tensors: int = 0
    bytes: int = 0


@dataclass
class DoctorReport:
    """What the doctor found. `failures` are messages; without any the two sides agree.

    `ids_equal` is None until the engine has answered. `before` and `after` the update, one entry a prompt.
    """

    engine: str
    model: str
    dtype: str = ""
    device: str = ""
    limit: float = 0.0
    ids_equal: bool | None = None
    before: list[PromptParity] = field(default_factory=list)
    after: list[PromptParity] = field(default_factory=list)
    update: ForcedUpdate | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures


def examine(config: GRPOConfig, count: int = PROMPTS) -> DoctorReport:
    """Compare the two sides of `config` on its first `count` prompts.

    Raises UserError for what the user can mend; all else that is wrong is in the report's `failures`.
    """
    report = DoctorReport(config.rollout.engine, config.model.path)
    try:
        _examine(config, count, report)
    except GuardStop as stop:
        report.failures.append(str(stop))
    return report


def _examine(config: GRPOConfig, count: int, report: DoctorReport) -> None:
    config.check()
    rollout = config.rollout
    rows = load_train(config)
    plan, toolbox = plan_run(config, rows, at_least_an_epoch=True), toolbox_of(config, None, None)
    refuse_too_large(config)
    parts = build_parts(_for_updates(config), 100, [rows], toolbox=toolbox)
    model, limit = parts.model, parts.sync.limit
    report.dtype, report.device = str(model.dtype).removeprefix("torch."), str(model.device)
    report.limit = limit
    places = list(islice(parts.prompt_builder.first(rows, plan.order), count))
    if not places:
        limit_name = parts.prompt_builder.limit_name
        raise DataError(
            f"data.train: all {len(rows)} prompts are longer than {limit_name} allows; raise the limit"
        )
    prompts = [prompt for _, _, prompt in places]
    seeds = [plan.seeds.group(step, slot) for step, slot, _ in places]
    requests = requests_for(prompts, seeds, Sampling(rollout.max_completion_length, rollout.temperature))

    def sample() -> list[tuple[Completion, ...]]:
        completions = parts.engine.generate(requests)
        require_answers(requests, completions, parts.sync.version)
        size = rollout.num_generations
        return [tuple(completions[i : i + size]) for i in range(0, len(completions), size)]

    report.ids_equal = False
    answers = sample()
    report.ids_equal = True  # require_answers found them so
    groups = [_group(i, p, a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    report.before = [compare(parts.engine, parts.learner, g.prompt, g.completions) for g in groups]
    report.failures += [m for p in report.before for m in past_limit(p, limit)]
    report.failures += filter(None, (duplicate_completions([group]) for group in groups))

    report.update = done = _update(parts, groups, config.learning_rate, limit)
    if not done.logp_moved >= CLEARLY * limit:
        report.failures.append(
            f"{done.learner_steps} updates at learning rates up to {done.learning_rate:.3g} moved log-probs by "
            f"{done.logp_moved:.3g} per token, and {CLEARLY * limit:.3g} would show an update: too much is frozen"
        )
    done.tensors, done.bytes = parts.sync.send(1)
    report.after = [
        compare(parts.engine, parts.learner, g.prompt, new, scored=[c.token_ids for c in g.completions])
        for g, new in zip(groups, sample(), strict=True)
    ]
    late = [m for p in report.after for m in past_limit(p, limit)]
    if late and not report.failures:
        report.failures.append("the two sides agreed before the weight update: it did not reach the engine")
    report.failures += late
    parts.engine.close()


def _for_updates(config: GRPOConfig) -> GRPOConfig:
    """The config with a schedule and a loss under which every step updates; what is loaded stays the same."""
    optim = {"lr_scheduler_type": "constant", "warmup_steps": 0, "updates_per_step": 1}
    fields = {f"optim.{name}": value for name, value in optim.items()}
    return config.with_values({**fields, "algorithm": {"beta": config.algorithm.beta}})


def _group(slot: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
    """Made-up advantages: +1 and -1 in turn over the distinct completions, so that copies do not cancel."""
    distinct = list(dict.fromkeys(c.token_ids for c in completions))
    advantages = tuple(1.0 if distinct.index(c.token_ids) % 2 == 0 else -1.0 for c in completions)
    return Group(slot, prompt, completions, advantages, advantages)


def _update(parts: Parts, groups: Sequence[Group], rate: float, limit: float) -> ForcedUpdate:
    """Step the learner until its log-probs of the groups' completions have clearly moved."""

    def score() -> list[list[float]]:
        learner = parts.learner
        return [x for g in groups for x in learner.score(g.prompt, [c.token_ids for c in g.completions])]

    done, before, optimizer = ForcedUpdate(), score(), parts.learner.optimizer
    rate = max(rate, FIRST_RATE)
    while not done.logp_moved >= CLEARLY * limit and (rate <= LAST_RATE or done.learner_steps == 0):
        optimizer.config = optimizer.config.with_values({"learning_rate": rate})
        parts.learner.update(groups)
        done.learner_steps, done.learning_rate = done.learner_steps + 1, rate
        done.logp_moved = gap_of(before, score()).mean
        rate *= FACTOR
    return done


# the report for people -------------------------------------------------------------------------


def show(report: DoctorReport, console: Console | None = None) -> None:
    """Print `report`; each failure stands at the end, in red."""
    console = console or Console(highlight=False)
    lines = [
        f"engine {report.engine}, model {report.model} ({report.dtype} on {report.device}), limit "
        f"{report.limit:g} nats per token",
        f"prompt ids equal: {'yes' if report.ids_equal else 'not shown'}",
    ]
    if report.before:
        lines += [
            "gaps of log-probs per token (mean / max) of given completions, and of the samples themselves:"
        ]
    for before, after in zip_longest(report.before, report.after):
        gaps = f"{_gaps(before)}; after the update {_gaps(after) if after else '-'}"
        counts = f"{before.prompt_tokens} tokens, {before.images} image(s), {before.distinct} of {before.completions}"
        lines += [f"  {before.uid}: {counts} completions distinct; {gaps}"]
    if (done := report.update) is not None:
        lines += [
            f"weight update: {done.learner_steps} learner step(s) up to learning rate {done.learning_rate:.3g} moved "
            f"log-probs by {done.logp_moved:.3g} per token; sent {done.tensors} tensors, {in_gb(done.bytes)}"
        ]
    for line in lines:
        print_line(line, console)
    for failure in report.failures:
        print_line(failure, console, style="red")
    print_line("ok" if report.ok else f"{len(report.failures)} problem(s)", console)


def _gaps(parity: PromptParity) -> str:
    return ", ".join(f"{gap.mean:.0e} / {gap.max:.0e}" for gap in (parity.score, parity.sampled))
