"""What `summary.json` holds: how a run did, before and after, on each evaluation set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_grpo.rollout.evaluate import Best, Evaluation, Headline


def summary_of(
    headline: Headline,
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    best: Best | None,
    seconds: float,
    steps: int,
) -> dict[str, Any]:
    """What `summary.json` holds: scores of the first set and of each set before and after, seconds, steps.

    A score is what `headline` says; `accuracy_*` are the same where it is an accuracy, else None. A set whose score
    could not be measured is left out of `eval`.
    """
    first = next(iter(before), None)
    ends = [sets[first].score if first else None for sets in (before, after)]
    scores = dict(zip(("before", "after", "best"), [*ends, best.score if best else None], strict=True))
    return {
        "headline": str(headline),
        **{f"score_{when}": score for when, score in scores.items()},
        **{f"accuracy_{when}": score if headline.name else None for when, score in scores.items()},
        "best_step": best.step if best else None,
        "seconds": round(seconds, 3),
        "steps": steps,
        "eval": {
            n: {"before": before[n].score, "after": after[n].score, "rows": before[n].rows}
            for n in before
            if before[n].score is not None and after[n].score is not None
        },
    }
