"""README.md of an export: what is written stands in the run's folder, or is left out.

Absolute paths are shortened to the last part of their names: an export is something that people share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.yaml_file import write_yaml
from mm_grpo.data.sources import BLIND
from mm_grpo.terminal import redact
from mm_grpo.version import __version__


@dataclass(frozen=True)
class History:
    """What a run logged up to the exported step: rows of metrics.jsonl, and the names of its rewards."""

    rows: Sequence[Mapping[str, Any]] = ()
    rewards: Sequence[str] = ()


def evaluations(history: History) -> list[tuple[str, str, float, float, int]]:
    """Of each evaluation set: its name, what was measured, before the first step, last, and the step of that."""
    first = history.rows[0] if history.rows and history.rows[0]["step"] == 0 else {}
    found = []
    for key, before in first.items():
        name, _, what = key.removeprefix("eval/").rpartition("/")
        own = key.startswith("eval/") and what in ("accuracy", "reward") and "/task/" not in key
        later = [row for row in history.rows[1:] if row.get(key) is not None]
        if own and name not in ("", BLIND) and before is not None and later:
            found.append((name, what, before, later[-1][key], int(later[-1]["step"])))
    return found


def write_card(
    folder: Path, config: GRPOConfig, history: History, *, step: int, adapter: bool, proof: str
) -> None:
    """Write README.md with its YAML header."""
    base = shortened(config.model.path)
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    header |= {"pipeline_tag": "image-text-to-text", "tags": ["grpo", "mm_grpo"]}
    header |= {} if Path(config.model.path).exists() else {"base_model": config.model.path}
    what = "A LoRA adapter for" if adapter else "A model fine-tuned from"
    lora = config.model.lora
    how = f"LoRA (rank {lora.rank}, alpha {lora.alpha:g})" if lora else "all weights that are not frozen"
    lines = [
        "---", write_yaml(header).strip(), "---", "",
        f"# {Path(base).name}, GRPO, {step} steps", "",
        f"{what} `{base}`, trained with GRPO by mm_grpo {__version__}: {step} steps of "
        f"{config.rollout.prompts_per_step} prompts with {config.rollout.num_generations} completions each, {how}.", "",
        "| | |", "|---|---|",
        f"| base model | `{base}` |",
        f"| data | {_sources(config.data.train)} |",
        f"| evaluation data | {_sources(config.data.eval)} |",
        f"| rewards | {', '.join(f'`{name}`' for name in history.rewards)} |",
        f"| headline | {config.run.headline or 'mean reward'} |", "",
    ]  # fmt: skip
    table = ["## Evaluation", "", "| set | measure | before | after | at step |", "|---|---|---|---|---|"]
    rows = [
        f"| {name} | {what} | {a:.3f} | {b:.3f} | {at} |" for name, what, a, b, at in evaluations(history)
    ]
    lines += [*table, *rows] if rows else ["The run was not evaluated."]
    lines += ["", "## How it was compared", "", f"Before this folder was named: {proof}.", "", "## Use", ""]
    lines += [_usage(base, adapter=adapter), ""]
    settings = write_yaml(redact(shortened(config.model_dump()))).strip()
    lines += ["## Config", "", "```yaml", settings, "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def shortened(value: Any) -> Any:
    """`value` with absolute paths, also those of file.py:name, shortened to their last part.

    >>> shortened({"path": "/home/me/models/tiny", "rewards": ["/home/me/mine.py:score", "format"], "n": 3})
    {'path': 'tiny', 'rewards': ['mine.py:score', 'format'], 'n': 3}
    """
    if isinstance(value, Mapping):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(each) for each in value]
    if isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value:
        return value.rstrip("/").rpartition("/")[2]
    return value


def _sources(source: Any) -> str:
    short = shortened(source)
    text = short if isinstance(source, str) else json.dumps(short, ensure_ascii=False)
    return "passed in Python, or none" if source is None else f"`{text}`"


def _usage(base: str, *, adapter: bool) -> str:
    load = "model = AutoModelForImageTextToText.from_pretrained(FOLDER)"
    imports = "from transformers import AutoModelForImageTextToText, AutoProcessor"
    if adapter:
        imports = f"from peft import PeftModel\n{imports}"
        load = f'base = AutoModelForImageTextToText.from_pretrained("{base}")\n'
        load += "model = PeftModel.from_pretrained(base, FOLDER)"
    return f"```python\n{imports}\n\n{load}\nprocessor = AutoProcessor.from_pretrained(FOLDER)\n```"
