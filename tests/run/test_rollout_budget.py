"""run.keep_rollouts: what goes, what stays, and that nothing of anybody else's is touched."""

from __future__ import annotations

from pathlib import Path

from helpers.runs import group
from PIL import Image

from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts


def filled(path: Path, steps: int, limit: int | None) -> tuple[RunFolder, list[int]]:
    """A run whose steps each have an image of their own, and one that all share; how many bytes it had after each."""
    folder, sizes = RunFolder(path, keep_rollouts=limit).start("x: 1\n"), []
    for step in range(1, steps + 1):
        folder.write_rollouts(step, [group(0, (1.0, 0.0)), group(step, (1.0, 0.0))])
        sizes.append(on_disk(folder.paths))
    return folder, sizes


def on_disk(paths: RunPaths) -> int:
    return sum(file.stat().st_size for file in paths.rollouts.rglob("*") if file.is_file())


def test_the_oldest_go_and_the_first_and_the_last_stay(tmp_path: Path) -> None:
    whole, sizes = filled(tmp_path / "whole", 10, None)
    assert logged_steps(whole.paths) == list(range(1, 11))
    limit = sizes[4]
    folder, sizes = filled(tmp_path / "kept", 10, limit)
    assert max(sizes) <= limit
    steps = logged_steps(folder.paths)
    assert steps[0] == 1 and steps[1:] == list(range(steps[1], 11)) and 4 <= len(steps) <= 5
    named = {name for step in steps for row in read_rollouts(folder.paths, step) for name in row["images"]}
    assert {file.name for file in folder.paths.images.iterdir()} == named  # no more, no less
    assert folder.rollout_budget.bytes == on_disk(folder.paths)
    tiny, _ = filled(tmp_path / "tiny", 5, 0)
    assert logged_steps(tiny.paths) == [1, 5]


def test_a_run_that_resumes_counts_what_is_there(tmp_path: Path) -> None:
    folder, sizes = filled(tmp_path, 6, None)
    again = RunFolder(tmp_path, keep_rollouts=sizes[3], resume=True)
    again.write_rollouts(7, [group(0, (1.0, 0.0)), group(7, (1.0, 0.0))])
    assert on_disk(folder.paths) <= sizes[3] and again.rollout_budget.bytes == on_disk(folder.paths)
    steps = logged_steps(folder.paths)
    assert steps[0] == 1 and steps[-1] == 7 and 2 not in steps


def test_what_is_somebody_else_s_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder, _ = filled(tmp_path, 5, None)
    notes, picture = folder.paths.rollouts / "notes.jsonl", folder.paths.images / f"{'a' * 32}.png"
    notes.write_text("x" * 10_000)
    Image.new("RGB", (2, 2)).save(picture)
    again = RunFolder(tmp_path, keep_rollouts=0, resume=True)
    again.write_rollouts(6, [group(6, (1.0, 0.0))])
    assert logged_steps(folder.paths) == [1, 6] and notes.exists() and picture.exists()
    assert again.rollout_budget.bytes == on_disk(folder.paths) - 10_000 - picture.stat().st_size


def test_what_evaluations_name_stays(tmp_path: Path) -> None:
    folder, _ = filled(tmp_path, 3, 0)  # 1 and 3 are left
    (name,) = read_rollouts(folder.paths, 3)[2]["images"]
    rows = folder.paths.rollouts / "eval-step-000003.jsonl"
    rows.write_text(f'{{"step": 3, "uid": "e", "images": ["{name}"]}}\n')
    folder.write_rollouts(4, [group(4, (1.0, 0.0))])
    assert logged_steps(folder.paths) == [1, 4] and rows.exists()
    assert (folder.paths.images / name).exists()
    rows.unlink()
    (other,) = read_rollouts(folder.paths, 4)[0]["images"]
    folder.write_rollouts(5, [group(5, (1.0, 0.0))])
    assert not (folder.paths.images / other).exists()
