"""Evaluation: how often the model answers a set of rows right.

Accuracy is the share of completions to which the first reward of the list gives its full mark (1 or
more), among those it applies to. Rows are answered with the sampling of `rollout.eval`, greedy by
default, and with seeds that training never draws, the same at every evaluation, so that before and
after are compared on equal terms. Rows that are too long stop the run or are left out, as in training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.run.judging import answers, collected, score

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.dataset import Dataset
    from mm_grpo.learner.distributed import Ranks
    from mm_grpo.rewards.scoring import Scorer
    from mm_grpo.rollout.engine import RolloutEngine
    from mm_grpo.rollout.prompting import Prompter

FULL_MARK = 1.0
CHUNK = 64
"""Prompts held in memory at once."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation of one set found: accuracy in [0, 1] and the mean total reward, over `rows` rows.

    None where there was nothing to take a mean of: the reward applied to no row.
    """

    accuracy: float | None
    reward: float | None
    rows: int


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
    prompter: Prompter,
    engine: RolloutEngine,
    scorer: Scorer,
    config: GRPOConfig,
    step: int,
    ranks: Ranks,
) -> Evaluation:
    """Answer and score every row of `dataset`. Raises what data and rewards raise.

    Every process answers its share of the rows; the first one scores them all, and each gets the result.
    """
    sampling, repeats = sampling_of(config), config.rollout.eval.num_generations
    first = scorer.specs[0].name
    marks: list[float] = []
    totals: list[float] = []
    rows = 0
    for start in range(0, len(dataset), CHUNK * ranks.world):
        indices = ranks.mine(range(start, min(start + CHUNK * ranks.world, len(dataset))))
        with ranks.together("evaluation"):
            asked = prompter.prompts(dataset, {i: i for i in indices})
            seeds = [eval_seeds(config.run.seed, i, repeats) for i in asked.slots]
            requests = requests_for(asked.prompts, seeds, sampling)
            completions = engine.generate(requests) if requests else []
        answered = collected(answers(asked.slots, asked.prompts, completions), ranks, "evaluation")
        with ranks.together("evaluation"):
            if answered:
                rows += len(answered)
                scores = score(scorer, answered, step)
                marks += _known(scores.parts[first])
                totals += _known(scores.totals)
    result = Evaluation(
        accuracy=sum(m >= FULL_MARK for m in marks) / len(marks) if marks else None,
        reward=sum(totals) / len(totals) if totals else None,
        rows=rows,
    )
    return ranks.share(result, "evaluation")


@dataclass(frozen=True)
class Best:
    """The highest accuracy of the headline set, and the step after which it was found; 0 is before the first."""

    accuracy: float
    step: int


def better(best: Best | None, found: Mapping[str, Evaluation], step: int) -> Best | None:
    """`best`, or the headline of what was `found` after `step` if that is higher. None without evaluations."""
    headline = next(iter(found.values()), None)
    accuracy = None if headline is None else headline.accuracy
    if accuracy is None or (best is not None and accuracy <= best.accuracy):
        return best
    return Best(accuracy, step)


def as_metrics(results: Mapping[str, Evaluation]) -> dict[str, float]:
    """Metrics of named sets: `eval/{set}/accuracy` and `eval/{set}/reward`, absent where not measured."""
    found: dict[str, float | None] = {}
    for name, result in results.items():
        found[f"eval/{name}/accuracy"] = result.accuracy
        found[f"eval/{name}/reward"] = result.reward
    return {name: value for name, value in found.items() if value is not None}


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]
