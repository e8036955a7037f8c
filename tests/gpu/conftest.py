"""Tests that need a GPU. Where there is none they are skipped, and the run's summary says so."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="no GPU here: tests/gpu was not run"))
