"""Arguments of the chat template: they reach every prompt, and one that the template does not read is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.configs import small_config
from helpers.small_runs import ROWS, config_for

from mm_grpo import GRPOTrainer
from mm_grpo.build import processor_of
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.learner.features.twin_view import TwinPrompts
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Sample

THINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{%- elif style | default('') == 'open' %}{{ '<think>\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def thinker(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template takes enable_thinking, and style: open, which ends a prompt with <think>."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(models["qwen3_vl"], folder)
    template = folder / "chat_template.jinja"
    assert template.is_file()
    template.write_text(template.read_text() + THINKING)
    (folder / "additional_chat_templates").mkdir()  # of several the default one is used
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ other }}")
    return folder


def text_of(path: Path, **arguments: Any) -> str:
    processor = load_processor(str(path), chat_template_kwargs=arguments)
    return processor.decode(processor.prompt(tiny.sample("r", "what")).token_ids)


def test_arguments_change_the_prompt(thinker: Path) -> None:
    plain = text_of(thinker)
    assert plain.endswith("assistant\n") and "think" not in plain
    assert text_of(thinker, enable_thinking=False) == plain + "<think>\n\n</think>\n\n"
    assert text_of(thinker, enable_thinking=True) == plain
    assert text_of(thinker, style="open") == plain + "<think>\n"
    arguments: Any = {}, {"enable_thinking": False}
    processors = [load_processor(str(thinker), chat_template_kwargs=a) for a in arguments]
    longest = [processor.max_prompt_tokens(tiny.sample("r", "what"), 0) for processor in processors]
    assert longest[1] == len(processors[1].prompt(tiny.sample("r", "what")).token_ids) > longest[0]


def asked(**arguments: Any) -> Sample:
    return replace(tiny.sample("train:7", "what"), chat_template_kwargs=arguments)


def test_arguments_of_a_row_are_laid_over_the_runs(thinker: Path) -> None:
    processor: Any = load_processor(str(thinker), chat_template_kwargs={"enable_thinking": False})
    off = "<think>\n\n</think>\n\n"
    rows = {"": asked(), "<think>\n": asked(enable_thinking=True, style="open"), off: asked(style="open")}
    for end, sample in zip((off, "<think>\n", off), rows.values(), strict=True):
        prompt = processor.prompt(sample)
        assert processor.decode(prompt.token_ids) == text_of(thinker) + end
        assert processor.max_prompt_tokens(sample, 0) == len(prompt.token_ids)
        # the turn after an observation begins as the first one did
        assert processor.decode(processor.observation([["seen"]], sample)).endswith("assistant\n" + end)


@pytest.mark.parametrize(
    ("family", "name"), [("", "enable_thinkin"), ("", "tools"), ("qwen2_5_vl", "enable_thinking")]
)
def test_an_argument_of_a_row_that_is_not_read_is_refused(
    family: str, name: str, thinker: Path, models: dict[str, Path]
) -> None:
    processor = load_processor(str(models[family] if family else thinker))
    with pytest.raises(DataError, match=rf"^train:7: chat_template_kwargs\.{name}: "):
        processor.prompt(asked(**{name: False}))


def test_arguments_change_the_prompt_of_a_twin_too(thinker: Path) -> None:
    algorithm = {"twin_view": {"view": "high_resolution", "coef": 0.3, "max_pixels": 12544}}
    data = {"max_pixels": 3200, "chat_template_kwargs": {"style": "open"}}
    config = small_config(thinker, algorithm=algorithm, data=data)
    twins = TwinPrompts(processor_of(config), config)
    ids = twins.processor.prompt(tiny.sample("r", "what")).token_ids
    assert twins.processor.decode(ids) == text_of(thinker, style="open") != text_of(thinker)


def test_an_argument_that_is_not_read_is_refused(thinker: Path, models: dict[str, Path]) -> None:
    for path, name, words in (
        (
            thinker,
            "enable_thinkin",
            r"kwargs\.enable_thinkin: .*'enable_thinking'\? .*: enable_thinking, style",
        ),
        (models["qwen2_5_vl"], "enable_thinking", "does not read 'enable_thinking', .*it reads: none"),
        (thinker, "add_generation_prompt", "add_generation_prompt: is set for every prompt by the run"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_processor(str(path), chat_template_kwargs={name: False})


def test_a_processor_that_is_passed_in_must_have_the_same(thinker: Path, tmp_path: Path) -> None:
    config = config_for(thinker, tmp_path / "run", data={"chat_template_kwargs": {"enable_thinking": False}})
    assert getattr(processor_of(config), "chat_template_kwargs", None) == {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"the processor that was passed in has \{\}"):
        GRPOTrainer(config, train=ROWS, rewards=["format"], processor=load_processor(str(thinker)))


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_template_that_drops_what_a_message_says_is_refused(role: str, models: dict[str, Path]) -> None:
    """Line breaks and spaces may change on the way, and what the model said before may be cut."""
    processor: Any = load_processor(str(models["qwen2_5_vl"]))
    roles = ("system", "user", "assistant")
    messages = [{"role": r, "content": [{"type": "text", "text": f"the {r}\n says"}]} for r in roles]
    shown = (
        "{% for m in messages if m.role != 'ROLE' %}{{ m.content[0].text | replace('\n', ' ') }}{% endfor %}"
    )
    processor.template = shown.replace("ROLE", "assistant")
    processor.prompt(Sample("r:7", messages))
    processor.template = shown.replace("ROLE", role)
    with pytest.raises(DataError, match=rf"^r:7: .*chat template drops .*{role}"):
        processor.prompt(Sample("r:7", messages))
