"""The wheel: the packages it lists, and an installation of it, with which a newcomer trains on files of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.demo import copy_sources, source_files
from helpers.documents import draw_circles

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}

PROGRAM = """
import importlib, json, pkgutil, sys
site, snippet, *lines = json.loads(sys.argv[1])
sys.path.insert(0, site)
import mm_grpo
from mm_grpo.cli.main import app
for line in lines:
    print("$", line, flush=True)
    assert not app(line.split("|"), standalone_mode=False), line
exec(snippet)
names = [m.name for m in pkgutil.walk_packages(mm_grpo.__path__, "mm_grpo.")]
names = [n for n in names if not n.startswith("mm_grpo.examples")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"file": mm_grpo.__file__, "version": mm_grpo.__version__, "names": names}))
"""
"""Runs commands in one process, for each would import torch again, then Python, and imports every module."""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=ENV, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules_on_disk() -> list[str]:
    """Dotted names of every module of the package, as pkgutil would name them."""
    files = [f for f in source_files() if f.parts[0] == "mm_grpo" and f.suffix == ".py"]
    names = {".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files}
    return sorted(names - {"mm_grpo"})


def test_the_packages_listed_are_the_packages_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    folders = {f.parent for f in source_files() if f.parts[0] == "mm_grpo" and f.suffix == ".py"}
    names = [".".join(folder.parts) for folder in folders]
    assert listed == sorted([*names, "mm_grpo.docs", "mm_grpo.examples"])
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree so that no stale build/ folder can lend it files."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_sources(copy)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, copy, cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


@pytest.mark.long
def test_the_wheel_holds_each_file_once(wheel: Path) -> None:
    held = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    wanted = [str(f) for f in source_files() if f.parts[0] == "mm_grpo"]
    wanted += [f"mm_grpo/{f}" for f in source_files() if f.parts[0] in ("docs", "examples")]
    assert sorted(held) == sorted(wanted)


def write_rows(folder: Path) -> None:
    """Pictures of circles, and rows about them in a table of one's own."""
    rows = draw_circles(folder / "photos", seed=0, count=20)
    lines = [f"{Path(row['image']).name},{row['prompt']},{row['answer']}\n" for row in rows]
    (folder / "labels.csv").write_text("".join(["file,question,label\n", *lines]))


@pytest.mark.long
def test_a_newcomer_with_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Outside the checkout, over the pinned packages: a file of one's own is trained on, and the README's Python runs.
    `make release-check` runs more commands, one by one, over the newest packages."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    install = shlex.split("-m pip install --quiet --no-deps --no-index --target")
    run(sys.executable, *install, site, wheel, cwd=tmp_path)
    write_rows(here)
    given = [
        f"model.path={site}/mm_grpo/examples/shapes/base", "rewards=[exact_match]", "rollout.prompts_per_step=5",
        "rollout.num_generations=4", "rollout.max_completion_length=6", "optim.learning_rate=3e-4", "run.max_steps=2",
        "data.train=labels.csv", "data.image_dir=photos", "data.columns={image: file, prompt: question, answer: label}",
        "run.dir=runs/mine",
    ]  # fmt: skip
    train = "|".join(["train", "mine/config.yaml", *given])
    lines = ["init|mine", train, "export|runs/mine|model", "config|run.guards"]
    readme = README.read_text()
    (snippet,) = re.findall(r"```python\n(from mm_grpo import GRPOConfig.*?)```", readme, re.DOTALL)
    few = '"run.max_steps=2", "data.eval.colour_and_shape.size=20", "data.eval.count.size=5"'
    assert '"run.max_steps=20"' in snippet
    given_all = [str(site), snippet.replace('"run.max_steps=20"', few), *lines]
    output = run(sys.executable, "-c", PROGRAM, json.dumps(given_all), cwd=here)
    answer = json.loads(output.splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(site)
    assert answer["version"] == "0.1.0"
    assert sorted(answer["names"]) == modules_on_disk()
    assert (site / "bin" / "mm-grpo").exists()
    assert output.count("done: 2 steps") == 1 and (here / "model/config.json").is_file()
    assert (here / "runs/python/report.html").is_file()
    (pages,) = re.findall(r"^docs/ is (.+)$", output, re.MULTILINE)
    assert Path(pages).is_relative_to(site) and (Path(pages) / "checking.md").is_file()
