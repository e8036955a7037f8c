"""rollouts/step-000001.jsonl: all completions of a step; rollouts/images/: the images and frames that the model saw.

Evaluations are in rollouts/eval-step-000000.jsonl, one file for all sets after a step. Files of the evaluation before
the first step, of the best one and of the newest one are kept.

Each line is one completion, in the order of the groups. Images and frames, these as JPEG, are written once, named by
their content.

Keys: step, slot, attempt, uid, prompt_digest, generation, messages, images, videos, completion, token_digest, tokens,
finish_reason, seed, weight_versions, reward, parts, advantage, columns. The digests are XXH3 of token ids. `images` are
names; each of `videos` has its `times` and `fps` (types.Video), and names as `frames`. Optional keys: `extra`, columns
that rewards logged; `sight` and `order`, if they were measured (docs/evaluation.md); `gold` and `marks`, boxes, points
and polygons of the row and of the completion in pixels of the row's images (run/overlays.py); `opens_thinking`, true if
the prompt ends with `<think>`; `ids_compared`, prompt ids that the engine ran and that were compared with the
learner's, of a conversation in all turns. Rows of an evaluation also have `set`, its name, and `blind`, null or the
kind of its control; their `slot` is the index of the row, their `advantage` is null.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from PIL.Image import Image

from mm_grpo.files import atomic_write, encoded_image
from mm_grpo.messages import content_parts
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import gold_overlays, predicted_overlays
from mm_grpo.run.paths import EVALUATION, ROLLOUT_NAME, RunPaths
from mm_grpo.types import EnginePrompt, Group, Turn

# longer texts of a row are cut, longer lists are left out
MAX_TEXT = 2000
MAX_LIST = 64
GOLD = ("answer", "solution", "gold", "target", "label", "ground_truth")
"""Common names of the column that holds the answer."""


def write_rollouts(
    paths: RunPaths, step: int, groups: Sequence[Group], specs: Sequence[RewardSpec] = ()
) -> Path:
    """Write the rollout file of `step` and new images; return the file.

    `specs` are the rewards that scored the groups; they tell which boxes and points to log.
    """
    return _write(paths.rollout_file(step), _rows(paths, step, groups, specs))


class EvaluationLog:
    """Log of one evaluation after `step`: `add` the groups of a set as they come, `write` the file at the end."""

    def __init__(self, paths: RunPaths, step: int, specs: Sequence[RewardSpec]) -> None:
        self.paths, self.step, self.specs = paths, step, specs
        self._lines: list[str] = []

    def add(self, name: str, blind: str | None, groups: Sequence[Group]) -> None:
        """Add scored groups of the set `name`, and write new images."""
        fields = {"set": name, "blind": blind}
        self._lines += map(_line, _rows(self.paths, self.step, groups, self.specs, fields))

    def write(self, best: int | None) -> None:
        """Write the file; remove the files of all steps but 0, `best` and this one."""
        self.paths.rollouts.mkdir(exist_ok=True)  # `_rows` made no folder if every row was dropped
        atomic_write(self.paths.rollout_file(self.step, EVALUATION), "".join(self._lines))
        for step in logged_steps(self.paths, EVALUATION):
            if step not in (0, best, self.step):
                self.paths.rollout_file(step, EVALUATION).unlink(missing_ok=True)


def add_to_rollouts(
    paths: RunPaths, step: int, columns: Mapping[tuple[int, int, int], Mapping[str, Any]]
) -> None:
    """Add keys to rows of a logged step, by (slot, attempt, generation). Do nothing if the step has no file."""
    file = paths.rollout_file(step)
    if columns and file.is_file():
        rows = read_rollouts(paths, step)
        for row in rows:
            row |= columns.get((row["slot"], row["attempt"], row["generation"]), {})
        _write(file, rows)


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
    fields: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each completion, with `fields` after the step; write new images.

    Advantages are null in evaluation. A column that rewards logged for some groups (`Group.extra`) is null for others.
    """
    # without parents, so that a removed run folder does not come back
    paths.rollouts.mkdir(exist_ok=True)
    paths.images.mkdir(exist_ok=True)
    extra = tuple(dict.fromkeys(name for group in groups for name in group.extra))
    for group in groups:
        prompt = group.prompt
        shared: dict[str, Any] = {
            "uid": prompt.uid,
            "prompt_digest": _digest(prompt.token_ids),
            "messages": _plain_messages(prompt.sample.messages),
            **_save_media(paths, prompt.engine_prompt),
        }
        gold, _ = gold_overlays(specs, prompt)
        columns = _plain_columns(prompt.sample.other_columns)
        advantages = group.advantages or (None,) * len(group.completions)
        scored = zip(group.completions, group.rewards, advantages, strict=True)
        for generation, (completion, reward, advantage) in enumerate(scored):
            row = {
                "step": step,
                **(fields or {}),
                "slot": group.slot,
                "attempt": group.attempt,
                **shared,
                "generation": generation,
                "completion": completion.text,
                "token_digest": _digest(completion.token_ids),
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
            if completion.ids_compared:
                row["ids_compared"] = completion.ids_compared
            if completion.turns:
                row["turns"] = _turns(paths, group, generation)
                row["masked"] = completion.masked
            if extra:
                row["extra"] = {
                    name: plain_value(group.extra[name][generation]) if name in group.extra else None
                    for name in extra
                }
            yield row


def _digest(token_ids: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(array("q", token_ids).tobytes())


def _turns(paths: RunPaths, group: Group, generation: int) -> list[dict[str, Any]]:
    """Return the turns of one conversation; model turns have reward and advantage if there are any for turns."""
    turns = [_turn(paths, turn) for turn in group.completions[generation].turns]
    if group.turn_advantages:
        model_turns = [turn for turn in turns if turn["role"] == "assistant"]
        rewards, advantages = group.turn_rewards[generation], group.turn_advantages[generation]
        for turn, reward, advantage in zip(model_turns, rewards, advantages, strict=True):
            turn |= {"reward": reward, "advantage": advantage}
    return turns


def _turn(paths: RunPaths, turn: Turn) -> dict[str, Any]:
    common = {"role": turn.role, "text": turn.text, "tokens": turn.tokens}
    if turn.role == "assistant":
        return {**common, "seed": turn.seed}
    answer = {"name": turn.name, "arguments": _plain_columns(turn.arguments), **_save_media(paths, turn)}
    return {**common, **answer, "fault": turn.fault}


def logged_steps(paths: RunPaths, kind: str = "") -> list[int]:
    """Return the steps that have a rollout file, or with EVALUATION one of an evaluation, in order."""
    names = os.listdir(paths.rollouts) if paths.rollouts.is_dir() else []
    matches = map(ROLLOUT_NAME.fullmatch, names)
    return sorted(int(match[2]) for match in matches if match and match[1] == kind)


def rollout_digests(paths: RunPaths, step: int) -> dict[str, str]:
    """Return XXH3 of a step's rollout files by metric: rollouts/step, and rollouts/eval-step of the evaluation."""
    files = {f"rollouts/{kind}step": paths.rollout_file(step, kind) for kind in ("", EVALUATION)}
    return {k: xxhash.xxh3_128_hexdigest(file.read_bytes()) for k, file in files.items() if file.is_file()}


def read_rollouts(paths: RunPaths, step: int, kind: str = "") -> list[dict[str, Any]]:
    """Read the rows of a step, or with EVALUATION of the evaluation after it."""
    text = paths.rollout_file(step, kind).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def _save_media(paths: RunPaths, shown: EnginePrompt | Turn) -> dict[str, Any]:
    """Save images and frames of videos; return the keys `images` and `videos` of a row or a turn."""
    # frames as PNG would take a minute and a gigabyte a step: forty times as long as JPEG, and six times the bytes
    frames = ([_save_image(paths, frame, "jpeg") for frame in video.frames] for video in shown.videos)
    pairs = zip(frames, shown.videos, strict=True)
    videos = [{"frames": names, "times": video.times, "fps": video.fps} for names, video in pairs]
    return {"images": [_save_image(paths, image, "png") for image in shown.images], "videos": videos}


def _save_image(paths: RunPaths, image: Image, form: str) -> str:
    """Save an image once; return its file name, the first 128 bits of the SHA-256 of its pixels."""
    digest = hashlib.sha256(f"{image.mode} {image.size}".encode() + image.tobytes()).hexdigest()[:32]
    file = paths.images / f"{digest}.{form}"
    if not file.exists():
        atomic_write(file, encoded_image(image, form), durable=False)
    return file.name


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with media parts reduced to their type."""

    def plain(content: str | Sequence[Mapping[str, Any]]) -> Any:
        if isinstance(content, str):
            return content
        texts = ({"text": part["text"]} if part["type"] == "text" else {} for part in content)
        return [{"type": part["type"], **text} for part, text in zip(content, texts, strict=True)]

    return [{"role": message["role"], "content": plain(message["content"])} for message in messages]


def _plain_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a log can hold: scalars, texts, and short lists of scalars (boxes)."""
    return {name: plain for name, value in columns.items() if (plain := plain_value(value)) is not None}


def message_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a message's content as text; a media part is its type in brackets.

    >>> message_text([{"type": "image"}, {"type": "text", "text": "a"}])
    '[image] a'
    """
    parts = content_parts(content)
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}] " for part in parts)


def reward_range(rewards: Iterable[float | None]) -> float:
    """Return the largest reward minus the smallest; 0 without any."""
    scores = [reward for reward in rewards if reward is not None]
    return max(scores, default=0.0) - min(scores, default=0.0)


def plain_value(value: Any) -> Any:
    """Return `value` as JSON can hold it; None if it does not belong in a log."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "…"
    if isinstance(value, float) and value - value != 0:
        return str(value)  # nan and inf are no JSON
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= MAX_LIST:
        entries = [plain_value(v) for v in value]
        return None if any(v is None or isinstance(v, list) for v in entries) else entries
    return None
