"""Records as JSON and back, and what a checkpoint keeps of a conversation that is not learned from."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny

from mm_grpo.distributed.ranks import Ranks
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.collect import Rollout
from mm_grpo.rollout.evaluate import Blind, Evaluation
from mm_grpo.run.inflight_state import pack_ahead, unpack_ahead
from mm_grpo.run.json_records import decode, encode
from mm_grpo.types import Completion, EnginePrompt, Group, Medium, Prompt, Sample, Tail, Turn, Video


@pytest.mark.parametrize("blind", [None, Blind("shuffled", 3, 0.5, (0.25, 0.75), None, 0.1, None)])
def test_a_record_comes_back_through_json(blind: Blind | None) -> None:
    parts = {"count": {"reward": 0.5}}, (0.25, 0.75)
    one = Evaluation(None, 0.5, 3, 0.5, *parts, parts={"iou": 1.0}, blind=blind)
    assert decode(Evaluation, json.loads(json.dumps(encode(one)))) == one


def frames_of(*media: Medium) -> list[tuple[Any, ...]]:
    """Pixels of images; times, rate and pixels of the frames of videos."""
    return [
        (m.times, m.fps, *(frame.tobytes() for frame in m.frames)) if isinstance(m, Video) else (m.tobytes(),)
        for m in media
    ]


@pytest.mark.parametrize("kind", ["images", "videos"])
def test_a_conversation_outlives_a_checkpoint(models: dict[str, Any], kind: str) -> None:
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    medium: Medium = tiny.picture(1, 56, 84) if kind == "images" else tiny.video(1, 5, 56, 84, fps=1 / 3)
    picture = processor.picture(medium, row="")
    media: dict[str, Any] = {kind: (picture.medium,)}
    tail = Tail((1, 5, 6, 3), (True, False, False, True), torch.arange(12).view(3, 4), (picture,) * 2)
    called = Turn("tool", "seen", 2, name="zoom", arguments={"x": [1, 2]}, **media)
    turns = (Turn("assistant", "look", 2, seed=9, reward=0.5), called)
    talk = Completion((1, 3), (-0.5, -1.0), "t", "stop", 9, ((0, 2),), tail=tail, turns=turns, masked="m")
    plain = Completion((1,), (-0.5,), "u", "length", 10)
    prompt = Prompt(Sample("r:0", ()), (1,), EnginePrompt((), ()), torch.zeros(3, 1, dtype=torch.int64), {})
    scores: dict[str, Any] = {"parts": {"a": [1.0, None]}, "turn_rewards": ((0.5,), ())}
    first = Group(0, prompt, (plain, plain), (0.0, 0.0))
    last = Group(0, prompt, (talk, plain), (1.0, None), attempt=1, extra={"e": [len, 3]}, **scores)
    rollout = Rollout(4, {0: last}, [first, last], attempts=2, metrics={"x": 1.5}, zero_std_slots=[3])

    kept = json.loads(json.dumps(pack_ahead({4: rollout}, Ranks())))
    collector: Any = SimpleNamespace(prompts_at=lambda places: dict.fromkeys(places, prompt))
    ahead = unpack_ahead(kept, collector, processor, Ranks())
    found = ahead[4]
    assert (found.attempts, found.metrics, found.zero_std_slots) == (2, {"x": 1.5}, [3])
    assert found.sampled[0] == first and found.local_groups[0] is found.sampled[1]
    own = found.local_groups[0]
    assert (own.rewards, own.extra) == ((1.0, None), {"e": [None, 3]})
    assert {name: getattr(own, name) for name in scores} == scores
    again, other = own.completions
    assert (again.weight_versions, again.masked, other) == (((0, 2),), "m", plain)
    assert again.turns[0] == turns[0] and again.turns[1].arguments == {"x": [1, 2]}
    assert frames_of(*getattr(again.turns[1], kind)) == frames_of(picture.medium)
    assert again.tail is not None
    assert (again.tail.token_ids, again.tail.sampled) == (tail.token_ids, tail.sampled)
    assert torch.equal(again.tail.position_ids, tail.position_ids)
    same, shared = again.tail.pictures
    assert same is shared and same.token_ids == picture.token_ids
    assert frames_of(same.medium) == frames_of(picture.medium)
    assert all(torch.equal(same.vision[name], tensor) for name, tensor in picture.vision.items())
