"""Runs that are larger than their GPU, on a CPU that is taken for one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.cli.unexpected import describe
from mm_grpo.errors import ConfigError, EngineError, RewardError
from mm_grpo.preflight import out_of_memory
from mm_grpo.preflight.memory import GB
from mm_grpo.preflight.out_of_memory import OutOfDeviceMemory, memory_explained, refuse_too_large


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this machine one with a GPU of so many bytes, for what estimates and refuses."""

    def give(size: int) -> None:
        monkeypatch.setattr(out_of_memory, "resolve_device", lambda name: torch.device("cuda"))
        monkeypatch.setattr(out_of_memory, "device_memory", lambda device: size)

    return give


@pytest.mark.field_bug("out-of-memory")
def test_a_phase_past_the_card_is_refused_before_weights_are_loaded(
    models: dict[str, Path], tmp_path: Path, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_grpo.learner.model.load_model", lambda *a: pytest.fail("weights were loaded"))
    config = config_for(models["qwen2_5_vl"], tmp_path / "run")
    card(1_050_000_000)  # 500 million are CUDA's, and 512 MiB of a tile of the head
    with pytest.raises(ConfigError, match=r"(?s)model.path = .*while it learns.*optim.max_tokens_per_pack="):
        GRPOTrainer(config, train=ROWS, rewards=[vowels])


def test_the_first_remedy_beside_vllm_is_that_it_sleeps(models: dict[str, Path], card: Any) -> None:
    """What each holds fits, and both together do not."""
    vllm = {"gpu_memory_utilization": 0.6, "sleep_level": 0}
    config = config_for(models["qwen2_5_vl"], "unused", rollout={"engine": "vllm", "vllm": vllm})
    card(round(6.4 * GB))  # 3.84 vLLM's, 2 its graphs', 0.5 CUDA's, and 0.09 the learner's
    with pytest.raises(ConfigError, match=r"set rollout.vllm.sleep_level=2 \("):
        refuse_too_large(config)
    refuse_too_large(config.with_values({"rollout.vllm.sleep_level": 2}))
    default = config_for(models["qwen2_5_vl"], "unused", rollout={"engine": "vllm"})
    assert default.rollout.vllm.sleep_level == 2


@pytest.mark.parametrize(
    ("error", "wrapped"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), False),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"), True),
    ],
    ids=["allocator", "torch", "vllm"],
)
def test_a_full_card_ends_in_the_settings_that_help(
    error: Exception, wrapped: bool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = {"gpu_memory_utilization": 0.61, "sleep_level": 0}
    config = config_for(models["qwen2_5_vl"], "unused", rollout={"engine": "vllm", "vllm": vllm})
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: round(6.5 * GB / 0.9))

    def fail() -> None:
        if wrapped:
            raise EngineError("vLLM failed while it took memory back") from error
        raise error

    words = r"set rollout.vllm.sleep_level=2.*learns.*samples.*of 7.2 GB"
    with pytest.raises(OutOfDeviceMemory, match=words) as found, memory_explained(config, processes=1):
        fail()
    assert not isinstance(found.value, (ConfigError, EngineError))  # exit code 1
    assert str(found.value) in describe(found.value)  # not cut short
    # a reward's own GPU, and anything else, is not the learner's
    for other in (RewardError("judge: CUDA out of memory"), ValueError("out of memory")):
        with pytest.raises(type(other)), memory_explained(config, processes=1):
            raise other from error if isinstance(other, RewardError) else None
    assert not out_of_memory.is_out_of_memory(None)


def test_a_model_that_the_estimate_cannot_read_is_let_through(
    models: dict[str, Path], tmp_path: Path, card: Any
) -> None:
    shutil.copy(models["internvl"] / "config.json", tmp_path)
    card(1000)
    refuse_too_large(config_for(tmp_path, "unused"))
