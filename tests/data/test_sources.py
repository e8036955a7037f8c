"""Where rows come from: text files, rows in memory, tasks; and what is wrong with those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reading import colour_of, config, numbered, numbers_of, png, read, refusal, write_rows

from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load, load_eval, load_train
from mm_grpo.errors import DataError, UserError
from mm_grpo.rewards.scorer import Scorer

pytestmark = pytest.mark.lowest

ROW = {"prompt": "?", "answer": 1}


def test_jsonl_with_images_beside_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", ROW, {"prompt": "Which?", "image": "images/a.png"})
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png("red"))
    dataset = read(str(path))
    assert len(dataset) == 2
    assert dataset.sample(0).other_columns == {"answer": 1}
    assert colour_of(dataset.sample(1).images[0]) == (255, 0, 0)
    assert dataset.sample(1).uid == "train:1" and dataset.row_name(1) == f"{path}:2"
    with pytest.raises(DataError, match=rf"^{path}:2: image 'images/a.png' cannot be read .* /nowhere"):
        read(path, image_dir="/nowhere").sample(1)


def test_jsonl_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    first = b'\xef\xbb\xbf{"prompt": "one\xe2\x80\xa8line"}\r\n'
    path.write_bytes(first + b'\n{"prompt": "two"}\n  \n{"prompt": null}')
    assert refusal(path).startswith(f"{path}:5: 'prompt' is null")
    dataset = load(path, config().data, verify=False)
    assert [dataset.row_name(i) for i in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert dataset.sample(0).messages[0]["content"] == "one\u2028line"


def test_a_line_that_changes_during_a_run_is_noticed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *numbered(1, 2))
    dataset = read(path)
    path.open("a").write('{"prompt": "?", "n": 3}\n')  # more lines do no harm
    assert [dataset.fields(i).columns["n"] for i in (0, 1)] == [1, 2] and len(dataset) == 2
    with path.open("r+") as file:
        file.write('{"prompt": "!"')
    with pytest.raises(DataError, match=rf"^{path}:1: the file changed"):
        dataset.fields(0)


def test_json_is_a_list_or_an_object_with_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for held in (numbered(1, 2), {"version": 1, "data": numbered(1, 2)}):
        path.write_text(json.dumps(held))
        assert numbers_of(path) == [1, 2]
    path.write_text(json.dumps([ROW, {"prompt": None}]))
    assert refusal(path).startswith(f"{path} row 1: 'prompt' is null")
    for held in ({"prompt": "?", "image": "a.png"}, [], 3):
        path.write_text(json.dumps(held))
        assert refusal(path).startswith(f"{path}: is no list of rows")
    write_rows(path, ROW, ROW)
    assert refusal(path).startswith(f"{path}: is not valid JSON") and ".jsonl" in refusal(path)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    text = '\ufeffprompt,image,answer,note\r\n"What, then?",a.png,007,\r\n?,,"two\nlines",x\r\n'
    path.write_bytes(text.encode())
    dataset = read(path)
    assert dataset.fields(0).other_columns == {"answer": "007", "note": None}
    assert (dataset.fields(0).images, dataset.fields(1).images) == (("a.png",), ())
    assert dataset.fields(1).other_columns == {"answer": "two\nlines", "note": "x"}
    assert [dataset.row_name(i) for i in (0, 1)] == [f"{path}:2", f"{path}:4"]
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("prompt\tn\nA, or B?\t3\n")
    assert read(tabs).fields(0).other_columns == {"n": "3"}
    path.write_text('prompt,"a; b; c"\n?,1\n')  # a separator within quotes is none
    assert read(path).fields(0).other_columns == {"a; b; c": "1"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", (": is empty",)),
        ("a.csv", b'prompt,n\n"a,1\n', (":2: is not valid CSV",)),
        ("a.csv", b"prompt,n\n\xff,1\n", (":1: is not valid CSV", "UTF-8")),
        ("a.csv", b"prompt,n\na\n", (":2: is not valid CSV", "as many cells as")),
    ],
)
def test_a_broken_file(name: str, content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert message.startswith(f"{tmp_path}/{name}{words[0]}")
    assert all(word in message for word in words), message


def test_rows_in_memory() -> None:
    dataset = load([ROW], config().data, "eval")
    assert dataset.sample(0).uid == "eval:0"
    assert read(dataset) is dataset
    for nothing in ([], (row for row in [ROW]), None):
        assert "'train'" in refusal(nothing) or refusal(nothing).startswith("train: ")


def test_rows_are_made_by_a_function_of_a_file_beside_the_config(tmp_path: Path) -> None:
    code = "def rows(size, word='red'):\n    return [{'prompt': f'{word} {n}', 'answer': n} for n in range(size)]\n"
    (tmp_path / "own.py").write_text(code)
    text = "model: {path: m}\ndata: {train: {task: 'own.py:rows', size: 3}, text_only: true}"
    (tmp_path / "config.yaml").write_text(text)
    made = GRPOConfig.from_yaml(tmp_path / "config.yaml")
    assert [row["answer"] for row in load_train(made).columns_of_rows()] == [0, 1, 2]
    for task, named in (("own.py:rows", "'colour'"), ("own.py:lines", "own.py"), ("none.py:rows", "none.py")):
        with pytest.raises(DataError, match=named):
            load({"task": f"{tmp_path}/{task}", "colour": 3}, made.data)


def test_what_all_rows_lack_is_said_also_where_check_lists_the_rest() -> None:
    def graded(completion: str, gold: str, box: list[int]) -> float:
        return 0.0

    scorer = Scorer([graded])
    rows = [{"question": "?", "picture": "a.png", "label": "x"}] * 3
    columns = {}
    for ours, theirs, message in (
        ("prompt", "question", "'question', 'picture', 'label'.*data.columns.prompt=question"),
        ("images", "picture", "the column 'picture' looks like"),
        ("gold", "label", "^reward 'graded' asks for 'gold'(.|\n)*'box'"),
    ):
        for verify in (True, False):
            with pytest.raises(UserError, match=message):
                load_train(config(columns=columns), rows, needs=scorer.check, verify=verify)
        columns[ours] = theirs
    assert load_train(config(columns={**columns, "box": "question"}), rows)


def test_the_package_is_light(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", ROW)
    code = (
        "import sys; from mm_grpo.config import DataConfig; from mm_grpo.data import load; "
        f"load({str(path)!r}, DataConfig()).sample(0); "
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_rows_without_a_prompt_name_the_first_one_and_what_makes_one() -> None:
    rows = [{"query": "a", "n": 1}, {"query": "b", "n": 2}]
    with pytest.raises(DataError) as refused:
        load_train(config(), rows, verify=False)
    message = str(refused.value)
    assert message.startswith("train row 0: ") and "data.prompt_template" in message
    assert "{path: ..., columns: {prompt: query}}" in message
    with pytest.raises(DataError, match=r"data\.columns\.prompt.*\{path: \.\.\., columns: "):
        load_eval(config(columns={"prompt": "question"}), rows)
