"""The vLLM engine samples what the learner trains on: ids, log-probs, seeds, images, masks."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from helpers import tiny
from vllm_rig import Rig

from mm_grpo.rollout.engine import Request, Sampling, requests_for

TWELVE = Sampling(max_tokens=12)


def seeds(count: int, each: int, first: int = 0) -> list[range]:
    return [range(first + 1000 * i, first + 1000 * i + each) for i in range(count)]


def test_logprobs_are_the_learners_for_one_image_two_and_none(one: Rig) -> None:
    prompts = one.prompts()
    done = one.engine.generate(requests_for(prompts, seeds(3, 4), TWELVE))
    assert one.gap(prompts, done) <= 1e-5
    cold = one.engine.generate(requests_for(prompts, seeds(3, 4), Sampling(12, temperature=0.3)))
    assert one.gap(prompts, cold, temperature=0.3) <= 1e-5
    assert [c.token_ids for c in cold] != [c.token_ids for c in done]
    for c in done:
        assert c.text == one.processor.decode(c.token_ids)
        assert c.weight_versions == ((0, 0),)
        assert c.finish_reason == ("length" if len(c.token_ids) == 12 else "stop")


@pytest.mark.field_bug("unread-seed")
def test_equal_seeds_give_equal_completions_however_they_are_asked_for(one: Rig) -> None:
    assert re.fullmatch(r"vLLM \d+\.\d+\S*, model runner 1", one.engine.sampler_version)  # a CPU has no other
    prompts = one.prompts()
    requests = requests_for(prompts, seeds(3, 4), TWELVE)
    done = one.engine.generate(requests)
    backwards = one.engine.generate(requests[::-1])[::-1]
    split = one.engine.generate(requests[:5]) + one.engine.generate(requests[5:])
    for other in (backwards, split):
        assert [c.token_ids for c in other] == [c.token_ids for c in done]
        for a, b in zip(other, done, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.field_bug("sampled-image-token")
def test_media_tokens_cannot_be_sampled_even_when_the_model_wants_them(one: Rig) -> None:
    prompt = one.prompts()[0]
    media = sorted(one.processor.media_token_ids)
    # as inputs they would change the rest
    unread = [t for t in media if t not in prompt.engine_prompt.token_ids]
    ordinary = one.engine.generate(requests_for([prompt], [range(8)], TWELVE))
    states: list[torch.Tensor] = []
    hook = one.model.lm_head.register_forward_pre_hook(lambda m, args: states.append(args[0][0, -1]))
    one.expected(prompt, [0])
    hook.remove()
    with torch.no_grad():
        one.model.lm_head.weight[unread] = 20.0 * states[0] / states[0].norm()
    assert max(one.expected(prompt, [t], mask=False)[0] for t in unread) > -2.0  # one would surely be drawn
    one.send(1)
    others = {"temperature": 0.3}, {"top_p": 0.5}, {"temperature": 0.0}
    for sampling in (TWELVE, *(Sampling(12, **options) for options in others)):
        done = one.engine.generate(requests_for([prompt], [range(8)], sampling))
        assert not {t for c in done for t in c.token_ids} & set(media)
        if sampling.top_p == 1.0:
            assert one.gap([prompt], done, temperature=sampling.temperature or 1.0) <= 1e-5
    again = one.engine.generate(requests_for([prompt], [range(8)], TWELVE))
    assert [c.token_ids[0] for c in again] == [c.token_ids[0] for c in ordinary]


def test_evaluation_sampling(one: Rig) -> None:
    prompt = one.prompts()[1]
    greedy = one.engine.generate([Request(prompt, 9, Sampling(8, temperature=0.0))] * 2)
    narrow = one.engine.generate(requests_for([prompt], [range(3)], Sampling(8, top_k=1)))
    assert {c.token_ids for c in (*greedy, *narrow)} == {greedy[0].token_ids}
    assert one.gap([prompt], greedy) <= 1e-5
    fresh = one.engine.generate([Request(prompt, 3, Sampling(20, temperature=0.0, repetition_penalty=1e6))])
    assert len(set(fresh[0].token_ids)) == len(fresh[0].token_ids)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(one: Rig) -> None:
    prompt = one.prompts()[2]
    done = one.engine.generate(requests_for([prompt], [range(64)], Sampling(max_tokens=40)))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] in one.processor.stop_token_ids) == (c.finish_reason == "stop")
        assert not set(c.token_ids[:-1]) & one.processor.stop_token_ids
        assert len(c.logprobs) == len(c.token_ids)


def test_more_prompts_than_one_step_holds(one: Rig) -> None:
    """Seeded requests that are prefilled in pieces stop the CPU sampler; none may be."""
    text = "xyzq" * 120
    prompts = [one.prompt(f"long-{i}", tiny.picture(i), text=text) for i in range(20)]
    assert sum(len(p.token_ids) for p in prompts) > 8192
    done = one.engine.generate(requests_for(prompts, seeds(20, 2), Sampling(4)))
    assert one.gap(prompts[:3], done[:6]) <= 1e-5


def test_a_seed_that_would_hang_the_worker_is_refused(one: Rig) -> None:
    with pytest.raises(ValueError, match=r"one: seed 4294967296 is outside"):
        one.engine.generate([Request(one.prompts()[0], 1 << 32, TWELVE)])


def test_the_process_is_left_as_it_was(untied: tuple[Rig, dict[str, Any], dict[str, Any]]) -> None:
    from vllm.model_executor.models import registry

    _, before, after = untied
    assert registry._run_in_subprocess(os.getpid) == os.getpid()  # a new model's class is inspected here
    for key in before:
        assert after[key] == before[key], f"starting vLLM changed {key}"
