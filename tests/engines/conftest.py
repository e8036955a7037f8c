"""Real vLLM, a new version of which must pass this folder: one tiny engine per family, all in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import tiny
from helpers.families import TABLE
from vllm_rig import Rig, process_state

from mm_grpo.rollout.vllm.engine import VLLMEngine


@pytest.fixture(scope="session")
def rigs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    built: dict[str, Rig] = {}

    def rig_of(family: str) -> Rig:
        if family not in built:
            row, path = TABLE[family], models[family]
            if row.build:
                path = tiny.build(family, tmp_path_factory.mktemp("rig") / family, **row.build)
            built[family] = Rig(path, row.vllm)
        return built[family]

    return rig_of


@pytest.fixture
def one(rigs: Callable[[str], Rig]) -> Rig:
    """One family, for what does not depend on it."""
    found = rigs("qwen2_5_vl")
    found.reset()
    return found


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, dict[str, Any], dict[str, Any]]:
    """A second engine of the process, over an untied model; the process's state before and after its start."""
    path = tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("untied") / "model", seed=5, tie=False)
    hostile = {"do_sample": True, "temperature": 0.1, "top_k": 2, "repetition_penalty": 1.9}
    (path / "generation_config.json").write_text(json.dumps(hostile))
    random.seed(11)
    numpy.random.seed(12)
    torch.manual_seed(13)
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    original = VLLMEngine.__init__

    def watched(self: VLLMEngine, *args: Any) -> None:
        before.update(process_state())
        original(self, *args)
        after.update(process_state())

    VLLMEngine.__init__ = watched  # type: ignore[method-assign]
    try:
        rig = Rig(path, max_num_seqs=16, max_num_batched_tokens=1024)
    finally:
        VLLMEngine.__init__ = original  # type: ignore[method-assign]
    return rig, before, after
