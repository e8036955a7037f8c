"""Log-prob gap: engine and learner disagree about tokens that one of them sampled.

Both compute the same function of the same weights, so they may differ by rounding only. A larger gap
means that the gradient is taken of another distribution than the one that was sampled from.
"""

from __future__ import annotations

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean gap per token, in nats. In float32 two sound engines differ by about 1e-6, and by up to 1e-4
where a GPU rounds convolutions to TF32; in bfloat16 by 0.001 to 0.03, more for deeper models."""


def limit_for(chosen: float | None, dtype: str) -> float:
    """The limit in nats: `run.max_logp_gap` when it is set, else that of the weights' number format.

    >>> limit_for(None, "torch.float32"), limit_for(None, "bfloat16"), limit_for(0.5, "float32")
    (0.001, 0.1, 0.5)
    """
    return chosen if chosen is not None else LIMITS.get(dtype.removeprefix("torch."), LIMITS["bfloat16"])


def logp_gap(
    mean: float, largest: float, limit: float, what: str = "the tokens that it sampled"
) -> str | None:
    """A message when the mean gap per token (nats) is past `limit`, or not a number; else None."""
    if mean <= limit:
        return None
    return (
        f"the engine's log-probs of {what} differ from the learner's by {mean:.3g} per token on average, "
        f"{largest:.3g} at most; the limit is {limit:g}. Likely the engine holds other weights (a sync that "
        "did not arrive), was given another image, or samples at another temperature or under another mask "
        "than the learner. `mm-grpo doctor CONFIG` compares the two sides part by part; raise "
        "run.max_logp_gap only where the gap comes from the number format (model.dtype)"
    )
