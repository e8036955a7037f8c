"""The command line: every mistake is one message with exit code 2, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import forkserver
from helpers.processes import alone


@pytest.mark.lowest
def test_train_and_check_do_what_they_say(command: Any, config_path: Path) -> None:
    checked = command("check", config_path)
    assert checked.code == 0 and "train" in checked.out and "ok" in checked.out
    assert not (config_path.parent / "run").exists()
    done = command("train", config_path, "run.max_steps=1")
    assert done.code == 0, done.err
    assert "done: 1 steps" in done.out and "2 prompts x 2 generations = 4 completions" in done.out
    assert (config_path.parent / "run" / "report.html").stat().st_size > 2000


def rows(config_path: Path, *lines: Any) -> None:
    (config_path.parent / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


GOOD = {"prompt": "what is it", "image": "0.png"}


def test_check_lists_every_failing_row(command: Any, config_path: Path) -> None:
    broken = {"prompt": "x", "images": ["1.png", 5]}
    rows(config_path, {"image": "0.png"}, GOOD, {**GOOD, "image": "gone.png"}, broken)
    result = command("check", config_path)
    assert result.code == 2
    for words in ("rows.jsonl:1", "rows.jsonl:3", "rows.jsonl:4", "3 problem(s)"):
        assert words in result.out, result.out
    assert "rows.jsonl:2:" not in result.out  # it is shown as the model gets it


def test_control_characters_of_data_never_reach_the_terminal(command: Any, config_path: Path) -> None:
    hostile = "\x1b[31m\x07\u202e\u2028[bold]"
    rows(config_path, {**GOOD, "answer": hostile, "image": f"{hostile}.png"})
    for name in ("train", "check"):
        result = command(name, config_path)
        both = result.err + result.out
        assert result.code == 2 and r"\x1b[31m\x07\u202e\u2028[bold].png" in both
        assert not set(both) & set("\x1b\x07\u202e\u2028")


TRAIN = pytest.param("train config.yaml", marks=pytest.mark.slow)


@pytest.mark.parametrize("line", ["recipes", "config", "rewards", "check config.yaml", TRAIN])
def test_a_reader_that_ends_ends_no_command(line: str, config_path: Path) -> None:
    """As `| head -1` does; a run goes on with a reward that prints, in this process or in one of its own."""
    (config_path.parent / "mine.py").write_text(
        "def mine(completion):\n    print(completion, flush=True)\n    return len(set(completion))\n"
        "def other(completion):\n    return mine(completion)\n"
    )
    written = yaml.safe_load(config_path.read_text())
    written["rewards"] += [{"name": f"{config_path.parent}/mine.py:other", "isolated": True}]
    config_path.write_text(yaml.safe_dump(written))
    reader, writer = os.pipe()
    os.close(reader)
    program, errors = ["-m", "mm_grpo.cli", *line.split()], config_path.parent / "errors.txt"
    with os.fdopen(writer, "wb") as pipe, errors.open("wb") as file:
        process = forkserver.start(program, env=alone(), cwd=config_path.parent, stdout=pipe, stderr=file)
    try:
        assert process.wait() == 0, errors.read_text()
    finally:
        process.end()
    assert "Traceback" not in errors.read_text() and "ignored" not in errors.read_text()
    assert (config_path.parent / "run" / "summary.json").is_file() == line.startswith("train")


@pytest.mark.slow
def test_keys_and_passwords_are_nowhere_but_in_the_user_s_config(command: Any, config_path: Path) -> None:
    (config_path.parent / "mine.py").write_text(
        "def mine(completion, *, api_key='', url=''):\n"
        "    assert (api_key, url) == ('s3cret-a', 'http://me:s3cret-b@host/v1?key=s3cret-c')\n"
        "    return len(set(completion))\n"
    )
    written = yaml.safe_load(config_path.read_text())
    secrets = {"api_key": "s3cret-a", "url": "http://me:s3cret-b@host/v1?key=s3cret-c"}
    written["rewards"] = [{"name": f"{config_path.parent}/mine.py:mine", **secrets}]
    written["run"] |= {"trackers": ["tensorboard"], "save_every": 1}
    written["data"]["system_prompt"] = prompt = "Look at http://host/?page=1 well"
    config_path.write_text(yaml.safe_dump(written))
    shouted = "rewards.0.url=http://me:s3cret-b@host/v1?key=s3cret-c"
    done = command("train", config_path, shouted)
    assert done.code == 0 and "s3cret" not in done.out + done.err, done.err
    folder = config_path.parent / "run"
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["system_prompt"] == prompt
    exported = command("export", folder, config_path.parent / "out")
    assert exported.code == 0, exported.err
    for file in [*folder.rglob("*"), *(config_path.parent / "out").rglob("*")]:
        assert file.is_dir() or b"s3cret" not in file.read_bytes(), file
    assert "redacted" in (folder / "report.html").read_text()
    own = command("train", folder / "config.yaml", "--resume", "run.max_steps=3")
    assert own.code == 2 and "<redacted>" in own.err and "Traceback" not in own.err
    given = [f"rewards.0.{name}={value}" for name, value in secrets.items()]
    done = command("train", folder / "config.yaml", "run.max_steps=3", *given, "--resume")
    assert done.code == 0, done.err
    for again in (["view", folder, "--certificate"], ["doctor", folder, *given, "--replay", "2"]):
        done = command(*again)
        assert done.code == 0 and "s3cret" not in done.out + done.err, done.err
    wrong = command("check", config_path, shouted, "rewards.0.weight=much")
    assert wrong.code == 2 and "rewards" in wrong.err and "s3cret" not in wrong.err


def test_ctrl_c_before_a_run(command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mm_grpo.cli.train.load_config", interrupt)
    result = command("train", config_path)
    assert (result.code, result.err, result.out) == (130, "interrupted\n", "")


def test_the_console_script_itself_refuses_without_a_traceback(config_path: Path) -> None:
    program = [sys.executable, "-m", "mm_grpo.cli", "train", str(config_path), "rollout.num_generations=1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "num_generations" in line


@pytest.mark.field_bug("no-gradient")
def test_a_run_without_an_update_ends_with_3_and_leaves_its_folder(command: Any, config_path: Path) -> None:
    (config_path.parent / "mine.py").write_text("def mine(completion):\n    return 1.0\n")
    result = command("train", config_path)
    assert result.code == 3, result.err
    assert "stopped: guard no_update: " in result.err
    assert "Traceback" not in result.err and "done: 2 steps" not in result.out
    run = config_path.parent / "run"
    assert (run / "model" / "config.json").exists() and (run / "report.html").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] == 2


def test_a_smoke_run_only_warns_and_leaves_nothing(
    command: Any, config_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    place = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    (config_path.parent / "mine.py").write_text("def mine(completion):\n    return None\n")
    result = command("train", config_path, "--smoke")
    assert result.code == 0, result.err
    assert "guard no_reward: for 2 steps no completion has had a reward" in caplog.text + result.err
    assert "results are not kept; set run.dir=... to keep them" in result.out and "model/" not in result.out
    assert list(place.glob("mm_grpo*")) == []
    both = command("train", config_path, "--smoke", "--resume")
    assert both.code == 2 and "--smoke and --resume" in both.err


def test_ctrl_c_while_the_commands_are_imported() -> None:
    hook = "lambda event, args: os.kill(os.getpid(), 2) if args[:1] == ('mm_grpo.cli.train',) else 0"
    code = f"import os, sys; sys.addaudithook({hook}); import mm_grpo.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
