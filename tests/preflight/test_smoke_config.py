"""What a smoke run keeps of a config with a mixture."""

from __future__ import annotations

from pathlib import Path

from mm_grpo import GRPOConfig
from mm_grpo.preflight.smoke import smoke_config, smoke_sets
from mm_grpo.rewards.scorer import Scorer

COLOURS = {"task": "shapes", "split": "train", "size": 2000, "kinds": ["colour"], "image_size": 56}
COUNTS = {"task": "shapes", "split": "train", "size": 900, "kinds": ["count"], "image_size": 56}


def test_a_mixture_stays_one_of_few_rows(tmp_path: Path) -> None:
    mixture = [{"path": COLOURS, "weight": 3, "task": "colour"}, {"path": COUNTS, "task": "count"}]
    heldout = [{"path": COUNTS | {"split": "heldout"}, "task": "count"}, COLOURS | {"split": "heldout"}]
    template = {"enable_thinking": False}  # the tiny model's template has no such name
    config = GRPOConfig.from_dict(
        {
            "model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"},
            "data": {"train": mixture, "eval": heldout, "chat_template_kwargs": template},
            "rewards": [{"name": "exact_match", "when": {"task": "count"}}],
            "rollout": {"engine": "vllm_server"},
            "optim": {"zero_stage": 3},
            "run": {"expected_curve": "curve.json"},
        }
    )
    fixed = ["rollout.engine"]
    smoke = smoke_config(config, tmp_path / "work", str(tmp_path / "run"), folder=tmp_path, fixed=fixed)
    # servers hold the real model
    assert (smoke.rollout.engine, smoke.optim.zero_stage) == ("transformers", 2)
    assert smoke.data.train == [
        {"path": COLOURS | {"size": 16}, "weight": 3, "task": "colour"},
        {"path": COUNTS | {"size": 16}, "task": "count"},
    ]
    assert smoke.run.expected_curve is None  # it is of the real model
    assert smoke.data.chat_template_kwargs == {} and smoke.rewards == config.rewards
    train, evaluations = smoke_sets(smoke)
    assert list(train.weights) == [3, 1] and [len(part) for part in train.sources] == [8, 8]
    assert [len(part) for part in evaluations["eval"].sources] == [1, 1]
    Scorer(smoke.rewards).check(train.columns, train.columns_of_rows)
