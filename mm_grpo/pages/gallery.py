"""Groups and evaluation rows for a run's page, chosen by a budget.

The page states the rule: the last logged step and the first, then steps evenly between, each with at most its share of
the budget, until the page has `Budget.texts` bytes of text or `Budget.images` bytes of images. If a step does not fit,
its groups with the widest range of rewards are shown. An image is stored once for all groups, a video as reduced
frames. An evaluation row is shown with its answers before the first step and after the last evaluation, without its
blind control.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from mm_grpo.files import data_url
from mm_grpo.pages.page import FRAME, PageImage, as_text, cut
from mm_grpo.rewards.thinking import without_thinking
from mm_grpo.run.paths import EVALUATION, IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import (
    GOLD,
    logged_steps,
    message_text,
    read_rollouts,
    reward_range,
)

BEFORE_AND_AFTER = ("before", "after")
LOGGED_KEYS = ("reward", "parts", "advantage", "finish_reason", "tokens", "masked")
COMPLETIONS_PER_GROUP = 16
ANSWERS_PER_ROW = 4
STEP_SHARES = 8  # parts of the budget; a step gets at most one
IMAGE = (512, 200_000)  # pixels of a side; bytes of a PNG from which an image is shown as JPEG
MAX_PROMPT = 4000
MAX_TEXT = 6000  # characters of an answer, and of its thinking
MAX_OVERLAYS = 200
MIN_SHADED = 0.1  # nats, above and below 0, from which page.js shades a token (SHADES there)

Tokens = Sequence[tuple[str, float]]
"""(text, nats)"""
Heatmap = list[str | tuple[str, float]]
"""Text in pieces: shaded tokens as (text, nats), the text between them as str."""


@dataclass(frozen=True)
class Budget:
    """Bytes of texts and of images that a page may hold."""

    texts: int
    images: int


LIVE_BUDGET = Budget(500_000, 1_500_000)
"""For a page that the run waits for: some tenths of a second."""
FULL_BUDGET = Budget(16_000_000, 16_000_000)


@dataclass
class ImageStore:
    """Images of a page by name, in at most `limit` bytes."""

    limit: int
    by_name: dict[str, PageImage] = field(default_factory=dict)
    bytes: int = 0

    def add(self, paths: RunPaths, sizes: Mapping[str, tuple[int, int]]) -> bool:
        """Store the pictures of a group by their largest sizes; return False, and store none, if they do not fit."""
        images = {
            name: load_image(paths, name, *size) for name, size in sizes.items() if name not in self.by_name
        }
        new = {name: image for name, image in images.items() if image is not None}
        size = sum(len(image.uri) for image in new.values())
        if self.bytes + size > self.limit:
            return False
        self.by_name |= new
        self.bytes += size
        return True


@dataclass(frozen=True)
class Gallery:
    """Groups of one run, sorted by step and slot, its evaluation rows, and counts of both."""

    groups: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    counts: dict[str, int]
    """`groups`, `evaluations`, `steps` on the page; `logged` steps; `left_out` groups of the steps on the page."""


def gather_gallery(paths: RunPaths, budget: Budget, images: ImageStore, run: int = 0) -> Gallery:
    """Choose groups and evaluation rows as the module says; `run` is the run's index on the page."""
    evaluations, size_of_evaluations = _evaluations(paths, budget, images, run)
    steps = logged_steps(paths)
    order = spread_order(steps)
    texts = budget.texts - size_of_evaluations
    step_share = budget.texts // (min(STEP_SHARES, len(order)) or 1)
    gallery: list[dict[str, Any]] = []
    steps_shown = left_out = 0
    for step in order:
        groups, count, room = by_group(read_rollouts(paths, step)), 0, min(texts, step_share)
        groups.sort(key=lambda rows: reward_range(row["reward"] for row in rows), reverse=True)
        for rows in groups:
            group = describe_group(rows, run)
            size = len(json.dumps(group, ensure_ascii=False))
            if size > room or not images.add(paths, pictures_of(group)):
                continue
            room, texts = room - size, texts - size
            gallery.append(group)
            count += 1
        if groups and not count:
            break
        left_out += len(groups) - count
        steps_shown += count > 0
    gallery.sort(key=lambda group: (group["step"], group["slot"], group["attempt"]))
    counts = {"groups": len(gallery), "evaluations": len(evaluations), "left_out": left_out}
    return Gallery(gallery, evaluations, {**counts, "steps": steps_shown, "logged": len(steps)})


def spread_order(steps: Sequence[int]) -> list[int]:
    """Return the last step, the first, then the middles of the stretches between, widest stretches first.

    >>> spread_order([1, 2, 3, 4, 5])
    [5, 1, 3, 2, 4]
    """
    last = len(steps) - 1
    parts = [2**i for i in range(1, last.bit_length() + 1)]
    indices = (last, 0, *(last * odd // part for part in parts for odd in range(1, part, 2)))
    return [steps[index] for index in dict.fromkeys(indices)] if steps else []


def by_group(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the rows of each group, sorted by slot and attempt."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["slot"], row["attempt"]), []).append(row)
    return [groups[key] for key in sorted(groups)]


def describe_group(rows: Sequence[Mapping[str, Any]], run: int = 0) -> dict[str, Any]:
    """Return the page's data of one prompt and its completions."""
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
    """Return the page's data of one completion, without empty values."""
    text = row["completion"]
    thinking, answer = split_thinking(text, opened=bool(row.get("opens_thinking")))
    sight, turns = row.get("sight"), row.get("turns") or []
    tokens = list(zip(sight["pieces"], sight["tokens"], strict=True)) if sight else []
    text_tokens = () if turns else tokens
    data: dict[str, Any] = {
        **{name: row.get(name) for name in LOGGED_KEYS},
        "text": _shorten_text(text, len(text) - len(answer), len(text), text_tokens),
        "thinking": _shorten_text(text, 0, len(thinking), text_tokens),
        "turns": [],
        "marks": (row.get("marks") or [])[:MAX_OVERLAYS],
        "sight": sight and {name: sight[name] for name in ("nats", "other")},
    }
    start = 0
    for turn in turns:
        count = turn.get("tokens", 0) if turn["role"] == "assistant" else 0
        data["turns"].append(describe_turn(turn, tokens[start : start + count]))
        start += count
    return {name: value for name, value in data.items() if value not in (None, "", [], {})}


def describe_turn(turn: Mapping[str, Any], tokens: Tokens = ()) -> dict[str, Any]:
    """Return the page's data of one turn; `tokens` if their sight was measured."""
    text = turn["text"]
    return {**turn, "text": _shorten_text(text, 0, len(text), tokens), **_media(turn)}


def _shorten_text(text: str, start: int, end: int, tokens: Tokens) -> str | Heatmap:
    """Return `text[start:end]` with at most MAX_TEXT characters, split per token if `tokens` match the text."""
    short = cut(text[start:end], MAX_TEXT)
    last = min(end, start + MAX_TEXT)
    if not tokens or (pieces := heatmap(tokens, text, start, last)) is None:
        return short
    return [*pieces, *filter(None, [short[last - start :]])]


def heatmap(tokens: Tokens, text: str, start: int, end: int) -> Heatmap | None:
    """Return `text[start:end]` in pieces; None if `tokens` do not match the text or no token is shaded.

    >>> heatmap([("It", 0.0), (" is", 0.01), (" red", 4.5)], "It is red", 1, 9)
    ['t is', (' red', 4.5)]
    """
    if "".join(piece for piece, _ in tokens) != text:
        return None
    pieces: Heatmap = []
    position = 0
    for token, nats in tokens:
        piece = token[max(0, start - position) : max(0, end - position)]
        position += len(token)
        if not piece:
            continue
        if abs(nats) >= MIN_SHADED:
            pieces.append((piece, round(nats, 4)))
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces if any(isinstance(piece, tuple) for piece in pieces) else None


def split_thinking(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Split a completion into its thinking, which ends with the last `</think>` or never, and its answer.

    >>> split_thinking("<think>2 + 2</think> 4"), split_thinking("2 + 2</think>4", opened=True)
    (('<think>2 + 2</think>', '4'), ('2 + 2</think>', '4'))
    """
    answer = without_thinking(text, opened=opened)
    return text.removesuffix(answer).rstrip(), answer


def pictures_of(group: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the sizes, IMAGE or FRAME, of the pictures of a group or an evaluation row by name, also of its turns."""
    completions = [c for key in ("completions", *BEFORE_AND_AFTER) for c in group.get(key, ())]
    parts = [group, *(turn for c in completions for turn in c.get("turns", ()))]
    frames = {name: FRAME for part in parts for video in part["videos"] for name in video["frames"]}
    return frames | {name: IMAGE for part in parts for name in part["images"]}


def load_image(paths: RunPaths, name: str, side: int, max_png_bytes: int) -> PageImage | None:
    """Load a logged image, reduced if it is large; None if the run has no such image."""
    file = paths.images / name
    if not IMAGE_NAME.fullmatch(name) or not file.is_file():
        return None
    with Image.open(file) as image:
        if max(image.size) <= side and file.stat().st_size <= max_png_bytes:
            return PageImage(*image.size, data_url(f"image/{file.suffix[1:]}", file.read_bytes()))
        return PageImage.reduced(image, side, max_png_bytes)


def _evaluations(
    paths: RunPaths, budget: Budget, images: ImageStore, run: int
) -> tuple[list[dict[str, Any]], int]:
    """Return evaluation rows with their first and last answers, and their bytes, at most a quarter of the budget."""
    limit, total = budget.texts // 4, 0
    entries: list[dict[str, Any]] = []
    answers: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    steps = logged_steps(paths, EVALUATION)
    for when, step in zip(BEFORE_AND_AFTER, dict.fromkeys((*steps[:1], *steps[-1:])), strict=False):
        for row in read_rollouts(paths, step, EVALUATION):
            if not row["blind"]:
                answers.setdefault((row["set"], row["uid"]), {}).setdefault(when, []).append(row)
    for (name, _), by_time in answers.items():
        entry = {**_prompt(next(iter(by_time.values()))[0], run), "set": name}
        for when, rows in by_time.items():
            entry[when] = [describe_completion(row) for row in rows[:ANSWERS_PER_ROW]]
            entry[f"{when}_step"] = rows[0]["step"]
        size = len(json.dumps(entry, ensure_ascii=False))
        if total + size <= limit and images.add(paths, pictures_of(entry)):
            total += size
            entries.append(entry)
    return entries, total


def _prompt(head: Mapping[str, Any], run: int) -> dict[str, Any]:
    """Return the keys that a group and an evaluation row have in common."""
    columns = head["columns"]
    gold = {name: columns[name] for name in GOLD if name in columns} or columns
    return {
        "run": run,
        "uid": head["uid"],
        **_media(head),
        "messages": [
            {"role": m["role"], "text": cut(prompt_text(m["content"], head), MAX_PROMPT)}
            for m in head["messages"]
        ],
        "answers": {name: cut(as_text(value), MAX_PROMPT) for name, value in gold.items()},
        "gold": (head.get("gold") or [])[:MAX_OVERLAYS],
    }


def prompt_text(content: str | Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str:
    """Return a message's content, a line for each part; media parts are named only if the row has no such media.

    >>> prompt_text([{"type": "image"}, {"type": "video"}, {"type": "text", "text": "a"}], {"images": ["one.png"]})
    '[video]\\na'
    """
    if isinstance(content, str):
        return content
    parts = (part for part in content if not row.get(f"{part['type']}s"))
    return "\n".join(message_text([part]).strip() for part in parts)


def _media(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys `images` and `videos` of a row or a turn."""

    def legal(names: Sequence[str]) -> list[str]:
        # a page may be made of a folder from somebody else
        return [name for name in names if IMAGE_NAME.fullmatch(name)]

    videos = [{"frames": legal(v["frames"]), "times": v["times"]} for v in row.get("videos", ())]
    return {"images": legal(row.get("images", ())), "videos": videos}
