"""One field: what it takes, and that what it does not take is refused in one line that names the field."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError

pytestmark = pytest.mark.lowest

MODEL = {"path": "a/model"}


def config(**sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": MODEL, **sections})


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b", with a model beside it."""
    tree: dict[str, Any] = functools.reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)
    return {**tree, "model": MODEL | tree.get("model", {})}


def refused(path: str, value: Any) -> str:
    """The lines about a value of one field."""
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict(nested(path, value))
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "legal"),
    [
        ("run.report", "yes", "true or false"),
        ("run.headline", "iou", "exact_match >= 1"),
        ("run.guards", {"duplicate_completion": "off"}, "the nearest is duplicate_completions"),
        ("model.device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("model.dtype", "bf16", "write bfloat16"),
        ("rollout.eval.top_p", 1.5, "a number > 0 and <= 1"),
        ("rollout.server.urls", ["localhost:8000"], "http://127.0.0.1:8000"),
        ("algorithm.loss_type", "drgrpo", "the nearest is dr_grpo"),
        ("algorithm.loss_type", "ppo", "write grpo"),
        ("data.system_prompt", "prompt.txt", "the name of a file"),
        ("data.system_prompt", "pyproject.toml", "the name of a file"),
        ("data.train", [{"path": "a", "system_prompt": "b.md"}], "the name of a file"),
        ("rollout", None, "must be a section; its keys are rollout.engine"),
        ("algorithm.advantage_estimator", "GAE", "mm_grpo has none"),
        ("optim.zero_stage", 4, "0, 1, 2 or 3"),
        ("data.gold_template", "answer", "{gold}"),
        ("data.train", {"split": "train"}, "the key task"),
        ("data.train", [{"path": "a", "split": "x"}, "b"], "folder:split"),
        ("data.train", [{"path": "a", "colums": {}}, "b"], "the nearest is source.columns"),
        ("data.eval", {"test": "a.jsonl", "size": 20}, "the set size"),
        ("rewards", [{"name": "iou", "weight": "big"}], "weight"),
        ("rewards", [len], "GRPOTrainer"),
        ("optim.learning_rate", float("inf"), "must be"),
    ],
)
def test_a_wrong_value_gets_one_line_with_what_is_legal(path: str, value: Any, legal: str) -> None:
    line = refused(path, value)
    assert line.startswith(path) and legal in line and "\n" not in line


def test_values_of_trl_and_of_pyyaml_are_read_as_ours() -> None:
    for given, kept in ((True, "group"), (False, "none"), ("batch", "batch")):
        assert config(algorithm={"scale_rewards": given}).algorithm.scale_rewards == kept
    parsed = config(optim={"learning_rate": "1e-6"}, algorithm={"epsilon_high": "2.8e-1"})
    assert (parsed.optim.learning_rate, parsed.algorithm.epsilon_high) == (1e-6, 0.28)


def test_sources() -> None:
    task = {"task": "shapes", "split": "train", "size": 2000, "kinds": ("colour", "shape")}
    parsed = config(data={"train": task, "eval": {"test": task, "other": "rows.jsonl"}})
    kept = {"task": "shapes", "split": "train", "size": 2000, "kinds": ["colour", "shape"]}
    assert parsed.data.train == kept
    assert list(parsed.data.eval_sets().items()) == [("test", kept), ("other", "rows.jsonl")]
    assert config(data={"eval": task}).data.eval_sets() == {"eval": kept}
    assert config(data={"eval": "rows.jsonl"}).data.eval_sets() == {"eval": "rows.jsonl"}
    assert config().data.eval_sets() == {}
    mixed = [{"path": "a.jsonl", "weight": "3", "columns": {"answer": "label"}}, "b.jsonl"]
    entry = {"path": "a.jsonl", "weight": 3.0, "columns": {"answer": "label"}}
    assert config(data={"train": mixed}).data.train == [entry, "b.jsonl"]


def test_options_of_losses_and_features_have_defaults_and_bounds() -> None:
    parsed = config(algorithm={"loss_type": "sapo", "sapo_temperature_pos": 2.0}).algorithm
    assert (parsed.sapo_temperature_pos, parsed.sapo_temperature_neg) == (2.0, 1.05)
    parsed = config(algorithm={"perception_coef": 0.1, "perception_mask_ratio": 0.5}).algorithm
    assert (parsed.perception_mask_ratio, parsed.perception_entropy_coef) == (0.5, 0.0)
    assert config(algorithm={"loss_type": "vespo", "vespo_k_neg": 0}).algorithm.vespo_k_neg == 0
    for algorithm, line in (
        ({"loss_type": "sapo", "vespo_k_pos": 1}, "vespo_k_pos = 1: is for loss_type = vespo"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0}, "sapo_temperature_neg = 0: must be a number > 0"),
        ({"loss_type": "vespo", "vespo_k_neg": -1}, "vespo_k_neg = -1: must be a number >= 0"),
        ({"perception_coef": 0.1, "perception_mask_ratio": 1.5}, "perception_mask_ratio = 1.5: must be"),
        ({"perception_mask_ratio": 0.5}, "perception_mask_ratio = 0.5: is for perception_coef > 0"),
    ):
        with pytest.raises(ConfigError, match=f"^algorithm.{line}"):
            config(algorithm=algorithm)


def test_former_options_of_the_loss_are_refused_with_their_new_names() -> None:
    same = ["sapo_temperature_pos", "vespo_lambda_neg", "perception_mask_ratio", "perception_entropy_coef"]
    former = {name: name for name in same} | {
        "pgpo_tau": "credit.tau, with rule pgpo", "pgpo_beta": "credit.beta, with rule pgpo",
        "vppo_top_share": "credit.top_share, with rule vppo", "vppo_beta_min": "credit.beta_min, with rule vppo",
    }  # fmt: skip
    lines = refused("algorithm.loss_options", dict.fromkeys(former, 0.5)).splitlines()
    key = "algorithm.loss_options."
    assert lines == [f"{key}{old}: unknown key; write algorithm.{new}" for old, new in former.items()]
