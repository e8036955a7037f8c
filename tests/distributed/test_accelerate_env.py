"""What a launcher was configured with against our config; the environments are those that accelerate 1.15 makes."""

from __future__ import annotations

import json
import logging
import os
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.accelerate_env import check_launcher
from mm_grpo.distributed.ranks import start
from mm_grpo.errors import ConfigError

NUMBERED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
PLAIN = {**NUMBERED, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
DEEPSPEED = {**NUMBERED, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}
STAGE_3 = (
    "stage 3 shares out the weights themselves, and a rollout engine in the trainer's processes needs them"
)


def config_for(**optim: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": "x"}, "optim": optim})


def accept(
    env: dict[str, str], dtype: torch.dtype = torch.float32, device: str = "cpu", **optim: Any
) -> None:
    """Check the launcher under these variables of accelerate and no other."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k not in NUMBERED}
    with patch.dict(os.environ, {**others, **env}, clear=True):
        check_launcher(config_for(**optim), torch.device(device), dtype)


def refusals(env: dict[str, str], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        accept(env, **options)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    "env",
    [
        {},
        NUMBERED,
        PLAIN,
        DEEPSPEED,  # accelerate's stage is then 2
        {**PLAIN, "ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_CPU": "True"},
        {
            **DEEPSPEED,
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        },
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"},  # one process
    ],
)
def test_what_agrees_with_the_config(env: dict[str, str]) -> None:
    accept(env)


@pytest.mark.parametrize(
    ("env", "field"),
    [
        ({**PLAIN, "ACCELERATE_USE_FSDP": "true"}, "distributed_type = FSDP"),
        ({**PLAIN, "ACCELERATE_USE_MEGATRON_LM": "true"}, "distributed_type = MEGATRON_LM"),
        ({**PLAIN, "ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision = fp16"),
        ({**PLAIN, "ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision = bf16: the weights are float32 here"),
        ({**PLAIN, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend = INDUCTOR"),
        ({**PLAIN, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps = 4"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, f"accelerate's zero_stage = 3: {STAGE_3}"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "zero_stage = 1: optim.zero_stage is 2"),
        ({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "gradient_clipping = 0.5: optim.max_grad_norm is 1"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device = cpu"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device = nvme"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "offload_param_device = cpu"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "WORLD_SIZE"),
    ],
)  # fmt: skip
def test_what_contradicts_the_config(env: dict[str, str], field: str) -> None:
    (line,) = refusals(env)
    assert field in line


def test_the_config_may_say_the_same() -> None:
    accept({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, zero_stage=1)
    accept({**DEEPSPEED, "ACCELERATE_GRADIENT_CLIPPING": "0.5"}, max_grad_norm=0.5)
    accept({**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, offload_optimizer=True)
    (line,) = refusals(DEEPSPEED, zero_stage=0)
    assert "accelerate's zero_stage = 2: optim.zero_stage is 0" in line
    accept(DEEPSPEED, offload_optimizer=True)  # accelerate's default, "none", contradicts nothing
    (line,) = refusals(
        {**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none"}, offload_optimizer=True
    )
    assert "offload_optimizer_device = none: optim.offload_optimizer is true; set the same in both" in line
    accept({**PLAIN, "ACCELERATE_MIXED_PRECISION": "bf16"}, dtype=torch.bfloat16)


def test_a_cpu_for_accelerate_is_no_gpu_for_the_config() -> None:
    (line,) = refusals({**PLAIN, "ACCELERATE_USE_CPU": "true"}, device="cuda")
    assert "accelerate's use_cpu = true: model.device = 'auto' is a GPU here" in line


def file_env(path: Path | str) -> dict[str, str]:
    return {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}


GOOD = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"zero_optimization": {"stage": 3}}, f"zero_stage = 3: {STAGE_3}"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer_device",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param_device = cpu",
        ),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"gradient_clipping": 2.0}, "gradient_clipping = 2.0"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"fp16": {"enabled": True}}, "mixed precision = fp16"),
        ({"bf16": {"enabled": True}}, "mixed precision = bf16"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu = 8"),
        ({"train_batch_size": 64}, "train_batch_size = 64"),
    ],
)
def test_a_deepspeed_file(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GOOD))
    accept(file_env(file))
    file.write_text(json.dumps({**GOOD, **change}))
    (line,) = refusals(file_env(file))
    assert line.startswith(f"DeepSpeed's config '{file}': ") and field in line


def test_a_deepspeed_file_may_come_as_text() -> None:
    text = json.dumps({"zero_optimization": {"stage": 3}})
    for given in (text, urlsafe_b64encode(text.encode()).decode()):
        (line,) = refusals(file_env(given))
        assert STAGE_3 in line
    (line,) = refusals(file_env("/no/such/file.json"))
    assert "DeepSpeed's config '/no/such/file.json': cannot be used" in line
    for wrong in ("[1]", "{}"):  # a list; no section zero_optimization
        (line,) = refusals(file_env(wrong))
        assert f"DeepSpeed's config '{wrong}': cannot be used" in line


def test_what_has_no_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({**GOOD, "wall_clock_breakdown": True, "activation_checkpointing": {}})
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        accept(file_env(text))
    assert "activation_checkpointing, wall_clock_breakdown has no effect" in caplog.text


def test_one_gpu_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NUMBERED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"model.device = 'cuda:1' is one GPU, and 2 processes need one"):
        start("cuda:1")
