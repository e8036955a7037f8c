"""Lines about the first row of each source: what stands in them, and that nothing makes them long or dangerous."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from rich.cells import cell_len

from mm_grpo.cli.configs import load_config, to_smoke
from mm_grpo.config import GRPOConfig
from mm_grpo.config.shipped import find_recipes
from mm_grpo.data.sources import load, load_train
from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.preflight.gold_answers import RewardCheck
from mm_grpo.preflight.understood import brief_lines, other_uses, shorten_middle, understood
from mm_grpo.processors.base import load_processor
from mm_grpo.rewards import resolve_entry
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.prompts import PromptBuilder
from mm_grpo.terminal import printable


def mine(completion: str, answer: str) -> float:
    return 0.25


def broken(completion: str, answer: str) -> float:
    raise RuntimeError("no such file")


def offered(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.5 for _ in completions if kwargs]


def by_sample(completion: str, sample: Any) -> float:
    return 0.5


async def remote(completion: str, answer: str) -> float:
    raise AssertionError("called")


@pytest.fixture
def config(tmp_path: Path, models: dict[str, Path]) -> Callable[..., GRPOConfig]:
    """A config of these rows, which share a picture of 84 x 84: (84 / 28)² = 9 tokens, and so seen at 80 x 80."""

    def make(*rows: dict[str, Any], model: str = "qwen2_5_vl", **data: Any) -> GRPOConfig:
        tiny.picture(0, 84, 84).save(tmp_path / "scene.png")
        tiny.picture(0, 80, 80).save(tmp_path / "other.png")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"train": str(tmp_path / "rows.jsonl"), **data}
        values = {"model": {"path": str(models[model])}, "data": data, "rewards": ["exact_match"]}
        return GRPOConfig.from_dict(values)

    return make


def lines_of(config: GRPOConfig, *rewards: Any, **options: Any) -> list[str]:
    """The lines of `check` about the training rows of a config."""
    rows, toolbox = load_train(config, verify=False), toolbox_of(config, None, None)
    builder = PromptBuilder(load_processor(config.model.path), config, None, preparer=toolbox)
    specs = [resolve_entry(reward) for reward in rewards]
    several_turns = toolbox is not None
    check = RewardCheck(specs, template=config.data.gold_template, several_turns=several_turns, **options)
    try:
        return list(understood(rows, builder, check, other_uses(config, rows, toolbox)))
    finally:
        check.finish()


def assert_fits(lines: Sequence[str]) -> None:
    titles = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    assert max(end - start for start, end in zip(titles, [*titles[1:], len(lines)], strict=True)) <= 12
    for line in lines:
        assert len(line) <= 80 and cell_len(line) <= 80 and printable(line, lines=False) == line


def test_the_lines_say_prompt_picture_golds_and_columns(config: Callable[..., GRPOConfig]) -> None:
    row = {"question": "What is it?", "file_name": "scene.png", "answer": "tram", "id": 7, "category": "bus"}
    columns = {"prompt": "question", "image": "file_name"}
    lines = lines_of(config(row, columns=columns, system_prompt="$SYSTEM_PROMPT"), "exact_match", mine)
    title, system, user, assistant, *others = lines
    assert title.startswith("train: rows.jsonl:1 ") and title.endswith(" tokens")
    assert system == "  system↵$SYSTEM_PROMPT" and assistant == "  assistant↵"
    assert user == "  user↵‹scene.png 84×84, 9 tokens›What is it?"
    assert others == [
        "  exact_match reads answer = 'tram': right answer 'tram' scores 1",
        "  mine reads answer = 'tram': right answer 'tram' scores 0.25",
        "  prompt <- question, images <- file_name, answer -> exact_match and mine",
        "  not used: id, category",
    ]


def test_videos_stand_where_the_model_sees_them(tmp_path: Path, config: Callable[..., GRPOConfig]) -> None:
    """Two pairs of frames of 84 x 84 in each video are 2 x 9 tokens."""
    for number in range(4):
        tiny.picture(number, 84, 84).save(tmp_path / f"{number}.png")
    frames = [f"{number}.png" for number in range(4)]
    first, second = {"video": frames, "fps": 2}, {"video": frames[::-1], "sample_fps": 0.5}
    row = {"prompt": "<video>or<image>or<video>?", "image": "other.png", "videos": [first, second]}
    made = config(row)
    shown = " ".join(map(str.strip, lines_of(made)))
    assert "‹0.png 4 frames, 0.0-1.5 s, 84×84, 18 tokens›or‹other.png 80×80→84×84, 9 tokens›or" in shown
    assert "or‹3.png 4 frames, 0.0-6.0 s, 84×84, 18 tokens›?" in shown
    assert "prompt, images <- image, videos" in shown
    (brief, *_) = brief_lines(load_train(made, [{**row, "videos": ["a.mp4", first]}]), [], {})
    assert brief == "train: train row 0: user: ‹a.mp4›or‹other.png›or‹0.png›? "
    alone = lines_of(config({"prompt": "?", "video": frames}))
    assert " user↵‹0.png 4 frames, 0.0-1.5 s, 84×84, 18 tokens›?" in " ".join(map(str.strip, alone))


@pytest.mark.parametrize(
    ("reward", "columns", "expected"),
    [
        ("exact_match", {"answer": ["tram", "bus"]}, "answer = ['tram', 'bus']: right answer 'tram' scores 1"),
        ("exact_match", {"answer": 3.0}, "answer = 3.0, which is ['3']: right answer '3' scores 1"),
        # 80 x 80 is seen at 84 x 84: times 1.05
        ("iou", {"box": [20, 20, 60, 40]}, "box = [20, 20, 60, 40], seen at pixels [21, 21, 63, 42]:"),
        ("iou", {"box": [20, 20, 60, 40]}, "right answer '[21.0, 21.0, 63.0, 42.0]' scores 1"),
        (broken, {"answer": "a"}, "raises: "),
        (offered, {"note": "a"}, "offered is offered all columns: right answer 'a' scores 0.5"),
        (offered, {"note": "a"}, "offered to offered: note"),
        (by_sample, {"note": "a"}, "offered to by_sample: note"),
        (remote, {"answer": "a"}, ": not called: it may use a network"),
        ("length", {"answer": "a"}, "length reads no column"),
        ("iou", {"box": None, "answer": "a"}, "not for this row: iou"),
        ({"name": "exact_match", "when": {"kind": "a"}}, {"kind": "b", "answer": "a"}, "not used: answer"),
        ({"name": "exact_match", "when": {"kind": "a"}}, {"kind": "b", "answer": "a"}, "kind -> when"),
        ("exact_match", {"answer": "a", "task": "names"}, "task -> metrics"),
    ],
)  # fmt: skip
def test_what_a_reward_reads(
    reward: Any, columns: dict[str, Any], expected: str, config: Callable[..., GRPOConfig]
) -> None:
    lines = lines_of(config({"prompt": "?", "image": "other.png", **columns}), reward)
    assert expected in " ".join(" ".join(lines).split())
    assert_fits(lines)


def test_columns_inside_of_others_and_other_layouts(config: Callable[..., GRPOConfig]) -> None:
    nested = {"prompt": "?", "image": "other.png", "objects": {"bbox": [1, 1, 9, 9]}, "meta": {"a": 1}}
    lines = lines_of(config(nested, columns={"box": "objects.bbox"}), "iou")
    assert lines[-2] == "  objects.bbox as box -> iou, prompt, images <- image"
    assert lines[-1] == "  not used: meta"
    verl = {"prompt": [{"role": "user", "content": "?"}], "images": ["scene.png"], "id": 1}
    graded = lines_of(config({**verl, "reward_model": {"ground_truth": "3"}}), "exact_match")
    assert "answer <- reward_model, answer -> exact_match" in " ".join(" ".join(graded).split())
    assert graded[-1] == "  not used: id"
    mapped = {"prompt": "?", "image": "scene.png", "bbox": [1, 1, 9, 9]}
    (*_, last) = lines_of(config(mapped, columns={"box": "bbox"}), "iou")
    assert last == "  bbox as box -> iou, prompt, images <- image"
    filled = lines_of(config({"image": "scene.png", "kind": "cat"}, prompt_template="A {kind}?"), "length")
    assert "prompt template <- kind" in filled[-1] and "A cat?" in filled[1]


def test_the_first_row_that_can_be_used_is_shown(config: Callable[..., GRPOConfig]) -> None:
    good = {"prompt": "good", "image": "scene.png"}
    first, *_ = lines_of(config({**good, "image": "none.png"}, {"prompt": ""}, good), "length")
    assert "rows.jsonl:3 " in first
    (line,) = lines_of(config({"prompt": "", "image": "scene.png"}), "length")
    assert "none of the first 1" in line


HOSTILE = {
    "newlines": "a\nb\r\nc\u2028d" * 9,
    "escapes": "\x1b[31mred\x1b]0;title\x07\u202e" * 9,
    "long": "x" * 100_000,
    "wide": "東京" * 500,
    "marks": "e\u0301\u0302" * 500 + "\u200d" * 500,
    "spaces": " " * 300 + "end",
    "markup": "[bold]‹a.png› [/bold]…" * 9,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_stay_on_their_lines(
    text: str, config: Callable[..., GRPOConfig], tmp_path: Path
) -> None:
    name = printable(text[:40].replace("/", "")).replace("\n", "")
    tiny.picture(0).save(tmp_path / f"{name}.png")
    columns = {f"{text[:99]}{number}": text for number in range(30)}
    row = {"prompt": text, "image": f"{name}.png", "answer": text, **columns}
    data = {"system_prompt": text, "columns": {"answer": f"{text[:99]}0"}}
    rewards = ["exact_match", mine, broken, *({"name": "contains", "as": f"contains_{n}"} for n in range(9))]
    lines = lines_of(config(row, **data), *rewards)
    assert len(lines) == 12 and any("more lines about rewards" in line for line in lines)
    assert_fits(lines)
    several = {
        "prompt": "<image>".join([text[:500]] * 40),
        "images": [f"{name}.png"] * 39,
        "answer": [text] * 9,
    }
    turns = [{"role": role, "content": text[:500]} for role in ("user", "assistant") * 9]
    for row in (
        several,
        {"prompt": [*turns, turns[0]], "image": f"{name}.png", "answer": {"a": text}, "id": text},
    ):
        rows = load_train(config(row, max_prompt_length=None))
        assert_fits(lines_of(config(row), mine, offered))
        brief = brief_lines(rows, [resolve_entry(mine)], {})
        assert len(brief) == 3
        assert_fits([brief[0], *(f" {line}" for line in brief[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", find_recipes())
def test_every_source_of_a_recipe_fits(recipe: str, tmp_path: Path) -> None:
    config = load_config(recipe, [])
    config = to_smoke(config, recipe, [], tmp_path, config.run.dir)
    lines = lines_of(config, *config.rewards)
    assert_fits(lines)
    assert sum(" as the model gets it" in line for line in lines) == len(load_train(config).sources)
    rows = load_train(config)
    assert sum("tokens›" in line for line in lines) >= len(rows.sources)
    assert len(brief_lines(rows, Scorer(config.rewards).specs, {})) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count"),
    [("gemma3", 1), *((f, n) for f in ("internvl", "smolvlm", "llava_onevision") for n in (1, 2))],
)
def test_messages_and_tokens_of_other_families(
    family: str, count: int, config: Callable[..., GRPOConfig]
) -> None:
    """Tokens of pictures are those that the prompt has; a message is a line."""
    pictures = ["scene.png", "other.png"][:count]
    made = config({"prompt": "Which?", "images": pictures}, model=family, system_prompt="Look.")
    processor, rows = load_processor(made.model.path), load(made.data.train, made.data)
    prompt = processor.prompt(rows.sample(0))
    tokens = [len(prompt.token_ids) - len(prompt.engine_prompt.token_ids) + 1]
    if count > 1:
        added = tokens[0] - 1
        tokens = [len(processor.picture(image, row="").token_ids) for image in prompt.engine_prompt.images]  # type: ignore[attr-defined]
        assert sum(tokens) - count == added
    title, *lines = lines_of(made, "length")
    assert title.endswith(f", {len(prompt.token_ids)} tokens") and min(tokens) > 1
    text = " ".join(line.strip() for line in lines)
    for picture, number in zip(pictures, tokens, strict=True):
        assert f", {number} tokens›" in text.partition(f"‹{picture}")[2]
    assert text.index("Look.") < text.index("‹scene") < text.index("Which?")


def test_a_processor_of_the_users_own_is_shown_without_its_template(
    config: Callable[..., GRPOConfig],
) -> None:
    class Own:
        def __init__(self, processor: Any) -> None:
            self.prompt, self.decode = processor.prompt, processor.decode

    made = config({"prompt": "what", "image": "other.png"})
    rows, own = load_train(made), Own(load_processor(made.model.path))
    builder = PromptBuilder(own, made, None)  # type: ignore[arg-type]
    lines = list(understood(rows, builder, RewardCheck([]), {}))
    assert lines[1] == "  user: ‹other.png 80×80→84×84, 9 tokens›what"


def test_three_lines_without_a_call(config: Callable[..., GRPOConfig]) -> None:
    row = {"prompt": "What?", "image": "scene.png", "answer": ["a", "b"], "id": 1}
    made = config(row, system_prompt="Look.")
    specs = [resolve_entry(reward) for reward in ("length", broken, remote)]
    assert brief_lines(load_train(made), specs, {}) == [
        "train: rows.jsonl:1: system: Look. user: ‹scene.png›What? ",
        "broken reads answer = ['a', 'b'] (2 more reward(s))",
        "prompt, images <- image, answer -> broken and remote; not used: id",
    ]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abc…fg"), ("東京東京", 6, "東…京"), ("a\x1b", 9, "a\\x1b")],
)
def test_texts_are_cut_in_the_middle(text: str, width: int, expected: str) -> None:
    assert shorten_middle(text, width) == expected
