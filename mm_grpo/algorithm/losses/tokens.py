"""What a token's loss is made from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """M completion tokens: new and old log-probabilities, their completion's advantage and name, all [M].

    `correction` [M] is the mismatch weight of learner against engine, None where there is none.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    owners: Tensor
    correction: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.old_logp
