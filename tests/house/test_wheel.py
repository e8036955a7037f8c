"""The wheel: the packages it lists, and an installation of it that holds everything the source does."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}

LIST_AND_IMPORT = """
import importlib, json, pkgutil, sys
import mm_grpo
names = [m.name for m in pkgutil.walk_packages(mm_grpo.__path__, "mm_grpo.")]
names = [n for n in names if not n.startswith("mm_grpo.examples")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"file": mm_grpo.__file__, "version": mm_grpo.__version__, "names": names}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=ENV, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files() -> list[Path]:
    """What a commit of the working tree would hold, relative to the root."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).exists())


def modules_on_disk() -> list[str]:
    """Dotted names of every module of the package, as pkgutil would name them."""
    files = [f for f in source_files() if f.parts[0] == "mm_grpo" and f.suffix == ".py"]
    names = {".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files}
    return sorted(names - {"mm_grpo"})


def test_the_packages_listed_are_the_packages_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    folders = {f.parent for f in source_files() if f.parts[0] == "mm_grpo" and f.suffix == ".py"}
    assert listed == sorted(
        [".".join(folder.parts) for folder in folders] + ["mm_grpo.docs", "mm_grpo.examples"]
    )
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree so that no stale build/ folder can lend it files."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for file in source_files():
        target = copy / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, copy, cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


@pytest.mark.long
def test_the_wheel_holds_each_file_once(wheel: Path) -> None:
    held = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    wanted = [str(f) for f in source_files() if f.parts[0] == "mm_grpo"]
    wanted += [f"mm_grpo/{f}" for f in source_files() if f.parts[0] == "examples"]
    wanted += [f"mm_grpo/{f}" for f in source_files() if f.match("docs/*.md") or f.match("docs/*.py")]
    assert sorted(held) == sorted(wanted)


@pytest.mark.long
def test_an_installed_wheel_imports_every_module(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = shlex.split("-m pip install --quiet --no-deps --no-index --target")
    run(sys.executable, *install, site, wheel, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n{LIST_AND_IMPORT}"
    answer = json.loads(run(sys.executable, "-c", code, cwd=elsewhere).splitlines()[-1])
    assert Path(answer["file"]).is_relative_to(site)
    assert answer["version"] == "0.1.0"
    assert sorted(answer["names"]) == modules_on_disk()
    assert (site / "bin" / "mm-grpo").exists()
