"""The groups of one step, over all processes: prompts, completions, rewards, advantages.

Each process makes the prompts of its own slots and samples their completions. The first process scores those
of all, so rewards, advantages and guards see the step as one process would; each process gets back the
rewards and advantages of its slots. `GRPOTrainer` calls the four stages in order, and evaluation shares the
functions at the end.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): a group whose rewards are all equal
has zero standard deviation and no gradient. Such groups are replaced, whole, by groups of other rows, attempt
after attempt up to `rollout.max_attempts`. A replacement keeps its slot and takes the seeds of its attempt; its
row comes from an order of its own, so the rows of later steps do not shift. Departures from DAPO: the bound is
on attempts, and a slot that still has zero standard deviation after the last one keeps the group it has, which
adds no gradient and counts in denominators. Metrics of rewards and completions describe the first attempt
alone, which is how the policy does on the data; what is learned from is a selection.

The engine hands each completion back when it is done (`RequestStream`), and those rewards that can begin with it do
(rewards/streaming_rewards.py). Where none can, and of several processes, the engine is asked for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.algorithm.kl import completion_kl, penalised
from mm_grpo.algorithm.turn_advantages import turn_advantages
from mm_grpo.rewards.outcome import gated
from mm_grpo.rollout.engine import Sampling, answer_all, requests_for, require_answers
from mm_grpo.rollout.group_metrics import completion_tokens, group_metrics, task_metrics
from mm_grpo.rollout.prompts import StepPrompts
from mm_grpo.rollout.success import Success
from mm_grpo.timing import timed
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from mm_grpo.config import AlgorithmConfig, GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.order import PromptOrder
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer, Scores
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.rewards.streaming_rewards import StreamedCalls
    from mm_grpo.rollout.engine import Request, RolloutEngine
    from mm_grpo.rollout.prompts import PromptBuilder
    from mm_grpo.rollout.seeds import SeedPlan
    from mm_grpo.rollout.turns import Sampler

ReferenceLogprobs = Callable[[Sequence[tuple[Prompt, Sequence[Completion]]]], list[list[list[float]]]]
"""Log-probs [T] under the reference policy of each prompt's completions, as sampled."""


@dataclass
class Rollout:
    """One step's groups while they are made. `own` are this process's, by slot; the last attempt's of each slot.

    `images` are those of the step's prompts, over all processes, and `decoded` how many were decoded for them.
    On the first process `sampled` are those of all processes and attempts, in the order of attempts and slots.
    `metrics` and `tokens` are complete on the first process alone; `times` are this process's seconds by phase.
    `scoring` has the calls of rewards that began while others of the last attempt's completions were sampled.
    """

    step: int
    own: dict[int, Group] = field(default_factory=dict)
    sampled: list[Group] = field(default_factory=list)
    attempts: int = 0
    dropped: int = 0
    images: int = 0
    decoded: int = 0
    zero_std_slots: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    scoring: StreamedCalls | None = None

    @property
    def groups(self) -> list[Group]:
        """This process's groups in the order of their slots."""
        return [group for _, group in sorted(self.own.items())]

    @property
    def kept(self) -> dict[int, Group]:
        """On the first process: of each slot the group of its last attempt."""
        return {group.slot: group for group in self.sampled}

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions, a prompt counted for each of its completions, as TRL counts."""
        prompts = sum(len(g.prompt.token_ids) * len(g.completions) for g in self.sampled)
        return prompts + completion_tokens(self.sampled)


class Collector:
    """Makes the groups of one step after the other. Every process calls each stage.

    `version` gives the number of the weights that a step is sampled under; `reference_logprobs` is needed with
    `algorithm.kl_in_reward` alone.
    """

    def __init__(
        self,
        config: GRPOConfig,
        dataset: Rows,
        order: PromptOrder,
        seeds: SeedPlan,
        prompt_builder: PromptBuilder,
        engine: Sampler,
        scorer: Scorer,
        ranks: Ranks,
        version: Callable[[int], int],
        reference_logprobs: ReferenceLogprobs,
    ) -> None:
        self.config, self.dataset, self.order, self.seeds = config, dataset, order, seeds
        self.max_steps = seeds.max_steps
        self.prompt_builder, self.engine, self.scorer, self.ranks = prompt_builder, engine, scorer, ranks
        self.version, self.reference_logprobs = version, reference_logprobs
        self.success = Success.of(config, scorer.specs)
        self.sampling = Sampling(config.rollout.max_completion_length, config.rollout.temperature)

    def prompts(self, rollout: Rollout) -> StepPrompts:
        """This process's prompts of the step's next attempt: of all its slots, or of other rows for zero-std slots."""
        step, attempt = rollout.step, rollout.attempts
        with timed(rollout.times, "time/data"), self.ranks.fail_together("prompts"):
            following: list[int] = []
            if attempt == 0:
                rows = self.own_rows(step)
                following = list(self.own_rows(step + 1).values())
            else:
                slots = [slot for slot in rollout.zero_std_slots if slot in rollout.own]
                rows = {slot: self._row(step, slot, attempt) for slot in slots}
            made = self.prompt_builder.prompts(self.dataset, rows, following)
        images = sum(len(prompt.sample.images) for prompt in {id(p): p for p in made.prompts}.values())
        own = {
            "prompts": len(made.prompts),
            "dropped": made.dropped,
            "images": images,
            "decoded": made.decoded,
        }
        counts = self.ranks.sum(own, "prompts")
        rollout.dropped += int(counts["dropped"])
        rollout.images += int(counts["images"])
        rollout.decoded += int(counts["decoded"])
        if attempt == 0 and self.ranks.first:
            self.prompt_builder.warn_if_none(step, int(counts["prompts"]), rollout.dropped)
        return made

    def prompts_at(self, places: Sequence[tuple[int, int, int]]) -> list[Prompt]:
        """The prompts of (step, slot, attempt), which were made before and are not too long."""
        rows = [self._row(*place) for place in places]
        return self.prompt_builder.prompts(self.dataset, dict(enumerate(rows))).prompts

    def pass_rates(self, rollout: Rollout) -> list[tuple[int, float]]:
        """On the first process: the row of each sampled group, and its share of successes where one is known."""
        shares = [
            (self._row(rollout.step, g.slot, g.attempt), self.success.share(g)) for g in rollout.sampled
        ]
        return [(row, share) for row, share in shares if share is not None]

    def _row(self, step: int, slot: int, attempt: int) -> int:
        if attempt:
            return self.order.spare(step, attempt, slot, self.config.rollout.max_attempts)
        return self.order.rows(step)[slot]

    def own_rows(self, step: int) -> dict[int, int]:
        """The row of each of this process's slots, at the first attempt of a step; none after the last step."""
        rows = self.order.rows(step) if step <= self.max_steps else []
        return dict(self.ranks.shard(list(enumerate(rows))))

    def completions(self, rollout: Rollout, asked: StepPrompts) -> list[Group]:
        """G completions of each prompt, each from its own seed.

        Raises GuardStop when the engine used another seed or weight version than it was asked for.
        """
        generations, step = self.seeds.generations, rollout.step
        scoring = begin_scoring(self.scorer, asked, generations, step, self.ranks)
        with timed(rollout.times, "time/rollout"), self.ranks.fail_together("rollout"):
            seeds = [self.seeds.group(rollout.step, slot, rollout.attempts) for slot in asked.slots]
            requests = requests_for(asked.prompts, seeds, self.sampling)
            completions = sample(self.engine, requests, scoring, self.version(rollout.step))
        rollout.scoring = scoring
        groups = groups_of(asked.slots, asked.prompts, completions, rollout.attempts)
        if self.config.algorithm.kl_in_reward:
            with timed(rollout.times, "time/reference"), self.ranks.fail_together("reference"):
                groups = self._with_kl(groups)
        rollout.own |= {group.slot: group for group in groups}
        return groups

    def rewards(self, rollout: Rollout, groups: Sequence[Group]) -> None:
        """Score the groups of all processes on the first one, and close the attempt.

        `rollout.zero_std_slots` are then the slots whose group is to be replaced; none without dynamic sampling.
        """
        ranks = self.ranks
        gathered = gather_groups(groups, ranks, "completions")
        with ranks.fail_together("rewards"):
            if gathered is not None:
                with timed(rollout.times, "time/rewards"):
                    scored, metrics = score_groups(self.scorer, gathered, rollout.step, rollout.scoring)
                rollout.sampled += scored
                if rollout.attempts == 0 and scored:
                    by_task = task_metrics(scored) if self.dataset.by_task else {}
                    rollout.metrics |= metrics | group_metrics(scored) | by_task
        rollout.attempts += 1
        rollout.zero_std_slots = []
        if self.config.rollout.max_attempts > 1:
            specs, algorithm = self.scorer.specs, self.config.algorithm
            slots = [slot for slot, group in rollout.kept.items() if has_zero_std(group, specs, algorithm)]
            rollout.zero_std_slots = ranks.broadcast(slots, "zero-std slots")

    def advantages(self, rollout: Rollout) -> Rollout:
        """Give this process's groups their rewards and advantages; those of the first process's `sampled` too.

        An attempt that was replaced has advantages of 0.
        """
        given: dict[int, dict[str, Any]] = {}
        with self.ranks.fail_together("advantages"):
            if self.ranks.first:
                last, final = rollout.kept, [group for _, group in sorted(rollout.kept.items())]
                specs, algorithm = self.scorer.specs, self.config.algorithm
                given = {
                    g.slot: {"rewards": g.rewards, "turn_rewards": g.turn_rewards, **found}
                    for g, found in zip(final, advantage_fields(final, specs, algorithm), strict=True)
                }
                flat = [has_zero_std(group, specs, algorithm) for group in final]
                rollout.metrics |= {"advantages/frac_zero": fmean(flat)} if flat else {}
                phantom = self.success.phantom_share(replace(group, **given[group.slot]) for group in final)
                if phantom is not None:
                    rollout.metrics["advantages/phantom_share"] = phantom
                zeros = {"advantages": (0.0,) * self.seeds.generations}
                rollout.sampled = [
                    replace(g, **(given[g.slot] if g is last[g.slot] else zeros)) for g in rollout.sampled
                ]
                if self.config.rollout.max_attempts > 1:
                    rollout.metrics |= {
                        "dynamic_sampling/attempts": rollout.attempts,
                        "dynamic_sampling/replaced": sum(g.attempt > 0 for g in final),
                        "dynamic_sampling/without_spread": len(rollout.zero_std_slots),
                    }
        shared = self.ranks.broadcast(given, "rewards")
        rollout.own = {slot: replace(group, **shared[slot]) for slot, group in rollout.own.items()}
        return rollout

    def _with_kl(self, groups: Sequence[Group]) -> list[Group]:
        """The KL of each completion from the reference, by the log-probs under which it was sampled."""
        estimator = self.config.algorithm.kl_estimator
        references = self.reference_logprobs([(g.prompt, g.completions) for g in groups])
        return [
            replace(
                group,
                kl=tuple(
                    completion_kl(c.logprobs, reference, estimator)
                    for c, reference in zip(group.completions, of_group, strict=True)
                ),
            )
            for group, of_group in zip(groups, references, strict=True)
        ]


# what training and evaluation share ----------------------------------------------------------


def groups_of(
    slots: Sequence[int], prompts: Sequence[Prompt], completions: Sequence[Completion], attempt: int = 0
) -> list[Group]:
    """Prompts with their completions, which are flat, as many for each."""
    size = len(completions) // max(len(prompts), 1)
    cuts = [tuple(completions[i * size : (i + 1) * size]) for i in range(len(prompts))]
    return [Group(s, p, own, attempt=attempt) for s, p, own in zip(slots, prompts, cuts, strict=True)]


def gather_groups(groups: Sequence[Group], ranks: Ranks, what: str) -> list[Group] | None:
    """The groups of all processes, in the order of slots, on the first one; None on the others. Collective.

    Of several processes vision tensors and environments stay where they are: no reward looks at them there.
    """
    if ranks.world > 1:
        groups = [
            replace(
                group,
                prompt=replace(group.prompt, vision={}),
                completions=tuple(replace(c, tail=None, final_state=None) for c in group.completions),
            )
            for group in groups
        ]
    shards = ranks.gather(groups, what)
    return None if shards is None else sorted((g for s in shards for g in s), key=lambda g: g.slot)


def score_groups(
    scorer: Scorer, groups: Sequence[Group], step: int, scoring: StreamedCalls | None = None
) -> tuple[list[Group], dict[str, float]]:
    """The groups with their rewards, of which `scoring` may have begun some, and the rewards' metrics."""
    repeated = [g.prompt for g in groups for _ in g.completions]
    scores = scorer.score(repeated, [c for g in groups for c in g.completions], step, scoring)
    return with_scores(groups, scores), scores.metrics


def with_scores(groups: Sequence[Group], scores: Scores) -> list[Group]:
    """The groups with their rewards, cut from scores that are flat."""
    ends = accumulate((len(group.completions) for group in groups), initial=0)
    cuts = [slice(*bounds) for bounds in pairwise(ends)]
    return [
        replace(
            group,
            rewards=tuple(
                None if done.masked else total
                for done, total in zip(group.completions, scores.totals[cut], strict=True)
            ),
            turn_rewards=tuple(
                tuple(None if done.masked else reward for reward in turns)
                for done, turns in zip(group.completions, scores.turns[cut], strict=True)
            )
            if scores.turns
            else (),
            parts={name: values[cut] for name, values in scores.parts.items()},
            extra={name: values[cut] for name, values in scores.extra.items()},
        )
        for group, cut in zip(groups, cuts, strict=True)
    ]


def advantage_fields(
    groups: Sequence[Group], specs: Sequence[RewardSpec], config: AlgorithmConfig
) -> list[dict[str, Any]]:
    """The advantages of each of P scored groups, as fields of `Group`."""
    if config.turn_gamma is None:
        return [{"advantages": values} for values in compute_advantages(groups, specs, config)]
    by_turn = turn_advantages([group.turn_rewards for group in groups], config)
    return [{"advantages": tuple(turns[0] for turns in found), "turn_advantages": found} for found in by_turn]


def compute_advantages(
    groups: Sequence[Group], specs: Sequence[RewardSpec], config: AlgorithmConfig
) -> list[tuple[float, ...]]:
    """Advantages [P][G] of P scored groups.

    With `kl_in_reward`, beta times a completion's KL comes off its total first. With `normalize_then_sum` each
    reward counts as it would in a total: absent where its gate is shut or
    the completion is masked, not at all with weight 0.
    """
    rewards = [g.rewards for g in groups]
    if config.kl_in_reward:
        rewards = penalised(rewards, [[config.beta * kl for kl in g.kl] for g in groups])
    return advantages(rewards, config, objectives(groups, specs))


def has_zero_std(group: Group, specs: Sequence[RewardSpec], config: AlgorithmConfig) -> bool:
    """True when the rewards of a group do not distinguish its completions, before any KL comes off."""
    if config.turn_gamma is not None:
        return not any(any(turns) for turns in turn_advantages([group.turn_rewards], config)[0])
    return not any(advantages([group.rewards], config, objectives([group], specs))[0])


def objectives(groups: Sequence[Group], specs: Sequence[RewardSpec]) -> list[Objective]:
    """The rewards that totals are made of, each with its weight and its scores [P][G] as they enter a total."""
    parts = [gated(specs, g.parts) for g in groups]
    return [
        Objective(spec.weight, [part[spec.name] for part in parts], spec.name)
        for spec in specs
        if spec.weight != 0
    ]


# completions that are scored while others are sampled ----------------------------------------


def begin_scoring(
    scorer: Scorer, asked: StepPrompts, generations: int, step: int, ranks: Ranks
) -> StreamedCalls | None:
    """Get ready to score `generations` completions of each prompt, which are in the order of slots.

    None where no reward can begin before all completions are there, and of several processes.
    """
    if ranks.world > 1:
        return None
    columns = dict.fromkeys(name for prompt in asked.prompts for name in prompt.sample.columns)
    return scorer.begin(len(asked.prompts) * generations, columns, step)


def sample(
    engine: Sampler, requests: Sequence[Request], scoring: StreamedCalls | None, version: int | None = None
) -> list[Completion]:
    """One completion per request, in order, each handed to `scoring` when it is done.

    Raises GuardStop where one was not sampled with its seed, or not under weights number `version`.
    """
    try:
        if scoring is None:
            completions = engine.generate(requests) if requests else []
        else:
            add = scoring.add
            with cast("RolloutEngine", engine).stream() as stream:
                completions = answer_all(
                    stream, requests, lambda at, done: add(at, requests[at].prompt, done)
                )
        if version is not None:
            require_answers(requests, completions, version)
    except BaseException:
        if scoring is not None:
            scoring.abandon()
        raise
    return completions
