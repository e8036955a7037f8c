"""What a step of the learner did, in numbers: the work it ran and saved, the updates, the log-prob gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mm_grpo.learner.distributed import Ranks
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.types import UpdateRecord

GAP = "sampling/sampling_logp_difference"


@dataclass
class LearnerReport:
    """What a step did: metrics under TRL's names, and one record per optimizer update."""

    metrics: dict[str, float]
    updates: list[UpdateRecord] = field(default_factory=list)

    @property
    def mean_gap(self) -> float:
        """Mean gap per token between the engine's log-probs and ours, in nats; 0 where no token was run."""
        return self.metrics.get(f"{GAP}/mean", 0.0)

    @property
    def max_gap(self) -> float:
        return self.metrics.get(f"{GAP}/max", 0.0)


@dataclass
class Work:
    """What the passes of a step ran: tokens, places in packs, images, packs.

    `places` count padding too. `plain` are the tokens that running prompt + completion each by itself would take.
    """

    tokens: int = 0
    places: int = 0
    images: int = 0
    packs: int = 0
    plain: int = 0

    def add(self, pack: Pack, rows: Sequence[Sequence[Item]]) -> None:
        self.tokens += int((pack.segments >= 0).sum())
        self.places += pack.segments.numel()
        self.packs += 1
        self.plain += sum(len(i.prompt.token_ids) + len(i.token_ids) for row in rows for i in row)

    def metrics(self, ranks: Ranks, max_tokens: int) -> dict[str, float]:
        """Sums over all processes. Collective.

        `learner/fill` is the share of places that hold a token, `learner/pack_fill` tokens over what the packs
        might hold, `learner/balance` the mean work of a process over that of the busiest one.
        """
        every = ranks.gather(self, "work")
        total = {name: sum(getattr(w, name) for w in every) for name in self.__dataclass_fields__}
        busiest = max(w.tokens for w in every)
        return {
            "learner/packs": total["packs"],
            "learner/fill": total["tokens"] / max(total["places"], 1),
            "learner/pack_fill": total["tokens"] / max(total["packs"] * max_tokens, 1),
            "learner/balance": total["tokens"] / max(busiest * len(every), 1),
            "learner/tokens": total["tokens"],
            "learner/tokens_saved": total["plain"] - total["tokens"],
            "learner/images_encoded": total["images"],
        }


def update_metrics(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """The step's updates as metrics; norms are those of the largest."""
    norms = [u.grad_norm for u in updates if math.isfinite(u.grad_norm)]
    return {
        "grad_norm": max(norms, default=0.0),
        "learner/overflows": len(updates) - len(norms),
        "learning_rate": updates[-1].learning_rate,
        "learner/update_norm": max(u.update_norm for u in updates),
        "learner/updates": sum(u.stepped for u in updates),
    }


def gap_metrics(
    engine: Sequence[Sequence[float]], learned: Mapping[int, Tensor], ranks: Ranks
) -> dict[str, float]:
    """How far the engine's log-probs [R][T] lie from the learner's, over the completions that were run. Collective."""
    gaps = [
        (torch.tensor(engine[index], dtype=torch.float64) - values.double().cpu()).abs()
        for index, values in learned.items()
    ]
    gap = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
    own = (float(gap.sum()), len(gap), float(gap.max()) if gaps else 0.0)
    sums, counts, largest = zip(*ranks.gather(own, "log-prob gaps"), strict=True)
    if not sum(counts):
        return {}
    return {f"{GAP}/mean": sum(sums) / sum(counts), f"{GAP}/max": max(largest)}
