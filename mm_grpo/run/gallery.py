"""The groups and evaluation rows that report.html shows: chosen by a budget, and made into plain data.

The rule, which the page states: the last logged step and the first, then steps spread evenly between, each with at most
its share of the budget, until the page holds `Budget.texts` bytes of text or `Budget.images` bytes of images. Of a step
that does not fit, the groups whose rewards differ most. An image is held once, whatever the number of groups that name
it. Of an evaluation, each row's first answers and its last ones, with those of its blind control.

All text is made printable here (terminal.py): control characters and bidirectional marks are shown as escapes.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_grpo.files import parse_json, read_regular_file
from mm_grpo.rewards.builtins.answers import final_part
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import logged_steps
from mm_grpo.run.shades import shaded, tokens_of, total_of
from mm_grpo.terminal import printable

COMPLETIONS_PER_GROUP = 16
ANSWERS_PER_ROW = 4
STEPS = 8
"""Steps that share the budget from the start: none takes more than such a part of it."""
LONGEST_SIDE = 512  # pixels of a picture on the page
LARGEST_PNG = 200_000
"""Bytes of a picture that is shown as PNG; a larger one is shown as JPEG."""
LONGEST_PROMPT = 4000
LONGEST_TEXT = 6000
"""Characters of an answer, and of its thinking."""
FOLDED_FROM, IN_VIEW = 1500, 600
"""Characters from which an answer without tags is folded, and those at its end that stay in view."""
# Columns that hold the answer; without one of these all columns are shown.
GOLD = ("answer", "solution", "gold", "target", "label", "ground_truth")
_THINKING = re.compile(r"<(/?)think>", re.IGNORECASE)
_EVALUATION = re.compile(r"eval-(?:(.+)-)?(\d{6,})\.jsonl")
"""eval-step-000010.jsonl and eval-000010.jsonl of all sets, eval-heldout-000010.jsonl of one."""
MOST_MARKS = 200
MOST_CACHED = 256


@dataclass(frozen=True)
class Budget:
    """Bytes that a page may hold of texts and of images, and bytes of rollout files that are read for it."""

    texts: int
    images: int
    read: int


WHILE_RUNNING = Budget(500_000, 1_500_000, 2_000_000)
"""Of a page that is written while the run waits for it: some tenths of a second."""
WHOLE = Budget(16_000_000, 16_000_000, 96_000_000)


@dataclass
class Pictures:
    """The images of a page, each once, by name: width and height as the model saw it, and a data URI."""

    limit: int
    cache: dict[tuple[Path, str], dict[str, Any] | None] = field(default_factory=dict)
    """Those that were made for an earlier page of the same report; the oldest go beyond MOST_CACHED."""
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes: int = 0

    def take(self, paths: RunPaths, names: Sequence[str]) -> bool:
        """Hold the pictures of a group; False when they do not fit, and then none of them is held."""
        found = {name: self._made(paths, name) for name in names if name not in self.held}
        new = {name: picture for name, picture in found.items() if picture is not None}
        size = sum(len(picture["uri"]) for picture in new.values())
        if self.bytes + size > self.limit:
            return False
        self.held |= new
        self.bytes += size
        return True

    def _made(self, paths: RunPaths, name: str) -> dict[str, Any] | None:
        key = (paths.root, name)
        if key not in self.cache:
            if len(self.cache) >= MOST_CACHED:
                del self.cache[next(iter(self.cache))]
            self.cache[key] = picture(paths, name)
        return self.cache[key]


@dataclass(frozen=True)
class Gallery:
    """What is shown of one run: groups in the order of steps and slots, evaluation rows, and how much there is."""

    groups: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    steps: int
    logged: int
    left_out: int
    """Groups of the steps that are shown which are not."""


def gather_gallery(paths: RunPaths, budget: Budget, pictures: Pictures, run: int = 0) -> Gallery:
    """Choose and describe; see the module. `run` is the number of the run on a page of several."""
    evaluations, used = _evaluations(paths, budget, pictures, run)
    logged = logged_steps(paths)
    order = spread_order(logged)
    parts = min(STEPS, len(order)) or 1
    texts, read = budget.texts - used, budget.read
    groups: list[dict[str, Any]] = []
    shown: set[int] = set()
    left_out = 0
    for step in order:
        if texts <= 0 or read <= 0:
            break
        rows, size = read_rows(paths.rollout_file(step), min(read, budget.read // parts))
        read -= size
        found, seen, room = by_group(rows), 0, min(texts, budget.texts // parts)
        for members in sorted(found, key=reward_range, reverse=True):
            group = describe_group(members, run)
            size = len(json.dumps(group, ensure_ascii=False))
            if size > room or not pictures.take(paths, images_of(group)):
                continue
            room, texts = room - size, texts - size
            groups.append(group)
            seen += 1
        if found and not seen:
            break
        left_out += len(found) - seen
        shown |= {step} if seen else set()
    groups.sort(key=lambda group: (group["step"], group["slot"], group["attempt"]))
    return Gallery(groups, evaluations, len(shown), len(logged), left_out)


def spread_order(steps: Sequence[int]) -> list[int]:
    """The last step, the first, then those in the middle of what is left between, widest stretches first.

    >>> spread_order([1, 2, 3, 4, 5])
    [5, 1, 3, 2, 4]
    """
    if len(steps) < 2:
        return list(steps)
    found = [steps[-1], steps[0]]
    stretches = [(0, len(steps) - 1)]
    while stretches:
        following = []
        for low, high in stretches:
            if high - low > 1:
                middle = (low + high) // 2
                found.append(steps[middle])
                following += [(low, middle), (middle, high)]
        stretches = following
    return found


def read_rows(path: Path, limit: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log file in its first `limit` bytes, and the bytes that were read. What is no row is left out."""
    rows: list[dict[str, Any]] = []
    try:
        data = read_regular_file(path, limit)
    except OSError:  # removed since it was listed
        return [], 0
    lines = data.split(b"\n")
    for line in (
        lines[:-1] or lines
    ):  # what follows the last line feed was cut, by the limit or by a killed process
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "uid" in row:
            rows.append(row)
    return rows, len(data)


def by_group(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each group, in the order of the slots."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row.get("slot", 0), row.get("attempt", 0)), []).append(row)
    return [groups[place] for place in sorted(groups)]


def reward_range(rows: Sequence[Mapping[str, Any]]) -> float:
    """How far the rewards of a group lie apart."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def describe_group(rows: Sequence[Mapping[str, Any]], run: int = 0) -> dict[str, Any]:
    """One prompt and its completions, as the page holds them."""
    head = rows[0]
    own = (turn.get("advantage") for row in rows for turn in row.get("turns") or [])
    largest = max((abs(a or 0.0) for a in (*(row.get("advantage") for row in rows), *own)), default=0.0)
    return {
        **_prompt(head, run),
        "step": head["step"],
        "slot": head.get("slot", 0),
        "attempt": head.get("attempt", 0),
        "left_out": max(0, len(rows) - COMPLETIONS_PER_GROUP),
        "completions": [describe_completion(row, largest) for row in rows[:COMPLETIONS_PER_GROUP]],
    }


def describe_completion(row: Mapping[str, Any], largest: float = 0.0) -> dict[str, Any]:
    """One completion, without keys that have no value; `largest` is the largest advantage of its group, unsigned."""
    text = row.get("completion") or ""
    thinking, answer = split_thinking(text, opened=bool(row.get("opens_thinking")))
    tokens, turns = tokens_of(row), row.get("turns") or []
    found = {
        "text": _cut(printable(answer), LONGEST_TEXT),
        "thinking": _cut(printable(thinking), LONGEST_TEXT),
        "reward": row.get("reward"),
        "parts": {printable(name): score for name, score in (row.get("parts") or {}).items()},
        **_tone(row.get("advantage"), largest),
        "end": printable(row.get("finish_reason", "")),
        "tokens": row.get("tokens", 0),
        "turns": [
            describe_turn(turn, largest, own)
            for turn, own in zip(turns, _of_turns(tokens, turns), strict=True)
        ],
        "masked": printable(row["masked"]) if row.get("masked") else "",
        "marks": _marks(row.get("marks")),
        "sight": total_of(row) or {},
    }
    if not turns:
        found["shaded_text"] = shaded(tokens, text, len(text) - len(answer), found["text"]) or []
        found["shaded_thinking"] = shaded(tokens, text, 0, found["thinking"]) or []
    return {name: value for name, value in found.items() if value not in ("", [], {})}


def describe_turn(
    turn: Mapping[str, Any], largest: float = 0.0, tokens: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
    """One turn of a conversation: what the model wrote, or the call of a tool with its answer and its images.

    With reward and advantage where turns have their own, and shaded where the sight of its `tokens` was measured.
    """
    head = turn["role"]
    if turn["role"] == "tool":
        given = turn.get("arguments") or {}
        arguments = ", ".join(f"{name}={_plain_text(value)}" for name, value in given.items())
        head = f"{turn.get('name')}({arguments})"
    if turn.get("fault"):
        head += f", {turn['fault']}"
    found: dict[str, Any] = {
        "head": printable(head),
        "text": _cut(printable(turn["text"]), LONGEST_TEXT),
        "images": _names(turn.get("images")),
    }
    if shades := shaded(tokens, turn["text"], 0, found["text"]):
        found["shaded_text"] = shades
    if "advantage" in turn:
        found |= {"reward": turn.get("reward"), **_tone(turn["advantage"], largest)}
    return found


def _of_turns(
    tokens: Sequence[tuple[str, float]], turns: Sequence[Mapping[str, Any]]
) -> Iterator[Sequence[tuple[str, float]]]:
    """The tokens of each turn: those of the model follow one another."""
    at = 0
    for turn in turns:
        count = turn.get("tokens", 0) if turn["role"] == "assistant" else 0
        yield tokens[at : at + count]
        at += count


def _tone(advantage: float | None, largest: float) -> dict[str, Any]:
    """How an advantage is shown, with the largest one of its group, unsigned."""
    value = advantage or 0.0
    return {
        "tone": "up" if value > 0 else "down" if value < 0 else "flat",
        "strength": round(3 * abs(value) / largest) if largest else 0,
        "signed": f"{value:+.2f}" if value else "0",
    }


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """The thinking of a completion, and what stays in view: the answer.

    Thinking ends with the last `</think>`; what is never closed is thinking whole. Of a long text without tags the end
    stays in view, from its `<answer>` block where it has one.

    >>> split_thinking("<think>2 + 2</think> 4"), split_thinking("2 + 2</think>4", opened=True)
    (('<think>2 + 2</think>', '4'), ('2 + 2</think>', '4'))
    """
    tags = list(_THINKING.finditer(text))
    if tags or opened:
        if not tags or not tags[-1][1]:
            return text, ""
        return text[: tags[-1].end()], text[tags[-1].end() :].lstrip()
    if len(text) < FOLDED_FROM:
        return "", text
    answer = final_part(text)
    at = text.rfind(answer) if answer != text else len(text)
    at = min(at, len(text) - IN_VIEW)
    return text[:at], text[at:]


def images_of(group: Mapping[str, Any]) -> list[str]:
    """The names of the images of a group, those of its turns among them."""
    blind = group.get("blind", {"images": []})
    ends = [one.get(when, ()) for one in (group, blind) for when in ("before", "after")]
    answers = [*group.get("completions", ()), *(answer for end in ends for answer in end)]
    of_turns = (name for one in answers for turn in one.get("turns", ()) for name in turn["images"])
    return list(dict.fromkeys((*group["images"], *blind["images"], *of_turns)))


def message_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A message's content as text; a media part is shown as its type in brackets."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}] " for part in content)


def picture(paths: RunPaths, name: str) -> dict[str, Any] | None:
    """A logged picture, made smaller where it is large; None for a name that is not ours, or what is no picture."""
    file = paths.images / name
    if not IMAGE_NAME.fullmatch(name) or not file.is_file():
        return None
    from PIL import Image

    try:
        with Image.open(file) as image:
            width, height = image.size
            if max(image.size) <= LONGEST_SIDE and (size := file.stat().st_size) <= LARGEST_PNG and size:
                data, form = file.read_bytes(), "png"
            else:
                small = image.convert("RGB")
                small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
                data, form = _encoded(small, "PNG"), "png"
                if len(data) > LARGEST_PNG:
                    data, form = _encoded(small, "JPEG", quality=85), "jpeg"
    except (OSError, ValueError):
        return None
    uri = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
    return {"width": width, "height": height, "uri": uri}


def _evaluations(
    paths: RunPaths, budget: Budget, pictures: Pictures, run: int
) -> tuple[list[dict[str, Any]], int]:
    """Each evaluation row's first and last answers, with those of the blind control, and the bytes of their texts.

    They take a quarter of the budget at most.
    """
    limit, used = budget.texts // 4, 0
    found: list[dict[str, Any]] = []
    for of_set, first, last in _ends_of_sets(paths):
        rows: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
        blind: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
        for when, path in (("before", first), ("after", last)):
            for row in read_rows(path, budget.read // 8)[0] if path is not None else ():
                held = blind if row.get("blind") else rows
                key = (str(row.get("set") or of_set), str(row["uid"]))
                held.setdefault(key, {}).setdefault(when, []).append(row)
        for key, answers in rows.items():
            row = {**_prompt(next(iter(answers.values()))[0], run), "set": printable(key[0])}
            row |= _ends(answers)
            if key in blind:
                head = next(iter(blind[key].values()))[0]
                kind = printable(head["blind"], lines=False)
                row["blind"] = {"kind": kind, "images": _names(head.get("images")), **_ends(blind[key])}
            size = len(json.dumps(row, ensure_ascii=False))
            if used + size <= limit and pictures.take(paths, images_of(row)):
                used += size
                found.append(row)
    return found, used


def _ends(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The answers `before` and `after`, each where there is one, with its step."""
    found: dict[str, Any] = {}
    for when, given in answers.items():
        found[when] = [describe_completion(one) for one in given[:ANSWERS_PER_ROW]]
        found[f"{when}_step"] = given[0]["step"]
    return found


def _ends_of_sets(paths: RunPaths) -> Iterator[tuple[str, Path, Path | None]]:
    """Of each evaluated set its name, the first file, and the last when it is another."""
    sets: dict[str, list[tuple[int, Path]]] = {}
    for path in paths.rollouts.glob("eval-*.jsonl"):
        if match := _EVALUATION.fullmatch(path.name):
            name = match[1] if match[1] not in (None, "step") else ""
            sets.setdefault(name, []).append((int(match[2]), path))
    for name, files in sorted(sets.items()):
        files.sort()
        yield name, files[0][1], files[-1][1] if len(files) > 1 else None


def _prompt(head: Mapping[str, Any], run: int) -> dict[str, Any]:
    """What a group and an evaluation row have in common."""
    columns = head.get("columns") or {}
    gold = {name: columns[name] for name in GOLD if name in columns} or columns
    return {
        "run": run,
        "uid": printable(head["uid"]),
        "images": _names(head.get("images")),
        "messages": [
            {
                "role": printable(m["role"]),
                "text": _cut(printable(message_text(m["content"])), LONGEST_PROMPT),
            }
            for m in head.get("messages") or []
        ],
        "answers": {printable(n): _cut(printable(_plain_text(v)), LONGEST_PROMPT) for n, v in gold.items()},
        "gold": _marks(head.get("gold")),
    }


def _marks(marks: Any) -> list[dict[str, Any]]:
    """The marks of a row as they are drawn; what is none is left out."""
    found = []
    for mark in marks[:MOST_MARKS] if isinstance(marks, list) else []:
        try:
            points = [(float(x), float(y)) for x, y in mark["points"]]
            label = printable(mark["label"])
            if points:
                found.append({"image": int(mark["image"]), "label": label, "points": points})
        except (TypeError, ValueError, KeyError):
            continue
    return found


def _names(names: Any) -> list[str]:
    """Names of images that a run gives: anything else is left out."""
    return [name for name in names or [] if isinstance(name, str) and IMAGE_NAME.fullmatch(name)]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _encoded(image: Any, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
