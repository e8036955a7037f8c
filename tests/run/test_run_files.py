"""Whole files and folders on disk, and the environment that a run writes down."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from helpers.small_runs import names

from mm_grpo.files import atomic_folder, atomic_write, temporary_folder
from mm_grpo.run.environment import describe_environment


def test_the_environment_holds_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/ada/.venv/bin/mm-grpo", "train", "a.yaml"])
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = describe_environment()
    assert found["command"] == ["mm-grpo", "train", "a.yaml"]
    assert found["mm_grpo"] == "0.1.0"
    assert found["packages"]["torch"].startswith("2.")
    assert found["cpus"] >= 1
    assert "hf_secret" not in json.dumps(found) and "ada" not in json.dumps(found)


def test_atomic_write_replaces_the_file_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, mask = tmp_path / "a.txt", os.umask(0o022)
    try:
        atomic_write(file, "größer\n")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644  # the usual permissions
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


def test_a_folder_is_swapped_whole_and_a_failure_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def broken(path: Path) -> None:
        (path / "weights").write_text("3")
        raise RuntimeError("out of memory")

    (tmp_path / ".model.old").mkdir()  # a swap that was killed half way
    (tmp_path / ".model.old" / "weights").write_text("1")
    for text in ("1", "2"):
        with pytest.raises(RuntimeError, match="out of memory"):
            atomic_folder(folder, broken)
        assert (folder / "weights").read_text() == text and names(tmp_path) == ["model", "model/weights"]
        atomic_folder(folder, lambda new: (new / "weights").write_text("2"))


def test_temporary_folders_of_the_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("mm_grpo_tmp_left", "mm_grpo_tmp_new", "mm_grpo_other"):
        (tmp_path / name / "inner").mkdir(parents=True)
    with temporary_folder("held") as held:
        for name in ("mm_grpo_tmp_left", "mm_grpo_other", held.name):
            os.utime(tmp_path / name, (1, 1))
        with temporary_folder("x") as folder:
            assert folder.is_dir() and folder.name.startswith("mm_grpo_tmp_x_")
        folders = ["mm_grpo_other", "mm_grpo_other/inner", "mm_grpo_tmp_new", "mm_grpo_tmp_new/inner"]
        assert names(tmp_path) == sorted([*folders, held.name])
    assert not held.exists()
