"""Write a first config and its rows from a user's folder or file: `mm-grpo init DIR --from FOLDER|FILE`.

    table     CSV (also .txt), JSON, JSONL, Parquet, Arrow: names of pictures and answers (`NAMES`), or chats
    COCO      captions, or boxes: a class with one box in a picture is a row to find it, one with more to count them
    caption   a .txt beside each picture
    class     a folder of pictures for each, perhaps below folders of splits

`_tables` yields tables of all four (a new layout too), `_rows` makes rows of them, `SUITS` has rewards for the answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from mm_grpo.config.shipped import shipped_folder
from mm_grpo.data.columns import brief, quoted
from mm_grpo.data.images import folders_near, look_at_image, read_encoded
from mm_grpo.data.jsonl import parse_json, store_image, write_jsonl
from mm_grpo.data.layouts import PROMPT_COLUMNS
from mm_grpo.data.media_columns import MEDIA_SUFFIXES, NUMBERED
from mm_grpo.data.paths import NOT_ROWS, SPLITS, SUFFIXES, Location
from mm_grpo.data.readers import JoinedRows, Part, read
from mm_grpo.data.rows import read_row
from mm_grpo.errors import ConfigError, DataError, by_cause, half_character
from mm_grpo.files import RUN_MARK, expand_home, folders_below, refuse_existing
from mm_grpo.rewards.builtins.answers import boxed, final_part, gold_texts, text_list
from mm_grpo.rewards.builtins.text import chosen

LEGAL = (
    "legal are pictures with a table (CSV, JSON, JSONL, Parquet) of names and answers, or of chats; COCO; a .txt "
    "beside each picture; folders of classes. Unpack archives; other boxes: docs/data.md; hub datasets: data.train"
)
NAMES = {
    "prompt": "question prompt query problem instruction user input",
    "answer": "answer answers label labels class category target species caption captions comment solution response "
    "output truth gold gt text transcription word description choice count number",
    "split": "split set subset partition fold",
}
"""Words in names of columns, the likeliest first."""
LETTERS, NUMBER, QUESTION = "ABCDEFGH", "Answer with a number.", "What does this picture show?"
SUITS = [
    ("letters", r"\(?[A-H]\)?", f"{{name: choice, letters: {LETTERS}}}", QUESTION, "Answer with a letter."),
    ("counts", r"0|[1-9]\d*", "count", "Which number does this picture show?", NUMBER),
    ("numbers", r"[-+]?\d+(,\d{3})*(\.\d+)?", "numeric", "Which number does this picture show?", NUMBER),
    ("formulas", r"[-+]?[.\d]+|\d+/\d+|.*[\\^$√π].*", "math", QUESTION, r"Put the answer into \boxed{}."),
    ("short", r"\s*(\S+\s*){1,6}", "exact_match", QUESTION, "Answer with a word or a short phrase."),
    ("long", ".*", "word_f1.py:word_f1", "Describe this picture.", "Answer with a sentence or two."),
]
"""Kinds of answers, patterns (the first that all match counts), rewards, questions for rows without, and forms."""
IOU = "{name: iou, gold_layout: xywh, space: pixel} # 0-1000 for Qwen3-VL and InternVL\n  - count"
MAX_LABELS, MAX_HELD_OUT = 40, 500  # labels that a prompt lists; pictures held out, if a tenth is more
_FOREIGN = re.compile(
    r"(?s)\.xml:.*?<(?:(?P<VOC>annotation)|(?P<CVAT>annotations))>|\.txt:(?P<YOLO>\d+(?: [-+\d.e]+){4,}\s)"
    r'|\.json:.*?"(?:(?P<LabelMe>shapes)|(?P<VIA>regions)|(?P<LabelStudio>from_name)|(?P<VQA>question_id))"'
)
_NOT_CLASSES = re.compile("(?i)images?|imgs?|masks|labels|annotations?|jpegimages|gt.*|leftimg.*|depth|[hl]r")
_NO_ANSWER = re.compile("(?i)(^|_)(id|idx|index|type|b?box(es)?|videos?)$|^(unnamed.*|_.*)?$")
_OPTION = re.compile("[A-H]|(?i:(option|choice|opt)([_ ]?[a-h1-8]|s))")
_BASE64 = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR)[A-Za-z0-9+/\s]{60,}=*\s*")
_BOX = re.compile(r"\s*[\[({<]+\s*-?\d[\d.]*(\s*,\s*-?\d[\d.]*){1,3}\s*[\])}>]+\s*")
Row = dict[str, Any]
"""Row of a table; from `_rows` on, a row's prompt, values (columns to write), keys (hashes of pictures) and split."""


class Files:
    """Files of a folder and all below it, except hidden ones and the outputs of runs and of `init`."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target, self.root = path, target, path if path.is_dir() else path.parent
        folders = [Path(folder) for folder in folders_below(str(self.root))] if path.is_dir() else [self.root]
        outputs = {f for f in folders if (f / "config.yaml").exists() and (f / "train.jsonl").exists()}
        outputs |= {f for f in folders if (f / RUN_MARK).exists()} | {target} & {*folders}
        folders = [f for f in folders if (outputs - {self.root}).isdisjoint((f, *f.parents))]
        files = [file for f in folders for file in sorted(f.iterdir()) if file.name[0] != "."]
        self.files = [file for file in files if file.is_file()]
        self.pictures = [file for file in self.files if MEDIA_SUFFIXES["image"].search(file.name)]
        self.by_name, self.used = defaultdict[str, list[Path]](list), set[Path]()
        for file in self.pictures:
            self.by_name[_plain(file.stem)].append(file)
        self.folders = {_plain(name) for file in self.pictures for name in file.parts[:-1]}

    def find(self, source: Any, folder: Path) -> Path | None:
        """Return the picture of a name, also without suffix or folders; an encoded one is stored in `target`."""
        source = source[0] if isinstance(source, list) and isinstance((*source, 0)[0], str | dict) else source
        if isinstance(source, Mapping) and source.get("bytes") is None:
            source = source.get("path")
        if isinstance(source, str) and _BASE64.fullmatch(source):
            source = f"data:;base64,{source}"
        if not isinstance(source, str | int | None) or str(source).startswith("data:"):
            return self.target / store_image(read_encoded(source, "row", None, None)[0], self.target)
        name = Path(str(source).removeprefix("file://").replace("\\", "/").strip())
        if MEDIA_SUFFIXES["image"].search(name.name):
            around = folders_near(str(folder)) if self.path != self.root else []  # a folder has all inside
            near = {p / name for p in (folder, self.root, *map(Path, around)) if (p / name).is_file()}
            near = near & {folder / name} or {file for file in near if self.root in file.parents} or near
            if len(near) == 1:
                return near.pop()
        matches = {*self.by_name.get(_plain(name.name), ()), *self.by_name.get(_plain(name.stem), ())}
        parts = {_plain(part) for part in name.parts[:-1]} & self.folders
        matches = {file for file in matches if parts <= {*map(_plain, file.parts)}}
        matches = {file for file in matches if _plain(file.name) == _plain(name.name)} or matches
        return matches.pop() if len(matches) == 1 else None


def _tables(files: Files) -> Iterator[tuple[str, Callable[[], Part]]]:
    """Yield the label of each possible table, and a function that reads it."""

    def load(path: Path) -> Part:
        content = parse_json(path.read_bytes(), str(path)) if path.suffix.lower() == ".json" else None
        if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
            rows = [*_coco(content)]
            return Part(rows, lambda index: f"{path}: {rows[index]['image']!r}", path.parent)
        return read(Location("file", str(path)), str(path), {})

    is_folder = files.path == files.root
    for path in files.files if is_folder else [files.path]:
        is_table = path.suffix.lower() in (*SUFFIXES, ".txt") and path.name not in NOT_ROWS
        is_table &= not is_folder or "submission" not in path.name.lower()  # its answers are to be filled in
        if is_table and not (is_folder and _plain(path.stem) in files.by_name):
            yield str(path.relative_to(files.root)), partial(load, path)
    parts = {file: file.relative_to(files.root).parts[:-1] for file in files.pictures if is_folder}
    # the folder of a class is the first below the ones that hold all pictures, or a split
    while parts and all(parts.values()):
        tops = {folders[0] for folders in parts.values()}
        are_splits = (
            any if min(map(len, parts.values())) > 1 else all
        )  # train and extra; a class may be called train
        if len(tops) > 1 and not are_splits(map(_split_of, tops)):
            break
        parts = {file: folders[1:] for file, folders in parts.items()}
    texts = [file.with_suffix(".txt") for file in parts]
    captions = [text.read_text("utf-8-sig", "replace").strip() if text.is_file() else "" for text in texts]
    captions = ["" if re.fullmatch(r"[-\d.\s]+", text) else text for text in captions]  # YOLO's boxes
    for kind, values in (("caption", captions), ("class", ["".join(p[:1]) for p in parts.values()])):
        rows = [{"image": str(file), kind: value} for file, value in zip(parts, values, strict=True)]
        if len({*values} - {""}) > 1:
            yield kind, partial(Part, rows, lambda index: str(files.root), files.root)
            files.used.update(texts)


def _coco(content: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rows of a COCO file."""
    images, classes = ({e["id"]: e for e in content.get(key, ())} for key in ("images", "categories"))
    groups = defaultdict[Any, list[Any]](list)
    for mark in content["annotations"]:
        groups[mark["image_id"], mark.get("category_id")].append(mark)
    for (image_id, category), marks in groups.items():
        image, name = images.get(image_id, {"file_name": image_id}), classes.get(category, {}).get("name")
        row = {"image": image["file_name"], "_size": (image.get("height"), image.get("width"))}
        is_crowd, xywh = any(mark.get("iscrowd") for mark in marks), [*marks[0].get("bbox", ())]
        if name and len(marks) > 1 and not is_crowd:
            row |= {"prompt": f"How many objects of the class {name} are there?", "answer": len(marks)}
        elif name and not is_crowd and min(xywh[2:], default=0) >= 1:
            row |= {"prompt": f"Where is the {name}? Answer with [x0, y0, x1, y1].", "_xywh": xywh}
        captions = [mark["caption"] for mark in marks if "caption" in mark]
        yield row | ({"caption": captions} if captions else {})


def _rows(part: Part, files: Files, label: str, faults: list[str]) -> list[Row]:
    """Return the usable rows of a table; add a message to `faults` for any other. DataError if it lacks a column."""
    table, folder, rows = JoinedRows([part]), Path(part.folder or "."), list[Row]()
    roles = _roles(table, files, folder)
    answers, used = roles.get("answer"), {*roles.values(), "_size", "_xywh"}
    class_names = getattr(getattr(part.rows, "features", {}).get(answers), "names", None)
    for index in range(len(table)):
        row, name = dict(table.encoded_row(index)), table.row_name(index)
        if class_names and isinstance(row[answers], int):
            row[answers] = [*class_names, None][row[answers]]  # -1 is of no class
        try:
            rows.append(_row(row, name, files, folder, roles, used))
        except (DataError, TypeError, OSError) as error:
            faults.append(str(error))
            continue
        split = _split_of(str(row.get(roles.get("split", ""), label)))
        rows[-1] |= {"split": split or _split_of(rows[-1]["folder"]), "roles": roles}
    if rows and (unread := [column for column in table.column_names if column not in used]):
        faults.append(f"{label}: columns that nothing reads: {quoted(unread)}")
    return rows


def _row(row: Row, name: str, files: Files, folder: Path, roles: Mapping[str, str], used: set[str]) -> Row:
    """Return a usable row, and add its columns to `used`. DataError for any other."""
    columns = {role: column for role, column in roles.items() if role in ("image", "prompt")}
    template = None if "prompt" in roles else "-"  # with a template a row needs no prompt
    fields = read_row(row, row_name=name, columns=columns, prompt_template=template)
    images = [image for source in fields.images if (image := files.find(source, folder))]
    files.used.update(Path(os.path.normpath(image)) for image in images)
    if fields.videos or not 0 < len(images) == len(fields.media):
        raise DataError(f"{name}: has a video, or no picture that is here: {brief(fields.sources)}")
    keys = [_key_of(image, name, row.get("_size"), row.get("_xywh")) for image in images]
    answer = _gold(fields.columns.get("answer", row.get(roles.get("answer", ""))), name)
    options, answer = _options(row, answer, name)
    if "_xywh" not in row and not gold_texts(answer):
        raise DataError(f"{name}: has no answer; its picture is {brief(fields.media)}")
    prompt = row[roles["prompt"]] if "prompt" in roles else ""
    if fields.conversational or len(fields.messages) > 1:
        prompt = [*fields.messages]
    elif options:
        prompt = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in options.items())])
        used.update(filter(_OPTION.fullmatch, row))
    used.update(fields.used)
    paths = [os.path.relpath(image, files.root) for image in images]
    if why := half_character(json.dumps([*paths, prompt, answer], ensure_ascii=False)):
        raise DataError(f"{name}: {why}; its picture is {brief(paths)}")
    values = {"image": paths[0]} if len(paths) == 1 else {"images": paths}
    values |= {"box": row["_xywh"]} if "_xywh" in row else {"answer": answer}
    return {"prompt": prompt, "values": values, "keys": sorted(keys), "folder": os.path.dirname(paths[0])}


def _roles(table: JoinedRows, files: Files, folder: Path) -> dict[str, str]:
    """Return the column of each role that a table has. DataError if no column names pictures, or none answers."""
    count, hits = min(20, len(table)), dict.fromkeys(table.column_names, 0)
    for row, name in product(map(table.encoded_row, range(count)), hits):
        with suppress(DataError):
            value = row.get(name)
            # 3 may be a label or a picture, 3.png is a picture
            is_sure = not isinstance(value, str | int) or MEDIA_SUFFIXES["image"].search(str(value))
            hits[name] += (files.find(value, folder) is not None) * (2 if is_sure else 1)
    picture = max(hits, key=lambda name: (hits[name], "image" in name))
    chat = next((name for name in hits if name in PROMPT_COLUMNS), None)
    texts = [name for name in hits if hits[name] <= count and name not in (picture, *PROMPT_COLUMNS)]
    candidates = [name for name in texts if not _NO_ANSWER.search(name)]
    question, split = None if chat else _likely("prompt", candidates), _likely("split", candidates)
    others = [name for name in candidates if name not in (question, split)]
    answer = _likely("answer", candidates) or (others[0] if len(others) == 1 else None)
    if chat is None and any(files.find(name, folder) for name in hits):
        raise DataError(f"its first line, {quoted(hits)}, has to name the columns")
    if chat is None and not hits[picture]:
        raise DataError(f"no column names pictures that are here: {brief(table.encoded_row(0))}")
    if (chat is None and not answer) or {"xmin", "x_min", "x1"} & {*map(str.lower, hits)}:
        raise DataError(f"of {quoted(others)} none is called answer; rename it (boxes: docs/data.md)")
    is_role = hits[picture] and picture != "images" and not NUMBERED.fullmatch(picture)
    roles = {"image": picture if is_role else None, "prompt": question or chat}
    roles |= {"answer": answer, "split": split}
    return {role: column for role, column in roles.items() if column}


def _options(row: Row, answer: Any, name: str) -> tuple[dict[str, str], Any]:
    """Return the options of a question by their letters, and the answer; a place in a list, from 0, as a letter."""
    columns = [row[column] for column in row if _OPTION.fullmatch(column)]
    texts: Any = (columns[0] if len(columns) == 1 else columns) or []  # a column options, or one for each
    if isinstance(texts, str):
        texts = text_list(texts) or texts.splitlines()
    texts = [*texts.values()] if isinstance(texts, Mapping) else texts
    places = ((letter, text) for letter, text in zip(LETTERS, texts, strict=False) if text is not None)
    options = {letter: re.sub(r"^\(?[A-Ha-h][).:]\s+", "", str(text)).strip() for letter, text in places}
    if len(options) < 2 or answer is None:
        return {}, answer
    if len(texts) > len(LETTERS) or isinstance(answer, list):
        raise DataError(f"{name}: of {len(texts)} options {brief(answer)}; legal are 8, one of them right")
    text, is_place = str(answer), str(answer).isdigit()
    letters = {_plain(option): letter for letter, option in options.items() if isinstance(answer, str)}
    if (
        is_place and _plain(text) not in letters and int(text) >= len(texts)
    ):  # other rows may count from 1 too
        raise ValueError(f"{name}: answer {answer} of options 0 to {len(texts) - 1}; write letters")
    letter = letters.get(_plain(text)) or (LETTERS[int(text)] if is_place else chosen(text, LETTERS))
    return options, letter or answer


def _gold(answer: Any, name: str) -> Any:
    """Return an answer without the reasoning before it; None for nan. DataError for a box, a point or a mapping."""
    parts = answer if isinstance(answer, list) else [answer]
    parts = [part.get("answer", part) if isinstance(part, Mapping) else part for part in parts]
    is_place = len(parts) > 1 and all(isinstance(part, int | float) for part in parts)
    if is_place or any(isinstance(part, Mapping | list) or _BOX.fullmatch(str(part)) for part in parts):
        raise DataError(f"{name}: the answer {brief(answer)} is a box, a point or a mapping: docs/data.md")
    texts = [
        (boxed(t) or final_part(t)).split("####")[-1].strip() if isinstance(t, str) else t for t in parts
    ]
    texts = [text for text in texts if str(text).lower() not in ("nan", "<na>", "nat")]
    return texts if len(texts) > 1 else next(iter(texts), None)


def _key_of(image: Path, name: str, size: tuple[int, int] | None, xywh: Any) -> str:
    """Return a hash of a picture. DataError if it is damaged, not of its boxes' `size`, or smaller than its box."""

    def refusal(actual: tuple[int, int], limits: Any) -> str:
        is_inside = not xywh or (xywh[0] + xywh[2] < actual[1] + 2 and xywh[1] + xywh[3] < actual[0] + 2)
        is_right = size in (None, (None, None), actual) and is_inside
        return "" if is_right else f"is {actual} pixels high and wide, and its box {xywh} is for {size}"

    look_at_image(image, name, None, None, refusal, ())
    return hashlib.sha256(read_encoded(image, name, None, None)[0]).hexdigest()


def _suit(rows: list[Row], is_class: bool) -> tuple[str, str, str, str]:
    """Return the kind of the answers, the reward for them, a question for rows without one, and a form of answers."""
    golds = [gold.strip() for row in rows for gold in gold_texts(row["values"].get("answer"))]
    labels, prompts = {gold.casefold(): gold for gold in golds}, {str(row["prompt"]) for row in rows}
    if any("box" in row["values"] for row in rows):
        return "boxes", IOU if golds else IOU.partition("\n")[0], "", ""
    suits = (suit for suit in SUITS if all(re.fullmatch(suit[1], gold, re.DOTALL) for gold in golds))
    kind, _, reward, question, form = next(suits)
    few = len(labels) <= (MAX_LABELS if len(prompts) == 1 else 4) and 2 * len(labels) <= len(golds)
    few &= kind == "short" or (kind != "long" and prompts == {""})
    if few or (is_class and len(labels) <= MAX_LABELS):
        form = f"Answer with one of: {', '.join(sorted(labels.values()))}."
        kind, reward, question = "labels", "exact_match", QUESTION
    column = rows[0]["roles"].get("answer", "answer")
    if not _likely("answer", [column]):
        question = f"What is the {column!r} of this picture?"
    return kind, reward, "How many objects are there?" if column.lower().endswith("count") else question, form


def _read(files: Files) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the rows of the tables by their labels, and what is left out. DataError if it is not clear which."""
    used, faults, left_out = dict[str, list[Row]](), list[str](), list[str]()
    for label, load in _tables(files):
        messages, rows = list[str](), list[Row]()
        if used and label in ("caption", "class"):
            break
        try:
            rows = _rows(load(), files, label, messages)
        except (AttributeError, DataError, KeyError, TypeError, ValueError) as error:
            messages = [f"{label}: {error if isinstance(error, DataError | ValueError) else repr(error)}"]
        used |= {label: rows} if rows else {}
        (left_out if rows else faults).extend(messages)
    folders = Counter(str(row["values"]["answer"]) for row in used.get("class", ()))
    if max(folders.values(), default=2) < 2 or any(map(_NOT_CLASSES.fullmatch, folders)):
        used, faults = {}, [*faults, f"of pairs, or of a picture each, are the folders {brief([*folders])}"]
    sets = {(_split_of(label), re.sub(r"\d+", "", label)) for label in used}  # shards differ in digits
    files.used |= {files.root / label for label in used}
    unread = sorted({*files.files} - files.used) if files.path == files.root else []
    if not used or len({split for split, _ in sets}) < len(sets):
        heads = (f"{f.name}:{f.open('rb').read(2000).decode('utf-8', 'ignore')} " for f in unread)
        foreign = ((m.string.partition(":")[0], m.lastgroup) for m in map(_FOREIGN.search, heads) if m)
        faults[:0] = [f"{name!r} is of {form}: convert it to COCO or to a table" for name, form in foreign]
        kinds = Counter(file.suffix.lower() or file.name for file in files.files).most_common(6)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds) or "no files"
        why = f"name one of {quoted(used)}" if used else f"of {counts} no rows are understood"
        raise DataError("; ".join([f"{files.path}: {why}", *by_cause(faults, len(faults))[:4], LEGAL]))
    left_out += [fault for fault in faults if not re.match(r"[^:]*\.txt:", fault)]
    few = quoted(file.name for file in unread[:4])
    return used, left_out + ([f"{len(unread)} files that nothing reads, such as {few}"] if unread else [])


def _divide(rows: list[Row]) -> tuple[dict[str, list[Row]], str]:
    """Return the rows of each split, and how they were divided; "train" shows no picture of another one."""
    keys, splits = sorted({key for row in rows for key in row["keys"]}), {row["split"] for row in rows}
    count, how = min(max(1, len(keys) // 10), len(keys) // 2, MAX_HELD_OUT), "as the splits are there"
    if len(splits) < 2 or "train" not in splits or None in splits:
        how = f"{count} of {len(keys)} pictures, by a hash of their bytes, are held out"
        for row in rows:
            row["split"] = "val" if any(key < keys[count] for key in row["keys"]) else "train"
    others = {key for row in rows if row["split"] in ("val", "test") for key in row["keys"]}
    rows = [row for row in rows if row["split"] != "train" or others.isdisjoint(row["keys"])]
    return {name: [row for row in rows if row["split"] == name] for name in ("train", "val", "test")}, how


def write_first_config(source: str, folder: Path) -> list[str]:
    """Write rows and a config for what `source` names; return lines about it. ConfigError or DataError if it cannot."""
    path, target = (Path(os.path.realpath(expand_home(str(name)))) for name in (source, folder))
    if not source or not path.exists():
        raise ConfigError(f"--from {source}: is no folder and no file here; {LEGAL}")
    names = "config.yaml train.jsonl val.jsonl test.jsonl word_f1.py"
    refuse_existing(target / name for name in names.split())
    used, left_out = _read(files := Files(path, target))
    rows = _merge_answers(chain(*used.values()), left_out)
    kind, reward, question, form = _suit(rows, "class" in used)
    if kind == "labels":
        clear = [row for row in rows if not isinstance(row["values"]["answer"], list)]
        left_out += ["a picture with several labels"] * (len(rows) - len(clear))
        rows = clear
    sets, how = _divide(rows)
    left_out += ["pictures of two sets"] * (len(rows) - sum(map(len, sets.values())))
    if not sets["train"]:
        raise DataError(f"{path}: no row is left to train on: {'; '.join(by_cause(left_out, len(left_out)))}")
    form = "" if all(form in str(row["prompt"]) for row in rows) else form
    chats = [row["prompt"][-1] for row in rows if isinstance(row["prompt"], list)]
    for turn in chats:  # no template takes a chat
        parts = [turn["content"]] if isinstance(turn["content"], str) else turn["content"]
        turn["content"] = [*parts, f" {form}"] if form else parts
    target.mkdir(parents=True, exist_ok=True)
    for name in filter(sets.get, sets):
        blank = {"box": None, "answer": None} if "count" in reward and kind == "boxes" else {}
        json_rows = ({"prompt": row["prompt"] or question, **blank, **row["values"]} for row in sets[name])
        write_jsonl(json_rows, target / f"{name}.jsonl")
    if kind == "long":
        shutil.copyfile(shipped_folder("examples") / "word_f1.py", target / "word_f1.py")
    config = _config(files.root, target, sets, reward, "" if chats else form)
    (target / "config.yaml").write_text(config, encoding="utf-8")
    columns = ", ".join(f"{role} = {column}" for role, column in rows[0]["roles"].items() if role != "split")
    counts = ", ".join(f"{len(members)} in {name}.jsonl" for name, members in sets.items() if members)
    return [
        f"{path}: rows of {', '.join(used)} ({columns}): {counts} ({how})",
        f"reward: {reward.splitlines()[0]}, because the answers are {kind}. {form}",
        *(f"left out: {cause}" for cause in by_cause(left_out, len(rows) + len(left_out))),
    ]


def _merge_answers(rows: Iterable[Row], left_out: list[str]) -> list[Row]:
    """Merge rows that ask the same about a picture, because any of their answers is right; sort them by picture."""
    merged = dict[Any, Row]()
    for row in rows:
        first = merged.setdefault((*row["keys"], str(row["prompt"]), row["split"]), row)["values"]
        if first is not row["values"] and "answer" in first:
            left_out.append("a row that repeats picture and question; its answer is right beside the first")
            golds = dict.fromkeys(gold_texts(first["answer"]) + gold_texts(row["values"].get("answer")))
            first["answer"] = [*golds] if len(golds) > 1 else first["answer"]
    return sorted(merged.values(), key=lambda row: row["keys"])


def _config(root: Path, target: Path, sets: Mapping[str, list[Row]], reward: str, form: str) -> str:
    """Return the text of examples/init/config.yaml with fields for these rows, whose pictures are below `root`."""
    quote = partial(json.dumps, ensure_ascii=False)
    near, prompts = os.path.relpath(root, target), max(1, min(16, len(sets["train"]) // 4))
    evals = ", ".join(f"{name}: {name}.jsonl" for name in ("val", "test") if sets[name])
    template = quote("{prompt} " + re.sub("([{}])", r"\1\1", form))
    fields = {
        "train: rows.jsonl": "train: train.jsonl",
        "# eval: heldout.jsonl": f"eval: {{{evals}}}" if evals else "# eval: heldout.jsonl",
        "# image_dir: images": f"image_dir: {quote(near if near.count('..') < 3 else str(root))}",
        "# max_pixels": "on_bad_media: drop # leave out a damaged picture\n  # max_pixels",
        "# system_prompt": f"prompt_template: {template}\n  # system_prompt" if form else "# system_prompt",
        "# prompts_per_step: 32": f"prompts_per_step: {prompts}",
        "# num_generations": "num_generations",
        "own_reward.py:own_reward": reward,
        "max_steps: 100": f"max_steps: {min(300, max(20, 3 * len(sets['train']) // prompts))}",
    }
    config = (shipped_folder("examples") / "init" / "config.yaml").read_text(encoding="utf-8")
    for old, new in fields.items():
        config = config.replace(old, new)
    return config


def _likely(kind: str, names: list[str]) -> str | None:
    """Return the name with the likeliest word of a kind; of several one that ends with "name", or the shortest."""
    ranked = sorted(names, key=lambda name: (not name.lower().endswith("name"), len(name)))
    words = {name: re.split(r"[\W_]+", name.lower()) for name in ranked}
    return next((name for word in NAMES[kind].split() for name in ranked if word in words[name]), None)


def _split_of(name: str) -> str | None:
    words = re.findall(rf"(?i)(?<![a-z]){SPLITS.pattern}", name)
    return {"tr": "train", "te": "test"}.get(words[-1].lower()[:2], "val") if words else None


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
