"""What a checkpoint keeps of the steps that were sampled ahead (rollout/pipeline.py): groups that are finished and not
learned from, with completions, log-probs, versions and rewards, whole, and what an eager run had asked for.

It is one compressed text in the manifest, under `extra`, so the manifest's digest covers it. Prompts are not kept: they
are made again from their rows. Nor are advantages, which follow from the rewards, and the environments of
conversations, which only rewards look at.

The first process writes what all of them have, and each takes its own from it, so another number of them may go on.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from mm_grpo.rollout.collect import Rollout
from mm_grpo.rollout.pipeline import Ahead
from mm_grpo.run.rollout_log import plain_value
from mm_grpo.types import Completion, Group, Picture, Prompt, Tail, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.processors.base import ConversationProcessor, Processor
    from mm_grpo.rollout.collect import Collector

KEY = "ahead"
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
            [step, group.slot, [_packed_tail(c.tail) for c in group.completions]]
            for step, rollout in ahead.rollouts.items()
            for group in rollout.groups
        ],
        "groups": [_packed_group(group) for group in ahead.groups],
        "asked": [list(place) for place in ahead.asked],
        "slots": list(ahead.slots.items()),
        "counts": list(ahead.counts.items()),
    }
    every = ranks.gather(own, "the steps ahead")
    if every is None:
        return {}
    packed = {
        "rollouts": [_packed_rollout(rollout) for _, rollout in sorted(ahead.rollouts.items())],
        **{name: [one for part in every for one in part[name]] for name in own},
    }
    text = json.dumps(packed, separators=(",", ":"), allow_nan=True)
    return {KEY: base64.b85encode(zlib.compress(text.encode(), 1)).decode()}


def unpack_ahead(
    extra: Mapping[str, Any], collector: Collector, processor: Processor, ranks: Ranks
) -> Ahead | None:
    """This process's part of what `pack_ahead` kept in a checkpoint's extra; None where there is nothing."""
    if KEY not in extra:
        return None
    packed = json.loads(zlib.decompress(base64.b85decode(extra[KEY])))
    tails = {(step, slot): found for step, slot, found in packed["tails"]}
    rollouts = {}
    for values in packed["rollouts"]:
        rollout = _rollout(values, tails, collector, processor, ranks)
        rollouts[rollout.step] = rollout
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
    finished = [groups[place] for place in own if place in groups]
    return Ahead(
        rollouts,
        _groups(finished, [tuple(v["place"]) for v in finished], collector, processor),
        [place for place in own if place not in groups],
        {step: [slot for slot in found if slot % ranks.world == ranks.rank] for step, found in slots.items()},
        counts,
    )


# one step ------------------------------------------------------------------------------------

COUNTED = ("attempts", "dropped", "images", "decoded", "stale")


def _packed_rollout(rollout: Rollout) -> Values:
    return {
        "step": rollout.step,
        "sampled": [_packed_group(group) for group in rollout.sampled],
        "metrics": rollout.metrics,
        "zero_std_slots": rollout.zero_std_slots,
        **{name: getattr(rollout, name) for name in COUNTED},
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
    wanted = [one for one in values["sampled"] if ranks.first or _is_own(one, last, ranks)]
    packed = [
        {**one, "tails": tails.get((step, one["slot"]))} if one["attempt"] == last[one["slot"]] else one
        for one in wanted
    ]
    places = [tuple(one["place"] or (step, one["slot"])) for one in wanted]
    groups = _groups(packed, places, collector, processor)
    rollout = Rollout(step, metrics=values["metrics"], zero_std_slots=values["zero_std_slots"])
    for name in COUNTED:
        setattr(rollout, name, values[name])
    rollout.sampled = groups if ranks.first else []
    rollout.own = {
        group.slot: group for one, group in zip(wanted, groups, strict=True) if _is_own(one, last, ranks)
    }
    return rollout


def _is_own(packed: Values, last: Mapping[int, int], ranks: Ranks) -> bool:
    slot = packed["slot"]
    return bool(slot % ranks.world == ranks.rank and packed["attempt"] == last[slot])


# one group -----------------------------------------------------------------------------------


def _packed_group(group: Group) -> Values:
    return {
        "slot": group.slot,
        "attempt": group.attempt,
        "place": group.place,
        "rewards": group.rewards,
        "parts": {name: list(values) for name, values in group.parts.items()},
        "extra": {name: [plain_value(value) for value in values] for name, values in group.extra.items()},
        "turn_rewards": group.turn_rewards,
        "completions": [_packed_completion(c) for c in group.completions],
    }


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
    return [
        Group(
            slot=one["slot"],
            prompt=prompts[where],
            completions=tuple(
                _completion(values, tail, prompts[where], processor, pictures)
                for values, tail in zip(
                    one["completions"], one.get("tails") or [None] * len(one["completions"]), strict=True
                )
            ),
            rewards=tuple(one["rewards"]),
            attempt=one["attempt"],
            parts=one["parts"],
            extra=one["extra"],
            turn_rewards=tuple(map(tuple, one["turn_rewards"])),
            place=tuple(one["place"]) if one["place"] is not None else None,
        )
        for one, where in zip(packed, at, strict=True)
    ]


def _packed_completion(completion: Completion) -> Values:
    names = ("token_ids", "logprobs", "text", "finish_reason", "seed", "weight_versions")
    values = {name: getattr(completion, name) for name in (*names, "environment_reward", "masked")}
    if completion.turns:
        values["turns"] = [_packed_turn(turn) for turn in completion.turns]
    return values


def _completion(
    values: Values, tail: Values | None, prompt: Prompt, processor: Processor, pictures: dict[str, Picture]
) -> Completion:
    lists = {name: tuple(values[name]) for name in ("token_ids", "logprobs")}
    return Completion(
        **{
            **values,
            **lists,
            "weight_versions": tuple((start, version) for start, version in values["weight_versions"]),
            "turns": tuple(_turn(turn) for turn in values.get("turns", ())),
            "tail": None if tail is None else _tail(tail, prompt, processor, pictures),
        }
    )


def _packed_tail(tail: Tail | None) -> Values | None:
    if tail is None:
        return None
    return {
        "token_ids": tail.token_ids,
        "sampled": tail.sampled,
        "position_ids": tail.position_ids.tolist(),
        "pictures": [_packed_image(picture.image) for picture in tail.pictures],
    }


def _tail(values: Values, prompt: Prompt, processor: Processor, pictures: dict[str, Picture]) -> Tail:
    """A tail whose pictures are made again from their images, equal ones once."""
    for image in values["pictures"]:
        if image not in pictures:
            made = cast("ConversationProcessor", processor)  # it made them before
            pictures[image] = made.picture(_image(image), row=prompt.uid)
    return Tail(
        tuple(values["token_ids"]),
        tuple(values["sampled"]),
        torch.tensor(values["position_ids"], dtype=prompt.position_ids.dtype),
        tuple(pictures[image] for image in values["pictures"]),
    )


def _packed_turn(turn: Turn) -> Values:
    names = ("role", "text", "tokens", "seed", "name", "arguments", "fault", "reward")
    values = {name: getattr(turn, name) for name in names}
    return {
        **values,
        "arguments": as_json(values["arguments"]),
        "images": list(map(_packed_image, turn.images)),
    }


def _turn(values: Values) -> Turn:
    return Turn(**{**values, "images": tuple(map(_image, values["images"]))})


def as_json(value: Any) -> Any:
    """A value as JSON has it; the arguments of a call were JSON, those of a program's own may be anything."""
    return json.loads(json.dumps(value, default=str))


def _packed_image(image: Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    return base64.b64encode(png.getvalue()).decode()


def _image(text: str) -> Image:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(text)))
    image.load()
    return image
