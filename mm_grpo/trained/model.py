"""The model of a checkpoint, as the learner holds it: base weights, adapters, and what was trained of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mm_grpo.build import processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.model import check_saveable, load_model
from mm_grpo.learner.state import frozen_digest, load_weights
from mm_grpo.processors.base import Processor
from mm_grpo.processors.model_folder import quoted
from mm_grpo.run.paths import RunPaths
from mm_grpo.trained.source import RunCheckpoint


@dataclass(frozen=True)
class Trained:
    """A trained model with what it was trained by; `paths` are its run's, and `step` the last one made."""

    model: Any
    processor: Processor
    config: GRPOConfig
    paths: RunPaths
    step: int


def load_trained(found: RunCheckpoint) -> Trained:
    """The model of a checkpoint. ConfigError where the base model is not the one that it was trained from."""
    processor = processor_of(found.config)
    model = load_model(found.config.model, processor.family)
    check_saveable(model, processor)
    put_in(model, found)
    return Trained(model.eval(), processor, found.config, found.paths, found.step)


def put_in(model: Any, found: RunCheckpoint) -> None:
    """Replace the trained weights of `model`, loaded by `found.config`, by those of the checkpoint, in place.

    Neither optimizer nor gradients are made. Raises ConfigError when they are of another model, or cannot be read.
    """
    section, manifest = found.config.model, found.checkpoint.manifest
    where, path = f"model.path = '{section.path}'", found.checkpoint.path
    trained: Mapping[str, list[int]] = manifest["parameters"]
    parameters = dict(model.named_parameters())
    shapes = {name: list(p.shape) for name, p in parameters.items()}
    if wrong := sorted(name for name, shape in trained.items() if shapes.get(name) != shape):
        differs = f"{wrong[0]} has shape {trained[wrong[0]]} there and {shapes.get(wrong[0], 'none')} here"
        raise ConfigError(f"{where}: '{path}' is of another model: {differs}; give the run's base model")
    for name, parameter in parameters.items():  # a model that was passed in may have had more of it frozen
        parameter.requires_grad_(name in trained)
    if frozen_digest(model) != manifest["frozen"]:
        raise ConfigError(
            f"{where} in {section.dtype}: the weights that are not trained are not those of '{path}'; give the run's "
            "base model in its number format (model.dtype=...)"
        )
    files = [path / str(mark["name"]) for mark in manifest["files"]]
    with as_config_error(f"'{path}' cannot be read"):
        load_weights({name: parameters[name] for name in trained}, files)


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Raise whatever error of a library as ConfigError behind `what`, which says what it is about."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} ({type(error).__name__}: {quoted(error)})") from None
