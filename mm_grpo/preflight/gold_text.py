"""The right answer of a row to a reward, as a model would write it.

It is mostly the text of the column that the reward reads, in the form that `data.gold_template` gives. Where a
built-in's column is not what a model writes (a box in other pixels, several texts of which all count), `GOLD` has a
function that writes it; `UNWRITTEN` are those for which no row says what a right answer is. To add one: a line in
either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mm_grpo.rewards.builtins.boxes import Frame, gold_box
from mm_grpo.rewards.builtins.clicking import gold_shapes, moved_shapes, point_inside
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Prompt

Options = Mapping[str, Any]
"""The row's columns and, over them, what the config sets: the arguments of the reward by name."""

UNWRITTEN = frozenset({"json_schema", "judge", "reward_model"})
UNREADABLE = 200
"""Characters of a gold value that cannot be read, which stand for a right answer until the reward refuses it."""
DIGITS = 9
"""Decimals of a coordinate: so many that the right box overlaps the gold one to 1e-6."""


def gold_text(
    spec: RewardSpec, prompt: Prompt, template: str | None = None, *, always: bool = False
) -> str | None:
    """The row's right answer to a reward; None when the row has none.

    It is the text of the first column that the reward reads, `solution` and `answer` before others, put in
    the place of the template's `{gold}`. With `always`, a reward that reads no column gets the answer that
    any would.
    """
    columns = prompt.sample.columns
    if lacks_column(spec, prompt):
        return None
    writer = GOLD.get(builtin_name(spec) or "")
    if writer is not None:
        options = {**columns, **spec.bound}
        try:
            gold = writer(prompt, options)
        except (ValueError, TypeError, OverflowError, RecursionError):  # the reward says what is wrong
            gold = str(options[spec.needs[0]])[:UNREADABLE]
    else:
        names = read_columns(spec, columns) or (tuple(columns) if always or spec.takes_kwargs else ())
        first = [name for name in ("solution", "answer") if name in names]
        found = (as_text(columns[name]) for name in (*first, *names) if columns.get(name) is not None)
        gold = next(found, "answer" if always else None)
    if gold is None or not gold.strip():
        return None
    return gold if template is None else template.replace("{gold}", gold)


def lacks_column(spec: RewardSpec, prompt: Prompt) -> bool:
    """Whether the row is none that the reward is for, or lacks a column without which it does not apply."""
    return not spec.applies_to(prompt.sample.columns)


def read_columns(spec: RewardSpec, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """The dataset's columns that a reward takes by name."""
    asked = dict.fromkeys((*spec.needs, *spec.required, *spec.optional))
    return tuple(name for name in asked if name in columns and name not in (*spec.supplied, *spec.bound))


def as_text(value: Any) -> str:
    """A column's value as an answer: a list of texts gives its first, numbers and boxes are written out.

    >>> as_text(3.0), as_text(["red", "crimson"]), as_text((1, 2.5))
    ('3', 'red', '[1, 2.5]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return str(value[0])
    return json.dumps(value, ensure_ascii=False, default=str)


def _boxes(prompt: Prompt, options: Options) -> str | None:
    """All boxes, one after the other; None for an empty list, whose right answer is any text without a box."""
    return " ".join(_written(box, prompt, options) for box in options["boxes"]) or None


def _written(box: Any, prompt: Prompt, options: Options) -> str:
    """A gold box in the space and the layout that the reward expects of the model."""
    gold = gold_box(box, options.get("gold_layout", "xyxy"))
    x0, y0, x1, y1 = corners = _frame(prompt, options).moved(gold, *_spaces(options))
    orders = {"xywh": (x0, y0, x1 - x0, y1 - y0), "yxyx": (y0, x0, y1, x1)}
    return as_text([round(number, DIGITS) for number in orders.get(options.get("layout", "xyxy"), corners)])


def _click(prompt: Prompt, options: Options) -> str:
    """A point in the gold shape, in the space that the reward expects of the model."""
    frame, (gold_space, space) = _frame(prompt, options), _spaces(options)
    shapes = gold_shapes(options["target"], frame, options.get("gold_layout", "xyxy"), gold_space)
    point = point_inside(moved_shapes(shapes, frame, gold_space, space)[0])
    return as_text([round(number, DIGITS) for number in point])


def _frame(prompt: Prompt, options: Options) -> Frame:
    return Frame.of(prompt.engine_prompt.images, prompt.sample, options.get("image_index", 0))


def _spaces(options: Options) -> tuple[str, str]:
    """Where the gold lives, and where the reward expects the model's answer."""
    return options.get("gold_space", "original"), options.get("space", "pixel")


def _all_texts(prompt: Prompt, options: Options) -> str:
    answer = options["answer"]
    several = isinstance(answer, Sequence) and not isinstance(answer, str)
    return "\n".join(as_text(one) for one in answer) if several else as_text(answer)


GOLD: dict[str, Callable[[Prompt, Options], str | None]] = {
    **dict.fromkeys(("iou", "giou"), lambda prompt, options: _written(options["box"], prompt, options)),
    "box_match": _boxes,
    "clicking": _click,
    "contains": _all_texts,
}
"""Built-in → its right answer, from the prompt and the reward's arguments."""
