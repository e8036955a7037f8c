"""Type checkers understand the public API: the programs in examples/ pass mypy --strict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What mm_grpo imports is left out: it takes most of the time, and a user's mistakes are about our names.
SETTINGS = """
[mypy]
strict = true
cache_dir = {cache}
[mypy-torch.*,transformers.*,deepspeed.*,datasets.*,peft.*,accelerate.*,numpy.*,vllm.*,safetensors.*,rich.*,typer.*]
follow_imports = skip
[mypy-mm_grpo.*]
follow_imports = silent
"""


@pytest.mark.long  # six seconds of mypy
def test_the_examples_pass_and_slips_in_them_do_not(tmp_path: Path) -> None:
    programs = [ROOT / "examples" / name for name in ("python_api.py", "own_reward.py", "loop.py")]
    wrong = programs[0].read_text(encoding="utf-8")
    for good, bad in (
        ("max_steps=20", "max_steps='20'"),
        ("prompts_per_step=", "prompts_per_stp="),
        ("train=train", "train_dataset=train"),
    ):
        assert good in wrong
        wrong = wrong.replace(good, bad)
    (tmp_path / "wrong.py").write_text(wrong)
    (tmp_path / "mypy.ini").write_text(SETTINGS.format(cache=tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "wrong.py", *programs],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=250,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)},
    )
    errors = [line.partition(" error: ")[::2] for line in done.stdout.splitlines() if " error: " in line]
    assert [where.partition(":")[0] for where, _ in errors] == ["wrong.py"] * 3, done.stdout + done.stderr
    assert [what for _, what in errors] == [
        'Unexpected keyword argument "prompts_per_stp" for "RolloutConfig"; did you mean "prompts_per_step"?'
        "  [call-arg]",
        'Argument "max_steps" to "RunConfig" has incompatible type "str"; expected "int | None"  [arg-type]',
        'Unexpected keyword argument "train_dataset" for "GRPOTrainer"  [call-arg]',
    ]
