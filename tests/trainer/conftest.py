"""The model of most runs, and an engine in its place that samples while the learner works."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.ahead import use_server


@pytest.fixture
def model(models: dict[str, Path]) -> Path:
    return models["qwen2_vl"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(monkeypatch)
