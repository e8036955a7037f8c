"""Identity of a run besides its model: fields of the config, rows, rewards, tools and length.

A checkpoint has `deciding_fields` and `identity_of` of its run, and they are compared on resuming. Changed rows are
refused, or with `run.allow_changed_rows` taken in their places. A row keeps its index and with it its slots and seeds,
so what the run computes of all other rows stays the same. Hence nothing else may change: rows that are added, removed
or moved, and a mixture's sources and weights, change the order.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.media_check import rows_to_look_at
from mm_grpo.data.order import PromptOrder
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError
from mm_grpo.rewards.resolve import describe_code
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.manifest import Checkpoint, checkpoints_in, read_checkpoint
from mm_grpo.terminal import redact

logger = logging.getLogger("mm_grpo")
Fingerprint = Mapping[str, Any]
"""Result of `Rows.fingerprint`."""

# Fields that may differ on resuming, because none of them changes a sample or an update: device, memory, workers and
# time-outs, and how a run is evaluated, checked, saved and shown.
NEUTRAL = (
    "model.device",
    "data.gold_template",
    "data.on_bad_media",  # rows left out at the start show in the fingerprint
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
    """Return True if a field, by its dotted path, may differ on resuming."""
    matches = (field == name or (name[-1] == "." and field.startswith(name)) for name in NEUTRAL)
    return field not in NOT_NEUTRAL and any(matches)


def deciding_fields(config: GRPOConfig) -> dict[str, Any]:
    """Return the fields that change what a run computes, by dotted path, as JSON values."""
    # mappings as a whole: a missing key is a difference too
    values = {path: value for path, value in redact(config.flat()).items() if not is_neutral(path)}
    flat: dict[str, Any] = json.loads(json.dumps(values, default=str)) | config.resolved_fields
    # the pack decides which rows are dropped if it is the narrower limit, and which have a twin
    longest = config.data.max_prompt_length
    drops = config.data.on_overlong == "drop" and (longest is None or config.pack_room < longest)
    if drops or config.algorithm.twin_view is not None:
        flat["optim.max_tokens_per_pack"] = config.optim.max_tokens_per_pack
    if config.data.pass_rate is not None:  # the headline defines a success
        flat["run.headline"] = config.run.headline
    steps = config.run.max_steps
    cut = steps is not None and config.optim.warmup_steps > config.updates_in(steps)
    # the learning rate of every step then depends on the run's length
    if cut or config.optim.lr_scheduler_type != "constant":
        flat["run.max_steps"] = steps
    return flat


def refuse_other_fields(now: Mapping[str, Any], then: Mapping[str, Any], origin: str, remedy: str) -> None:
    """Raise ConfigError, with both values, if a deciding field is not as it was `then`."""
    for field in {**now, **then}:
        value, old = now.get(field), then.get(field)
        if value != old:
            raise ConfigError(f"{field} = {json.dumps(value)}: {origin} {json.dumps(old)}; {remedy}")


def rewards_of(specs: Sequence[RewardSpec]) -> list[dict[str, Any]]:
    """Return the identity of each reward: name, weight and `describe_code`."""
    return [{"name": s.name, "weight": s.weight, **describe_code(s.fn)} for s in specs]


def identity_of(
    sets: Mapping[str, Rows],
    specs: Sequence[RewardSpec],
    toolbox: Toolbox | None,
    features: Sequence[tuple[str, Any]],
) -> dict[str, Any]:
    """Return the identity of rows (by their field of `data`), rewards, tools and the user's loss features by name."""
    sources = [*features, *([] if toolbox is None else toolbox.sources)]
    return {
        "rows": {field: rows.fingerprint() for field, rows in sets.items()},
        "rewards": rewards_of(specs),
        "tools": [] if toolbox is None else list(toolbox.schemas),
        "tool_sources": [{"name": name, **describe_code(code)} for name, code in sources],
    }


def refuse_another_run(
    checkpoint: Checkpoint, identity: Mapping[str, Any], max_steps: int, *, allow_changed_code: bool = False
) -> None:
    """Raise ConfigError if a checkpoint is of a run with other sets, rewards, tools or more than `max_steps` steps.

    Evaluation sets must have the same order, because the first is the headline; `tools` are compared by their JSON
    schemas. If the source of a reward or of a tool changed and that is allowed, warn.
    """
    then, rows = checkpoint.extra, identity["rows"]
    where = f"the checkpoint '{checkpoint.path}' was made with"
    if changed := _changed(then["rewards"], identity["rewards"]):
        _refuse_code(f"rewards: {where} other rewards ({changed})", allow_changed_code)
    if then["tools"] != identity["tools"]:
        raise ConfigError(
            f"tools: {where} other names or descriptions; put them back (rollout.tools, rollout.environment, or tools= "
            "and environment_factory= of GRPOTrainer), or start a new run"
        )
    if changed := _changed(then["tool_sources"], identity["tool_sources"]):
        _refuse_code(f"tools: {where} other ones ({changed})", allow_changed_code)
    sets, old_sets = [n.removeprefix("eval.") for n in rows if n != "train"], list(then["before"])
    if sets != old_sets:
        raise ConfigError(
            f"data.eval: {where} the sets {', '.join(old_sets) or 'none'}, and these are {', '.join(sets) or 'none'}; "
            "before and after would not compare. Put them back, in that order"
        )
    if checkpoint.step > max_steps:
        raise ConfigError(
            f"run.max_steps = {max_steps}: the checkpoint '{checkpoint.path}' has {checkpoint.step} finished steps; "
            "raise it to at least that, or start a new run"
        )


def _changed(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Say what differs between two lists of identities; "" if they are equal."""
    old_names, new_names = (", ".join(str(code["name"]) for code in codes) or "none" for codes in (then, now))
    if old_names != new_names:
        return f"{old_names} then, {new_names} now"
    changed = [str(new["name"]) for old, new in zip(then, now, strict=True) if old != new]
    return f"the source or the weight of {', '.join(changed)} changed" if changed else ""


def _refuse_code(message: str, allowed: bool) -> None:
    if not allowed:
        raise ConfigError(f"{message}; put them back, or take the new ones: run.allow_changed_code=true")
    logger.warning("%s; the new ones are used, because run.allow_changed_code is true", message)


def left_out_before(checkpoints: Path) -> dict[str, list[int]] | None:
    """Return the rows that a run left out of each source at its start; None without a checkpoint."""
    for path in reversed(checkpoints_in(checkpoints).values()):
        with suppress(ConfigError):  # it is damaged
            sets = read_checkpoint(path, files=False).extra["rows"].values()
            return {source["name"]: source["left_out"] for rows in sets for source in _sources(rows)}
    return None


def check_rows(
    checkpoint: Checkpoint,
    fingerprints: Mapping[str, Fingerprint],
    sets: Mapping[str, Rows],
    order: PromptOrder,
    *,
    allowed: bool,
) -> Sequence[int]:
    """Compare the rows of `sets` with a checkpoint's; return the indices of training rows that changed.

    Raises ConfigError if rows changed and that is not `allowed`, or if their order changed; warns if it is allowed.
    """
    train_rows: Sequence[int] = ()
    for field, old in checkpoint.extra["rows"].items():
        rows, new, step = sets[field], fingerprints[field], checkpoint.step
        text = f"data.{field}: the checkpoint '{checkpoint.path}' was made with other rows"
        changed = _changed_rows(old, new, rows)
        if changed is None:
            raise ConfigError(
                f"{text} ({old['rows']} then, {new['rows']} now), in other places, or a mixture with other weights, "
                "so each step would have others; put them back in their places, or start a new run"
            )
        if not changed:
            continue
        note = "; evaluations before and after will not compare"
        if field == "train":
            train_rows, drawn = changed, order.drawn(step)
            note = f"; drawn in steps 1 to {step}: {len(drawn.intersection(changed))}"
        text += f": {len(changed)} of {len(rows)} changed, the first {rows.row_name(changed[0])}{note}"
        if not allowed:
            raise ConfigError(f"{text}. Put them back, or go on with run.allow_changed_rows=true")
        logger.warning("%s. They are used as they are now, because run.allow_changed_rows is true", text)
    return train_rows


def _changed_rows(old: Fingerprint, new: Fingerprint, rows: Rows) -> list[int] | None:
    """Return the indices of rows that changed in their places; None if the order of rows changed."""
    changed: list[tuple[int, bytes, bytes]] = []
    first, old_sources, sources = 0, _sources(old), _sources(new)
    if len(old_sources) != len(sources):
        return None
    for a, b, source in zip(old_sources, sources, rows.sources, strict=True):
        if any(a.get(key) != b.get(key) for key in ("name", "weight", "rows", "left_out")):
            return None
        then, now = _digests(a), _digests(b)
        if len(then) != len(now):  # rows in memory, and not any more: any may have changed
            then = [b""] * len(now)
        places = zip(rows_to_look_at(source), then, now, strict=True)
        changed += [(first + index, x, y) for index, x, y in places if x != y]
        first += len(source)
    moved = {then for _, then, _ in changed} & {now for _, _, now in changed}
    return None if 2 * len(moved) > len(changed) else [index for index, _, _ in changed]


def _digests(source: Fingerprint) -> list[bytes]:
    data = base64.b64decode(source.get("digests", ""))
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def _sources(rows: Fingerprint) -> Sequence[Fingerprint]:
    sources: Sequence[Fingerprint] = rows.get("sources", [rows])
    return sources
