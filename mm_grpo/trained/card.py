"""README.md of an export, from the files of the run's folder.

Absolute paths are shortened to their last part, because people share exports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config.yaml_file import write_yaml
from mm_grpo.data.sources import BLIND
from mm_grpo.terminal import redact
from mm_grpo.trained.model import Trained
from mm_grpo.version import __version__


def evaluations(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, float, float, int]]:
    """Return each set's (name, measure, value before the first step, last value, its step) from the `rows` of a log."""
    first = rows[0] if rows and rows[0]["step"] == 0 else {}
    results = []
    for key, before in first.items():
        name, _, measure = key.removeprefix("eval/").rpartition("/")
        of_a_set = key.startswith("eval/") and measure in ("accuracy", "reward") and "/task/" not in key
        later = [row for row in rows[1:] if row.get(key) is not None]
        if of_a_set and name not in ("", BLIND) and before is not None and later:
            results.append((name, measure, before, later[-1][key], int(later[-1]["step"])))
    return results


def write_card(folder: Path, trained: Trained, *, adapter: bool, proof: str) -> None:
    """Write README.md with its YAML header."""
    config, step = trained.config, trained.step
    base = shorten_paths(config.model.path)
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    header |= {"pipeline_tag": "image-text-to-text", "tags": ["grpo", "mm_grpo"]}
    header |= {} if Path(config.model.path).exists() else {"base_model": config.model.path}
    kind = "A LoRA adapter for" if adapter else "A model fine-tuned from"
    lora = config.model.lora
    method = f"LoRA (rank {lora.rank}, alpha {lora.alpha:g})" if lora else "all weights that are not frozen"
    lines = [
        "---", write_yaml(header).strip(), "---", "",
        f"# {Path(base).name}, GRPO, {step} steps", "",
        f"{kind} `{base}`, trained with GRPO by mm_grpo {__version__}: {step} steps of "
        f"{config.rollout.prompts_per_step} prompts with {config.rollout.num_generations} completions each, {method}.",
        "",
        "| | |", "|---|---|",
        f"| base model | `{base}` |",
        f"| data | {_sources(config.data.train)} |",
        f"| evaluation data | {_sources(config.data.eval)} |",
        f"| rewards | {', '.join(f'`{name}`' for name in trained.rewards)} |",
        f"| headline | {config.run.headline or 'mean reward'} |", "",
    ]  # fmt: skip
    table = ["## Evaluation", "", "| set | measure | before | after | at step |", "|---|---|---|---|---|"]
    rows = [
        f"| {name} | {measure} | {before:.3f} | {after:.3f} | {last_step} |"
        for name, measure, before, after, last_step in evaluations(trained.rows)
    ]
    lines += [*table, *rows] if rows else ["The run was not evaluated."]
    lines += ["", "## How it was compared", "", f"Before this folder was named: {proof}.", "", "## Use", ""]
    lines += [_usage(base, adapter=adapter), ""]
    settings = write_yaml(redact(shorten_paths(config.model_dump()))).strip()
    lines += ["## Config", "", "```yaml", settings, "```", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def shorten_paths(value: Any) -> Any:
    """Shorten absolute paths, also in file.py:name, to their last part.

    >>> shorten_paths({"path": "/home/me/models/tiny", "rewards": ["/home/me/mine.py:score", "format"], "n": 3})
    {'path': 'tiny', 'rewards': ['mine.py:score', 'format'], 'n': 3}
    """
    if isinstance(value, Mapping):
        return {key: shorten_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_paths(entry) for entry in value]
    if isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value:
        return value.rstrip("/").rpartition("/")[2]
    return value


def _sources(source: Any) -> str:
    if source is None:
        return "passed in Python, or none"
    short = shorten_paths(source)
    return f"`{short if isinstance(source, str) else json.dumps(short, ensure_ascii=False)}`"


def _usage(base: str, *, adapter: bool) -> str:
    load = "model = AutoModelForImageTextToText.from_pretrained(FOLDER)"
    imports = "from transformers import AutoModelForImageTextToText, AutoProcessor"
    if adapter:
        imports = f"from peft import PeftModel\n{imports}"
        load = f'base = AutoModelForImageTextToText.from_pretrained("{base}")\n'
        load += "model = PeftModel.from_pretrained(base, FOLDER)"
    return f"```python\n{imports}\n\n{load}\nprocessor = AutoProcessor.from_pretrained(FOLDER)\n```"
