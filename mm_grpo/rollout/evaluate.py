"""Evaluation: how well the model answers a set of rows.

The headline is what `run.headline` names: the share of completions whose reward is at least a mark (accuracy),
among those that it applies to, or the mean total reward. Rows are answered with the sampling of `rollout.eval`,
greedy by default, and with seeds that training never draws, the same at every evaluation, so that before and
after are compared on equal terms. Rows that are too long stop the run or are left out, as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mm_grpo.errors import ConfigError, did_you_mean
from mm_grpo.rollout.collect import gather_groups, groups_of, score_groups, with_scores
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.rollout.tasks import by_task

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rollout.prompts import PromptBuilder
    from mm_grpo.rollout.turns import Sampler

CHUNK = 64
"""Prompts held in memory at once."""


@dataclass(frozen=True)
class Headline:
    """What evaluations are judged by: the share of completions whose reward `name` is >= `mark`, or the mean total."""

    name: str | None = None
    mark: float = 0.0

    @classmethod
    def of(cls, config: GRPOConfig, rewards: Sequence[str]) -> Headline:
        """That of `run.headline`. ConfigError when it names none of the run's `rewards`."""
        if config.run.headline is None:
            return cls()
        name, _, mark = (part.strip() for part in config.run.headline.rpartition(">="))
        if name not in rewards:
            raise ConfigError(
                f"run.headline = '{config.run.headline}': no reward of the run is named '{name}'; they are named "
                f"{', '.join(rewards)}. {did_you_mean(name, rewards)}".rstrip()
            )
        return cls(name, float(mark))

    def __str__(self) -> str:
        return "mean reward" if self.name is None else f"accuracy ({self.name} >= {self.mark:g})"


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation of one set found over `rows` rows: the headline's score and the mean total reward.

    `accuracy` in [0, 1] is the headline's share, None where the headline is the mean reward. All are None where there
    was nothing to take a mean of: the reward applied to no row. `tasks` has accuracy and reward of the rows of each
    task, where they are known.
    """

    accuracy: float | None
    reward: float | None
    rows: int
    score: float | None
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def sampling_of(config: GRPOConfig) -> Sampling:
    """The sampling of `rollout.eval`."""
    chosen = config.rollout.eval
    return Sampling(
        max_tokens=chosen.max_completion_length or config.rollout.max_completion_length,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        repetition_penalty=chosen.repetition_penalty,
    )


def evaluate(
    dataset: Dataset,
    prompt_builder: PromptBuilder,
    engine: Sampler,
    scorer: Scorer,
    config: GRPOConfig,
    step: int,
    ranks: Ranks,
    part: tuple[int, int] = (0, 1),
) -> Evaluation:
    """Answer and score every row of `dataset`, which is number `part[0]` of `part[1]` sets.

    Every process answers its share of the rows; the first one scores them all, and each gets the result. Raises what
    data and rewards raise.
    """
    sampling, repeats = sampling_of(config), config.rollout.eval.num_generations
    headline = Headline.of(config, [spec.name for spec in scorer.specs])
    answered: dict[str | None, tuple[list[float], list[float]]] = {None: ([], [])}  # of all rows, and by task
    rows = 0
    size = CHUNK * ranks.world
    for start in range(0, len(dataset), size):
        indices, following = (
            ranks.shard(range(first, min(first + size, len(dataset)))) for first in (start, start + size)
        )
        with ranks.fail_together("evaluation"):
            asked = prompt_builder.evaluation.prompts(dataset, {i: i for i in indices}, following)
            seeds = [eval_seeds(config.run.seed, i, repeats, *part) for i in asked.slots]
            requests = requests_for(asked.prompts, seeds, sampling)
            completions = engine.generate(requests) if requests else []
        groups = gather_groups(groups_of(asked.slots, asked.prompts, completions), ranks, "evaluation")
        with ranks.fail_together("evaluation"):
            if groups:
                rows += len(groups)
                scored = with_scores(groups, score_groups(scorer, groups, step))
                tasks = by_task(scored) if dataset.by_task else {}
                for task, own in [(None, scored), *tasks.items()]:
                    marks, totals = answered.setdefault(task, ([], []))
                    marks += [m for g in own for m in _known(g.parts[headline.name])] if headline.name else []
                    totals += [r for g in own for r in _known(g.rewards)]
    found = {
        task: (
            sum(m >= headline.mark for m in marks) / len(marks) if marks else None,
            sum(totals) / len(totals) if totals else None,
        )
        for task, (marks, totals) in answered.items()
    }
    accuracy, reward = found.pop(None)
    of_tasks = {
        task: {name: v for name, v in zip(("accuracy", "reward"), values, strict=True) if v is not None}
        for task, values in sorted((task, values) for task, values in found.items() if task is not None)
    }
    result = Evaluation(accuracy, reward, rows, accuracy if headline.name else reward, of_tasks)
    return ranks.broadcast(result, "evaluation")


@dataclass(frozen=True)
class Best:
    """The highest score of the first set, and the step after which it was found; 0 is before the first."""

    score: float
    step: int


def better(best: Best | None, found: Mapping[str, Evaluation], step: int) -> Best | None:
    """`best`, or the first of what was `found` after `step` if its score is higher. None without evaluations."""
    first = next(iter(found.values()), None)
    score = None if first is None else first.score
    if score is None or (best is not None and score <= best.score):
        return best
    return Best(score, step)


def as_metrics(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Metrics of named sets: `eval/{set}/accuracy` and `eval/{set}/reward`, absent where not measured.

    Those of a task are `eval/{set}/task/{task}/accuracy` and `/reward`.
    """
    found: dict[str, float | None] = {}
    for name, result in results.items():
        found[f"eval/{name}/accuracy"] = result.accuracy
        found[f"eval/{name}/reward"] = result.reward
        for task, values in result.tasks.items():
            found |= {f"eval/{name}/task/{task}/{what}": value for what, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]
