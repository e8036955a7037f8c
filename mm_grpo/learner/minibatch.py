"""Minibatches: the completions of one optimizer update, with the weights and log-probabilities that the loss needs.

The slots of a step are cut into `updates_per_step` equal runs, and each makes one `Minibatch`. Completions are
identified by `Item.index`, their place in this process's step; a pack's tokens name it in `completion_index`.
What must outlive a pack is kept by completion (`ByCompletion`) and brought back in a pack's order.

Axes: [R], the completions of this process's step; [T], tokens of one; [M], completion tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mm_grpo.algorithm.losses import token_weights
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.loss import LossInputs, PackTokens
from mm_grpo.learner.pack import Item, Pack
from mm_grpo.types import Completion, Group, Prompt

ByCompletion = dict[int, Tensor]
"""Values [T] of completions, by `Item.index`."""


@dataclass(frozen=True)
class Minibatch:
    """The completions of one update that this process runs.

    `items` are all of them, `live` those that can change it: they carry weight and an advantage, or have a dense
    objective. `advantages` [T] are those of each completion's tokens where turns or tokens have some of their own
    (`algorithm.turn_gamma`, `algorithm.credit`).
    """

    items: Sequence[Item]
    live: Sequence[Item]
    inputs: LossInputs
    advantages: ByCompletion | None = None


@dataclass
class LogProbs:
    """Log-probs [T] by completion under the policies that the loss compares; `engine` [R][T] are the samples' own.

    `old` is the policy at the start of the step where it is not the present one, `first` that of each
    completion's first pass with gradients, `reference` None where the loss needs none.
    """

    engine: Sequence[Sequence[float]]
    reference: ByCompletion | None = None
    old: ByCompletion = field(default_factory=dict)
    first: ByCompletion = field(default_factory=dict)

    def pack_tokens(
        self,
        pack: Pack,
        logp: Tensor,
        entropy: Tensor,
        chosen: ByCompletion | None,
        advantages: ByCompletion | None = None,
    ) -> PackTokens:
        """The tokens of a pack from its pass (`logp` [M], `entropy` [M]), with what is kept of the other policies.

        Of completions that had no pass with gradients yet, this one's log-probs are kept.
        """
        order, present = pack.completion_index.tolist(), logp.detach()
        self.first = {**split_by_completion(present, order), **self.first}
        engine = torch.tensor([value for i in dict.fromkeys(order) for value in self.engine[i]])
        return PackTokens(
            completion_index=pack.completion_index.to(logp.device),
            logp=logp,
            entropy=entropy,
            old_logp=to_pack_order(self.old, order, present) if self.old else present,
            sampling_logp=engine.to(logp.device),
            ref_logp=None if self.reference is None else to_pack_order(self.reference, order, present),
            chosen=None if chosen is None else to_pack_order(chosen, order, present),
            advantages=None if advantages is None else to_pack_order(advantages, order, present),
        )


def check_groups(groups: Sequence[Group], slots: int) -> None:
    """Raise ValueError for a group that is not in one of the step's `slots` or has no advantages, and for a completion
    without tokens or without a log-prob for each."""
    for group in groups:
        if not 0 <= group.slot < slots:
            raise ValueError(
                f"{group.prompt.uid}: slot {group.slot} is in no update; a step has the slots 0 to {slots - 1} "
                "(rollout.prompts_per_step)"
            )
        whole = all(0 < len(c.token_ids) == len(c.logprobs) for c in group.completions)
        if not whole or len(group.advantages) != len(group.completions):
            raise ValueError(
                f"{group.prompt.uid}: each completion needs tokens, a log-prob for each of them, and an advantage"
            )


def make_minibatches(
    groups: Sequence[Group], config: GRPOConfig, ranks: Ranks, device: torch.device
) -> list[Minibatch]:
    """One minibatch for each update of the step, without items where its slots are all empty. Collective."""
    items = make_items(groups, config.algorithm)
    updates, prompts = config.optim.updates_per_step, config.rollout.prompts_per_step
    shares = [[i for i in items if groups[i.group].slot * updates // prompts == u] for u in range(updates)]
    return [_minibatch(groups, share, config, ranks, device) for share in shares]


def make_items(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Item]:
    """The completions of some groups, in order; `Item.group` is the place of each one's group."""
    pairs = [(number, group, c) for number, group in enumerate(groups) for c in group.completions]
    return [
        Item(index, number, group.prompt, c.token_ids, enters_loss(c, algorithm), c.tail)
        for index, (number, group, c) in enumerate(pairs)
    ]


def enters_loss(completion: Completion, algorithm: AlgorithmConfig) -> bool:
    """True when a completion enters the loss: not a masked one, nor, where the config says so, a truncated one."""
    truncated = algorithm.mask_truncated_completions and completion.finish_reason == "length"
    return completion.masked is None and not truncated


def has_dense_objective(algorithm: AlgorithmConfig, prompt: Prompt | None = None) -> bool:
    """True when every token, or those after `prompt`, have a gradient at any advantage: from a KL term in the loss, an
    entropy bonus, or the perception term or a twin view where the prompt has images."""
    everywhere = (algorithm.beta > 0 and not algorithm.kl_in_reward) or algorithm.entropy_coef != 0
    of_images = algorithm.perception_coef > 0 or algorithm.twin_view is not None
    return everywhere or (of_images and prompt is not None and bool(prompt.vision))


def split_by_completion(values: Tensor, completion_index: Sequence[int]) -> ByCompletion:
    """Values [M] cut where the completion changes; the tokens of one stand together in a pack."""
    cuts = [i for i in range(1, len(completion_index)) if completion_index[i] != completion_index[i - 1]]
    pieces = values.tensor_split(cuts)
    return {completion_index[start]: piece for start, piece in zip([0, *cuts], pieces, strict=True)}


def to_pack_order(kept: Mapping[int, Tensor], completion_index: Sequence[int], default: Tensor) -> Tensor:
    """Kept values in the order of a pack's tokens [M]; a completion without kept ones takes those of `default` [M]."""
    own = split_by_completion(default.detach(), completion_index)
    return torch.cat([kept.get(index, piece) for index, piece in own.items()])


def _minibatch(
    groups: Sequence[Group], items: Sequence[Item], config: GRPOConfig, ranks: Ranks, device: torch.device
) -> Minibatch:
    """Advantages [R] and weights [R]; completions of other updates get weight 0.

    The weights come from the lengths of the whole update, over all processes, in the order of its slots.
    """
    own = [(groups[i.group].slot, ranks.rank, i.index, len(i.token_ids) if i.counts else 0) for i in items]
    every = sorted(row for rows in ranks.all_gather(own, "lengths of completions") for row in rows)
    lengths = torch.tensor([length for *_, length in every], dtype=torch.long)
    scale = token_weights(config.algorithm.loss_type, lengths, config.rollout.max_completion_length)
    scale = scale * (lengths > 0)
    weights = torch.zeros(sum(len(g.completions) for g in groups), dtype=torch.float64)
    for (_, rank, index, _), weight in zip(every, scale.tolist(), strict=True):
        if rank == ranks.rank:
            weights[index] = weight
    advantages = torch.tensor([a for g in groups for a in g.advantages], dtype=torch.float64)
    acts = [acts for g in groups for acts in g.has_advantage]
    live = [
        i
        for i in items
        if float(weights[i.index]) > 0 and (has_dense_objective(config.algorithm, i.prompt) or acts[i.index])
    ]
    inputs = LossInputs(advantages.to(device), weights.to(device), int(lengths.sum()))
    several = config.algorithm.credit is not None or any(g.turn_advantages for g in groups)
    return Minibatch(items, live, inputs, _of_tokens(groups, device) if several else None)


def _of_tokens(groups: Sequence[Group], device: torch.device) -> ByCompletion:
    """Of each completion the advantages of its tokens [T], those of their turns where turns have some."""
    found: ByCompletion = {}
    for group in groups:
        of_turns = bool(group.turn_advantages)
        each = group.turn_advantages if of_turns else [(a,) for a in group.advantages]
        for c, own in zip(group.completions, each, strict=True):
            lengths = torch.tensor(c.turn_lengths if of_turns else [len(c.token_ids)], device=device)
            values = torch.tensor(own, dtype=torch.float64, device=device)
            found[len(found)] = values.repeat_interleave(lengths)
    return found
