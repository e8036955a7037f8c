"""One step's updates, in one process or several.

The groups of a step are cut into `updates_per_step` parts by slot, and each part makes one optimizer
update, `num_iterations` times over. Within an update the completions are packed, each pack runs
forward and backward once, and the sums add up to the loss of the whole part. Work that cannot change an
update is left out: the old-policy pass where the policy has not moved yet, the reference pass at beta 0,
groups without advantage when neither penalty nor bonus needs them.

Each process is given the groups of its own slots. What an update depends on is settled over all of
them: denominators, whether there is anything to do, and the number of packs, for every process makes the
same number of backward passes; one with fewer packs runs packs of weight 0. So the number of processes
changes the time of an update and not the update.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_grpo.algorithm.losses import token_weights
from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.distributed import Ranks
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.lora import has_adapters, merged_tensors, without_adapters
from mm_grpo.learner.objective import PackTokens, Tally, Terms, pack_loss
from mm_grpo.learner.optimizer import AnyOptimizer, Optimizer
from mm_grpo.learner.pack import Item, Pack, layout, plan, weightless
from mm_grpo.processors.base import Processor
from mm_grpo.types import Group, Prompt, UpdateRecord

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


class Learner:
    """Trains `model` on groups. `total_updates` is the length of the learning-rate schedule.

    `ranks` are the processes that make the updates together; None is this one alone.
    """

    def __init__(
        self,
        model: Any,
        processor: Processor,
        config: GRPOConfig,
        total_updates: int,
        ranks: Ranks | None = None,
    ) -> None:
        if processor.layout != "shared_prefix":
            raise ConfigError(
                f"model.path = '{config.model.path}': its processor asks for the '{processor.layout}' layout, "
                "which this version does not have; only 'shared_prefix' families can be trained"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                f"model.path = '{config.model.path}': every parameter is frozen, so no update can happen; unfreeze "
                "some (model.freeze_vision, or requires_grad of the model that you passed in)"
            )
        self.model, self.processor, self.config = model, processor, config
        self.ranks = ranks or Ranks()
        self.ranks.share_tensors(
            model.parameters()
        )  # adapters, say, start from each process's random numbers
        if config.optim.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.reference: PackForward | None = None
        if config.algorithm.beta > 0 and has_adapters(model):
            self.reference = self._wrap(model)  # run without its adapters
        elif config.algorithm.beta > 0:  # before ZeRO moves the weights into buffers of its own
            self.reference = self._wrap(copy.deepcopy(model).requires_grad_(False).eval())
        self.module = self._wrap(model)
        self.optimizer = _optimizer(self.module, config, total_updates, self.ranks)

    def step(self, groups: Sequence[Group]) -> LearnerReport:
        """Make the step's updates from this process's groups; the weights have changed in place on return.

        The report is that of the whole step, equal on every process.
        """
        items = self._items(groups)
        self._counts = {"tokens": 0, "padded": 0, "images": 0, "packs": 0, "plain": 0}
        tally, updates = Tally(), []
        parts = list(self._parts(groups, items))
        reference = None
        if self.reference is not None:
            with without_adapters(self.reference.model):
                reference = self._run(items, self.reference)
        # the first part meets the policy that sampled it; later parts need its log-probs kept from before
        old: dict[int, Tensor] = {}
        for part in parts[1:]:
            old |= self._run(part, self.module)
        first_pass: dict[int, Tensor] = {}
        for _ in range(self.config.algorithm.num_iterations):
            for part in parts:
                updates.append(self._update(groups, part, old, reference, tally, first_pass))
            old = {**first_pass, **old}
        tally.sums = self.ranks.sum(tally.sums, "loss")
        self._counts = {name: int(n) for name, n in self.ranks.sum(self._counts, "work").items()}
        metrics = dict(tally.metrics()) | self._work_metrics(updates)
        metrics |= self._sampling_metrics(groups, items, old)
        return LearnerReport(metrics, updates)

    def score(
        self, prompt: Prompt, completions: Sequence[Sequence[int]], *, as_sampled: bool = False
    ) -> list[list[float]]:
        """Log-probabilities [T] of each completion of `prompt` under the present weights.

        Over the whole vocabulary at temperature 1, as an engine's `score`; with `as_sampled`, over the
        distribution that training samples from (media tokens masked, at the training temperature).
        """
        items = [Item(i, 0, prompt, tuple(ids)) for i, ids in enumerate(completions)]
        module = self._wrap(self.model)
        if not as_sampled:
            module.media_token_ids, module.temperature = [], 1.0
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in plan(items, self.config.optim.max_tokens_per_pack):
                pack = layout(rows, self.processor.media_token_ids)
                found |= _split_by_owner(module(pack)[0], pack.owners.tolist())
        return [found[i].tolist() for i in range(len(items))]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its in-memory name, tied ones under each name, adapters merged: for an engine."""
        return merged_tensors(self.model)

    def save(self, path: str | Path) -> None:
        """Write weights (adapters merged), config, processor and chat template: a folder that loads without us."""
        own = {"state_dict": dict(merged_tensors(self.model))} if has_adapters(self.model) else {}
        self.model.save_pretrained(str(path), **own)
        self.processor.save(path)

    # one update ------------------------------------------------------------------------------

    def _update(
        self,
        groups: Sequence[Group],
        items: Sequence[Item],
        old: dict[int, Tensor],
        reference: dict[int, Tensor] | None,
        tally: Tally,
        first_pass: dict[int, Tensor],
    ) -> UpdateRecord:
        terms = self._terms(groups, items)
        kept = self._with_effect(items, terms)
        with self.ranks.together("planning packs"):
            rows = plan(kept, self.config.optim.max_tokens_per_pack)
        count = self.ranks.max(len(rows), "packs")
        if count == 0:
            return self.optimizer.skip()
        before = tally.live_tokens
        engine = [c.logprobs for g in groups for c in g.completions]
        sampled = {i.index: torch.tensor(engine[i.index], device=self.model.device) for i in kept}
        for number, pack in enumerate(self._laid_out(rows), start=1):
            logp, entropy = self.optimizer.forward(pack)
            owned = pack.owners.tolist()
            for index, values in _split_by_owner(logp.detach(), owned).items():
                first_pass.setdefault(index, values)
            tokens = PackTokens(
                owners=pack.owners.to(logp.device),
                logp=logp,
                entropy=entropy,
                old_logp=_gather(old, owned, logp) if old else logp.detach(),
                sampling_logp=_gather(sampled, owned, logp),
                ref_logp=_gather(reference, owned, logp) if reference is not None else None,
            )
            loss = pack_loss(self.config.algorithm, terms, tokens, tally)
            self.optimizer.backward(loss, last=number == count)
        for number in range(len(rows) + 1, count + 1):
            logp, entropy = self.optimizer.forward(weightless(min(self.processor.stop_token_ids)))
            self.optimizer.backward((logp + entropy).sum() * 0.0, last=number == count)
        live = self.ranks.sum({"live": tally.live_tokens - before}, "live tokens")
        return self.optimizer.step(int(live["live"]))

    def _terms(self, groups: Sequence[Group], items: Sequence[Item]) -> Terms:
        """Advantages and weights by completion index; completions of other parts get weight 0.

        The weights come from the lengths of the whole update, in the order of its slots.
        """
        own = {(groups[i.group].slot, i.index): len(i.token_ids) if i.counts else 0 for i in items}
        every = [
            (slot, rank, index, length)
            for rank, part in enumerate(self.ranks.gather(own, "lengths of completions"))
            for (slot, index), length in part.items()
        ]
        every.sort()
        lengths = torch.tensor([length for *_, length in every], dtype=torch.long)
        scale = token_weights(
            self.config.algorithm.loss_type, lengths, self.config.rollout.max_completion_length
        ) * (lengths > 0)
        weights = torch.zeros(sum(len(g.completions) for g in groups), dtype=torch.float64)
        for (_, rank, index, _), weight in zip(every, scale.tolist(), strict=True):
            if rank == self.ranks.rank:
                weights[index] = weight
        advantages = torch.tensor([a for g in groups for a in g.advantages], dtype=torch.float64)
        device = self.model.device
        return Terms(advantages.to(device), weights.to(device), int(lengths.sum()))

    def _with_effect(self, items: Sequence[Item], terms: Terms) -> list[Item]:
        """Items that can change the update: those of weight, and of a group with advantages if only these act."""
        weighty = [i for i in items if float(terms.weights[i.index]) > 0]
        if self.config.algorithm.beta > 0 or self.config.algorithm.entropy_coef != 0:
            return weighty
        return [i for i in weighty if float(terms.advantages[i.index]) != 0]

    def _run(self, items: Sequence[Item], module: PackForward) -> dict[int, Tensor]:
        """Log-probabilities [T] of each completion under `module`, without gradients."""
        result: dict[int, Tensor] = {}
        with torch.no_grad():
            for pack in self._laid_out(plan(items, self.config.optim.max_tokens_per_pack)):
                result |= _split_by_owner(module(pack)[0], pack.owners.tolist())
        return result

    # packs -----------------------------------------------------------------------------------

    def _wrap(self, model: Any) -> PackForward:
        return PackForward(
            model,
            media_token_ids=self.processor.media_token_ids,
            blank=self.processor.blank(),
            temperature=self.config.rollout.temperature,
        )

    def _items(self, groups: Sequence[Group]) -> list[Item]:
        masks = self.config.algorithm.mask_truncated_completions
        items: list[Item] = []
        for number, group in enumerate(groups):
            for c in group.completions:
                counts = not (masks and c.finish_reason == "length")
                items.append(Item(len(items), number, group.prompt, c.token_ids, counts))
        return items

    def _parts(self, groups: Sequence[Group], items: Sequence[Item]) -> Iterator[list[Item]]:
        """The items of each update: slots in `updates_per_step` equal runs, whichever of them are filled."""
        count, slots = self.config.optim.updates_per_step, self.config.rollout.prompts_per_step
        for part in range(count):
            yield [i for i in items if groups[i.group].slot * count // slots == part]

    def _laid_out(self, packs: Sequence[Sequence[Sequence[Item]]]) -> Iterator[Pack]:
        for rows in packs:
            pack = layout(rows, self.processor.media_token_ids)
            used = int((pack.segments >= 0).sum())
            self._counts["tokens"] += used
            self._counts["padded"] += pack.segments.numel()
            self._counts["images"] += pack.images
            self._counts["packs"] += 1
            self._counts["plain"] += sum(
                len(i.prompt.token_ids) + len(i.token_ids) for row in rows for i in row
            )
            yield pack

    # metrics ---------------------------------------------------------------------------------

    def _work_metrics(self, updates: Sequence[UpdateRecord]) -> dict[str, float]:
        counts = self._counts
        norms = [u.grad_norm for u in updates if math.isfinite(u.grad_norm)]
        return {
            "grad_norm": max(norms, default=0.0),
            "learner/overflows": len(updates) - len(norms),
            "learning_rate": updates[-1].learning_rate,
            "learner/update_norm": max(u.update_norm for u in updates),
            "learner/updates": sum(u.stepped for u in updates),
            "learner/packs": counts["packs"],
            "learner/fill": counts["tokens"] / max(counts["padded"], 1),
            "learner/tokens": counts["tokens"],
            "learner/tokens_saved": counts["plain"] - counts["tokens"],
            "learner/images_encoded": counts["images"],
        }

    def _sampling_metrics(
        self, groups: Sequence[Group], items: Sequence[Item], learned: dict[int, Tensor]
    ) -> dict[str, float]:
        """How far the engine's log-probabilities lie from the learner's, over the tokens that were run."""
        engine = [c.logprobs for g in groups for c in g.completions]
        gaps = [
            (torch.tensor(engine[i.index], dtype=torch.float64) - learned[i.index].double().cpu()).abs()
            for i in items
            if i.index in learned
        ]
        gap = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
        own = (float(gap.sum()), len(gap), float(gap.max()) if gaps else 0.0)
        sums, counts, largest = zip(*self.ranks.gather(own, "log-prob gaps"), strict=True)
        if not sum(counts):
            return {}
        return {
            f"{GAP}/mean": sum(sums) / sum(counts),
            f"{GAP}/max": max(largest),
        }


def _optimizer(module: PackForward, config: GRPOConfig, total_updates: int, ranks: Ranks) -> AnyOptimizer:
    optim = config.optim
    if optim.offload_optimizer or (ranks.world > 1 and optim.zero_stage > 0):
        from mm_grpo.learner.zero import ZeroOptimizer

        return ZeroOptimizer(module, optim, total_updates, ranks)
    return Optimizer(module, optim, total_updates, ranks)


def _split_by_owner(values: Tensor, owners: Sequence[int]) -> dict[int, Tensor]:
    """Values [M] cut where the owner changes; each completion's tokens stand together in a pack."""
    cuts = [i for i in range(1, len(owners)) if owners[i] != owners[i - 1]]
    pieces = values.tensor_split(cuts)
    return {owners[start]: piece for start, piece in zip([0, *cuts], pieces, strict=True)}


def _gather(kept: dict[int, Tensor], owners: Sequence[int], like: Tensor) -> Tensor:
    """Kept values in the order of a pack's tokens; a completion seen for the first time uses its own."""
    own = _split_by_owner(like.detach(), owners)
    return torch.cat([kept.get(index, piece) for index, piece in own.items()])
