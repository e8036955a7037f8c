"""Which weights a config is evaluated with: its own model, or what `--model` names (trained/source.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_grpo.errors import ConfigError
from mm_grpo.trained.source import RunCheckpoint, find_model

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig, ModelConfig


@dataclass(frozen=True)
class Weights:
    """The `model` section to load by, the checkpoint whose weights are put in (None: the model's own), and `name`, what
    messages call them."""

    model: ModelConfig
    checkpoint: RunCheckpoint | None
    name: str


def find_weights(
    config: GRPOConfig, given: str | None, which: str | None = None, *, trust: bool = False
) -> Weights:
    """What `given` names, None for the config's own model; `which` of a run's checkpoints, the last by default.

    They are held on the device that `config` names. Raises ConfigError for what has no weights of its own, for `which`
    without a run folder, and for code that a run folder asks to run and `config` does not, unless `trust`.
    """
    if given is None:
        if which is not None:
            raise ConfigError(
                f"--checkpoint {which}: says which checkpoint of a run folder, and there is no --model; leave it out"
            )
        return _plain(config, config.model.path, trust)
    place = [f"model.device={config.model.device}"]
    found = find_model(given, which, place, user=config.model, trust=trust)
    if isinstance(found, RunCheckpoint):
        return Weights(found.config.model, found, found.name)
    if found.is_adapter:
        raise ConfigError(
            f"--model '{given}': holds adapters without their base model; name the run folder or the checkpoint that "
            "they are of, or the merged model"
        )
    return (
        _plain(config, given, trust)
        if found.config is None
        else Weights(found.config.model, None, found.name)
    )


def _plain(config: GRPOConfig, path: str, trust: bool) -> Weights:
    own = {"path": path, "lora": None, "trust_remote_code": trust or config.model.trust_remote_code}
    model = config.model.model_copy(update=own)
    return Weights(model, None, path)
