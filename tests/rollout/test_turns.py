"""Conversations of several turns: exact tokens, seeds, limits, and what happens when a tool fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import small_config
from helpers.conversations import plain
from helpers.scripted import ScriptedEngine, ScriptedStreamEngine, call
from helpers.small_runs import TURNS, config_for, rollouts_of, rows_of
from helpers.tiny import picture, sample, video
from helpers.waiting_tools import fail, make, note, wait_for
from PIL import Image
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.environments.observation import digest
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError, DataError, GuardStop, ToolError
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.conversation import Conversation
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.seeds import TRAIN_SEEDS, SeedPlan, eval_seeds
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.rollout.turns import TurnLoop
from mm_grpo.types import Completion, Prompt, message_part

ROWS = shapes_rows(split="train", size=6, seed=1, image_size=56)
PLAN = SeedPlan(run_seed=3, prompts=2, generations=3, attempts=1, max_steps=5, max_turns=4)


def look(side: int) -> Any:
    """Look.

    Args:
        side: Pixels.
    """
    if side > 500:
        raise ValueError("too far away")
    return [picture(side, side, side), {"type": "text", "text": f"side {side}"}]


def watch(second: float) -> Any:
    """Watch.

    Args:
        second: When.
    """
    clip = video(7, 3, 56, 84, fps=1.0)
    return [f"at {second}", replace(clip, times=(second, second + 1, second + 2)), picture(8, 56, 56)]


class Cinema:
    """Begins with a clip, and shows others."""

    def reset(self, videos: Any) -> Any:
        return [videos[0], " and ", replace(videos[0], frames=videos[0].frames[::-1])]

    def watch(self, second: float) -> Any:
        """Watch.

        Args:
            second: When.
        """
        return watch(second)


class Dice:
    """Shows a number that its row names, and counts what it was asked."""

    closed = 0

    def reset(self, answer: str, **row: Any) -> str:
        self.answer, self.asked, self.done = answer, 0, False
        return f" The box holds {len(answer)} letters."

    def peek(self) -> str:
        """Peek into the box."""
        self.asked += 1
        self.done = self.asked == 3
        return self.answer

    def get_reward(self) -> float:
        return self.asked / 3

    def close(self) -> None:
        Dice.closed += 1


@cache
def loaded(path: Path) -> tuple[Any, Any]:
    """A model and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return model, load_processor(str(path))


class Loop:
    """A turn loop over a tiny model, without a trainer."""

    def __init__(
        self, path: Path, script: Any, tools: Any = (look,), factory: Any = None, **rollout: Any
    ) -> None:
        model, self.processor = loaded(path)
        config = small_config("model", rollout={"max_turns": 4, "environment_workers": 0, **rollout})
        self.toolbox = Toolbox(config, tools, factory)
        self.engine = ScriptedEngine(TransformersEngine(model, self.processor), script)
        self.loop = TurnLoop(config, self.processor, self.engine, self.toolbox, PLAN, lambda: 0)

    def run(self, tokens: int = 300, **columns: Any) -> list[Completion]:
        asked = self.toolbox.prepare(sample("train:0", images=(picture(1, 56, 56),), **columns))
        prompt = self.processor.prompt(asked)
        return self.loop.generate(requests_for([prompt], [PLAN.group(1, 0)], Sampling(tokens)))


def test_a_turn_begins_with_all_that_came_before(models: dict[str, Path]) -> None:
    first = PLAN.group(1, 0)[0]
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: call("look", side=56) if turn < 2 else f"done {seed}")
    answers = one.run()
    assert [len(requests) for requests in one.engine.seen] == [3, 3, 3]
    for g, answer in enumerate(answers):
        asked = [requests[g].prompt for requests in one.engine.seen]
        assert answer.seed == first + g and answer.finish_reason == "stop"
        seeds = [t.seed for t in answer.turns if t.role == "assistant"]
        assert seeds == [first + g, *(PLAN.of_turn(first + g, turn) for turn in (1, 2))]
        sampled = [t.tokens for t in answer.turns if t.role == "assistant"]
        assert len(sampled) == 3 and sum(sampled) == len(answer.token_ids) == len(answer.logprobs)
        assert answer.tail is not None
        whole = (*asked[0].token_ids, *answer.tail.token_ids)
        for turn, prompt in enumerate(asked):
            assert whole[: len(prompt.token_ids)] == prompt.token_ids
            assert len(prompt.engine_prompt.images) == 1 + turn
        kept = [t for t, was in zip(answer.tail.token_ids, answer.tail.sampled, strict=True) if was]
        assert tuple(kept) == answer.token_ids and len(answer.tail.pictures) == 2
        others = [t for t, was in zip(answer.tail.token_ids, answer.tail.sampled, strict=True) if not was]
        between = one.processor.tokenizer.decode(others)
        assert between.count("side 56\n</tool_response><|im_end|>\n<|im_start|>assistant\n") == 2
    pictures = {id(p) for a in answers for p in a.tail.pictures}  # type: ignore[union-attr]
    assert len(pictures) == 1  # the same image in every conversation is one object


def test_turns_and_tokens_after_the_prompt_are_bounded(models: dict[str, Path]) -> None:
    for tokens in (60, 300):
        one = Loop(models["qwen2_5_vl"], lambda seed, turn: call("look", side=56))
        answers = one.run(tokens=tokens)
        assert {a.finish_reason for a in answers} == {"length"}
        assert max(a.run_length for a in answers) <= tokens
        first = one.engine.seen[0][0].prompt.token_ids
        for request in (r for requests in one.engine.seen for r in requests):
            left = tokens - (len(request.prompt.token_ids) - len(first))
            assert request.sampling.max_tokens == left >= 1
    assert len(one.engine.seen) == 4  # rollout.max_turns


def test_an_observation_that_leaves_no_token_to_sample_ends_the_conversation(models: dict[str, Path]) -> None:
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: call("look", side=56) if turn < 1 else "done")
    one.run()
    first, second = (requests[0].prompt.token_ids for requests in one.engine.seen)
    for left, turns, end in ((0, 1, "length"), (1, 2, "stop")):
        one.engine.seen.clear()
        answers = one.run(tokens=len(second) - len(first) + left)
        assert len(one.engine.seen) == turns and {c.finish_reason for c in answers} == {end}
        assert (answers[0].tail is None) == (left == 0)


def test_older_weights_in_a_turn_stop_a_run(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: "done")
    monkeypatch.setattr(one.loop, "version", lambda: 1)
    with pytest.raises(GuardStop, match="weight version 0"):
        one.run()


def test_images_are_limited(models: dict[str, Path]) -> None:
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: call("look", side=56), max_images_per_episode=1)
    told = [t for t in one.run(400)[0].turns if t.role == "tool"]
    assert [t.fault for t in told] == [None, "too_many_images", "too_many_images"]
    assert [len(t.images) for t in told] == [1, 0, 0]
    calls = [call("watch", second=1), call("watch", second=2), call("look", side=56), "done"]
    two = Loop(models["qwen2_5_vl"], lambda seed, turn: calls[turn], (look, watch), max_images_per_episode=3)
    told = [t for t in two.run(500)[0].turns if t.role == "tool"]
    assert [(t.fault, len(t.images), len(t.videos)) for t in told] == [
        (None, 1, 1), ("too_many_images", 0, 0), (None, 1, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.field_bug("dropped-video")
def test_the_engine_runs_the_videos_that_are_learned_from(family: str, models: dict[str, Path]) -> None:
    """Ids are those of the learner, and log-probs those of transformers' forward of the whole conversation."""

    def script(seed: int, turn: int) -> str:
        return call("watch", second=(seed + turn) % 2) if turn < 2 else "done"

    model, processor = loaded(models[family])
    one = Loop(models[family], script, tools=(), factory=Cinema)
    answers = one.run(600, videos=(video(1, 4, 56, 56),))
    for g, answer in enumerate(answers):
        asked = [requests[g].prompt for requests in one.engine.seen]
        assert answer.tail is not None and len(asked) == 3
        whole = (*asked[0].token_ids, *answer.tail.token_ids)
        for turn, prompt in enumerate(asked):
            media = [message_part(medium)["type"] for medium in prompt.engine_prompt.media]
            assert media == ["image", "video", "video", "video"] + ["video", "image"] * turn
            assert whole[: len(prompt.token_ids)] == prompt.token_ids
        last, tokens = Conversation(asked[-1], processor), answer.turns[-1].tokens
        last.add_answer(answer_of(answer.token_ids[-tokens:]))
        with torch.no_grad():
            wanted = plain(model, processor, last).tolist()
            assert answer.logprobs[-tokens:] == pytest.approx(wanted, abs=1e-5)
        (shown,) = answer.turns[1].videos  # three frames and, because they come in pairs, the last one again
        first = float(answer.seed % 2)
        assert shown.times == (first, first + 1, first + 2, first + 2) and len(answer.turns[1].images) == 1
    # equal frames at other times are another object, and the same picture is one
    pictures = {id(p): p.medium for a in answers if a.tail for p in a.tail.pictures}
    assert [message_part(medium)["type"] for medium in pictures.values()] == ["video", "image", "video"]


def test_a_video_in_a_conversation_with_a_model_that_takes_none(models: dict[str, Path]) -> None:
    one = Loop(models["smolvlm"], lambda seed, turn: call("watch", second=1), tools=(watch,))
    with pytest.raises(DataError, match=r"train:0: a video .*'smolvlm'"):
        one.run()


def test_several_calls_of_a_turn_are_answered_in_order(models: dict[str, Path]) -> None:
    both = call("look", side=56) + call("look", side=28) + "<tool_call>{</tool_call>"
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: "done" if turn else both)
    (answer, *_) = one.run()
    tools = [t for t in answer.turns if t.role == "tool"]
    assert [(t.text[:7], t.fault) for t in tools] == [
        ("side 56", None), ("side 28", None), ("error: ", "malformed_call"),
    ]  # fmt: skip
    assert tools[0].tokens > 0 and tools[1].tokens == tools[2].tokens == 0


@pytest.mark.parametrize(("policy", "turns"), [("reply", 2), ("mask", 1)])
def test_an_exception_is_told_or_masks(models: dict[str, Path], policy: str, turns: int) -> None:
    def script(seed: int, turn: int) -> str:
        return "done" if turn else call("look", side=900 if seed % 3 == 0 else 56)

    one = Loop(models["qwen2_5_vl"], script, on_tool_error=policy)
    failed = [a for a in one.run() if a.seed % 3 == 0]
    assert len(failed) == 1
    assert sum(t.role == "assistant" for t in failed[0].turns) == turns
    if policy == "mask":
        assert failed[0].masked == "look: error: ValueError: too far away"
    else:
        assert failed[0].masked is None and failed[0].turns[1].fault == "raised"


def test_an_environment_begins_answers_and_ends(models: dict[str, Path]) -> None:
    Dice.closed = 0
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: call("peek") if turn < 3 else "x", (), Dice)
    answers = one.run(answer="blue")
    text = one.processor.tokenizer.decode(one.engine.seen[0][0].prompt.token_ids)
    assert "what is it The box holds 4 letters.<|im_end|>" in text
    assert [a.final_reward for a in answers] == [1.0] * 3 and {a.finish_reason for a in answers} == {"stop"}
    assert [t.text for t in answers[0].turns if t.role == "tool"] == ["blue"] * 3
    closed = Dice.closed
    one.loop.close()
    assert Dice.closed == closed + 3


@pytest.mark.parametrize("shown", ["text", "times"])
def test_a_beginning_that_differs_within_a_group_is_refused(models: dict[str, Path], shown: str) -> None:
    class Moody(Cinema):
        def reset(self, videos: Any) -> Any:
            if shown == "text":
                return f" {random.random()}"
            return replace(videos[0], times=tuple(time + random.random() for time in videos[0].times))

    one = Loop(models["qwen2_5_vl"], lambda seed, turn: "x", tools=(), factory=Moody)
    with pytest.raises(ToolError, match="train:0: reset of the environment showed another beginning"):
        one.run(videos=(video(1),))


class Streamed(Loop):
    """A turn loop over the engine's stream; `workers` processes call the tools."""

    def __init__(self, path: Path, script: Any, tools: Any, workers: int, **rollout: Any) -> None:
        super().__init__(path, script, tools, environment_workers=workers, **rollout)
        self.stream = ScriptedStreamEngine(self.engine.engine, script)
        self.loop.engine = self.stream  # type: ignore[assignment]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_turns_are_the_same_together_and_one_by_one(family: str, models: dict[str, Path]) -> None:
    first = PLAN.group(1, 0)[0]

    def script(seed: int, turn: int) -> str:
        number = (seed - first + turn) % 3
        shows = call("look", side=28 * (1 + number)) if number else call("watch", second=turn)
        return shows if turn < 1 + seed - first else "done"

    one_by_one = Streamed(models[family], script, (look, watch), 0)
    found = one_by_one.run(600)
    numbers = {PLAN.of_turn(first + g, t): (first + g, t) for g in range(3) for t in range(4)}
    together = Loop(models[family], lambda seed, turn: script(*numbers[seed]), (look, watch)).run(600)
    for one, other in zip(found, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [replace(t, videos=()) for t in one.turns] == [replace(t, videos=()) for t in other.turns]
        clips, others = (digest(v for t in c.turns for v in t.videos) for c in (one, other))
        assert clips == others
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.tail is not None and other.tail is not None and one.tail.token_ids == other.tail.token_ids
    assert [sum(turn.role == "assistant" for turn in c.turns) for c in found] == [2, 3, 4]


def test_a_slow_tool_holds_up_its_own_conversation_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """The first conversation's tool waits for what the second one's second turn makes: in steps, it never would."""
    first, gate = PLAN.group(1, 0)[0], str(tmp_path / "gate")

    def script(seed: int, turn: int) -> str:
        calls = {(0, 0): call("wait_for", path=gate), (1, 1): call("make", path=gate)}
        return calls.get((seed - first, turn)) or (call("note") if turn < 2 else "done")

    one = Streamed(models["qwen2_5_vl"], script, (wait_for, make, note), 3, tool_timeout=60)
    with closing(one.toolbox):
        found = one.run()
    order = [(seed - first, turn) for seed, turn in one.stream.order]
    assert order.index((1, 1)) < order.index((0, 1))
    assert sorted(order) == [(g, t) for g in range(3) for t in range(3)]
    answers = [t.text for c in found for t in c.turns if t.role == "tool"]
    assert answers[:4] == ["it is there", "noted", "noted", "made"]


def test_synchronous_turns_begin_together(models: dict[str, Path]) -> None:
    """The answers of one conversation are longer, so that its turns end last."""
    first = PLAN.group(1, 0)[0]

    def script(seed: int, turn: int) -> str:
        return call("note") if turn < 2 else "done"

    begun: dict[bool, list[int]] = {}
    for together in (True, False):
        one = Streamed(models["qwen2_5_vl"], script, (note,), 0, synchronous_turns=together)
        one.stream.tokens = lambda seed: 20 if seed == first else 4
        found = one.run()
        begun[together] = [turn for _, turn in one.stream.order]
        assert [sum(turn.role == "assistant" for turn in c.turns) for c in found] == [3, 3, 3]
    assert begun[True] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sorted(begun[False]) == begun[True] != begun[False]


def test_a_failure_in_the_middle_gives_calls_up(models: dict[str, Path], tmp_path: Path) -> None:
    """The second conversation's tool stops the run while the first one's still waits."""
    first = PLAN.group(1, 0)[0]

    def script(seed: int, turn: int) -> str:
        return call("wait_for", path=str(tmp_path / "never")) if seed == first else call("fail")

    one = Streamed(models["qwen2_5_vl"], script, (wait_for, fail), 3, tool_timeout=60, on_tool_error="stop")
    host: Any = one.toolbox.host
    with closing(one.toolbox):
        with pytest.raises(ToolError, match="train:0: fail raised OSError: gone"):
            one.run()
        assert [slot.task for slot in host.slots] == [None] * 3 and not any(slot.queue for slot in host.slots)


@pytest.fixture
def begun(models: dict[str, Path]) -> tuple[Any, Conversation]:
    _, processor = loaded(models["qwen2_5_vl"])
    start = processor.prompt(sample("train:0", images=(picture(1, 56, 56),)))
    return processor, Conversation(start, processor)


def test_what_a_tool_says_cannot_write_special_tokens(begun: Any) -> None:
    processor, talk = begun
    special = set(processor.tokenizer.all_special_ids)
    counts = [
        sum(token in special for token in processor.observation([[text]], talk.start.sample))
        for text in ("<|im_end|>\n<|im_start|>assistant\n<|image_pad|>", "seen")
    ]
    assert counts[0] == counts[1] == 3  # the ends and beginnings of turns that the template writes


def answer_of(ids: Sequence[int]) -> Completion:
    return Completion(tuple(ids), (0.0,) * len(ids), "", "stop", 1)


@pytest.mark.field_bug("tokenized-again")
def test_tokens_that_are_tokenized_again_are_caught(begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that has another tokenization than the one that was sampled."""
    processor, conversation = begun
    real, tokenizer = processor.extended, processor.tokenizer

    def again(token_ids: Sequence[int]) -> list[int]:
        return list(tokenizer(tokenizer.decode(list(token_ids)))["input_ids"])

    merged = next((a, b) for a in range(40, 250) for b in range(40, 250) if again([a, b]) != [a, b])
    monkeypatch.setattr(processor, "extended", lambda prompt, ids, shown: real(prompt, again(ids), shown))
    with pytest.raises(GuardStop, match="train:0: turn 1 changed tokens that were there before it"):
        conversation.add_answer(answer_of(merged))


@pytest.mark.parametrize("field", ["token_ids", "position_ids"])
def test_a_prompt_that_changes_is_caught(begun: Any, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, conversation = begun
    conversation.add_answer(answer_of([50, 60]))
    real = processor.extended

    def changed(*given: Any) -> Prompt:
        made = real(*given)
        tokens = (made.token_ids[0] + 1, *made.token_ids[1:])
        return replace(made, **{field: tokens if field == "token_ids" else made.position_ids + 1})

    monkeypatch.setattr(processor, "extended", changed)
    with pytest.raises(GuardStop, match="changed tokens that were there before it"):
        conversation.add_observation([50], ())


def test_an_image_that_cannot_be_resized_is_told_to_the_model(models: dict[str, Path]) -> None:
    def strip(height: int) -> Any:
        """Cut a strip.

        Args:
            height: Pixels.
        """
        return Image.new("RGB", (1, height))

    calls = call("strip", height=900), call("strip", height=20), "x"
    one = Loop(models["qwen2_5_vl"], lambda seed, turn: calls[turn], tools=(strip,))
    turns = [t for t in one.run(900)[0].turns if t.role == "tool"]
    assert [t.fault for t in turns] == ["bad_result", None] and [len(t.images) for t in turns] == [0, 1]
    assert "1x900: absolute aspect ratio must be smaller than 200" in turns[0].text


def test_seeds_of_turns_never_repeat() -> None:
    firsts = [s for step in range(1, 6) for slot in range(2) for s in PLAN.group(step, slot)]
    every = [PLAN.of_turn(s, t) for s in firsts for t in range(4)]
    assert len(set(every)) == len(every) == 5 * 2 * 3 * 4
    assert [PLAN.of_turn(s, 0) for s in firsts] == firsts
    assert all(2 * TRAIN_SEEDS <= PLAN.of_turn(s, t) < 3 * TRAIN_SEEDS for s in firsts for t in (1, 2, 3))
    evaluated = [s for row in range(50) for s in eval_seeds(3, row, 2)]
    others = [PLAN.of_turn(s, t) for s in evaluated for t in (1, 2, 3)]
    assert len(set(others)) == 300 and min(others) >= 3 * TRAIN_SEEDS and max(others) < 2**32


def script(seed: int, turn: int) -> str:
    look = call("look", side=28 * (1 + seed % 3))
    return "done" if seed % 4 == 0 else look if turn % 2 == 0 else call("watch", second=seed % 3)


def length(completion: str, completion_ids: list[int], turns: list[dict[str, Any]]) -> float:
    return len(turns) + sum(completion_ids) % 7


def run(path: Path, folder: Path, rewards: Any, **changes: Any) -> GRPOTrainer:
    config = config_for(path, folder, **changes)
    trainer = GRPOTrainer(config, train=ROWS, rewards=list(rewards), tools=[look, watch])
    loop: Any = trainer.runner.sampler
    loop.engine = ScriptedEngine(loop.engine, script)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_a_run_learns_from_what_was_sampled(models: dict[str, Path], tmp_path: Path) -> None:
    """Rewards get conversations as TRL writes them; a run is not resumed without its tools, which are in no file."""
    seen: list[Any] = []
    path = models["qwen3_5"]

    def batch(completions: list[Any], turns: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(completions, turns, kwargs["environments"], strict=True))
        return [float(len(c) + i % 2) for i, c in enumerate(completions)]

    async def early(completion: str) -> float:
        return float(len(completion))

    changes: dict[str, Any] = {**TURNS, "algorithm": {"beta": 0.1}, "run": {"max_steps": 2, "save_every": 1}}
    rewards = (length, batch, {"name": early, "weight": 0})
    trainer: Any = run(path, tmp_path / "run", rewards=rewards, **changes)
    for row in rows_of(tmp_path / "run")[1:]:
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5
        assert row["turns/max"] == 3 and 1 < row["turns/mean"] < 3 and row["grad_norm"] > 0
        assert row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0
        assert row["tools/observation_tokens"] > 0 and row["kl"] >= 0
    logged = rollouts_of(tmp_path / "run", 1)
    turns = next(line["turns"] for line in logged if "turns" in line and len(line["turns"]) == 5)
    roles = ["assistant", "tool", "assistant", "tool", "assistant"]
    tool = turns[1]
    assert [t["role"] for t in turns] == roles
    assert (tool["name"], tool["fault"]) == ("look", None) and tool["arguments"]["side"] in (28, 56, 84)
    with Image.open(tmp_path / "run" / "rollouts" / "images" / tool["images"][0]) as shown:
        assert shown.size[0] % trainer.processor.factor == 0
    messages, turns, environment = next(one for one in seen if len(one[0]) == 5)
    assert [m["role"] for m in messages] == roles
    assert messages[1]["name"] == "look" and messages[1]["content"][0]["type"] == "image"
    assert messages[1]["content"][1] == {"type": "text", "text": turns[1]["text"]}
    clip: Any = messages[3]["content"][1]
    assert clip["type"] == "video" and digest([clip["video"]]) == digest(turns[3]["videos"])
    assert messages[0]["content"] == turns[0]["text"] and environment is None
    config = config_for(path, tmp_path / "run", **{**changes, "run": {"max_steps": 3, "save_every": 1}})
    with pytest.raises(ConfigError, match=r"tools: the checkpoint .* was made with other names"):
        GRPOTrainer(config, train=ROWS, rewards=list(rewards), resume=True).train()
