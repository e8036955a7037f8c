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
    """Report of a step: metrics under TRL's names, and one record per optimizer update.

    `gaps` are those of the metrics' `GAP` by the oldest weight version that a completion was sampled under.
    """

    metrics: dict[str, float]
    updates: list[UpdateRecord] = field(default_factory=list)
    gaps: Mapping[int, LogprobGap] = field(default_factory=dict)


class LossStatistics:
    """Sums over tokens, added pack by pack, and the means that become metrics.

    `counted` are the tokens that enter the loss, those too that cannot change an update; `live` those that should have
    a gradient: with weight and a non-zero advantage, and that no bound, mask or correction left without.
    """

    def __init__(self, counted: int | None = None) -> None:
        self.sums: dict[str, float] = {} if counted is None else {"counted": counted}
        self._unread: dict[str, Tensor] = {}
        self._live = 0

    def add(self, over: Tensor | None = None, **values: Tensor) -> None:
        """Add up values, of a mask's tokens alone where there is one. Nothing waits for the device."""
        for name, value in values.items():
            kept = value.detach() if over is None else torch.where(over, value.detach(), 0)
            whole = kept.sum(dtype=torch.float64)
            self._unread[name] = self._unread[name] + whole if name in self._unread else whole

    def read(self) -> dict[str, float]:
        """The sums; those that were added since the last call come in one transfer."""
        if self._unread:
            found = torch.stack([*self._unread.values()]).tolist()
            for name, whole in zip(self._unread, found, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + whole
            self._unread = {}
        return self.sums

    def take_live(self) -> int:
        """The live tokens that were added since the last call."""
        before, self._live = self._live, int(self.read().get("live", 0.0))
        return self._live - before

    def metrics(self, updates: int = 1) -> Mapping[str, float]:
        """The mean loss of `updates`, and means per token that was run, under TRL's names; absent where none was.

        Shares of clipped tokens are of all that counted, for one that is left out is never clipped;
        `sampling/off_policy_ratio` is one of tokens with a negative advantage, which alone the mask may drop.
        """
        sums = self.read()
        tokens = sums.get("tokens", 0.0)
        counted = max(sums.get("counted", tokens), 1.0)
        low, high = sums.get("low", 0.0) / counted, sums.get("high", 0.0) / counted
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
        if sums.get("pictured"):
            metrics["perception/kl"] = sums["perception_kl"] / sums["pictured"]
        if "taught" in sums:
            metrics["twin_view/share"] = sums["taught"] / counted
        if sums.get("taught"):
            metrics["twin_view/kl"] = sums["twin_kl"] / sums["taught"]
        if "importance" in sums:
            metrics["sampling/importance_sampling_ratio/mean"] = sums["importance"] / tokens
            metrics["sampling/masked_ratio"] = sums["masked"] / tokens
        if "negative" in sums:
            metrics["sampling/off_policy_ratio"] = sums["off_policy"] / max(sums["negative"], 1.0)
        return metrics


@dataclass
class PackStatistics:
    """Counts of a step's passes: tokens, places in packs, images, prompts, packs.

    `places` count padding too. `plain` counts the tokens of the same completions without shared prefixes, the
    prompt once for each.
    """

    tokens: int = 0
    places: int = 0
    images: int = 0
    prompts: int = 0
    packs: int = 0
    plain: int = 0

    def add_prompt(self, prompt: Prompt, multiple: int) -> None:
        """Count a prompt that was run apart, its width rounded up to a multiple."""
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
        """Sums over all processes. Collective.

        `learner/fill` is the share of places that hold a token, `learner/pack_fill` tokens over what the packs
        might hold.
        """
        every = ranks.all_gather(self, "pack statistics")
        total = {name: sum(getattr(w, name) for w in every) for name in self.__dataclass_fields__}
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
    engine: Sequence[Sequence[float]],
    learned: Mapping[int, Tensor],
    versions: Sequence[tuple[int, ...]],
    ranks: Ranks,
) -> tuple[dict[str, float], dict[int, LogprobGap]]:
    """Distance of the engine's log-probs [R][T] from the learner's: over all completions that were run, and by the
    oldest version [R] that a completion was sampled under. Collective."""
    own: dict[int, list[float]] = {}
    values = iter(torch.cat([*learned.values()]).tolist() if learned else ())
    for index in learned:
        own.setdefault(min(versions[index]), []).extend(next(values) - theirs for theirs in engine[index])
    every = ranks.all_gather(own, "log-prob gaps")
    by_version = {
        version: torch.tensor([m for found in every for m in found.get(version, ())], dtype=torch.float64)
        for version in sorted({version for found in every for version in found})
    }
    if not by_version:
        return {}, {}
    moves = torch.cat([*by_version.values()]).abs()
    metrics = {f"{GAP}/mean": float(moves.sum()) / len(moves), f"{GAP}/max": float(moves.max())}
    return metrics, {version: LogprobGap.of(moves) for version, moves in by_version.items()}
