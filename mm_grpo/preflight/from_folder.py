"""Write a first config and its rows from a user's folder or file: `mm-grpo init DIR --from FOLDER|FILE`.

    table     CSV (also .txt), JSON, JSONL, Parquet, Arrow: names of pictures and answers (`NAMES`), or chats
    COCO      captions, or boxes: a class with one box in a picture is a row to find it, one with more to count them
    caption   a .txt beside each picture
    class     a folder of pictures for each, perhaps below folders of splits

`_tables` makes tables of all four, `_rows` makes rows of one form of them, and `SUITS` has a reward for the answers.
To add a layout: yield its table in `_tables`.
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
from mm_grpo.data.images import HEADER_BYTES, folders_near, look_at_image, read_encoded
from mm_grpo.data.jsonl import parse_json, store_image, write_jsonl
from mm_grpo.data.layouts import PROMPT_COLUMNS
from mm_grpo.data.media_columns import MEDIA_SUFFIXES
from mm_grpo.data.paths import NOT_ROWS, SPLITS, SUFFIXES, Location
from mm_grpo.data.readers import JoinedRows, Part, read
from mm_grpo.data.rows import read_row
from mm_grpo.errors import ConfigError, DataError, by_cause
from mm_grpo.files import RUN_MARK, expand_home, folders_below, refuse_existing
from mm_grpo.rewards.builtins.answers import gold_texts

LEGAL = (
    "legal are pictures with a table (CSV, JSON, JSONL, Parquet) of names and answers, or of chats; COCO; a .txt "
    "beside each picture; folders of classes. Unpack archives; other boxes: docs/data.md; hub datasets: data.train"
)
NAMES = {
    "prompt": "question prompt query problem instruction user input",
    "answer": "answer answers label class category target species caption captions solution response output truth gold "
    "text transcription word description count number",
    "split": "split set subset partition fold",
}
"""Words in names of columns, the likeliest first."""
NUMBER, QUESTION = "Answer with a number.", "What does this picture show?"
SUITS = [
    ("letters", "[A-H]", "{name: choice, letters: ABCDEFGH}", QUESTION, "Answer with a letter."),
    ("counts", r"0|[1-9]\d*", "count", "How many objects are there?", NUMBER),
    ("numbers", r"[-+]?\d+(,\d{3})*(\.\d+)?", "numeric", "Which number does this picture show?", NUMBER),
    ("formulas", r"[-+.\d]+|.*([\\^$√π]|\d/\d).*", "math", QUESTION, r"Put the answer into \boxed{}."),
    ("short", r"\s*(\S+\s*){1,6}", "exact_match", QUESTION, "Answer with a word or a short phrase."),
    ("long", ".*", "word_f1.py:word_f1", "Describe this picture.", "Answer with a sentence or two."),
]
"""Kind of answers, the pattern of each, their reward, a question for rows without one, and the form to ask for.

The first kind counts whose pattern all answers match.
"""
IOU = "{name: iou, gold_layout: xywh, space: pixel} # 0-1000 for Qwen3-VL and InternVL\n  - count"
MAX_LABELS, MAX_HELD_OUT = 40, 500  # labels that a prompt lists; pictures held out, if a tenth is more
_NO_ANSWER = re.compile("(^|_)(id|idx|index|type|b?box(es)?)$|^(unnamed.*)?$", re.IGNORECASE)
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
        files = [file for f in folders for file in sorted(f.iterdir()) if file.name[0] not in "._"]
        self.files = [file for file in files if file.is_file()]
        self.pictures = [file for file in self.files if MEDIA_SUFFIXES["image"].search(file.name)]
        self.by_name = defaultdict[str, list[Path]](list)
        for file in self.pictures:
            self.by_name[_plain(file.stem)].append(file)

    def find(self, source: Any, folder: Path) -> Path | None:
        """Return the picture of a name, also without suffix or folders; an encoded one is stored in `target`."""
        source = source[0] if isinstance(source, list) and source else source
        if isinstance(source, Mapping) and source.get("bytes") is None:
            source = source.get("path")
        if not isinstance(source, str | int | None) or str(source).startswith("data:"):
            return self.target / store_image(read_encoded(source, "row", None, None)[0], self.target)
        name = Path(str(source).removeprefix("file://").replace("\\", "/").strip())
        if MEDIA_SUFFIXES["image"].search(name.name):
            for near in (str(folder), str(self.root), *folders_near(str(folder))):
                if (path := Path(near, name)).is_file():
                    return path
        matches = self.by_name.get(_plain(name.name)) or self.by_name.get(_plain(name.stem), [])
        nearest = [path for path in matches if _plain(f"/{name}") in _plain(str(path))] or matches
        return nearest[0] if len(nearest) == 1 else None


def _tables(files: Files) -> Iterator[tuple[str, Callable[[], Part]]]:
    """Yield the label of each possible table, and a function that reads it."""

    def load(path: Path) -> Part:
        content = parse_json(path.read_bytes(), str(path)) if path.suffix.lower() == ".json" else None
        if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
            return Part([*_coco(content)], lambda index: str(path), path.parent)
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
        if len(tops) > 1 and not all(map(_split_of, tops)):
            break
        parts = {file: folders[1:] for file, folders in parts.items()}
    texts = [file.with_suffix(".txt") for file in parts]
    captions = [text.read_text("utf-8-sig", "replace").strip() if text.is_file() else "" for text in texts]
    captions = ["" if re.fullmatch(r"[-\d.\s]+", text) else text for text in captions]  # YOLO's boxes
    for kind, values in (("caption", captions), ("class", ["".join(p[:1]) for p in parts.values()])):
        rows = [{"image": str(file), kind: value} for file, value in zip(parts, values, strict=True)]
        if len({*values} - {""}) > 1:
            yield kind, partial(Part, rows, lambda index: str(files.root), files.root)


def _coco(content: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rows of a COCO file."""
    images, classes = ({e["id"]: e for e in content.get(key, ())} for key in ("images", "categories"))
    groups = defaultdict[Any, list[Any]](list)
    for mark in content["annotations"]:
        groups[mark["image_id"], mark.get("category_id")].append(mark)
    for (image_id, category), marks in groups.items():
        image, name = images[image_id], classes.get(category, {}).get("name")
        row = {"image": image["file_name"], "size": (image.get("height"), image.get("width"))}
        if name and len(marks) > 1 and not any(mark.get("iscrowd") for mark in marks):
            row |= {"prompt": f"How many objects of the class {name} are there?", "answer": len(marks)}
        elif name and not marks[0].get("iscrowd") and min(marks[0]["bbox"][2:]) >= 1:
            row |= {"prompt": f"Where is the {name}? Answer with [x0, y0, x1, y1].", "xywh": marks[0]["bbox"]}
        yield row | {"caption": [mark["caption"] for mark in marks if "caption" in mark]}


def _rows(part: Part, files: Files, label: str, faults: list[str]) -> Iterator[Row]:
    """Yield the usable rows of a table; add a message to `faults` for any other. DataError if it lacks a column."""
    table, folder = JoinedRows([part]), Path(part.folder or ".")
    roles = _roles(table, files, label, folder)
    answers, prompt_column = roles.get("answer"), roles.get("chat") or roles.get("prompt")
    columns = {role: column for role, column in roles.items() if role in ("image", "prompt")}
    template = None if prompt_column else "-"  # with a template a row needs no prompt
    class_names = getattr(getattr(part.rows, "features", {}).get(answers), "names", None)
    for index in range(len(table)):
        row, name = table.encoded_row(index), table.row_name(index)
        try:
            fields = read_row(row, row_name=name, columns=columns, prompt_template=template)
            images = [image for source in fields.images if (image := files.find(source, folder))]
            if not 0 < len(images) == len(fields.media):
                raise DataError(f"{name}: has a video, or no picture that is here: {brief(fields.media)}")
            keys = [_key_of(image, name, row.get("size")) for image in images]
            answer = fields.columns.get("answer", row.get(answers))
            if class_names and isinstance(answer, int):
                answer = class_names[answer]
            options, answer = _options(row, answer)
            if "xywh" not in row and not gold_texts(answer):
                raise DataError(f"{name}: has no answer")
        except (DataError, TypeError, OSError) as error:
            faults.append(str(error))
            continue
        prompt = row[prompt_column] if prompt_column else ""
        if fields.conversational or len(fields.messages) > 1:
            prompt = [*fields.messages]
        if isinstance(prompt, str) and len(options) > 1:
            prompt = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in options.items())])
        paths = [os.path.relpath(image, files.root) for image in images]
        values = {"image": paths[0]} if len(paths) == 1 else {"images": paths}
        values |= {"box": row["xywh"]} if "xywh" in row else {"answer": answer}
        split = _split_of(str(row.get(roles.get("split"), label))) or _split_of(os.path.dirname(paths[0]))
        yield {"prompt": prompt, "values": values, "keys": sorted(keys), "split": split, "roles": roles}


def _roles(table: JoinedRows, files: Files, label: str, folder: Path) -> dict[str, str]:
    """Return the column of each role that a table has: image, prompt or chat, answer, split.

    DataError if no column names pictures, none answers, or the first line names no columns.
    """
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
        raise DataError(f"{label}: its first line, {quoted(hits)}, has to name the columns")
    if chat is None and not (hits[picture] and answer):
        raise DataError(f"{label}: of {quoted(hits)} no column names pictures here, or none is called answer")
    roles = {"image": picture if hits[picture] and picture != "images" else None, "prompt": question}
    roles |= {"answer": answer, "chat": chat, "split": split}
    return {role: column for role, column in roles.items() if column}


def _options(row: Row, answer: Any) -> tuple[dict[str, Any], Any]:
    """Return the options of a question by their letters, and the answer; a place in a list, from 0, as a letter."""
    texts = next((row[key] for key in ("options", "choices") if isinstance(row.get(key), list)), None)
    if texts is None:
        return {letter: row[letter] for letter in "ABCDEFGH" if row.get(letter)}, answer
    options = dict(zip("ABCDEFGH", texts, strict=False))
    return options, [*options, None][min(answer, len(options))] if isinstance(answer, int) else answer


def _key_of(image: Path, name: str, size: tuple[int, int] | None) -> str:
    """Return a hash of a picture's first bytes. DataError if it is damaged, or not of its boxes' `size`."""

    def refusal(actual: tuple[int, int], limits: Any) -> str:
        is_right = size in (None, (None, None), actual)
        return "" if is_right else f"is {actual} pixels high and wide, and its boxes are for {size}"

    look_at_image(image, name, None, None, refusal, ())
    return hashlib.sha256(read_encoded(image, name, None, None, HEADER_BYTES)[0]).hexdigest()


def _suit(rows: list[Row], is_class: bool) -> tuple[str, str, str, str]:
    """Return the kind of the answers, the reward for them, a question for rows without one, and a form of answers."""
    golds = [gold for row in rows for gold in gold_texts(row["values"].get("answer"))]
    labels, prompts = sorted({*golds}), {str(row["prompt"]) for row in rows}
    if any("box" in row["values"] for row in rows):
        return "boxes", IOU if golds else IOU.partition("\n")[0], "", ""
    suits = (suit for suit in SUITS if all(re.fullmatch(suit[1], gold, re.DOTALL) for gold in golds))
    kind, _, reward, question, form = next(suits)
    few = len(labels) <= (MAX_LABELS if len(prompts) == 1 else 4) and 2 * len(labels) <= len(golds)
    if (few and (prompts == {""} or kind == "short")) or (is_class and len(labels) <= MAX_LABELS):
        return "labels", "exact_match", QUESTION, f"Answer with one of: {', '.join(labels)}."
    return kind, reward, question, form


def _read(files: Files) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the rows of the tables by their labels, and what is left out. DataError if it is not clear which."""
    used, faults, left_out = dict[str, list[Row]](), list[str](), list[str]()
    for label, load in _tables(files):
        messages, rows = list[str](), list[Row]()
        if used and label in ("caption", "class"):
            break
        try:
            rows = [*_rows(load(), files, label, messages)]
        except (AttributeError, DataError, KeyError, TypeError, ValueError) as error:
            messages = [f"{label}: {error if isinstance(error, DataError) else repr(error)}"]
        used |= {label: rows} if rows else {}
        (left_out if rows else faults).extend(messages)
    sets = {(_split_of(label), re.sub(r"\d+", "", label)) for label in used}  # shards differ in digits
    if not used or len({split for split, _ in sets}) < len(sets):
        kinds = Counter(file.suffix.lower() or file.name for file in files.files).most_common(6)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds) or "no files"
        why = f"name one of {quoted(used)}" if used else f"of {counts} no rows are understood"
        raise DataError("; ".join([f"{files.path}: {why}", *by_cause(faults, len(faults))[:3], LEGAL]))
    return used, left_out


def _divide(rows: list[Row]) -> tuple[dict[str, list[Row]], str]:
    """Return the rows of each split, and how they were divided; rows with pictures of two splits are in none."""
    keys, splits = sorted({key for row in rows for key in row["keys"]}), {row["split"] for row in rows}
    count, how = min(max(1, len(keys) // 10), len(keys) // 2, MAX_HELD_OUT), "as the splits are there"
    if len(splits) < 2 or "train" not in splits or None in splits:
        how = f"{count} of {len(keys)} pictures, by a hash of their bytes, are held out"
        for row in rows:
            held_out = [key < keys[count] for key in row["keys"]]
            row["split"] = "val" if all(held_out) else "" if any(held_out) else "train"
    return {name: [row for row in rows if row["split"] == name] for name in ("train", "val", "test")}, how


def write_first_config(source: str, folder: Path) -> list[str]:
    """Write rows and a config for what `source` names into `folder`; return lines about what was understood.

    Raises ConfigError or DataError if nothing is understood, or if a file is there already.
    """
    path, target = (Path(os.path.realpath(expand_home(str(name)))) for name in (source, folder))
    if not source or not path.exists():
        raise ConfigError(f"--from {source}: is no folder and no file here; {LEGAL}")
    names = "config.yaml train.jsonl val.jsonl test.jsonl word_f1.py"
    refuse_existing(target / name for name in names.split())
    used, left_out = _read(files := Files(path, target))
    rows = _merge_answers(chain(*used.values()), left_out)
    kind, reward, question, form = _suit(rows, "class" in used)
    form = "" if all(form in str(row["prompt"]) for row in rows) else form
    if kind == "labels":
        clear = [row for row in rows if not isinstance(row["values"]["answer"], list)]
        left_out += ["a picture with several labels"] * (len(rows) - len(clear))
        rows = clear
    sets, how = _divide(rows)
    left_out += ["pictures of two sets"] * (len(rows) - sum(map(len, sets.values())))
    if not sets["train"]:
        raise DataError(f"{path}: no row is left to train on: {'; '.join(by_cause(left_out, len(left_out)))}")
    target.mkdir(parents=True, exist_ok=True)
    for name in filter(sets.get, sets):
        blank = {"box": None, "answer": None} if "count" in reward and kind == "boxes" else {}
        json_rows = ({"prompt": row["prompt"] or question, **blank, **row["values"]} for row in sets[name])
        write_jsonl(json_rows, target / f"{name}.jsonl")
    if kind == "long":
        shutil.copyfile(shipped_folder("examples") / "word_f1.py", target / "word_f1.py")
    (target / "config.yaml").write_text(_config(files.root, target, sets, reward, form), encoding="utf-8")
    columns = ", ".join(f"{role} = {column}" for role, column in rows[0]["roles"].items() if role != "split")
    counts = ", ".join(f"{len(members)} in {name}.jsonl" for name, members in sets.items() if members)
    return [
        f"{path}: rows of {', '.join(used)} ({columns}): {counts} ({how})",
        f"reward: {reward.splitlines()[0]}, because the answers are {kind}. {form}",
        *(f"left out: {cause}" for cause in by_cause(left_out, len(rows) + len(left_out))[:5]),
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
    field, text = "prompt_template", "{prompt} " + re.sub("([{}])", r"\1\1", form)
    if any(isinstance(row["prompt"], list) for row in chain(*sets.values())):  # no template takes a chat
        field, text = "system_prompt", form
    fields = {
        "train: rows.jsonl": "train: train.jsonl",
        "# eval: heldout.jsonl": f"eval: {{{evals}}}" if evals else "# eval: heldout.jsonl",
        "# image_dir: images": f"image_dir: {quote(near if near.count('..') < 3 else str(root))}",
        "# max_pixels": "on_bad_media: drop # leave out a damaged picture\n  # max_pixels",
        "# system_prompt": f"{field}: {quote(text)}\n  # system_prompt" if form else "# system_prompt",
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
