"""Results of `mm-grpo eval` as a table on the terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from mm_grpo.data.blind import CONTROLS
from mm_grpo.rollout.eval_metric import score_text
from mm_grpo.terminal import print_phase, printable
from mm_grpo.trained.evaluate import Results, SetResult

_number = partial(score_text, missing="-")


def show(results: Results, write: Callable[[str], None] = print_phase) -> None:
    """Print `results`: a line for each set and each value of a column, then the scores of blind controls.

    The text is the same in a pipe. pass@1 is left out, because it is the share itself.
    """
    sampling = results.sampling
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    times = f", {sampling['num_generations']} completions a row" if sampling["num_generations"] > 1 else ""
    write(f"{results.model} ({how}{times}; {results.seconds:.0f} s)")
    ks = sorted({k for result in results.sets.values() for k in result.pass_at if k > 1})
    rows: list[tuple[str, SetResult]] = []
    for name, result in results.sets.items():
        rows.append((name, result))
        groups = results.groups.get(name, {})
        rows += [(f"  {results.by} = {value}", group) for value, group in groups.items()]
    titles = ["", "rows", results.headline, "mean reward", *[f"pass@{k}" for k in ks], "tokens", "clipped"]
    lines = [titles, *[_cells(label, result, ks) for label, result in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *numbers in lines:
        write("  ".join([label.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]))
    for label, result in rows:
        if (blind := result.evaluation.blind) is not None:
            (done, adds), gap = CONTROLS[blind.kind], _number(blind.gap, blind.gap_interval)
            write(f"{label}, {done}: {_number(blind.score, blind.interval)}; {adds} {gap}")
    write("[...]: 95 % intervals, of shares by Wilson, of means by the normal approximation")
    if sampling["num_generations"] > 1 and not ks:
        write("no pass@k: run.headline has no mark to pass; write it as NAME >= MARK")


def as_dict(results: Results) -> dict[str, Any]:
    """Return the JSON object of `--json`."""

    def set_dict(result: SetResult) -> dict[str, Any]:
        values = asdict(result.evaluation)
        del values["tasks"]
        return {**values, "pass_at": {str(k): v for k, v in result.pass_at.items()}}

    def set_dicts(sets: Mapping[str, SetResult]) -> dict[str, Any]:
        return {name: set_dict(result) for name, result in sets.items()}

    output: dict[str, Any] = {
        "model": results.model, "headline": results.headline, "sampling": dict(results.sampling),
        "seconds": round(results.seconds, 3), "sets": set_dicts(results.sets),
    }  # fmt: skip
    if results.by is not None:
        groups = {name: set_dicts(by_value) for name, by_value in results.groups.items()}
        output |= {"by": results.by, "groups": groups}
    return output


def _cells(label: str, result: SetResult, ks: list[int]) -> list[str]:
    evaluation = result.evaluation
    return [
        printable(label, lines=False),
        str(evaluation.rows),
        _number(evaluation.score, evaluation.interval),
        _number(evaluation.reward, evaluation.reward_interval),
        *[_number(result.pass_at.get(k)) for k in ks],
        "-" if evaluation.length is None else f"{evaluation.length:.1f}",
        "-" if evaluation.clipped is None else f"{evaluation.clipped:.0%}",
    ]
