"""What a run folder holds, and what it refuses to write over."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from safetensors import SafetensorError

from mm_grpo.errors import ConfigError
from mm_grpo.run import folder as run_folder
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.inputs import inputs_of


def names(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


def finished_run(path: Path) -> RunFolder:
    """A folder with everything that a run writes, and notes of the user's beside it."""
    folder = RunFolder.prepare(path)
    with folder.claim():
        folder.start("run: 1\n").replace_folder(
            "model", lambda new: add_to(new, "config.json", "sub/weights")
        )
    folder.metrics.append(1, {"reward": 0.5})
    folder.metrics.append(2, {"reward": 0.75})
    for file in (
        "summary.json",
        "report.html",
        "rollouts/step-000001.jsonl",
        f"rollouts/images/{'0a' * 16}.png",
        "checkpoints/step-000002/state",
        "tensorboard/events.out.tfevents.1",
        "notes.txt",
        "rollouts/my-favourites.jsonl",
        "rollouts/images/screenshot.png",
        "tensorboard/layout.json",
    ):
        add_to(path, file)
    return folder


def add_to(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("x\n")


def test_a_new_run_has_its_config_its_environment_and_its_mark(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    folder = RunFolder.prepare(tmp_path / "runs" / "a", writes=["checkpoints"])
    assert names(tmp_path) == ["notes.txt"]  # nothing is written yet
    folder.start("run:\n  seed: 3\n", rewards=[{"module": "mine", "qualname": "f", "sha256": None}])
    root = tmp_path / "runs" / "a"
    assert names(root) == ["config.yaml", "environment.json", "mm_grpo_run.json"]
    assert (root / "config.yaml").read_text() == "run:\n  seed: 3\n"
    kept = json.loads((root / "environment.json").read_text())["rewards"]
    assert kept == [{"module": "mine", "qualname": "f", "sha256": None}]
    wrote = json.loads((root / "mm_grpo_run.json").read_text())["wrote"]
    assert {"checkpoints", "config.yaml"} <= {*wrote} and not {"model", "notes.txt"} & {*wrote}
    assert RunFolder.open(root).paths.root == root
    with pytest.raises(ConfigError, match=f"'{tmp_path}' is no run folder"):
        RunFolder.open(tmp_path)


def test_another_version_of_vllm_is_said_where_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its samples of a seed are others."""
    RunFolder.prepare(tmp_path / "a").start("run: 1\n", sampler="vLLM 0.25.1, model runner 2")
    kept = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert kept["sampler"] == "vLLM 0.25.1, model runner 2"
    for sampler, warned in (("vLLM 0.25.1, model runner 2", 0), ("vLLM 0.33.0, model runner 2", 1)):
        caplog.clear()
        RunFolder.prepare(tmp_path / "a", resume=True).start("run: 1\n", sampler=sampler)
        assert len(caplog.records) == warned


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("metrics.jsonl", "1 rows in metrics.jsonl"),
        ("summary.json", "summary.json"),
        ("checkpoints/step-000001", "checkpoints/"),
        ("model/weights", "model/"),
    ],
)
def test_each_sign_of_a_run_counts(tmp_path: Path, file: str, what: str) -> None:
    RunFolder.create(tmp_path, "x: 1\n")
    (tmp_path / "metrics.jsonl").touch()  # of a run that never took a step
    RunFolder.create(tmp_path, "x: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}\n")
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=rf"run.dir = '{tmp_path}' already holds a run \({what}\)"):
        RunFolder.prepare(tmp_path)
    assert names(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "file", ["model/precious", "config.yaml", "checkpoints/mine/weights", "rollouts/a.txt", "metrics.jsonl"]
)
def test_somebody_elses_files_are_not_touched(
    file: str, resume: bool, overwrite: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / file).write_text("mine")
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}' holds {file.split('/')[0]}"):
        RunFolder.prepare(tmp_path, overwrite=overwrite, resume=resume)
    assert names(tmp_path) == before and (tmp_path / file).read_text() == "mine"


def test_what_no_run_wrote_in_a_run_folder_is_not_touched(tmp_path: Path) -> None:
    """A run without a model, and then the user's own weights in model/."""
    RunFolder.prepare(tmp_path, writes=["checkpoints"]).start("x: 1\n")
    (tmp_path / "summary.json").write_text("{}")
    add_to(tmp_path, "model/precious")
    with pytest.raises(ConfigError, match="holds model/, which no run wrote"):
        RunFolder.prepare(tmp_path, overwrite=True)
    RunFolder.prepare(tmp_path, overwrite=True, writes=[]).start("x: 2\n")
    assert (tmp_path / "model" / "precious").exists() and not (tmp_path / "summary.json").exists()


def test_a_run_folder_whose_mark_a_power_cut_emptied_is_still_a_run_s(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "mm_grpo_run.json").write_bytes(b"")
    with RunFolder.prepare(tmp_path, resume=True).claim():
        pass  # the mark that it writes says the same
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.prepare(tmp_path)
    RunFolder.create(tmp_path, "x: 2\n", overwrite=True)
    assert not (tmp_path / "model").exists() and (tmp_path / "notes.txt").exists()


HOLD = """
import sys, time
from pathlib import Path
from mm_grpo.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""
GIVEN: list[dict[str, bool]] = [{}, {"overwrite": True}, {"resume": True}]


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for given in GIVEN:
            for start in (RunFolder.prepare, lambda *a, **k: RunFolder(*a, **k).start("x: 1\n")):
                with pytest.raises(ConfigError, match=rf"a run is going on there \(process {other.pid} on "):
                    start(tmp_path, **given)  # type: ignore[operator]
        other.kill()
    folder = RunFolder.prepare(tmp_path)  # a killed process holds nothing
    with folder.claim():
        folder.start("x: 1\n")
        with pytest.raises(ConfigError, match=rf"\(process {os.getpid()} on "):
            RunFolder.prepare(tmp_path, resume=True)
    assert json.loads((tmp_path / "mm_grpo_run.json").read_text())["holder"] is None


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, there = os.pipe()
    with RunFolder.prepare(tmp_path).claim():
        pid = os.fork()
        if not pid:
            os.write(there, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
    try:
        RunFolder.prepare(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    finished_run(tmp_path)
    add_to(tmp_path, "model/mine/notes.txt")
    RunFolder.create(tmp_path, "x: 2\n", overwrite=True)
    assert names(tmp_path) == [
        "config.yaml",
        "environment.json",
        "mm_grpo_run.json",
        "model",
        "model/mine",
        "model/mine/notes.txt",
        "notes.txt",
        "rollouts",
        "rollouts/images",
        "rollouts/images/screenshot.png",
        "rollouts/my-favourites.jsonl",
        "tensorboard",
        "tensorboard/layout.json",
    ]
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n"


def test_overwrite_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "run" / "model").rename(elsewhere)
    (tmp_path / "run" / "model").symlink_to(elsewhere)
    RunFolder.create(tmp_path / "run", "x: 2\n", overwrite=True)
    assert not (tmp_path / "run" / "model").is_symlink()
    assert names(elsewhere) == ["config.json", "sub", "sub/weights"]


@pytest.mark.parametrize("name", ["model", "adapter"])
@pytest.mark.parametrize("given", [{"resume": True}, {"overwrite": True}])
def test_a_model_that_is_saved_again_leaves_the_users_files_in_its_folder(
    given: dict[str, bool], name: str, tmp_path: Path
) -> None:
    for number, new in enumerate(["weights-1-of-2", "weights"]):
        folder = RunFolder(tmp_path, **given if number else {})
        with folder.claim():
            folder.start("x: 1\n")
            add_to(tmp_path / name, f"notes-{number}.txt", "evaluations/mine.json")
            folder.replace_folder(name, lambda path, file=new: add_to(path, file, "sub/config"))
        kept = [f"notes-{n}.txt" for n in range(number + 1)]
        assert names(tmp_path / name) == [
            "evaluations", "evaluations/mine.json", *kept, "sub", "sub/config", new,
        ]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_what_a_run_reads_may_not_lie_in_its_folder(given: dict[str, bool], tmp_path: Path) -> None:
    finished_run(tmp_path)
    inputs = [("model.path", "Qwen/Qwen2.5-VL-3B-Instruct"), ("data.train", tmp_path / "rows.jsonl")]
    with pytest.raises(ConfigError, match=f"^data.train = '{tmp_path}/rows.jsonl' lies in run.dir"):
        RunFolder.prepare(tmp_path, inputs=inputs, **given)


def test_inputs_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "images"):
        (tmp_path / name).mkdir()
    for name in ("train.jsonl", "a.jsonl", "mine.py", "other.py", "given.jsonl"):
        (tmp_path / name).touch()
    config = small_config(
        "base",
        data={"train": "train.jsonl", "eval": {"a": "a.jsonl", "b": "gone.jsonl"}, "image_dir": "images"},
        rewards=["exact_match", "mine.py:f", {"name": "other.py:f", "weight": 2}],
    )
    assert inputs_of(config) == [
        ("model.path", "base"),
        ("data.train", "train.jsonl"),
        ("data.eval.a", "a.jsonl"),
        ("data.image_dir", "images"),
        ("rewards", "mine.py"),
        ("rewards", "other.py"),
    ]
    given = {"train": tmp_path / "given.jsonl", "eval": [{"prompt": "x"}], "rewards": [len]}
    assert inputs_of(config, **given) == [
        ("model.path", "base"), ("data.train", tmp_path / "given.jsonl"), ("data.image_dir", "images"),
    ]  # fmt: skip


def linked(path: Path) -> None:
    """What lies there is the user's, elsewhere, and a link in its place."""
    mine = path.parent.with_name("mine")
    path.rename(mine) if path.exists() else mine.touch()
    path.symlink_to(mine)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("mm_grpo_run.json", os.mkfifo),
        ("model", Path.touch),
        ("metrics.jsonl", linked),
    ],
)
def test_what_is_no_file_or_folder_is_named_before_it_is_read(
    name: str, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    finished_run(tmp_path / "run")
    path = tmp_path / "run" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    make(path)
    for given in GIVEN[1:]:
        with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}/run': '{name}' there is no "):
            RunFolder.prepare(tmp_path / "run", **given)


def test_cut_after_forgets_the_later_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    add_to(tmp_path, "rollouts/step-000002.jsonl", "rollouts/eval-step-000002.jsonl")
    folder.cut_after(1, b'{"step": 1, "reward": 0.5}\n')
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'
    kept = sorted(f.name for f in (tmp_path / "rollouts").glob("*.jsonl"))
    assert kept == ["my-favourites.jsonl", "step-000001.jsonl"]
    folder.metrics.append(2, {"reward": 0.25})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    folder.cut_after(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_files_that_cannot_be_written_are_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.MetricsLog, "append", full)
    monkeypatch.setattr(run_folder, "write_rollouts", full)
    for write, what in ((folder.append_metrics, "metrics.jsonl"), (folder.write_rollouts, "the rollouts")):
        with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}': {what} cannot be written .*No space"):
            write(1, [])  # type: ignore[operator]

    def serialize(path: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(ConfigError, match=r"model/ cannot be written \(Error while serializing.*os error 28"):
        folder.replace_folder("model", serialize)


def test_a_folder_that_is_removed_while_the_run_goes_on_is_missed(tmp_path: Path) -> None:
    folder = RunFolder.prepare(tmp_path / "run")
    with folder.claim():
        folder.start("x: 1\n")
        folder.append_metrics(1, {"reward": 0.5})
        shutil.rmtree(tmp_path / "run")
        for write in (lambda: folder.append_metrics(2, {}), lambda: folder.write_rollouts(2, [])):
            with pytest.raises(ConfigError, match=r"run.dir = '.*/run' was removed or renamed while the run"):
                write()
    assert not (tmp_path / "run").exists()
