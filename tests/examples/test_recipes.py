"""The recipes: their mappings on rows in the published form, and `check` and `train --smoke` of each."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import processes

from mm_grpo import cli
from mm_grpo.cli.configs import find_recipes
from mm_grpo.config import GRPOConfig
from mm_grpo.data import load

EXAMPLES = Path(__file__).parents[2] / "examples"
PREPARED = ("clevr_count", "geometry3k", "refcoco_grounding")
RECIPES = ("shapes", "zoom", *PREPARED)


def prepare(recipe: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"prepare_{recipe}", EXAMPLES / recipe / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["mm-grpo", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0


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


@pytest.mark.parametrize("recipe", PREPARED)
def test_the_fixture_is_what_prepare_makes_of_published_rows(recipe: str) -> None:
    fixture = EXAMPLES / recipe / "fixture"
    mapped = runpy.run_path(str(EXAMPLES / "make_fixtures.py"), run_name="fixtures")["mapped"]
    assert lines(fixture / "train.jsonl") == mapped(recipe, lines(fixture / "published.jsonl"))
    config = GRPOConfig.from_yaml(EXAMPLES / recipe / "config.yaml")
    dataset = load(str(fixture / "train.jsonl"), config.data)
    assert 4 <= len(dataset) <= 10 and list(dataset.check()) == []


def test_the_mapping_of_clevr() -> None:
    row = {"image": "x.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}
    assert prepare("clevr_count").to_row(row) == {
        "prompt": "How many? Think first, inside <think> </think>. Then give the number alone, inside "
        "<answer> </answer>.",
        "image": "x.png",
        "answer": "3",
    }


def test_the_mapping_of_geometry3k() -> None:
    row = {"images": ["x.png"], "problem": "<image>Find x. ", "answer": r" 5 \sqrt { 2 } "}
    assert prepare("geometry3k").to_row(row) == {
        "prompt": r"<image>Find x. Think first, inside <think> </think>. Then give the final answer inside \boxed{}.",
        "images": ["x.png"],
        "answer": r"5 \sqrt { 2 }",
    }


def test_the_mapping_of_refcoco() -> None:
    row = {
        "image_path": "coco/train2014/COCO_train2014_000000581857.jpg",
        "bbox": [103.5, 300.0, 238.25, 477.5],
        "captions": ["the lady ", "the lady", "", "lady in blue?"],
    }
    made = list(prepare("refcoco_grounding").to_rows(row, "../coco"))
    assert [one["prompt"].split(". ")[0] for one in made] == [
        "Where in the image is this: the lady? Think first, inside <think> </think>",
        "Where in the image is this: lady in blue? Think first, inside <think> </think>",
    ]
    assert {one["image"] for one in made} == {"../coco/train2014/COCO_train2014_000000581857.jpg"}
    assert [one["box"] for one in made] == [[103.5, 300.0, 238.25, 477.5]] * 2


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


@pytest.mark.parametrize("recipe", PREPARED)
def test_prepare_writes_what_the_config_reads(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, *, split: str) -> Any:
        asked.append((name, split))
        rows = published(recipe)
        return rows if recipe != "clevr_count" else datasets.concatenate_datasets([rows] * 4)

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
    assert (
        train.sample(0).columns
        == load(str(EXAMPLES / recipe / "fixture" / "train.jsonl"), config.data).sample(0).columns
    )
    counts = {name: len(load(source, config.data)) for name, source in config.data.eval_sets().items()}
    assert (len(train), counts) == {
        "clevr_count": (22, {"eval": 2}),  # 24 rows, a tenth held out
        "geometry3k": (6, {"test": 6, "validation": 6}),
        "refcoco_grounding": (8, {"eval": 3}),
    }[recipe]


def test_refcoco_needs_the_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        prepare("refcoco_grounding").main(["--coco", str(tmp_path)])
    assert leaving.value.code == 2
    assert "there is no folder train2014 in it" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", RECIPES)
def test_check_passes_on_the_fixture(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "check", recipe, "--smoke")
    out = capsys.readouterr().out
    assert code == 0 and out.rstrip().endswith("ok"), out
    assert "1 / 1 / 1" in out and "problem" not in out


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_smoke_run_trains_two_steps(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "train", recipe, "--smoke", f"run.dir={tmp_path}/run")
    got = capsys.readouterr()
    assert code == 0, got.err
    assert "smoke: a tiny random model in place of " in got.out and "not that it learns" in got.out
    assert (
        f"done: 2 steps in {json.loads((tmp_path / 'run' / 'summary.json').read_text())['seconds']:.0f} s"
        in got.out
    )
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [0, 1, 2]
    steps = steps[1:]
    for entry in GRPOConfig.from_yaml(EXAMPLES / recipe / "config.yaml").rewards:
        assert f"rewards/{entry if isinstance(entry, str) else entry['name']}/mean" in steps[0]
    assert steps[0]["grad_norm"] > 0  # the learner had work
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_model_of_no_known_family_cannot_be_smoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        monkeypatch, "train", "clevr_count", "--smoke", "model.path=some/thing", f"run.dir={tmp_path}/run"
    )
    assert code == 2
    assert "model.path = 'some/thing': a tiny stand-in can be built for qwen2_vl" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("command", ["check", "train"])
def test_the_command_itself(command: str, recipe: str, tmp_path: Path) -> None:
    """In a process of its own, from a folder where no data was prepared; without run.dir nothing is left."""
    program = ["-m", "mm_grpo.cli", command, recipe, "--smoke"]
    settings = {"PYTHONPATH": str(EXAMPLES.parent), "TMPDIR": str(tmp_path)}
    code, said = processes.finished(program, tmp_path / "said.txt", cwd=tmp_path, **settings)
    assert code == 0, said
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("mm_grpo_")]
    assert left == [] and ("results are not kept" in said) == (command == "train")
