"""The demo learns by looking on another seed and with vLLM in 30 steps; test_newcomer.py has the whole `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import forkserver, processes
from helpers.demo import check_the_demo


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_accuracy_rises_from_chance_and_falls_back_when_images_are_shuffled(tmp_path: Path) -> None:
    program = ["-m", "mm_grpo.cli", "train", "examples/shapes/config.yaml"]
    program += [f"run.dir={tmp_path}/run", "run.seed=2", "rollout.engine=vllm"]
    program += ["run.max_steps=30", "run.eval_every=0"]  # they are judged by their ends
    program += ["data.eval.colour_and_shape.size=150", "data.eval.count.size=20"]
    code, said = processes.finished(program, tmp_path / "said.txt", deadline=900, preload=forkserver.VLLM)
    assert code == 0 and "Warning: `" not in said, said
    check_the_demo(tmp_path / "run", said, measured=4)
