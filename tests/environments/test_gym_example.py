"""The example of docs/turns.md: MiniGrid, shown as a picture each turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.documents import blocks, read
from helpers.scripted import ScriptedStreamEngine, call
from helpers.small_runs import config_for, rollouts_of

from mm_grpo import GRPOTrainer

pytest.importorskip("minigrid")
pytestmark = pytest.mark.slow


def test_a_step_in_minigrid(models: dict[str, Path], tmp_path: Path) -> None:
    (snippet,) = (b for b in blocks(read("docs/turns.md"), "python") if b.startswith("import gymnasium"))
    names: dict[str, Any] = {"__name__": "turns"}
    exec(compile(snippet, "turns.md", "exec"), names)
    paths = {0: ["forward", "forward", "right", "forward", "forward"], 1: ["left", "jump", *["forward"] * 4]}
    rollout = {"max_completion_length": 900, "max_turns": 6, "prompts_per_step": 1, "num_generations": 4}
    config = config_for(models["qwen2_5_vl"], tmp_path, rollout=rollout, run={"max_steps": 1})
    rows = [{"prompt": "Go to the green square.", "seed": n} for n in (1, 2)]
    trainer = GRPOTrainer(config, train=rows, environment_factory=names["Grid"])
    trainer.runner.sampler.engine = ScriptedStreamEngine(
        trainer.runner.sampler.engine, lambda seed, turn: call("move", direction=paths[seed % 2][turn])
    )
    trainer.train()
    trainer.close()
    rewards = []
    for line in rollouts_of(tmp_path, 1):
        answers = [turn for turn in line["turns"] if turn["role"] == "tool"]
        faults = [turn["fault"] for turn in answers]
        rewards.append(line["reward"])
        if line["reward"]:  # 1 - 0.9 × 5 moves of 8
            assert line["reward"] == pytest.approx(0.4375) and faults == [None] * 5
            assert len({image for turn in answers for image in turn["images"]}) == 5
        else:
            assert faults == [None, "raised", None, None, None]
    assert min(rewards) == 0 < max(rewards)
