"""The first row of a source as a run understands it, in lines for the terminal.

`check` prints up to LINES lines for each source: the prompt as the chat template renders it, with a mark for each
medium, what each reward reads and how it scores the right answer, and what columns are used for. `train` prints three
lines before the model loads. Long texts are cut in the middle (…), and ↵ is a line feed.
"""

from __future__ import annotations

import os
import re
import textwrap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

from PIL import Image
from rich.cells import cell_len, chop_cells

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import TASK, Rows
from mm_grpo.data.columns import brief
from mm_grpo.data.rows import ALIAS, Fields
from mm_grpo.data.videos import VideoSource
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import UserError
from mm_grpo.messages import content_parts, media_parts
from mm_grpo.preflight.gold_answers import RewardCheck
from mm_grpo.preflight.gold_text import read_columns
from mm_grpo.processors.base import Processor
from mm_grpo.processors.hf_processor import HFProcessor
from mm_grpo.rewards.builtins.answers import gold_texts
from mm_grpo.rewards.spec import RewardSpec
from mm_grpo.rollout.prompts import PromptBuilder
from mm_grpo.run.overlays import builtin_name, gold_overlays
from mm_grpo.terminal import printable
from mm_grpo.types import Prompt, Video

WIDTH, LINES = 78, 12
"""Columns of a line behind its indent, and most lines of a source."""
MAX_NAME, MAX_VALUE, MIN_TEXT = 20, 48, 4
"""Columns of a name and of a value, and columns of a text that are left in any case."""
FIRST_ROWS = 8  # rows among which one is looked for that can be used


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
            yield f"{_short(source.name)}: none of the first {index + 1} row(s) can be used"
            continue
        yield f"{_title(source, index)} as the model gets it, {len(prompt.token_ids)} tokens"
        messages = [fit(parts, 2 * (WIDTH - 4)) for parts in _messages(builder.processor, fields, prompt)]
        if len(messages) > 3:
            messages[1:-2] = [f"... {len(messages) - 3} more messages ..."]
        used, unused = _column_uses(source, fields, rewards.specs, uses)
        lines, golds, columns = [*_wrap(messages)], [*_golds(rewards, prompt)], [*_wrap([used])]
        columns += [f"not used: {unused}"] if unused else []
        room = LINES - 1 - len(lines) - len(columns)
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
    marks = iter([["‹", Text(_medium_name(source)), "›"] for source in _sources(fields)])
    messages = [part for message in fields.messages for part in _unrendered(message, marks)]
    readings = [_reading(spec, fields.columns) for spec in specs if spec.applies_to(fields.columns)]
    reading = max(readings, key=len, default="no reward applies to it")  # the one that reads most
    more = f" ({len(readings) - 1} more reward(s))" if len(readings) > 1 else ""
    used, unused = _column_uses(source, fields, specs, uses)
    columns = [Text(used), "; not used: ", Text(unused or "none")]
    return [fit([f"{_title(source, 0)}: ", *messages]), fit([Text(reading), more]), fit(columns)]


def other_uses(config: GRPOConfig, rows: Rows, toolbox: Toolbox | None) -> dict[str, str]:
    """Return what columns are used for besides prompts and rewards."""
    twin, by_reset = config.algorithm.twin_view, list[str]()
    if toolbox is not None:
        with suppress(UserError):  # `check` lists a wrong first row
            by_reset = toolbox.reads(rows.fields(0))
    crops = twin is not None and twin.view == "crop"
    uses = dict.fromkeys(by_reset, "reset") | ({"box": "algorithm.twin_view"} if crops else {})
    return uses | ({TASK: "metrics"} if rows.by_task else {})


def shorten_middle(text: str, width: int) -> str:
    """Return a text as a printable line of at most `width` characters and columns.

    >>> shorten_middle("a long name", 8), shorten_middle("a" + chr(10) + "b", 8)
    ('a lo…ame', 'a↵b')
    """
    text = text[:width] + text[width:][-width:]  # what is left out is cut in any case
    line = printable(text.replace("\n", "↵"), lines=False)
    if _columns(line) <= width:
        return line
    return f"{_prefix(line, width // 2)}…{_prefix(line[::-1], (width - 1) // 2)[::-1]}"


def _prefix(text: str, width: int) -> str:
    """Return the longest beginning of a text of at most `width` characters and columns."""
    return "".join(chop_cells(text[:width], width)[:1])


def _columns(text: str) -> int:
    return max(len(text), cell_len(text))  # a letter may have hundreds of marks without a column


def fit(parts: Iterable[str], width: int = WIDTH) -> str:
    """Join parts to a line, and shorten all `Text` in it to one length, the largest that fits."""
    parts = [*parts]

    def line(limit: int) -> str:
        return "".join(shorten_middle(part, limit) if isinstance(part, Text) else part for part in parts)

    limits = range(MIN_TEXT, width + 1)
    number = bisect_right(limits, width, key=lambda limit: _columns(line(limit)))  # of limits that fit
    return shorten_middle(line(limits[max(0, number - 1)]), width)


def _wrap(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text as one line or two; the first ends between words."""
    for text in texts:
        first, *others = textwrap.wrap(shorten_middle(text, 2 * (WIDTH - 4)), WIDTH) or [""]
        yield from (first, "  " + " ".join(others)) if others else (first,)


def _short(value: Any, width: int = MAX_NAME) -> str:
    return shorten_middle(str(value), width)


def _title(source: Rows, index: int) -> str:
    return f"{_short(source.name)}: {_short(source.row_name(index).rpartition('/')[2])}"


def _sources(fields: Fields) -> list[Any]:
    """Return the sources of images and videos in the order of their parts."""
    sources = {"image": iter(fields.images), "video": iter(fields.videos)}
    return [next(sources[part["type"]]) for part in media_parts(fields.messages)]


def _medium_name(source: Any) -> str:
    """Return the file name of an image, a video or its first frame, else its kind."""
    if isinstance(source, VideoSource):
        source = source.source[0] if isinstance(source.source, list | tuple) else source.source
    if isinstance(source, Mapping):
        source = source.get("path") or b""
    if isinstance(source, str | os.PathLike) and not str(source).startswith("data:"):
        return os.path.basename(os.fsdecode(source))
    return "PIL" if isinstance(source, Image.Image) else "bytes"


def _messages(processor: Processor, fields: Fields, prompt: Prompt) -> Iterator[list[str]]:
    """Yield the parts of a line for each message, as the chat template renders it, without special tokens."""
    media, marks = prompt.engine_prompt.media, list[list[str]]()
    names = chain(map(_medium_name, _sources(fields)), repeat("image"))
    for name, original, medium in zip(names, prompt.sample.media, media, strict=False):
        details = "→".join(dict.fromkeys("×".join(map(str, size)) for size in (original.size, medium.size)))
        if isinstance(medium, Video):
            seconds = f"{medium.times[0]:.1f}-{medium.times[-1]:.1f} s"
            details = f"{len(medium.frames)} frames, {seconds}, {details}"
        if len(media) == 1:
            details += f", {len(prompt.token_ids) - len(prompt.engine_prompt.token_ids) + 1} tokens"
        elif isinstance(processor, HFProcessor):
            details += f", {len(processor.picture(medium, row=prompt.uid).token_ids)} tokens"
        marks.append(["‹", Text(name), f" {details}›"])
    remaining = iter(marks)
    if not isinstance(processor, HFProcessor):
        yield from (_unrendered(message, remaining) for message in prompt.sample.messages)
        return
    tokenizer, ids = processor.tokenizer, prompt.engine_prompt.token_ids
    places = {*filter(None, (processor.placeholder(), processor.video_placeholder()))}
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - places
    ends, others = (
        "|".join(map(re.escape, tokens))
        for tokens in (tokenizer.convert_ids_to_tokens([*processor.stop_token_ids]), special)
    )
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for message in re.split(ends or "(?!)", text):  # a row's own text holds no special token
        first, *texts = re.split("|".join(map(re.escape, places)), re.sub(others, "", message).lstrip("\n"))
        yield [Text(first), *(part for text in texts for part in (*next(remaining, ["‹image›"]), Text(text)))]


def _unrendered(message: Mapping[str, Any], marks: Iterator[list[str]]) -> list[str]:
    parts = content_parts(message["content"])
    texts = ([Text(part["text"])] if "text" in part else next(marks, ["‹image›"]) for part in parts)
    return [f"{message['role']}: ", *chain.from_iterable(texts), " "]


def _golds(rewards: RewardCheck, prompt: Prompt) -> Iterator[str]:
    """Yield a line or two for each reward that applies to a row, and one that names the others."""
    others, columns = list[str](), prompt.sample.columns
    for spec, (gold, result) in zip(rewards.specs, rewards.preview(prompt), strict=True):
        if spec.applies_to(columns):
            shapes = [[*zip(*shape.points, strict=True)] for shape in gold_overlays([spec], prompt)[0][:2]]
            corners = ((min(xs), min(ys), max(xs), max(ys)) for xs, ys in shapes)
            form = ", seen at pixels [{:.4g}, {:.4g}, {:.4g}, {:.4g}]"
            boxes = "".join(form.format(*box) for box in corners)
            reading = _reading(spec, columns) + boxes
            answer = ("" if gold is None else f"right answer {_short(repr(gold), MAX_VALUE)} ") + result
            line = f"{reading}: {answer}" if answer else reading
            yield from [f"{reading}:", f"  {answer}"] if answer and len(line) > WIDTH else [line]
        else:
            others.append(spec.name)
    if others:
        yield f"not for this row: {', '.join(others)}"


def _reading(spec: RewardSpec, columns: Mapping[str, Any]) -> str:
    """Return what a reward takes of a row, and what texts a built-in makes of `answer`."""
    names, answer = read_columns(spec, columns), columns.get("answer")
    if not names:
        return f"{spec.name} {'is offered all columns' if _takes_all(spec) else 'reads no column'}"
    values = (f"{_short(name)} = {_short(brief(columns[name]), MAX_VALUE)}" for name in names)
    line = f"{spec.name} reads {', '.join(values)}"
    with suppress(TypeError):  # the reward refuses it
        golds = gold_texts(answer) if "answer" in names and builtin_name(spec) else [answer]
        line += "" if golds in (answer, [answer]) else f", which is {_short(brief(golds), MAX_VALUE)}"
    return line


def _takes_all(spec: RewardSpec) -> bool:
    takes_rows = spec.takes_kwargs or not {"sample", "samples"}.isdisjoint((*spec.required, *spec.optional))
    return takes_rows and builtin_name(spec) is None


def _column_uses(
    source: Rows, fields: Fields, specs: Sequence[RewardSpec], uses: Mapping[str, str]
) -> tuple[str, str]:
    """Return what columns are used for, and the names of the others."""
    names = {name: source.dataset_column(name) for name in dict.fromkeys([*fields.columns, *source.columns])}
    here = [spec for spec in specs if spec.options.is_for(fields.columns)]
    # the column of {box: objects.bbox} is used in part
    parents = {theirs.partition(".")[0] for name, theirs in names.items() if theirs != name}
    users: dict[str, dict[str, None]] = defaultdict(dict)
    unused: dict[str, None] = {}
    for name, theirs in names.items():
        shown = _short(theirs) + ("" if theirs == name else f" as {_short(name)}")
        purpose = fields.used.get(name)
        if purpose == theirs:
            users[purpose] = {}
        elif purpose not in (None, ALIAS):
            users[f"{purpose} <- "][_short(theirs)] = None
        readers = [spec.name for spec in here if read_columns(spec, {name: None})]
        readers += ["when"] if any(name in spec.options.when for spec in specs) else []
        readers += [uses[name]] if name in uses else []
        if readers:
            users[f"{shown} -> "] = dict.fromkeys(readers)
        elif purpose is None and name not in parents:
            unused[shown] = None
    takers = [spec.name for spec in here if _takes_all(spec)]
    if unused and takers:
        users[f"offered to {', '.join(takers)}: "], unused = unused, {}
    return ", ".join(title + " and ".join(items) for title, items in users.items()), ", ".join(unused)
