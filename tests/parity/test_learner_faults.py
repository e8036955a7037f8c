"""Faults of the learner alone, put into its own code: each stops the run at the step where it first shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import ROWS, config_for, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import GuardStop
from mm_grpo.learner import forward
from mm_grpo.learner.completion_batch import CompletionBatch
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.image_features import ImageFeatures
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP, Pack


def late(pack: Pack) -> Pack:
    """Completions begin one position late, as if the prompt's last place were counted twice."""
    is_sampled = pack.segments.clamp(min=0) % SEGMENTS_PER_GROUP > 0
    return replace(pack, position_ids=pack.position_ids + is_sampled)


def blind(pack: Pack) -> Pack:
    """A pack of several images runs without any, and their placeholders are ordinary tokens."""
    return replace(pack, pictured=()) if len(pack.pictured) > 1 else pack


# owner and name of a function, what takes its place (called with it and its arguments), family, and steps that sample
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str, int]] = {
    "state of another prompt": (
        CompletionBatch, "after_prompt", lambda fn, self, x, rows: fn(self, x.roll(1, 0), rows), "qwen3_5", 1,
    ),
    "images swapped": (ImageFeatures, "of", lambda fn, self, prompts: fn(self, prompts[::-1]), "qwen2_5_vl", 1),
    "images dropped": (PackForward, "_inputs", lambda fn, self, pack: fn(self, blind(pack)), "qwen2_5_vl", 1),
    "a position twice": (PackForward, "states", lambda fn, self, pack: fn(self, late(pack)), "qwen2_5_vl", 0),
    "one token apart": (PackForward, "states", lambda fn, self, pack: fn(self, pack).roll(1, 0), "qwen2_5_vl", 0),
    "temperature 1": (
        forward, "token_logprobs", lambda fn, *a, **o: fn(*a, **o | {"temperature": 1.0}), "qwen2_5_vl", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "change", "family", "steps"), FAULTS.values(), ids=FAULTS)
@pytest.mark.field_bug("batch-loses-images", "swapped-images", "temperature", "shifted-log-probs")
@pytest.mark.field_bug("leaked-state", "packed-positions")
def test_a_fault_of_the_learner_stops_its_run(
    owner: Any, name: str, change: Callable[..., Any], family: str, steps: int, models: dict[str, Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One prompt is compared before the first step, and all that was sampled at each step."""
    config = config_for(
        models[family], tmp_path / "r", model={"dtype": "float32"}, rollout={"temperature": 0.7}
    )
    inner = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: change(inner, *args, **options))
    with pytest.raises(GuardStop, match="guard logp_gap: "):
        GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
    assert len(list((tmp_path / "r" / "rollouts").glob("*.jsonl"))) == steps
