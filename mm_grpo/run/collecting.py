"""The rollout of a step: prompts, completions, rewards and advantages, over all processes.

Each process makes the prompts of its own slots and samples their completions. The first one scores and logs
those of all, so rewards, advantages and guards see the step as one process would; each process gets back
the groups of its slots.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): groups whose rewards are all equal teach
nothing. They are replaced, whole, by groups of other rows, attempt after attempt up to `rollout.max_attempts`.
A replacement keeps its slot and takes the seeds of its attempt; its row comes from an order of its own, so
the rows of later steps do not shift. Departures from DAPO: the bound is on attempts, and a slot that is
still without spread after the last one keeps the group it has, which adds no gradient and counts in
denominators. Metrics of rewards and completions describe the first attempt alone, which is how the policy
does on the data; what was learned from is a selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mm_grpo.algorithm.kl import completion_kl
from mm_grpo.health.action import act
from mm_grpo.health.duplicate_completions import duplicate_completions
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.prompting import StepPrompts
from mm_grpo.run.judging import (
    Answered,
    Scored,
    answers,
    by_group,
    collected,
    has_spread,
    judge,
    score,
)
from mm_grpo.run.parity import require_answers
from mm_grpo.run.step_metrics import step_metrics
from mm_grpo.run.timing import timed
from mm_grpo.types import Group

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.data.order import PromptOrder
    from mm_grpo.learner.distributed import Ranks
    from mm_grpo.rewards.scoring import Scorer
    from mm_grpo.rollout.prompting import Prompter
    from mm_grpo.rollout.seeds import SeedPlan
    from mm_grpo.run.folder import RunFolder
    from mm_grpo.run.setup import Sides


@dataclass(frozen=True)
class Collected:
    """A step's groups of this process's slots; counts of the whole step; metrics, on the first process alone."""

    groups: list[Group]
    tokens: int
    dropped: int
    metrics: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class Collector:
    """Makes the groups of one step after the other. Every process calls `step`."""

    def __init__(
        self,
        config: GRPOConfig,
        dataset: Dataset,
        order: PromptOrder,
        seeds: SeedPlan,
        sides: Sides,
        scorer: Scorer,
        ranks: Ranks,
    ) -> None:
        self.config, self.dataset, self.order, self.seeds = config, dataset, order, seeds
        self.prompter: Prompter = sides.prompter
        self.engine, self.learner, self.sync = sides.engine, sides.learner, sides.sync
        self.scorer, self.ranks = scorer, ranks
        self.sampling = Sampling(config.rollout.max_completion_length, config.rollout.temperature)

    def step(self, step: int, folder: RunFolder) -> Collected:
        """The groups of `step` (from 1) under the present weights. Raises what data, rewards and guards raise."""
        times: dict[str, float] = {}
        asked = self._prompts(step, times)
        counts = self.ranks.sum({"prompts": len(asked.prompts), "dropped": asked.dropped}, "prompts")
        self.prompter.require_some(step, int(counts["prompts"]), int(counts["dropped"]))
        own = {a.slot: a for a in self._answer(step, 0, asked, times)}
        scored, metrics = self._score(step, list(own.values()), times)
        kept, attempt = {s.answered.slot: s for s in scored}, 0
        metrics |= self._first_look(scored)
        flat = self._without_spread(kept)
        while flat and attempt + 1 < self.config.rollout.max_attempts:
            attempt += 1
            again = self._answer(step, attempt, self._replacements(step, attempt, flat, own, times), times)
            own |= {a.slot: a for a in again}
            more, _ = self._score(step, again, times)
            kept |= {s.answered.slot: s for s in more}
            scored += more
            flat = self._without_spread(kept)
        given = self._judge(step, scored, kept, folder, times)
        if self.ranks.first and self.config.rollout.dynamic_sampling:
            metrics |= {
                "dynamic_sampling/attempts": attempt + 1,
                "dynamic_sampling/replaced": sum(s.answered.attempt > 0 for s in kept.values()),
                "dynamic_sampling/without_spread": len(flat),
            }
        shared = self.ranks.share(given, "rewards")
        groups = [
            Group(slot, a.prompt, a.completions, *shared[slot], a.attempt) for slot, a in sorted(own.items())
        ]
        return Collected(groups, _tokens(scored), int(counts["dropped"]), metrics, times)

    # each process, for its own slots ---------------------------------------------------------

    def _prompts(self, step: int, times: dict[str, float]) -> StepPrompts:
        with timed(times, "time/data"), self.ranks.together("prompts"):
            return self.prompter.step(self.dataset, self.order, step, self.ranks.rank, self.ranks.world)

    def _replacements(
        self,
        step: int,
        attempt: int,
        flat: Sequence[int],
        own: Mapping[int, Answered],
        times: dict[str, float],
    ) -> StepPrompts:
        """Prompts of other rows for this process's share of the slots without spread."""
        places = {
            slot: self.order.spare(step, attempt, slot, self.config.rollout.max_attempts) for slot in flat
        }
        mine = {slot: row for slot, row in places.items() if slot in own}
        with timed(times, "time/data"), self.ranks.together("prompts"):
            return self.prompter.prompts(self.dataset, mine)

    def _answer(self, step: int, attempt: int, asked: StepPrompts, times: dict[str, float]) -> list[Answered]:
        """Completions of the prompts, each from its own seed."""
        with timed(times, "time/rollout"), self.ranks.together("rollout"):
            seeds = [self.seeds.group(step, slot, attempt) for slot in asked.slots]
            requests = requests_for(asked.prompts, seeds, self.sampling)
            completions = self.engine.generate(requests) if requests else []
            require_answers(requests, completions, self.sync.version)
        answered = answers(asked.slots, asked.prompts, completions, attempt)
        if not self.config.algorithm.kl_in_reward:
            return answered
        with timed(times, "time/reference"), self.ranks.together("reference"):
            return self._with_kl(answered)

    def _with_kl(self, answered: Sequence[Answered]) -> list[Answered]:
        """The KL of each completion from the reference, by the log-probs under which it was sampled."""
        estimator = self.config.algorithm.kl_estimator
        references = self.learner.reference_logprobs([(a.prompt, a.completions) for a in answered])
        return [
            replace(
                a,
                kl=tuple(
                    completion_kl(c.logprobs, ref, estimator)
                    for c, ref in zip(a.completions, found, strict=True)
                ),
            )
            for a, found in zip(answered, references, strict=True)
        ]

    # the first process, for all --------------------------------------------------------------

    def _score(
        self, step: int, answered: Sequence[Answered], times: dict[str, float]
    ) -> tuple[list[Scored], dict[str, float]]:
        """Score what all processes answered, in the order of slots; nothing on the others."""
        whole = collected(answered, self.ranks, "completions")
        with self.ranks.together("rewards"):
            if whole is None:
                return [], {}
            with timed(times, "time/rewards"):
                scores = score(self.scorer, whole, step)
        return by_group(whole, scores), scores.metrics

    def _first_look(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Statistics of the first attempt."""
        if not scored:
            return {}
        metrics = step_metrics([s.group(()) for s in scored])
        kl = [value for s in scored for value in s.answered.kl]
        if kl:
            metrics["kl"] = sum(kl) / max(_completion_tokens(scored), 1)
        return metrics

    def _judge(
        self,
        step: int,
        scored: Sequence[Scored],
        kept: Mapping[int, Scored],
        folder: RunFolder,
        times: dict[str, float],
    ) -> dict[int, tuple[Any, Any]]:
        """Rewards and advantages of the kept groups by slot; every group that was sampled goes to the log."""
        given: dict[int, tuple[Any, Any]] = {}
        with self.ranks.together("advantages"):
            if self.ranks.first:
                final = sorted(kept.values(), key=lambda s: s.answered.slot)
                values = judge(final, self.scorer.specs, self.config.algorithm)
                given = {s.answered.slot: (s.rewards, v) for s, v in zip(final, values, strict=True)}
                self._log(step, scored, given, kept, folder, times)  # the evidence, before a guard may stop
                groups = [s.group(()) for s in scored]
                act("duplicate_completions", duplicate_completions(groups), self.config.run.guards)
        return given

    def _without_spread(self, kept: Mapping[int, Scored]) -> list[int]:
        """The slots whose group is to be replaced, told to every process; none without dynamic sampling."""
        if not self.config.rollout.dynamic_sampling:
            return []
        specs, algorithm = self.scorer.specs, self.config.algorithm
        flat = [slot for slot, scored in kept.items() if not has_spread(scored, specs, algorithm)]
        return self.ranks.share(flat, "spread")

    def _log(
        self,
        step: int,
        scored: Sequence[Scored],
        given: Mapping[int, tuple[Any, Any]],
        kept: Mapping[int, Scored],
        folder: RunFolder,
        times: dict[str, float],
    ) -> None:
        every = self.config.run.log_rollouts_every
        if not (step % every == 0 or step in (1, self.seeds.max_steps)):
            return
        with timed(times, "time/log"):
            whole = sorted(scored, key=lambda s: (s.answered.slot, s.answered.attempt))
            zeros = (0.0,) * self.config.rollout.num_generations
            groups = [
                s.group(given[s.answered.slot][1] if kept[s.answered.slot] is s else zeros) for s in whole
            ]
            parts = {n: [v for s in whole for v in s.parts[n]] for n in whole[0].parts}
            # a column that only some calls logged is None elsewhere
            names = list(dict.fromkeys(n for s in whole for n in s.extra))
            extra = {n: [v for s in whole for v in s.extra.get(n, [None] * len(s.rewards))] for n in names}
            folder.write_rollouts(step, groups, parts, extra)


def _tokens(scored: Sequence[Scored]) -> int:
    """Tokens of prompts and completions, a prompt counted for each of its completions, as TRL counts."""
    prompts = sum(len(s.answered.prompt.token_ids) * len(s.answered.completions) for s in scored)
    return prompts + _completion_tokens(scored)


def _completion_tokens(scored: Sequence[Scored]) -> int:
    return sum(len(c.token_ids) for s in scored for c in s.answered.completions)
