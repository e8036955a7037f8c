"""A run's page while it goes on, and marks in its rollout log."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import tiny
from helpers.configs import small_config

from mm_grpo import GRPOTrainer
from mm_grpo.pages.page import GENERATOR
from mm_grpo.run.rollout_log import logged_steps, read_rollouts


def test_the_page_and_the_marks(models: dict[str, Path], tmp_path: Path) -> None:
    config = small_config(
        models["qwen2_5_vl"],
        tmp_path / "run",
        rollout={"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3},
        run={"max_steps": 3, "save_every": 0, "save_model": False,
             "guards": {"no_update": "off", "zero_std": "off", "no_reward": "off"}},
    )  # fmt: skip
    rows = [
        {"prompt": "where?", "image": tiny.picture(i, 112, 56), "box": [28, 14, 84, 42]} for i in range(4)
    ]
    rewards = ["iou", lambda completion: len(set(completion))]
    trainer = GRPOTrainer(config, train=rows, rewards=rewards)
    trainer.train()
    paths = trainer.folder.paths
    page = paths.report.read_text()
    assert '"steps":3' in page and GENERATOR.decode() in page
    assert logged_steps(paths) == [1, 2, 3]
    row = read_rollouts(paths, 3)[0]
    width, height = 112, 56
    (mark,) = row["gold"]
    assert mark["label"] == "iou" and (mark["image"], len(mark["points"])) == (0, 4)
    # the box is in the dataset's pixels, the mark in those that the model saw
    from PIL import Image

    with Image.open(paths.images / row["images"][0]) as image:
        scale = image.width / width, image.height / height
    assert mark["points"][0] == [round(28 * scale[0], 2), round(14 * scale[1], 2)]
    assert json.dumps(mark) in paths.rollout_file(3).read_text()
