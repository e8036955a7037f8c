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
from helpers.small_runs import names
from safetensors import SafetensorError

from mm_grpo.errors import ConfigError
from mm_grpo.run import folder as run_folder
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.paths import dated

FIRST = ["config.yaml", "environment.json", "mm_grpo_run.json"]


def check(path: Path, **given: Any) -> None:
    RunFolder(path, **given).check()


def start(path: Path, **given: Any) -> RunFolder:
    return RunFolder(path, **given).start("x: 2\n")


def add_to(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("x\n")


RUNS = (
    "summary.json", "report.html", "rollouts/step-000001.jsonl", f"rollouts/images/{'0a' * 16}.png",
    "checkpoints/step-000002/state", "checkpoints/.step-000003.new/state", "tensorboard/events.out.tfevents.1",
)  # fmt: skip
USERS = (
    "notes.txt", "rollouts/my-favourites.jsonl", "rollouts/images/screenshot.png", "tensorboard/layout.json",
    "model/mine/notes.txt",
)  # fmt: skip


def finished_run(path: Path) -> RunFolder:
    """A folder with everything that a run writes, and files of the user's beside it."""
    folder = RunFolder(path)
    with folder.claim():
        started = folder.start("run: 1\n")
        started.replace_folder("model", lambda new: add_to(new, "config.json", "sub/weights"))
    folder.on_log(1, {"reward": 0.5})
    folder.on_log(2, {"reward": 0.75})
    add_to(path, *RUNS, *USERS)
    return folder


def test_a_new_run_has_its_config_its_environment_and_its_mark(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    folder = RunFolder(root, writes=["checkpoints"])
    folder.check()
    assert names(tmp_path) == []  # nothing is written yet
    folder.start("run:\n  seed: 3\n", rewards=[{"module": "mine", "qualname": "f", "sha256": None}])
    assert names(root) == FIRST
    assert (root / "config.yaml").read_text() == "run:\n  seed: 3\n"
    kept = json.loads((root / "environment.json").read_text())["rewards"]
    assert kept == [{"module": "mine", "qualname": "f", "sha256": None}]
    wrote = json.loads((root / "mm_grpo_run.json").read_text())["wrote"]
    assert {"checkpoints", "config.yaml"} <= {*wrote} and not {"model", "notes.txt"} & {*wrote}
    assert RunFolder.open(root).paths.root == root
    with pytest.raises(ConfigError, match=str(tmp_path)):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("file", ["metrics.jsonl", "checkpoints/step-000001"])
def test_each_sign_of_a_run_counts(tmp_path: Path, file: str) -> None:
    RunFolder(tmp_path).start("x: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"ste')  # of a run that never took a step
    start(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n" and names(tmp_path) == FIRST
    add_to(tmp_path, file)
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=rf"run.dir = '{tmp_path}' already .*{file.partition('/')[0]}"):
        check(tmp_path)
    assert names(tmp_path) == before


@pytest.mark.parametrize("given", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize(
    "file", ["model/precious", "config.yaml", "checkpoints/mine/weights", "rollouts/a.txt"]
)
def test_somebody_elses_files_are_not_touched(file: str, given: dict[str, bool], tmp_path: Path) -> None:
    add_to(tmp_path, file)
    for write in (check, start):
        with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}' holds {file.split('/')[0]}"):
            write(tmp_path, **given)
    assert names(tmp_path) == sorted({file, *map(str, list(Path(file).parents)[:-1])})


def test_what_no_run_wrote_in_a_run_folder_is_not_touched(tmp_path: Path) -> None:
    """A run without a model, and then the user's own weights in model/."""
    RunFolder(tmp_path, writes=["checkpoints"]).start("x: 1\n")
    add_to(tmp_path, "model/precious", "summary.json")
    with pytest.raises(ConfigError, match="holds model/"):
        check(tmp_path, overwrite=True)
    start(tmp_path, overwrite=True, writes=[])
    assert (tmp_path / "model" / "precious").exists() and not (tmp_path / "summary.json").exists()


HOLD = """
import sys, time
from pathlib import Path
from mm_grpo.run.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""
GIVEN: list[dict[str, bool]] = [{}, {"overwrite": True}, {"resume": True}]


@pytest.mark.parametrize("name", ["exp[1]", "exp*", "exp?", "exp{1}"])
def test_the_newest_of_dated_runs_is_one_of_this_very_name(name: str, tmp_path: Path) -> None:
    start(tmp_path / "exp1" / "20260101-000000")
    with pytest.raises(ConfigError, match=r"^run\.dir = .*no such run"):
        dated(str(tmp_path / name / "{time}"), newest=True)
    for day in ("20260102-000000", "20260103-000000"):
        start(tmp_path / name / day)
    assert dated(str(tmp_path / name / "{time}"), newest=True) == f"{tmp_path}/{name}/20260103-000000"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        for given in GIVEN:
            for write in (check, start):
                with pytest.raises(ConfigError, match=rf"\(process {other.pid} on "):
                    write(tmp_path, **given)
        other.kill()
    check(tmp_path)  # a killed process holds nothing
    folder = RunFolder(tmp_path)
    with folder.claim():
        folder.start("x: 1\n")
        with pytest.raises(ConfigError, match=rf"\(process {os.getpid()} on "):
            check(tmp_path, resume=True)
    check(tmp_path)


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, there = os.pipe()
    with RunFolder(tmp_path).claim():
        pid = os.fork()
        if not pid:
            os.write(there, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
    try:
        check(tmp_path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    finished_run(tmp_path)
    start(tmp_path, overwrite=True)
    kept = {*FIRST, *USERS, *(str(folder) for file in USERS for folder in Path(file).parents)} - {"."}
    assert names(tmp_path) == sorted(kept)
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n"


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_what_a_killed_process_had_not_renamed_is_removed(how: str, tmp_path: Path) -> None:
    finished_run(tmp_path)
    image = f"rollouts/images/.{'0af' * 10}00.png"
    ours = (
        ".metrics.jsonl.7.tmp",
        ".summary.json.99.tmp",
        "rollouts/.eval-step-000001.jsonl.7.tmp",
        f"{image}.7.tmp",
    )
    users = (
        ".notes.json.7.tmp",
        f"{image}.tmp",
        "rollouts/images/.me.png.7.tmp",
        "rollouts/.step-1.jsonl.7.tmp",
    )
    add_to(tmp_path, *ours, *users)
    start(tmp_path, **{how: True})
    left = names(tmp_path)
    assert not set(ours) & set(left) and set(users) <= set(left)


def test_overwrite_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "elsewhere")
    start(tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "model").is_symlink()
    assert (tmp_path / "elsewhere" / "sub" / "weights").exists()


@pytest.mark.parametrize("given", GIVEN[1:])
def test_a_model_saved_again_leaves_the_users_files(given: dict[str, bool], tmp_path: Path) -> None:
    for number, new in enumerate(["weights-1-of-2", "weights"]):
        folder = RunFolder(tmp_path, **given if number else {})
        with folder.claim():
            folder.start("x: 1\n")
            add_to(tmp_path / "model", f"notes-{number}.txt", "evaluations/mine.json")
            folder.replace_folder("model", lambda path, file=new: add_to(path, file, "sub/config"))
        kept = [f"notes-{n}.txt" for n in range(number + 1)]
        assert names(tmp_path / "model") == [
            "evaluations", "evaluations/mine.json", *kept, "sub", "sub/config", new,
        ]  # fmt: skip


def test_what_a_run_reads_may_not_lie_in_its_folder(tmp_path: Path) -> None:
    inputs = [("model.path", "Qwen/Qwen2.5-VL-3B-Instruct"), ("data.train", tmp_path / "rows.jsonl")]
    for given in GIVEN:
        with pytest.raises(ConfigError, match=f"^data.train = '{tmp_path}/rows.jsonl'"):
            check(tmp_path, inputs=inputs, **given)


def test_inputs_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "images"):
        (tmp_path / name).mkdir()
    add_to(tmp_path, "train.jsonl", "a.jsonl", "mine.py", "other.py", "given.jsonl")
    config = small_config(
        "base",
        data={"train": "train.jsonl", "eval": {"a": "a.jsonl", "b": "gone.jsonl"}, "image_dir": "images"},
        rewards=["exact_match", "mine.py:f", {"name": "other.py:f", "weight": 2}],
    )
    assert inputs_of(config) == [
        ("model.path", "base"), ("data.train", "train.jsonl"), ("data.eval.a", "a.jsonl"),
        ("data.image_dir", "images"), ("rewards", "mine.py"), ("rewards", "other.py"),
    ]  # fmt: skip
    given = {"train": tmp_path / "given.jsonl", "eval": [{"prompt": "x"}], "rewards": [len]}
    assert inputs_of(config, **given) == [
        ("model.path", "base"), ("data.train", tmp_path / "given.jsonl"), ("data.image_dir", "images"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "make"), [("mm_grpo_run.json", os.mkfifo), ("model", Path.touch), ("metrics.jsonl", os.mkfifo)]
)
def test_foreign_files_are_named_before_use(name: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    path = tmp_path / "run" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)
    for given in GIVEN[1:]:
        with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}/run'.*{name}"):
            check(tmp_path / "run", **given)


def test_cut_after_forgets_the_later_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    add_to(tmp_path, "rollouts/step-000002.jsonl", "rollouts/eval-step-000002.jsonl")
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "rew')  # of a process that was killed in this row
    folder.cut_after(1, b'{"step": 1, "reward": 0.5}\n')
    kept = sorted(f.name for f in (tmp_path / "rollouts").glob("*.jsonl") if f.name[0] != ".")
    assert kept == ["my-favourites.jsonl", "step-000001.jsonl"]
    folder.on_log(2, {"reward": 0.25})
    lines = '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    folder.cut_after(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_unwritable_files_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path).start("x: 1\n")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "append_row", full)
    monkeypatch.setattr(run_folder, "write_rollouts", full)
    for write, what in ((folder.on_log, "metrics.jsonl"), (folder.write_rollouts, "the rollouts")):
        with pytest.raises(ConfigError, match=f"run.dir = '{tmp_path}': {what} .*No space"):
            write(1, {})  # type: ignore[operator]

    def serialize(path: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(ConfigError, match=r"run.dir = .*model/ .*os error 28"):
        folder.replace_folder("model", serialize)
