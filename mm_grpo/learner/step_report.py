"""The metrics of a learner's step: means of the loss, the work that was run and saved, updates, the log-prob gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.health.checks import LogprobGap
from mm_grpo.learner.pack import Item, Pack, by_group
from mm_grpo.types import Prompt, UpdateRecord

GAP = "sampling/sampling_logp_difference"


@dataclass
class LearnerReport:
    """Report of a step: metrics under TRL's names, and one record per optimizer update."""

    metrics: dict[str, float]
    updates: list[UpdateRecord] = field(default_factory=list)
    gaps: Mapping[int, LogprobGap] = field(default_factory=dict)
    """The log-prob gap by the oldest weight version that a completion was sampled under."""


class LossStatistics:
    """Sums over tokens, added pack by pack, and the means that become metrics.

    `counted` are all tokens that enter the loss, also if they cannot change an update. `live` tokens should have a
    gradient: they have weight and a non-zero advantage, and no bound, mask or correction took the gradient away.
    """

    def __init__(self, counted: int | None = None) -> None:
        self.sums: dict[str, float] = {} if counted is None else {"counted": counted}
        self._unread: dict[str, Tensor] = {}
        self._live = 0

    def add(self, over: Tensor | None = None, **values: Tensor) -> None:
        """Add up values, over the tokens of a mask if one is given. Nothing waits for the device."""
        for name, value in values.items():
            masked = value.detach() if over is None else torch.where(over, value.detach(), 0)
            total = masked.sum(dtype=torch.float64)
            self._unread[name] = self._unread[name] + total if name in self._unread else total

    def read(self) -> dict[str, float]:
        """Return the sums; what was added since the last call comes from the device in one transfer."""
        if self._unread:
            totals = torch.stack([*self._unread.values()]).tolist()
            for name, total in zip(self._unread, totals, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + total
            self._unread = {}
        return self.sums

    def take_live(self) -> int:
        """Return the count of live tokens since the last call."""
        before, self._live = self._live, int(self.read().get("live", 0.0))
        return self._live - before

    def metrics(self, updates: int = 1) -> Mapping[str, float]:
        """Return the mean loss of `updates`, and means per token that was run, if any was, under TRL's names.

        Shares of clipped tokens are of all counted tokens, because a token that is left out is never clipped.
        `sampling/off_policy_ratio` is of tokens with a negative advantage, which alone the mask may drop.
        """
        sums = self.read()
        tokens = sums.get("tokens", 0.0)
        all_tokens = max(sums.get("counted", tokens), 1.0)
        low, high = sums.get("low", 0.0) / all_tokens, sums.get("high", 0.0) / all_tokens
        metrics = {
            "loss": sums.get("loss", 0.0) / updates,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if not tokens:
            return metrics
        metrics["entropy"] = sums["entropy"] / tokens
        if "kl" in sums:
            metrics["kl"] = sums["kl"] / tokens
        if "importance" in sums:
            metrics["sampling/importance_sampling_ratio/mean"] = sums["importance"] / tokens
            metrics["sampling/masked_ratio"] = sums["masked"] / tokens
        if "negative" in sums:
            metrics["sampling/off_policy_ratio"] = sums["off_policy"] / max(sums["negative"], 1.0)
        return metrics


@dataclass
class PackStatistics:
    """Counts of a step's passes."""

    tokens: int = 0
    places: int = 0
    """Places in packs, padding included."""
    images: int = 0
    prompts: int = 0
    packs: int = 0
    plain: int = 0
    """Tokens of the same completions without shared prefixes, the prompt once for each."""

    def add_prompt(self, prompt: Prompt, multiple: int) -> None:
        """Count a prompt that was run apart from its completions, its width rounded up to a multiple."""
        self.tokens += len(prompt.token_ids)
        self.places += -(-len(prompt.token_ids) // multiple) * multiple
        self.prompts += 1

    def add(self, pack: Pack, rows: Sequence[Sequence[Item]]) -> None:
        self.tokens += int((pack.segments >= 0).sum())
        self.places += pack.segments.numel()
        self.prompts += sum(len(by_group(row)) for row in rows) - sum(map(len, pack.prefixes))
        self.packs += 1
        self.plain += sum(len(i.prompt.token_ids) + i.run_length for row in rows for i in row)

    def metrics(self, ranks: Ranks, max_tokens: int) -> dict[str, float]:
        """Return the sums over all processes as metrics. Collective.

        `learner/fill` is the share of places that hold a token, `learner/pack_fill` tokens over the packs' limits.
        """
        total = ranks.sum(vars(self), "pack statistics")
        return {
            "learner/packs": total["packs"],
            "learner/fill": total["tokens"] / max(total["places"], 1),
            "learner/pack_fill": total["tokens"] / max(total["packs"] * max_tokens, 1),
            "learner/tokens": total["tokens"],
            "learner/tokens_saved": total["plain"] - total["tokens"],
            "learner/images_encoded": total["images"],
            "learner/prompts_run": total["prompts"],
        }


def update_metrics(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """Return the step's updates as metrics; norms are the largest of the step."""
    norms = [u.grad_norm for u in updates if math.isfinite(u.grad_norm)]
    return {
        "grad_norm": max(norms, default=0.0),
        "learner/overflows": len(updates) - len(norms),
        "learning_rate": updates[-1].learning_rate,
        "learner/update_norm": max(u.update_norm for u in updates),
        "learner/updates": sum(u.stepped for u in updates),
    }


def gap_metrics(
    engine: Sequence[Sequence[float]],
    learned: Mapping[int, Tensor],
    versions: Sequence[tuple[int, ...]],
    ranks: Ranks,
) -> tuple[dict[str, float], dict[int, LogprobGap]]:
    """Return the distance of the engine's log-probs [R][T] from the learner's: over all completions that were run, and
    by the oldest version [R] that a completion was sampled under. Collective."""
    local: dict[int, list[float]] = {}
    values = iter(torch.cat([*learned.values()]).tolist() if learned else ())
    for index in learned:
        local.setdefault(min(versions[index]), []).extend(next(values) - logp for logp in engine[index])
    shares = ranks.all_gather(local, "log-prob gaps")
    by_version = {
        version: torch.tensor([m for share in shares for m in share.get(version, ())], dtype=torch.float64)
        for version in sorted({version for share in shares for version in share})
    }
    if not by_version:
        return {}, {}
    moves = torch.cat([*by_version.values()]).abs()
    metrics = {f"{GAP}/mean": float(moves.sum()) / len(moves), f"{GAP}/max": float(moves.max())}
    metrics[f"{GAP}/tokens"] = len(moves)
    return metrics, {version: LogprobGap.of(moves) for version, moves in by_version.items()}
