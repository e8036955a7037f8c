"""What makes a run another one than that of a checkpoint, besides its model: fields, rows, rewards, tools, length.

`deciding_fields`, `rows_of`, `rewards_of` and `tool_sources_of` are kept in a checkpoint, and compared on resuming.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.section import Section, section_of
from mm_grpo.data.base import Rows
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError
from mm_grpo.import_path import FILE_MODULE
from mm_grpo.rewards.resolve import describe, describe_code
from mm_grpo.rewards.spec import RewardSpec, innermost
from mm_grpo.run.manifest import Checkpoint
from mm_grpo.terminal import redact

logger = logging.getLogger("mm_grpo")

# Fields that may differ on resuming: none of them changes a sample or an update. They say where, in how much memory, by
# how many workers and for how long at most it is computed, how it is evaluated, checked, kept and shown.
NEUTRAL = (
    "model.device",
    "data.gold_template",
    "data.on_bad_image",  # rows left out at the start show in the fingerprint
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
    # by the pack goes which rows are dropped where that is the narrower limit, and which have a twin
    longest = config.data.max_prompt_length
    drops = config.data.on_overlong == "drop" and (longest is None or config.pack_room < longest)
    if drops or config.algorithm.twin_view is not None:
        flat["optim.max_tokens_per_pack"] = config.optim.max_tokens_per_pack
    if config.data.pass_rate is not None:  # it says what a success is
        flat["run.headline"] = config.run.headline
    steps = config.run.max_steps
    cut = steps is not None and config.optim.warmup_steps > config.updates_in(steps)
    # the rate of every step goes by the length of the run
    if cut or config.optim.lr_scheduler_type != "constant":
        flat["run.max_steps"] = steps
    return flat


def differing_field(now: Mapping[str, Any], then: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """A deciding field that is not `now` what it was `then`, with both values; None where all are equal."""
    for field in {**now, **then}:
        if now.get(field) != then.get(field):
            return field, now.get(field), then.get(field)
    return None


def rows_of(train: Rows, eval_sets: Mapping[str, Rows]) -> dict[str, Any]:
    """The fingerprints of the training rows and of the evaluation sets, by the field of `data` that names them."""
    return {
        "train": train.fingerprint(),
        **{f"eval.{name}": s.fingerprint() for name, s in eval_sets.items()},
    }


def rewards_of(specs: Sequence[RewardSpec]) -> list[dict[str, Any]]:
    """The identity of each reward: name, weight, `describe`, and the SHA-256 of the file that a config named."""
    return [
        {"name": s.name, "weight": s.weight, **describe(s), "file_sha256": _file_digest(s.fn)} for s in specs
    ]


def tool_sources_of(named: Sequence[tuple[str, Callable[..., Any]]]) -> list[dict[str, Any]]:
    """The identity of each tool and environment: its name, `describe_code`, and the SHA-256 of its file."""
    return [{"name": name, **describe_code(what), "file_sha256": _file_digest(what)} for name, what in named]


def identity_of(
    train: Rows, eval_sets: Mapping[str, Rows], specs: Sequence[RewardSpec], toolbox: Toolbox | None
) -> dict[str, Any]:
    """The rows, rewards and tools that a run is resumed with, as `refuse_another_run` takes them."""
    return {
        "rows": rows_of(train, eval_sets),
        "rewards": rewards_of(specs),
        "tools": [] if toolbox is None else list(toolbox.schemas),
        "tool_sources": [] if toolbox is None else tool_sources_of(toolbox.sources),
    }


def _file_digest(fn: Callable[..., Any]) -> str | None:
    """Of a path/to/file.py:function the whole file counts: the function calls what stands beside it."""
    inner = innermost(fn)
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    if module is None or not module.__name__.startswith(FILE_MODULE) or not module.__file__:
        return None
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def refuse_another_run(
    found: Checkpoint,
    rows: Mapping[str, Any],
    rewards: Sequence[Mapping[str, Any]],
    max_steps: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_sources: Sequence[Mapping[str, Any]] = (),
    allow_changed_code: bool = False,
) -> None:
    """ConfigError when the checkpoint `found` is not of a run over these `rows` and of at most `max_steps` steps.

    Nor with these evaluation sets in this order, of which the first is the headline, and with these `tools` (their JSON
    schemas). Where the source of a reward or of a tool changed and that is allowed, it is a warning.
    """
    where = f"the checkpoint '{found.path}' was made with"
    if changed := _changed(found.extra["rewards"], rewards):
        _refuse_code(f"rewards: {where} other rewards ({changed})", allow_changed_code)
    if found.extra["tools"] != list(tools):
        raise ConfigError(
            f"tools: {where} other names or descriptions; put them back (rollout.tools, rollout.environment, or tools= "
            "and environment_factory= of GRPOTrainer), or start a new run"
        )
    if changed := _changed(found.extra["tool_sources"], tool_sources):
        _refuse_code(f"tools: {where} other ones ({changed})", allow_changed_code)
    sets, known = [n.removeprefix("eval.") for n in rows if n != "train"], list(found.extra["before"])
    if sets != known:
        raise ConfigError(
            f"data.eval: {where} the sets {', '.join(known) or 'none'}, and these are {', '.join(sets) or 'none'}; "
            "before and after would not compare. Put them back, in that order"
        )
    for name, then in found.extra["rows"].items():
        if (now := rows[name]) != then:
            raise ConfigError(
                f"data.{name}: {where} other rows ({then['rows']} then, {now['rows']} now; contents and a mixture's "
                "weights count); put them back, or start a new run"
            )
    if found.step > max_steps:
        raise ConfigError(
            f"run.max_steps = {max_steps}: the checkpoint '{found.path}' has {found.step} finished steps; raise it to "
            "at least that, or start a new run"
        )


def _changed(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """What differs between two lists of identities, in words; "" where they are equal."""
    names = [", ".join(str(one["name"]) for one in each) or "none" for each in (then, now)]
    if names[0] != names[1]:
        return f"{names[0]} then, {names[1]} now"
    changed = [str(one["name"]) for old, one in zip(then, now, strict=True) if old != one]
    return f"the source or the weight of {', '.join(changed)} changed" if changed else ""


def _refuse_code(message: str, allowed: bool) -> None:
    if not allowed:
        raise ConfigError(
            f"{message}; put them back, or go on with those of now with run.allow_changed_code=true"
        )
    logger.warning("%s; those of now are used, for run.allow_changed_code is true", message)
