"""What a checkpoint keeps of the steps that were sampled ahead (rollout/pipeline.py): groups that are finished and not
learned from, with completions, log-probs, versions and rewards, whole, and what an eager run had asked for.

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
from mm_grpo.rollout.pipeline import Ahead
from mm_grpo.run.json_records import decode, encode
from mm_grpo.run.rollout_log import plain_value
from mm_grpo.types import Group, Picture, Prompt, Tail

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.collect import Collector

KEY = "ahead"
MADE_AGAIN = (
    "prompt", "kl", "advantages", "turn_advantages", "tail", "environment", "own", "times", "scoring",
)  # fmt: skip
"""Fields of a rollout, its groups and completions that are not kept with them."""
Values = dict[str, Any]


def pack_ahead(ahead: Ahead | None, ranks: Ranks) -> Values:
    """{KEY: text} of what all processes have ahead, on the first one; {} on the others. Collective.

    {} where nothing is ever ahead.
    """
    if ahead is None:
        return {}
    own: dict[str, list[Any]] = {
        # of several processes the first has every completion already, but for what only its owner can run
        "tails": [
            [step, group.slot, [encode(c.tail, ("vision",)) for c in group.completions]]
            for step, rollout in ahead.rollouts.items()
            for group in rollout.groups
        ],
        "groups": [_packed_group(group) for group in ahead.groups],
        "asked": list(ahead.asked),
        "slots": list(ahead.slots.items()),
        "counts": list(ahead.counts.items()),
    }
    every = ranks.gather(own, "the steps ahead")
    if every is None:
        return {}
    rollouts = [
        {
            **encode(replace(rollout, sampled=[]), MADE_AGAIN),
            "sampled": list(map(_packed_group, rollout.sampled)),
        }
        for _, rollout in sorted(ahead.rollouts.items())
    ]
    packed = {"rollouts": rollouts, **{name: [one for part in every for one in part[name]] for name in own}}
    text = json.dumps(packed, separators=(",", ":"))
    return {KEY: base64.b85encode(zlib.compress(text.encode(), 1)).decode()}


def unpack_ahead(
    extra: Mapping[str, Any], collector: Collector, processor: Processor, ranks: Ranks
) -> Ahead | None:
    """This process's part of what `pack_ahead` kept in a checkpoint's extra; None where there is nothing."""
    if KEY not in extra:
        return None
    packed = json.loads(zlib.decompress(base64.b85decode(extra[KEY])))
    tails = {(step, slot): found for step, slot, found in packed["tails"]}
    rollouts = {
        values["step"]: _rollout(values, tails, collector, processor, ranks) for values in packed["rollouts"]
    }
    slots: dict[int, list[int]] = {}
    for step, of_step in packed["slots"]:
        slots[step] = sorted([*slots.get(step, []), *of_step])
    counts: dict[int, dict[str, int]] = {step: {} for step in slots}
    for step, of_step in packed["counts"] if ranks.first else ():  # they are summed over the processes
        for name, value in of_step.items():
            counts[step][name] = counts[step].get(name, 0) + value
    # who has a group that no step has yet does not matter, but that each process has as many as it has slots for
    owners = [slot % ranks.world for step in sorted(slots) for slot in slots[step]]
    groups = {tuple(values["place"]): values for values in packed["groups"]}
    places = sorted([*groups, *(tuple(place) for place in packed["asked"])])
    own = [place for place, owner in zip(places, owners, strict=True) if owner == ranks.rank]
    finished = [place for place in own if place in groups]
    return Ahead(
        rollouts,
        _groups([groups[place] for place in finished], finished, collector, processor),
        [place for place in own if place not in groups],
        {step: [slot for slot in found if slot % ranks.world == ranks.rank] for step, found in slots.items()},
        counts,
    )


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
    places = [tuple(one["place"] or (step, one["slot"])) for one in wanted]
    groups = _groups(packed, places, collector, processor)
    own = {group.slot: group for one, group in zip(wanted, groups, strict=True) if is_own(one)}
    return Rollout(**{**values, "sampled": groups if ranks.first else [], "own": own})


def _packed_group(group: Group) -> Values:
    extra = {name: [plain_value(value) for value in values] for name, values in group.extra.items()}
    completions = tuple(
        # arguments of a model's call were JSON, those of a program's own may be anything
        replace(
            one,
            turns=tuple(
                replace(t, arguments=json.loads(json.dumps(t.arguments, default=str))) for t in one.turns
            ),
        )
        for one in group.completions
    )
    packed: Values = encode(replace(group, extra=extra, completions=completions), MADE_AGAIN)
    return packed


def _groups(
    packed: Sequence[Values],
    places: Sequence[tuple[int, int]],
    collector: Collector,
    processor: Processor,
) -> list[Group]:
    """Groups with their prompts made again; `places` say which rows those are of."""
    at = [(*place, one["attempt"]) for one, place in zip(packed, places, strict=True)]
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
