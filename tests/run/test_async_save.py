"""Checkpoints that a thread writes while training goes on: of their own step to the bit, whole or not there at all."""

from __future__ import annotations

import errno
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.patience import PATIENCE
from helpers.run_folders import metrics_of
from helpers.small_runs import ROWS, config_for, vowels
from test_checkpoint import build, groups_of

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.learner import state
from mm_grpo.run import checkpoint
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.environment import free_memory
from mm_grpo.run.paths import RunPaths


class Disk:
    """A disk that takes nothing until `open`, and then `seconds` for each file; `threads` are those that wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
        self.opened, self.asked, self.threads = threading.Event(), threading.Event(), list[str]()
        real = state._write

        def write(*given: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            self.asked.set()
            assert self.opened.wait(PATIENCE)
            time.sleep(seconds)
            return real(*given)

        monkeypatch.setattr(state, "_write", write)

    def open(self, *_: Any) -> None:
        self.opened.set()


def checkpoints_of(learner: Any, folder: Path, call: Any = None, **run: Any) -> Checkpoints:
    config = learner.config.with_values({f"run.{name}": value for name, value in run.items()})
    return Checkpoints(RunPaths(folder), learner, config, call)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_of_its_step_although_training_goes_on(
    dtype: torch.dtype,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = build(models["qwen2_vl"], dtype)
    folders = {name: tmp_path / name for name in ("waiting", "background")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    kept = checkpoints_of(learner, folders["background"])
    for step in (1, 2):  # the second into the memory of the first
        learner.update(groups_of(learner, step))
        with monkeypatch.context() as full:
            full.setattr(checkpoint, "free_memory", lambda: 0)
            waiting = checkpoints_of(learner, folders["waiting"])
            waiting.save(step, {"tokens_seen": 10 * step})

        with monkeypatch.context() as slowly:
            disk = Disk(slowly)
            kept.begin(step, {"tokens_seen": 10 * step})
            drawn = random.getstate(), torch.get_rng_state()
            assert disk.asked.wait(PATIENCE)
            random.random(), torch.rand(())
            learner.update(groups_of(learner, step + 1))
            with (folders["background"] / "metrics.jsonl").open("a") as log:
                log.write("later")
            disk.open()
            kept.finish(wait=True)
        random.setstate(drawn[0]), torch.set_rng_state(drawn[1])
        (folders["background"] / "metrics.jsonl").write_text('{"step": 1}\n')
        found = waiting.newest()
        assert found is not None and found.step == step
        waiting.load(found)  # as it was before the updates in between
    written = files_of(folders["background"])
    assert written == files_of(folders["waiting"])
    names = {"manifest.json", "metrics.jsonl", "state-00000-of-00001.safetensors"}
    assert {name.rpartition("/")[2] for name in written} == names


def test_a_checkpoint_that_is_being_written_is_none_yet(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, saved = build(models["qwen2_vl"]), []
    kept = checkpoints_of(learner, tmp_path, lambda event, **values: saved.append((event, values)))
    disk = Disk(monkeypatch)
    kept.begin(1, {})
    assert disk.asked.wait(PATIENCE)
    assert disk.threads == ["mm_grpo checkpoint 1"]
    kept.finish(wait=False)
    assert saved == [] and kept.newest() is None
    assert [p.name for p in kept.folder.iterdir()] == [".step-000001.new"]

    learner.update(groups_of(learner, 1))
    threading.Timer(0.1, disk.open).start()
    kept.begin(2, {})  # waits for the first
    first = {"step": 1, "path": kept.folder / "step-000001"}
    assert saved == [("on_save", first)] and first["path"].is_dir()
    kept.finish(wait=True)
    assert [values["step"] for _, values in saved] == [1, 2]
    kept.finish(wait=True)
    assert len(saved) == 2  # once each
    assert sorted(p.name for p in kept.folder.iterdir()) == ["step-000001", "step-000002"]


def test_an_interrupted_wait_leaves_no_checkpoint(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = checkpoints_of(build(models["qwen2_vl"]), tmp_path)
    kept.save(1, {})
    disk = Disk(monkeypatch)
    kept.begin(2, {})
    assert kept._writing is not None
    future = kept._writing[1]
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.01)
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            kept.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "the checkpoint of step 2 is being written; Ctrl-C ends the run without it" in caplog.text
    disk.open()
    with pytest.raises(RuntimeError, match="the run has ended"):
        future.result(PATIENCE)
    assert [p.name for p in kept.folder.iterdir()] == ["step-000001"]


def test_without_room_for_the_copies_the_run_waits(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = build(models["qwen2_vl"])
    needed = 12 * sum(p.numel() for p in learner.model.parameters())
    disk = Disk(monkeypatch)
    disk.open()
    for free, thread in ((needed - 1, "MainThread"), (needed, "mm_grpo checkpoint 1"), (None, disk.threads)):
        monkeypatch.setattr(checkpoint, "free_memory", lambda free=free: free)
        caplog.clear()
        checkpoints_of(learner, tmp_path).save(1, {})
        if free is not None:
            assert disk.threads[-1] == thread
        assert ("copies for a checkpoint take" in caplog.text) == (thread == "MainThread")
    assert disk.threads[-1] == "mm_grpo checkpoint 1"


def test_a_disk_that_is_full_for_the_thread_is_seen_in_the_run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkpoints_of(build(models["qwen2_vl"]), tmp_path)
    kept.save(1, {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "_write", full)
    for end in (lambda: kept.finish(wait=True), lambda: kept.begin(3, {})):
        kept.begin(2, {})
        with pytest.raises(ConfigError, match=r"^run.dir = .*No space left on device\).* step-000001"):
            end()
        assert [p.name for p in kept.folder.iterdir()] == ["step-000001"]


def test_free_memory_is_what_the_container_and_the_machine_have_left(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       9000 kB\nMemAvailable:   4000 kB\n")
    assert free_memory(tmp_path, meminfo) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 500000\nkernel 200\nshmem 30\n")
    assert free_memory(tmp_path, meminfo) == 4000 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert free_memory(tmp_path, meminfo) == 2000000 - 1230
    assert free_memory(tmp_path / "none", tmp_path / "none") is None


# whole runs ----------------------------------------------------------------------------------


def trainer(model: Path, folder: Path, *callbacks: Any, resume: bool = False, **run: Any) -> GRPOTrainer:
    run = {"max_steps": 4, "save_every": 2, "report": False, "sight_every": 0, "profile": True, **run}
    config = config_for(model, folder, run=run)
    return GRPOTrainer(config, train=ROWS, rewards=[vowels], callbacks=callbacks, resume=resume)


class Record:
    """The events of a run; `at` calls a function in an event of a step."""

    def __init__(self, **at: Any) -> None:
        self.events, self.at = list[tuple[str, int]](), at

    def on_step_end(self, step: int) -> None:
        self.events.append(("step", step))
        self.at.get(f"step_{step}", lambda: None)()

    def on_save(self, step: int, path: Path) -> None:
        assert path.name == "model" or (path / "manifest.json").is_file()
        self.events.append((path.name, step))


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(checkpoint, "free_memory", lambda: 0)
        trainer(models["qwen2_vl"], tmp_path / "waiting").train()
    disk = Disk(monkeypatch)
    record = Record(step_3=disk.open)
    summary = trainer(models["qwen2_vl"], tmp_path / "background", record).train()
    steps = [event for event in record.events if event[0] == "step"]
    assert steps == [("step", n) for n in (1, 2, 3, 4)]
    places = {name: number for number, (name, _) in enumerate(record.events)}
    # after the step in which it was written; the last one before the run goes on to the model
    assert record.events.index(("step", 3)) < places["step-000002"] < places["step-000004"]
    assert record.events[-2:] == [("step-000004", 4), ("model", 4)]
    assert record.events[places["step-000002"]] == ("step-000002", 2)
    folders = [tmp_path / name for name in ("waiting", "background")]
    assert metrics_of(folders[0]) == metrics_of(folders[1])
    for name in ("step-000002", "step-000004"):
        file = Path("checkpoints", name, "state-00000-of-00001.safetensors")
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    phases = {phase["phase"]: phase["seconds"] for phase in summary["profile"]["phases"]}
    assert phases["checkpoint"] >= phases["checkpoint/copying the state"] > 0
    assert phases["checkpoint/waiting until it is written"] > 0 and "checkpoint/writing" not in phases


@pytest.mark.slow
def test_a_run_that_fails_ends_with_its_checkpoint(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, seconds=0.5)

    def fail() -> None:
        disk.open()
        raise ZeroDivisionError("in step 2")

    with pytest.raises(ZeroDivisionError, match="in step 2"):
        trainer(models["qwen2_vl"], tmp_path, Record(step_2=fail), save_every=1, max_steps=3).train()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
