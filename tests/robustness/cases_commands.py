"""Rewards, models, run folders and terminals, through `mm-grpo check` and `mm-grpo train`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import robustness.run_case as by
from robustness.cases import (
    ODD_FILES,
    ODD_NAMES,
    SEEN,
    Call,
    add,
    circle,
    closed_folder,
    cut,
    picture,
    written,
)

# rewards


def checked(
    *arguments: str, files: dict[str, str | bytes] | None = None, **changes: Any
) -> Callable[[Path], Call]:
    """`mm-grpo check` of a config that is sound but for the changes; a dict replaces fields, the rest sections."""

    def make(folder: Path) -> Call:
        picture(56, 56).save(folder / "a.png")
        (folder / "rows.jsonl").write_text(json.dumps(SEEN | {"answer": "red"}) + "\n")
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        path = written(folder, **changes)
        return lambda: by.command("check", path, *arguments)

    return make


for name, content, words in [
    ("a syntax error", "def f(completion:\n", ["r.py:1"]),
    ("nothing in the file", "", ["'f'"]),
    ("a name that is no function", "f = 3", ["f"]),
    ("an import that fails", "import no_such_package_of_mine", ["no_such_package_of_mine"]),
    ("an import that exits", "import sys\nsys.exit(0)", ["SystemExit"]),
    ("an import that raises", "raise RuntimeError('boom')", ["boom"]),
    ("not UTF-8", b"x = '\xff'\ndef f(completion): return 1", ["r.py"]),
    ("NUL bytes", b"def f(completion):\0 return 1", ["r.py"]),
    ("a column that is not there", "def f(completion, gold): return 1.0", ["gold"]),
    ("no argument", "def f(): return 1.0", ["f"]),
]:
    add(f"rewards: {name}", checked(rewards=["r.py:f"], files={"r.py": content}), *words)
for name, reward, words in [
    ("an unknown name", "exact_mtach", ["exact_match"]),
    ("a file that is not there", "no.py:f", ["no.py"]),
    ("a file without a name", "no.py:", ["no.py"]),
    ("a module that is not there", "no_such_module_of_mine:f", ["no_such_module_of_mine"]),
    ("a name of 300 characters", "x" * 300 + ".py:f", ["rewards"]),
    ("an argument that is not there", {"name": "exact_match", "thresold": 1}, ["thresold"]),
    ("a number", 3, ["rewards[0]"]),
]:
    add(f"rewards: {name}", checked(rewards=[reward]), *words)
add("rewards: none", checked(rewards=[]), "rewards = []")
for name, (make_odd, unix_user) in ODD_FILES.items():

    def odd_reward(folder: Path, make_odd: Any = make_odd) -> Call:
        call = checked(rewards=["r.py:f"])(folder)
        make_odd(folder / "r.py")
        return call

    add(f"rewards: {name}", odd_reward, "r.py", unix_user=unix_user)

# models

for name, files in {
    "nothing there": None,
    "an empty folder": {},
    "an empty config.json": {"config.json": ""},
    "a list for config.json": {"config.json": "[]"},
    "a cut config.json": {"config.json": '{"model_type": "qwen2_vl"'},
    "a config.json without a type": {"config.json": "{}"},
    "an unknown type": {"config.json": '{"model_type": "no_such_type"}'},
    "a type of text": {"config.json": '{"model_type": "llama"}'},
    "no processor": {"config.json": '{"model_type": "qwen2_vl"}'},
    "a config.json that is not UTF-8": {"config.json": b"\xff\xfe"},
}.items():

    def model_of(folder: Path, files: Any = files) -> Call:
        if files is not None:
            (folder / "m").mkdir()
            for file, content in files.items():
                (folder / "m" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        return checked(model={"path": str(folder / "m")})(folder)

    add(f"weights: {name}", model_of, "model.path", heavy=True)
for name, value in ODD_NAMES.items():
    add(f"weights: a path {name}", checked(model={"path": value}), "model.path", heavy="user" not in name)


def damaged(break_it: Callable[[Path], Any], *command: str) -> Callable[[Path], Call]:
    """`mm-grpo train`, or another command, with a copy of the tiny model that `break_it` has damaged."""

    def make(folder: Path) -> Call:
        shutil.copytree(folder / "MODEL", folder / "m", copy_function=shutil.copyfile)
        break_it(folder / "m")
        checked(model={"path": str(folder / "m")})(folder)
        return lambda: by.command(*(command or ("train",)), folder / "config.yaml")

    return make


WEIGHTS = "model.safetensors"
for name, break_it in {
    "cut in half": lambda m: cut(m / WEIGHTS),
    "that are not there": lambda m: (m / WEIGHTS).unlink(),
    "that are empty": lambda m: (m / WEIGHTS).write_bytes(b""),
    "that are noise": lambda m: (m / WEIGHTS).write_bytes(b"\xff" * 999),
    "that are a Git LFS pointer": lambda m: (m / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
    "with a cut tokenizer.json": lambda m: cut(m / "tokenizer.json"),
    "with an empty tokenizer.json": lambda m: (m / "tokenizer.json").write_text("{}"),
    "without chat template": lambda m: (m / "chat_template.jinja").unlink(),
    "with a broken chat template": lambda m: (m / "chat_template.jinja").write_text("{% for %}"),
    "with a chat template that raises": lambda m: (m / "chat_template.jinja").write_text("{{ raise_exception('x') }}"),
    "with cut image settings": lambda m: [cut(each) for each in m.glob("*processor*_config.json")] or cut(m / "none"),
}.items():  # fmt: skip
    add(f"weights: files {name}", damaged(break_it), heavy=True)

# run folders


def run_in(value: str, prepare: Callable[[Path], Any] = lambda folder: None) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        prepare(folder)
        checked(run={"dir": value}, model={"path": str(folder / "MODEL")})(folder)
        return lambda: by.command("train", folder / "config.yaml")

    return make


for name, value in ODD_NAMES.items():
    if name != "that is not there":
        add(f"run folder: {name}", run_in(value), "run.dir", heavy="user" not in name and "NUL" not in name)
add("run folder: a file", run_in("f", lambda d: (d / "f").write_text("mine")), "run.dir", heavy=True)
add("run folder: a FIFO", run_in("f", lambda d: os.mkfifo(d / "f")), "run.dir", heavy=True)
add("run folder: a circle of links", run_in("f", lambda d: circle(d / "f")), "run.dir", heavy=True)
add("run folder: below /proc", run_in("/proc/x/y"), "run.dir", heavy=True)
add("run folder: below a device", run_in("/dev/null/x"), "run.dir", heavy=True)
add(
    "run folder: a closed one",
    run_in("d/x", lambda d: closed_folder(d / "d")),
    "run.dir",
    heavy=True,
    unix_user=True,
)

# terminals that have not every character


for name, changes, words in [
    ("check of a Chinese column", {"data": {"columns": {"images": "\u56fe"}}}, ["data.columns.images"]),
    ("check of a name that is not UTF-8", {"data": {"train": "\udcff.jsonl"}}, [".jsonl"]),
    ("check of an unknown reward", {"rewards": ["\u03c0"]}, ["rewards"]),
    ("check of an unknown field", {"run": {"\u03c0": 1}}, ["run."]),
]:
    add(f"terminal: {name}", checked(**changes), *words, encoding="ascii")
add("terminal: check of a Chinese override", checked("run.\u56fe=1"), "run.", encoding="ascii")
add("terminal: check of half a character", checked("run.\udcff=1"), "run.", encoding="ascii")
NAMED = json.dumps(SEEN | {"image": "\u56fe.png", "answer": "a"})
CHINESE = json.dumps(SEEN | {"prompt": "\u56fe", "answer": "\u56fe"})
for name, make, options in [
    (
        "a Chinese name",
        checked(files={"rows.jsonl": NAMED}, model={"path": "MODEL"}),
        {"heavy": True},
    ),
    ("a config that is not there", lambda folder: lambda: by.command("check", "\u56fe.yaml"), {}),
    ("a broken row", checked(files={"a.png": b"\xff"}, model={"path": "MODEL"}), {"heavy": True}),
    (
        "a Chinese prompt",
        checked(files={"rows.jsonl": CHINESE}, model={"path": "MODEL"}),
        {"heavy": True, "code": 0},
    ),
]:
    add(f"terminal: check of {name}", make, encoding="ascii", **options)
