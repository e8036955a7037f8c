"""The table of completions that trackers show beside the numbers: a few groups of a step, with their images.

A tracker is sent every row and picture of a table over a network, so a table is small: `GROUPS` groups, those whose
rewards differ most, `COMPLETIONS` of each, and pictures of at most `SIDE` pixels. The whole step is in rollouts/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from PIL import Image

from mm_grpo.run.rollout_log import GOLD, message_text

if TYPE_CHECKING:
    from mm_grpo.types import Completion, Group

GROUPS = 4
COMPLETIONS = 8
SIDE = 256
"""Pixels of the longer side of a picture, and the height of several beside each other."""
LONGEST = 2000
"""Characters of a text."""
PICTURES = ("image", "tool_images")
"""Columns of pictures: those of the row, and those that tools answered with, which stand where any did."""


Row = dict[str, Any]
"""A row of the table by columns; a cell under one of PICTURES is an RGB picture, or None where there is none."""


def rollout_table(step: int, groups: Sequence[Group]) -> list[Row]:
    """The table of a step, from its scored groups in any order; the raw score of each reward has a column."""
    chosen = sorted(sorted(groups, key=_range, reverse=True)[:GROUPS], key=lambda group: group.slot)
    parts = tuple(dict.fromkeys(name for group in groups for name in group.parts))
    tools = any(_observed(one) for group in chosen for one in group.completions[:COMPLETIONS])
    rows = []
    for group in chosen:
        shared = {
            "step": step,
            "row": group.prompt.uid,
            "image": side_by_side(group.prompt.engine_prompt.images),
            "prompt": _question(group.prompt.sample.messages),
            "answer": _answer(group.prompt.sample.columns),
        }
        for number, completion in enumerate(group.completions[:COMPLETIONS]):
            own = {"completion": completion.text[:LONGEST]}
            seen = {"tool_images": side_by_side(_observed(completion))} if tools else {}
            scores = {"reward": group.rewards[number], "advantage": group.advantages[number]}
            raw = {f"rewards/{n}": group.parts[n][number] if n in group.parts else None for n in parts}
            rows.append({**shared, **own, **seen, **scores, **raw})
    return rows


def named_pictures(table: Sequence[Row]) -> dict[str, Image.Image]:
    """Each picture by a name of its own: the row's uid, or `UID/tools/N` of the row's Nth completion here."""
    named: dict[str, Image.Image | None] = {}
    seen: Counter[str] = Counter()
    for row in table:
        uid = row["row"]
        named |= {uid: row["image"], f"{uid}/tools/{seen[uid]}": row.get("tool_images")}
        seen[uid] += 1
    return {name: picture for name, picture in named.items() if picture is not None}


def side_by_side(images: Sequence[Image.Image]) -> Image.Image | None:
    """One RGB picture of the images of a row, from left to right, none of them enlarged."""
    if not images:
        return None
    small = [image.convert("RGB") for image in images]
    for image in small:
        image.thumbnail((SIDE, SIDE))
    if len(small) == 1:
        return small[0]
    gap = 4
    width = sum(image.width for image in small) + gap * (len(small) - 1)
    whole = Image.new("RGB", (width, max(image.height for image in small)), "white")
    left = 0
    for image in small:
        whole.paste(image, (left, 0))
        left += image.width + gap
    return whole


def _observed(completion: Completion) -> list[Image.Image]:
    """The images that tools answered with, in order."""
    return [image for turn in completion.turns for image in turn.images]


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


def hosted_table(package: Any, table: Sequence[Row]) -> Any:
    """The table as wandb and trackio take it: both have `Table` and `Image` with these arguments."""
    pictures = {id(cell): cell for row in table for cell in row.values() if isinstance(cell, Image.Image)}
    made = {key: package.Image(picture) for key, picture in pictures.items()}  # a group's rows share one file
    rows = [[made.get(id(cell), cell) for cell in row.values()] for row in table]
    return package.Table(columns=[*table[0]], data=rows)


def markdown(table: Sequence[Row]) -> str:
    """The table without its pictures, for TensorBoard's texts."""
    columns = [name for name in table[0] if name not in PICTURES]
    rows = [[_markdown_cell(row[name]) for name in columns] for row in table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def _markdown_cell(cell: Any) -> str:
    """A cell on one line that ends no column and opens no tag."""
    text = f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else str(cell)
    for character, name in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r", ""), ("\n", " ")):
        text = text.replace(character, name)
    return text
