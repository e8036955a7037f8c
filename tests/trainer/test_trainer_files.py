"""Image files that are exchanged while a run goes on, or prove to be cut off at a later step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from helpers.run_folders import metrics_of
from helpers.small_runs import config_for, rows_on_disk, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.data.images import BadMedia
from mm_grpo.errors import DataError


class Exchange:
    """Puts the picture of another row behind the path of `row`, after a step."""

    def __init__(self, rows: list[dict[str, Any]], row: int, after: int) -> None:
        self.paths, self.row = [Path(row["images"][0]) for row in rows], row
        self.after = after

    def on_step_end(self, trainer: GRPOTrainer, step: int) -> None:
        if step == self.after:
            self.paths[self.row].write_bytes(self.paths[2].read_bytes())


def trainer(model: Path, folder: Path, rows: Any, on_bad_media: str, **options: Any) -> GRPOTrainer:
    run = {"max_steps": 4, "save_every": 1, "report": False, "save_model": False}
    data, rollout = {"shuffle": False, "on_bad_media": on_bad_media}, {"prompts_per_step": 2}
    config = config_for(model, folder, data=data, rollout=rollout, run=run)
    return GRPOTrainer(config, train=rows, rewards=[vowels], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "after", "steps"), [(1, 2, 3), pytest.param(5, 1, 1, id="before the first checkpoint")]
)
def test_an_exchanged_image_ends_a_run(model: Path, tmp_path: Path, row: int, after: int, steps: int) -> None:
    rows = rows_on_disk(tmp_path / "rows")
    unchanged = trainer(model, tmp_path / "same", rows, "stop", callbacks=[Exchange(rows, row, 9)])
    assert unchanged.train()["steps"] == 4
    run = trainer(model, tmp_path / "run", rows, "drop", callbacks=[Exchange(rows, row, after)])
    kept = Path(rows[row]["images"][0]).read_bytes()
    with pytest.raises(DataError, match=rf"train row {row}: image .*{row}\.png' changed") as caught:
        run.train()
    assert not isinstance(caught.value, BadMedia) and len(metrics_of(tmp_path / "run")) == steps
    Path(rows[row]["images"][0]).write_bytes(kept)  # put back, as the message says
    assert trainer(model, tmp_path / "run", rows, "drop", resume=True).train()["steps"] == 4
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "same")


@pytest.mark.slow
def test_a_run_that_met_a_cut_picture_goes_on_without_its_row(model: Path, tmp_path: Path) -> None:
    rows = rows_on_disk(tmp_path / "rows")
    cut = Path(rows[3]["images"][0])
    os.truncate(cut, cut.stat().st_size * 2 // 3)
    with pytest.raises(BadMedia, match=r"train row 3: .*data\.on_bad_media=drop.*--resume"):
        trainer(model, tmp_path / "run", rows, "stop").train()
    assert trainer(model, tmp_path / "run", rows, "drop", resume=True).train()["steps"] == 4
    trainer(model, tmp_path / "straight", rows, "drop").train()
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "straight")
