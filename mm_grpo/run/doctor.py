"""`mm-grpo doctor`: loads both sides of a run and compares them, before and after a real weight update.

On the config's own first prompts: does the engine run the learner's tokens, do log-probs agree, has each
generation its own seed, does an update of the learner arrive. The update is a real learner step with
made-up advantages of +1 and -1, repeated at a growing learning rate until it has moved log-probs so far
that an engine which missed it would be past the limit. The model is changed by this and not saved.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.data.order import PromptOrder
from mm_grpo.data.sets import load_train
from mm_grpo.errors import DataError, GuardStop
from mm_grpo.health.duplicate_completions import duplicate_completions
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.parity import PromptParity, compare, gap_of, past_limit, require_answers
from mm_grpo.run.setup import Sides, load_sides
from mm_grpo.types import Completion, Group, Prompt

PROMPTS = 4
CLEARLY = 3.0
"""The update is large enough when it has moved log-probs by this many times the limit."""
FIRST_RATE, LAST_RATE, FACTOR = 1e-6, 1e-2, 3.0


@dataclass
class Update:
    """The weight update of the examination. `logp_moved` is in nats per token."""

    learner_steps: int = 0
    learning_rate: float = 0.0
    logp_moved: float = 0.0
    tensors: int = 0
    bytes: int = 0


@dataclass
class Report:
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
    update: Update | None = None
    memory: dict[str, int | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """For JSON: lengths in tokens, gaps in nats per token, memory and sizes in bytes. NaN becomes None."""
        values: dict[str, Any] = _finite({"ok": self.ok, **asdict(self)})
        return values


def examine(config: GRPOConfig, count: int = PROMPTS) -> Report:
    """Compare the two sides of `config` on its first `count` prompts.

    Raises UserError for what the user can mend; all else that is wrong is in the report's `failures`.
    """
    environment = describe_environment()
    report = Report(config.rollout.engine, config.model.path)
    report.versions = {"mm_grpo": environment["mm_grpo"], **environment["packages"]}
    with _timed(report, "total"):
        try:
            _examine(config, count, report)
        except GuardStop as stop:
            report.failures.append(str(stop))
    report.memory = memory()
    return report


def _examine(config: GRPOConfig, count: int, report: Report) -> None:
    config.check()
    rollout = config.rollout
    rows = load_train(config)
    steps = config.run.max_steps or math.ceil(len(rows) / rollout.prompts_per_step)
    # one epoch fills more than `steps` steps where run.max_steps is small
    plan = SeedPlan(
        run_seed=config.run.seed,
        prompts=rollout.prompts_per_step,
        generations=rollout.num_generations,
        attempts=rollout.max_attempts,
        max_steps=max(steps, math.ceil(len(rows) / rollout.prompts_per_step)),
    )
    order = PromptOrder(len(rows), rollout.prompts_per_step, config.run.seed, shuffle=config.data.shuffle)
    with _timed(report, "load"):
        sides = load_sides(_for_updates(config), updates=100)
    model, limit = sides.model, sides.sync.limit
    report.dtype, report.device = str(model.dtype).removeprefix("torch."), str(model.device)
    report.limit = limit
    places = list(islice(sides.prompter.first(rows, order), count))
    if not places:
        raise DataError(
            f"data.train: all {len(rows)} prompts are longer than {sides.prompter.limit_name} allows and were dropped; "
            "lower data.max_pixels or raise the limit"
        )
    prompts = [prompt for _, _, prompt in places]
    requests = requests_for(
        prompts,
        [plan.group(step, slot) for step, slot, _ in places],
        Sampling(rollout.max_completion_length, rollout.temperature),
    )

    def sample() -> list[tuple[Completion, ...]]:
        completions = sides.engine.generate(requests)
        require_answers(requests, completions, sides.sync.version)
        size = rollout.num_generations
        return [tuple(completions[i : i + size]) for i in range(0, len(completions), size)]

    report.ids_equal = False
    with _timed(report, "generate"):
        answers = sample()
    report.ids_equal = True
    groups = [_group(i, p, a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    with _timed(report, "compare"):
        report.before = [compare(sides.engine, sides.learner, g.prompt, g.completions) for g in groups]
    report.failures += [m for p in report.before for m in past_limit(p, limit)]
    for group in groups:
        message = duplicate_completions([group])
        report.failures += [message] if message else []

    with _timed(report, "update"):
        report.update = _update(sides, groups, config.optim.learning_rate, limit)
    done = report.update
    if not done.logp_moved >= CLEARLY * limit:
        report.failures.append(
            f"{done.learner_steps} updates at learning rates up to {done.learning_rate:.3g} moved the learner's "
            f"log-probs by {done.logp_moved:.3g} per token; to show whether an update arrives it takes "
            f"{CLEARLY * limit:.3g}. Perhaps too much is frozen, or run.max_logp_gap is too high"
        )
    with _timed(report, "sync"):
        done.tensors, done.bytes = sides.sync.send(1)
    with _timed(report, "again"):
        answers = sample()
        report.after = [
            compare(sides.engine, sides.learner, g.prompt, new, scored=[c.token_ids for c in g.completions])
            for g, new in zip(groups, answers, strict=True)
        ]
    late = [m for p in report.after for m in past_limit(p, limit)]
    if late and not report.failures:
        late.insert(
            0,
            "before the weight update the two sides agreed, after it they do not: it did not reach the engine",
        )
    report.failures += late
    sides.engine.close()


def memory() -> dict[str, int | None]:
    """Bytes: resident now and at its peak in this process, and allocated on the GPU at its peak (None without)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident: int | None = pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        resident = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "resident": resident,
        "resident_peak": peak if sys.platform == "darwin" else peak * 1024,
        "gpu_allocated_peak": gpu,
    }


def _for_updates(config: GRPOConfig) -> GRPOConfig:
    """The config with a schedule and a loss under which every step updates; what is loaded stays the same."""
    changed = config.model_copy(deep=True)
    changed.optim.lr_scheduler_type = "constant"
    changed.optim.warmup_steps = 0
    changed.optim.updates_per_step = 1
    changed.algorithm = AlgorithmConfig(beta=config.algorithm.beta)
    return changed


def _group(slot: int, prompt: Prompt, completions: tuple[Completion, ...]) -> Group:
    """Made-up advantages: +1 and -1 in turn over the distinct completions, so that copies do not cancel."""
    distinct = list(dict.fromkeys(c.token_ids for c in completions))
    advantages = tuple(1.0 if distinct.index(c.token_ids) % 2 == 0 else -1.0 for c in completions)
    return Group(slot, prompt, completions, advantages, advantages)


def _update(sides: Sides, groups: Sequence[Group], rate: float, limit: float) -> Update:
    """Step the learner until its log-probs of the groups' completions have clearly moved."""

    def score() -> list[list[float]]:
        learner = sides.learner
        return [x for g in groups for x in learner.score(g.prompt, [c.token_ids for c in g.completions])]

    done, before = Update(), score()
    rate = max(rate, FIRST_RATE)
    while not done.logp_moved >= CLEARLY * limit and (rate <= LAST_RATE or done.learner_steps == 0):
        sides.learner.config.optim.learning_rate = rate
        sides.learner.step(groups)
        done.learner_steps, done.learning_rate = done.learner_steps + 1, rate
        done.logp_moved = gap_of(before, score()).mean
        rate *= FACTOR
    return done


@contextmanager
def _timed(report: Report, name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = round(time.perf_counter() - started, 3)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
