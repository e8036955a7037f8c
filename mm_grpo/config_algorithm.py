"""The section `algorithm` of the config: advantages, KL, corrections and the loss.

Written as the sections in `config_fields.py` are. Which options contradict one another is said in
`config_checks.py`; the formulas are in docs/algorithms.md.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import field_validator

from mm_grpo.config_section import Section, mistake, setting
from mm_grpo.config_values import Number, ScaleRewards

ESTIMATOR_NAMES = {
    "group_norm": "write grpo",
    "gdpo": "write algorithm.multi_objective_aggregation: normalize_then_sum",
    "dr_grpo": "write grpo, with algorithm.scale_rewards: none",
    "leave_one_out": "write rloo",
    "reinforce_baseline": "write reinforce_plus_plus_baseline",
    "reinforce_plus_plus": "write reinforce_plus_plus_baseline, which subtracts the group's mean (ms-swift's"
    " reinforce_plus_plus; verl's, without that mean, is not in mm_grpo)",
    "gae": "gae needs a value model, and mm_grpo has none",
}
"""What to say about the names that other trainers give to advantage estimators."""


class AlgorithmConfig(Section):
    """Advantages and loss."""

    where: ClassVar[str] = "algorithm"

    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline"] = setting(
        "grpo",
        "What rewards are compared with, and scaled by (docs/algorithms.md)",
        "grpo, rloo or reinforce_plus_plus_baseline",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting(
        "sum_then_normalize",
        "How several rewards become one advantage",
        "sum_then_normalize compares their weighted sums, normalize_then_sum compares each reward by itself (GDPO)",
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"] = setting(
        "dapo",
        "What a token contributes to the loss, and how tokens are averaged (docs/algorithms.md)",
        "grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo",
    )
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token",
        "Whose probability ratio weighs a token: token (its own) or sequence (its completion's, GSPO)",
    )
    beta: Number = setting(0.0, "Weight of the KL term", "0 is none, and no reference model", ge=0)
    epsilon: Number = setting(0.2, "Lower clip: the probability ratio counts from 1 - epsilon", ge=0)
    epsilon_high: Number | None = setting(
        None, "Upper clip: the probability ratio counts up to 1 + epsilon_high", "null is epsilon", ge=0
    )
    delta: Number | None = setting(
        None,
        "Bound on the ratio of tokens with a negative advantage, above 1 + epsilon_high",
        "null is none",
        gt=1,
    )
    sapo_temperature_pos: Number = setting(1.0, "Steepness of sapo's gate at positive advantages", gt=0)
    sapo_temperature_neg: Number = setting(1.05, "Steepness of sapo's gate at other advantages", gt=0)
    vespo_k_pos: Number = setting(2.0, "Power of the ratio in vespo at advantages >= 0", ge=0)
    vespo_lambda_pos: Number = setting(3.0, "Decay of the ratio in vespo at advantages >= 0", ge=0)
    vespo_k_neg: Number = setting(3.0, "Power of the ratio in vespo at negative advantages", ge=0)
    vespo_lambda_neg: Number = setting(2.0, "Decay of the ratio in vespo at negative advantages", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", "How the KL term is estimated from a sample: k1, k2 or k3", "k1 needs algorithm.kl_in_reward"
    )
    kl_in_reward: bool = setting(
        False,
        "Take beta times the KL of a completion, the sum over its tokens, off its reward before advantages",
        "false adds the KL to the loss",
    )
    sync_ref_model: bool = setting(
        False, "Move the reference model towards the policy during the run", "needs algorithm.beta > 0"
    )
    ref_model_mixup_alpha: Number = setting(
        0.6, "Share of the policy's weights in the reference model after such a move", gt=0, le=1
    )
    ref_model_sync_steps: int = setting(512, "Steps from one such move to the next", ge=1)
    importance_sampling_mode: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = setting(
        "none",
        "How tokens are weighed by learner over engine probability, where the two differ",
        "none, token_truncate, token_mask, sequence_truncate or sequence_mask",
    )
    importance_sampling_clip_max: Number | None = setting(
        3.0, "Upper bound of those weights", "null is none", gt=0
    )
    importance_sampling_clip_min: Number | None = setting(
        None, "Lower bound of those weights", "null is none", ge=0
    )
    off_policy_mask_threshold: Number | None = setting(
        None,
        "Drop a completion of negative advantage whose mean log-probability fell by more than this, in nats",
        "null drops none",
        gt=0,
    )
    scale_rewards: ScaleRewards = setting(
        "group",
        "Whose standard deviation advantages are divided by: group, batch or none",
        "true is read as group, false as none. For advantage_estimator: grpo; rloo (undivided),"
        " reinforce_plus_plus_baseline and normalize_then_sum bring their own scale, and leave this at group",
    )
    num_iterations: int = setting(1, "Times that the completions of a step are learned from", ge=1)
    mask_truncated_completions: bool = setting(
        False, "Leave completions that ran into the length limit out of the loss"
    )
    entropy_coef: Number = setting(0.0, "Weight of the entropy bonus", "0 is none", ge=0)
    top_entropy_quantile: Number = setting(
        1.0,
        "Share of tokens, those of the highest entropy, that enter the loss",
        "1.0 is all tokens",
        gt=0,
        le=1,
    )

    @field_validator("advantage_estimator", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        ours = ESTIMATOR_NAMES.get(value.casefold()) if isinstance(value, str) else None
        if ours is not None:
            raise mistake(f"must be one of grpo, rloo, reinforce_plus_plus_baseline; {ours}")
        return value
