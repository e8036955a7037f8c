"""run.trackers: send metrics to tensorboard, wandb or trackio, to the last two also tables of completions.

metrics.jsonl and rollouts/ stay the record. accelerate's trackers are not used, because they need its process state,
which picks devices and joins process groups. To add one: a class with `log`, `log_table` (which may do nothing) and
`close`, and its line in TRACKERS.

Tables go over a network, so they are small: the `MAX_GROUPS` groups of a step with the widest range of rewards,
`MAX_COMPLETIONS` of each, and the first image or frame of a row, with at most `MAX_SIDE` pixels.
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
from typing import Any

from PIL.Image import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.run.paths import REPORT_EVERY, RunPaths
from mm_grpo.run.rollout_log import GOLD, message_text, reward_range
from mm_grpo.terminal import redact
from mm_grpo.types import Group, Medium, Video

MAX_GROUPS = 4
MAX_COMPLETIONS = 8
MAX_SIDE = 256
"""Pixels of the longer side of an image."""
MAX_TEXT = 2000
"""Characters of a text."""
TableRow = dict[str, Any]
"""Column -> cell; the cell `image` is an RGB image or None."""
logger = logging.getLogger("mm_grpo")


class TensorBoard:
    """Tracker that writes event files to the run folder's tensorboard/; `tensorboard --logdir RUN_DIR` shows them."""

    def __init__(self, package: Any, config: GRPOConfig) -> None:
        self._writer = package.SummaryWriter(str(RunPaths(Path(config.run.dir)).tensorboard))
        self._writer.add_text("config", indent(config.to_yaml(), "    "))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_table(self, step: int, table: Sequence[TableRow]) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self) -> None:
        self._writer.close()


class Hosted:
    """Tracker of Weights & Biases or Trackio, which have the same `log`, `Table` and `Image`."""

    def __init__(self, package: Any, config: GRPOConfig, project: str, **options: Any) -> None:
        self._package = package
        name = Path(config.run.dir).resolve().name
        settings = redact(config.model_dump(mode="json"))
        self._run = package.init(project=project, name=name, config=settings, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, table: Sequence[TableRow]) -> None:
        # one file for all rows of a group
        images = {row["row"]: row["image"] for row in table if row["image"] is not None}
        files = {uid: self._package.Image(image) for uid, image in images.items()}
        data = [[*{**row, "image": files.get(row["row"])}.values()] for row in table]
        self._run.log({"rollouts": self._package.Table(columns=[*table[0]], data=data)}, step=step)

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | Hosted


def _wandb(package: Any, config: GRPOConfig) -> Tracker:
    return Hosted(package, config, os.environ.get("WANDB_PROJECT", "mm_grpo"), dir=config.run.dir)


# name, also of the extra that installs the package -> (module to import, function that makes a tracker)
TRACKERS: dict[str, tuple[str, Callable[[Any, GRPOConfig], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", lambda package, config: Hosted(package, config, "mm_grpo")),
}


class Trackers:
    """All trackers of a run; a callback of the run.

    The constructor imports the packages of run.trackers, before a model loads. Raises ConfigError if a package is
    missing. Call `open` around the run. A tracker that raises, because a network or a disk is gone, is dropped with one
    warning; the run goes on.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._makers = {name: _maker(name) for name in names}
        self._trackers: dict[str, Tracker] = {}

    @contextmanager
    def open(self, config: GRPOConfig) -> Iterator[Trackers]:
        """Start every tracker on the run of `config`; close them all at the end."""
        self._trackers = {}
        for name, make in self._makers.items():
            with _only_warn(name, "cannot be started"):
                self._trackers[name] = make(config)
        try:
            yield self
        finally:
            trackers, self._trackers = self._trackers, {}
            for name, tracker in trackers.items():
                with _only_warn(name, "cannot be closed; its last numbers may be lost"):
                    tracker.close()

    def on_log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers among `metrics`; texts and None are only in metrics.jsonl."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        self._send(step, lambda tracker: tracker.log(step, numbers))

    def on_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Send a table of scored groups at the first step and at every REPORT_EVERY-th, before their numbers."""
        is_due = self._trackers and (step == 1 or step % REPORT_EVERY == 0)
        if is_due and (table := rollout_table(step, groups)):
            self._send(step, lambda tracker: tracker.log_table(step, table))

    def _send(self, step: int, send: Callable[[Tracker], None]) -> None:
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            with _only_warn(name, f"failed at step {step} and gets no further numbers"):
                send(tracker)
                self._trackers[name] = tracker  # not reached if it raised


@contextmanager
def _only_warn(name: str, problem: str) -> Iterator[None]:
    """Turn any exception of a tracker's package into a warning. Ctrl-C passes."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        message = "run.trackers: %s %s (%s); the run goes on, and metrics.jsonl has every number"
        logger.warning(message, name, problem, reason)


def _maker(name: str) -> Callable[[GRPOConfig], Tracker]:
    module, tracker = TRACKERS[name]
    try:
        package = import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.trackers = '{name}': the package is not installed ({error});"
            f" install it with: pip install 'mm_grpo[{name}]', or remove '{name}' from run.trackers"
        ) from None
    return partial(tracker, package)


def rollout_table(step: int, groups: Sequence[Group]) -> list[TableRow]:
    """Return the table of a step from its scored groups; the raw score of each reward has a column."""
    widest = sorted(groups, key=lambda group: reward_range(group.rewards), reverse=True)[:MAX_GROUPS]
    parts = tuple(dict.fromkeys(name for group in groups for name in group.parts))
    rows = []
    for group in sorted(widest, key=lambda group: group.slot):
        sample = group.prompt.sample
        questions = [message["content"] for message in sample.messages if message["role"] == "user"]
        shared = {
            "step": step,
            "row": group.prompt.uid,
            "image": _small_image(group.prompt.engine_prompt.media),
            "prompt": message_text(questions[-1])[:MAX_TEXT] if questions else "",
            "answer": next((str(sample.columns[n])[:MAX_TEXT] for n in GOLD if n in sample.columns), ""),
        }
        for i, completion in enumerate(group.completions[:MAX_COMPLETIONS]):
            scores = {"reward": group.rewards[i], "advantage": group.advantages[i]}
            raw = {f"rewards/{n}": group.parts[n][i] if n in group.parts else None for n in parts}
            rows.append({**shared, "completion": completion.text[:MAX_TEXT], **scores, **raw})
    return rows


def _small_image(media: Sequence[Medium]) -> Image | None:
    """Return the first image or frame of a row in RGB, reduced to MAX_SIDE; None without media."""
    if not media:
        return None
    first = media[0]
    small = (first.frames[0] if isinstance(first, Video) else first).convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    return small
