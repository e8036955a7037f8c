"""Tool calls in what a model wrote, and what templates make of tools and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import picture, sample, video

from mm_grpo.errors import DataError
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.tool_calls import ToolCall, knows_tools, tool_calls
from mm_grpo.types import Sample

SCHEMA = {"type": "function", "function": {"name": "zoom", "parameters": {}}}
KNOWS = (
    "{% if tools %}<|im_start|>system\nTOOLS {% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (
            'a <tool_call>\n{"name": "zoom", "arguments": {"bbox": [0, 1, 2, 3]}}\n</tool_call>',
            [ToolCall("zoom", {"bbox": [0, 1, 2, 3]})],
        ),
        (
            '<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b", "arguments": {}}</tool_call>',
            [ToolCall("a", {}), ToolCall("b", {})],
        ),
        (
            "<tool_call>\n<function=zoom>\n<parameter=bbox>\n[0, 1]\n</parameter>\n<parameter=why>\nlook closer\n"
            "</parameter>\n</function>\n</tool_call>",
            [ToolCall("zoom", {"bbox": [0, 1], "why": "look closer"})],
        ),
        ('<tool_call>{"name": "a"}', [ToolCall("a", {})]),
    ],
)
def test_calls_are_read(text: str, calls: list[ToolCall]) -> None:
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{", "the tool call is no JSON"),
        ("[1]", 'the tool call must be {"name"'),
        ('{"name": "a", "arguments": [1]}', "arguments of the tool call must be a JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body: str, problem: str) -> None:
    (call,) = tool_calls(f"<tool_call>{body}</tool_call>")
    assert call.problem is not None and call.problem.startswith(problem)


@pytest.fixture(params=[False, True], ids=["plain template", "template with tools"])
def processor(request: pytest.FixtureRequest, models: dict[str, Path]) -> Any:
    loaded: Any = load_processor(str(models["qwen2_5_vl"]))
    if request.param:
        loaded.template = KNOWS
    assert knows_tools(loaded.template) == request.param
    return loaded


def test_an_answer_continues_the_conversation_as_the_template_would(processor: Any) -> None:
    image = processor.picture(picture(1, 60, 70), row="a").medium
    clip = processor.picture(video(1), row="a").medium
    ids = processor.observation([["it shows ", clip, image], ["done"]], Sample("a", ()))
    pads = [f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("video", "image")]
    shown = "it shows " + "".join(pads)
    if knows_tools(processor.template):
        turn = "<|im_start|>user\n<tool_response>{}</tool_response><|im_end|>\n"
        expected = turn.format(shown) + turn.format("done")
    else:
        expected = (
            f"<|im_start|>user\n<tool_response>\n{shown}\n</tool_response>\n<tool_response>\ndone\n</tool_response>"
            "<|im_end|>\n"
        )
    assert processor.tokenizer.decode(ids) == f"\n{expected}<|im_start|>assistant\n"


def test_the_prompt_tells_of_the_tools(processor: Any) -> None:
    plain = sample("a", "look", (picture(1, 60, 70),))
    prompt = processor.prompt(Sample("a", plain.messages, plain.images, tools=(SCHEMA,)))
    text = processor.tokenizer.decode(prompt.engine_prompt.token_ids)
    if knows_tools(processor.template):
        assert text.startswith("<|im_start|>system\nTOOLS zoom<|im_end|>\n<|im_start|>user\n")
    else:
        assert text.startswith("<|im_start|>system\nYou may call these tools:\n<tools>\n{")
        assert text.index('"name": "zoom"') < text.index("<|im_start|>user\n")


def test_a_template_that_cannot_show_an_answer(models: dict[str, Path]) -> None:
    loaded: Any = load_processor(str(models["qwen2_5_vl"]))
    loaded.template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(DataError, match=r"train:1: the model's chat template does not show an answer with"):
        loaded.observation([["a"]], Sample("train:1", ()))


@pytest.mark.parametrize("change", ["{{ p.text }}", "<|vision_start|><|image_pad|><|vision_end|>"])
def test_a_template_that_shows_no_video_or_an_image_in_its_place(
    models: dict[str, Path], change: str
) -> None:
    loaded: Any = load_processor(str(models["qwen2_5_vl"]))
    loaded.template = KNOWS.replace("<|vision_start|><|video_pad|><|vision_end|>", change)
    with pytest.raises(DataError, match=r"train:1: .*template does not show an answer with 1 image, 1 video"):
        loaded.observation([["a", video(1), picture(1)]], Sample("train:1", ()))
