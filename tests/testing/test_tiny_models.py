"""Which family a tiny stand-in is built for: read from a model's config, or from its published name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.testing import tiny_models
from mm_grpo.testing.tiny_models import family_of


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl"),
        ("someone/qwen2_5_vl-finetuned/", "qwen2_5_vl"),
        ("Qwen/Qwen3.5-4B", "qwen3_5"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe"),
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl"),
        ("OpenGVLab/InternVL3_5-1B-HF", "internvl"),
    ],
)
def test_families_by_published_name(name: str, family: str) -> None:
    assert family_of(name) == family


def test_families_by_config_of_a_folder(models: dict[str, Path]) -> None:
    assert {name: family_of(str(path)) for name, path in models.items()} == {name: name for name in models}


@pytest.mark.parametrize("name", ["OpenGVLab/InternVL2-2B", "/no/such/folder", "Qwen/Qwen2.5-3B"])
def test_a_path_of_no_known_family_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tells none of them; give a model folder, or a name such as Qwen/"):
        family_of(name)


def test_the_tokenizer_of_a_stand_in_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(tiny_models._tokenizer("<image>")) > 272
    assert capfd.readouterr() == ("", "")
