"""A model of the hub while the hub does not answer. That one that is nowhere is refused soon: robustness/cases.py."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from mm_grpo.processors import model_folder
from mm_grpo.processors.model_folder import read_config


def test_what_is_in_the_cache_is_used_with_a_warning(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abc")
    (cached / "snapshots" / "0123abc").mkdir(parents=True)
    shutil.copy(models["qwen2_vl"] / "config.json", cached / "snapshots" / "0123abc")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_folder, "hub_fault", lambda path: "it cannot be reached")
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        assert read_config("org/name").model_type == "qwen2_vl"
    assert "cannot be reached" in caplog.text and "the files in the cache are used" in caplog.text
    assert hub.HF_HUB_OFFLINE  # so that what is not in the cache is missed at once
