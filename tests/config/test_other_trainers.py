"""Keys that do not exist: names of other trainers, right names in the wrong place, slips of the finger."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.config.section import leaves
from mm_grpo.config.yaml_file import set_value
from mm_grpo.errors import ConfigError, RewardError
from mm_grpo.migrate.keys import FIELDS, PREFIXES, REASONS, REWARDS, VALUES
from mm_grpo.rewards import names, resolve_entry

LEGAL = [path for path, _ in leaves(GRPOConfig)]


def lines_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict({"model": {"path": "m"}, **values})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("key", "named"),
    [
        # TRL, ms-swift
        ("per_device_train_batch_size", "rollout.prompts_per_step"),
        ("steps_per_generation", "optim.updates_per_step"),
        ("num_train_epochs", "run.max_steps"),
        ("resume_from_checkpoint", "--resume"),
        ("fsdp_config", "optim.zero_stage"),
        ("load_in_4bit", "model.quantization"),
        ("dynamic_sample", "rollout.max_attempts"),
        # verl, EasyR1
        ("kl_coef", "algorithm.beta"),
        # a right name without its section, or with it in one key
        ("learning_rate", "write optim.learning_rate"),
        ("optim.learning_rate", "nest it in its section: optim: {learning_rate: ...}"),
        # near misses
        ("num_generation", "the nearest is rollout.num_generations"),
        ("learning-rate", "write optim.learning_rate"),
        ("zzz", "the sections are model, data, rollout, rewards, algorithm, optim, run"),
        # in a section
        ("rollout.num_generation", "the nearest is rollout.num_generations"),
        ("rollout.n", "rollout.num_generations"),
        ("rollout.top_p", "rollout.eval.top_p"),
        ("rollout.eval.topk", "the nearest is rollout.eval.top_k"),
        ("rollout.vllm.tensor_parallel_size", "leave it out"),
        ("data.zzz", "data has train, eval, columns, prompt_template,"),
    ],
)
@pytest.mark.field_bug("sampling-defaults", "unknown-keys")
def test_an_unknown_key_names_ours(key: str, named: str) -> None:
    values: dict[str, Any] = {key: 1}
    if "." in key and key not in LEGAL:
        *sections, leaf = key.split(".")
        values = {leaf: 1}
        for section in reversed(sections):
            values = {section: values}
    (line,) = lines_of(values)
    assert line.startswith(f"{key}: unknown key; ") and named in line


def test_a_config_of_verl_is_translated_leaf_by_leaf() -> None:
    values = {
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 128, "clip_ratio_high": 0.3},
            "rollout": {"n": 5, "val_kwargs": {"temperature": 1.0, "n": 4}},
        },
        "algorithm": {"filter_groups": {"max_num_gen_batches": 10}},
        "optimizer": {"weight_decay": 0},
    }
    found = dict(line.split(": unknown key; write ", 1) for line in lines_of(values))
    assert {key.rpartition(".")[2]: ours.split()[0] for key, ours in found.items()} == {
        "path": "model.path",
        "lr": "optim.learning_rate",
        "ppo_mini_batch_size": "rollout.prompts_per_step",
        "clip_ratio_high": "algorithm.epsilon_high",
        "temperature": "rollout.eval.temperature",
        "n": "rollout.eval.num_generations",
        "max_num_gen_batches": "rollout.max_attempts",
        "weight_decay": "optim.weight_decay",
    }


def test_every_row_names_keys_that_exist_and_stands_once() -> None:
    assert [path for path in FIELDS if path not in LEGAL] == []
    sections = sorted({path.split(".")[0] for path in LEGAL if "." in path})
    named = re.compile(rf"(?<![\w./])(?:{'|'.join(sections)})\.[a-z_0-9]+(?:\.[a-z_0-9]+)?")
    values = [text for advice in VALUES.values() for text in advice.values()]
    for text in [*REASONS, *PREFIXES.values(), *values]:
        for path in named.findall(text):
            assert path in LEGAL, text
    for table in (FIELDS, REASONS):
        names = " ".join(table.values()).split()
        assert sorted(names) == sorted(set(names))


def test_every_advised_value_is_one_that_its_field_refuses() -> None:
    for path, advice in VALUES.items():
        for name, text in advice.items():
            values: dict[str, Any] = {"model": {"path": "m"}}
            set_value(values, path.split("."), int(name) if name.isdigit() else name, path)
            (line,) = lines_of(values)
            assert line.startswith(f"{path} = ") and line.endswith(f"; {text}")


def test_a_reward_of_another_trainer() -> None:
    assert set(REWARDS.values()) <= set(names())
    with pytest.raises(RewardError, match="unknown reward 'accuracy_reward'; the nearest here is math"):
        resolve_entry("accuracy_reward")
