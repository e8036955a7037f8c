"""The demo learns, on three seeds, and by looking: whole runs as `make demo` starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import processes


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seed", "engine"), [(0, "transformers"), (1, "transformers"), (2, "transformers"), (0, "vllm")]
)
def test_accuracy_rises_from_chance_and_falls_back_when_images_are_shuffled(
    seed: int, engine: str, tmp_path: Path
) -> None:
    program = ["-m", "mm_grpo.cli", "train", "examples/shapes/config.yaml"]
    program += [f"run.dir={tmp_path}/run", f"run.seed={seed}", f"rollout.engine={engine}"]
    if (seed, engine) != (
        0,
        "transformers",
    ):  # one run is the demo's own; the others are judged by their ends
        program.append("run.eval_every=0")
    code, said = processes.finished(program, tmp_path / "said.txt", deadline=390)
    assert code == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    print(f"seed {seed}: {summary}")
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.90
    assert summary["seconds"] <= 300
    assert summary["eval"]["images_shuffled"]["after"] <= 0.40
    assert 0 <= summary["eval"]["count"]["after"] <= 1  # reported beside, not trained on
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
