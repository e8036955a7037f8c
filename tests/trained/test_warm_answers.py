"""What a warm start teaches: the ids of an answer by the chat template, and the text of a row's gold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.configs import small_config
from helpers.small_runs import rows_of

from mm_grpo.errors import DataError
from mm_grpo.learner.learner import Learner
from mm_grpo.preflight.warm_answers import GoldAnswers
from mm_grpo.processors.base import load_processor
from mm_grpo.types import EnginePrompt, Prompt
from mm_grpo.warm_start import warm

OPENS, CLOSED, STOP = "<think>\n", "<think>\n\n</think>\n\n", "<|im_end|>"
THOUGHTS = "(m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '')"
THINKS = f"<think>\n{{{{ {THOUGHTS} }}}}\n</think>\n\n{{{{ m.content.split('</think>')[-1] }}}}"
"""Answers as Qwen3's chat template writes them."""


def taught(processor: Any, text: str, **changes: Any) -> str:
    prompt = processor.prompt(tiny.sample("row:7", "what", (tiny.picture(1),)))
    ids = processor.answer_ids(replace(prompt, **changes), text)
    return "|".join(processor.tokenizer.convert_ids_to_tokens(ids))


def test_ids_of_an_answer_by_hand(models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    assert taught(processor, "red") == "re|d|<|im_end|>"  # and not the line break of the template
    assert taught(processor, "e\u0301") == taught(processor, "\u00e9")  # the tokenizer composes letters
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|box_start|>"]})
    assert taught(processor, "<|box_start|>(") == "<|box_start|>|(|<|im_end|>"  # special, and legal in rows


@pytest.mark.parametrize(
    ("answer", "stop", "opening", "text", "want"),
    [
        ("{{ m.content }}", STOP, OPENS, "red", None),  # another prompt before an answer
        ("{{ m.content }}", "", "", "red", None),
        ("{{ m.content[1:] }}", STOP, "", "what", None),
        ("{{ m.content }}", STOP, "", "red" + STOP, None),
        (THINKS, STOP, "", "red", CLOSED + "red"),  # thinking is on: no thoughts are taught
        (THINKS, STOP, "", "<think>so</think>red", "<think>\nso\n</think>\n\nred"),
        (THINKS, STOP, CLOSED, "red", "red"),  # off
        (THINKS, STOP, OPENS, "<think>so</think>red", "so\n</think>\n\nred"),
        (THINKS, STOP, OPENS, "red", None),  # two line breaks are one token, the prompt ends in one
    ],
)
def test_answers_by_chat_templates(
    answer: str, stop: str, opening: str, text: str, want: str | None, models: dict[str, Path]
) -> None:
    """`opening` is what the template writes behind `assistant` if no answer follows."""
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    for old, new in (("{{ m.content }}", answer), (STOP, stop), ("assistant\n", "assistant\n" + opening)):
        processor.template = processor.template.replace(old, new)
    processor.tokenizer.add_tokens(["\n\n"])
    if want is None:
        with pytest.raises(DataError, match="row:7"):
            taught(processor, text, opens_thinking=opening == OPENS)
    else:
        ids = processor.tokenizer.encode(want + STOP)
        got = taught(processor, text, opens_thinking=opening == OPENS)
        assert got == "|".join(processor.tokenizer.convert_ids_to_tokens(ids))


def text_of(column: str, value: Any, *rewards: Any, template: str | None = None, **options: Any) -> str:
    """The text that a row teaches, whose image the model sees at 0.56 and 0.42 of its size."""
    config = small_config("m", rewards=list(rewards), data={"gold_template": template})
    sample = tiny.sample("row:7", "?", (tiny.picture(0, 100, 200),), **{column: value, "task": "b"})
    tensors: Any = None
    prompt = Prompt(sample, (), EnginePrompt((), (tiny.picture(0, 56, 84),)), tensors, {})
    return GoldAnswers(config, column, options.get("lists")).text(prompt, options.get("turn", 0))


BOX, OTHER = [10, 20, 60, 120], {"name": "iou", "when": {"task": "a"}}
MISSING: tuple[Any, ...] = (None, "", " ", [], [None], [" "], "[' ']", math.nan)
CASES: list[tuple[str, Any, list[Any], dict[str, Any], str | None]] = [
    ("answer", ["red"], ["exact_match"], {}, "red"),
    ("answer", ["red", None, " "], [], {}, "red"),
    ("answer", 3.0, [], {}, "3"),
    ("answer", [3.0], ["numeric"], {}, "3"),
    ("answer", "['red']", [], {}, "red"),
    ("answer", "[1, 2]", [], {}, "[1, 2]"),
    ("answer", BOX, [], {}, "[10, 20, 60, 120]"),
    ("answer", "null", [], {}, "null"),
    ("answer", ["3", 4], [], {"lists": "first"}, "3"),
    ("answer", ["a", "b"], ["anls"], {"lists": "first", "turn": 1}, "a"),
    *(("answer", ["a", "b", "c"], [], {"lists": "each", "turn": n}, "abca"[n]) for n in range(4)),
    ("answer", "red", [], {"template": "<answer>{gold}</answer>"}, "<answer>red</answer>"),
    ("answer", "(2, -3)", ["math"], {}, r"\boxed{(2, -3)}"),
    ("answer", ["cat", "dog"], [{"name": "contains", "mode": "all"}], {}, "cat\ndog"),
    ("answer", ["", "dog"], ["contains"], {}, "dog"),
    ("boxes", [], ["box_match"], {}, "[]"),
    ("box", BOX, ["iou"], {}, "[5.6, 8.4, 33.6, 50.4]"),
    ("box", str(BOX), ["iou"], {"lists": "each", "turn": 1}, "[5.6, 8.4, 33.6, 50.4]"),
    ("box", BOX, [OTHER, {"name": "giou", "layout": "yxyx"}], {}, "[8.4, 5.6, 50.4, 33.6]"),
    ("boxes", [BOX, BOX], ["box_match"], {}, "[5.6, 8.4, 33.6, 50.4] [5.6, 8.4, 33.6, 50.4]"),
    ("interval", [4, 8], ["temporal_iou"], {}, "[4, 8]"),
    ("box", [], ["iou"], {}, None),
    ("box", [10, 20], ["iou"], {}, None),  # the reward cannot read it
    ("answer", "red", [{"name": "exact_match", "answer": "blue"}], {}, "red"),  # the reward reads no column
    ("answer", ["a", "b"], ["anls"], {}, None),
    ("answer", "['a', 'b']", ["choice"], {}, None),
    ("answer", [3, 4], ["numeric"], {}, None),
    ("answer", object(), ["exact_match"], {}, None),
    *(("answer", value, [], {}, None) for value in MISSING),
    *(("answer", value, [name], {}, None) for value in MISSING for name in ("exact_match", "contains")),
]


@pytest.mark.parametrize(("column", "value", "rewards", "options", "want"), CASES)
def test_texts_of_golds(column: str, value: Any, rewards: Any, options: Any, want: str | None) -> None:
    if want is None:
        with pytest.raises(DataError, match="row:7"):
            text_of(column, value, *rewards, **options)
    else:
        assert text_of(column, value, *rewards, **options) == want


def test_golds_take_turns_over_the_passes_and_long_ones_are_dropped(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "x", "answer": gold} for gold in (["a", "b"], "red " * 9, "c")]
    update, steps = Learner.update, []

    def noted(self: Learner, groups: Any) -> Any:
        steps.append([group.completions[0].text for group in groups])
        return update(self, groups)

    monkeypatch.setattr(Learner, "update", noted)
    data = {"shuffle": False, "on_overlong": "drop", "text_only": True}
    config = small_config(models["qwen2_5_vl"], tmp_path / "run", rollout={"prompts_per_step": 2}, data=data)
    warm(config, answer="answer", lists="each", steps=3, train=rows)
    assert steps == [["a"], ["c", "b"], ["c"]]
    assert [row["prompts/dropped"] for row in rows_of(tmp_path / "run-warm")] == [1, 0, 1]
