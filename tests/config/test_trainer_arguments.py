"""Arguments of TRL's GRPOTrainer are answered with ours, all of them in one message, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import ConfigError

CONFIG = GRPOConfig.from_dict({"model": {"path": "m"}})


def refused(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(*args, **kwargs)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    return str(caught.value).splitlines()


def test_a_call_as_trl_has_it() -> None:
    lines = refused(model="Qwen/Q", reward_funcs=[len], args=object(), train_dataset=[], eval_dataset=[])
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        "config", "reward_funcs", "args", "train_dataset", "eval_dataset",
    ]  # fmt: skip
    assert "rewards=[...]" in lines[1] and "train=..." in lines[3]


def test_arguments_by_position_and_slips() -> None:
    theirs = type("GRPOConfig", (), {"__module__": "trl.trainer.grpo_config"})()
    for args, what in (
        (("Qwen/Q",), "a builtins.str"),
        ((CONFIG, len), "2 arguments"),
        ((theirs,), "a trl.GRPOConfig"),
    ):
        (line,) = refused(*args)
        assert line.startswith("config is ") and what in line
    (line,) = refused()
    assert "missing" in line
    (line,) = refused(CONFIG, trian=[])
    assert "did you mean 'train'" in line


def test_arguments_that_are_other_things_in_trl() -> None:
    lines = refused(CONFIG, rewards=len, processor=object(), resume="runs/a")
    assert [line.split(" ")[0] for line in lines] == ["rewards", "processor", "resume"]
    for rewards in ("count", {"name": "count"}):
        (line,) = refused(CONFIG, rewards=rewards)
        assert line.startswith("rewards = ")


def test_a_config_is_not_assigned_to() -> None:
    with pytest.raises(ConfigError, match=r"^run\.max_steps: .*with_values"):
        CONFIG.run.max_steps = 3  # type: ignore[misc]
    assert CONFIG.run.max_steps is None
