"""run.trackers: the metrics of a run sent to tensorboard, wandb or trackio as well; to the last two also tables of its
completions.

metrics.jsonl and rollouts/ stay the record; a tracker is a copy for people who watch many runs. These are
thin classes of our own because accelerate's need its process state, which picks devices and joins
process groups. To add one: a class with `log`, `log_table` (which may do nothing) and `close`, and its
line in TRACKERS.

A tracker is sent every row and picture of a table over a network, so a table is small: `GROUPS` groups of a step, those
whose rewards differ most, `COMPLETIONS` of each, and the first image of a row, of at most `SIDE` pixels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import ConfigError
from mm_grpo.run.paths import REPORT_EVERY, RunPaths
from mm_grpo.run.rollout_log import GOLD, message_text
from mm_grpo.terminal import redact

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.config import GRPOConfig
    from mm_grpo.types import Group

GROUPS = 4
COMPLETIONS = 8
SIDE = 256
"""Pixels of the longer side of a picture."""
LONGEST = 2000
"""Characters of a text."""
Row = dict[str, Any]
"""A row of the table by columns; the cell `image` is an RGB picture, or None where there is none."""
logger = logging.getLogger("mm_grpo")


class TensorBoard:
    """Event files in the run folder's tensorboard/; see them with `tensorboard --logdir RUN_DIR`."""

    def __init__(self, package: Any, config: GRPOConfig) -> None:
        self._writer = package.SummaryWriter(str(RunPaths(Path(config.run.dir)).tensorboard))
        self._writer.add_text("config", indent(config.to_yaml(), "    "))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_table(self, step: int, table: Sequence[Row]) -> None:
        """It has no tables."""

    def close(self) -> None:
        self._writer.close()


class Hosted:
    """A run of Weights & Biases or of Trackio, whose `log`, `Table` and `Image` are called alike."""

    def __init__(self, package: Any, config: GRPOConfig, project: str, **options: Any) -> None:
        self._package = package
        name = Path(config.run.dir).resolve().name
        settings = redact(config.model_dump(mode="json"))
        self._run = package.init(project=project, name=name, config=settings, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, table: Sequence[Row]) -> None:
        pictures = {row["row"]: row["image"] for row in table if row["image"] is not None}
        made = {
            uid: self._package.Image(picture) for uid, picture in pictures.items()
        }  # a group shares one file
        data = [[*{**row, "image": made.get(row["row"])}.values()] for row in table]
        self._run.log({"rollouts": self._package.Table(columns=[*table[0]], data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | Hosted
"""Takes the numbers of one step after the other, and the table of some steps before them, until it is closed."""
# name, which is also the extra that installs the package: (module to import, what makes a tracker of it)
TRACKERS: dict[str, tuple[str, Callable[[Any, GRPOConfig], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": (
        "wandb",
        lambda package, config: Hosted(
            package, config, os.environ.get("WANDB_PROJECT", "mm_grpo"), dir=config.run.dir
        ),
    ),
    "trackio": ("trackio", lambda package, config: Hosted(package, config, "mm_grpo")),
}


class Trackers:
    """All trackers of a run as one; with no names it does nothing.

    `prepare` before a model loads, `open` around the run, in which it is one of the callbacks. A tracker that raises,
    for a network or a disk that is gone, is left out from then on with one warning: the run goes on, and metrics.jsonl
    has all of it.
    """

    def __init__(self, makers: Mapping[str, Callable[[GRPOConfig], Tracker]]) -> None:
        self._makers = dict(makers)
        self._trackers: dict[str, Tracker] = {}

    @classmethod
    def prepare(cls, names: Sequence[str]) -> Trackers:
        """Import the packages of run.trackers.

        Raises ConfigError when a name is unknown, or when its package is not installed.
        """
        return cls({name: _maker(name) for name in names})

    @contextmanager
    def open(self, config: GRPOConfig) -> Iterator[Trackers]:
        """Start every tracker on the run that `config` describes; close them all at the end."""
        self._trackers = {}
        for name, make in self._makers.items():
            with _warning(name, "cannot be started"):
                self._trackers[name] = make(config)
        try:
            yield self
        finally:
            closing, self._trackers = self._trackers, {}
            for name, tracker in closing.items():
                with _warning(name, "cannot be closed; its last numbers may be lost"):
                    tracker.close()

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers among `metrics`; texts and None stay in metrics.jsonl."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self._send(step, lambda tracker: tracker.log(step, numbers))

    def on_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Send a table of scored groups at the first step and at every REPORT_EVERY-th, before their numbers."""
        due = self._trackers and (step == 1 or step % REPORT_EVERY == 0)
        if due and (table := rollout_table(step, groups)):
            self._send(step, lambda tracker: tracker.log_table(step, table))

    def _send(self, step: int, send: Callable[[Tracker], None]) -> None:
        asked, self._trackers = self._trackers, {}
        for name, tracker in asked.items():
            with _warning(name, f"failed at step {step} and gets no further numbers"):
                send(tracker)
                self._trackers[name] = tracker  # one that raised is left out


@contextmanager
def _warning(name: str, what: str) -> Iterator[None]:
    """Turn whatever somebody else's package raises into a warning. Ctrl-C passes."""
    try:
        yield
    except Exception as error:
        logger.warning(
            "run.trackers: %s %s (%s: %s); the run goes on, and metrics.jsonl has every number",
            name,
            what,
            type(error).__name__,
            error,
        )


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
        ) from None
    return partial(tracker, package)


# the table ---------------------------------------------------------------------------------


def rollout_table(step: int, groups: Sequence[Group]) -> list[Row]:
    """The table of a step, from its scored groups in any order; the raw score of each reward has a column."""
    chosen = sorted(sorted(groups, key=_range, reverse=True)[:GROUPS], key=lambda group: group.slot)
    parts = tuple(dict.fromkeys(name for group in groups for name in group.parts))
    rows = []
    for group in chosen:
        shared = {
            "step": step,
            "row": group.prompt.uid,
            "image": _first(group.prompt.engine_prompt.images),
            "prompt": _question(group.prompt.sample.messages),
            "answer": _answer(group.prompt.sample.columns),
        }
        for number, completion in enumerate(group.completions[:COMPLETIONS]):
            own = {"completion": completion.text[:LONGEST]}
            scores = {"reward": group.rewards[number], "advantage": group.advantages[number]}
            raw = {f"rewards/{n}": group.parts[n][number] if n in group.parts else None for n in parts}
            rows.append({**shared, **own, **scores, **raw})
    return rows


def _first(images: Sequence[Image]) -> Image | None:
    """The first image of a row in RGB, not enlarged."""
    if not images:
        return None
    small = images[0].convert("RGB")
    small.thumbnail((SIDE, SIDE))
    return small


def _range(group: Group) -> float:
    known = [reward for reward in group.rewards if reward is not None]
    return max(known) - min(known) if known else 0.0


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message of the user."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return message_text(asked[-1])[:LONGEST] if asked else ""


def _answer(columns: Mapping[str, Any]) -> str:
    """The row's own answer, under the name that it commonly has."""
    return next((str(columns[name])[:LONGEST] for name in GOLD if name in columns), "")
