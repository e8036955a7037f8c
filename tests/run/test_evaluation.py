"""What an evaluation says where there is nothing to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.errors import DataError
from mm_grpo.run.evaluation import Best, Evaluation, as_metrics, better
from mm_grpo.run.metrics import read_metrics

ROWS = shapes_rows(split="train", size=4, seed=1, image_size=56)


def made(path: Path, folder: Path, heldout: Any, reward: Any, **changes: Any) -> GRPOTrainer:
    values: dict[str, Any] = {
        "model": {"path": str(path)},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3},
        "run": {"dir": str(folder), "max_steps": 1, "report": False, "save_model": False},
    }
    return GRPOTrainer(
        GRPOConfig.from_dict({**values, **changes}), train=ROWS, eval=heldout, rewards=[reward]
    )


def test_what_was_not_measured_is_not_0(models: dict[str, Path], tmp_path: Path) -> None:
    """The reward applies to no row of the second set."""
    heldout = {
        "known": [dict(row, known=True) for row in ROWS[:1]],
        "new": [dict(row, known=False) for row in ROWS],
    }
    trainer = made(
        models["qwen2_vl"],
        tmp_path / "r",
        dict(reversed(heldout.items())),
        lambda completion, known=True: 0.5 if known else None,
    )
    found = trainer.evaluate()
    assert found == {"new": Evaluation(None, None, 4), "known": Evaluation(0.0, 0.5, 1)}
    assert as_metrics(found) == {"eval/known/accuracy": 0.0, "eval/known/reward": 0.5}
    assert better(None, found, 0) is None and better(Best(0.5, 1), found, 2) == Best(0.5, 1)
    summary = trainer.train()
    assert summary["accuracy_before"] is None and summary["accuracy_after"] is None
    assert summary["eval"] == {"known": {"before": 0.0, "after": 0.0, "rows": 1}}
    (metrics,) = read_metrics(trainer.folder.paths.metrics)
    assert "eval/new/accuracy" not in metrics and metrics["eval/known/accuracy"] == 0.0


def test_rows_that_are_too_long_are_dropped_where_the_config_says_so(
    models: dict[str, Path], tmp_path: Path
) -> None:
    heldout = [dict(row) for row in ROWS[:3]]
    parts = heldout[1]["prompt"][0]["content"]
    heldout[1]["prompt"] = [{"role": "user", "content": [*parts, {"type": "text", "text": "x" * 400}]}]

    def trainer(rows: Any, policy: str) -> GRPOTrainer:
        data = {"max_prompt_length": 200, "on_overlong": policy}
        return made(models["qwen2_vl"], tmp_path / policy, rows, lambda completion: 1.0, data=data)

    assert trainer(heldout, "drop").evaluate()["eval"] == Evaluation(1.0, 1.0, 2)
    assert trainer([heldout[1]], "drop").evaluate()["eval"] == Evaluation(None, None, 0)
    with pytest.raises(DataError, match=r"drop such rows with data\.on_overlong=drop"):
        trainer(heldout, "stop").evaluate()
