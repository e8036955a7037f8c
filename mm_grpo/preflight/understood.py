"""The first row of a source as a run understands it, in lines for the terminal.

`check` prints up to LINES lines for each source: the prompt as the chat template renders it, with a mark for each
picture, what each reward reads and how it scores the right answer, and what columns are used for. `train` prints three
lines before the model loads. Long texts are cut in the middle (…), and ↵ is a line feed.
"""

from __future__ import annotations

import os
import re
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any

from PIL import Image
from rich.cells import cell_len

from mm_grpo.data.base import TASK
from mm_grpo.data.columns import brief
from mm_grpo.errors import UserError
from mm_grpo.preflight.gold_text import read_columns
from mm_grpo.rewards.builtins.answers import gold_texts
from mm_grpo.run.overlays import builtin_name, gold_overlays
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.rows import Fields
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.preflight.gold_answers import RewardCheck
    from mm_grpo.processors.base import Processor
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.rollout.prompts import PromptBuilder
    from mm_grpo.types import Prompt

WIDTH, LINES = 78, 12
"""Columns of a line behind its indent, and most lines of a source."""
MAX_MESSAGES = 4
MIN_TEXT = 4  # characters that are left of a text
FIRST_ROWS = 8  # rows among which one is looked for that can be used
MAX_DETAILED = 3  # pictures of a row whose sizes are said
MAX_NAME = 24  # characters of a column's name
MAX_RESULT = 60  # characters of a result that are never cut
MAX_TEXT = 400  # characters of a text that are looked at


class Text(str):
    """A part of a line that may be shortened."""


def understood(
    rows: Rows, builder: PromptBuilder, rewards: RewardCheck, uses: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of `check` about the first usable row of each source. Each reward is called once for it."""
    for source in rows.sources:
        for index in range(min(FIRST_ROWS, len(source))):
            with suppress(UserError):  # `check` lists wrong rows
                fields, prompt = source.fields(index), builder.process(source.sample(index))
                break
        else:
            yield fit([Text(source.name), f": none of the first {index + 1} row(s) can be used"])
            continue
        name = [Text(source.name), ": ", Text(source.row_name(index).rpartition("/")[2])]
        yield fit([*name, f" as the model gets it, {len(prompt.token_ids)} tokens"])
        messages = list(_messages(builder.processor, fields, prompt))
        if len(messages) > MAX_MESSAGES:
            messages[1 : 2 - MAX_MESSAGES] = [[f"... {len(messages) - MAX_MESSAGES + 1} more messages ..."]]
        width = WIDTH if len(messages) == MAX_MESSAGES else 2 * (WIDTH - 4)
        lines = [line for parts in messages for line in _wrap(fit(parts, width))]
        used, unused = _column_uses(source, fields, rewards.specs, uses)
        columns = [*_wrap(", ".join(used)), *([f"not used: {', '.join(unused)}"] if unused else [])]
        golds, room = list(_golds(rewards, prompt)), LINES - 1 - len(lines) - len(columns)
        if len(golds) > room:
            golds[room - 1 :] = [f"... {len(golds) - room + 1} more lines about rewards"]
        yield from ("  " + shorten_middle(line, WIDTH) for line in (*lines, *golds, *columns))


def brief_lines(rows: Rows, specs: Sequence[RewardSpec], uses: Mapping[str, str]) -> list[str]:
    """Return the three lines of `train` about the first row of the first source. No reward is called."""
    source = rows.sources[0]
    try:
        fields = source.fields(0)
    except UserError:  # it is named when the run comes to it
        return []
    marks = iter([["‹", Text(_picture_name(image)), "›"] for image in fields.images])
    messages = [part for message in fields.messages for part in _unrendered(message, marks)]
    readings = [_reading(spec, fields.columns) for spec in specs if spec.applies_to(fields.columns)]
    reading = max(readings, key=len, default=["no reward applies to it"])  # the one that reads most
    more = f" ({len(readings) - 1} more reward(s))" if len(readings) > 1 else ""
    used, unused = _column_uses(source, fields, specs, uses)
    columns = [Text(", ".join(used)), "; not used: ", Text(", ".join(unused) or "none")]
    title = [Text(source.name), ": ", Text(source.row_name(0).rpartition("/")[2]), ": "]
    return [fit([*title, *messages]), fit([*reading, more]), fit(columns)]


def other_uses(config: GRPOConfig, rows: Rows, toolbox: Toolbox | None) -> dict[str, str]:
    """Return what columns are used for besides prompts and rewards."""
    twin, by_reset = config.algorithm.twin_view, [] if toolbox is None else toolbox.reads(rows.sample(0))
    crops = twin is not None and twin.view == "crop"
    uses = dict.fromkeys(by_reset, "reset") | ({"box": "algorithm.twin_view"} if crops else {})
    return uses | ({TASK: "metrics"} if rows.by_task else {})


# lines ---------------------------------------------------------------------------------------


def shorten_middle(text: str, width: int) -> str:
    """Return a text as a printable line of at most `width` characters and columns.

    >>> shorten_middle("a long name", 8), shorten_middle("a" + chr(10) + "b", 8)
    ('a lo…ame', 'a↵b')
    """
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT // 2] + "…" + text[-MAX_TEXT // 2 :]
    line = printable(text.replace("\n", "↵"), lines=False)
    cut = _prefix(line, width // 2) + "…" + _prefix(line[::-1], (width - 1) // 2)[::-1]
    return line if _prefix(line, width) == line else cut


def _prefix(text: str, width: int) -> str:
    return text[: bisect_right(list(accumulate(map(_columns, text[:width]))), width)]


def _columns(text: str) -> int:
    # a mark on a letter counts as one: a text may have hundreds on one letter
    return sum(max(1, cell_len(character)) for character in text)


def fit(parts: Iterable[str], width: int = WIDTH) -> str:
    """Join parts to a line, and shorten all `Text` in it to one length, the largest that fits."""
    parts = [Text(shorten_middle(part, width)) if isinstance(part, Text) else part for part in parts]

    def line(limit: int) -> str:
        return "".join(shorten_middle(p, limit) if isinstance(p, Text) else p for p in parts)

    limit = bisect_right(range(width + 1), width, lo=MIN_TEXT, key=lambda limit: _columns(line(limit))) - 1
    return shorten_middle(line(max(limit, MIN_TEXT)), width)


def _wrap(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", max_lines=2, placeholder=" ...")


def _short(name: Any) -> str:
    return shorten_middle(str(name), MAX_NAME)


# prompts -------------------------------------------------------------------------------------


def _picture_name(source: Any) -> str:
    """Return the file name of an image's source, else its kind."""
    if isinstance(source, Mapping):
        source = source.get("path") or b""
    if isinstance(source, str | os.PathLike) and not str(source).startswith("data:"):
        return os.path.basename(os.fsdecode(source))
    return "PIL" if isinstance(source, Image.Image) else "bytes"


def _messages(processor: Processor, fields: Fields, prompt: Prompt) -> Iterator[list[str]]:
    """Yield the parts of a line for each message, as the chat template renders it, without special tokens."""
    from mm_grpo.processors.hf_processor import HFProcessor

    images, originals = prompt.engine_prompt.images, prompt.sample.images
    names, marks = chain(map(_picture_name, fields.images), repeat("image")), list[list[str]]()
    for name, image, original in zip(names, images, originals, strict=False):
        sizes = dict.fromkeys("×".join(map(str, size)) for size in (original.size, image.size))
        details = f" {'→'.join([*sizes][1 - len(images) :])}"
        if len(images) == 1:
            details += f", {len(prompt.token_ids) - len(prompt.engine_prompt.token_ids) + 1} tokens"
        elif isinstance(processor, HFProcessor):
            details += f", {len(processor.picture(image, row=prompt.uid).token_ids)} tokens"
        marks.append(["‹", Text(name), details if len(marks) < MAX_DETAILED else "", "›"])
    remaining = chain(marks, repeat(["‹image›"]))
    if not isinstance(processor, HFProcessor):
        yield from (_unrendered(message, remaining) for message in prompt.sample.messages)
        return
    tokenizer, ids, place = processor.tokenizer, prompt.engine_prompt.token_ids, processor.placeholder()
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - {place}
    ends, others = (
        "|".join(map(re.escape, tokens))
        for tokens in (tokenizer.convert_ids_to_tokens([*processor.stop_token_ids]), special)
    )
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for message in re.split(ends or "(?!)", text):  # a row's own text holds no special token
        first, *texts = re.sub(others, "", message).lstrip("\n").split(place)
        yield [Text(first), *(part for text in texts for part in (*next(remaining), Text(text)))]


def _unrendered(message: Mapping[str, Any], marks: Iterator[list[str]]) -> list[str]:
    content = message["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = ([Text(part["text"])] if "text" in part else next(marks) for part in parts)
    return [f"{message['role']}: ", *(text for group in texts for text in group), " "]


# golds and columns ---------------------------------------------------------------------------


def _golds(rewards: RewardCheck, prompt: Prompt) -> Iterator[str]:
    """Yield a line or two for each reward that applies to a row, and one that names the others."""
    others = []
    for spec, (gold, result) in zip(rewards.specs, rewards.preview(prompt), strict=True):
        if not spec.applies_to(prompt.sample.columns):
            others.append(spec.name)
            continue
        reading = _reading(spec, prompt.sample.columns, prompt)
        answer = [] if gold is None else ["right answer ", Text(repr(gold)), " "]
        answer += [result if len(result) < MAX_RESULT else Text(result)] if result else []
        line = fit([*reading, ": " if answer else "", *answer])
        yield from [fit([*reading, ":"]), "  " + fit(answer, WIDTH - 2)] if "…" in line and answer else [line]
    if others:
        yield fit(["not for this row: ", Text(", ".join(others))])


def _reading(spec: RewardSpec, columns: Mapping[str, Any], prompt: Prompt | None = None) -> list[str]:
    """Return what a reward takes of a row, and what a built-in makes of it; of boxes if there is a `prompt`."""
    names, answer = read_columns(spec, columns), columns.get("answer")
    if not names:
        return [f"{spec.name} {'is offered all columns' if _takes_all(spec) else 'reads no column'}"]
    parts = [f"{spec.name} reads "]
    for name in names:
        parts += [", " if len(parts) > 1 else "", _short(name), " = ", Text(brief(columns[name]))]
    with suppress(TypeError):  # the reward refuses it
        if (
            "answer" in names
            and builtin_name(spec)
            and (golds := gold_texts(answer)) not in (answer, [answer])
        ):
            parts += [", which is ", Text(brief(golds))]
    for shape in gold_overlays([spec], prompt)[0][:2] if prompt is not None else ():
        xs, ys = zip(*shape.points, strict=True)
        box = ", ".join(f"{number:.4g}" for number in (min(xs), min(ys), max(xs), max(ys)))
        parts.append(f", seen at pixels [{box}]")
    return parts


def _takes_all(spec: RewardSpec) -> bool:
    takes_rows = spec.takes_kwargs or not {"sample", "samples"}.isdisjoint((*spec.required, *spec.optional))
    return takes_rows and builtin_name(spec) is None


def _column_uses(
    source: Rows, fields: Fields, specs: Sequence[RewardSpec], uses: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return what columns are used for, and the names of the others."""
    names = {name: source.dataset_column(name) for name in dict.fromkeys([*fields.columns, *source.columns])}
    here = [spec for spec in specs if spec.options.is_for(fields.columns)]
    # the column of {box: objects.bbox} is used in part
    parents = {theirs.partition(".")[0] for name, theirs in names.items() if theirs != name}
    users: dict[str, dict[str, None]] = {}
    unused: dict[str, None] = {}
    for name, purpose in fields.used.items():
        users.setdefault(f"{purpose} <- ", {})[_short(names[name])] = None
    for name, theirs in names.items():
        shown = _short(theirs) + ("" if theirs == name else f" as {_short(name)}")
        readers = [spec.name for spec in here if read_columns(spec, {name: None})]
        readers += ["when"] if any(name in spec.options.when for spec in specs) else []
        readers += [uses[name]] if name in uses else []
        if readers:
            users[f"{shown} -> "] = dict.fromkeys(readers)
        elif name not in fields.used and name not in parents:
            unused[shown] = None
    if unused and (takers := [spec.name for spec in here if _takes_all(spec)]):
        users[f"offered to {', '.join(takers)}: "], unused = unused, {}
    return [title + " and ".join(items) for title, items in users.items()], [*unused]
