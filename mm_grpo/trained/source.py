"""Which model is meant: a run's best or last checkpoint or that of a step, a checkpoint's own folder, a model folder
or a name on the Hub.

Without a word for it the last checkpoint is meant, whatever the evaluations said: every run that saves has one. A
checkpoint has the trained weights and no others, so it comes with its run's config, which says what they belong to.
"""

from __future__ import annotations

import json
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
from mm_grpo.run.same_run import deciding_fields, differing_field

CHANGEABLE = ("model.path", "model.device", "model.dtype")
"""Fields that may be other than the run's: where the base model is, and how it is held here."""
NO_RUN = f"neither a run folder (config.yaml) nor a checkpoint in one's checkpoints/ ({MANIFEST})"
DEFAULT = "last"
"""The checkpoint that is meant where none is named."""
STEP = re.compile(r"step-0*(\d{1,18})")


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint whose files are as they were written. `config` is its run's, in the number format of the run, and
    `name` what results call it."""

    paths: RunPaths
    config: GRPOConfig
    checkpoint: Checkpoint
    name: str

    @property
    def step(self) -> int:
        return self.checkpoint.step


@dataclass(frozen=True)
class WholeModel:
    """A model folder, an adapter's or a name on the Hub (`path`), which needs no checkpoint; `config` loads it."""

    path: str
    config: GRPOConfig | None = None

    @property
    def name(self) -> str:
        return self.path

    @property
    def is_adapter(self) -> bool:
        return (Path(self.path) / "adapter_config.json").is_file()


def find_model(
    given: str,
    which: str | None = None,
    overrides: Sequence[str] = (),
    *,
    user: ModelConfig | None = None,
    trust: bool = False,
) -> RunCheckpoint | WholeModel:
    """What `given` names, and in a run's folder `which` says: best, last (also None) or step-N.

    `overrides` change fields of CHANGEABLE of a run's config. `user` is the section `model` of the user's own config:
    its path is the base model where that which the run names is not there, and the code that it names may be run, as
    any may with `trust`. Raises ConfigError for what is no such model.
    """
    if which not in (None, "best", "last") and STEP.fullmatch(which or "") is None:
        raise ConfigError(f"--checkpoint {which}: must be best, last or step-N")
    path = Path(given)
    if is_run(path):
        return _of_run(path, which, overrides, user, trust)
    if which is not None:
        raise ConfigError(f"--checkpoint {which}: '{given}' is no run folder; leave it out")
    found = WholeModel(given)
    if path.is_dir() and not (path / "config.json").is_file() and not found.is_adapter:
        raise ConfigError(f"'{given}' is no model folder (config.json), and {NO_RUN}")
    return found


def model_to_evaluate(
    config: GRPOConfig, given: str | None, which: str | None = None, *, trust: bool = False
) -> RunCheckpoint | WholeModel:
    """As `find_model`, with a config of its own: what `given` names, held on the device that `config` names; None for
    the model of `config`. Adapters without their base model have no weights of their own: ConfigError.
    """
    if given is None and which is not None:
        raise ConfigError(f"--checkpoint {which}: there is no --model; leave it out")
    if given is not None:
        place = [f"model.device={config.model.device}"]
        found = find_model(given, which, place, user=config.model, trust=trust)
        if isinstance(found, RunCheckpoint):
            return found
        if found.is_adapter:
            raise ConfigError(
                f"--model '{given}': holds adapters without their base model; name the run folder"
            )
    update: dict[str, Any] = {"lora": None} | ({"path": given, "quantization": None} if given else {})
    update |= {"trust_remote_code": True} if trust else {}
    return WholeModel(given or config.model.path, _with_model(config, **update))


def find_checkpoint(
    path: Path, which: str | None = None, overrides: Sequence[str] = (), *, trust: bool = False
) -> RunCheckpoint:
    """As `find_model`, but a checkpoint it must be. Raises ConfigError for any other model too."""
    found = find_model(str(path), which, overrides, trust=trust)
    if isinstance(found, WholeModel):
        raise ConfigError(f"'{path}' is {NO_RUN}")
    return found


def refuse_code(folder: str | Path, asked: ModelConfig, user: ModelConfig | None = None) -> None:
    """ConfigError for the code that settings in a folder ask to run, and the section `user` of the user's own config
    does not: whoever sent the folder wrote them."""
    own = {} if user is None or user.path != asked.path else user.model_dump()
    named = {name: getattr(asked, name) for name in ("processor", "trust_remote_code")}
    asking = {name: value for name, value in named.items() if value not in (None, False, own.get(name))}
    if asking:
        code = " and ".join(f"model.{name} = {yaml_repr(value)}" for name, value in asking.items())
        raise ConfigError(f"'{folder}' asks to run code, by {code}; give --trust-remote-code if you trust it")


def is_run(path: Path) -> bool:
    """Whether `path` is a run's folder or that of a checkpoint."""
    return _has(path, MANIFEST) or _has(path, "config.yaml")


def _has(path: Path, name: str) -> bool:
    return (path / name).is_file() and not (path / "config.json").is_file()  # which a model folder has


def _of_run(
    path: Path, which: str | None, overrides: Sequence[str], user: ModelConfig | None, trust: bool
) -> RunCheckpoint:
    own = _has(path, MANIFEST)
    if own and which is not None:
        raise ConfigError(
            f"--checkpoint {which}: '{path}' is one checkpoint; name its run, or leave this out"
        )
    paths = RunPaths(path.resolve().parents[1] if own else path)
    if not paths.config.is_file() or (own and STEP_NAME.fullmatch(path.resolve().name) is None):
        raise ConfigError(f"'{path}' is no checkpoints/step-000010 of a run with a config.yaml; put it back")
    config, changed = _config_of(paths, overrides, user.path if user else None)
    if not trust:
        refuse_code(paths.root, config.model, user)
    checkpoint = read_checkpoint(path.resolve() if own else _chosen(paths, which or DEFAULT))
    now = {name: value for name, value in deciding_fields(config).items() if name not in changed}
    then = {name: value for name, value in checkpoint.manifest["config"].items() if name not in changed}
    if differing := differing_field(now, then):
        field, value, known = differing
        made = f"'{checkpoint.path}' was made with {json.dumps(known)}"
        raise ConfigError(f"'{paths.config}': {field} = {json.dumps(value)}, and {made}; put it back")
    if config.model.dtype == "auto":
        config = _with_model(config, dtype=checkpoint.manifest["dtype"])
    name = str(path) if own else f"{paths.root}, {which or DEFAULT} checkpoint (step {checkpoint.step})"
    return RunCheckpoint(paths, config, checkpoint, name)


def _config_of(
    paths: RunPaths, overrides: Sequence[str], elsewhere: str | None
) -> tuple[GRPOConfig, frozenset[str]]:
    """The run's config with `overrides`, and the fields that are not as the run had them."""
    changed = {override.partition("=")[0] for override in overrides}
    if other := changed - set(CHANGEABLE):
        raise ConfigError(
            f"'{min(other)}': is the run's own; only {', '.join(CHANGEABLE)} can be changed here"
        )
    # not from_yaml: a relative path of the run's own copy starts at the working folder, not at the copy
    config = GRPOConfig.from_dict(apply_overrides(read_yaml(paths.config), overrides))
    if elsewhere is not None and os.path.exists(elsewhere) and not os.path.exists(config.model.path):
        # the run was started on another machine, or from another folder
        return _with_model(config, path=elsewhere), frozenset({*changed, "model.path"})
    return config, frozenset(changed)


def _chosen(paths: RunPaths, which: str) -> Path:
    found, root = checkpoints_in(paths.checkpoints), paths.root
    if not found:
        raise ConfigError(
            f"'{root}' has no checkpoints (run.save_every); name the model that it saved, '{paths.model}'"
        )
    known = ", ".join(path.name for path in found.values())
    newest = list(found.values())[-1]
    if which == "last":
        return newest
    if which == "best":
        best = read_checkpoint(newest, files=False).extra["best"]
        if best is None:
            raise ConfigError(f"'{root}' was not evaluated, so none is best; take --checkpoint last")
        step, of = int(best["step"]), "after step {step}" if best["step"] else "before its first step"
        missing = f"the best evaluation of '{root}' was {of.format(**best)}, which has no checkpoint; there are {known}"
    else:
        step = int(which.removeprefix("step-"))
        missing = f"--checkpoint {which}: must be best, last or one of {known}"
    if step not in found:
        raise ConfigError(missing)
    return found[step]


def _with_model(config: GRPOConfig, **update: Any) -> GRPOConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=update)})
