"""The fields of a config that decide what a run computes: a checkpoint keeps them, and resuming compares them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mm_grpo.config import CreditConfig, GRPOConfig
from mm_grpo.config.messages import Section, section_of
from mm_grpo.terminal import redact

# Fields that may differ on resuming: none of them changes a sample or an update. They say where, in how much memory, by
# how many workers and for how long at most it is computed, how it is evaluated, checked, kept and shown.
NEUTRAL = (
    "model.device",
    "data.gold_template",
    "rollout.environment_workers",
    "rollout.vllm.gpu_memory_utilization",
    "rollout.vllm.sleep_level",
    "rollout.eval.",
    "rollout.server.",
    "optim.max_tokens_per_pack",
    "optim.gradient_checkpointing",
    "optim.zero_stage",
    "optim.offload_optimizer",
    "run.",
)
NOT_NEUTRAL = ("run.seed",)


def is_neutral(field: str) -> bool:
    """Whether a field, by its dotted path, may differ on resuming."""
    return field not in NOT_NEUTRAL and any(
        field == n or (n[-1] == "." and field.startswith(n)) for n in NEUTRAL
    )


def deciding_fields(config: GRPOConfig) -> dict[str, Any]:
    """The fields that decide what a run computes, flat, as JSON holds them."""
    flat: dict[str, Any] = {}

    def walk(section: Section, dumped: Mapping[str, Any], before: str) -> None:
        for name, value in dumped.items():
            path = before + name
            if section_of(type(section).model_fields[name]):
                walk(getattr(section, name), value, f"{path}.")
            elif not is_neutral(path):  # mappings whole: what is left out of one is a difference too
                flat[path] = json.loads(json.dumps(value, default=str))

    walk(config, redact(config.model_dump()), "")
    flat |= config.resolved_fields
    # by the pack goes which rows are dropped where that is the narrower limit, and which have a control or a twin
    longest, credit, twin = config.data.max_prompt_length, config.algorithm.credit, config.algorithm.twin_view
    drops = config.data.on_overlong == "drop" and (longest is None or config.pack_room < longest)
    if drops or twin is not None or (isinstance(credit, CreditConfig) and credit.control == "other_image"):
        flat["optim.max_tokens_per_pack"] = config.optim.max_tokens_per_pack
    if config.data.pass_rate is not None:  # it says what a success is
        flat["run.headline"] = config.run.headline
    steps = config.run.max_steps
    cut = steps is not None and config.optim.warmup_steps > config.updates_in(steps)
    if (
        cut or config.optim.lr_scheduler_type != "constant"
    ):  # the rate of every step goes by the length of the run
        flat["run.max_steps"] = steps
    return flat


def differing_field(now: Mapping[str, Any], then: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """A deciding field that is not `now` what it was `then`, with both values; None where all are equal."""
    for field in {**now, **then}:
        if now.get(field) != then.get(field):
            return field, now.get(field), then.get(field)
    return None
