"""The workflow on GitHub runs `.ci/run` over the Python versions that pyproject.toml promises."""

from __future__ import annotations

import tomllib
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def test_the_workflow_tests_each_python_that_is_promised() -> None:
    job = YAML(typ="safe").load(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    promised = {line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)}
    assert set(job["strategy"]["matrix"]["python"]) == promised - {"3 :: Only"}
    (step,) = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    assert (ROOT / step["run"]).stat().st_mode & 0o111
    assert step["env"]["PYTHON"] == "python${{ matrix.python }}"
