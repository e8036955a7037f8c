"""What a checkpoint keeps of the steps that were sampled ahead (rollout/pipeline.py): groups that are finished and not
learned from, with completions, log-probs, versions and rewards, whole.

It is one compressed text in the manifest, under `extra`. Prompts are not kept: they are made again from their rows. Nor
are advantages, which follow from the rewards, and the environments of conversations, which only rewards look at.

The first process writes what all of them have, and each takes its own from it, so another number of them may go on.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from PIL.Image import Image

from mm_grpo.rollout.collect import Rollout
from mm_grpo.run.json_records import decode, encode
from mm_grpo.run.rollout_log import plain_value
from mm_grpo.types import Group, Picture, Prompt, Tail

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.collect import Collector

KEY = "ahead"
MADE_AGAIN = (
    "prompt", "kl", "advantages", "turn_advantages", "tail", "environment", "local_groups", "times",
    "streamed_calls",
)  # fmt: skip
"""Fields of a rollout, its groups and completions that are not kept with them."""
Values = dict[str, Any]


def pack_ahead(ahead: Mapping[int, Rollout], ranks: Ranks) -> Values:
    """{KEY: text} of the steps that all processes have ahead, on the first one; {} on the others. Collective."""
    if not ahead:  # nor has any other process any
        return {}
    # of several processes the first has every completion already, but for what only its owner can run
    own = [
        [step, group.slot, [encode(c.tail, ("vision",)) for c in group.completions]]
        for step, rollout in ahead.items()
        for group in rollout.groups
    ]
    every = ranks.gather(own, "the steps ahead")
    if every is None:
        return {}
    rollouts = [
        {
            **encode(replace(rollout, sampled=[]), MADE_AGAIN),
            "sampled": list(map(_packed_group, rollout.sampled)),
        }
        for _, rollout in sorted(ahead.items())
    ]
    packed = {"rollouts": rollouts, "tails": [one for part in every for one in part]}
    text = json.dumps(packed, separators=(",", ":"))
    return {KEY: base64.b85encode(zlib.compress(text.encode(), 1)).decode()}


def unpack_ahead(
    extra: Mapping[str, Any], collector: Collector, processor: Processor, ranks: Ranks
) -> dict[int, Rollout]:
    """This process's part of what `pack_ahead` kept in a checkpoint's extra, by step."""
    if KEY not in extra:
        return {}
    packed = json.loads(zlib.decompress(base64.b85decode(extra[KEY])))
    tails = {(step, slot): found for step, slot, found in packed["tails"]}
    return {
        values["step"]: _rollout(values, tails, collector, processor, ranks) for values in packed["rollouts"]
    }


def _rollout(
    values: Values,
    tails: Mapping[tuple[int, int], Sequence[Values | None]],
    collector: Collector,
    processor: Processor,
    ranks: Ranks,
) -> Rollout:
    """A rollout as it was before advantages. The first process has the groups of all, for rewards and the log."""
    step, last = values["step"], {one["slot"]: one["attempt"] for one in values["sampled"]}

    def is_own(one: Values) -> bool:
        return bool(one["slot"] % ranks.world == ranks.rank and one["attempt"] == last[one["slot"]])

    wanted = [one for one in values["sampled"] if ranks.first or is_own(one)]
    packed = [
        {**one, "tails": tails.get((step, one["slot"]))} if one["attempt"] == last[one["slot"]] else one
        for one in wanted
    ]
    groups = _groups(packed, step, collector, processor)
    own = {group.slot: group for one, group in zip(wanted, groups, strict=True) if is_own(one)}
    return Rollout(**{**values, "sampled": groups if ranks.first else [], "local_groups": own})


def _packed_group(group: Group) -> Values:
    extra = {name: [plain_value(value) for value in values] for name, values in group.extra.items()}
    packed: Values = encode(replace(group, extra=extra), MADE_AGAIN)
    return packed


def _groups(packed: Sequence[Values], step: int, collector: Collector, processor: Processor) -> list[Group]:
    """Groups of a step with their prompts made again."""
    at = [(step, one["slot"], one["attempt"]) for one in packed]
    prompts: dict[tuple[int, int, int], Prompt] = {}
    for attempt in sorted({one["attempt"] for one in packed}):  # an attempt's equal rows were one prompt
        of_attempt = [place for place in at if place[2] == attempt]
        prompts |= zip(of_attempt, collector.prompts_at(of_attempt), strict=True)
    pictures: dict[str, Picture] = {}
    groups = []
    for one, where in zip(packed, at, strict=True):
        values, prompt = dict(one), prompts[where]
        tails = values.pop("tails", None) or [None] * len(values["completions"])
        values["completions"] = [
            {**completion, "tail": tail and _tail(tail, prompt, processor, pictures)}
            for completion, tail in zip(values["completions"], tails, strict=True)
        ]
        groups.append(decode(Group, {**values, "prompt": prompt}))
    return groups


def _tail(values: Values, prompt: Prompt, processor: Processor, pictures: dict[str, Picture]) -> Tail:
    """A tail whose pictures are made again from their images, equal ones once."""
    images = [picture["image"] for picture in values["pictures"]]
    for image in images:
        if image not in pictures:
            made = cast("ConversationProcessor", processor)  # it made them before
            pictures[image] = made.picture(decode(Image, image), row=prompt.uid)
    positions = torch.tensor(values["position_ids"], dtype=prompt.position_ids.dtype)
    known = {"position_ids": positions, "pictures": [pictures[image] for image in images]}
    tail: Tail = decode(Tail, {**values, **known})
    return tail
