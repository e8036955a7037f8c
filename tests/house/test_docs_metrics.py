"""docs/metrics.md names every metric that the code can log, and none that it cannot.

The names are read out of the source: keys of mappings, and what is assigned under a key, in the functions that make
metrics; and phases that are timed. Parts that a run chooses (the name of a reward or a set) are `{}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers.metrics_page import PAGE, metrics_of_the_page, not_on_the_page

ROOT = Path(__file__).parents[2]
MAKERS = {
    "trainer.py": ["_step", "_train"],
    "learner/step_report.py": ["metrics", "update_metrics", "gap_metrics"],
    "parity/sync.py": ["metrics"],
    "parity/images.py": ["unread", "sight", "sight_metrics"],
    "rewards/scorer.py": ["_metrics"],
    "rollout/collect.py": ["advantages", "group_metrics", "turn_metrics"],
    "rollout/evaluate.py": ["as_metrics", "_tasks"],
    "rollout/tasks.py": ["task_metrics"],
    "data/mixture_order.py": ["epochs"],
    "data/order.py": ["epochs"],
}
NOT_METRICS = {
    "rewards", "turn_rewards", "advantages", "turn_advantages",  # fields of a group
    "images/{}",  # a file's name
    "application/json", "text/plain", "text/html",
}  # fmt: skip


def text_of(node: ast.AST, constants: dict[str, str]) -> str | None:
    """A text, with `{}` for what is put in that is no constant of the module; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            name = value.value.id if isinstance(value.value, ast.Name) else ""
            parts.append(constants.get(name, "{}"))
        else:
            parts.append(str(text_of(value, constants)))
    return "".join(parts)


def keys(tree: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    """Keys of mappings, keys that are assigned to, and the phases of `timed(times, phase)` below a node."""
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.Dict):
            found = list(node.keys)
        elif isinstance(node, ast.DictComp):
            found = [node.key]
        elif isinstance(node, ast.Assign):
            found = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
            for target in node.targets:  # a["x"], a["y"] = ...
                if isinstance(target, ast.Tuple):
                    found += [part.slice for part in target.elts if isinstance(part, ast.Subscript)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "timed":
            found = [node.args[1]]
        yield from (text for part in found if part is not None and (text := text_of(part, constants)))


def metrics_of_the_code() -> set[str]:
    found: set[str] = set()
    for file in sorted((ROOT / "mm_grpo").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        named = MAKERS.get(str(file.relative_to(ROOT / "mm_grpo")), [])
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        assert {n.name for n in functions}.issuperset(named), (
            f"{file.name}: {named} moved; name its new place"
        )
        for function in functions:
            if function.name in named:
                found |= {key for key in keys(function, constants) if re.fullmatch(r"[a-z_{}/]+", key)}
        # a name with a slash is a metric wherever it is
        found |= {key for key in keys(tree, constants) if re.fullmatch(r"[a-z_]+(/[a-z_{}]+)+", key)}
    return finish(found - NOT_METRICS)


def finish(found: set[str]) -> set[str]:
    """The names as they are logged: an evaluation's have its set before them, and step 0's row none of a step."""
    evaluation = {
        "accuracy", "reward", "score", "score_low", "score_high", "gap", "gap_low", "gap_high",
        "rewards/{}/mean", "mean_length", "clipped_ratio", "task/{}/{}",
    }  # fmt: skip
    assert {"eval/{}/{}", "eval/blind/{}", "task/{}/{}"} <= found
    sets = {f"eval/{{}}/{name}" for name in evaluation - {"task/{}/{}"} if not name.startswith("gap")}
    sets |= {f"eval/{{}}/task/{{}}/{name}" for name in ("accuracy", "reward", "score")}
    blind = {f"eval/blind/{n}" for n in ("score", "accuracy", "reward", "gap", "gap_low", "gap_high")}
    return (
        (found - evaluation - {"eval/{}/{}", "eval/blind/{}"}) | {"reward", "rewards/{}/mean"} | sets | blind
    )


def test_the_page_of_metrics_names_what_the_code_logs() -> None:
    code, page = metrics_of_the_code(), metrics_of_the_page()
    assert (sorted(code - page), sorted(page - code)) == ([], [])


def test_every_line_of_a_metric_says_its_unit_and_what_it_is() -> None:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `") and "{logged}" not in line:
            _, name, unit, what, *_ = [cell.strip() for cell in line.split("|")]
            assert unit and (what or "frequency" in name), line


def test_a_metric_of_a_run_that_is_not_on_the_page_is_found() -> None:
    assert not_on_the_page({"step", "reward", "eval/all/task/count/reward", "time/reward/iou"}) == []
    assert not_on_the_page({"rewards", "eval/all/median", "time/reward/iou/extra"}) == [
        "eval/all/median",
        "rewards",
        "time/reward/iou/extra",
    ]
