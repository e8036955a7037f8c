"""Steps that were sampled ahead (rollout/pipeline.py), in a checkpoint: finished groups that were not learned from.

They are one compressed text in the manifest, under `extra`, with completions, log-probs, versions and rewards. Prompts
are left out, because they are made again from their rows; so are advantages, which follow from the rewards, and the
environments of conversations, which only rewards read.

The first process writes the groups of all, and each reads its share, so another number of processes may go on.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from PIL.Image import Image

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.processors.base import ConversationProcessor, Processor
from mm_grpo.rollout.collect import Collector, Rollout
from mm_grpo.run.json_records import decode, encode
from mm_grpo.run.rollout_log import plain_value
from mm_grpo.types import Group, Picture, Prompt, Tail, Video

KEY = "ahead"
# two lists: the times of a rollout are made again, those of a video in a group are not
ROLLOUT_LEFT_OUT = ("local_groups", "times", "streamed_calls")
GROUP_LEFT_OUT = ("prompt", "kl", "advantages", "turn_advantages", "tail", "final_state")
"""Fields of a rollout, and of its groups and completions, that are made again."""
Values = dict[str, Any]


def pack_ahead(ahead: Mapping[int, Rollout], ranks: Ranks) -> Values:
    """Return {KEY: text} of the steps ahead of all processes on the first one; {} on the others. Collective."""
    if not ahead:  # then no process has any: all have the same steps
        return {}
    # the first process has every completion, but only their own process has the tails of conversations
    local_tails = [
        [step, group.slot, [encode(c.tail, ("vision",)) for c in group.completions]]
        for step, rollout in ahead.items()
        for group in rollout.groups
    ]
    tails = ranks.gather(local_tails, "the steps ahead")
    if tails is None:
        return {}
    rollouts = [
        encode(replace(rollout, sampled=[]), ROLLOUT_LEFT_OUT)
        | {"sampled": [*map(_packed_group, rollout.sampled)]}
        for _, rollout in sorted(ahead.items())
    ]
    packed = {"rollouts": rollouts, "tails": [tail for part in tails for tail in part]}
    text = json.dumps(packed, separators=(",", ":"))
    return {KEY: base64.b85encode(zlib.compress(text.encode(), 1)).decode()}


def unpack_ahead(
    extra: Mapping[str, Any], collector: Collector, processor: Processor, ranks: Ranks
) -> dict[int, Rollout]:
    """Return this process's share of the steps that `pack_ahead` put into a checkpoint's extra, by step.

    The slot of a group is left empty if the prompt that it was sampled from cannot be made again.
    """
    if KEY not in extra:
        return {}
    packed = json.loads(zlib.decompress(base64.b85decode(extra[KEY])))
    tails = {(step, slot): group_tails for step, slot, group_tails in packed["tails"]}
    rollouts = (_rollout(values, tails, collector, processor, ranks) for values in packed["rollouts"])
    return {rollout.step: rollout for rollout in rollouts}


def _rollout(
    values: Values,
    tails: Mapping[tuple[int, int], Sequence[Values | None]],
    collector: Collector,
    processor: Processor,
    ranks: Ranks,
) -> Rollout:
    """Make a rollout as it was before advantages. The first process gets all groups for rewards and the log."""
    step, attempts = values["step"], {group["slot"]: group["attempt"] for group in values["sampled"]}

    def is_last(group: Values) -> bool:
        return bool(group["attempt"] == attempts[group["slot"]])

    def is_local(group: Values) -> bool:
        return bool(group["slot"] % ranks.world == ranks.rank and is_last(group))

    packed = [
        {**group, "tails": tails.get((step, group["slot"]))} if is_last(group) else group
        for group in values["sampled"]
        if ranks.first or is_local(group)
    ]
    groups = _groups(packed, step, collector, processor)
    local_groups = {g.slot: g for value, g in zip(packed, groups, strict=True) if g and is_local(value)}
    sampled = [group for group in groups if group and ranks.first]
    dropped = values["dropped"] + groups.count(None)
    made = {"sampled": sampled, "local_groups": local_groups, "dropped": dropped}
    return Rollout(**{**values, **made, "decoded": Counter(values["decoded"])})


def _packed_group(group: Group) -> Values:
    extra = {name: [plain_value(value) for value in values] for name, values in group.extra.items()}
    packed: Values = encode(replace(group, extra=extra), GROUP_LEFT_OUT)
    return packed


def _groups(
    packed: Sequence[Values], step: int, collector: Collector, processor: Processor
) -> list[Group | None]:
    """Make the groups of a step, with their prompts from their rows; None for a group without a prompt."""
    places = [(step, group["slot"], group["attempt"]) for group in packed]
    prompts: dict[tuple[int, int, int], Prompt] = {}
    # attempt by attempt: equal rows of one attempt share a prompt
    for attempt in sorted({group["attempt"] for group in packed}):
        attempt_places = [place for place in places if place[2] == attempt]
        prompts |= collector.prompts_at(attempt_places)
    pictures: dict[str, Picture] = {}
    groups: list[Group | None] = []
    for group, place in zip(packed, places, strict=True):
        if (prompt := prompts.get(place)) is None:
            groups.append(None)
            continue
        values = dict(group)
        tails = values.pop("tails", None) or [None] * len(values["completions"])
        values["completions"] = [
            {**completion, "tail": tail and _tail(tail, prompt, processor, pictures)}
            for completion, tail in zip(values["completions"], tails, strict=True)
        ]
        groups.append(decode(Group, {**values, "prompt": prompt}))
    return groups


def _tail(values: Values, prompt: Prompt, processor: Processor, pictures: dict[str, Picture]) -> Tail:
    """Make a tail, with its pictures from their media, equal media once."""
    media = [json.dumps(picture["medium"]) for picture in values["pictures"]]
    for medium in media:
        if medium not in pictures:
            conversational = cast("ConversationProcessor", processor)  # it made the tails
            pictures[medium] = conversational.picture(
                decode(Image | Video, json.loads(medium)), row=prompt.uid
            )
    positions = torch.tensor(values["position_ids"], dtype=prompt.position_ids.dtype)
    tensors = {"position_ids": positions, "pictures": [pictures[medium] for medium in media]}
    tail: Tail = decode(Tail, {**values, **tensors})
    return tail
