"""Help, versions and conversion on the command line, and what is said about options that are fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import mm_grpo
from mm_grpo.cli.help import EXAMPLES, GROUPS
from mm_grpo.cli.main import app
from mm_grpo.config import GRPOConfig

pytestmark = pytest.mark.lowest


def commands() -> list[str]:
    from typer.main import get_command

    found = get_command(app).commands  # type: ignore[attr-defined]
    inner = [f"{name} {below}" for name, one in found.items() for below in getattr(one, "commands", {})]
    return sorted([*found, *inner])


def test_every_command_has_examples_in_its_help(command: Any) -> None:
    assert set(EXAMPLES) == set(commands())
    for name in commands():
        done = command(*name.split(), "--help")
        assert done.code == 0
        shown = done.out.partition("\n  Examples:\n")[2].splitlines()
        assert [line.strip() for line in shown] == list(EXAMPLES[name]), name
    assert command("train", "-h").out == command("train", "--help").out


def test_the_help_shows_every_command_in_a_group_with_its_sentence(command: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = command("--help")
    assert sorted(" ".join(GROUPS.values()).split()) == [name for name in commands() if " " not in name]
    assert "..." not in done.out.partition("Begin:")[2] and max(map(len, done.out.splitlines())) <= 80
    assert [line.rstrip(":") for line in done.out.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)


def test_config_shows_fields_and_answers_other_names(command: Any) -> None:
    marked = [line.split(":")[0] for line in command("config").out.splitlines() if line.startswith("* ")]
    assert marked == [f"* {field.path}" for field in GRPOConfig.field_help() if field.matters]
    assert len(marked) == 26
    inner = re.findall(r"(?m)^[* ] (\S+):", command("config", "rollout.vllm").out)
    assert inner == [path for path in GRPOConfig.all_paths() if path.startswith("rollout.vllm.")]
    found = command("config", "learning_rate").out
    assert found.startswith("* optim.learning_rate: a number >= 0 or null; default null\n")
    assert "docs/" not in found
    (pages,) = re.findall(r"(?m)^docs/ is (.+)$", command("config", "run.guards").out)
    assert (Path(pages) / "checking.md").is_file()
    assert "\n  run.save_every: " in command("config", "save").out
    assert command("config", "wandb").out.startswith("* run.trackers: ")
    assert command("config", "frobnicate").code == 2
    wrong = command("config", "num_train_epochs")
    assert wrong.code == 2 and "run.max_steps" in wrong.err


def test_the_config_of_init_names_every_field_that_matters() -> None:
    text = (Path(mm_grpo.__file__).parents[1] / "examples/init/config.yaml").read_text(encoding="utf-8")
    whole = re.sub(r"(?m)^( *)# (\w+:)", r"\1\2", text)
    values = yaml.safe_load(whole)
    GRPOConfig.from_dict(values)
    for path in (field.path for field in GRPOConfig.field_help() if field.matters):
        value: Any = values
        for part in path.split("."):
            value = value[part]


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--config", "mm-grpo train CONFIG"),
        ("--learning_rate", "optim.learning_rate=VALUE"),
        ("--optim.learning_rate", "optim.learning_rate=VALUE"),
        ("--temperature", "rollout.temperature=VALUE or rollout.eval.temperature=VALUE"),
        ("--output_dir", "write run.dir"),
        ("--nonsense", ""),  # as click words it
    ],
)
def test_an_option_that_is_a_field(option: str, advice: str, command: Any) -> None:
    done = command("train", "shapes", option, "1e-6")
    assert (done.code, done.out) == (2, "") and advice in done.err
    assert re.search(f"[Nn]o such option:? '?{option.partition('=')[0]}", done.err)


def test_env_shows_versions_and_devices(command: Any) -> None:
    found = json.loads(command("env").out)
    assert found["mm_grpo"] == mm_grpo.__version__ and found["packages"]["torch"]
    assert "command" not in found and "started" not in found


def test_convert_writes_a_config_once(command: Any, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "trl.yaml", tmp_path / "config.yaml"
    theirs.write_text(yaml.safe_dump({"model_name_or_path": "m", "learning_rate": 1e-5, "use_dora": True}))
    done = command("convert", theirs, "--output", ours)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"all keys taken over into {ours} but 1, with")
    assert yaml.safe_load(ours.read_text())["optim"]["learning_rate"] == 1e-5
    assert "#   use_dora = True: " in ours.read_text()
    again = command("convert", theirs, "--output", ours)
    assert (again.code, again.err.count("\n")) == (2, 1) and f"--output '{ours}'" in again.err
    assert command("convert", theirs).out == ours.read_text()
    assert command("convert", tmp_path / "no.yaml").code == 2
