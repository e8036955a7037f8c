"""Run folders of small made-up runs, for what is read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from mm_grpo.run.folder import RunFolder
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt, Sample


def group(
    slot: int, rewards: tuple[float | None, ...], text: str = "red", side: int = 8, parts: Any = None
) -> Group:
    content = [{"type": "image"}, {"type": "text", "text": f"What colour? {text}"}]
    images = (Image.new("RGB", (side, side // 2), (slot, 0, 0)),)
    messages = [{"role": "user", "content": content}]
    sample = Sample(f"rows:{slot}{text}", messages, images, (), {"answer": text, "n": 3})
    prompt = Prompt(sample, (1,), EnginePrompt((1,), images), None, {})  # type: ignore[arg-type]
    completions = tuple(Completion((1, 2), (-1.0, -1.0), text, "stop", g) for g in range(len(rewards)))
    known = [r for r in rewards if r is not None]
    mean = sum(known) / len(known) if known else 0.0
    advantages = tuple(0.0 if r is None else r - mean for r in rewards)
    return Group(slot, prompt, completions, rewards, advantages, parts=parts or {})


def run(path: Path, text: str = "red", steps: int = 30, before: float = 0.125) -> RunFolder:
    """A finished run of `steps` steps of two groups, whose texts are `text`."""
    config = f"model:\n  path: {text if text.isalnum() else 'red'}\nrun:\n  max_steps: {steps}\n"
    folder = RunFolder(path).start(config)
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"reward": step / 30, "grad_norm": 1.0, "step_time": 2.0, "entropy": 0.5}
        row |= {f"rewards/{text}/mean": 0.5, "rewards/format/mean": 1.0, "kl": None, "num_tokens": 100 * step}
        row |= {"completions/clipped_ratio": 0.0, "sampling/sampling_logp_difference/mean": 1e-6}
        if step % 10 == 0:
            row["eval/heldout/accuracy"] = step / 40
        folder.on_log(step, row)
        both = (
            group(0, (1.0, 0.0), text, parts={text: [1.0, 0.0]}),
            group(1, (None, 1.0), text, parts={text: [None, 1.0]}),
        )
        folder.write_rollouts(step, both)
    scores = {"before": before, "after": 0.75}
    summary = {"accuracy_before": before, "accuracy_after": 0.75, "seconds": 125, "steps": steps}
    folder.write_summary({**summary, "eval": {"heldout": scores}})
    return folder
