"""Convert a config of TRL (its script arguments), ms-swift, verl or EasyR1 to ours: `mm-grpo convert`.

Each key is converted, needless, or omitted with a reason; none is dropped in silence. Defaults of the trainer that
differ from ours are written out. The table of keys is in `keys`; keys that need more have a rule in `rules`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from mm_grpo.config.grpo_config import WITHOUT_KEYS, GRPOConfig
from mm_grpo.config.messages import shown
from mm_grpo.config.section import leaves
from mm_grpo.config.yaml_file import write_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.migrate import rules
from mm_grpo.migrate.files import Unexpanded, flatten
from mm_grpo.migrate.keys import NO_SETTING, advice_on, by_end, field_of, section_advice
from mm_grpo.terminal import printable, redact

NO_MODEL = "NAME_OF_THE_MODEL"
"""Placeholder in `model.path` if the file names no model."""


def convert(config: Mapping[str, Any], *, devices: int | None = None) -> rules.Conversion:
    """Convert a config of another trainer, nested or by dotted key.

    `devices` is the number of processes that its batches are multiplied by; None is what the config says, else 1.
    Raises ConfigError if a key cannot have its value, or if the result is no valid config.
    """
    foreign = flatten(config)
    sections = {key.partition(".")[0] for key in foreign if "." in key}
    easy = "worker" in sections or "data.rollout_batch_size" in foreign
    dotted = sections & {"actor_rollout_ref", "data", "trainer", "algorithm"}
    swift = "rlhf_type" in foreign
    trainer = "ms-swift" if swift else "EasyR1" if easy else "verl" if dotted else "TRL"
    foreign = {key: _interpolated(value, foreign) for key, value in foreign.items()}
    defaults = rules.foreign_defaults(foreign, trainer)
    result = rules.Conversion({**defaults, **foreign}, devices or 1, trainer)
    note = result.notes.append
    if devices is None and trainer not in rules.DOTTED:
        _count_devices(result)
    elif devices is not None and trainer in rules.DOTTED:
        note(f"--devices {devices}: changes nothing; batches of {trainer} are whole")
    for key, value in result.foreign.items():
        result.key = key
        converted = _convert_key(result, key, value)
        if isinstance(converted, str):
            result.omitted[key] = converted
        for path, ours in converted.items() if isinstance(converted, dict) else ():
            result.put(path, ours)
    if not any(key.endswith(("max_steps", "epochs", "training_steps")) for key in foreign):
        note(
            f"run.max_steps: {trainer}'s default is {rules.EPOCHS[trainer]} epochs; null is one pass over the data"
        )
    if not result.values.get("model", {}).get("path"):
        result.key = ""
        result.put("model.path", NO_MODEL)
        note(f"model.path: the file names no model; write its name in place of {NO_MODEL}")
    if not result.values.get("rewards"):
        note("rewards: none could be taken over; name them here (`mm-grpo rewards` lists what ships)")
    while True:
        try:
            GRPOConfig.from_dict(result.values)
            break
        except ConfigError as error:
            _omit_refused(result, error)
    result.notes[:0] = [
        f"{path}: {trainer}'s default ({key})" for path, key in result.origin.items() if key in defaults
    ]
    result.values = _without_empty(result.values)
    return result


def to_yaml(result: rules.Conversion) -> str:
    """Return our config as YAML, followed by notes and omitted keys as comments."""
    values = {name: result.values[name] for name in GRPOConfig.model_fields if name in result.values}
    foreign, public = redact(result.foreign), redact(values)
    lines = [WITHOUT_KEYS * (public != values) + write_yaml(public).rstrip("\n")]
    omitted = [f"{key} = {shown(foreign.get(key))}: {why}" for key, why in result.omitted.items()]
    for title, entries in (("Written although no key said it:", result.notes), ("Not taken over:", omitted)):
        comments = [f"#   {printable(redact(entry), lines=False)}" for entry in entries]
        lines += ["", f"# {title}", *comments] if entries else []
    return "\n".join(lines) + "\n"


def _omit_refused(result: rules.Conversion, error: ConfigError) -> None:
    """Omit the field that an error begins with; its first line is the reason. Raises the error if there is none."""
    line = str(error).splitlines()[0]
    match = re.match(r"([\w.]+?)(?:\[\d+\])?(?: =|:) ", line)
    *sections, name = path = (match[1] if match else "").split(".")
    section = functools.reduce(lambda inner, part: inner.get(part, {}), sections, result.values)
    if name not in section or path == ["model", "path"]:
        raise error
    del section[name]
    dotted = ".".join(path)
    result.omitted[result.origin.pop(dotted, dotted)] = line


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    pruned = {
        key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    return {key: value for key, value in pruned.items() if value not in ({}, [])}


def _interpolated(value: Any, foreign: Mapping[str, Any]) -> Any:
    """Return a text with the values of other keys for ${section.key}; Unexpanded if a word keeps a $NAME."""
    if not isinstance(value, str) or isinstance(value, Unexpanded) or re.search(r"\s", value):
        return value  # a prompt may hold a $
    if (whole := re.fullmatch(r"\$\{(\w+\.[\w.]+)\}", value)) and whole[1] in foreign:
        return foreign[whole[1]]
    text = re.sub(r"\$\{(\w+\.[\w.]+)\}", lambda match: str(foreign.get(match[1], match[0])), value)
    return Unexpanded(text) if re.search(r"\$\{|\$[A-Za-z_]\w", text) else text


def _count_devices(result: rules.Conversion) -> None:
    """Take the number of processes from the launcher's options, or from the GPUs that the script names."""
    launched = "num_processes nproc_per_node num_gpus global_world_size"
    gpus = result.foreign.get("include", result.foreign.get("cuda_visible_devices"))  # of deepspeed, of CUDA
    count = gpus and str(gpus).rpartition(":")[2].count(",") + 1
    if count and result.trainer == "ms-swift":  # it starts one without NPROC_PER_NODE
        count = 1
    source = "of one process; the file names none"
    try:
        nodes = 1 if result.find("num_processes global_world_size") else result.number("nnodes", 1)
        if result.find(launched, count) is not None:
            result.devices = int(result.number(launched, count) * nodes)
            source = f"of the file's {result.devices} process(es)"
    except (rules.UnknownValue, ConfigError):
        pass
    if result.find("global_batch_size") is None:
        result.notes.append(f"rollout.prompts_per_step: {source} (--devices)")


def _convert_key(result: rules.Conversion, key: str, value: Any) -> rules.Converted:
    """Return our values of one key, or the reason why there are none."""
    paths = [name for name, _ in leaves(GRPOConfig)]
    if isinstance(value, Unexpanded):
        return f"holds {value.unknown}, which this file does not say; {advice_on(key, paths) or 'write the value'}"
    if value is None or value in by_end(key, rules.NEEDLESS, ()):
        return {}
    rule = None if section_advice(key) else by_end(key, rules.KEY_RULES, None)
    path = field_of(key, paths)
    try:
        converted = rule(result, value) if rule else {path: value} if path else None
    except rules.UnknownValue as error:
        return str(error)
    except (TypeError, ValueError, LookupError, AttributeError):  # a list for a number, say
        return f"is no value that {result.trainer} takes there"
    return converted if converted is not None else advice_on(key, paths) or NO_SETTING
