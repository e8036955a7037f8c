"""The embedded engine: own noise per row, masked media. Its log-probs are those of transformers' forward for every
family: tests/processors/test_families.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny
from transformers import AutoModelForImageTextToText

from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Prompt

pytestmark = pytest.mark.lowest

TWELVE = Sampling(max_tokens=12)


class Setup:
    def __init__(self, path: Any) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self.processor: Processor = load_processor(str(path))
        self.engine = TransformersEngine(self.model, self.processor)

    def prompts(self) -> list[Prompt]:
        rows = [
            tiny.sample("r:0", "what", (tiny.picture(1), tiny.picture(2, 56, 112))),
            tiny.sample("r:1", "a longer question with no picture"),
            tiny.sample("r:2", "what", (tiny.picture(3, 112, 56),)),
        ]
        return [self.processor.prompt(row) for row in rows]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_5", "gemma3"])
def each(request: pytest.FixtureRequest, models: dict[str, Any]) -> Setup:
    """Whose caches differ: attention to all, states of linear attention, windows and images that look ahead."""
    return Setup(models[request.param])


@pytest.fixture(scope="module")
def setup(models: dict[str, Any]) -> Setup:
    """One family: sampling never asks which."""
    return Setup(models["qwen2_5_vl"])


@pytest.mark.slow
def test_a_completion_is_the_same_alone_and_in_any_batch(each: Setup) -> None:
    prompts = each.prompts()
    requests = requests_for(prompts, [range(100 * i, 100 * i + 4) for i in range(3)], TWELVE)
    together = each.engine.generate(requests)
    alone = [each.engine.generate([r])[0] for r in requests]
    small = TransformersEngine(each.model, each.processor, max_rows=5).generate(requests)
    backwards = each.engine.generate(requests[::-1])[::-1]
    for others in (alone, small, backwards):
        assert [c.token_ids for c in others] == [c.token_ids for c in together]
        for one, other in zip(others, together, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert [c.seed for c in together] == [r.seed for r in requests]
    assert len({c.token_ids for c in together}) == len(together)


@pytest.mark.field_bug("sampled-image-token")
def test_media_tokens_cannot_be_sampled_even_when_the_model_wants_them(models: dict[str, Any]) -> None:
    setup = Setup(models["qwen2_5_vl"])
    media = sorted(setup.processor.media_token_ids)
    prompts = setup.prompts()[1:2]
    ordinary = setup.engine.generate(requests_for(prompts, [range(8)], TWELVE))
    setup.model.lm_head.register_forward_hook(
        lambda m, i, out: out.index_add(
            -1, torch.tensor(media), out.new_full((*out.shape[:-1], len(media)), 50.0)
        )
    )
    assert max(setup.engine.score(prompts[0], media)) > -3.0  # unmasked, one of them would be taken
    assert setup.engine.generate(requests_for(prompts, [range(8)], TWELVE)) == ordinary
    for sampling in (TWELVE, Sampling(12, temperature=0.0), Sampling(12, top_p=0.5)):
        done = setup.engine.generate(requests_for(prompts, [range(8)], sampling))
        assert not {t for c in done for t in c.token_ids} & set(media)


def test_sampling_follows_the_distribution(setup: Setup) -> None:
    """Frequencies of the first token over 4,000 seeds against the engine's own log-probs."""
    prompt = setup.prompts()[1]
    with torch.no_grad():
        before = setup.model.lm_head.weight.clone()
        setup.model.lm_head.weight.mul_(20.0)  # a peaked distribution has frequencies worth comparing
    try:
        one = Sampling(max_tokens=1)
        engine = TransformersEngine(setup.model, setup.processor, max_rows=4000)
        done = engine.generate(requests_for([prompt], [range(4000)], one))
    finally:
        with torch.no_grad():
            setup.model.lm_head.weight.copy_(before)
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for c in done:
        counts[c.token_ids[0]] = counts.get(c.token_ids[0], 0) + 1
        probability[c.token_ids[0]] = float(torch.tensor(c.logprobs[0]).exp())
    for token, p in probability.items():
        if p > 0.01:
            assert counts[token] / 4000 == pytest.approx(p, abs=4.5 * (p * (1 - p) / 4000) ** 0.5)
    assert max(probability.values()) > 0.05


def test_a_stop_token_ends_a_row_and_the_others_go_on(setup: Setup) -> None:
    prompt = setup.prompts()[2]
    stop = next(iter(setup.processor.stop_token_ids))
    done = setup.engine.generate(requests_for([prompt], [range(64)], Sampling(max_tokens=40)))
    ended = [c for c in done if c.finish_reason == "stop"]
    assert ended, "64 rows of 40 tokens over 270 entries reach the end token"
    for c in done:
        assert (c.token_ids[-1] == stop) == (c.finish_reason == "stop")
        assert stop not in c.token_ids[:-1]
        assert c.finish_reason == "stop" or len(c.token_ids) == 40
        assert len(c.logprobs) == len(c.token_ids)
        assert c.text == setup.processor.decode(c.token_ids)
        assert "<|im_end|>" not in c.text


def test_truncated_sampling_keeps_to_the_nucleus(setup: Setup) -> None:
    prompt = setup.prompts()[0]
    top1 = setup.engine.generate(requests_for([prompt], [range(3)], Sampling(6, top_k=1)))
    greedy = setup.engine.generate([Request(prompt, 9, Sampling(6, temperature=0.0))])
    assert {c.token_ids for c in top1} == {greedy[0].token_ids}
    assert all(abs(x) < 1e-6 for c in top1 for x in c.logprobs)


def test_repetition_penalty_forbids_what_was_said(setup: Setup) -> None:
    prompt = setup.prompts()[1]
    done = setup.engine.generate([Request(prompt, 3, Sampling(20, temperature=0.0, repetition_penalty=1e6))])
    assert len(set(done[0].token_ids)) == len(done[0].token_ids)


def test_weights_are_copied_hashed_and_versioned(models: dict[str, Any]) -> None:
    setup, other = Setup(models["qwen2_vl"]), Setup(models["qwen2_vl"])
    prompt = setup.prompts()[0]
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.5)
    own = setup.engine.update_weights(setup.model.named_parameters(), 1)
    assert own == {}  # the engine holds the learner's own tensors: nothing was transferred
    digests = setup.engine.update_weights(other.model.named_parameters(), 7)
    assert set(digests) == {n for n, _ in other.model.named_parameters()}
    a = setup.engine.generate([Request(prompt, 1, TWELVE)])[0]
    b = other.engine.generate([Request(prompt, 1, TWELVE)])[0]
    assert a.token_ids == b.token_ids
    assert (a.weight_versions, b.weight_versions) == (((0, 7),), ((0, 0),))
    with pytest.raises(KeyError, match=r"no\.such\.weight"):
        setup.engine.update_weights([("no.such.weight", torch.zeros(1))], 8)
