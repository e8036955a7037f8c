"""The results of `mm-grpo eval` as a table on the terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mm_grpo.terminal import print_phase, printable

if TYPE_CHECKING:
    from mm_grpo.rollout.eval_metric import Interval
    from mm_grpo.trained.evaluate import Results, SetResult


def show(results: Results, write: Callable[[str], None] = print_phase) -> None:
    """Print `results`: a line a set, one for each value of a column, and the sets without their images below.

    Plain text, the same in a pipe; pass@1 is left out, for it is the share itself.
    """
    how = results.sampling
    drawn = "greedy" if how["temperature"] == 0 else f"temperature {how['temperature']:g}"
    times = f", {how['num_generations']} completions a row" if how["num_generations"] > 1 else ""
    write(f"{results.model} ({drawn}{times}; {results.seconds:.0f} s)")
    ks = sorted({k for one in results.sets.values() for k in one.pass_at if k > 1})
    listed: list[tuple[str, SetResult]] = []
    for name, result in results.sets.items():
        listed.append((name, result))
        listed += [(f"  {results.by} = {value}", own) for value, own in results.groups.get(name, {}).items()]
    titles = ["", "rows", results.headline, "mean reward", *[f"pass@{k}" for k in ks], "tokens", "clipped"]
    lines = [titles, *[_cells(label, one, ks) for label, one in listed]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        write("  ".join([first[0].ljust(first[1]), *[text.rjust(width) for text, width in others]]))
    for label, one in listed:
        if (blind := one.evaluation.blind) is not None:
            gap = _number(blind.gap, blind.gap_interval)
            write(
                f"{label}, images {blind.kind}: {_number(blind.score, blind.interval)}; the images add {gap}"
            )
    write("[...]: 95 % intervals, of shares by Wilson, of means by the normal approximation")
    if how["num_generations"] > 1 and not ks:
        write("no pass@k: run.headline has no mark to pass; write it as NAME >= MARK")


def as_dict(results: Results) -> dict[str, Any]:
    """What `--json` writes."""

    def one(result: SetResult) -> dict[str, Any]:
        values = asdict(result.evaluation)
        del values["tasks"]
        return {**values, "pass_at": {str(k): v for k, v in result.pass_at.items()}}

    found: dict[str, Any] = {
        "model": results.model, "headline": results.headline, "sampling": dict(results.sampling),
        "seconds": round(results.seconds, 3), "sets": {name: one(each) for name, each in results.sets.items()},
    }  # fmt: skip
    if results.by is not None:
        groups = {
            name: {value: one(each) for value, each in own.items()} for name, own in results.groups.items()
        }
        found |= {"by": results.by, "groups": groups}
    return found


def _cells(label: str, result: SetResult, ks: list[int]) -> list[str]:
    one = result.evaluation
    return [
        printable(label, lines=False),
        str(one.rows),
        _number(one.score, one.interval),
        _number(one.reward, one.reward_interval),
        *[_number(result.pass_at.get(k)) for k in ks],
        "-" if one.length is None else f"{one.length:.1f}",
        "-" if one.clipped is None else f"{one.clipped:.0%}",
    ]


def _number(value: float | None, interval: Interval | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")
