"""What a user can mend is raised alone: the message says it all, and no library's traceback stands above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mm_grpo

ROOT = Path(mm_grpo.__file__).parent
USER_ERRORS = {"ConfigError", "DataError", "RewardError", "ToolError"}
# Where the cause stays, for it is the user's own code that failed, or says more than one line can.
CHAINED = {
    "cli/view.py": "whatever a damaged run folder raises",
    "trained/proof.py": "whatever keeps a model that was written from being loaded",
    "learner/model.py": "whatever a processor raises when it is saved",
    "rewards/async_calls.py": "a function of the user's",
    "rewards/builtins/reward_model.py": "whatever a model raises when it is loaded",
    "rewards/resolve.py": "a file of the user's",
    "rollout/vllm/internals.py": "whatever vLLM says to a prompt",
    "rollout/vllm/launch.py": "whatever vLLM says to its arguments",
    "run/folder.py": "whatever writing a file raises",
}


def chained(source: str) -> Iterator[int]:
    """Lines that raise a user's error inside an `except` and keep what was caught: `from error`, or no `from`."""
    for handler in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)):
        for node in ast.walk(handler):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func)
                alone = isinstance(node.cause, ast.Constant) and node.cause.value is None
                if name in USER_ERRORS and not alone:
                    yield node.lineno


def test_no_users_error_has_a_librarys_traceback_above_it() -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for file in sorted(ROOT.rglob("*.py"))
        if (lines := sorted(set(chained(file.read_text(encoding="utf-8")))))
    }
    assert {file: lines for file, lines in found.items() if file not in CHAINED} == {}
    assert sorted(CHAINED) == sorted(found)  # and no file is named here for nothing
