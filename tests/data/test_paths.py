"""What paths name: shards, splits, globs, lists, CSV, Arrow, the hub; and what 50,000 rows cost at the start."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from helpers.patience import PATIENCE
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.data import library
from mm_grpo.data.paths import SUFFIXES
from mm_grpo.data.sources import load, load_train
from mm_grpo.errors import DataError
from mm_grpo.files import expand_glob
from mm_grpo.run.inputs import inputs_of

pytestmark = pytest.mark.usefixtures("own_cache")


def settings() -> Any:
    return GRPOConfig.from_dict({"model": {"path": "m"}}).data


def rows_of(source: Any) -> list[Any]:
    set_of = load(source, settings())
    return [set_of.fields(i).columns["n"] for i in range(len(set_of))]


def refusal(source: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(source, settings())
    return str(caught.value)


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": "?", "n": n} for n in numbers]


def jsonl(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered(*numbers)))
    return path


def test_folders_of_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    for at, numbers in enumerate([(0, 1), (2,), (3, 4)]):
        path = tmp_path / "parquet" / f"train-{at:05d}-of-00003.parquet"
        path.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(numbered(*numbers)).to_parquet(str(path))
        jsonl(tmp_path / "lines" / f"rows-{at}.jsonl", *numbers)
    (tmp_path / "parquet" / "README.md").touch()
    (tmp_path / "parquet" / "dataset_infos.json").write_text("{}")
    assert rows_of(tmp_path / "parquet") == rows_of(tmp_path / "lines") == [0, 1, 2, 3, 4]
    set_of = load(tmp_path / "lines", settings())
    assert [set_of.row_name(i) for i in (1, 2)] == [
        f"{tmp_path}/lines/rows-0.jsonl:2",
        f"{tmp_path}/lines/rows-1.jsonl:1",
    ]
    assert set_of.columns == ("n",) and set_of.in_memory
    with pytest.raises(IndexError):
        set_of.sample(5)


def test_shards_of_several_splits_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    jsonl(folder / "train-00000-of-00001.jsonl", 0)
    jsonl(folder / "test-00000-of-00001.jsonl", 1)
    assert refusal(folder) == (
        f"train: {folder} holds several splits (test, train); give {folder}:SPLIT, or a list of paths to have them all"
    )
    assert rows_of(f"{folder}:test") == [1]
    assert (
        refusal(f"{folder}:val")
        == f"train: {folder} has no files of the split 'val'; it has: 'test', 'train'"
    )
    assert "holds several splits (test, train); write a narrower pattern" in refusal(f"{folder}/*.jsonl")
    assert rows_of([f"{folder}/train-*.jsonl", f"{folder}:test"]) == [0, 1]
    jsonl(tmp_path / "named" / "train.jsonl", 0)
    jsonl(tmp_path / "named" / "validation.jsonl", 1)
    assert "holds several splits (train, validation)" in refusal(tmp_path / "named")
    assert rows_of(f"{tmp_path}/named:train") == [0]


def test_folders_that_are_not_one_set(tmp_path: Path) -> None:
    jsonl(tmp_path / "lost" / "train-00001-of-00004.jsonl", 0)
    assert "lost has 1 of 4 shards; missing: 00000, 00002, 00003. Download the rest" in refusal(
        tmp_path / "lost"
    )
    jsonl(tmp_path / "mixed" / "a.jsonl", 0)
    (tmp_path / "mixed" / "b.csv").write_text("prompt,n\n?,1\n")
    assert "mixed holds files of several kinds (.csv, .jsonl); give a pattern such as *.csv" in refusal(
        tmp_path / "mixed"
    )
    (tmp_path / "clone" / "data").mkdir(parents=True)
    datasets.Dataset.from_list(numbered(0)).to_parquet(str(tmp_path / "clone" / "data" / "a.parquet"))
    assert f"its folder data holds some: give {tmp_path}/clone/data" in refusal(tmp_path / "clone")


def test_globs_and_lists(tmp_path: Path) -> None:
    for at in (2, 0, 1):
        jsonl(tmp_path / f"part{at}" / "rows.jsonl", at)
    jsonl(tmp_path / "b[1].jsonl", 7)
    assert rows_of(f"{tmp_path}/part*/rows.jsonl") == [0, 1, 2]
    assert rows_of(f"{tmp_path}/**/rows.jsonl") == [0, 1, 2]
    assert rows_of([f"{tmp_path}/part2/*.jsonl", tmp_path / "part0"]) == [2, 0]
    assert rows_of(f"{tmp_path}/b[1].jsonl") == [7]
    assert f"no file matches {tmp_path}/*.parquet; it holds: 'b[1].jsonl', 'part0'" in refusal(
        f"{tmp_path}/*.parquet"
    )
    assert f"no file matches {tmp_path}/no/*.csv; there is no folder {tmp_path}/no" in refusal(
        f"{tmp_path}/no/*.csv"
    )
    config = GRPOConfig.from_dict(
        {
            "model": {"path": "m"},
            "data": {"train": [f"{tmp_path}/part0", f"{tmp_path}/part1"], "text_only": True},
        }
    )
    assert len(load_train(config)) == 2


def test_links_that_lead_up_end_and_each_file_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, name in enumerate(["rows", "a/rows", "a/b/rows", "c.d/rows", ".hidden/rows"]):
        jsonl(tmp_path / "top" / f"{name}.jsonl", at)
    monkeypatch.chdir(tmp_path)
    for pattern in (
        "**/*.jsonl",
        "top/**/*.jsonl",
        "**/b/**/*.jsonl",
        f"{tmp_path}/t*/**/rows.jsonl",
        "top/*/*.jsonl",
    ):
        assert expand_glob(pattern) == sorted(glob.glob(pattern, recursive=True)) != [], pattern
    (tmp_path / "top" / "a" / "up").symlink_to("..")
    (tmp_path / "elsewhere").mkdir()
    jsonl(tmp_path / "elsewhere" / "rows.jsonl", 9)
    (tmp_path / "top" / "out").symlink_to("../elsewhere")
    assert rows_of("top/**/*.jsonl") == [2, 1, 3, 9, 0]
    jsonl(tmp_path / "rows.jsonl", 8)  # above what is asked for
    for name in ("root", "a/b/root", "a/again"):
        (tmp_path / "top" / name).symlink_to(tmp_path)
    assert rows_of("top/**/*.jsonl") == [2, 1, 3, 9, 0]
    assert rows_of("top/**/**/b/*.jsonl") == [2]
    config = {"model": {"path": "m"}, "data": {"train": "**/*.jsonl"}}
    (tmp_path / "top" / "config.yaml").write_text(json.dumps(config))
    found = inputs_of(GRPOConfig.from_yaml(tmp_path / "top" / "config.yaml"))
    assert len(found) == 5 == len({path for _, path in found})


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "a.jsonl", 1)
    for kind in SUFFIXES:
        pipe = tmp_path / "d" / f"z{kind}"
        os.mkfifo(pipe)
        # unblocks whoever waits for a writer, so that the test ends
        timer = threading.Timer(
            PATIENCE, lambda path: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK)), [pipe]
        )
        timer.start()
        try:
            for given in (pipe, f"{tmp_path}/d/z*", *([tmp_path / "d"] if kind == ".jsonl" else [])):
                assert f"{pipe} is a pipe, a socket or a device" in refusal(given)
        finally:
            timer.cancel()
            timer.join()
        pipe.unlink()


def test_images_start_at_the_folder_of_their_own_file(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (2, 2), colour).save(tmp_path / name / "x.png")
        (tmp_path / name / "rows.jsonl").write_text('{"prompt": "?", "image": "x.png"}\n')
    set_of = load([tmp_path / "a", tmp_path / "b"], settings())
    assert [set_of.sample(i).images[0].getpixel((0, 0)) for i in (0, 1)] == [(255, 0, 0), (0, 0, 255)]
    shuffled = set_of.with_shuffled_images()
    assert [shuffled.sample(i).images[0].getpixel((0, 0)) for i in (0, 1)] == [(0, 0, 255), (255, 0, 0)]


def test_one_object_with_a_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": numbered(1, 2)}))
    assert rows_of(path) == [1, 2]
    path.write_text(json.dumps({"train": numbered(1), "test": numbered(2)}))
    assert "holds one object with several lists of rows ('train', 'test'); write each" in refusal(path)
    for row in (
        {"image": "a.png", "conversations": [{"from": "human", "value": "?"}]},
        {"prompt": "?", "choices": [{"a": 1}]},
    ):
        path.write_text(json.dumps(row))
        assert "holds one dict; legal is a list of rows" in refusal(path)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    talk = json.dumps([{"role": "user", "content": "<image>What, then?"}]).replace('"', '""')
    path.write_bytes(
        f'\ufeffmessages,images,answer,note\r\n"{talk}","[""a.png""]",007,\r\n"{talk}",a.png,"two\nlines",x\r\n'.encode()
    )
    set_of = load(path, settings())
    assert set_of.fields(0).columns == {"answer": "007", "note": None}
    assert set_of.fields(0).images == set_of.fields(1).images == ("a.png",)
    assert set_of.fields(1).columns == {"answer": "two\nlines", "note": "x"}
    assert [set_of.row_name(i) for i in (0, 1)] == [f"{path}:2", f"{path}:4"]
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("prompt\tn\nA, or B?\t3\n")
    assert load(tabs, settings()).fields(0).columns == {"n": "3"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", ": is empty; it needs a line of names"),
        (b"prompt,n\n", ": is empty; it needs a line of names"),
        (b"prompt,n\nA, or B?,1\n", ":2: has 3 cells, and the first line names 2 columns"),
        (b"prompt,prompt\na,b\n", ":1: the column 'prompt' is given twice"),
        (b"prompt;n\na;b\n", ":1: its cells are not set apart by commas"),
        (b'prompt,n\n"a" b,1\n', ":2: is not valid CSV ("),
        (b'prompt,n\n"a,1\n', "is not valid CSV (unexpected end of data)"),
        (b"prompt,n\n\xff,1\n", ": is not UTF-8 (at byte"),
        (b'messages,n\n"[{",1\n', ":2, column 'messages': is not valid JSON"),
        (b"question,n\na,1\n", ":2: no column 'prompt'"),
    ],
)
def test_what_csv_is_refused(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    assert told in refusal(tmp_path / "rows.csv")


def test_arrow_files(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["?", "!"], "n": [1, 2]})
    with (
        pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    with (
        pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as out,
    ):
        out.write_table(table)
    assert rows_of(tmp_path / "stream.arrow") == rows_of(tmp_path / "file.arrow") == [1, 2]
    for name, content in (
        ("a.arrow", b"ARROW1 and no more"),
        ("b.arrow", b"no arrow at all"),
        ("c.arrow", b""),
    ):
        (tmp_path / name).write_bytes(content)
        assert f"{tmp_path}/{name}: cannot be read as Arrow (" in refusal(tmp_path / name)


def test_a_type_that_the_library_does_not_hold_is_refused(tmp_path: Path) -> None:
    pairs = pyarrow.array([[("a", 1)]], type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = pyarrow.table({"prompt": ["?"], "pairs": pairs})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as out,
    ):
        out.write_table(table)
    for kind in ("parquet", "arrow"):
        assert f"{tmp_path}/rows.{kind}: cannot be read as {kind.title()} (" in refusal(
            tmp_path / f"rows.{kind}"
        )


def test_a_value_that_python_does_not_hold_is_refused_by_its_row(tmp_path: Path) -> None:
    times = pyarrow.array([0, 2**62], type=pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["?", "!"], "at": times}), tmp_path / "rows.parquet")
    set_of = load(tmp_path / "rows.parquet", settings())
    with pytest.raises(DataError, match=rf"^{tmp_path}/rows.parquet row 1: cannot be read out of Arrow \("):
        set_of.fields(1)
    assert [name for name, _ in set_of.check()] == [f"{tmp_path}/rows.parquet row 1"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_list(numbered(1)).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    assert refusal(tmp_path / "rows.parquet") == (
        f"{tmp_path}/rows.parquet: its copy as Arrow cannot be written to {tmp_path}/file/cache/mm_grpo_parquet (Not a "
        "directory); make room there, or set HF_DATASETS_CACHE to another folder"
    )


def test_a_line_that_changes_during_a_run_is_noticed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", 1, 2)
    set_of = load(path, settings())
    path.open("a").write('{"prompt": "?", "n": 3}\n')  # more lines do no harm
    assert [set_of.fields(i).columns["n"] for i in (0, 1)] == [1, 2] and len(set_of) == 2
    with path.open("r+") as file:
        file.write('{"prompt": "!"')
    with pytest.raises(DataError, match=rf"^{path}:1: the file changed after the start"):
        set_of.fields(0)


def test_the_inputs_of_a_run_are_found_in_lists_and_globs(tmp_path: Path) -> None:
    jsonl(tmp_path / "d" / "a.jsonl", 1)
    for train in (f"{tmp_path}/d/*.jsonl", [f"{tmp_path}/d/a.jsonl"], f"{tmp_path}/d:train"):
        config = GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": train}})
        wanted = f"{tmp_path}/d" if str(train).endswith(":train") else f"{tmp_path}/d/a.jsonl"
        assert inputs_of(config) == [("data.train", wanted)]


# The hub


def test_without_a_network_both_readings_of_a_name_are_told_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "data" / "train.jsonl", 1)
    monkeypatch.setattr(library, "_unreachable", lambda repository: "ConnectError: no network")
    message = refusal("data/train")
    assert message.startswith(
        "train: 'data/train' is no path here, and as a dataset of the hub it cannot be read (ConnectError: no network)."
    )
    assert f"data/train does not exist in {tmp_path}/data; near names there: 'train.jsonl'" in message
    assert "\n" not in message
    assert refusal("hiyouga/geometry3k@train").endswith(
        "of a hub's dataset is written hiyouga/geometry3k:train"
    )
    assert "does not exist" in refusal("data/train.csv") and "hub it" not in refusal("data/train.csv")


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(library, "PATIENCE", 0.2)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **options: time.sleep(600))
    assert "cannot be read (no answer in 0.2 s)" in refusal("owner/name")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A hub of one dataset with two configs, and what was loaded of it."""
    loaded: list[Any] = []

    def load_dataset(repository: str, config: str | None = None, split: str | None = None) -> Any:
        loaded.append((repository, config, split))
        return datasets.Dataset.from_list(numbered(5))

    def splits(repository: str, config: str) -> list[str]:
        return ["train", "test"] if config == "main" else ["test"]

    monkeypatch.setattr(library, "_unreachable", lambda repository: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda repository: ["main", "hard"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", splits)
    return loaded


def test_names_of_the_hub(hub: list[Any]) -> None:
    assert rows_of("own/er:main:train") == rows_of("own/er:hard") == [5]
    assert hub == [("own/er", "main", "train"), ("own/er", "hard", "test")]
    assert load("own/er:hard:test", settings()).row_name(0) == "own/er:hard:test row 0"
    for given, told in [
        ("own/er", "train: own/er has the configs 'main', 'hard'; give own/er:CONFIG"),
        ("own/er:main", "train: own/er has the splits 'train', 'test'; give own/er:main:SPLIT"),
        ("own/er:train", "train: own/er has the configs 'main', 'hard'; give own/er:CONFIG:train"),
        ("own/er:main:val", "train: own/er has no split 'val'; it has: 'train', 'test'"),
        ("own/er:easy:train", "train: own/er has no config 'easy'; it has: 'main', 'hard'"),
    ]:
        assert refusal(given) == told
    assert len(hub) == 3


def test_a_dataset_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_unreachable", lambda repository: "no network")
    source = jsonl(tmp_path / "own.jsonl", 3, 4)
    builder = datasets.load_dataset_builder("json", data_files={"train": str(source)})
    builder.download_and_prepare()
    made = Path(builder.cache_dir)
    info = json.loads((made / "dataset_info.json").read_text())
    cached = tmp_path / "cache" / "own___er" / "default" / "0.0.0" / "abc"
    cached.mkdir(parents=True)
    (cached / "dataset_info.json").write_text(
        json.dumps({**info, "config_name": "default", "dataset_name": "er"})
    )
    (cached / "er-train.arrow").write_bytes(next(made.glob("*.arrow")).read_bytes())
    assert rows_of("own/er:train") == rows_of("own/er") == [3, 4]
    assert "cannot be read (no network)" in refusal("own/er:test")


# What 50,000 rows cost at the start

START = """
import json, re, sys, time
from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
began = time.process_time()
rows = load_train(GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": sys.argv[1]}}))
rows.columns, rows.conversational
# not ru_maxrss, which begins at what the parent held when it forked
status = open("/proc/self/status").read()
peak, own = (int(re.search(name + r":\\s+(\\d+) kB", status)[1]) // 1024 for name in ("VmHWM", "RssAnon"))
print(json.dumps([len(rows), time.process_time() - began, peak, own]))
"""


def start(source: Path, folder: Path) -> tuple[float, int, int]:
    """Processor seconds of a start in a process of its own; its peak of memory, and what it holds without the pages of
    mapped files, in MB."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", START, str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, seconds, peak, own = json.loads(done.stdout)
    print(f"{source.name}: {seconds:.2f} s, {peak} MB, {own} MB of its own")
    assert count == 50_000
    return seconds, peak, own


def png(size: int) -> bytes:
    file = BytesIO()
    Image.effect_noise((size, size), 64).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_fifty_thousand_lines_start_quickly(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    reply = {"from": "gpt", "value": "A long answer. " * 20}
    with path.open("w") as file:
        for at in range(50_000):
            turns = [{"from": "human", "value": f"<image>Question {at}?"}, reply]
            file.write(json.dumps({"id": at, "image": f"{at}.jpg", "conversations": turns}) + "\n")
    seconds, peak, _ = start(path, tmp_path)
    assert seconds < 30  # 2 s measured on a core that others use too
    assert peak < 300  # 40 MB measured


@pytest.mark.long
def test_fifty_thousand_rows_with_pictures_stay_on_disk(tmp_path: Path) -> None:
    pictures = [png(64) for _ in range(10)]
    held = pyarrow.StructArray.from_arrays(
        [pyarrow.array(pictures * 5000), pyarrow.nulls(50_000, pyarrow.string())], ["bytes", "path"]
    )
    columns = {
        "images": pyarrow.ListArray.from_arrays(list(range(50_001)), held),
        "problem": [f"<image>Question {at}?" for at in range(50_000)],
        "answer": [str(at) for at in range(50_000)],
    }
    text = datasets.Value("string")
    features = datasets.Features(images=datasets.List(datasets.Image()), problem=text, answer=text)
    info = datasets.DatasetInfo(features=features)
    stored = datasets.Dataset(pyarrow.table(columns), info=info)  # 200 MB
    stored.save_to_disk(str(tmp_path / "saved"))
    pyarrow.parquet.write_table(stored.data.table, tmp_path / "rows.parquet", row_group_size=25_000)
    for source in (tmp_path / "saved", tmp_path / "rows.parquet"):
        seconds, peak, own = start(source, tmp_path)
        assert seconds < 30  # 0.6 s measured; a decoded picture costs 1 ms, and 50,000 of them 50 s
        assert peak < 450  # 300 MB measured, of which 200 are pages of files that the system may take back
        assert own < 200  # 100 MB measured
