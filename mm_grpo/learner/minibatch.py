"""Minibatches: the completions of one optimizer update, with the weights and log-probabilities that the loss needs.

The slots of a step are cut into `updates_per_step` equal runs, and each makes one `Minibatch`. Completions are
identified by `Item.index`, their place in this process's step; a pack's tokens name it in `completion_index`.
Values that must outlive a pack are kept by completion (`ByCompletion`) and brought back into a pack's order.

Axes: [R], the completions of this process's step; [T], tokens of one; [M], completion tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.learner.logprobs import PackResult
from mm_grpo.learner.loss import LossInputs, PackTokens
from mm_grpo.learner.pack import DUMMY, Item, Pack
from mm_grpo.types import Completion, Group, Prompt

ByCompletion = dict[int, Tensor]
"""Values [T] of completions, by `Item.index`."""


@dataclass(frozen=True)
class Minibatch:
    """The completions of one update that this process runs."""

    items: Sequence[Item]
    live: Sequence[Item]
    """The items that can change the update: they carry weight, and an advantage or a dense objective."""
    inputs: LossInputs
    advantages: ByCompletion | None = None
    """Advantages of single tokens, if turns (`algorithm.turn_gamma`) or tokens have their own."""
    token_mask: ByCompletion | None = None
    """1 for tokens that keep their term of the loss, 0 for others; None if all keep it."""
    kl_states: ByCompletion = field(default_factory=dict)
    """Hidden states [T, D] of another distribution q, for the KL from it (`PackResult.kl`), of any of the items."""

    def with_kl_states(self, states: ByCompletion) -> Minibatch:
        """Return a copy with `kl_states`, which one loss feature may set."""
        if self.kl_states:
            raise ConfigError("algorithm.features: two features compare the policy with states; turn one off")
        return replace(self, kl_states=states)


@dataclass
class LogProbs:
    """Log-probs [T] by completion under the policies that the loss compares."""

    engine: Sequence[Sequence[float]]
    """The samples' own, [R][T]."""
    reference: ByCompletion | None = None
    """None if the loss needs none."""
    old: ByCompletion = field(default_factory=dict)
    """The policy at the start of the step, of completions for which it is not the present one."""
    first: ByCompletion = field(default_factory=dict)
    """Each completion's first pass with gradients."""

    def pack_tokens(self, pack: Pack, result: PackResult, minibatch: Minibatch) -> PackTokens:
        """Return the tokens [M] of the pack that `result` has, with their values under the other policies.

        The pack may hold further tokens behind them. If a completion had no pass with gradients yet, this pass's
        log-probs are kept as its first.
        """
        present = result.logp.detach()
        index = pack.completion_index[: len(present)]
        order = index.tolist()
        # what is there wins: further iterations must not replace the first pass
        self.first = {**split_by_completion(present, order), **self.first}
        engine = torch.tensor([value for i in dict.fromkeys(order) for value in self.engine[i]])

        def in_pack_order(values: ByCompletion | None) -> Tensor | None:
            return None if values is None else to_pack_order(values, order, present)

        return PackTokens(
            completion_index=index.to(present.device),
            logp=result.logp,
            entropy=result.entropy,
            old_logp=to_pack_order(self.old, order, present) if self.old else present,
            sampling_logp=engine.to(present.device),
            ref_logp=in_pack_order(self.reference),
            mask=in_pack_order(minibatch.token_mask),
            advantages=in_pack_order(minibatch.advantages),
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
        complete = all(0 < len(c.token_ids) == len(c.logprobs) for c in group.completions)
        if not complete or len(group.advantages) != len(group.completions):
            raise ValueError(
                f"{group.prompt.uid}: each completion needs tokens, a log-prob for each of them, and an advantage"
            )


def make_minibatches(
    groups: Sequence[Group],
    config: GRPOConfig,
    ranks: Ranks,
    device: torch.device,
    has_gradient: Sequence[Callable[[Prompt], bool]] = (),
) -> list[Minibatch]:
    """Return one minibatch for each update of the step, without items if its slots are all empty. Collective.

    If one of `has_gradient` is true for a prompt, tokens after it have a gradient at advantage 0 too.
    """
    items = make_items(groups, config.algorithm)
    updates, prompts = config.optim.updates_per_step, config.rollout.prompts_per_step
    advantages = torch.tensor([a for g in groups for a in g.advantages], dtype=torch.float64).to(device)
    has_advantage = [flag for g in groups for flag in g.has_advantage]
    of_tokens = token_advantages(groups, device) if any(g.turn_advantages for g in groups) else None
    dense = has_dense_objective(config.algorithm)
    minibatches = []
    for update in range(updates):
        # by slots and not by groups: an update has the same slots on any number of processes
        share = [i for i in items if groups[i.group].slot * updates // prompts == update]
        weights, tokens = _weights(groups, share, config, ranks)
        live = [
            i
            for i in share
            if float(weights[i.index]) > 0
            and (dense or has_advantage[i.index] or any(f(i.prompt) for f in has_gradient))
        ]
        inputs = LossInputs(advantages, weights.to(device), tokens)
        minibatches.append(Minibatch(share, live, inputs, of_tokens))
    return minibatches


def make_items(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Item]:
    """Return the completions of some groups, in order; `Item.group` is the place of the group."""
    pairs = [(number, group, c) for number, group in enumerate(groups) for c in group.completions]
    return [
        Item(index, number, group.prompt, c.token_ids, enters_loss(c, algorithm), c.tail)
        for index, (number, group, c) in enumerate(pairs)
    ]


def enters_loss(completion: Completion, algorithm: AlgorithmConfig) -> bool:
    """Return False for a masked completion, and for a truncated one if the config leaves these out of the loss."""
    truncated = algorithm.mask_truncated_completions and completion.finish_reason == "length"
    return completion.masked is None and not truncated


def has_dense_objective(algorithm: AlgorithmConfig) -> bool:
    """Return True if every token has a gradient at any advantage, from a KL term in the loss or an entropy bonus."""
    return (algorithm.beta > 0 and not algorithm.kl_in_reward) or algorithm.entropy_coef != 0


def split_by_completion(values: Tensor, completion_index: Sequence[int]) -> ByCompletion:
    """Cut values [M] at each change of the completion, whose tokens stand together in a pack; leave out dummies'."""
    cuts = [i for i in range(1, len(completion_index)) if completion_index[i] != completion_index[i - 1]]
    pieces = values.tensor_split(cuts)
    pairs = [(completion_index[start], piece) for start, piece in zip([0, *cuts], pieces, strict=True)]
    return {index: piece for index, piece in pairs if index != DUMMY}


def to_pack_order(values: Mapping[int, Tensor], completion_index: Sequence[int], default: Tensor) -> Tensor:
    """Return values in the order of a pack's tokens [M]; a completion without values takes `default` [M]."""
    pieces = split_by_completion(default.detach(), completion_index)
    return torch.cat([values.get(index, piece) for index, piece in pieces.items()])


def _weights(
    groups: Sequence[Group], items: Sequence[Item], config: GRPOConfig, ranks: Ranks
) -> tuple[Tensor, int]:
    """Return weights [R] of the tokens of completions, 0 in other updates, and the count of tokens of the update.

    The weights come from the lengths of the whole update, over all processes, in the order of its slots.
    """
    local = [(groups[i.group].slot, ranks.rank, i.index, len(i.token_ids) if i.counts else 0) for i in items]
    # sorted, so that sums over the lengths are added up in one order on any number of processes
    rows = sorted(row for share in ranks.all_gather(local, "lengths of completions") for row in share)
    lengths = torch.tensor([length for *_, length in rows], dtype=torch.long)
    scale = LOSSES[config.algorithm.loss_type].weights(lengths, config.rollout.max_completion_length)
    scale = scale * (lengths > 0)
    weights = torch.zeros(sum(len(g.completions) for g in groups), dtype=torch.float64)
    for (_, rank, index, _), weight in zip(rows, scale.tolist(), strict=True):
        if rank == ranks.rank:
            weights[index] = weight
    return weights, int(lengths.sum())


def token_advantages(groups: Sequence[Group], device: torch.device) -> ByCompletion:
    """Return the advantages [T] of each completion's tokens, from its turns if turns have some."""
    advantages: ByCompletion = {}
    for group in groups:
        of_turns = bool(group.turn_advantages)
        rows = group.turn_advantages if of_turns else [(a,) for a in group.advantages]
        for c, row in zip(group.completions, rows, strict=True):
            lengths = torch.tensor(c.turn_lengths if of_turns else [len(c.token_ids)], device=device)
            values = torch.tensor(row, dtype=torch.float64, device=device)
            advantages[len(advantages)] = values.repeat_interleave(lengths)
    return advantages
