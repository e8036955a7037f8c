"""rollouts/step-000001.jsonl: every completion of a step, and rollouts/images/: what the model saw.

One object per completion, in the order of the groups, so that one line holds all there is of one
sample: its row, its prompt, its text, seed and weight version, its reward with the raw parts, its
advantage. Images are written once, named by their content, and the rows name them.

Keys: step, slot, attempt, uid, generation, messages, images, completion, tokens, finish_reason, seed,
weight_versions, reward, parts, advantage, columns, and `extra` when rewards logged columns of their own.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.files import atomic_write
from mm_grpo.run.paths import STEP_NAME, RunPaths
from mm_grpo.types import Group, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

# Longer texts of a row (a document, a transcript) are cut, and longer lists left out.
LONGEST_TEXT = 2000
LONGEST_LIST = 64


def write_rollouts(paths: RunPaths, step: int, groups: Sequence[Group]) -> Path:
    """Write the rollout file of `step` from scored groups, and the images that are new; returns the file.

    A column that rewards logged for some groups only (`Group.extra`) is null for the others. Raises ValueError when
    a list of scores or a column has another length than its group.
    """
    for group in groups:
        for name, column in [*group.parts.items(), *group.extra.items()]:
            if len(column) != len(group.completions):
                raise ValueError(
                    f"'{name}' has {len(column)} values for the {len(group.completions)} completions of "
                    f"{group.prompt.uid} in step {step}"
                )
    extra = list(dict.fromkeys(name for group in groups for name in group.extra))
    paths.images.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for group in groups:
        shared = {
            "uid": group.prompt.uid,
            "messages": _plain_messages(group.prompt.sample.messages),
            "images": [_save_image(paths, image) for image in group.prompt.engine_prompt.images],
        }
        columns = _plain_columns(group.prompt.sample.columns)
        scored = zip(group.completions, group.rewards, group.advantages, strict=True)
        for generation, (completion, reward, advantage) in enumerate(scored):
            row = {
                "step": step,
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
            if completion.turns:
                row["turns"] = [_turn(paths, turn) for turn in completion.turns]
                row["masked"] = completion.masked
            if extra:
                row["extra"] = {
                    name: _plain(group.extra[name][generation]) if name in group.extra else None
                    for name in extra
                }
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    file = paths.rollout_file(step)
    atomic_write(file, "".join(lines))
    return file


def _turn(paths: RunPaths, turn: Turn) -> dict[str, Any]:
    written = {"role": turn.role, "text": turn.text, "tokens": turn.tokens}
    if turn.role == "assistant":
        return {**written, "seed": turn.seed}
    images = [_save_image(paths, image) for image in turn.images]
    arguments = _plain_columns(turn.arguments)
    return {**written, "name": turn.name, "arguments": arguments, "images": images, "fault": turn.fault}


def logged_steps(paths: RunPaths) -> list[int]:
    """The steps that have a rollout file, in order."""
    names = (STEP_NAME.fullmatch(file.stem) for file in paths.rollouts.glob("step-*.jsonl"))
    return sorted(int(match[1]) for match in names if match)


def read_rollouts(paths: RunPaths, step: int) -> list[dict[str, Any]]:
    """The rows of one step, as they were written."""
    return [
        json.loads(line) for line in paths.rollout_file(step).read_text(encoding="utf-8").split("\n") if line
    ]


def _save_image(paths: RunPaths, image: Image) -> str:
    """Save a picture once; returns its file name, the first 128 bits of its content's SHA-256."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = paths.images / f"{digest}.png"
    if not file.exists():
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=1)  # the default level takes several times as long
        atomic_write(file, png.getvalue(), durable=False)
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
    return {name: plain for name, value in columns.items() if (plain := _plain(value)) is not None}


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it, None when it is nothing to read in a log."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST_TEXT else value[:LONGEST_TEXT] + "…"
    if isinstance(value, float) and value - value != 0:
        return str(value)  # nan and inf are no JSON
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= LONGEST_LIST:
        inner = [_plain(v) for v in value]
        return None if any(v is None or isinstance(v, list) for v in inner) else inner
    return None
