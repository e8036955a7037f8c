"""rollouts/step-000001.jsonl: every completion of a step, and rollouts/images/: what the model saw.

Evaluations are in rollouts/eval-step-000000.jsonl, one file for all sets after a step, of the evaluation before the
first step, the best one and the newest; the file of another is removed when it is neither any more.

One object per completion, in the order of the groups, so that one line holds all there is of one
sample: its row, its prompt, its text, seed and weight version, its reward with the raw parts, its
advantage. Images are written once, named by their content, and the rows name them.

Keys: step, slot, attempt, uid, generation, messages, images, completion, tokens, finish_reason, seed,
weight_versions, reward, parts, advantage, columns, `extra` when rewards logged columns of their own, and `sight`
where it was measured (docs/evaluation.md). Boxes, points and polygons in pixels of the row's images (run/overlays.py)
are `gold`, those of the row, and `marks`, those that the rewards read in the completion; either is there when there is
one.
`opens_thinking` is there, and true, when the prompt ends with `<think>`. Rows of an evaluation have also `set`, the
name of the set, and `blind`, null or how the row's images were taken away; `slot` is the number of the row, and
`advantage` null.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.files import atomic_write
from mm_grpo.run.json_records import as_png
from mm_grpo.run.overlays import gold_overlays, predicted_overlays
from mm_grpo.run.paths import ROLLOUT_NAME, RunPaths
from mm_grpo.types import Group, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

    from mm_grpo.rewards.spec import RewardSpec

# Longer texts of a row (a document, a transcript) are cut, and longer lists left out.
LONGEST_TEXT = 2000
LONGEST_LIST = 64
GOLD = ("answer", "solution", "gold", "target", "label", "ground_truth")
"""Names of the column that commonly holds the answer."""


def write_rollouts(
    paths: RunPaths, step: int, groups: Sequence[Group], specs: Sequence[RewardSpec] = ()
) -> Path:
    """Write the rollout file of `step` from scored groups, and the images that are new; returns the file.

    `specs` are the rewards that scored them, which say where boxes and points are.
    """
    return _write(paths.rollout_file(step), _rows(paths, step, groups, specs))


class EvaluationLog:
    """The completions of one evaluation after `step`: `add` those of a set as they come, `write` them at the end."""

    def __init__(self, paths: RunPaths, step: int, specs: Sequence[RewardSpec]) -> None:
        self.paths, self.step, self.specs = paths, step, specs
        self._lines: list[str] = []

    def add(self, name: str, blind: str | None, groups: Sequence[Group]) -> None:
        """Scored groups of the set `name`, and the images that are new."""
        also = {"set": name, "blind": blind}
        self._lines += map(_line, _rows(self.paths, self.step, groups, self.specs, also))

    def write(self, best: int | None) -> Path:
        """Write the file, and remove those that are neither of step 0, nor of step `best`, nor this one.

        Nothing else bounds them: three files of all rows, whatever the number of evaluations.
        """
        self.paths.rollouts.mkdir(exist_ok=True)  # no image was written where every row was dropped
        file = self.paths.evaluation_file(self.step)
        atomic_write(file, "".join(self._lines))
        for step in evaluated_steps(self.paths):
            if step not in (0, best, self.step):
                self.paths.evaluation_file(step).unlink(missing_ok=True)
        return file


def add_to_rollouts(
    paths: RunPaths, step: int, columns: Mapping[tuple[int, int, int], Mapping[str, Any]]
) -> None:
    """Add keys to rows of a step that was written, by (slot, attempt, generation). Nothing where it was not."""
    file = paths.rollout_file(step)
    if not columns or not file.is_file():
        return
    rows = read_rollouts(paths, step)
    _write(
        file, ({**row, **columns.get((row["slot"], row["attempt"], row["generation"]), {})} for row in rows)
    )


def _write(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    atomic_write(file, "".join(map(_line, rows)))
    return file


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _rows(
    paths: RunPaths,
    step: int,
    groups: Sequence[Group],
    specs: Sequence[RewardSpec],
    also: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each completion, with the fields `also` after the step; writes the images that are new.

    A group without advantages, as in evaluation, has null in their place.
    A column that rewards logged for some groups only (`Group.extra`) is null for the others.
    """
    # not with parents: a run's folder that was removed does not come back
    paths.rollouts.mkdir(exist_ok=True)
    paths.images.mkdir(exist_ok=True)
    extra = tuple(dict.fromkeys(name for group in groups for name in group.extra))
    for group in groups:
        prompt = group.prompt
        shared: dict[str, Any] = {
            "uid": prompt.uid,
            "messages": _plain_messages(prompt.sample.messages),
            "images": [_save_image(paths, image) for image in prompt.engine_prompt.images],
        }
        gold, _ = gold_overlays(specs, prompt)
        columns = _plain_columns(prompt.sample.columns)
        advantages = group.advantages or (None,) * len(group.completions)
        scored = zip(group.completions, group.rewards, advantages, strict=True)
        for generation, (completion, reward, advantage) in enumerate(scored):
            row = {
                "step": step,
                **(also or {}),
                "slot": group.slot,
                "attempt": group.attempt,
                **shared,
                "generation": generation,
                "completion": completion.text,
                "tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "seed": completion.seed,
                "weight_versions": completion.weight_versions,
                "reward": reward,
                "parts": {name: values[generation] for name, values in group.parts.items()},
                "advantage": advantage,
                "columns": columns,
            }
            if gold:
                row["gold"] = [overlay.as_dict() for overlay in gold]
            if predicted := predicted_overlays(specs, prompt, completion.text):
                row["marks"] = [overlay.as_dict() for overlay in predicted]
            if prompt.opens_thinking:
                row["opens_thinking"] = True
            if completion.turns:
                row["turns"] = _turns(paths, group, generation)
                row["masked"] = completion.masked
            if extra:
                row["extra"] = {
                    name: plain_value(group.extra[name][generation]) if name in group.extra else None
                    for name in extra
                }
            yield row


def _turns(paths: RunPaths, group: Group, generation: int) -> list[dict[str, Any]]:
    """The turns of one conversation; those of the model with reward and advantage, where they have their own."""
    turns = [_turn(paths, turn) for turn in group.completions[generation].turns]
    if group.turn_advantages:
        own = [turn for turn in turns if turn["role"] == "assistant"]
        rewards, advantages = group.turn_rewards[generation], group.turn_advantages[generation]
        for turn, reward, advantage in zip(own, rewards, advantages, strict=True):
            turn |= {"reward": reward, "advantage": advantage}
    return turns


def _turn(paths: RunPaths, turn: Turn) -> dict[str, Any]:
    written = {"role": turn.role, "text": turn.text, "tokens": turn.tokens}
    if turn.role == "assistant":
        return {**written, "seed": turn.seed}
    images = [_save_image(paths, image) for image in turn.images]
    arguments = _plain_columns(turn.arguments)
    return {**written, "name": turn.name, "arguments": arguments, "images": images, "fault": turn.fault}


def logged_steps(paths: RunPaths) -> list[int]:
    """The steps that have a rollout file, in order."""
    return _steps(paths, None)


def evaluated_steps(paths: RunPaths) -> list[int]:
    """The steps whose evaluation is kept, in order."""
    return _steps(paths, "eval-")


def _steps(paths: RunPaths, kind: str | None) -> list[int]:
    names = os.listdir(paths.rollouts) if paths.rollouts.is_dir() else []
    found = map(ROLLOUT_NAME.fullmatch, names)
    return sorted(int(match[2]) for match in found if match and match[1] == kind)


def read_rollouts(paths: RunPaths, step: int) -> list[dict[str, Any]]:
    """The rows of one step, as they were written."""
    return _read(paths.rollout_file(step))


def read_evaluation(paths: RunPaths, step: int) -> list[dict[str, Any]]:
    """The rows of the evaluation after a step, as they were written."""
    return _read(paths.evaluation_file(step))


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _save_image(paths: RunPaths, image: Image) -> str:
    """Save a picture once; returns its file name, the first 128 bits of its content's SHA-256."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = paths.images / f"{digest}.png"
    if not file.exists():
        atomic_write(file, as_png(image), durable=False)
    return file.name


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with media parts reduced to their type: the pictures are in `images`."""
    return [
        {
            "role": message["role"],
            "content": message["content"]
            if isinstance(message["content"], str)
            else [
                {"type": part["type"], **({"text": part["text"]} if part["type"] == "text" else {})}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def _plain_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that hold the answer: scalars, texts, and short lists of scalars (boxes)."""
    return {name: plain for name, value in columns.items() if (plain := plain_value(value)) is not None}


def message_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A message's content as text; a media part is its type in brackets.

    >>> message_text([{"type": "image"}, {"type": "text", "text": "a"}])
    '[image] a'
    """
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}] " for part in content)


def plain_value(value: Any) -> Any:
    """`value` as JSON can hold it, None when it is nothing to read in a log."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + "…"
    if isinstance(value, float) and value - value != 0:
        return str(value)  # nan and inf are no JSON
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
        inner = [plain_value(v) for v in value]
        return None if any(v is None or isinstance(v, list) for v in inner) else inner
    return None
