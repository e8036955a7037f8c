"""The recipes: their mappings on rows in the published form, and `check` and `train --smoke` of each."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.recipe_scripts import script

from mm_grpo.config import GRPOConfig
from mm_grpo.config.shipped import find_layers, find_recipes
from mm_grpo.data import load
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.errors import DataError

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = EXAMPLES.parent / "benchmarks" / "results" / "recipes_runs.md"
PUBLIC = ("clevr_count", "geometry3k", "refcoco_grounding", "chartqa", "docvqa", "multi_image", "clicking")
PREPARED = (*PUBLIC, "mixture")
RECIPES = ("shapes", "zoom", "digits", *PREPARED, "easy_vqa", "video_qa")


def prepare(recipe: str) -> ModuleType:
    return script(f"{recipe}/prepare.py")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_these_are_all_of_them() -> None:
    assert sorted(find_recipes()) == sorted(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_comment_says_command_hardware_and_outcome(recipe: str) -> None:
    comment = (EXAMPLES / recipe / "config.yaml").read_text().splitlines()[0]
    command, hardware = comment.split(";")[:2]
    assert comment.startswith("# ") and f"`mm-grpo train {recipe}`" in command
    assert "GPU of" in hardware or "CPU" in hardware
    if recipe in PREPARED:
        assert comment.endswith("not run on a GPU yet")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_readme_names_the_published_mark_or_says_that_there_is_none(recipe: str) -> None:
    """With the figures that the table of docs/recipes.md and the config's first comment have."""
    text = (EXAMPLES / recipe / "README.md").read_text()
    (mark,) = re.findall(r"(?s)\n\*\*Published mark\.\*\* (.*?)\n\n", text)
    page = (EXAMPLES.parent / "docs" / "recipes.md").read_text()
    (row,) = re.findall(rf"(?m)^\| `{recipe}` \|.*\| (.*) \|$", page)
    comment = (EXAMPLES / recipe / "config.yaml").read_text().splitlines()[0]
    is_none = re.search(r"\bnone\b", mark, re.IGNORECASE) is not None
    assert is_none == ("none known" in row or "measured on a CPU" in row)
    assert recipe not in PREPARED or is_none == ("no published figure" in comment)
    figures = set(re.findall(r"\d+\.\d+", row))
    assert figures <= set(re.findall(r"\d+\.\d+", mark)) and (figures or is_none)


@pytest.mark.parametrize("recipe", (*PUBLIC, "easy_vqa"))
def test_the_fixture_is_what_prepare_makes_of_published_rows(recipe: str) -> None:
    fixture = EXAMPLES / recipe / "fixture"
    mapped = script("make_fixtures.py").mapped
    assert lines(fixture / "train.jsonl") == mapped(recipe, lines(fixture / "published.jsonl"))
    config = GRPOConfig.from_yaml(EXAMPLES / recipe / "config.yaml")
    dataset = load(str(fixture / "train.jsonl"), config.data)
    assert 4 <= len(dataset) <= 10 and all(dataset.sample(i).images for i in range(len(dataset)))


def published(recipe: str) -> Any:
    """The fixture's published rows as the datasets library gives them: encoded images and their features."""
    from datasets import Dataset, Image, List

    fixture = EXAMPLES / recipe / "fixture"
    rows = lines(fixture / "published.jsonl")
    for row in rows:
        for column in {"image", "images"} & set(row):
            paths = row[column] if column == "images" else [row[column]]
            stored = [{"bytes": (fixture / path).read_bytes(), "path": path} for path in paths]
            row[column] = stored if column == "images" else stored[0]
    dataset = Dataset.from_list(rows)
    if "image" in dataset.column_names:
        return dataset.cast_column("image", Image())
    return dataset.cast_column("images", List(Image())) if "images" in dataset.column_names else dataset


@pytest.mark.parametrize("recipe", PUBLIC)
def test_prepare_writes_what_the_config_reads(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, *config: str, split: str) -> Any:
        asked.append((name, split))
        assert config == (("nlvr2",) if recipe == "multi_image" else ())
        copies = 4 if recipe in ("clevr_count", "multi_image") else 1
        return datasets.concatenate_datasets([published(recipe)] * copies)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    arguments = []
    if recipe == "refcoco_grounding":
        arguments = ["--coco", str(EXAMPLES / recipe / "fixture" / "coco"), "--eval-rows", "3"]
    module = prepare(recipe)
    module.main(arguments)
    assert {name for name, _ in asked} == {module.HUB}
    config = GRPOConfig.from_yaml(EXAMPLES / recipe / "config.yaml")
    train = load(config.data.train, config.data)
    drawn = load(str(EXAMPLES / recipe / "fixture" / "train.jsonl"), config.data)
    drawn_columns = [drawn.sample(index).other_columns for index in range(len(drawn))]
    assert train.sample(0).other_columns in drawn_columns
    counts = {name: len(load(source, config.data)) for name, source in config.data.eval_sets().items()}
    assert (len(train), counts) == {
        "clevr_count": (22, {"eval": 2}),  # 24 rows, a tenth held out
        "geometry3k": (6, {"test": 6, "validation": 6}),
        "refcoco_grounding": (8, {"eval": 3}),
        "chartqa": (6, {"validation": 6, "test": 6}),
        "docvqa": (6, {"eval": 6}),
        "multi_image": (22, {"eval": 2}),
        "clicking": (4, {"eval": 2}),
    }[recipe]


def test_without_a_network_prepare_ends_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    def load_dataset(name: str, split: str) -> Any:
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(EXAMPLES / "chartqa" / "prepare.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert leaving.value.code == 2 and len(said.splitlines()) == 1
    assert "HuggingFaceM4/ChartQA, split train: cannot be read from the hub (ConnectionError" in said
    assert "needs a network, once" in said and not (tmp_path / "train.jsonl").exists()


def test_the_mixture_prepares_its_four_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    parts = {prepare(part).HUB: part for part in prepare("mixture").PARTS}

    def load_dataset(name: str, split: str) -> Any:
        rows = published(parts[name])
        return datasets.concatenate_datasets([rows] * 4) if parts[name] == "clevr_count" else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare("mixture").main(["--out", str(tmp_path / "data")])
    monkeypatch.chdir(tmp_path)
    config = GRPOConfig.from_yaml(EXAMPLES / "mixture" / "config.yaml")
    train, sets = load_train(config), load_eval(config)
    assert list(train.weights) == [2, 2, 3, 1] and [len(part) for part in train.sources] == [22, 6, 6, 4]
    assert {train.sample(index).columns["task"] for index in range(len(train))} == {
        "count", "geometry", "chart", "click",
    }  # fmt: skip
    assert len(sets["all"]) == 2 + 6 + 6 + 2


def test_what_no_published_row_shows() -> None:
    said = {"user": 'Is "x" true?\nAnswer yes or no.', "assistant": "Maybe.", "source": "NLVR2"}
    with pytest.raises(DataError, match="neither yes nor no"):
        list(prepare("multi_image").to_rows({"images": ["a", "b"], "texts": [said]}))
    captions = {"captions": ["the lady ", "the lady", "", "lady in blue?"], "bbox": [0.0, 0.0, 1.0, 1.0]}
    made = prepare("refcoco_grounding").to_rows({"image_path": "x.jpg", **captions}, "../coco")
    asked = [one["prompt"].partition("?")[0] for one in made]
    assert asked == [f"Where in the image is this: {what}" for what in ("the lady", "lady in blue")]
    assert 70 <= sum(prepare("clicking").is_held_out(f"{n}.png") for n in range(500)) <= 130


LAYERS = [layer for layer in find_layers() if layer not in ("vllm", "offload", "qlora")]
TRAINED = {*RECIPES} - {"chartqa", "docvqa", "clicking", "easy_vqa"}
"""Those that share their reward and layout with none of the others."""
CELLS = [(recipe, LAYERS[at % len(LAYERS)]) for at, recipe in enumerate(RECIPES)]
"""Each recipe with one layer (recipes_runs.md has all pairs)."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "layer"), CELLS)
def test_a_smoke_run_trains_two_steps(recipe: str, layer: str, tmp_path: Path, command: Any) -> None:
    code, out, _ = command("check", recipe, layer, "--smoke", "--strict")
    assert code == 0 and out.rstrip().endswith("ok") and "1 / 1 / 1" in out, out
    if recipe not in TRAINED:
        return
    code, out, err = command("train", recipe, layer, "--smoke", f"run.dir={tmp_path}/run")
    assert code == 0, err
    assert "smoke: a tiny random model in place of " in out and "done: 2 steps" in out
    first, *steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [first["step"], *(step["step"] for step in steps)] == [0, 1, 2]
    entries = GRPOConfig.from_yaml(EXAMPLES / recipe / "config.yaml").rewards
    names = (entry if isinstance(entry, str) else entry.get("as", entry["name"]) for entry in entries)
    wanted = {name.rpartition(":")[2] for name in names}  # near of near.py:near
    scored = {name for name in wanted if any(f"rewards/{name}/mean" in step for step in steps)}
    # the 4 prompts of the mixture are of 2 or 3 of its tasks
    assert scored == wanted if recipe != "mixture" else len(scored) >= 3
    assert steps[0]["grad_norm"] > 0  # the learner had work
    assert (tmp_path / "run" / "report.html").is_file()


def test_every_recipe_and_every_layer_was_run() -> None:
    rows = [line.split("|")[1:-1] for line in RUNS.read_text().splitlines() if line.startswith("| ")]
    head, *table = [[cell.strip() for cell in row] for row in rows]
    assert head[1:] == [*find_layers()] and [row[0] for row in table] == [*find_recipes()]
    assert [row for row in table if not all(re.fullmatch(r"\d+ \+ \d+", cell) for cell in row[1:])] == []
