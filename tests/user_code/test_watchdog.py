"""What hangs without letting Python run ends with the place where it stands and exit code 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANG = "import ctypes; ctypes.PyDLL(None).usleep(60_000_000)"  # PyDLL keeps the interpreter's lock

REWARD = """
import sys
from mm_grpo.rewards import scorer
from mm_grpo.types import Completion, EnginePrompt, Prompt, Sample
from mm_grpo.user_code import watchdog
watchdog.LOCK_GRACE = 0.5
prompt = Prompt(Sample("train:0", [{"role": "user", "content": "q"}]), (1,), EnginePrompt((1,), ()), None, {})
made = scorer.Scorer([{"name": sys.argv[1] + ":slow", "timeout": 0.5}])
made.score([prompt], [Completion((1,), (0.0,), "x", "stop", 0)], step=1)
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", ["", "async "])
def test_a_reward_that_hangs_with_the_interpreters_lock(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{kind}def slow(completion):\n    {HANG}\n    return 1.0\n")
    result = ended(REWARD, str(file))
    assert result.returncode == 1
    assert "Timeout (" in result.stderr and f'"{file}", line 2 in slow' in result.stderr


def test_blocks_that_end_in_time_are_left_alone_and_the_one_whose_time_ends_first_counts() -> None:
    script = f"""
import time
from mm_grpo.user_code.watchdog import watchdog
with watchdog(0.2), watchdog(0.1):
    pass
time.sleep(0.4)
print("went on", flush=True)
with watchdog(0.3), watchdog(50.0):
    {HANG}
"""
    result = ended(script)
    assert (result.returncode, result.stdout) == (1, "went on\n") and "Timeout (" in result.stderr
