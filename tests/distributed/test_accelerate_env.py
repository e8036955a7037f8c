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
PLAIN = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
DEEPSPEED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}  # its stage is then 2
FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


def accept(
    env: dict[str, str], dtype: torch.dtype = torch.float32, device: str = "cpu", **optim: Any
) -> None:
    """Check the launcher under these variables of accelerate and no other."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k not in NUMBERED}
    config = GRPOConfig.from_dict({"model": {"path": "x"}, "optim": optim})
    with patch.dict(os.environ, {**others, **env}, clear=True):
        check_launcher(config, torch.device(device), dtype)


def refused(field: str, env: dict[str, str], **options: Any) -> None:
    """The check fails in one line, which names the field."""
    with pytest.raises(ConfigError) as caught:
        accept(env, **options)
    assert field in str(caught.value) and "\n" not in str(caught.value)


def of_deepspeed(**more: str) -> dict[str, str]:
    return {**NUMBERED, **DEEPSPEED, **{f"ACCELERATE_{name}": value for name, value in more.items()}}


def of_plain(**more: str) -> dict[str, str]:
    return {**NUMBERED, **PLAIN, **{f"ACCELERATE_{name}": value for name, value in more.items()}}


AGREE: list[tuple[dict[str, str], dict[str, Any]]] = [
    (of_plain(USE_FSDP="false", USE_CPU="True"), {}),
    ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}, {}),  # one process
    (of_plain(MIXED_PRECISION="bf16"), {"dtype": torch.bfloat16}),
    (of_deepspeed(GRADIENT_CLIPPING="0.5"), {"max_grad_norm": 0.5}),
    (of_deepspeed(DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu"), {"offload_optimizer": True}),
    (
        of_deepspeed(
            DEEPSPEED_ZERO_STAGE="2", GRADIENT_ACCUMULATION_STEPS="1", GRADIENT_CLIPPING="1.0",
            DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="none", DEEPSPEED_OFFLOAD_PARAM_DEVICE="none",
        ),
        {},
    ),
]  # fmt: skip
CONTRADICT: list[tuple[dict[str, str], dict[str, Any], str]] = [
    (of_plain(USE_FSDP="true"), {}, "distributed_type = FSDP"),
    (of_plain(MIXED_PRECISION="bf16"), {}, "mixed_precision = bf16"),
    (of_plain(DYNAMO_BACKEND="INDUCTOR"), {}, "dynamo_backend = inductor"),
    (of_plain(GRADIENT_ACCUMULATION_STEPS="4"), {}, "gradient_accumulation_steps = 4"),
    (of_plain(USE_CPU="true"), {"device": "cuda"}, "model.device"),
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, {}, "WORLD_SIZE"),
    (of_deepspeed(DEEPSPEED_ZERO_STAGE="1"), {}, "optim.zero_stage is 2"),
    (of_deepspeed(), {"zero_stage": 0}, "optim.zero_stage is 0"),
    (of_deepspeed(GRADIENT_CLIPPING="0.5"), {}, "optim.max_grad_norm is 1"),
    (of_deepspeed(DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="cpu"), {}, "offload_optimizer_device = cpu"),
]


@pytest.mark.parametrize(("env", "options"), AGREE)
def test_what_agrees_with_the_config(env: dict[str, str], options: dict[str, Any]) -> None:
    accept(env, **options)


@pytest.mark.parametrize(("env", "options", "field"), CONTRADICT, ids=[field for *_, field in CONTRADICT])
def test_what_contradicts_the_config(env: dict[str, str], options: dict[str, Any], field: str) -> None:
    refused(field, env, **options)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_stage = 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer_device"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param_device = cpu"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"fp16": {"enabled": True}}, "mixed_precision = fp16"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu = 8"),
        ({"train_batch_size": 64}, "train_batch_size = 64"),
    ],
)  # fmt: skip
def test_a_deepspeed_file(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    env = of_deepspeed(DEEPSPEED_CONFIG_FILE=str(file))
    file.write_text(json.dumps(FILE))
    accept(env)
    file.write_text(json.dumps({**FILE, **change}))
    refused(f"{file}': {field}", env)


def test_a_deepspeed_file_may_come_as_text(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({"zero_optimization": {"stage": 3}})
    for given in (text, urlsafe_b64encode(text.encode()).decode()):
        refused("zero_stage = 3", of_deepspeed(DEEPSPEED_CONFIG_FILE=given))
    for wrong in ("/no/such/file.json", "[1]", "{}"):  # a list; no section zero_optimization
        refused(f"'{wrong}'", of_deepspeed(DEEPSPEED_CONFIG_FILE=wrong))
    text = json.dumps({**FILE, "wall_clock_breakdown": True, "activation_checkpointing": {}})
    with caplog.at_level(logging.WARNING, logger="mm_grpo"):
        accept(of_deepspeed(DEEPSPEED_CONFIG_FILE=text))
    assert "activation_checkpointing, wall_clock_breakdown" in caplog.text


def test_one_gpu_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NUMBERED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"model\.device = 'cuda:1'"):
        start("cuda:1")
