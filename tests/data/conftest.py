"""The library's cache of datasets is each test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
