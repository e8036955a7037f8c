"""The groups and evaluation rows that a run's page shows: chosen by a budget, and made into plain data.

The rule, which the page states: the last logged step and the first, then steps spread evenly between, each with at most
its share of the budget, until the page holds `Budget.texts` bytes of text or `Budget.images` bytes of images. Of a step
that does not fit, the groups whose rewards differ most. An image is held once, whatever the number of groups that name
it. Of an evaluation, each row's first answers and its last ones, its blind control left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mm_grpo.pages.page import Picture, as_text, cut, data_url, encode_image
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import (
    GOLD,
    evaluated_steps,
    logged_steps,
    message_text,
    read_evaluation,
    read_rollouts,
)

ENDS = ("before", "after")
AS_LOGGED = ("reward", "parts", "advantage", "finish_reason", "tokens", "masked")
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
_THINKING = re.compile(r"<(/?)think>", re.IGNORECASE)
MOST_OVERLAYS = 200
SHADED_FROM = 0.1
"""Nats, above and below 0, from which page.js shades a token (SHADES there)."""

Tokens = Sequence[tuple[str, float]]
Heatmap = list[str | tuple[str, float]]
"""Pieces of a text: those that are shaded with their nats, and what lies between them."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a page may hold of texts and of images."""

    texts: int
    images: int


WHILE_RUNNING = Budget(500_000, 1_500_000)
"""Of a page that is written while the run waits for it: some tenths of a second."""
WHOLE = Budget(16_000_000, 16_000_000)


@dataclass
class Pictures:
    """The images of a page, each once, by name, in at most `limit` bytes."""

    limit: int
    held: dict[str, Picture] = field(default_factory=dict)
    bytes: int = 0

    def take(self, paths: RunPaths, names: Sequence[str]) -> bool:
        """Hold the pictures of a group; False when they do not fit, and then none of them is held."""
        found = {name: picture(paths, name) for name in names if name not in self.held}
        new = {name: picture for name, picture in found.items() if picture is not None}
        size = sum(len(picture.uri) for picture in new.values())
        if self.bytes + size > self.limit:
            return False
        self.held |= new
        self.bytes += size
        return True


@dataclass(frozen=True)
class Gallery:
    """What is shown of one run: groups in the order of steps and slots, evaluation rows, and how much of it there is.

    `counts` are those of groups and evaluation rows, of steps that are shown and that are logged, and of groups of the
    steps that are shown which are not.
    """

    groups: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    counts: dict[str, int]


def gather_gallery(paths: RunPaths, budget: Budget, pictures: Pictures, run: int = 0) -> Gallery:
    """Choose and describe; see the module. `run` is the number of the run on a page of several."""
    evaluations, used = _evaluations(paths, budget, pictures, run)
    logged = logged_steps(paths)
    order = spread_order(logged)
    parts = min(STEPS, len(order)) or 1
    texts = budget.texts - used
    groups: list[dict[str, Any]] = []
    shown: set[int] = set()
    left_out = 0
    for step in order:
        if texts <= 0:
            break
        found, seen, room = by_group(read_rollouts(paths, step)), 0, min(texts, budget.texts // parts)
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
    counts = {"groups": len(groups), "evaluations": len(evaluations), "left_out": left_out}
    return Gallery(groups, evaluations, {**counts, "steps": len(shown), "logged": len(logged)})


def spread_order(steps: Sequence[int]) -> list[int]:
    """The last step, the first, then those in the middle of what is left between, widest stretches first.

    >>> spread_order([1, 2, 3, 4, 5])
    [5, 1, 3, 2, 4]
    """
    last = len(steps) - 1
    parts = [2**i for i in range(1, last.bit_length() + 1)]
    places = (last, 0, *(last * odd // part for part in parts for odd in range(1, part, 2)))
    return [steps[place] for place in dict.fromkeys(places)] if steps else []


def by_group(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each group, in the order of the slots."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["slot"], row["attempt"]), []).append(row)
    return [groups[place] for place in sorted(groups)]


def reward_range(rows: Sequence[Mapping[str, Any]]) -> float:
    """How far the rewards of a group lie apart."""
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def describe_group(rows: Sequence[Mapping[str, Any]], run: int = 0) -> dict[str, Any]:
    """One prompt and its completions, as the page holds them."""
    head = rows[0]
    return {
        **_prompt(head, run),
        "step": head["step"],
        "slot": head["slot"],
        "attempt": head["attempt"],
        "left_out": max(0, len(rows) - COMPLETIONS_PER_GROUP),
        "completions": [describe_completion(row) for row in rows[:COMPLETIONS_PER_GROUP]],
    }


def describe_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    """One completion, without keys that have no value."""
    text = row["completion"]
    thinking, answer = split_thinking(text, opened=bool(row.get("opens_thinking")))
    sight, turns = row.get("sight"), row.get("turns") or []
    tokens = list(zip(sight["pieces"], sight["tokens"], strict=True)) if sight else []
    own = () if turns else tokens
    found: dict[str, Any] = {
        **{name: row.get(name) for name in AS_LOGGED},
        "text": _shown(text, len(text) - len(answer), len(text), own),
        "thinking": _shown(text, 0, len(thinking), own),
        "turns": [],
        "marks": (row.get("marks") or [])[:MOST_OVERLAYS],
        "sight": sight and {name: sight[name] for name in ("nats", "other")},
    }
    place = 0
    for turn in turns:
        count = turn.get("tokens", 0) if turn["role"] == "assistant" else 0
        found["turns"].append(describe_turn(turn, tokens[place : place + count]))
        place += count
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}


def describe_turn(turn: Mapping[str, Any], tokens: Tokens = ()) -> dict[str, Any]:
    """One turn of a conversation, as it was logged: in pieces where the sight of its `tokens` was measured."""
    text = turn["text"]
    return {**turn, "text": _shown(text, 0, len(text), tokens), "images": _names(turn.get("images", ()))}


def _shown(whole: str, start: int, end: int, tokens: Tokens) -> str | Heatmap:
    """`whole[start:end]`, cut where it is long; in pieces where `tokens` are those of `whole`."""
    shown = cut(whole[start:end], LONGEST_TEXT)
    last = min(end, start + LONGEST_TEXT)
    if not tokens or (pieces := heatmap(tokens, whole, start, last)) is None:
        return shown
    return [*pieces, *filter(None, [shown[last - start :]])]


def heatmap(tokens: Tokens, whole: str, start: int, end: int) -> Heatmap | None:
    """`whole[start:end]` in pieces; None where `tokens` are not those of `whole`, or none of them is shaded.

    >>> heatmap([("It", 0.0), (" is", 0.01), (" red", 4.5)], "It is red", 1, 9)
    ['t is', (' red', 4.5)]
    """
    if "".join(piece for piece, _ in tokens) != whole:
        return None
    found: Heatmap = []
    place = 0
    for piece, nats in tokens:
        text = piece[max(0, start - place) : max(0, end - place)]
        place += len(piece)
        if not text:
            continue
        if abs(nats) >= SHADED_FROM:
            found.append((text, round(nats, 4)))
        elif found and isinstance(found[-1], str):
            found[-1] += text
        else:
            found.append(text)
    return found if any(isinstance(piece, tuple) for piece in found) else None


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """The thinking of a completion, which ends with the last `</think>` or never, and what stays in view: the answer.

    >>> split_thinking("<think>2 + 2</think> 4"), split_thinking("2 + 2</think>4", opened=True)
    (('<think>2 + 2</think>', '4'), ('2 + 2</think>', '4'))
    """
    tags = list(_THINKING.finditer(text))
    if not tags and not opened:
        return "", text
    end = tags[-1].end() if tags and tags[-1][1] else len(text)
    return text[:end], text[end:].lstrip()


def images_of(group: Mapping[str, Any]) -> list[str]:
    """The names of the images of a group or an evaluation row, those of its turns among them."""
    answers = [one for when in ("completions", *ENDS) for one in group.get(when, ())]
    of_turns = (name for one in answers for turn in one.get("turns", ()) for name in turn["images"])
    return list(dict.fromkeys((*group["images"], *of_turns)))


def picture(paths: RunPaths, name: str) -> Picture | None:
    """A logged picture, made smaller where it is large; None for a name that is none of a run's."""
    file = paths.images / name
    if not IMAGE_NAME.fullmatch(name) or not file.is_file():
        return None
    from PIL import Image

    with Image.open(file) as image:
        width, height = image.size
        if max(image.size) <= LONGEST_SIDE and file.stat().st_size <= LARGEST_PNG:
            return Picture(width, height, data_url("png", file.read_bytes()))
        small = image.convert("RGB")
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return Picture(width, height, encode_image(small, LARGEST_PNG)[0])


def _evaluations(
    paths: RunPaths, budget: Budget, pictures: Pictures, run: int
) -> tuple[list[dict[str, Any]], int]:
    """Each evaluation row's first and last answers, and the bytes of their texts: a quarter of the budget at most."""
    limit, used = budget.texts // 4, 0
    found: list[dict[str, Any]] = []
    rows: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    steps = evaluated_steps(paths)
    for when, step in zip(ENDS, dict.fromkeys((*steps[:1], *steps[-1:])), strict=False):
        for row in read_evaluation(paths, step):
            if not row["blind"]:
                rows.setdefault((row["set"], row["uid"]), {}).setdefault(when, []).append(row)
    for (name, _), answers in rows.items():
        row = {**_prompt(next(iter(answers.values()))[0], run), "set": name}
        for when, given in answers.items():
            row[when] = [describe_completion(one) for one in given[:ANSWERS_PER_ROW]]
            row[f"{when}_step"] = given[0]["step"]
        size = len(json.dumps(row, ensure_ascii=False))
        if used + size <= limit and pictures.take(paths, images_of(row)):
            used += size
            found.append(row)
    return found, used


def _prompt(head: Mapping[str, Any], run: int) -> dict[str, Any]:
    """What a group and an evaluation row have in common."""
    columns = head["columns"]
    gold = {name: columns[name] for name in GOLD if name in columns} or columns
    return {
        "run": run,
        "uid": head["uid"],
        "images": _names(head["images"]),
        "messages": [
            {"role": m["role"], "text": cut(prompt_text(m["content"], head["images"]), LONGEST_PROMPT)}
            for m in head["messages"]
        ],
        "answers": {name: cut(as_text(value), LONGEST_PROMPT) for name, value in gold.items()},
        "gold": (head.get("gold") or [])[:MOST_OVERLAYS],
    }


def prompt_text(content: str | Sequence[Mapping[str, Any]], pictures: Sequence[str]) -> str:
    """A message's content, a line for each part; images are named in it where no `pictures` are shown beside it.

    >>> prompt_text([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}], ["one.png"])
    'a\\nb'
    """
    if isinstance(content, str):
        return content
    shown = (part for part in content if part["type"] == "text" or not pictures)
    return "\n".join(message_text([part]).strip() for part in shown)


def _names(names: Sequence[str]) -> list[str]:
    """Names of a run's images, without anything else: whoever sent the folder wrote them."""
    return [name for name in names if IMAGE_NAME.fullmatch(name)]
