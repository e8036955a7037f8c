"""Writes docs/robustness.md from the table of cases: `PYTHONPATH=tests python -m robustness.page`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from robustness.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"
HEAD = """# What hostile and unlucky input ends in

Written by `PYTHONPATH=tests python -m robustness.page` from the table in `tests/robustness/cases.py`. Each of its
{count} cases runs a command of `mm-grpo` with every run of the tests. A case says how the command ends and which key
words its message holds; none prints a traceback, hangs, changes a file of the user's or leaves one behind.

- **done** (0): input that looks odd and is right, and damage that a run gets over: a damaged checkpoint is passed over
  with a warning that names it, a log is put back from the checkpoint, a masked reward is counted.
- **refused** (2): one message that names the field or the row, and the file.
- **guard** (3): a guard stopped the run: an engine with other weights, a run without an update.
- **failed** (1): an engine that ends, a full disk behind the terminal, and whatever nobody expected: one line, with the
  user's own file and line where there is one. [Tracebacks](checking.md#when-something-is-wrong).

Signals end a run with 130 (Ctrl-C), 143 (SIGTERM) and 129 (SIGHUP), after the running step and with a checkpoint. Runs
that were killed, stopped or met a full disk are resumed by `tests/robustness/test_kills.py`, and have the numbers of a
run that was not. A command whose reader ends (`| head -1`) goes on without output, and ends as it would have.

| class | cases | done | refused | guard | failed |
|---|---|---|---|---|---|
"""
ENDS = (0, 2, 3, 1)


def text() -> str:
    """The page."""
    counts: dict[str, Counter[int]] = {}
    for case in CASES:
        counts.setdefault(case.kind, Counter())[case.code] += 1
    counts["all"] = sum(counts.values(), Counter())
    rows = [
        f"| {name} | {count.total()} | " + " | ".join(str(count[end]) for end in ENDS) + " |\n"
        for name, count in counts.items()
    ]
    return HEAD.format(count=len(CASES)) + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
