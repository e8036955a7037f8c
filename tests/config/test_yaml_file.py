"""Config files and overrides: what YAML means here, what breaks, and the way there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_grpo.config import GRPOConfig, apply_overrides
from mm_grpo.config.yaml_file import read_yaml, write_yaml
from mm_grpo.errors import ConfigError

pytestmark = pytest.mark.lowest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def read(file: Path, text: str) -> dict[str, Any]:
    file.write_text(text, encoding="utf-8")
    return read_yaml(file)


def test_scalars_are_those_of_yaml_1_2(file: Path) -> None:
    as_text = ("12:30", "off", "yes", "none")  # not in YAML 1.1
    other = {
        "1e-6": 1e-6, "1E6": 1e6, "-2.5e-3": -0.0025, ".5": 0.5, "1.": 1.0, "8": 8, "-3": -3, "0x10": 16, "true": True,
        "False": False, "null": None, "~": None, "": None, "'8'": "8", "[1e-3, off]": [0.001, "off"], "1_000": 1000,
    }  # fmt: skip
    for text, value in {**dict(zip(as_text, as_text, strict=True)), **other}.items():
        read_back = read(file, f"key: {text}\n")["key"]
        assert (read_back, type(read_back)) == (value, type(value)), text


def test_aliases_and_merge_keys_are_written_out(file: Path) -> None:
    text = "a: &a {x: 1, y: &y [1, 2]}\nb: {<<: *a, y: 3}\nc: [*a, *y, *a]\n"
    a = {"x": 1, "y": [1, 2]}
    assert read(file, text) == {"a": a, "b": {"x": 1, "y": 3}, "c": [a, [1, 2], a]}
    many = "a: &a [" + "x," * 2000 + "]\nb: [" + "*a," * 40 + "]\n"  # 82,000 values
    assert len(read(file, many)["b"]) == 40


def test_a_text_that_says_redacted_is_no_key_that_was_left_out(file: Path) -> None:
    says = {"data": {"system_prompt": "<redacted>"}, "rewards": [{"name": "contains", "text": "<redacted>"}]}
    config = GRPOConfig.from_dict({"model": {"path": "m"}, **says})
    config.save(file)
    assert GRPOConfig.from_yaml(file) == config
    secret = config.with_values({"rewards": [{"name": "judge", "api_key": "s3cret", "text": "<redacted>"}]})
    secret.save(file)
    assert "s3cret" not in file.read_text()
    with pytest.raises(ConfigError, match="<redacted>: keys are not saved"):
        GRPOConfig.from_yaml(file)


def test_an_empty_file_and_a_byte_order_mark(file: Path) -> None:
    assert read(file, "# nothing yet\n") == {}
    assert read(file, "\ufeffrun: {seed: 1}\n") == {"run": {"seed": 1}}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.seed=7", "run.seed", 7),
        ("optim.learning_rate=1e-5", "optim.learning_rate", 1e-5),
        ("data.system_prompt=null", "data.system_prompt", None),
        ("rewards=[iou, {name: exact, weight: 2}]", "rewards", ["iou", {"name": "exact", "weight": 2}]),
        ("data.system_prompt=Count # of cats", "data.system_prompt", "Count # of cats"),
        ("data.system_prompt=Answer: yes or no", "data.system_prompt", "Answer: yes or no"),
        ('data.system_prompt="a\\nb"', "data.system_prompt", "a\nb"),
        ("run.guards.update_happens=off", "run.guards.update_happens", "off"),
        ("rewards.0.weight=3", "rewards.0.weight", 3),
    ],
)
def test_an_override_sets_one_value(override: str, path: str, value: object) -> None:
    mapping = {"run": {"seed": 1}, "rewards": [{"name": "iou"}], "model": None}
    node: Any = apply_overrides(mapping, [override])
    for key in path.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
    assert (node, type(node)) == (value, type(value))
    assert mapping == {"run": {"seed": 1}, "rewards": [{"name": "iou"}], "model": None}


def test_paths_beside_the_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipe"
    (folder / "base").mkdir(parents=True)
    for name in ("rows.jsonl", "held.jsonl", "mine.py"):
        (folder / name).touch()
    (folder / "config.yaml").write_text(
        "model: {path: base, processor: 'mine.py:Mine'}\n"
        "data: {train: rows.jsonl, eval: {a: held.jsonl, b: elsewhere.jsonl, c: {task: shapes}}}\n"
        "rewards: [mine.py:fn, {name: 'mine.py:other', weight: 2}, exact_match, 'gone.py:fn']\n"
    )
    monkeypatch.chdir(tmp_path)
    config = GRPOConfig.from_yaml("recipe/config.yaml")
    assert (config.model.path, config.model.processor) == ("recipe/base", "recipe/mine.py:Mine")
    assert GRPOConfig.from_yaml("recipe/config.yaml", ["model.path=base"]).model.path == "base"
    assert config.data.train == "recipe/rows.jsonl"
    assert config.data.eval == {"a": "recipe/held.jsonl", "b": "elsewhere.jsonl", "c": {"task": "shapes"}}
    assert config.rewards == [
        "recipe/mine.py:fn", {"name": "recipe/mine.py:other", "weight": 2}, "exact_match", "gone.py:fn",
    ]  # fmt: skip


def test_globs_and_splits_beside_the_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a[1]"
    (folder / "saved").mkdir(parents=True)
    (folder / "rows-1.jsonl").touch()
    (folder / "iou").touch()  # a reward's name, and no path
    (folder / "config.yaml").write_text(
        "model: {path: m}\nrewards: [iou]\n"
        "data: {train: [rows-*.jsonl, 'saved:train', gone.jsonl], eval: {a: 'rows-?.jsonl', b: 'own/er:test'}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = GRPOConfig.from_yaml("a[1]/config.yaml")
    assert config.data.train == ["a[[]1]/rows-*.jsonl", "a[1]/saved:train", "gone.jsonl"]
    assert config.data.eval == {"a": "a[[]1]/rows-?.jsonl", "b": "own/er:test"}
    assert config.rewards == ["iou"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mapping=st.dictionaries(st.text(), VALUES, max_size=3))
def test_any_plain_mapping_reads_back_equal(file: Path, mapping: dict[str, Any]) -> None:
    file.write_text(write_yaml(mapping), encoding="utf-8", newline="")
    assert read_yaml(file) == mapping
