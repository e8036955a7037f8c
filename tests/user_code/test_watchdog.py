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
from mm_grpo.user_code import thread
thread.WITHOUT_LOCK = 0.5
prompt = Prompt(Sample("train:0", [{"role": "user", "content": "q"}]), (1,), EnginePrompt((1,), ()), None, {})
made = scorer.Scorer([{"name": sys.argv[1] + ":slow", "timeout": 0.5}])
made.score([prompt], [Completion((1,), (0.0,), "x", "stop", 0)], step=1)
"""

ENGINE = f"""
from types import SimpleNamespace
from mm_grpo.rollout.vllm.internals import _watched

class Engine:
    def step(self):
        {HANG}

handle = SimpleNamespace(llm=SimpleNamespace(llm_engine=Engine()), timeout=0.5)
with _watched(handle):
    handle.llm.llm_engine.step()
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_reward_that_hangs_with_the_interpreters_lock(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def slow(completion):\n    {HANG}\n    return 1.0\n")
    result = ended(REWARD, str(file))
    assert result.returncode == 1
    assert "Timeout (" in result.stderr and f'"{file}", line 2 in slow' in result.stderr


@pytest.mark.slow
def test_a_hang_inside_vllm() -> None:
    result = ended(ENGINE)
    assert result.returncode == 1 and "Timeout (" in result.stderr and "in step" in result.stderr


def test_what_moves_or_ends_in_time_is_left_alone_and_the_block_whose_time_ends_first_counts() -> None:
    script = f"""
import time
from mm_grpo.user_code.watchdog import Watchdog
with Watchdog(1.0) as outer:
    for _ in range(5):
        with Watchdog(1.0):
            time.sleep(0.25)
        outer.restart()
with Watchdog(0.2):
    pass
time.sleep(0.4)
print("moved", flush=True)
with Watchdog(0.3), Watchdog(50.0):
    {HANG}
"""
    result = ended(script)
    assert (result.returncode, result.stdout) == (1, "moved\n") and "Timeout (" in result.stderr
