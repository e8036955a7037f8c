"""Config files, overrides and configs made in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import robustness.run_case as by
from mm_grpo.config import GRPOConfig
from robustness.cases import (
    ODD_FILES,
    ODD_NAMES,
    Call,
    add,
    case,
    written,
)


def yaml_of(text: str | bytes) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        path = folder / "config.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return lambda: GRPOConfig.from_yaml(path)

    return make


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
for name, text, words in [
    ("a list that holds itself", "a: &a [*a]", ["config.yaml", "*a", "inside what it names"]),
    ("a mapping that holds itself", "model: &m\n  path: x\n  lora: *m\n", ["inside what it names"]),
    ("a merge of itself", "model: &m\n  <<: *m\n  path: x\n", ["inside what it names"]),
    ("a billion laughs", LAUGHS, ["more than 20000 values"]),
    ("a billion merged laughs", MERGES, ["more than 20000 values"]),
    ("an alias without anchor", "model: *m", ["not valid YAML"]),
    ("brackets without end", "a: " + "[" * 20_000, ["not valid YAML"]),
    ("indents without end", "".join(" " * n + "a:\n" for n in range(400)), ["config.yaml"]),
    ("a megabyte", "# " + "x" * 1_000_000, ["at most 200000 bytes"]),
    ("a key twice", "model: {path: m, path: n}", ["given twice"]),
    ("a list as key", "? [a]\n: b", ["unhashable"]),
    ("a Python object", "model: !!python/object/apply:os.system ['true']", ["not valid YAML"]),
    ("an unknown tag", "model: !secret x", ["not valid YAML"]),
    ("two documents", "model: {path: m}\n---\nmodel: {path: n}", ["not valid YAML"]),
    ("a list at the top", "- a", ["mapping of sections"]),
    ("a text at the top", "hello", ["mapping of sections"]),
    ("nothing", "", ["model.path is missing"]),
    ("only a comment", "# later", ["model.path is missing"]),
    ("not UTF-8", b"model: {path: \xff\xfe}", ["UTF-8"]),
    ("UTF-16", "model: {path: m}".encode("utf-16"), ["UTF-8"]),
    ("NUL bytes", b"model: {path: 'a\0b'}", ["not valid YAML"]),
    ("a NUL escape in a path", 'model: {path: "a\\0b"}', ["model.path", "NUL"]),
    ("half a character", 'model: {path: "\\ud800", nope: 1}', ["model.nope"]),
    ("a tab for indent", "model:\n\tpath: m", ["line 2"]),
    ("an image as config", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["UTF-8"]),
    ("a number as section", "model: 3", ["must be a section"]),
    ("an unknown section", "modle: {path: m}\nmodel: {path: m}", ["modle", "model"]),
    ("an unknown field", "model: {path: m, lroa: {}}", ["model.lroa", "model.lora"]),
    ("NaN as learning rate", "model: {path: m}\noptim: {learning_rate: .nan}", ["optim.learning_rate"]),
    ("infinity as temperature", "model: {path: m}\nrollout: {temperature: .inf}", ["rollout.temperature"]),
    ("a rank of 1e9", "model: {path: m, lora: {rank: 1000000000}}", ["model.lora.rank", "16384"]),
    ("a rank of 0", "model: {path: m, lora: {rank: 0}}", ["model.lora.rank"]),
    ("a negative seed", "model: {path: m}\nrun: {seed: -1}", ["run.seed"]),
    ("5000 digits", "model: {path: m}\nrun: {seed: " + "9" * 5000 + "}", ["config.yaml"]),
    ("a million million generations", "model: {path: m}\nrollout: {num_generations: 1000000000000}", ["seeds"]),
    ("an empty path", "model: {path: ''}", ["model.path"]),
    ("an unknown user as model", "model: {path: ~nobody-of-this-name/m}", ["model.path", "no user"]),
    ("an unknown user as rows", "model: {path: m}\ndata: {train: ~nobody-of-this-name/m}", ["data.train", "no user"]),
    ("an unknown user as eval", "model: {path: m}\ndata: {eval: {a: ~nobody-of-this-name/m}}", ["data.eval"]),
    ("an unknown user as images", "model: {path: m}\ndata: {image_dir: ~nobody-of-this-name/m}", ["data.image_dir"]),
    ("an unknown user as run", "model: {path: m}\nrun: {dir: ~nobody-of-this-name/m}", ["run.dir", "no user"]),
    ("an unknown user as reward", "model: {path: m}\nrewards: ['~nobody-of-this-name/m.py:f']", ["rewards", "no user"]),
    ("a name of 300 characters as rows", "model: {path: m}\ndata: {train: " + "x" * 300 + ", y: 1}", ["data.y"]),
    ("eval without sets", "model: {path: m}\ndata: {eval: {}}", ["data.eval", "names no set"]),
    ("eval set named by a path", "model: {path: m}\ndata: {eval: {../a: b}}", ["data.eval"]),
    ("a list of numbers as rows", "model: {path: m}\ndata: {train: [1, 2]}", ["data.train"]),
    ("columns as list", "model: {path: m}\ndata: {columns: [image]}", ["data.columns"]),
    ("columns to a number", "model: {path: m}\ndata: {columns: {image: 3}}", ["data.columns"]),
    ("rewards as mapping", "model: {path: m}\nrewards: {iou: 1}", ["rewards"]),
    ("a reward without name", "model: {path: m}\nrewards: [{weight: 1}]", ["rewards[0]"]),
    ("a weight of NaN", "model: {path: m}\nrewards: [{name: iou, weight: .nan}]", ["weight"]),
]:  # fmt: skip
    add(f"config: {name}", yaml_of(text), *words)
for name, (make_odd, unix_user) in ODD_FILES.items():

    def odd_config(folder: Path, make_odd: Any = make_odd) -> Call:
        make_odd(folder / "c.yaml")
        return lambda: GRPOConfig.from_yaml(folder / "c.yaml")

    words = ("model.path is missing",) if name == "an empty file" else ("c.yaml",)
    add(f"config: {name}", odd_config, *words, unix_user=unix_user)
for name, value in ODD_NAMES.items():
    if "user" not in name:
        add(f"config: a name {name}", lambda folder, value=value: lambda: GRPOConfig.from_yaml(value))
    add(f"config: an image_dir {name}", lambda folder, value=value: _row_of_image(folder, value))


def _row_of_image(folder: Path, image_dir: str) -> Call:
    path = folder / "config.yaml"
    path.write_text(json.dumps({"model": {"path": "m"}, "data": {"image_dir": image_dir}}))
    rows = [{"prompt": "?", "image": "a.png"}]
    return lambda: by.use_rows(rows, **GRPOConfig.from_yaml(path).data.model_dump(include={"image_dir"}))


@case("config: a mapping of Python that holds itself", "itself")
def _(folder: Path) -> Call:
    entry: dict[str, Any] = {"name": "iou"}
    entry["more"] = entry
    return lambda: GRPOConfig.from_dict({"model": {"path": "m"}, "rewards": [entry]})


@case("config: a config of Python that holds itself", "a list holds paths")
def _(folder: Path) -> Call:
    values: dict[str, Any] = {"model": {"path": "m"}}
    values["data"] = {"train": [values]}
    return lambda: GRPOConfig.from_dict(values)


@case("config: home folders are found everywhere", code=0)
def _(folder: Path) -> Call:
    values = {
        "model": {"path": "~/m"},
        "data": {"train": "~/t.jsonl", "eval": {"a": "~/e.jsonl"}, "image_dir": "~/i"},
        "rewards": ["~/r.py:f", {"name": "~/r.py:f"}],
        "run": {"dir": "~/out"},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))

    def call() -> None:
        config = GRPOConfig.from_yaml(path)
        assert "~" not in config.to_yaml() and config.run.dir == f"{os.environ['HOME']}/out"

    return call


for name, override, words in [
    ("without =", "run.seed", ["section.key=value"]),
    ("of an empty key", "=1", ["section.key=value"]),
    ("into a number", "run.seed.x=1", ["run.seed"]),
    ("with an endless alias", "rewards=[&a [*a]]", ["inside what it names"]),
    ("with open brackets", "rewards=[", ["not valid YAML"]),
    ("past a list", "rewards.7.weight=1", ["rewards"]),
    ("with NUL", "run.dir=a\0b", ["run.dir"]),
    ("of a field that is not there", "run.sede=1", ["run.seed"]),
    ("of half a character", "run.sede=\udcff", ["run.seed"]),
]:

    def overridden(folder: Path, override: str = override) -> Call:
        path = written(folder)
        return lambda: GRPOConfig.from_yaml(path, [override])

    add(f"config: an override {name}", overridden, *words)
