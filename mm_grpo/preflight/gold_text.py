"""A row's right answer, as a model would write it.

It is mostly the text of the column that the reward reads, in the form of `data.gold_template`. If a built-in's column
is not what a model writes (a box in other pixels, several texts that must all occur), a function in `GOLD` writes it.
Rewards in `NO_GOLD` have no right answer in any column. To add one: a line in either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mm_grpo.errors import DataError
from mm_grpo.rewards.builtins.answers import gold_texts
from mm_grpo.rewards.builtins.boxes import gold_box, gold_boxes
from mm_grpo.rewards.builtins.clicking import gold_shapes, moved_shapes, point_inside
from mm_grpo.rewards.builtins.grounding import BoxOptions, box_options
from mm_grpo.rewards.builtins.maths import readings
from mm_grpo.rewards.builtins.temporal import gold_interval
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.run.overlays import builtin_name
from mm_grpo.types import Prompt

Options = Mapping[str, Any]
"""Arguments of the reward by name: the row's columns, replaced by what the config sets."""

NO_GOLD = frozenset({"json_schema", "judge", "reward_model"})
MAX_UNREADABLE = 200
"""Characters of an unreadable gold value that are handed to the reward, which then refuses it."""
DIGITS = 9  # decimals of a coordinate: enough for the written box to overlap the gold box to 1e-6


def gold_text(
    spec: RewardSpec,
    prompt: Prompt,
    template: str | None = None,
    *,
    always: bool = False,
    strict: bool = False,
) -> str | None:
    """Return the row's right answer for a reward; None if the row has none.

    It is the text of the first column that the reward reads, `solution` and `answer` before others, in place of
    the template's `{gold}`. With `always`, a reward that reads no column gets the text of any column. A gold that a
    built-in cannot read is its text, which the reward refuses, or with `strict` a DataError.
    """
    columns = prompt.sample.other_columns
    if not spec.applies_to(prompt.sample.columns):
        return None
    writer = GOLD.get(builtin_name(spec) or "")
    if writer is not None:
        options = {**columns, **spec.bound}
        try:
            gold = writer(prompt, options)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            if strict:
                raise DataError(f"{prompt.uid}: reward {spec.name} cannot read its gold ({error})") from None
            gold = str(options[spec.needs[0]])[:MAX_UNREADABLE]
    else:
        names = read_columns(spec, columns) or (tuple(columns) if always or spec.takes_kwargs else ())
        preferred = [name for name in ("solution", "answer") if name in names]
        texts = (as_text(columns[name]) for name in (*preferred, *names) if columns.get(name) is not None)
        gold = next(texts, "answer" if always else None)
    if gold is None or not gold.strip():
        return None
    return gold if template is None else template.replace("{gold}", gold)


def read_columns(spec: RewardSpec, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of `columns` that a reward takes by name."""
    names = dict.fromkeys((*spec.needs, *spec.required, *spec.optional))
    return tuple(name for name in names if name in columns and name not in (*spec.supplied, *spec.bound))


def as_text(value: Any) -> str:
    """Write a column's value as an answer: the first of a list of texts, numbers and boxes in digits.

    >>> as_text(3.0), as_text(["red", "crimson"]), as_text((1, 2.5))
    ('3', 'red', '[1, 2.5]')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
        return str(value[0])
    return json.dumps(value, ensure_ascii=False, default=str)


def _boxes(prompt: Prompt, options: Options) -> str | None:
    """Write all boxes, one after the other; None for an empty list, because any text without a box is right then."""
    return " ".join(_box(box, prompt, options) for box in gold_boxes(options["boxes"])) or None


def _box(box: Any, prompt: Prompt, options: Options) -> str:
    """Write a gold box in the space and the layout that the reward expects of the model."""
    shared = _shared(prompt, options)
    gold = gold_box(box, shared.gold_layout)
    x0, y0, x1, y1 = corners = shared.frame.moved(gold, shared.gold_space, shared.space)
    orders = {"xywh": (x0, y0, x1 - x0, y1 - y0), "yxyx": (y0, x0, y1, x1)}
    return as_text([round(number, DIGITS) for number in orders.get(shared.layout, corners)])


def _click(prompt: Prompt, options: Options) -> str:
    """Write a point in the gold shape, in the space that the reward expects of the model."""
    frame, space, gold_space, _, gold_layout = _shared(prompt, options)
    shapes = gold_shapes(options["target"], frame, gold_layout, gold_space)
    point = point_inside(moved_shapes(shapes, frame, gold_space, space)[0])
    return as_text([round(number, DIGITS) for number in point])


def _interval(prompt: Prompt, options: Options) -> str:
    """Write the gold interval in the space that the reward expects of the model."""
    spaces = {name: options[name] for name in ("space", "gold_space") if name in options}
    times = gold_interval(options["interval"], prompt.sample, **spaces)
    return as_text([round(time, DIGITS) for time in times])


def _shared(prompt: Prompt, options: Options) -> BoxOptions:
    given = {name: options[name] for name in (*BoxOptions._fields[1:], "image_index") if name in options}
    return box_options(prompt.engine_prompt.images, prompt.sample, **given)


def _text(prompt: Prompt, options: Options) -> str | None:
    return next(iter(gold_texts(options["answer"])), None)


def _formula(prompt: Prompt, options: Options) -> str | None:
    """Write the gold in a box: math-verify finds no bare (2, -3) in a text."""
    gold = _text(prompt, options)
    return gold and next(iter(readings(gold, whole=True)), gold)


GOLD: dict[str, Callable[[Prompt, Options], str | None]] = {
    **dict.fromkeys(("iou", "giou"), lambda prompt, options: _box(options["box"], prompt, options)),
    "box_match": _boxes,
    "clicking": _click,
    "contains": lambda prompt, options: "\n".join(gold_texts(options["answer"])),
    "math": _formula,
    "temporal_iou": _interval,
    **dict.fromkeys(("exact_match", "anls", "numeric", "count", "chart_relaxed"), _text),
}
"""Built-in → its right answer, from the prompt and the reward's arguments."""
