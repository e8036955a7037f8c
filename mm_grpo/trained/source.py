"""Find the model that is meant: a checkpoint of a run (best, last or of a step), a model folder or a name on the Hub.

The default is the last checkpoint, because every run that saves has one. A checkpoint holds only the trained weights;
its run's config names the base model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig, ModelConfig
from mm_grpo.config.messages import yaml_repr
from mm_grpo.config.yaml_file import apply_overrides, read_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.run.manifest import MANIFEST, Checkpoint, checkpoints_in, read_checkpoint
from mm_grpo.run.paths import STEP_NAME, RunPaths
from mm_grpo.run.same_run import deciding_fields, refuse_other_fields

CHANGEABLE = ("model.path", "model.device", "model.dtype")
"""Fields that may differ from the run's: where the base model is, and how it is loaded here."""
NO_RUN = f"neither a run folder (config.yaml) nor a checkpoint in one's checkpoints/ ({MANIFEST})"
DEFAULT = "last"
STEP = re.compile(r"step-0*(\d{1,18})")


@dataclass(frozen=True)
class RunCheckpoint:
    """Intact checkpoint of a run."""

    paths: RunPaths
    config: GRPOConfig  # the run's, with `model.dtype` as it was on the training machine
    checkpoint: Checkpoint
    name: str  # in results

    @property
    def step(self) -> int:
        return self.checkpoint.step


@dataclass(frozen=True)
class WholeModel:
    """Model folder, adapter folder or name on the Hub (`name`); `config` loads it."""

    name: str
    config: GRPOConfig | None = None

    @property
    def is_adapter(self) -> bool:
        return (Path(self.name) / "adapter_config.json").is_file()


def find_model(
    source: str,
    checkpoint: str | None = None,
    overrides: Sequence[str] = (),
    *,
    user: ModelConfig | None = None,
    trust: bool = False,
) -> RunCheckpoint | WholeModel:
    """Return the model that `source` names; `checkpoint` of a run is best, last (also None) or step-N.

    `overrides` change fields of CHANGEABLE of a run's config. `user` is the section `model` of the user's own config:
    its path replaces a base model that does not exist here, and code that it names may run, as any may with `trust`.
    Raises ConfigError if there is no such model.
    """
    if checkpoint not in (None, "best", "last") and STEP.fullmatch(checkpoint or "") is None:
        raise ConfigError(f"--checkpoint {checkpoint}: must be best, last or step-N")
    path = Path(source)
    if _has(path, MANIFEST) or _has(path, "config.yaml"):
        return _find_in_run(path, checkpoint, overrides, user, trust)
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: '{source}' is no run folder; leave it out")
    model = WholeModel(source)
    if path.is_dir() and not (path / "config.json").is_file() and not model.is_adapter:
        raise ConfigError(f"'{source}' is no model folder (config.json), and {NO_RUN}")
    return model


def model_to_evaluate(
    config: GRPOConfig, source: str | None, checkpoint: str | None = None, *, trust: bool = False
) -> RunCheckpoint | WholeModel:
    """Return the model of `source`, or of `config` if it is None, with a config that loads it on `config`'s device.

    Raises ConfigError as `find_model` does, and for adapters without their base model.
    """
    if source is None and checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: there is no --model; leave it out")
    if source is not None:
        overrides = [f"model.device={config.model.device}"]
        model = find_model(source, checkpoint, overrides, user=config.model, trust=trust)
        if isinstance(model, RunCheckpoint):
            return model
        if model.is_adapter:
            raise ConfigError(
                f"--model '{source}': holds adapters without their base model; name the run folder"
            )
    update: dict[str, Any] = {"lora": None} | ({"path": source, "quantization": None} if source else {})
    update |= {"trust_remote_code": True} if trust else {}
    return WholeModel(source or config.model.path, _with_model(config, **update))


def refuse_code(folder: str | Path, section: ModelConfig, user: ModelConfig | None = None) -> None:
    """Raise ConfigError if a folder's `section` asks to run code that the `user`'s own section does not name."""
    trusted = {} if user is None or user.path != section.path else user.model_dump()
    values = {name: getattr(section, name) for name in ("processor", "trust_remote_code")}
    untrusted = {key: value for key, value in values.items() if value not in (None, False, trusted.get(key))}
    if untrusted:
        code = " and ".join(f"model.{name} = {yaml_repr(value)}" for name, value in untrusted.items())
        raise ConfigError(f"'{folder}' asks to run code, by {code}; give --trust-remote-code if you trust it")


def _has(path: Path, name: str) -> bool:
    return (path / name).is_file() and not (path / "config.json").is_file()  # a model folder has that one


def _find_in_run(
    path: Path, name: str | None, overrides: Sequence[str], user: ModelConfig | None, trust: bool
) -> RunCheckpoint:
    is_checkpoint = _has(path, MANIFEST)
    if is_checkpoint and name is not None:
        raise ConfigError(f"--checkpoint {name}: '{path}' is one checkpoint; name its run, or leave this out")
    paths = RunPaths(path.resolve().parents[1] if is_checkpoint else path)
    if not paths.config.is_file() or (is_checkpoint and STEP_NAME.fullmatch(path.resolve().name) is None):
        raise ConfigError(f"'{path}' is no checkpoints/step-000010 of a run with a config.yaml; put it back")
    config, changed = _read_config(paths, overrides, user.path if user else None)
    if not trust:
        refuse_code(paths.root, config.model, user)
    checkpoint = read_checkpoint(path.resolve() if is_checkpoint else _folder_of(paths, name or DEFAULT))
    now = {field: value for field, value in deciding_fields(config).items() if field not in changed}
    then = {field: value for field, value in checkpoint.manifest["config"].items() if field not in changed}
    origin = f"the checkpoint '{checkpoint.path}' was made with"
    refuse_other_fields(now, then, origin, f"put it back in '{paths.config}'")
    if config.model.dtype == "auto":  # as it was understood on the training machine
        config = _with_model(config, dtype=checkpoint.manifest["dtype"])
    label = f"{paths.root}, {name or DEFAULT} checkpoint (step {checkpoint.step})"
    return RunCheckpoint(paths, config, checkpoint, str(path) if is_checkpoint else label)


def _read_config(
    paths: RunPaths, overrides: Sequence[str], base_model: str | None
) -> tuple[GRPOConfig, frozenset[str]]:
    """Return the run's config with `overrides`, and the changed fields; `base_model` replaces one that is missing."""
    changed = {override.partition("=")[0] for override in overrides}
    if illegal := changed - set(CHANGEABLE):
        raise ConfigError(
            f"'{min(illegal)}': is the run's own; only {', '.join(CHANGEABLE)} can be changed here"
        )
    # not from_yaml: a relative path of the run's own copy starts at the working folder, not at the copy
    config = GRPOConfig.from_dict(apply_overrides(read_yaml(paths.config), overrides))
    if base_model is not None and os.path.exists(base_model) and not os.path.exists(config.model.path):
        # the run was started on another machine, or from another folder
        return _with_model(config, path=base_model), frozenset({*changed, "model.path"})
    return config, frozenset(changed)


def _folder_of(paths: RunPaths, name: str) -> Path:
    """Return the folder of the checkpoint best, last or step-N."""
    folders, root = checkpoints_in(paths.checkpoints), paths.root
    if not folders:
        raise ConfigError(
            f"'{root}' has no checkpoints (run.save_every); name the model that it saved, '{paths.model}'"
        )
    names = ", ".join(path.name for path in folders.values())
    newest = list(folders.values())[-1]
    if name == "last":
        return newest
    if name == "best":
        best = read_checkpoint(newest, files=False).extra["best"]
        if best is None:
            raise ConfigError(f"'{root}' was not evaluated, so none is best; take --checkpoint last")
        step = int(best["step"])
        when = f"after step {step}" if step else "before its first step"
        fault = f"the best evaluation of '{root}' was {when}, which has no checkpoint; there are {names}"
    else:
        step = int(name.removeprefix("step-"))
        fault = f"--checkpoint {name}: must be best, last or one of {names}"
    if step not in folders:
        raise ConfigError(fault)
    return folders[step]


def _with_model(config: GRPOConfig, **update: Any) -> GRPOConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=update)})
