"""Writes the list in docs/rewards.md from the rewards' own docstrings: `python docs/make_rewards.py`."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from mm_grpo.rewards import RewardSpec, get
from mm_grpo.rewards.registry import BUILTINS

PAGE = Path(__file__).parent / "rewards.md"
START, END = "<!-- list: written by docs/make_rewards.py -->", "<!-- end of the list -->"

AREAS = {
    "Text": ("exact_match", "choice", "contains", "format", "json_schema"),
    "Numbers": ("math", "numeric", "count"),
    "Vision": ("iou", "giou", "box_match", "clicking", "temporal_iou"),
    "Documents and charts": ("anls", "edit_similarity", "chart_relaxed"),
    "Shaping": ("length", "soft_overlong", "repetition_penalty"),
    "Models": ("judge", "reward_model"),
}


def page(text: str) -> str:
    """The page with its list as the code says it is now."""
    head, tail = text.split(START)[0], text.split(END)[1]
    return f"{head}{START}\n\n{listing()}\n{END}{tail}"


def listing() -> str:
    """A table of every built-in per area."""
    listed = [name for area in AREAS.values() for name in area]
    assert sorted(listed) == sorted(BUILTINS), "each built-in belongs to one area"
    lines: list[str] = []
    for area, names in AREAS.items():
        lines += [f"### {area}\n", "| reward | columns | options | score |", "|---|---|---|---|"]
        for name in names:
            cells = (f"`{name}`", _columns(get(name)), _options(get(name)), _about(get(name)))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _columns(spec: RewardSpec) -> str:
    """What comes from the dataset: gold columns, and others that have a default."""
    gold = [f"`{column}`" for column in spec.needs]
    if spec.kind == "batch":  # keyword arguments of a batch function are set in the config
        return ", ".join(gold) or "none"
    more = [f"`{p}`, if there" for p in spec.optional if p not in spec.supplied]
    return ", ".join([*gold, *more]) or "none"


def _options(spec: RewardSpec) -> str:
    """What an entry sets, with its default; nothing after the name means that it must be set."""
    shown = []
    parameters = inspect.signature(spec.fn).parameters
    for name in spec.settable:
        default = parameters[name].default
        keyword = parameters[name].kind is inspect.Parameter.KEYWORD_ONLY or spec.kind == "batch"
        if keyword and name not in spec.needs:
            bare = default is inspect.Parameter.empty or default == ""
            shown.append(f"`{name}`" if bare else f"`{name}={_short(default)}`")
    return ", ".join(shown) or "none"


def _short(default: object) -> str:
    text = default if isinstance(default, str) else json.dumps(default)  # as YAML writes it
    return text if len(text) <= 20 else "..."


def _about(spec: RewardSpec) -> str:
    """The docstring's first paragraph, its range, and what it is for."""
    doc = inspect.getdoc(spec.fn) or ""
    first = " ".join(doc.split("\n\n")[0].split())
    flat = " ".join(doc.split())
    returns = re.search(r"Returns (.*?)[.;](?=\s|$)", flat)
    use = re.search(r"(?<=[.)] )For ([A-Za-z].*?)\.(?=\s|$)", flat)
    said = [first]
    if returns:
        said.append(f"Range: {returns[1]}.")
    if use:
        said.append(f"For {use[1]}.")
    return " ".join(said)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
