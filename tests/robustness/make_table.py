"""Runs every case and writes docs/robustness.md: `PYTHONPATH=tests python tests/robustness/make_table.py`."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import robustness.run_case as by
from robustness import CASES

PAGE = Path(__file__).parents[2] / "docs" / "robustness.md"
HEAD = """# What hostile and unlucky input ends in

Written by `PYTHONPATH=tests python tests/robustness/make_table.py`, which runs the cases of
`tests/robustness/` through `GRPOConfig.from_yaml`, the loading of rows, `mm-grpo check` and `mm-grpo train`.
Each has {deadline:.0f} seconds. "Refused" is exit code 2 and one message that names what is wrong, without a traceback;
"used" are inputs that look odd and are right. `make test` runs a tenth of the cases that need no model,
`make test-long` all of them.

| class | cases | refused | used | not run | not yet right |
|---|---|---|---|---|---|
"""
DEADLINE = 20.0


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
            wrong = by.problems(outcome, case.code, case.words)
            count["wrong" if wrong else "used" if case.code == 0 else "refused"] += 1
            if wrong:
                left.append(f"- {case.name}: {wrong[0].strip().splitlines()[-1]}")
    counts["all"] = sum(counts.values(), Counter())
    kinds = ("refused", "used", "not run", "wrong")
    lines = [
        f"| {name} | {count.total()} | " + " | ".join(str(count[kind]) for kind in kinds) + " |"
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
