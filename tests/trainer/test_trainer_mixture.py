"""Whole runs on a mixture: shares, tasks in metrics and evaluations, routed rewards, and resuming."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers import tiny
from helpers.configs import merged
from helpers.small_runs import config_for, rollouts_of, rows_of, vowels

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.build import shows_videos
from mm_grpo.data import Dataset, Mixture, load, write_jsonl
from mm_grpo.data.shapes import shapes_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """colours.jsonl (9 rows), counts.jsonl (4 rows) and heldout.jsonl, whose rows have a column task of their own."""
    place = tmp_path_factory.mktemp("rows")
    for name, kind, size, seed in (("colours", "colour", 9, 1), ("counts", "count", 4, 2)):
        rows = shapes_rows(split="train", size=size, seed=seed, kinds=[kind], image_size=56)
        write_jsonl(_without_objects(rows), place / f"{name}.jsonl")
    heldout = _without_objects(shapes_rows(split="heldout", size=5, seed=3, image_size=56))
    tasks = ["colour", "colour", "count", "count", "count"]
    write_jsonl([row | {"task": t} for row, t in zip(heldout, tasks, strict=True)], place / "heldout.jsonl")
    return place


def _without_objects(rows: Any) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("prompt", "images", "answer") if key in row} for row in rows]


def train(folder: Path, weight: float = 3, **second: Any) -> list[Any]:
    first = {"path": str(folder / "colours.jsonl"), "weight": weight, "task": "colour"}
    return [first, {"path": str(folder / "counts.jsonl"), "task": "count"} | second]


def config(models: dict[str, Path], folder: Path, place: Path, **changes: Any) -> GRPOConfig:
    base = {
        "data": {"train": train(folder), "eval": {"held": str(folder / "heldout.jsonl")}},
        "rollout": {"prompts_per_step": 4, "num_generations": 3},
        "run": {"max_steps": 4, "eval_every": 2, "save_every": 2, "report": False},
    }
    return config_for(models["qwen2_5_vl"], place, **merged(base, changes))


def digits(completion: str) -> float:
    return 10 + len(completion) / 100


REWARDS = [
    {"name": vowels, "as": "vowels", "when": {"task": "colour"}},
    {"name": digits, "as": "digits", "when": {"task": ["count"]}},
]


@pytest.fixture(scope="module")
def straight(models: dict[str, Path], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    GRPOTrainer(config(models, folder, run), rewards=REWARDS).train()
    return run


def test_every_step_has_the_exact_share_of_each_source(straight: Path) -> None:
    seen: Counter[str] = Counter()
    for step in range(1, 5):
        uids = [uid for _, uid in {(row["slot"], row["uid"]) for row in rollouts_of(straight, step)}]
        assert Counter(uid.partition(":")[0] for uid in uids) == {"train/colours": 3, "train/counts": 1}
        seen.update(uids)
    # 12 prompts of 9 rows, 4 prompts of 4 rows
    counts = {uid: count for uid, count in seen.items() if "counts" in uid}
    assert counts == {f"train/counts:{i}": 1 for i in range(4)}
    assert Counter(count for uid, count in seen.items() if "colours" in uid) == {1: 6, 2: 3}


def test_metrics_by_task_are_means_over_the_rows_of_the_task(straight: Path) -> None:
    metrics = rows_of(straight)
    for step in range(1, 5):
        found, rows = metrics[step], rollouts_of(straight, step)
        for task, count in (("colour", 3), ("count", 1)):
            own = [row for row in rows if row["columns"]["task"] == task]
            assert found[f"task/{task}/prompts"] == count and len(own) == 3 * count
            assert found[f"task/{task}/reward"] == pytest.approx(fmean(row["reward"] for row in own))
            assert found[f"task/{task}/mean_length"] == pytest.approx(fmean(row["tokens"] for row in own))
            slots = {row["slot"] for row in own}
            spread = [len({row["reward"] for row in own if row["slot"] == slot}) < 2 for slot in slots]
            assert found[f"task/{task}/frac_reward_zero_std"] == fmean(spread)
        colour, counting = found["task/colour/reward"], found["task/count/reward"]
        assert found["reward"] == pytest.approx(0.75 * colour + 0.25 * counting)
        assert found["rewards/vowels/none"] == 3 and found["rewards/digits/none"] == 9
        assert all((row["parts"]["digits"] is None) == (row["columns"]["task"] == "colour") for row in rows)
    assert metrics[4]["epoch/colours"] == 12 / 9 and metrics[4]["epoch/counts"] == 1.0
    assert metrics[4]["epoch"] == 1.0  # 4 rows at a quarter of the prompts take as many prompts as 16


def test_evaluations_are_split_by_task(straight: Path) -> None:
    for step in (0, 2, 4):
        found = rows_of(straight)[step]
        colour, count = (found[f"eval/held/task/{task}/reward"] for task in ("colour", "count"))
        assert count >= 10 > colour
        assert found["eval/held/reward"] == pytest.approx(0.4 * colour + 0.6 * count)


def test_videos_behind_rows_of_images_are_seen_at_the_start() -> None:
    """Also in a later source, and behind a row that is wrong."""
    data = GRPOConfig.from_dict({"model": {"path": "m"}}).data
    image: dict[str, Any] = {"prompt": "what", "image": tiny.picture(1)}
    video = {"prompt": "what", "video": list(tiny.video(1).frames)}
    for rows, expected in (([image], False), ([image, video], True)):
        assert shows_videos(load(rows, data)) is expected
        assert shows_videos(load(Mixture([[image], rows]), data)) is expected
    wrong = Dataset([{"prompt": 3}, video], data, verify=False)
    assert shows_videos(wrong)
