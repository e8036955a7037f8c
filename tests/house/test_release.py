"""How a release is made: the workflow's commands, the check of versions, container files and constraints."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from mm_grpo.cli.main import app

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / ".ci/release_check.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
VERSIONED = ("mm_grpo/version.py", "CITATION.cff", "CHANGELOG.md")


def test_a_tag_is_the_version_of_every_file(tmp_path: Path) -> None:
    check, texts = RELEASE["check_version"], {name: (ROOT / name).read_text() for name in VERSIONED}
    assert check("v0.1.0") == check(None) == "0.1.0"
    for tag, name, old in [
        ("v0.2.0", "", ""),
        ("v0.1.0", "CITATION.cff", "-28"),
        ("v0.1.0", "CHANGELOG.md", "## 0"),
    ]:
        for file, text in texts.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text.replace(old, "9", file == name))
        with pytest.raises(SystemExit, match=name or "the tag has 0"):
            check(tag, tmp_path)


def test_release_check_runs_every_command_that_ends() -> None:
    lines = {shlex.split(line)[0] for line in RELEASE["SHORT"] + RELEASE["FULL"]}
    assert lines - {"--help", "--version"} == set(get_command(app).commands) - {"serve"}  # type: ignore[attr-defined]


def test_the_workflow_runs_what_the_repository_has() -> None:
    jobs = YAML(typ="safe").load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    runs = "\n".join(step.get("run", "") for step in steps)
    assert set(re.findall(r"make (\w+)", runs)) <= set(
        re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    )
    assert all((ROOT / name).is_file() for name in re.findall(r"(?<=[ '])(\S+/\S+\.(?:py|txt))\b", runs))
    assert [name for name, job in jobs.items() if "secrets." in str(job)] == ["publish"]
    assert jobs["publish"]["environment"] == "release" and jobs["publish"]["needs"] == "check"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_files_name_what_is_there(name: str) -> None:
    text = (ROOT / f"containers/{name}.Containerfile").read_text()
    for argument, value in re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE):
        text = text.replace(f"${{{argument}}}", value)
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)).split()
    visible = re.findall(r"^!(.+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert len(copied) >= 8 and all(
        (ROOT / file).exists() and file.split("/")[0] in visible for file in copied
    )
    assert set(re.findall(r"requirements/[\w.-]+\.txt", text)) <= set(copied)
    assert set(re.findall(r"--extra ([\w-]+)", text)) <= set(EXTRAS)
