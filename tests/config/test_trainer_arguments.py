"""Arguments of TRL's GRPOTrainer are answered with ours, all of them in one message, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import ConfigError

CONFIG = GRPOConfig.from_dict({"model": {"path": "m"}})
OWN = "GRPOTrainer takes config, train, eval, rewards, model, processor, tools, environment_factory, callbacks, resume"


def refused(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(*args, **kwargs)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    return str(caught.value).splitlines()


def test_a_call_as_trl_has_it() -> None:
    assert refused(model="Qwen/Q", reward_funcs=[len], args=object(), train_dataset=[], eval_dataset=[]) == [
        "config is missing: write GRPOTrainer(GRPOConfig(model=ModelConfig(path=...), ...), ...)",
        "reward_funcs: unknown argument; write rewards=[...]",
        "args: unknown argument; the config is the first argument: GRPOTrainer(GRPOConfig(...), ...)",
        "train_dataset: unknown argument; write train=...",
        "eval_dataset: unknown argument; write eval=...",
        "model = 'Qwen/Q': is a model object to train; a name or a folder goes into the config: "
        "GRPOConfig(model=ModelConfig(path='Qwen/Q'), ...)",
    ]


def test_arguments_by_position_and_slips() -> None:
    assert refused("Qwen/Q") == [
        "config is 'Qwen/Q'; a model is named in the config: GRPOConfig(model=ModelConfig(path='Qwen/Q'), ...)"
    ]
    assert refused("Qwen/Q", len) == [
        "GRPOTrainer: 2 arguments by position; the config is the only one: write GRPOTrainer(config, train=..., "
        "rewards=[...])"
    ]
    assert refused(CONFIG, trian=[]) == [f"trian: unknown argument; did you mean 'train'? {OWN}"]
    theirs = type("GRPOConfig", (), {"__module__": "trl.trainer.grpo_config"})()
    assert refused(theirs) == [
        "config is a GRPOConfig of TRL; it must be a GRPOConfig of mm_grpo: write GRPOConfig.from_dict(...) or "
        "GRPOConfig.from_yaml(path)"
    ]
