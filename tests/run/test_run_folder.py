"""What a run folder holds, and what it refuses to write over."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from mm_grpo.errors import ConfigError
from mm_grpo.run import environment
from mm_grpo.run.atomic import atomic_folder, atomic_write
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import RunPaths


def names(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))


def finished_run(path: Path) -> RunFolder:
    """A folder with everything that a run writes, and notes of the user's beside it."""
    folder = RunFolder.create(path, "run: 1\n")
    folder.metrics.append(1, {"reward": 0.5})
    folder.metrics.append(2, {"reward": 0.75})
    for file in (
        "summary.json",
        "report.html",
        "rollouts/step-000001.jsonl",
        f"rollouts/images/{'0a' * 16}.png",
        "checkpoints/step-000002/state",
        "model/config.json",
        "tensorboard/events.out.tfevents.1",
        "notes.txt",
        "rollouts/my-favourites.jsonl",
        "rollouts/images/screenshot.png",
        "tensorboard/layout.json",
    ):
        target = path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("x\n")
    return folder


def test_a_new_run_has_its_config_and_its_environment(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "runs" / "a", "run:\n  seed: 3\n")
    assert names(tmp_path / "runs" / "a") == ["config.yaml", "environment.json"]
    assert (tmp_path / "runs" / "a" / "config.yaml").read_text() == "run:\n  seed: 3\n"


def test_prepare_writes_nothing(tmp_path: Path) -> None:
    folder = RunFolder.prepare(tmp_path / "a")
    assert names(tmp_path) == []
    folder.start("x: 1\n", rewards=[{"module": "mine", "qualname": "f", "sha256": None}])
    kept = json.loads((tmp_path / "a" / "environment.json").read_text())["rewards"]
    assert kept == [{"module": "mine", "qualname": "f", "sha256": None}]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path)
    before = names(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RunFolder.prepare(tmp_path)
    assert str(caught.value) == (
        f"run.dir = '{tmp_path}' already holds a run (2 rows in metrics.jsonl, summary.json, checkpoints/, model/);"
        " name another folder with run.dir=..., go on with this run with --resume, or replace it with"
        " run.overwrite=true"
    )
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("metrics.jsonl", "1 row in metrics.jsonl"),
        ("summary.json", "summary.json"),
        ("checkpoints/step-000001", "checkpoints/"),
        ("model/weights", "model/"),
    ],
)
def test_each_sign_of_a_run_counts(tmp_path: Path, file: str, what: str) -> None:
    RunFolder.create(tmp_path, "x: 1\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"already holds a run \({what}\)"):
        RunFolder.prepare(tmp_path)


def test_a_run_that_never_took_a_step_is_no_run(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "x: 1\n")
    (tmp_path / "metrics.jsonl").touch()
    RunFolder.create(tmp_path, "x: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "x: 2\n"


def test_a_folder_of_somebody_else_is_no_run_and_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").touch()
    RunFolder.create(tmp_path, "x: 1\n", overwrite=True)
    assert names(tmp_path) == ["config.yaml", "environment.json", "model", "model/precious"]


def test_overwrite_removes_what_a_run_writes_and_nothing_else(tmp_path: Path) -> None:
    finished_run(tmp_path)
    RunFolder.create(tmp_path, "x: 2\n", overwrite=True)
    assert names(tmp_path) == [
        "config.yaml",
        "environment.json",
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
    assert names(elsewhere) == ["config.json"]


def test_overwrite_does_not_remove_what_the_new_run_reads(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RunFolder.prepare(tmp_path, overwrite=True, reads=["Qwen/Qwen2.5-VL-3B-Instruct", tmp_path / "model"])
    assert str(caught.value) == (
        f"run.overwrite = true would remove '{tmp_path}/model', which this run reads;"
        f" name another folder than run.dir = '{tmp_path}'"
    )
    RunFolder.prepare(tmp_path, overwrite=True, reads=[tmp_path / "notes.txt"])


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError) as caught:
        RunFolder.prepare(tmp_path / "taken" / "run")
    assert str(caught.value) == (
        f"run.dir = '{tmp_path}/taken/run': there is a file at '{tmp_path}/taken'; name a folder that can be made"
    )


def test_a_folder_that_cannot_be_made_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        RunFolder.create("/proc/run", "x: 1\n")
    assert str(caught.value) == (
        "run.dir = '/proc/run': cannot be written (No such file or directory); name a folder that can"
    )
    with pytest.raises(
        ConfigError, match=r"run.dir = 'a+': cannot be made \(File name too long\); name a folder"
    ):
        RunFolder.prepare("a" * 300)


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError) as caught:
        RunFolder.create(tmp_path / "a", "x: 1\n")
    assert str(caught.value) == (
        f"run.dir = '{tmp_path}/a': '{tmp_path}/a' may not be written; name a folder that may"
    )


def test_open_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config.yaml; name the run.dir"):
        RunFolder.open(tmp_path)
    RunFolder.create(tmp_path, "x: 1\n")
    assert RunFolder.open(tmp_path).paths == RunPaths(tmp_path)


def test_cut_after_forgets_the_later_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    (tmp_path / "rollouts" / "step-000002.jsonl").touch()
    folder.cut_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'
    assert sorted(f.name for f in (tmp_path / "rollouts").glob("*.jsonl")) == [
        "my-favourites.jsonl",
        "step-000001.jsonl",
    ]
    folder.metrics.append(2, {"reward": 0.25})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_the_environment_tells_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/.venv/bin/mm-grpo", "train", "a.yaml"])
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = describe_environment()
    assert found["command"] == ["mm-grpo", "train", "a.yaml"]
    assert found["mm_grpo"] == "0.1.0"
    assert found["packages"]["torch"].startswith("2.")
    assert found["cpus"] >= 1
    assert "hf_secret" not in json.dumps(found) and "ada" not in json.dumps(found)


def test_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    for card in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / card).mkdir()
        (tmp_path / card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 5\n")
    assert environment._gpus(tmp_path) == ["NVIDIA H200", "NVIDIA H200"]
    assert environment._gpus(tmp_path / "none") == []


def test_atomic_write_replaces_the_file_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    atomic_write(file, "größer\n")
    assert file.read_bytes() == "größer\n".encode()
    atomic_write(file, "half \ud800\n")
    assert file.read_bytes() == b"half ?\n"

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(file, b"new")
    assert file.read_bytes() == b"half ?\n"
    assert names(tmp_path) == ["a.txt"]


def test_atomic_write_leaves_the_usual_permissions(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        atomic_write(tmp_path / "a", b"", durable=False)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_replace_folder_swaps_and_keeps_the_old_one_on_failure(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")

    def first(path: Path) -> None:
        (path / "weights").write_text("1")
        (path / "extra").touch()

    def second(path: Path) -> None:
        (path / "weights").write_text("2")

    folder.replace_folder("model", first)
    folder.replace_folder("model", second)
    assert names(tmp_path / "model") == ["weights"]
    assert (tmp_path / "model" / "weights").read_text() == "2"

    def broken(path: Path) -> None:
        (path / "weights").write_text("3")
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        folder.replace_folder("model", broken)
    assert (tmp_path / "model" / "weights").read_text() == "2"
    assert names(tmp_path) == ["config.yaml", "environment.json", "model", "model/weights"]


def test_a_swap_that_was_killed_half_way_is_mended(tmp_path: Path) -> None:
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "weights").write_text("1")

    def broken(path: Path) -> None:
        raise RuntimeError("again")

    with pytest.raises(RuntimeError, match="again"):
        atomic_folder(tmp_path / "model", broken)
    assert names(tmp_path) == ["model", "model/weights"]
