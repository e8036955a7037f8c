"""Checks of options that contradict or ignore one another: advantages, bounds, KL, reference model, attempts.

Each gives None, or one line: field, value, why not, what to write. They run when a config is made and
in `GRPOConfig.check`, not at each assignment, so fields that need each other can be set in any order.
To add one, write a function and put it into `OPTION_CHECKS`; `config.CHECKS` holds all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

# What an estimator divides by, where that is one of the scales; `group` is the default and says nothing.
_OWN_SCALE = {"rloo": "none", "reinforce_plus_plus_baseline": "batch"}
_WITHOUT_CLIP = ("cispo", "sapo", "vespo")


def _scale_is_used(config: GRPOConfig) -> str | None:
    algorithm = config.algorithm
    estimator, scale = algorithm.advantage_estimator, algorithm.scale_rewards
    if algorithm.multi_objective_aggregation == "normalize_then_sum":
        owner, own = "algorithm.multi_objective_aggregation = 'normalize_then_sum'", None
    elif estimator != "grpo":
        owner, own = f"algorithm.advantage_estimator = {estimator!r}", _OWN_SCALE[estimator]
    else:
        return None
    if scale in ("group", own):
        return None
    return f"algorithm.scale_rewards = {scale!r}: {owner} brings its own scale and would ignore this; leave it out"


def _one_aggregation(config: GRPOConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.multi_objective_aggregation == "sum_then_normalize":
        return None
    if algorithm.advantage_estimator != "grpo":
        return (
            f"algorithm.advantage_estimator = {algorithm.advantage_estimator!r}: must be grpo with"
            " algorithm.multi_objective_aggregation = 'normalize_then_sum', which compares each reward with its"
            " group in its own way"
        )
    if algorithm.kl_in_reward:
        return (
            "algorithm.kl_in_reward = true: must be false with algorithm.multi_objective_aggregation ="
            " 'normalize_then_sum', which normalises each reward by itself, and the KL is none of them; leave the"
            " KL in the loss"
        )
    return None


def _bounds_act(config: GRPOConfig) -> str | None:
    algorithm = config.algorithm
    delta, loss = algorithm.delta, algorithm.loss_type
    if delta is not None and loss in _WITHOUT_CLIP:
        return (
            f"algorithm.delta = {delta}: algorithm.loss_type = {loss!r} has no such bound and would ignore this; leave"
            " it out"
        )
    name = "epsilon" if algorithm.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(algorithm, name)
    if delta is not None and delta <= upper:
        return (
            f"algorithm.delta = {delta}: must be above 1 + algorithm.{name}, which is {upper:g}; at or below it, delta"
            " would bound positive advantages, and would not be the bound of negative ones"
        )
    if loss == "vespo" and algorithm.importance_sampling_level != "token":
        return (
            f"algorithm.importance_sampling_level = {algorithm.importance_sampling_level!r}: algorithm.loss_type ="
            " 'vespo' weighs whole completions in its own way and would ignore this; leave it out"
        )
    return None


def _weights_have_room(config: GRPOConfig) -> str | None:
    algorithm = config.algorithm
    low, high = algorithm.importance_sampling_clip_min, algorithm.importance_sampling_clip_max
    if algorithm.importance_sampling_mode == "none" or low is None or high is None or low < high:
        return None
    return (
        f"algorithm.importance_sampling_clip_min = {low}: must be below algorithm.importance_sampling_clip_max, which"
        f" is {high}; no weight lies between them"
    )


def _kl_has_gradient(config: GRPOConfig) -> str | None:
    algorithm = config.algorithm
    if algorithm.kl_in_reward and algorithm.beta == 0:
        return "algorithm.kl_in_reward = true: needs algorithm.beta > 0, the weight of the KL, and that is 0"
    if algorithm.kl_estimator == "k1" and algorithm.beta > 0 and not algorithm.kl_in_reward:
        return (
            "algorithm.kl_estimator = 'k1': must be k2 or k3 where the KL is a term of the loss, because the"
            " gradient of k1 there has mean 0; or set algorithm.kl_in_reward = true"
        )
    return None


def _reference_can_move(config: GRPOConfig) -> str | None:
    if not config.algorithm.sync_ref_model:
        return None
    if config.algorithm.beta == 0:
        return "algorithm.sync_ref_model = true: needs algorithm.beta > 0; at 0 there is no reference model to move"
    if config.model.lora is not None:
        return (
            "algorithm.sync_ref_model = true: must be false with model.lora, whose reference is the model without"
            " its adapters, and that never moves; set model.lora = null to train every weight"
        )
    return None


def _attempts_are_used(config: GRPOConfig) -> str | None:
    rollout = config.rollout
    if rollout.dynamic_sampling and rollout.max_attempts < 2:
        return (
            "rollout.dynamic_sampling = true: needs rollout.max_attempts >= 2, the first attempt and at least one"
            f" that replaces groups, and that is {rollout.max_attempts}"
        )
    if rollout.max_attempts > 1 and not rollout.dynamic_sampling:
        return (
            f"rollout.max_attempts = {rollout.max_attempts}: must be 1 without rollout.dynamic_sampling, the only"
            " thing that samples again; set rollout.dynamic_sampling = true"
        )
    return None


OPTION_CHECKS: tuple[Callable[[GRPOConfig], str | None], ...] = (
    _scale_is_used,
    _one_aggregation,
    _bounds_act,
    _weights_have_room,
    _kl_has_gradient,
    _reference_can_move,
    _attempts_are_used,
)
