"""Load balancing: groups are moved between processes before an update, so that none waits long for the busiest.

Slots are assigned to processes before anything is known of them. After scoring, groups without advantage leave,
answers turn out long or short, and one process may hold most of what is left; every one waits for it at each
backward. What moves is a group with its image tensors, so a move has to bring enough (`GAIN`). An update is a sum
over tokens, so where they are run does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner.controls import ANSWERS
from mm_grpo.learner.twin_view import BOX
from mm_grpo.types import EnginePrompt, Group, Prompt, Sample

GAIN = 0.05
"""Least share of the mean load by which a move has to relieve the busier of two processes."""

Cost = tuple[int, int]
"""Of a group: which update it belongs to, and how many tokens it has to run (0 when it is left out)."""


def balanced(
    groups: Sequence[Group],
    cost: Callable[[Group], Cost],
    ranks: Ranks,
    *,
    images: bool = False,
    originals: bool = False,
) -> list[Group]:
    """This process's groups after the exchange, in the order of their slots; what moves keeps its `images` where asked
    to, at their final size or as the `originals`. Collective."""
    shares = ranks.all_gather({g.slot: cost(g) for g in groups}, "loads")
    moves: dict[int, int] = {}
    for update in sorted({c[0] for share in shares for c in share.values()}):
        loads = [{slot: c for slot, (own, c) in share.items() if own == update} for share in shares]
        moves |= plan_moves(loads)
    if not moves:
        return list(groups)
    parcels: list[list[Group]] = [[] for _ in range(ranks.world)]
    for group in groups:
        if group.slot in moves:
            prompt = _moved(group.prompt, images=images, originals=originals)
            parcels[moves[group.slot]].append(replace(group, prompt=prompt, parts={}, extra={}))
    received = [group for parcel in ranks.all_to_all(parcels, "groups") for group in parcel]
    kept = [g for g in groups if g.slot not in moves]
    return sorted([*kept, *received], key=lambda g: g.slot)


def plan_moves(loads: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Assign slots to processes, from the costs by slot that each process holds.

    The busiest process gives the least busy one the group that evens the two out best, as long as that relieves it
    by `GAIN`.

    >>> plan_moves([{0: 8, 2: 6, 4: 2}, {1: 2, 3: 0}])
    {2: 1}
    """
    held = [dict(load) for load in loads]
    mean = sum(sum(load.values()) for load in held) / len(held)
    moves: dict[int, int] = {}
    while True:
        totals = [sum(load.values()) for load in held]
        heavy, light = totals.index(max(totals)), totals.index(min(totals))
        gap = totals[heavy] - totals[light]
        candidates = [(abs(gap - 2 * c), c, slot) for slot, c in held[heavy].items() if 0 < c < gap]
        if not candidates:
            return moves
        left, _, slot = min(candidates)
        if (gap - left) / 2 < GAIN * mean:
            return moves
        held[light][slot] = held[heavy].pop(slot)
        moves[slot] = light


def _moved(prompt: Prompt, *, images: bool, originals: bool) -> Prompt:
    """What the learner needs of a prompt; with `images` it can be laid out anew, and lend them (controls.py)."""
    if not images:
        return replace(prompt, sample=Sample(prompt.uid, ()), engine_prompt=EnginePrompt((), ()))
    columns = {name: value for name, value in prompt.sample.columns.items() if name in (*ANSWERS, BOX)}
    pictures = prompt.sample.images if originals else prompt.engine_prompt.images
    sample = replace(prompt.sample, images=pictures, columns=columns, row=None)
    return replace(prompt, sample=sample)
