"""Runs every case and writes docs/robustness.md: `PYTHONPATH=tests python tests/robustness/make_table.py`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import conftest  # noqa: F401  # the settings of tests, before anything else is imported

import robustness.run_case as by
from robustness import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"
DEADLINE = 20.0
HEAD = """# What hostile and unlucky input ends in

Written by `PYTHONPATH=tests python tests/robustness/make_table.py`, by exit code: **done** (0), **refused** (2, one
message), **guard** (3), **failed** (1), **signal** (128 and its number). Each case has {deadline:.0f} seconds.
`make test` runs a tenth of them, with ALL_CASES=1 all.

| class | cases | done | refused | guard | failed | signal | not run | traceback | hang | silent | otherwise wrong |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""
ENDS = {0: "done", 2: "refused", 3: "guard", 1: "failed"}
WRONG = ("traceback", "hang", "silent", "otherwise wrong")
COLUMNS = ("done", "refused", "guard", "failed", "signal", "not run", *WRONG)


def kind_of(case: Case, outcome: by.Outcome, wrong: bool) -> str:
    """The column of an outcome. Silent is a 0 in place of an error, and a 0 without the warning."""
    if not wrong:
        return ENDS.get(case.code, "signal")
    if outcome.code is None:
        return "hang"
    if outcome.fault:
        return "traceback"
    return "silent" if outcome.code == 0 else "otherwise wrong"


def main() -> None:
    from mm_grpo.testing.tiny_models import build

    counts: dict[str, Counter[str]] = {}
    left: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        model = build("qwen2_5_vl", Path(work) / "model")
        for number, case in enumerate(CASES):
            count = counts.setdefault(case.kind, Counter())
            if case.unix_user and os.geteuid() == 0:
                count["not run"] += 1
                continue
            folder = Path(work) / str(number)
            folder.mkdir()
            (folder / "MODEL").symlink_to(model)
            with by.inside(folder):
                outcome = by.run(case.make(folder), DEADLINE, case.encoding)
            shutil.rmtree(folder, ignore_errors=True)
            wrong = by.problems(outcome, case.code, case.words)
            count[kind_of(case, outcome, bool(wrong))] += 1
            if wrong:
                left.append(f"- {case.name}: {wrong[0].strip().splitlines()[-1]}")
                print(left[-1], flush=True)
    counts["all"] = sum(counts.values(), Counter())
    lines = [
        f"| {name} | {count.total()} | " + " | ".join(str(count[column]) for column in COLUMNS) + " |"
        for name, count in counts.items()
    ]
    text = HEAD.format(deadline=DEADLINE) + "\n".join(lines) + "\n"
    if left:
        text += "\nNot yet right:\n\n" + "\n".join(left) + "\n"
    if counts["all"]["not run"]:
        text += (
            "\nNot run: those of files without permission, where the user who ran them may read everything.\n"
        )
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
