"""run.trackers: the metrics of a run, sent to tensorboard, wandb or trackio as well.

metrics.jsonl stays the record; a tracker is a copy of it for people who watch many runs. These are
thin classes of our own because accelerate's need its process state, which picks devices and joins
process groups. To add one: a class with `log` and `close`, and its line in TRACKERS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Protocol

from mm_grpo.errors import ConfigError
from mm_grpo.run.paths import RunPaths

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig


class Tracker(Protocol):
    """Takes the numbers of one step after the other, until it is closed."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder's tensorboard/; see them with `tensorboard --logdir RUN_DIR`."""

    def __init__(self, package: Any, config: GRPOConfig) -> None:
        self._writer = package.SummaryWriter(str(RunPaths(Path(config.run.dir)).tensorboard))
        self._writer.add_text("config", indent(config.to_yaml(), "    "))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases. The project is the environment's WANDB_PROJECT, else mm_grpo."""

    def __init__(self, package: Any, config: GRPOConfig) -> None:
        self._run = package.init(
            project=os.environ.get("WANDB_PROJECT", "mm_grpo"),
            name=Path(config.run.dir).resolve().name,
            config=config.model_dump(mode="json"),
            dir=config.run.dir,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, in the project mm_grpo of its own local store."""

    def __init__(self, package: Any, config: GRPOConfig) -> None:
        name = Path(config.run.dir).resolve().name
        self._run = package.init(project="mm_grpo", name=name, config=config.model_dump(mode="json"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# name, which is also the extra that installs the package: (module to import, what makes a tracker of it)
TRACKERS: dict[str, tuple[str, Callable[[Any, GRPOConfig], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "trackio": ("trackio", Trackio),
}


class Trackers:
    """All trackers of a run as one; with no names it does nothing.

    `prepare` before a model loads, `open` around the run, `log` in it.
    """

    def __init__(self, makers: Sequence[Callable[[GRPOConfig], Tracker]]) -> None:
        self._makers = tuple(makers)
        self._trackers: list[Tracker] = []

    @classmethod
    def prepare(cls, names: Sequence[str]) -> Trackers:
        """Import the packages of run.trackers.

        Raises ConfigError when a name is unknown, or when its package is not installed.
        """
        return cls([_maker(name) for name in names])

    @contextmanager
    def open(self, config: GRPOConfig) -> Iterator[Trackers]:
        """Start every tracker on the run that `config` describes; close them all at the end."""
        with ExitStack() as stack:
            self._trackers = []
            stack.callback(self._trackers.clear)
            for make in self._makers:
                tracker = make(config)
                stack.callback(tracker.close)
                self._trackers.append(tracker)
            yield self

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers among `values`; texts and None stay in metrics.jsonl."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(step, numbers)


def _maker(name: str) -> Callable[[GRPOConfig], Tracker]:
    if name not in TRACKERS:
        raise ConfigError(f"run.trackers = '{name}': unknown; legal are {', '.join(TRACKERS)}")
    module, tracker = TRACKERS[name]
    try:
        package = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.trackers = '{name}': the package is not installed ({error});"
            f" install it with: pip install 'mm_grpo[{name}]', or remove '{name}' from run.trackers"
        ) from error
    return partial(tracker, package)
