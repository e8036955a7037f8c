"""A run that was ended goes on with rows that were repaired or broke meanwhile: all others stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import tiny
from helpers.ahead import noting_seeds
from helpers.run_folders import metrics_of
from helpers.small_runs import config_for, rollouts_of, rows_on_disk, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.manifest import read_checkpoint

ROWS = shapes_rows(split="train", size=24, seed=1, image_size=56)
LATE, DRAWN_IN = 7, 4
"""A row, and the step that draws it."""


def train(path: Path, folder: Path, rows: Any, steps: int, *, resume: bool = False, **changes: Any) -> None:
    run = {"max_steps": steps, "save_every": 1, "report": False, "save_model": False} | changes.pop("run", {})
    data = {"shuffle": False} | changes.pop("data", {})
    config = config_for(path, folder, data=data, rollout={"prompts_per_step": 2}, run=run, **changes)
    GRPOTrainer(config, train=rows, rewards=[vowels], resume=resume).train()


def state_of(folder: Path, step: int) -> Any:
    """Digests of weights and optimizer."""
    return read_checkpoint(folder / f"checkpoints/step-{step:06d}").manifest["files"]


def by_row(folder: Path, step: int) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts_of(folder, step):
        groups.setdefault(row["uid"], []).append(row)
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_a_repaired_row_is_the_same_up_to_it(model: Path, tmp_path: Path, dtype: str) -> None:
    rows, options = rows_on_disk(tmp_path / "rows", ROWS), {"model": {"dtype": dtype}}
    train(model, tmp_path / "whole", rows, DRAWN_IN, **options)
    train(model, tmp_path / "r", rows, 2, **options)
    tiny.picture(3, 56, 56).save(rows[LATE]["images"][0])
    words = rf"data.train: .* train row {LATE}; drawn in steps 1 to 2: 0.*allow_changed_rows=true"
    with pytest.raises(ConfigError, match=words):
        train(model, tmp_path / "r", rows, DRAWN_IN - 1, resume=True, **options)
    train(model, tmp_path / "r", rows, DRAWN_IN - 1, resume=True, run={"allow_changed_rows": True}, **options)
    assert metrics_of(tmp_path / "r") == metrics_of(tmp_path / "whole")[: DRAWN_IN - 1]
    assert state_of(tmp_path / "r", DRAWN_IN - 1) == state_of(tmp_path / "whole", DRAWN_IN - 1)
    train(model, tmp_path / "r", rows, DRAWN_IN, resume=True, **options)  # the new rows are the run's by now
    groups, others = by_row(tmp_path / "r", DRAWN_IN), by_row(tmp_path / "whole", DRAWN_IN)
    same, changed = groups
    assert changed == f"train:{LATE}" and [*groups] == [*others]
    assert groups[same] == others[same]
    assert [r["seed"] for r in groups[changed]] == [r["seed"] for r in others[changed]]
    assert groups[changed] != others[changed]


@pytest.mark.slow
def test_rows_that_break_leave_empty_slots_and_rows_left_out_stay_so(model: Path, tmp_path: Path) -> None:
    rows, drop = rows_on_disk(tmp_path / "rows", ROWS), {"data": {"on_bad_media": "drop"}}
    broken, late = Path(rows[2]["images"][0]), Path(rows[LATE]["images"][0])
    tiny.picture(3, 2000, 9).save(broken)
    with pytest.raises(DataError, match=r"train row 2: .*2000x9"):
        train(model, tmp_path / "stop", rows, 1)
    train(model, tmp_path / "whole", rows, DRAWN_IN, **drop)
    train(model, tmp_path / "r", rows, 2, **drop)
    tiny.picture(3).save(broken)  # which changes nothing of the run
    train(model, tmp_path / "r", rows, 3, resume=True, **drop)
    assert metrics_of(tmp_path / "r") == metrics_of(tmp_path / "whole")[:3]
    late.unlink()
    with pytest.raises(DataError, match=f"train row {LATE}: "):
        train(model, tmp_path / "r", rows, DRAWN_IN, resume=True)
    train(model, tmp_path / "r", rows, DRAWN_IN, resume=True, run={"allow_changed_rows": True}, **drop)
    groups, others = by_row(tmp_path / "r", DRAWN_IN), by_row(tmp_path / "whole", DRAWN_IN)
    assert groups == {uid: group for uid, group in others.items() if uid != f"train:{LATE}"}
    assert len(groups) == 1 and metrics_of(tmp_path / "r")[-1]["prompts/dropped"] == 1


@pytest.mark.slow
def test_steps_ahead_lose_the_groups_of_rows_that_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None
) -> None:
    """Their completions answer the old row. The other groups of the step are learned from, and not sampled again."""
    rows = rows_on_disk(tmp_path / "rows", ROWS)
    rollout = {"prompts_per_step": 2, "max_staleness": 1}

    def trainer(folder: str, steps: int, **options: Any) -> GRPOTrainer:
        run = {"max_steps": steps, "save_every": 1, "report": False, "save_model": False}
        run["allow_changed_rows"] = True
        config = config_for(model, tmp_path / folder, data={"shuffle": False}, rollout=rollout, run=run)
        return GRPOTrainer(config, train=rows, rewards=[vowels], **options)

    trainer("whole", 4).train()
    started = trainer("r", 4)
    update = started.learner.update
    monkeypatch.setattr(started.learner, "update", lambda g: update(g) if started.sync.version < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        started.train()
    # step 3 was sampled ahead of step 2, and holds rows 4 and 5
    tiny.picture(3, 56, 56).save(rows[5]["images"][0])
    again = trainer("r", 4, resume=True)
    asked = noting_seeds(monkeypatch, again.engine)
    again.train()
    plan = SeedPlan(run_seed=5, prompts=2, generations=3, attempts=1, max_steps=4)
    assert {*plan.group(3, 0), *plan.group(3, 1)}.isdisjoint(asked) and set(plan.group(4, 1)) <= set(asked)
    groups, others = by_row(tmp_path / "r", 3), by_row(tmp_path / "whole", 3)
    assert [*others] == ["train:4", "train:5"] and [*groups] == ["train:4"]
    assert groups["train:4"] == others["train:4"]
    assert metrics_of(tmp_path / "r")[-2]["prompts/dropped"] == 1
