"""Mixtures: what a config and Python may write, whose rows are whose, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from reading import config, write_rows

from mm_grpo import GRPOConfig
from mm_grpo.build import plan_run
from mm_grpo.data import Mixture
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.run.inputs import inputs_of

BOXES = [{"prompt": f"Where is {i}?", "image": "a.png", "box": [0, 0, i, 1]} for i in range(3)]
COUNTS = [{"question": f"How many {i}?", "picture": "b.png", "label": str(i)} for i in range(2)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """boxes/rows.jsonl and counts/rows.jsonl, each with its images beside it."""
    for name, rows, colour in (("boxes", BOXES, "red"), ("counts", COUNTS, "blue")):
        file = write_rows(tmp_path / name / "rows.jsonl", *rows)
        Image.new("RGB", (8, 8), colour).save(file.with_name("a.png" if name == "boxes" else "b.png"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COUNT_ENTRY = {
    "path": "counts/rows.jsonl",
    "columns": {"prompt": "question", "image": "picture", "answer": "label"},
    "system_prompt": "Count.",
    "task": "count",
}


def two(**more: Any) -> list[Any]:
    return [{"path": "boxes/rows.jsonl", "weight": 3, "task": "grounding"}, COUNT_ENTRY | more]


def uids(rows: Any) -> list[str]:
    return [rows.uid(i) for i in range(len(rows))]


def test_each_source_is_read_with_its_own_settings(files: Path) -> None:
    mixed = load_train(config(two()))
    assert [part.name for part in mixed.sources] == ["train/rows", "train/rows-2"]
    shown = {"prompt", "images", "image", "messages", "problem", "question", "picture"}
    assert list(mixed.weights) == [3, 1] and {*mixed.columns} - shown == {"box", "task", "answer", "label"}
    samples = [mixed.sample(i) for i in range(5)]
    names = ["train/rows:0", "train/rows:1", "train/rows:2", "train/rows-2:0", "train/rows-2:1"]
    assert [s.uid for s in samples] == uids(mixed) == names
    assert [mixed.row_name(i) for i in (2, 3)] == ["boxes/rows.jsonl:3", "counts/rows.jsonl:1"]
    assert samples[1].other_columns == {"box": [0, 0, 1, 1], "task": "grounding"}
    assert samples[4].other_columns == {"answer": "1", "task": "count"}
    assert [s.images[0].getpixel((0, 0)) for s in samples] == [(255, 0, 0)] * 3 + [(0, 0, 255)] * 2
    assert [[m["role"] for m in samples[i].messages] for i in (0, 3)] == [["user"], ["system", "user"]]
    with pytest.raises(IndexError):
        mixed.sample(5)


def test_what_an_entry_may_be(files: Path) -> None:
    (files / "more.jsonl").write_text(json.dumps(BOXES[0] | {"image": "boxes/a.png"}) + "\n")
    mixed = load_train(config([{"path": "boxes/rows.jsonl", "weight": 2.5}, "more.jsonl"]))
    assert list(mixed.weights) == [5, 2] and mixed.sample(3).uid == "train/more:0"
    joined = load_train(config(["boxes/rows.jsonl", "more.jsonl"]))
    # strings alone are no mixture
    assert joined.sample(3).uid == "train:3" and list(joined.sources) == [joined]
    alone = load_train(config({"path": "boxes/rows.jsonl", "task": "grounding"}))
    assert alone.sample(0).uid == "train/rows:0" and alone.sample(0).columns["task"] == "grounding"
    shapes = {"task": "shapes", "split": "train", "size": 4, "image_size": 56}
    drawn = load_train(config([shapes, {"path": shapes | {"seed": 9}, "weight": 2, "text_only": False}]))
    assert [part.name for part in drawn.sources] == ["train/shapes", "train/shapes-2"] and len(drawn) == 8
    several = load_train(config([{"path": ["boxes/*.jsonl", "boxes/rows.jsonl"]}, shapes]))
    assert [len(part) for part in several.sources] == [6, 4]


def test_python_gives_rows_and_datasets_in_a_mixture(files: Path) -> None:
    rows = [row | {"image": Image.new("RGB", (4, 4))} for row in BOXES]
    table = datasets.Dataset.from_list([{"prompt": "?", "image": "boxes/a.png", "answer": "x"}])
    mixture = Mixture([{"path": rows, "weight": 2, "task": "grounding"}, {"path": table}, "boxes/rows.jsonl"])
    mixed = load_train(config(), mixture)
    assert list(mixed.weights) == [2, 1, 1]
    assert uids(mixed)[2:5] == ["train/source-1:2", "train/source-2:0", "train/rows:0"]
    assert mixed.sample(3).other_columns == {"answer": "x"}
    with pytest.raises(DataError, match="is a Dataset, which has its name"):
        load_train(config(), Mixture([load_train(config(), rows), rows]))


def test_paths_of_entries_start_at_the_config_file(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = files / "config.yaml"
    config([{"path": "boxes/rows.jsonl", "weight": 3, "image_dir": "boxes"}, "counts/rows.jsonl"]).save(file)
    monkeypatch.chdir("/")
    read = GRPOConfig.from_yaml(file, ["data.train.0.weight=2"])
    boxes = {"path": f"{files}/boxes/rows.jsonl", "weight": 2, "image_dir": f"{files}/boxes"}
    assert read.data.train == [boxes, f"{files}/counts/rows.jsonl"]
    assert read.from_dict(read.model_dump()) == read
    inputs = [path for field, path in inputs_of(read) if field == "data.train"]
    assert inputs == [f"{files}/boxes/rows.jsonl", f"{files}/boxes", f"{files}/counts/rows.jsonl"]


def test_an_evaluation_set_may_have_several_sources_with_tasks_but_no_weights(files: Path) -> None:
    both = [{"path": "boxes/rows.jsonl", "task": "grounding"}, COUNT_ENTRY]
    found = load_eval(config(eval={"all": both, "count": COUNT_ENTRY}))
    assert {name: len(rows) for name, rows in found.items()} == {"all": 5, "count": 2}
    assert found["all"].sample(3).uid == "all/rows-2:0" and found["all"].by_task
    assert found["count"].sample(0).columns["task"] == "count"
    one = load_eval(config(eval=COUNT_ENTRY))
    assert list(one) == ["eval"] and len(one["eval"]) == 2
    with pytest.raises(ConfigError, match=r"the set all, .*weight is for data\.train"):
        config(eval={"all": two()})
    with pytest.raises(DataError, match="eval: weight is for training"):
        load_eval(config(), Mixture(two()))


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("wieght", 1)])
def test_a_wrong_entry_is_named_by_its_number_and_key(key: str, value: Any) -> None:
    wrong = {"path": "a.jsonl", key: value}
    with pytest.raises(ConfigError, match=rf"^data\.train = .*entry 2, .*{key}"):
        config(["b.jsonl", wrong])
    with pytest.raises(DataError, match=f"^entry 2 of the mixture: .*{key}"):
        Mixture(["b.jsonl", wrong])


def test_a_column_that_the_rows_have_is_not_written_over(files: Path) -> None:
    row = {"prompt": "?", "image": "boxes/a.png", "task": "mine"}
    (files / "own.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"train/own: task='count' is to be put on every row, and the rows"):
        load_train(config([{"path": "own.jsonl", "task": "count"}]))
    renamed = {"path": "own.jsonl", "task": "count", "columns": {"kind": "task"}}
    assert load_train(config([renamed])).sample(0).other_columns == {"kind": "mine", "task": "count"}


def test_the_fingerprint_covers_every_source_and_the_ratio_of_weights(files: Path) -> None:
    def of(train: list[Any]) -> dict[str, Any]:
        return load_train(config(train)).fingerprint()

    first = of(two())
    sources = [(s["name"], s["weight"], s["rows"]) for s in first["sources"]]
    assert first["rows"] == 5 and sources == [("train/rows", 3, 3), ("train/rows-2", 1, 2)]
    boxes, counts = two(weight=2)
    assert of(two()) == of([boxes | {"weight": 6}, counts]) == first  # the ratio counts
    for other in (two(weight=2), two(task="other"), two()[::-1]):
        assert of(other) != first
    write_rows(files / "counts" / "rows.jsonl", COUNTS[0], COUNTS[1] | {"label": "7"})
    other = of(two())
    assert [a == b for a, b in zip(first["sources"], other["sources"], strict=True)] == [True, False]


def test_metrics_are_made_by_task_only_where_tasks_are_few(files: Path) -> None:
    def rows(*tasks: Any) -> list[dict[str, Any]]:
        return [{"prompt": "?", "image": Image.new("RGB", (4, 4)), "task": task} for task in tasks]

    def by_task(*tasks: Any) -> bool:
        return load_train(config(), rows(*tasks)).by_task

    assert load_train(config(two())).by_task and by_task("a", "b", None)
    assert by_task(*(str(i) for i in range(32))) and not by_task(*(str(i) for i in range(33)))
    assert not by_task(1, 2) and not by_task("a" * 65) and not by_task(["a"]) and not by_task(None)
    assert not load_train(config(["boxes/rows.jsonl"])).by_task


def test_the_plan_of_a_mixture(files: Path) -> None:
    settings = config(two()).with_values({"rollout.prompts_per_step": 4})
    plan = plan_run(settings, load_train(settings))
    # 3 of 4 prompts are boxes (3 rows, 4 prompts an epoch), 1 of 4 counts (2 rows, 8 prompts an epoch)
    epochs = {"epoch": 1.0, "epoch/rows": 2.0, "epoch/rows-2": 1.0}
    assert plan.max_steps == 2 and plan.order.epochs(2) == epochs
    assert sorted(plan.order.rows(1) + plan.order.rows(2)) == [0, 0, 1, 1, 2, 2, 3, 4]


def test_the_mixture_of_the_docs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    written = re.search(r"<!-- mixture -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert written is not None
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 4)).save("a.png")
    boxes = {"prompt": "Where?", "image": "a.png", "box": [0, 0, 1, 1]}
    counts = {"question": "How many?", "picture": "a.png", "label": "3"}
    charts = {"prompt": "What?", "image": "a.png", "answer": "4", "task": "chart"}
    rows = {"boxes": boxes, "counts": counts, "charts": charts, "boxes_test": boxes, "charts_test": charts}
    for name, row in rows.items():
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    Path("config.yaml").write_text("model: {path: m}\n" + written[1])
    settings = GRPOConfig.from_yaml("config.yaml")
    scorer = Scorer(settings.rewards)
    mixed = load_train(settings, needs=scorer.check)
    assert [mixed.sample(i).columns["task"] for i in range(3)] == ["grounding", "count", "chart"]
    assert list(mixed.weights) == [3, 1, 1]
    assert mixed.order(1, 0, False).names == ["boxes", "counts", "charts"]
    assert mixed.sample(1).messages[0] == {"role": "system", "content": "Answer with a number."}
    found = load_eval(settings, needs=scorer.check)
    assert {name: len(rows) for name, rows in found.items()} == {"boxes": 1, "all": 2}
