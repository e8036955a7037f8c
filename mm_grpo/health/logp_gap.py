"""Log-prob gap: engine and learner disagree about tokens that one of them sampled.

Both compute the same function of the same weights, so they may differ by rounding only. A larger gap
means that the gradient is taken of another distribution than the one that was sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean gap per token, in nats. In float32 two sound engines differ by about 1e-6, and by up to 1e-4
where a GPU rounds convolutions to TF32; in bfloat16 by 0.001 to 0.03, more for deeper models."""


FOLLOWED = 10.0
"""Times that samples may be as far from the learner, in the mean, as it may have moved a token since their weights
(`VerifiedSync.moved_since`)."""
RATIO_BIAS, RATIO_ERRORS = 0.1, 8.0
"""How far from 1 the mean importance ratio has to be, and by how many of its standard errors, to be no chance; those
steps showed 4.3 errors at most."""


@dataclass(frozen=True)
class SampledGap:
    """|difference| of the learner's and the engine's log-probs of sampled tokens, in nats, and the mean of their ratio.

    `ratio` is the mean over tokens of learner / engine, which is 1 in expectation where the tokens were sampled from
    the probabilities that came with them, however far the learner has moved since; `errors` is its distance from 1 in
    standard errors.
    """

    mean: float = 0.0
    max: float = 0.0
    ratio: float = 1.0
    errors: float = 0.0


def sampled_gap(gap: SampledGap, limit: float, moved: float = 0.0) -> str | None:
    """A message when samples are farther from the learner than it has `moved` (nats) since their weights.

    0 is for samples of its own weights, infinity for a move that is not known, which bounds nothing.
    """
    message = logp_gap(gap.mean, gap.max, max(limit, FOLLOWED * moved))
    if message is None and abs(gap.ratio - 1) > RATIO_BIAS and abs(gap.errors) > RATIO_ERRORS:
        return (
            f"the importance ratio of the learner to the engine is {gap.ratio:.3g} in the mean over sampled tokens, "
            f"{abs(gap.errors):.0f} standard errors from 1, so the engine's log-probs are not those that the tokens "
            "were sampled from. Check which engine answered, and that answers belong to their prompts"
        )
    return message


def limit_for(dtype: str) -> float:
    """The limit in nats for the weights' number format.

    >>> limit_for("torch.float32"), limit_for("bfloat16")
    (0.001, 0.1)
    """
    return LIMITS.get(dtype.removeprefix("torch."), LIMITS["bfloat16"])


def logp_gap(
    mean: float, largest: float, limit: float, what: str = "the tokens that it sampled"
) -> str | None:
    """A message when the mean gap per token (nats) is past `limit`, or not a number; else None."""
    if mean <= limit:
        return None
    return (
        f"the engine's log-probs of {what} differ from the learner's by {mean:.3g} per token on average, "
        f"{largest:.3g} at most; the limit is {limit:g}. Likely the engine holds other weights, was given another "
        "image, or samples at another temperature or under another mask; `mm-grpo doctor CONFIG` compares the two. Set "
        "run.guards.logp_gap only where the gap comes from the number format (model.dtype)"
    )
