"""What a launcher was configured with against our config; the environments are those that accelerate 1.15 makes."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.accelerate_env import check_launcher
from mm_grpo.errors import ConfigError

pytestmark = pytest.mark.lowest

NUMBERED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
PLAIN = {**NUMBERED, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
"""What accelerate 1.15 sets where its file says nothing about training."""


def accept(env: dict[str, str], dtype: Any = torch.float32, device: str = "cpu", **optim: Any) -> None:
    """Check the launcher under these variables of accelerate and no other."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k not in NUMBERED}
    config = GRPOConfig.from_dict({"model": {"path": "x"}, "optim": optim})
    with patch.dict(os.environ, {**others, **env}, clear=True):
        check_launcher(config, torch.device(device), dtype)


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("USE_FSDP", "true", {"USE_FSDP": "false"}),
        ("USE_FSDP", "true", {"zero_stage": 3}),
        ("MIXED_PRECISION", "bf16", {"dtype": torch.bfloat16}),
        ("GRADIENT_ACCUMULATION_STEPS", "4", {"GRADIENT_ACCUMULATION_STEPS": "1"}),
        ("USE_CPU", "True", {"USE_CPU": "False"}),
        ("DEEPSPEED_ZERO_STAGE", "1", {"zero_stage": 1}),
        ("DEEPSPEED_ZERO_STAGE", "0", {"zero_stage": 0}),
        ("GRADIENT_CLIPPING", "0.5", {"max_grad_norm": 0.5}),
        ("GRADIENT_CLIPPING", "2", {"max_grad_norm": 2.0}),
        ("GRADIENT_CLIPPING", "2", {"GRADIENT_CLIPPING": "1.0", "max_grad_norm": 1.0}),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", {"offload_optimizer": True}),
        ("DEEPSPEED_CONFIG_FILE", "ds.json", {"DEEPSPEED_CONFIG_FILE": "none"}),
    ],
)
def test_a_setting_is_the_config_s_or_refused(name: str, value: str, options: dict[str, Any]) -> None:
    """`options` make it agree: those of the config, or another value of the setting."""
    variable, changed = f"ACCELERATE_{name}", {name: options.pop(name, value)}
    with pytest.raises(ConfigError, match=f"{name.lower()} = {value.lower()}: must be"):
        accept({**PLAIN, variable: value}, device="cuda")
    accept({**PLAIN, variable: changed[name]}, device="cuda", **options)


def test_on_a_cpu_accelerate_starts_one_process() -> None:
    accept({**PLAIN, "ACCELERATE_USE_CPU": "True"})
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        accept({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"})
