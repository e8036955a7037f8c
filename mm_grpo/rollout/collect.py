"""The groups of one step, over all processes: prompts, completions, rewards, advantages.

Each process makes the prompts of its own slots and samples their completions. The first process scores the groups of
all, so rewards, advantages and guards see the step as one process would. Each process then gets the rewards and
advantages of its slots. `collect_step` (pipeline.py) calls the four stages in order.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): a group whose rewards are all equal has zero
standard deviation and no gradient. Such groups are replaced, whole, by groups of other rows, attempt after attempt up
to `rollout.max_attempts`. A replacement keeps its slot and takes the seeds of its attempt. Departures from DAPO: the
bound is on attempts, and a slot that still has zero standard deviation after the last one keeps its group, which adds
no gradient and counts in denominators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mm_grpo.data.images import PICTURES
from mm_grpo.rollout.engine import Sampling
from mm_grpo.rollout.group_metrics import completion_tokens, group_metrics, task_metrics
from mm_grpo.rollout.prompts import StepPrompts
from mm_grpo.rollout.scored_groups import advantage_fields, has_zero_std, with_kl
from mm_grpo.rollout.success import Success
from mm_grpo.timing import timed
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.order import PromptOrder
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.streaming_rewards import StreamedCalls
    from mm_grpo.rollout.runner import RolloutRunner
    from mm_grpo.rollout.seeds import SeedPlan

Place = tuple[int, int, int]
"""Step, slot and attempt."""
ReferenceLogprobs = Callable[[Sequence[tuple[Prompt, Sequence[Completion]]]], list[list[list[float]]]]
"""Log-probs [T] under the reference policy of each prompt's completions, as sampled."""


@dataclass
class Rollout:
    """The groups of one step while they are made."""

    step: int
    local_groups: dict[int, Group] = field(default_factory=dict)
    """This process's groups by slot, each of the slot's last attempt."""
    sampled: list[Group] = field(default_factory=list)
    """On the first process: groups of all processes and attempts, in the order of attempts and slots."""
    attempts: int = 0
    """Attempts that are finished."""
    dropped: int = 0
    images: int = 0
    """Images of the step's prompts, over all processes."""
    decoded: Counter[str] = field(default_factory=Counter)
    """How many "images", and "frames" of videos, were decoded for them."""
    zero_std_slots: list[int] = field(default_factory=list)
    """Slots of the last attempt whose group is to be replaced; [] without dynamic sampling."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Complete on the first process only."""
    times: dict[str, float] = field(default_factory=dict)
    """This process's seconds, by phase."""
    streamed_calls: StreamedCalls | None = None
    """Reward calls that began while other completions of the last attempt were sampled."""

    @property
    def groups(self) -> list[Group]:
        """Return this process's groups in the order of their slots."""
        return [group for _, group in sorted(self.local_groups.items())]

    @property
    def final_groups(self) -> dict[int, Group]:
        """Return on the first process the group of each slot's last attempt, in the order of slots."""
        last = {group.slot: group for group in self.sampled}
        return {slot: last[slot] for slot in sorted(last)}

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions, a prompt counted for each of its completions, as TRL counts."""
        prompts = sum(len(g.prompt.token_ids) * len(g.completions) for g in self.sampled)
        return prompts + completion_tokens(self.sampled)


class Collector:
    """Makes the groups of one step after the other. Every process calls each stage.

    `version` maps a step to the number of the weights that it is sampled under. `reference_logprobs` is called only
    with `algorithm.kl_in_reward`.
    """

    def __init__(
        self,
        config: GRPOConfig,
        dataset: Rows,
        order: PromptOrder,
        seeds: SeedPlan,
        runner: RolloutRunner,
        version: Callable[[int], int],
        reference_logprobs: ReferenceLogprobs,
    ) -> None:
        self.config, self.dataset, self.order, self.seeds = config, dataset, order, seeds
        self.runner, self.ranks, self.specs = runner, runner.ranks, runner.scorer.specs
        self.max_steps = seeds.max_steps
        self.version, self.reference_logprobs = version, reference_logprobs
        self.success = Success.of(config, self.specs)
        self.changed_rows: Collection[int] = ()
        """Rows that are not what they were when steps ahead of a checkpoint were sampled."""
        self.sampling = Sampling(config.rollout.max_completion_length, config.rollout.temperature)

    def prompts(self, rollout: Rollout) -> StepPrompts:
        """Make this process's prompts of the step's next attempt: for all its slots, or again for zero-std slots."""
        step, attempt, builder = rollout.step, rollout.attempts, self.runner.prompt_builder
        with timed(rollout.times, "time/data"), self.ranks.fail_together("prompts"):
            if attempt == 0:
                rows, next_rows = self.local_rows(step), list(self.local_rows(step + 1).values())
            else:
                slots = [slot for slot in rollout.zero_std_slots if slot in rollout.local_groups]
                rows, next_rows = {slot: self._row(step, slot, attempt) for slot in slots}, []
            prompts = builder.prompts(self.dataset, rows, next_rows)
        # slots of one row share a prompt object, whose images are decoded once
        distinct = {id(prompt): prompt for prompt in prompts.prompts}.values()
        counts = {
            "prompts": len(prompts.prompts),
            "dropped": prompts.dropped,
            "images": sum(len(prompt.sample.images) for prompt in distinct),
            **{f"{noun} decoded": prompts.decoded[noun] for noun in PICTURES},
        }
        totals = self.ranks.sum(counts, "prompts")
        rollout.dropped += int(totals["dropped"])
        rollout.images += int(totals["images"])
        rollout.decoded += Counter({noun: int(totals[f"{noun} decoded"]) for noun in PICTURES})
        if attempt == 0 and self.ranks.first:
            builder.warn_if_none(step, int(totals["prompts"]), rollout.dropped)
        return prompts

    def prompts_at(self, places: Sequence[Place]) -> dict[Place, Prompt]:
        """Make the prompts of places again, except of rows that changed since or are dropped now."""
        places = [place for place in places if self._row(*place) not in self.changed_rows]
        rows = {number: self._row(*place) for number, place in enumerate(places)}
        prompts = self.runner.prompt_builder.prompts(self.dataset, rows)
        return {places[number]: prompt for number, prompt in zip(prompts.slots, prompts.prompts, strict=True)}

    def observe(self, rollout: Rollout, ranks: Ranks) -> None:
        """Show each sampled row's share of successes to an order that uses it. Collective over `ranks`."""
        # `ranks` are the main thread's; with steps ahead `self.ranks` belongs to the job thread
        if self.order.uses_shares:
            rows = (
                (self._row(rollout.step, g.slot, g.attempt), self.success.share(g)) for g in rollout.sampled
            )
            shares = [(row, share) for row, share in rows if share is not None]
            self.order.observe(rollout.step, ranks.broadcast(shares, "success shares"))

    def _row(self, step: int, slot: int, attempt: int) -> int:
        # replacements come from an order of spare rows, so the rows of later steps do not shift
        if attempt:
            return self.order.spare(step, attempt, slot, self.config.rollout.max_attempts)
        return self.order.rows(step)[slot]

    def local_rows(self, step: int) -> dict[int, int]:
        """Return the row of each of this process's slots at the first attempt; {} after the last step."""
        rows = self.order.rows(step) if step <= self.max_steps else []
        return dict(self.ranks.shard(list(enumerate(rows))))

    def completions(self, rollout: Rollout, prompts: StepPrompts) -> list[Group]:
        """Sample G completions of each prompt, each from its own seed.

        Raises GuardStop when the engine used another seed or weight version than it was asked for.
        """
        step, attempt = rollout.step, rollout.attempts
        seeds = [self.seeds.group(step, slot, attempt) for slot in prompts.slots]
        with timed(rollout.times, "time/rollout"):
            groups, rollout.streamed_calls = self.runner.sample(
                prompts, seeds, self.sampling, step, "rollout", attempt=attempt, version=self.version(step)
            )
        if self.config.algorithm.kl_in_reward:
            with timed(rollout.times, "time/reference"), self.ranks.fail_together("reference"):
                references = self.reference_logprobs([(group.prompt, group.completions) for group in groups])
                groups = with_kl(groups, references, self.config.algorithm.kl_estimator)
        rollout.local_groups |= {group.slot: group for group in groups}
        return groups

    def rewards(self, rollout: Rollout, groups: Sequence[Group]) -> None:
        """Score the groups of all processes on the first one, and close the attempt: set `zero_std_slots`."""
        gathered = self.runner.gather(groups, "completions")
        with self.ranks.fail_together("rewards"):
            if gathered is not None:
                with timed(rollout.times, "time/rewards"):
                    scored, metrics = self.runner.score(gathered, rollout.step, rollout.streamed_calls)
                rollout.sampled += scored
                # later attempts are a selection; the first shows how the policy does on the data
                if rollout.attempts == 0 and scored:
                    by_task = task_metrics(scored) if self.dataset.by_task else {}
                    rollout.metrics |= metrics | group_metrics(scored) | by_task
        rollout.attempts += 1
        rollout.zero_std_slots = []
        if self.config.rollout.max_attempts > 1:
            slots = [slot for slot, group in rollout.final_groups.items() if self._has_zero_std(group)]
            rollout.zero_std_slots = self.ranks.broadcast(slots, "zero-std slots")

    def advantages(self, rollout: Rollout) -> Rollout:
        """Give this process's groups their rewards and advantages, and on the first process `sampled` too. Collective.

        A group that was replaced gets advantages of 0.
        """
        by_slot: dict[int, dict[str, Any]] = {}
        with self.ranks.fail_together("advantages"):
            if self.ranks.first:
                final = rollout.final_groups
                advantages = advantage_fields([*final.values()], self.specs, self.config.algorithm)
                by_slot = {
                    slot: {"rewards": group.rewards, "turn_rewards": group.turn_rewards, **fields}
                    for (slot, group), fields in zip(final.items(), advantages, strict=True)
                }
                learned = {slot: replace(group, **by_slot[slot]) for slot, group in final.items()}
                rollout.metrics |= self._advantage_metrics(rollout, [*learned.values()])
                zeros = (0.0,) * self.seeds.generations
                # by identity: the groups of a slot's attempts have the same slot
                rollout.sampled = [
                    learned[group.slot] if group is final[group.slot] else replace(group, advantages=zeros)
                    for group in rollout.sampled
                ]
        by_slot = self.ranks.broadcast(by_slot, "rewards")
        rollout.local_groups = {
            slot: replace(group, **by_slot[slot]) for slot, group in rollout.local_groups.items()
        }
        return rollout

    def _advantage_metrics(self, rollout: Rollout, groups: Sequence[Group]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if groups:
            metrics["advantages/frac_zero"] = fmean(map(self._has_zero_std, groups))
        if (share := self.success.phantom_share(groups)) is not None:
            metrics["advantages/phantom_share"] = share
        if self.config.rollout.max_attempts > 1:
            metrics["dynamic_sampling/attempts"] = rollout.attempts
            metrics["dynamic_sampling/replaced"] = sum(group.attempt > 0 for group in groups)
            metrics["dynamic_sampling/without_spread"] = len(rollout.zero_std_slots)
        return metrics

    def _has_zero_std(self, group: Group) -> bool:
        return has_zero_std(group, self.specs, self.config.algorithm)
