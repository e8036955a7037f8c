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

Written by `PYTHONPATH=tests python tests/robustness/make_table.py`, which runs the cases of `tests/robustness/`:
configs, rows and images through `GRPOConfig.from_yaml` and the loading of rows, everything else through `mm-grpo`'s
`check`, `doctor` and `train`. Each has {deadline:.0f} seconds. What they end in, by exit code:

- **done** (0): input that looks odd and is right, and damage that a run gets over: a damaged checkpoint is passed over
  with a warning that names it, a log is put back from the checkpoint, a masked reward is counted. A run that was killed
  is resumed, and has the numbers of a run that was not.
- **refused** (2): one message that names what is wrong, without a traceback.
- **guard** (3): a guard stopped the run: an engine with other weights, a run without an update.
- **failed** (1): anything else: an engine that ends; a reward in the trainer's process whose C code holds the
  interpreter's lock past the time-out, which prints where it stands.
- **signal** (128 and its number): 130, 143 and 129 for Ctrl-C, SIGTERM and SIGHUP, after the running step and with a
  checkpoint (at once before the first step, and at a second Ctrl-C); and the death of the trainer by a reward in its
  process that kills it, which an isolated reward cannot.

`make test` runs a tenth of the cases that need no model and a few more, `make test-long` a tenth of the others; with
ALL_CASES=1 they run all of them.

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
