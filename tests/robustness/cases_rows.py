"""Rows: in files, in saved datasets, in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import robustness.run_case as by
from robustness.cases import (
    ASKED,
    ODD_FILES,
    ODD_NAMES,
    SEEN,
    Call,
    add,
    case,
    closed_folder,
    cut,
    picture,
    user,
)


def jsonl(content: str | bytes, name: str = "rows.jsonl", **data: Any) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        path = folder / name
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        picture(4, 4).save(folder / "a.png")
        return lambda: by.use_rows(path, **data)

    return make


def rows(*given: Any, **data: Any) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        picture(4, 4).save(folder / "a.png")
        return lambda: by.use_rows(list(given), **data)

    return make


for name, content, words in [
    ("nothing", "", ["is empty"]),
    ("blank lines", "\n\n  \n", ["is empty"]),
    ("half a row", '{"prompt": "a"', ["rows.jsonl:1", "not valid JSON"]),
    ("NaN", '{"prompt": "?", "image": "a.png", "x": NaN}', ["rows.jsonl:1", "NaN"]),
    ("Infinity", '{"prompt": "?", "image": "a.png", "x": [-Infinity]}', ["-Infinity"]),
    ("1e999", '{"prompt": "?", "image": "a.png", "x": 1e999}', ["1e999"]),
    ("a key twice", '{"prompt": "?", "image": "a.png", "prompt": "!"}', ["'prompt' is given twice"]),
    ("an inner key twice", '{"prompt": "?", "image": "a.png", "x": {"a": 1, "a": 2}}', ["'a' is given twice"]),
    ("5000 digits", '{"prompt": "?", "x": ' + "9" * 5000 + "}", ["rows.jsonl:1"]),
    ("brackets without end", "[" * 100_000, ["rows.jsonl:1"]),
    ("a list for a row", "[1]", ["a row is a mapping"]),
    ("null for a row", "null", ["a row is a mapping"]),
    ("not UTF-8", b'{"prompt": "\xff"}', ["rows.jsonl:1", "UTF-8"]),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), ["UTF-8"]),
    ("NUL bytes", b"\0" * 100, ["rows.jsonl:1"]),
    ("an image for rows", b"\x89PNG\r\n\x1a\n" * 9, ["rows.jsonl:1"]),
    ("half a character", '{"prompt": "\\ud83d"}', ["half a character"]),
    ("a path of half a character", '{"prompt": "?", "image": "\\ud83d.png"}', ["image"]),
    ("a prompt of 10 MB", json.dumps({"prompt": "word " * 2_000_000, "image": "a.png"}), ["10000000 characters"]),
    ("no prompt", '{"image": "a.png"}', ["no column 'prompt'"]),
    ("an HTML page", "<!DOCTYPE html>\n<html></html>", ["rows.jsonl:1"]),
    ("CSV", "prompt,image\n?,a.png", ["rows.jsonl:1"]),
    ("a JSON list in .jsonl", '[\n{"prompt": "?"},\n{"prompt": "!"}\n]', ["rows.jsonl:1"]),
]:  # fmt: skip
    add(f"rows: {name}", jsonl(content), *words)
for name, given, words in [
    ("none", [], ["0 rows"]),
    ("a number", [3], ["a row is a mapping"]),
    ("an empty mapping", [{}], ["no column 'prompt'"]),
    ("an empty prompt", [{"prompt": "", "image": "a.png"}], ["'prompt' is empty"]),
    ("a blank prompt", [{"prompt": " \n", "image": "a.png"}], ["'prompt' is empty"]),
    ("a null prompt", [{"prompt": None}], ["is null"]),
    ("a number as prompt", [{"prompt": 3}], ["legal is a string"]),
    ("no messages", [{"prompt": [], "image": "a.png"}], ["no message of role 'user'"]),
    ("no turn of the user", [{"prompt": [{"role": "system", "content": "x"}]}], ["no message of role 'user'"]),
    ("an answer at the end", [{"prompt": [*ASKED, {"role": "assistant", "content": "x"}]}], ["ends with"]),
    ("an unknown role", [{"prompt": [{"role": "human", "content": "x"}]}], ["'human'"]),
    ("a message without content", [{"prompt": [{"role": "user"}]}], ["content"]),
    ("an empty message", [{"prompt": [{"role": "user", "content": ""}]}], ["'prompt' is empty"]),
    ("an empty list of parts", [{"prompt": [{"role": "user", "content": []}]}], ["'prompt' is empty"]),
    ("a part of no type", [user([{"text": "x"}])], ["legal are 'text'"]),
    ("a text part with a number", [user([{"type": "text", "text": 3}])], ["needs a string"]),
    ("a video part", [user([{"type": "video", "video": "a.mp4"}])], ["videos"]),
    ("a video column", [{"prompt": "?", "video": "a.mp4"}], ["videos"]),
    ("more tags than images", [{"prompt": "<image><image>?", "image": "a.png"}], ["<image>"]),
    ("more images than parts", [user([{"type": "text", "text": "?"}])], ["image parts"]),
    ("both image columns", [SEEN | {"images": ["a.png"]}], ["both 'image' and 'images'"]),
    ("a null among images", [{"prompt": "?", "images": ["a.png", None]}], ["images[1]"]),
    ("half a character in a message", [user("\ud83d")], ["half a character"]),
    ("lone surrogates in a column", [SEEN | {"\ud83d": "\ud83d"}, {"a": 1}], ["no column 'prompt'"]),
    ("numbers as column names", [{1: 2, "prompt": "?"}], ["no row has an image"]),
    ("10 MB in one message", [user("x" * 10_000_000)], ["10000000 characters"]),
    ("text alone", [{"prompt": "?", "answer": "a"}], ["no row has an image", "data.text_only"]),
    ("an unread picture", [{"prompt": "?", "picture": "a.png"}], ["'picture'", "data.columns.images=picture"]),
    ("an unread image_path", [{"prompt": "?", "image_path": "a.png"}], ["'image_path'"]),
    ("an unread file_name", [{"prompt": "?", "file_name": "a.png"}], ["'file_name'"]),
    ("an unread URL", [{"prompt": "?", "source": "https://x.org/a.jpg?b=1"}], ["'source'"]),
    ("an unread PIL image", [{"prompt": "?", "x": picture(2, 2)}], ["'x'"]),
    ("unread bytes", [{"prompt": "?", "x": b"\x89PNG\r\n"}], ["'x'"]),
    ("one unread among read ones", [SEEN, {"prompt": "?", "photo": "a.png"}], ["train row 1", "'photo'"]),
    ("images of a message", [{"prompt": [{"role": "user", "content": "?", "images": ["a.png"]}]}], ["key 'images'"]),
    ("<img> without image", [{"prompt": "<img> ?"}], ["'<img>'"]),
    ("<|image_pad|> without image", [{"prompt": "<|image_pad|> ?"}], ["'<|image_pad|>'"]),
    ("<video> without video", [{"prompt": "<video> ?"}], ["'<video>'"]),
]:  # fmt: skip
    add(f"rows: {name}, in Python", rows(*given), *words)
add(
    "rows: a column that is not there",
    rows(SEEN, columns={"images": "pics"}),
    "data.columns.images",
    "'pics'",
)
add("rows: a misspelt field", rows(SEEN, columns={"imagse": "image"}), "data.columns.imagse", "'images'")
add("rows: text alone, as allowed", rows({"prompt": "?"}, text_only=True), code=0)
add("rows: a placeholder in text alone", rows({"prompt": "<img>"}, text_only=True), "'<img>'")
for name, given, words in [
    ("a number", 3, ["the data is a int"]),
    ("a set", {1}, ["the data is a set"]),
    ("a mapping", {"a": 1}, ["no 'task'"]),
    ("an unknown task", {"task": "shapse"}, ["known tasks"]),
    ("a task with a wrong option", {"task": "shapes", "sise": 3}, ["'sise'"]),
    ("a task of no rows", {"task": "shapes", "split": "train", "size": 0}, ["size"]),
]:
    add(f"rows: {name} in place of rows", lambda folder, given=given: lambda: by.use_rows(given), *words)
add("rows: evaluation without rows", lambda folder: lambda: by.use_eval([]), "'eval' has 0 rows")
add("rows: an evaluation set without rows", lambda folder: lambda: by.use_eval({"a": []}), "'a' has 0 rows")
for name, (make_odd, unix_user) in ODD_FILES.items():
    for suffix in (".jsonl", ".json", ".csv", ".parquet", ".arrow"):

        def odd_rows(folder: Path, make_odd: Any = make_odd, suffix: str = suffix) -> Call:
            make_odd(folder / f"r{suffix}")
            return lambda: by.use_rows(f"r{suffix}")

        add(f"rows: {name} named {suffix}", odd_rows, f"r{suffix}", unix_user=unix_user)
add(
    "rows: a closed folder",
    lambda folder: (closed_folder(folder / "d"), lambda: by.use_rows("d/x.jsonl"))[1],
    "d/x.jsonl",
    unix_user=True,
)
for name, value in ODD_NAMES.items():
    add(f"rows: a path {name}", lambda folder, value=value: lambda: by.use_rows(f"{value}.jsonl"))
add("rows: a suffix that is not known", jsonl("a", name="rows.xlsx"), "'.xlsx'")
for name, content, words in [
    ("nothing", "", ["is empty"]),
    ("names alone", "prompt,image\n", ["is empty"]),
    ("a cell too many", "prompt,image\nA, or B?,a.png\n", ["rows.csv:2", "3 cells"]),
    ("a name twice", "prompt,prompt\na,b\n", ["'prompt' is given twice"]),
    ("semicolons", "prompt;image\n?;a.png\n", ["commas"]),
    ("a quote without end", 'prompt,image\n"?,a.png\n', ["not valid CSV"]),
    ("noise", bytes(range(256)), ["rows.csv"]),
    ("broken JSON in a cell", 'messages,image\n"[{",a.png\n', ["rows.csv:2", "'messages'"]),
]:
    add(f"rows: CSV with {name}", jsonl(content, name="rows.csv"), *words)
for name, content, words in [
    ("several lists", '{"train": [{"prompt": "?"}], "test": [{"prompt": "?"}]}', ["several lists"]),
    ("one conversation", '{"conversations": [{"from": "human", "value": "?"}]}', ["holds one dict"]),
]:
    add(f"rows: .json with {name}", jsonl(content, name="r.json"), *words)
for name, given, words in [
    ("two prompts", [SEEN | {"problem": "another"}], ["data.layout=trl", "data.layout=verl"]),
    ("an unknown speaker", [{"conversations": [{"from": "x", "value": "?"}], "image": "a.png"}], ["'x'"]),
    ("a null turn", [{"conversations": [None], "image": "a.png"}], ["conversations"]),
    ("a tag without objects", [{"messages": [{"role": "user", "content": "<ref-object>"}]}], ["<ref-object>"]),
    ("a reply that is null", [{"messages": [*ASKED, {"role": "assistant", "content": None}]}], ["messages"]),
]:  # fmt: skip
    add(f"rows: {name}, in a layout", rows(*given), *words)
for name, value, words in [
    ("a glob that matches nothing", "*.jsonl", ["no file matches"]),
    ("a split of a file", "rows.jsonl:train", ["does not exist"]),
    ("an empty folder", ".", ["holds no file"]),
    ("a list with a missing file", ["gone.jsonl"], ["gone.jsonl"]),
]:
    add(f"rows: {name}", lambda folder, value=value: lambda: by.use_rows(value), *words)
add("rows: .json with one row", jsonl('{"prompt": "?"}', name="r.json"), "holds one dict")
add(
    "rows: .json with rows a line", jsonl('{"prompt": "?"}\n{"prompt": "?"}', name="r.json"), "call it .jsonl"
)


@case("rows: a name that is not UTF-8", "does not exist")
def _(folder: Path) -> Call:
    return lambda: by.use_rows(os.fsdecode(b"\xff\xfe.jsonl"))


def saved(break_it: Callable[[Path], Any]) -> Callable[[Path], Call]:
    """A dataset written by save_to_disk, then damaged."""

    def make(folder: Path) -> Call:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_list([{"prompt": "?", "image": "a.png"}] * 50).save_to_disk(str(folder / "d"))
        break_it(folder / "d")
        return lambda: by.use_rows(folder / "d")

    return make


for name, break_it in {
    "cut in half": lambda d: cut(next(d.glob("*.arrow"))),
    "without its arrow file": lambda d: next(d.glob("*.arrow")).unlink(),
    "with an empty arrow file": lambda d: next(d.glob("*.arrow")).write_bytes(b""),
    "with noise for its arrow file": lambda d: next(d.glob("*.arrow")).write_bytes(os.urandom(300)),
    "with a cut state.json": lambda d: cut(d / "state.json"),
    "with an empty state.json": lambda d: (d / "state.json").write_text(""),
    "with a list for state.json": lambda d: (d / "state.json").write_text("[]"),
    "with an empty mapping for state.json": lambda d: (d / "state.json").write_text("{}"),
    "with a cut dataset_info.json": lambda d: cut(d / "dataset_info.json"),
    "with unknown features": lambda d: (d / "dataset_info.json").write_text('{"features": {"a": {"_type": "No"}}}'),
    "without dataset_info.json": lambda d: (d / "dataset_info.json").unlink(),
    "that is empty": lambda d: [each.unlink() for each in d.iterdir()],
}.items():  # fmt: skip
    add(f"rows: a saved dataset {name}", saved(break_it))
add("rows: noise for Parquet", jsonl(b"PAR1" + bytes(range(256)), name="r.parquet"), "r.parquet")
add("rows: text for Parquet", jsonl("hello", name="r.parquet"), "PAR1")
