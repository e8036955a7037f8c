"""What hangs without letting Python run ends with a message, the place where it stands and exit code 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLEEP = "import ctypes; ctypes.PyDLL(None).usleep(60_000_000)"  # PyDLL keeps the interpreter's lock
REGEX = 'import re; re.match(r"(a+)+b", "a" * 50)'

REWARD = """
import sys
from pathlib import Path
from mm_grpo.rewards import async_calls, scorer
from mm_grpo.types import Completion, EnginePrompt, Prompt, Sample
from mm_grpo.user_code import thread, watchdog
watchdog.AFTER_MESSAGE = 0.3
thread.WITHOUT_LOCK = async_calls.WITHOUT_LOCK = 0.5
prompt = Prompt(Sample("train:0", [{"role": "user", "content": "q"}]), (1,), EnginePrompt((1,), ()), None, {})
made = scorer.Scorer([{"name": sys.argv[1] + ":slow", "timeout": 0.5}])
made.score([prompt], [Completion((1,), (0.0,), "x", "stop", 0)], step=1)
"""

START = """
import sys
from mm_grpo.environments import factories
from mm_grpo.user_code import watchdog
watchdog.START_LIMIT, watchdog.AFTER_MESSAGE = 0.5, 0.3
sys.path.append(sys.argv[1])
factories.made(factories.factory_named(sys.argv[2]))
"""


def ended(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "hang"), [("", SLEEP), ("async ", REGEX)], ids=["plain", "async"])
def test_a_reward_that_hangs_with_the_interpreters_lock(kind: str, hang: str, tmp_path: Path) -> None:
    """An async one also before its answer is waited for: it runs as soon as it is begun."""
    file = tmp_path / "own.py"
    file.write_text(f"{kind}def slow(completion):\n    {hang}\n    return 1.0\n")
    result = ended(REWARD, str(file))
    assert result.returncode == 1
    message, where = result.stderr.split("Timeout (", 1)
    assert "'slow'" in message and "isolated: true" in message and f'"{file}", line 2 in slow' in where


@pytest.mark.slow
@pytest.mark.parametrize(("address", "at_import"), [("{file}:Own", True), ("own:Own", False)])
def test_an_environment_that_hangs_at_the_start(address: str, at_import: bool, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        f"import time\ntime.sleep({60 * at_import})\nclass Own:\n    def __init__(self):\n        time.sleep(60)\n"
    )
    result = ended(START, str(tmp_path), address.format(file=file))
    assert result.returncode == 1
    message, where = result.stderr.split("Timeout (", 1)
    assert "error: rollout.environment" in message and f'"{file}", line {2 if at_import else 5}' in where


@pytest.mark.slow
def test_what_moves_or_ends_in_time_is_left_alone_and_the_block_whose_time_ends_first_counts() -> None:
    script = """
import time
from mm_grpo.user_code import watchdog
from mm_grpo.user_code.watchdog import Watchdog
watchdog.AFTER_MESSAGE = 0.3
with Watchdog(1.0, "outer") as outer:
    for _ in range(5):
        with Watchdog(1.0, "inner"):
            time.sleep(0.25)
        outer.restart()
with Watchdog(0.5, "short"):
    pass
time.sleep(1.0)
print("moved", flush=True)
with Watchdog(0.3, "first"), Watchdog(50.0, "second"):
    {hang}
"""
    result = ended(script.format(hang=SLEEP))
    assert (result.returncode, result.stdout) == (1, "moved\n") and result.stderr.startswith("\nfirst\n")
    assert not any(name in result.stderr for name in ("outer", "inner", "short", "second"))
