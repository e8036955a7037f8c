"""Values of a pack's tokens, kept by completion: how they are cut apart and put back in a pack's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ByOwner = dict[int, Tensor]
"""Values [T] of completions, by `Item.index`."""


def split_by_owner(values: Tensor, owners: Sequence[int]) -> ByOwner:
    """Values [M] cut where the owner changes; each completion's tokens stand together in a pack."""
    cuts = [i for i in range(1, len(owners)) if owners[i] != owners[i - 1]]
    pieces = values.tensor_split(cuts)
    return {owners[start]: piece for start, piece in zip([0, *cuts], pieces, strict=True)}


def in_order(kept: Mapping[int, Tensor], owners: Sequence[int], like: Tensor) -> Tensor:
    """Kept values in the order of a pack's tokens; a completion that none are kept of uses its own in `like` [M]."""
    own = split_by_owner(like.detach(), owners)
    return torch.cat([kept.get(index, piece) for index, piece in own.items()])
