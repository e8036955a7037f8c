"""Options that contradict or ignore one another, a line for each; and what other trainers call them."""

from __future__ import annotations

from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError

LORA = {"lora": {"rank": 4}}
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}


def config(**sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({**sections, "model": {"path": "m", **sections.get("model", {})}})


def lines_of(**sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value).splitlines()


def test_defaults_change_nothing() -> None:
    made = config()
    assert (made.algorithm.advantage_estimator, made.algorithm.multi_objective_aggregation) == (
        "grpo",
        "sum_then_normalize",
    )
    assert (made.algorithm.kl_estimator, made.algorithm.kl_in_reward) == ("k3", False)
    assert (made.algorithm.sync_ref_model, made.algorithm.ref_model_mixup_alpha) == (False, 0.6)
    assert (made.algorithm.ref_model_sync_steps, made.algorithm.top_entropy_quantile) == (512, 1.0)
    assert (made.rollout.dynamic_sampling, made.rollout.max_attempts) == (False, 1)


@pytest.mark.parametrize("bound", [None, 0.2])
def test_cispo_asks_for_its_bound(bound: float | None) -> None:
    (line,) = lines_of(algorithm={"loss_type": "cispo", "epsilon_high": bound})
    shown = "null" if bound is None else bound
    assert line.startswith(
        f"algorithm.epsilon_high = {shown}: algorithm.loss_type = 'cispo' multiplies the gradient"
    )
    assert config(algorithm={"loss_type": "cispo", "epsilon_high": 5.0}).algorithm.epsilon_high == 5.0


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"algorithm": {"advantage_estimator": "rloo", "scale_rewards": "batch"}},
            "algorithm.scale_rewards = 'batch': algorithm.advantage_estimator = 'rloo' brings its own scale and"
            " would ignore this; leave it out",
        ),
        (
            {"algorithm": {"advantage_estimator": "reinforce_plus_plus_baseline", "scale_rewards": False}},
            "algorithm.scale_rewards = 'none': algorithm.advantage_estimator = 'reinforce_plus_plus_baseline'"
            " brings its own scale and would ignore this; leave it out",
        ),
        (
            {"algorithm": {**GDPO, "scale_rewards": "batch"}},
            "algorithm.scale_rewards = 'batch': algorithm.multi_objective_aggregation = 'normalize_then_sum'"
            " brings its own scale and would ignore this; leave it out",
        ),
        (
            {"algorithm": {**GDPO, "advantage_estimator": "rloo"}},
            "algorithm.advantage_estimator = 'rloo': must be grpo with algorithm.multi_objective_aggregation ="
            " 'normalize_then_sum', which compares each reward with its group in its own way",
        ),
        (
            {"algorithm": {**GDPO, "kl_in_reward": True, "beta": 0.1}},
            "algorithm.kl_in_reward = true: must be false with algorithm.multi_objective_aggregation ="
            " 'normalize_then_sum', which normalises each reward by itself, and the KL is none of them; leave the"
            " KL in the loss",
        ),
        (
            {"algorithm": {"kl_in_reward": True}},
            "algorithm.kl_in_reward = true: needs algorithm.beta > 0, the weight of the KL, and that is 0",
        ),
        (
            {"algorithm": {"kl_estimator": "k1", "beta": 0.04}},
            "algorithm.kl_estimator = 'k1': must be k2 or k3 where the KL is a term of the loss, because the"
            " gradient of k1 there has mean 0; or set algorithm.kl_in_reward = true",
        ),
        (
            {"algorithm": {"sync_ref_model": True}},
            "algorithm.sync_ref_model = true: needs algorithm.beta > 0; at 0 there is no reference model to move",
        ),
        (
            {"algorithm": {"sync_ref_model": True, "beta": 0.1}, "model": LORA},
            "algorithm.sync_ref_model = true: must be false with model.lora, whose reference is the model without"
            " its adapters, and that never moves; set model.lora = null to train every weight",
        ),
        (
            {"algorithm": {"delta": 1.25, "epsilon_high": 0.28}},
            "algorithm.delta = 1.25: must be above 1 + algorithm.epsilon_high, which is 1.28; at or below it, delta"
            " would bound positive advantages, and would not be the bound of negative ones",
        ),
        (
            {"algorithm": {"delta": 1.1}},
            "algorithm.delta = 1.1: must be above 1 + algorithm.epsilon, which is 1.2; at or below it, delta"
            " would bound positive advantages, and would not be the bound of negative ones",
        ),
        (
            {"algorithm": {"delta": 4.0, "loss_type": "sapo"}},
            "algorithm.delta = 4.0: algorithm.loss_type = 'sapo' has no such bound and would ignore this; leave it"
            " out",
        ),
        (
            {"algorithm": {"importance_sampling_level": "sequence", "loss_type": "vespo"}},
            "algorithm.importance_sampling_level = 'sequence': algorithm.loss_type = 'vespo' weighs whole completions"
            " in its own way and would ignore this; leave it out",
        ),
        (
            {"algorithm": {"importance_sampling_level": "sequence", "loss_type": "dppo_tv"}},
            "algorithm.importance_sampling_level = 'sequence': algorithm.loss_type = 'dppo_tv' weighs tokens in its own"
            " way and would ignore this; leave it out",
        ),
        (
            {"algorithm": {"top_entropy_quantile": 0.5, "loss_type": "gmpo"}},
            "algorithm.top_entropy_quantile = 0.5: algorithm.loss_type = 'gmpo' takes the mean over all tokens of a"
            " completion; leave it out",
        ),
        (
            {"algorithm": {"advantage_estimator": "maxrl", "kl_in_reward": True, "beta": 0.1}},
            "algorithm.kl_in_reward = true: must be false with algorithm.advantage_estimator = 'maxrl', which divides"
            " by the mean of rewards, and that may be 0 or less with a KL taken off; leave the KL in the loss",
        ),
        (
            {"algorithm": {"reference_path": "teacher"}},
            "algorithm.reference_path = 'teacher': needs algorithm.beta > 0, the weight of the KL from that model, and"
            " that is 0",
        ),
        (
            {"algorithm": {"reference_path": "teacher", "beta": 0.1, "sync_ref_model": True}},
            "algorithm.sync_ref_model = true: must be false with algorithm.reference_path, for a reference that moves"
            " towards the policy would soon be that model no longer",
        ),
        (
            {"algorithm": {"advantage_estimator": "maxrl", "scale_rewards": "none"}},
            "algorithm.scale_rewards = 'none': algorithm.advantage_estimator = 'maxrl' brings its own scale and would"
            " ignore this; leave it out",
        ),
        (
            {
                "algorithm": {
                    "importance_sampling_mode": "token_mask",
                    "importance_sampling_clip_min": 2.0,
                    "importance_sampling_clip_max": 0.5,
                }
            },
            "algorithm.importance_sampling_clip_min = 2.0: must be below algorithm.importance_sampling_clip_max, which"
            " is 0.5; no weight lies between them",
        ),
        (
            {"rollout": {"dynamic_sampling": True}},
            "rollout.dynamic_sampling = true: needs rollout.max_attempts >= 2, the first attempt and at least one"
            " that replaces groups, and that is 1",
        ),
        (
            {"rollout": {"max_attempts": 3}},
            "rollout.max_attempts = 3: must be 1 without rollout.dynamic_sampling, the only thing that samples"
            " again; set rollout.dynamic_sampling = true",
        ),
    ],
)
def test_a_contradiction_gets_one_line(sections: dict[str, Any], line: str) -> None:
    assert lines_of(**sections) == [line]


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"advantage_estimator": "rloo", "scale_rewards": "none"}},
        {"algorithm": {"advantage_estimator": "reinforce_plus_plus_baseline", "scale_rewards": "batch"}},
        {"algorithm": {**GDPO, "beta": 0.1}},
        {"algorithm": {"kl_estimator": "k1", "beta": 0.04, "kl_in_reward": True}},
        {"algorithm": {"kl_estimator": "k1"}},
        {"algorithm": {"sync_ref_model": True, "beta": 0.1}},
        {"algorithm": {"beta": 0.1}, "model": LORA},
        {"algorithm": {"delta": 1.3, "epsilon_high": 0.28}},
        {"algorithm": {"importance_sampling_clip_min": 0.5}},
        {"rollout": {"dynamic_sampling": True, "max_attempts": 2}},
    ],
)
def test_what_agrees_is_kept_and_survives_a_file(sections: dict[str, Any]) -> None:
    made = config(**sections)
    assert GRPOConfig.from_dict(made.model_dump()) == made
    for name, value in sections.get("algorithm", {}).items():
        assert getattr(made.algorithm, name) == value


def test_fields_that_need_each_other_are_changed_together() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.max_attempts = 4: must be 1 without"):
        config().with_values({"rollout.max_attempts": 4})
    made = config().with_values({"rollout.max_attempts": 4, "rollout.dynamic_sampling": True})
    assert made.with_values({"algorithm.kl_in_reward": True, "algorithm.beta": 0.1}).algorithm.kl_in_reward


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("top_entropy_quantile", 0.0, "a number > 0 and <= 1"),
        ("top_entropy_quantile", 1.2, "a number > 0 and <= 1"),
        ("ref_model_mixup_alpha", 0, "a number > 0 and <= 1"),
        ("ref_model_sync_steps", 0, "an integer >= 1"),
        ("kl_estimator", "k4", "one of k1, k2, k3"),
        ("multi_objective_aggregation", "gdpo", "one of sum_then_normalize, normalize_then_sum"),
        ("advantage_estimator", "ppo", "one of grpo, rloo, reinforce_plus_plus_baseline, maxrl"),
    ],
)
def test_ranges_of_the_algorithm(field: str, value: Any, legal: str) -> None:
    (line,) = lines_of(algorithm={field: value})
    assert line.startswith(f"algorithm.{field} = {value!r}: must be {legal}")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("reinforce_plus_plus", "write reinforce_plus_plus_baseline, which subtracts the group's mean"),
        ("reinforce_baseline", "write reinforce_plus_plus_baseline"),
        ("GDPO", "write algorithm.multi_objective_aggregation: normalize_then_sum"),
        ("dr_grpo", "write grpo, with algorithm.scale_rewards: none"),
        ("gae", "gae needs a value model, and mm_grpo has none"),
    ],
)
def test_an_estimator_by_its_name_elsewhere(name: str, advice: str) -> None:
    (line,) = lines_of(algorithm={"advantage_estimator": name})
    assert line.startswith(
        f"algorithm.advantage_estimator = {name!r}: must be one of grpo, rloo, reinforce_plus_plus_baseline, maxrl;"
        f" {advice}"
    )


def test_the_scale_gdpo_is_an_aggregation_here() -> None:
    assert lines_of(algorithm={"scale_rewards": "gdpo"}) == [
        "algorithm.scale_rewards = 'gdpo': must be one of group, batch, none; write"
        " algorithm.multi_objective_aggregation: normalize_then_sum"
    ]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("dynamic_sample", "write rollout.dynamic_sampling (and rollout.max_attempts)"),
        (
            "max_resample_times",
            "write rollout.max_attempts (= max_resample_times + 1: the first attempt counts)",
        ),
        ("use_kl_in_reward", "write algorithm.kl_in_reward (and algorithm.beta, the weight of the KL)"),
        ("kl_penalty", "write algorithm.kl_estimator: k1 (verl's kl), k2 (mse) or k3 (low_var_kl)"),
        (
            "adv_estimator",
            "write algorithm.advantage_estimator (grpo, rloo, reinforce_plus_plus_baseline or maxrl)",
        ),
        ("top_entropy_quantile", "write algorithm.top_entropy_quantile"),
        ("sync_ref_model", "write algorithm.sync_ref_model"),
    ],
)
def test_a_key_of_another_trainer(key: str, advice: str) -> None:
    assert lines_of(**{key: 1}) == [f"{key}: unknown key; {advice}"]


def test_the_filter_of_verl_is_translated() -> None:
    assert lines_of(algorithm={"filter_groups": {"enable": True, "max_num_gen_batches": 10}}) == [
        "algorithm.filter_groups.enable: unknown key; write rollout.dynamic_sampling",
        "algorithm.filter_groups.max_num_gen_batches: unknown key; write rollout.max_attempts",
    ]
