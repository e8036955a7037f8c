"""One step's updates, in one process or several.

The groups of a step are cut into `updates_per_step` parts by slot, and each part makes one optimizer
update, `num_iterations` times over. Within an update the completions are packed, each pack runs
forward and backward once, and the sums add up to the loss of the whole part. Work that cannot change an
update is left out: the old-policy pass where the policy has not moved yet, the reference pass at beta 0,
groups without advantage when neither penalty nor bonus needs them.

Each process is given the groups of its own slots, and hands some on where another has less to do
(balance.py). What an update depends on is settled over all of them: denominators, whether there is anything
to do, and the number of packs, for every process makes the same number of backward passes; one with fewer
packs runs packs of weight 0. So the number of processes changes the time of an update and not the update.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_grpo.algorithm.losses import token_weights
from mm_grpo.algorithm.masks import top_entropy_mask
from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.balance import Cost, balanced
from mm_grpo.learner.distributed import Ranks
from mm_grpo.learner.features import KeptFeatures, tower_is_frozen
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.lora import has_adapters, merged_tensors, without_adapters
from mm_grpo.learner.objective import PackTokens, Tally, Terms, pack_loss
from mm_grpo.learner.optimizer import AnyOptimizer, Optimizer
from mm_grpo.learner.owners import ByOwner, in_order, split_by_owner
from mm_grpo.learner.pack import Item, Pack, layout, plan, weightless
from mm_grpo.learner.report import LearnerReport, Work, gap_metrics, update_metrics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Prompt, UpdateRecord


@dataclass(frozen=True)
class Part:
    """The completions of one update that this process runs.

    `items` are all of them, `live` those that can change the update; `terms` is what the loss knows of them.
    """

    items: Sequence[Item]
    live: Sequence[Item]
    terms: Terms


@dataclass
class Policies:
    """Log-probs [T] by completion under the policies that the loss compares; `engine` [R][T] are the samples' own.

    `old` is the policy at the start of the step where it is not the present one, `first` that of each
    completion's first pass with gradients, `reference` None where the loss needs none.
    """

    engine: Sequence[Sequence[float]]
    reference: ByOwner | None
    old: ByOwner
    first: ByOwner


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
        # adapters, say, start from each process's random numbers
        self.ranks.share_tensors(model.parameters())
        if config.optim.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.reference: PackForward | None = None
        if config.algorithm.beta > 0 and has_adapters(model):
            self.reference = self._wrap(model)  # run without its adapters
        elif config.algorithm.beta > 0:  # before ZeRO moves the weights into buffers of its own
            self.reference = self._wrap(copy.deepcopy(model).requires_grad_(False).eval())
        self.module = self._wrap(model)
        self.optimizer = _optimizer(self.module, config, total_updates, self.ranks)
        self._features: KeptFeatures | None = None
        self._work = Work()

    def step(self, groups: Sequence[Group]) -> LearnerReport:
        """Make the step's updates from this process's groups; the weights have changed in place on return.

        The report is that of the whole step, equal on every process.
        """
        groups = balanced(groups, self._cost, self.ranks)
        items = self._items(groups)
        tally, updates = Tally(), list[UpdateRecord]()
        parts = [self._part(groups, part) for part in self._shares(groups, items)]
        self._encode_once(len(parts))
        policies = Policies([c.logprobs for g in groups for c in g.completions], None, {}, {})
        if self.reference is not None and not self.config.algorithm.kl_in_reward:
            policies.reference = self._under_reference([i for part in parts for i in part.live])
        # the first part meets the policy that sampled it; later parts need its log-probs kept from before
        for part in parts[1:]:
            policies.old |= self._run(part.live, self.module)[0]
        for _ in range(self.config.algorithm.num_iterations):
            for part in parts:
                updates.append(self._update(part, policies, tally))
            policies.old = {**policies.first, **policies.old}
        tally.sums = self.ranks.sum(tally.sums, "loss")
        work, self._work = self._work, Work()
        work.images += self._features.encoded if self._features is not None else 0
        self._features = None
        self._hand_on_features()
        metrics = {
            **tally.metrics(len(updates)),
            **update_metrics(updates),
            **work.metrics(self.ranks, self.config.optim.max_tokens_per_pack),
            **gap_metrics(policies.engine, policies.old, self.ranks),
        }
        return LearnerReport(metrics, updates)

    def reference_logprobs(
        self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]
    ) -> list[list[list[float]]]:
        """Log-probs [T] of each prompt's completions under the reference policy, as sampled (mask, temperature)."""
        given = [(number, p, c) for number, (p, ours) in enumerate(answered) for c in ours]
        items = [Item(i, number, p, c.token_ids) for i, (number, p, c) in enumerate(given)]
        found = self._under_reference(items)
        values = (found[i].tolist() for i in range(len(items)))
        return [[next(values) for _ in ours] for _, ours in answered]

    def refresh_reference(self) -> None:
        """Move the reference policy: `ref_model_mixup_alpha` of the present weights, the rest its own.

        As in TR-DPO (Gorbatovski et al. 2024, arXiv:2404.09656), soft update.
        """
        if self.reference is None:
            return
        policy, alpha = dict(self.model.named_parameters()), self.config.algorithm.ref_model_mixup_alpha
        with torch.no_grad():
            for name, weight in self.reference.model.named_parameters():
                weight.copy_(torch.lerp(weight.float(), policy[name].float(), alpha))

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
        packs = (self._layout(rows) for rows in self._plan(items))
        found = _values(module, packs)[0]
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

    def _update(self, part: Part, policies: Policies, tally: Tally) -> UpdateRecord:
        tally.count(sum(len(i.token_ids) for i in part.items if i.counts))
        terms, chosen = self._top_entropy(part)
        with self.ranks.together("planning packs"):
            rows = self._plan(part.live)
        count = self.ranks.max(len(rows), "packs")
        if count == 0:
            return self.optimizer.skip()
        before = tally.live_tokens
        device = self.model.device
        engine = {i.index: torch.tensor(policies.engine[i.index], device=device) for i in part.live}
        for number, pack in enumerate(self._laid_out(rows), start=1):
            logp, entropy = self.optimizer.forward(pack)
            owned, own = pack.owners.tolist(), logp.detach()
            for index, values in split_by_owner(own, owned).items():
                policies.first.setdefault(index, values)
            tokens = PackTokens(
                owners=pack.owners.to(device),
                logp=logp,
                entropy=entropy,
                old_logp=in_order(policies.old, owned, own) if policies.old else own,
                sampling_logp=in_order(engine, owned, own),
                ref_logp=None if policies.reference is None else in_order(policies.reference, owned, own),
                chosen=None if chosen is None else in_order(chosen, owned, own),
            )
            loss = pack_loss(self.config.algorithm, terms, tokens, tally)
            self.optimizer.backward(loss, last=number == count)
        for number in range(len(rows) + 1, count + 1):
            logp, entropy = self.optimizer.forward(weightless(min(self.processor.stop_token_ids)))
            self.optimizer.backward((logp + entropy).sum() * 0.0, last=number == count)
        live = self.ranks.sum({"live": tally.live_tokens - before}, "live tokens")
        return self.optimizer.step(int(live["live"]))

    def _part(self, groups: Sequence[Group], items: Sequence[Item]) -> Part:
        """An update's advantages and weights by completion index; completions of other updates get weight 0.

        The weights come from the lengths of the whole update, in the order of its slots. Live are the items of
        weight, and of a group with advantages where only these can act.
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
        )
        scale = scale * (lengths > 0)
        weights = torch.zeros(sum(len(g.completions) for g in groups), dtype=torch.float64)
        for (_, rank, index, _), weight in zip(every, scale.tolist(), strict=True):
            if rank == self.ranks.rank:
                weights[index] = weight
        advantages = torch.tensor([a for g in groups for a in g.advantages], dtype=torch.float64)
        live = [
            i
            for i in items
            if float(weights[i.index]) > 0 and (self._every_token_acts or float(advantages[i.index]) != 0)
        ]
        device = self.model.device
        return Part(items, live, Terms(advantages.to(device), weights.to(device), int(lengths.sum())))

    def _top_entropy(self, part: Part) -> tuple[Terms, ByOwner | None]:
        """Which tokens the loss is restricted to, 1 or 0 by completion; None where it takes all.

        The quantile is that of all tokens of the update that carry weight, over all processes, so it takes a
        pass of its own before the first backward.
        """
        quantile = self.config.algorithm.top_entropy_quantile
        if quantile == 1.0:
            return part.terms, None
        weighty = [i for i in part.items if float(part.terms.weights[i.index]) > 0]
        entropies = self._run(weighty, self.module)[1]
        own = torch.cat([*entropies.values(), torch.zeros(0, device=self.model.device)]).cpu()
        shares = self.ranks.gather(own, "entropies")
        every = torch.cat(shares)
        chosen = top_entropy_mask(every, torch.ones_like(every, dtype=torch.bool), quantile)
        mine = chosen.split([len(share) for share in shares])[self.ranks.rank].to(self.model.device)
        cuts = mine.float().split([len(values) for values in entropies.values()])
        terms = replace(part.terms, tokens=int(chosen.sum()))
        return terms, dict(zip(entropies, cuts, strict=True))

    # passes without gradients ----------------------------------------------------------------

    def _run(self, items: Sequence[Item], module: PackForward) -> tuple[ByOwner, ByOwner]:
        """Log-probabilities [T] and entropies [T] of each completion under `module`, counted as work of the step."""
        with self.ranks.together("a pass without gradients"):
            return _values(module, self._laid_out(self._plan(items)))

    def _under_reference(self, items: Sequence[Item]) -> ByOwner:
        """Log-probabilities [T] of each completion under the reference policy."""
        assert self.reference is not None
        with without_adapters(self.reference.model):
            return self._run(items, self.reference)[0]

    def _encode_once(self, parts: int) -> None:
        """Keep image features over the passes of this step where there are several and the tower is frozen."""
        algorithm = self.config.algorithm
        in_loss = self.reference is not None and not algorithm.kl_in_reward
        passes = algorithm.num_iterations * (2 if algorithm.top_entropy_quantile < 1 else 1) + in_loss
        if (passes > 1 or parts > 1) and tower_is_frozen(self.model):
            self._features = KeptFeatures(self.model)
        self._hand_on_features()

    def _hand_on_features(self) -> None:
        for module in (self.module, self.reference):
            if module is not None:
                module.features = self._features

    # packs -----------------------------------------------------------------------------------

    def _wrap(self, model: Any) -> PackForward:
        return PackForward(
            model,
            media_token_ids=self.processor.media_token_ids,
            blank=self.processor.blank(),
            temperature=self.config.rollout.temperature,
            attn=self.config.model.attn,
        )

    def _items(self, groups: Sequence[Group]) -> list[Item]:
        items: list[Item] = []
        for number, group in enumerate(groups):
            for c in group.completions:
                items.append(Item(len(items), number, group.prompt, c.token_ids, self._counts(c)))
        return items

    def _shares(self, groups: Sequence[Group], items: Sequence[Item]) -> Iterator[list[Item]]:
        """The items of each update, whichever of its slots are filled."""
        for update in range(self.config.optim.updates_per_step):
            yield [i for i in items if self._update_of(groups[i.group].slot) == update]

    def _update_of(self, slot: int) -> int:
        """The update that a slot belongs to: slots are cut into `updates_per_step` equal runs."""
        return slot * self.config.optim.updates_per_step // self.config.rollout.prompts_per_step

    def _cost(self, group: Group) -> Cost:
        """The tokens that a group has to run in its update."""
        live = [
            len(c.token_ids)
            for c, a in zip(group.completions, group.advantages, strict=True)
            if self._counts(c) and (self._every_token_acts or a != 0)
        ]
        return self._update_of(group.slot), len(group.prompt.token_ids) + sum(live) if live else 0

    def _counts(self, completion: Completion) -> bool:
        """Whether the config lets a completion into the loss."""
        masks = self.config.algorithm.mask_truncated_completions
        return not (masks and completion.finish_reason == "length")

    @property
    def _every_token_acts(self) -> bool:
        """Whether a completion without advantage still changes an update: by a KL term or an entropy bonus."""
        algorithm = self.config.algorithm
        return (algorithm.beta > 0 and not algorithm.kl_in_reward) or algorithm.entropy_coef != 0

    def _plan(self, items: Sequence[Item]) -> list[list[list[Item]]]:
        return plan(items, self.config.optim.max_tokens_per_pack, self.module.masks.multiple)

    def _layout(self, rows: Sequence[Sequence[Item]]) -> Pack:
        return layout(rows, self.processor.media_token_ids, self.module.masks.multiple)

    def _laid_out(self, packs: Sequence[Sequence[Sequence[Item]]]) -> Iterator[Pack]:
        for rows in packs:
            pack = self._layout(rows)
            self._work.add(pack, rows)
            if self._features is None:
                self._work.images += pack.images
            yield pack


def _values(module: PackForward, packs: Iterable[Pack]) -> tuple[ByOwner, ByOwner]:
    """Log-probabilities [T] and entropies [T] of each completion of some packs, without gradients."""
    logps: ByOwner = {}
    entropies: ByOwner = {}
    with torch.no_grad():
        for pack in packs:
            owned = pack.owners.tolist()
            for found, values in zip((logps, entropies), module(pack), strict=True):
                found |= split_by_owner(values, owned)
    return logps, entropies


def _optimizer(module: PackForward, config: GRPOConfig, total_updates: int, ranks: Ranks) -> AnyOptimizer:
    optim = config.optim
    if optim.offload_optimizer or (ranks.world > 1 and optim.zero_stage > 0):
        from mm_grpo.learner.zero import ZeroOptimizer

        return ZeroOptimizer(module, optim, total_updates, ranks)
    return Optimizer(module, optim, total_updates, ranks)
