"""Requests that are answered as they end: rows that join and leave, rows that go on, engines without a stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import tiny
from transformers import AutoModelForImageTextToText

from mm_grpo.processors.base import load_processor
from mm_grpo.rollout import engine
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.rollout.engine import BatchStream, Follows, Request, Sampling, answer_all
from mm_grpo.rollout.transformers_engine import TransformersEngine, TransformersStream
from mm_grpo.types import Completion, Sample

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe")


class Setup:
    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
        self.processor: Any = load_processor(str(path))
        self.engine = TransformersEngine(self.model, self.processor)

    def prompt(self, number: int, words: str = "what") -> Any:
        pictures = (tiny.picture(number),) if number else ()
        return self.processor.prompt(tiny.sample(f"r:{number}", words, pictures))


@pytest.fixture(scope="module")
def setup(models: dict[str, Path]) -> Setup:
    return Setup(models["qwen2_5_vl"])


def close_to(a: Sequence[Completion], b: Sequence[Completion]) -> None:
    ours, theirs = ([(c.seed, c.token_ids, c.finish_reason) for c in own] for own in (a, b))
    assert ours == theirs
    for one, other in zip(a, b, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def rest_of(stream: Any) -> dict[int, Completion]:
    """The answers of what is unfinished, by number."""
    found: dict[int, Completion] = {}
    while stream.unfinished:
        found |= stream.step()
    return found


def test_a_row_that_ends_makes_room_for_one_that_waits(setup: Setup) -> None:
    prompt, other = setup.prompt(1), setup.prompt(0, "a longer question without a picture")
    lengths = [3, 9, 5, 2, 7, 4]
    requests = [Request((prompt, other)[i % 2], 50 + i, Sampling(n)) for i, n in enumerate(lengths)]
    small = TransformersEngine(setup.model, setup.processor, max_rows=2)
    done: list[tuple[int, int]] = []
    busy: list[int] = []
    found: dict[int, Completion] = {}
    with small.stream() as stream:
        for request in requests:
            stream.add_request(request)
        step = 0
        while stream.unfinished:
            step += 1
            ended = stream.step()
            found |= ended
            done += [(number, step) for number, _ in ended]
            busy.append(len(stream.rows))
    # two at a time: 0 and 1 begin; 2 takes the place of 0, 3 that of 2, 4 that of 1, 5 that of 3
    assert sorted(done) == [(0, 3), (1, 9), (2, 8), (3, 10), (4, 16), (5, 14)]
    assert max(busy) == 2 and step == 16
    close_to([found[i] for i in range(6)], setup.engine.generate(requests))


def test_rows_that_end_with_their_first_token_leave_others_alone(setup: Setup) -> None:
    """They have nothing in the tails yet, and are among those that joined last."""
    first, second = setup.prompt(1), setup.prompt(2, "a second question")
    lengths = [(first, 6), (first, 9), (second, 1), (second, 8), (second, 1), (first, 1), (first, 7)]
    requests = [Request(prompt, i, Sampling(n)) for i, (prompt, n) in enumerate(lengths)]
    found: dict[int, Completion] = {}
    with setup.engine.stream() as stream:
        for number, request in enumerate(requests):
            assert stream.add_request(request) == number
            found |= stream.step()
            found |= stream.step()
        found |= rest_of(stream)
    close_to([found[i] for i in range(7)], [setup.engine.generate([r])[0] for r in requests])


def test_other_ways_to_sample_wait_for_their_turn(setup: Setup) -> None:
    prompt = setup.prompt(1)
    rules = [Sampling(5), Sampling(5, temperature=0.0), Sampling(5, top_k=3), Sampling(5)]
    requests = [Request(prompt, i, rule) for i, rule in enumerate(rules)]
    close_to(setup.engine.generate(requests), [setup.engine.generate([r])[0] for r in requests])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_those_of_a_whole_pass(models: dict[str, Path], dtype: torch.dtype) -> None:
    """Beyond the first columns of the buffers, with rows that ended at other places in them."""
    setup = Setup(models["qwen2_5_vl"], dtype)
    prompts = [setup.prompt(1), setup.prompt(0, "a question of another length, and no picture")]
    requests = [Request(prompts[i % 2], i, Sampling((100, 7, 40, 90)[i % 4])) for i in range(8)]
    for request, done in zip(requests, setup.engine.generate(requests), strict=True):
        scored = setup.engine.score(request.prompt, done.token_ids)
        media = torch.tensor(sorted(setup.processor.media_token_ids))
        assert len(media) and not set(media.tolist()) & set(done.token_ids)
        # the engine normalises without media tokens: its log-probs are a little higher, by their share
        gaps = torch.tensor(done.logprobs) - torch.tensor(scored)
        limit = 1e-5 if dtype == torch.float32 else 0.06
        assert gaps.min() > -limit and gaps.max() < 0.15


def conversations(setup: Setup, stream: TransformersStream, follow: bool) -> tuple[list[Completion], int]:
    """Two turns for two conversations of a prompt and one of another; the tokens that prefills of the second ran."""
    starts = [setup.prompt(1), setup.prompt(1), setup.prompt(2, "another one")]
    starts[1] = starts[0]
    talks = [Conversation(start, setup.processor) for start in starts]
    for i, start in enumerate(starts):
        assert stream.add_request(Request(start, i, Sampling(4 + i))) == i
    first = [answer for _, answer in sorted(rest_of(stream).items())]
    numbers, ran, run = [], list[int](), setup.engine.hidden_states

    def noted(ids: Any, positions: Any, mask: Any, *rest: Any) -> Any:
        ran.append(int(mask[:, -ids.shape[1] :].sum()))
        return run(ids, positions, mask, *rest)

    for i, (talk, answer) in enumerate(zip(talks, first, strict=True)):
        talk.add_answer(answer)
        picture = setup.processor.picture(tiny.picture(10 + i, 56 * (1 + i % 2), 56), row="r")
        shown = [picture][: i + 1 if i < 2 else 0]
        text = setup.processor.observation([[p.medium for p in shown] + ["seen"]], Sample("r", ()))
        assert talk.add_observation(text, shown) is not None
        follows = Follows(i, shown) if follow else None
        numbers.append(stream.add_request(Request(talk.prompt, 100 + i, Sampling(8)), follows))
    with patch.object(setup.engine, "hidden_states", noted):
        found = rest_of(stream)
    return [found[number] for number in numbers], sum(ran)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_what_is_kept(family: str, models: dict[str, Path]) -> None:
    setup = Setup(models[family])
    with setup.engine.stream() as stream:
        again, ran_again = conversations(setup, stream, follow=False)
    with setup.engine.stream() as stream:
        kept, ran_kept = conversations(setup, stream, follow=True)
        assert not stream.cache.rows and (len(stream.ended_rows) == 3 or family == "qwen3_5")
    close_to(kept, again)
    assert stream.ended_rows == {}  # nothing outlives the stream
    if family == "qwen3_5":  # linear attention has no states of earlier tokens
        assert ran_kept == ran_again
    else:
        prompts = 2 * len(setup.prompt(1).token_ids) + len(setup.prompt(2, "another one").token_ids)
        # the prompts, and all but the last of the sampled tokens of the first turn
        assert ran_again - ran_kept == prompts + (4 - 1) + (5 - 1) + (6 - 1)


def test_a_prompt_that_does_not_begin_so_is_run_whole(setup: Setup) -> None:
    prompt, other = setup.prompt(1), setup.prompt(2, "something else")
    with setup.engine.stream() as stream:
        stream.add_request(Request(prompt, 1, Sampling(4)))
        rest_of(stream)
        number = stream.add_request(Request(other, 2, Sampling(6)), Follows(0))
        found = rest_of(stream)
    close_to([found[number]], setup.engine.generate([Request(other, 2, Sampling(6))]))


def test_a_batch_stream_answers_batches(setup: Setup) -> None:
    requests = engine.requests_for([setup.prompt(1)], [range(4)], Sampling(3))
    sizes: list[int] = []

    def generate(batch: Sequence[Request]) -> list[Completion]:
        sizes.append(len(batch))
        return setup.engine.generate(batch)

    with BatchStream(generate) as stream:
        assert stream.step() == []
        close_to(answer_all(stream, requests), setup.engine.generate(requests))
        answer_all(stream, requests[:1])
    assert sizes == [4, 1]


def test_an_engine_with_generate_alone_is_refused() -> None:
    def generate(self: Any, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError

    for base in (engine.RolloutEngine, TransformersEngine):  # whose own stream would go past it
        with pytest.raises(TypeError, match=r"^Mine defines `generate` without `stream`.*BatchStream\("):
            type("Mine", (base,), {"generate": generate})


def test_requests_that_nothing_follows_are_not_kept(setup: Setup) -> None:
    requests = [Request(setup.prompt(1), seed, Sampling(3)) for seed in range(2)]
    with setup.engine.stream() as stream:
        answer_all(stream, requests)
        assert stream.ended_rows == {} and stream.cache.prompts == []


def test_a_stream_that_fails_gives_the_model_back(setup: Setup) -> None:
    own = setup.model.config.get_text_config()._attn_implementation
    setup.model.train()
    try:
        with pytest.raises(ZeroDivisionError), setup.engine.stream() as stream:
            stream.add_request(Request(setup.prompt(1), 0, Sampling(5)))
            stream.step()
            assert not setup.model.training
            raise ZeroDivisionError
        assert setup.model.training and stream.unfinished == 0
        assert setup.model.config.get_text_config()._attn_implementation == own
    finally:
        setup.model.eval()
