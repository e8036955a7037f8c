"""Conversations of several turns with vLLM: the ids of every turn, and the log-probs of every sampled token.

rollout/test_turns.py has those of the other engine. TURNS=10000 in the environment runs that many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import calling, tiny
from helpers.configs import small_config
from helpers.passes import forward_of
from vllm_rig import Rig

from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.learner.pack import Item, layout, plan
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.engine import Request, Sampling
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.rollout.turns import TurnLoop
from mm_grpo.rollout.vllm.engine import VLLMEngine, VLLMStream
from mm_grpo.types import Completion

TURNS = int(os.environ.get("TURNS", "30"))
GENERATIONS, PROMPTS, MOST_TURNS, TOKENS = 4, 3, 4, 320


class Setting:
    """A tiny model that calls tools."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.processor: Any = load_processor(rig.settings.model, processor=f"{calling.__file__}:Calling")
        most = MOST_TURNS * 2 + 2
        self.engine = VLLMEngine(replace(rig.settings, max_images=most, max_videos=most), self.processor)
        self.engine.update_weights(rig.tensors(), 0)
        config = small_config("model", rollout={"max_turns": MOST_TURNS})
        self.toolbox = Toolbox(config, [], calling.Gallery)
        self.plan = SeedPlan(5, PROMPTS, GENERATIONS, 1, 10_000, MOST_TURNS)
        self.loop = TurnLoop(config, self.processor, self.engine, self.toolbox, self.plan, lambda: 0)
        samples = (
            tiny.sample("one", images=(tiny.picture(1),)),
            tiny.sample("two", images=(tiny.picture(2, 112, 84), tiny.picture(3, 56, 140))),
            tiny.sample("video", videos=(tiny.video(4, 5, 56, 56),)),
        )
        self.prompts = [self.processor.prompt(self.toolbox.prepare(sample)) for sample in samples]

    def step(self, step: int) -> list[Completion]:
        requests = [
            Request(prompt, seed, Sampling(TOKENS))
            for slot, prompt in enumerate(self.prompts)
            for seed in self.plan.group(step, slot)
        ]
        return self.loop.generate(requests)

    def gap(self, done: list[Completion]) -> float:
        """The largest gap between the engine's log-probs and those of the learner's packs."""
        module = forward_of(self.rig.model, self.processor)
        items = [
            Item(i, i // GENERATIONS, self.prompts[i // GENERATIONS], c.token_ids, tail=c.tail)
            for i, c in enumerate(done)
        ]
        worst = 0.0
        with torch.no_grad():
            for rows in plan(items, 4000):
                logp = module(layout(rows, self.processor.media_token_ids)).logp
                engine = torch.tensor([x for row in rows for i in row for x in done[i.index].logprobs])
                worst = max(worst, float((logp - engine).abs().max()))
        return worst


@pytest.fixture
def setting(rigs: Callable[[str], Rig]) -> Iterator[Setting]:
    """Of Qwen3-VL, whose images are more than their tokens; the run below has Qwen2.5-VL."""
    rig = rigs("qwen3_vl")
    rig.reset()
    found = Setting(rig)
    yield found
    found.toolbox.close()


@pytest.mark.long
@pytest.mark.field_bug("tool-image")
def test_what_is_learned_is_what_was_sampled(setting: Setting) -> None:
    """vLLM's ids of each turn are compared with the learner's by the engine itself, which stops where they differ."""
    turns = images = videos = step = 0
    worst = 0.0
    while turns < TURNS:
        step += 1
        done = setting.step(step)
        turns += sum(t.role == "assistant" for c in done for t in c.turns)
        images += sum(len(t.images) for c in done for t in c.turns)
        videos += sum(len(t.videos) for c in done for t in c.turns)
        worst = max(worst, setting.gap(done))
        assert all(c.run_length <= TOKENS for c in done)
    assert images > TURNS / 10 and videos > TURNS / 20
    assert worst <= 1e-5
    print(f"{turns} turns, {images} images and {videos} videos of observations, largest gap {worst:.2g}")


@pytest.mark.long
def test_a_stream_answers_as_generate_does(rigs: Callable[[str], Rig]) -> None:
    """Requests that are added while others run; each is answered when it is done, the short ones first."""
    rig = rigs("qwen2_5_vl")
    rig.reset()
    prompts = rig.prompts()
    lengths = (12, 3, 20, 6)
    requests = [Request(prompts[i % 3], 40 + i, Sampling(lengths[i % 4])) for i in range(8)]
    expected = rig.engine.generate(requests)
    order: list[int] = []
    found: dict[int, Completion] = {}
    with rig.engine.stream() as stream:
        assert isinstance(stream, VLLMStream)
        for number, request in enumerate(requests):
            assert stream.add_request(request) == number
            if number % 2:
                found |= stream.step()
        while stream.unfinished:
            done = stream.step()
            order += [number for number, _ in done]
            found |= done
    for number, other in enumerate(expected):
        one = found[number]
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.seed == other.seed
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    sizes = [len(found[number].token_ids) for number in order]
    assert order != sorted(order) and sizes[-1] == max(sizes)
    # what was not done is given up, and the engine goes on
    with rig.engine.stream() as stream:
        stream.add_request(requests[2])
        stream.step()
    assert rig.engine.generate(requests[:1])[0].token_ids == expected[0].token_ids
