"""Fields for several processes and for checkpoints: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError


def test_what_holds_when_nothing_is_said() -> None:
    config = GRPOConfig(model={"path": "m"})
    assert (config.optim.zero_stage, config.optim.offload_optimizer) == (2, False)
    assert (config.run.save_every, config.run.keep_checkpoints, config.run.process_timeout) == (0, 2, 1800.0)


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        (
            "optim",
            {"zero_stage": 3},
            r"optim.zero_stage = 3: must be 0, 1 or 2; stage 3 shares out the weights",
        ),
        ("optim", {"zero_stage": 4}, r"optim.zero_stage = 4: must be 0, 1 or 2$"),
        ("optim", {"zero_stage": -1}, r"optim.zero_stage = -1: must be"),
        (
            "optim",
            {"zero_stage": 0, "offload_optimizer": True},
            r"optim.offload_optimizer = true: needs optim.zero_stage 1 or 2, and that is 0",
        ),
        ("run", {"save_every": -1}, r"run.save_every = -1: must be"),
        ("run", {"keep_checkpoints": 0}, r"run.keep_checkpoints = 0: must be"),
        ("run", {"process_timeout": 0}, r"run.process_timeout = 0.*: must be"),
    ],
)
def test_what_is_refused(section: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig.from_dict({"model": {"path": "m"}, section: fields})
