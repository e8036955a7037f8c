"""Whole runs are the same on 1 and on 2 processes, whatever is in them; and go on when one of two was killed."""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from helpers import calling, processes
from helpers.run_folders import assert_the_same_sight, metrics_of, rollouts_of, weights_of, write_config
from safetensors.torch import load_file

STEPS = 4
# attempts, a KL in the reward, an isolated reward that begins while others are sampled
REFILLED: dict[str, Any] = {
    "rewards": [{"name": "length", "max_length": 4, "isolated": True}],
    "rollout": {"num_generations": 2, "max_attempts": 3},
    "algorithm": {
        "beta": 0.1, "kl_in_reward": True, "kl_estimator": "k1", "top_entropy_quantile": 0.8,
        "advantage_estimator": "rloo",
    },
    "run": {"max_steps": STEPS},
}  # fmt: skip
MIXTURE: dict[str, Any] = {**runs.MIXTURE, "run": {"max_steps": STEPS, "save_every": 2, "eval_every": 3}}
TURNS: dict[str, Any] = {
    "model": {"processor": f"{calling.__file__}:Calling"},
    "rollout": {
        "prompts_per_step": 3, "num_generations": 3, "max_completion_length": 150, "max_turns": 3,
        "environment": f"{calling.__file__}:Gallery", "environment_workers": 0,
    },
    "algorithm": {"turn_gamma": 0.9},
    "run": {"max_steps": 2},
}  # fmt: skip


DROPPED: dict[str, Any] = {  # of step 2 all prompts
    "rewards": [{"name": "length", "max_length": 4}],
    "data": {
        "train": {"task": f"{runs.__file__}:partly_long"}, "shuffle": False,
        "max_prompt_length": 200, "on_overlong": "drop",
    },
    "rollout": {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6},
    "algorithm": {"beta": 0.1, "num_iterations": 2},
    "run": {"max_steps": 3},
}  # fmt: skip


FILMS: dict[str, Any] = {
    "rewards": [{"name": "length", "max_length": 4}],
    "data": {"train": {"task": f"{runs.__file__}:films"}, "text_only": True},
    "rollout": {"prompts_per_step": 5, "num_generations": 4, "max_completion_length": 6},
    "algorithm": {"credit": "pgpo"},
    "run": {"max_steps": 2},
}


def refilled(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    replaced = {(row["step"], row["slot"]) for row in rows if row["attempt"]}
    assert len(rows) > 40 and len(replaced) > 2 and len({row["completion"] for row in rows}) > 20


def mixed(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    for step in range(1, STEPS + 1):
        uids = {(row["slot"], row["uid"]) for row in rows if row["step"] == step}
        assert Counter(uid.partition(":")[0] for _, uid in uids) == {"train/shapes": 4, "train/shapes-2": 2}
    assert any(key.startswith("task/") for key in metrics[-1])


def in_turns(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    turns = [turn for row in rows for turn in row["turns"]]
    assert sum(turn["role"] == "tool" for turn in turns) > 10 and any(turn.get("images") for turn in turns)
    said = [turn for turn in turns if turn["role"] == "assistant"]
    assert len({turn["seed"] for turn in said}) == len(said) > len(rows)
    assert {0.25, None} < {turn["reward"] for turn in said}
    assert max(row.get("turns/max", 0) for row in metrics) == 3


def dropped(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    """The step without a prompt makes no update, and those before and after it do."""
    steps = {row["step"]: row for row in metrics if row["step"]}
    assert [steps[n]["prompts/dropped"] for n in (1, 2, 3)] == [0, 2, 0]
    assert [steps[n]["learner/updates"] for n in (1, 2, 3)] == [4, 0, 4]
    assert steps[2]["learner/update_norm"] == 0 and "reward" not in steps[2]
    assert Counter(row["step"] for row in rows) == {1: 8, 3: 8}


def filmed(rows: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> None:
    videos = {row["slot"] for row in rows if row["step"] == 1 and row["videos"]}
    assert len(videos) > 2 and len({row["slot"] for row in rows}) == 5
    (order,) = (row["sight/order_nats"] for row in metrics if "sight/order_nats_stderr" in row)
    assert abs(order) > 1e-3


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "refilled": (REFILLED, refilled),
    "mixture": (MIXTURE, mixed),
    "turns": (TURNS, in_turns),
    "dropped": (DROPPED, dropped),
    "films": (FILMS, filmed),
}


FolderOf = Callable[[str, int], Path]


def launched(config: Path, world: int, output: Path, **more: Any) -> list[int]:
    return processes.launch(Path(runs.__file__), world, [config], output, **more)


@pytest.fixture(scope="module")
def folder_of(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a run of one of KINDS on so many processes, which is made once."""

    @cache
    def run(kind: str, world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{world}") / "run"
        output = folder.parent / "output"
        config = write_config(models["qwen2_5_vl"], folder, **KINDS[kind][0])
        assert launched(config, world, output, deadline=280) == [0] * world, processes.outputs(output, world)
        return folder

    return run


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_processes_make_the_same_run(
    kind: str, models: dict[str, Path], folder_of: FolderOf
) -> None:
    folders = [folder_of(kind, world) for world in (1, 2)]
    one, two = map(metrics_of, folders)
    # log-probs and advantages are numbers to compare closely; the rest is the same text
    rows, others = ([json.loads(x) for x in "".join(rollouts_of(f).values()).splitlines()] for f in folders)
    given = [
        [x.pop("advantage") for row in of_run for x in (row, *row.get("turns", ())) if "advantage" in x]
        for of_run in (rows, others)
    ]
    assert any("sight" in row for row in rows)
    for row, expected in zip(rows, others, strict=True):
        assert_the_same_sight(row, expected)
    assert rows == others and given[0] == pytest.approx(given[1], abs=1e-5) and any(given[0])
    KINDS[kind][1](rows, one)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("reward", "reward_std", "num_tokens", "completions/mean_length", "eval/eval/reward"):
            assert mine.get(key) == theirs.get(key), key
        every_run = {"loss", "grad_norm", "entropy", "learner/update_norm", "kl"}
        for key in (every_run | {"sight/nats", "sight/order_nats"}) & mine.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key
        for key in (key for key in mine if key.startswith(("task/", "rewards/", "epoch", "eval/"))):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
    base = load_file(models["qwen2_5_vl"] / "model.safetensors")
    weights = [weights_of(folder) for folder in folders]
    for name, first in weights[0].items():
        distance = (weights[1][name] - first).norm() / (first - base[name]).norm().clamp(min=1e-12)
        assert distance <= 1e-3, name  # several updates, each of which starts from the last


@pytest.mark.long
@pytest.mark.parametrize(("kind", "step"), [("mixture", STEPS), ("turns", 2)])
def test_a_step_is_replayed_on_another_number_of_processes(
    kind: str, step: int, folder_of: FolderOf, tmp_path: Path
) -> None:
    for trained, world in ((1, 2), (2, 1)):
        output, arguments = tmp_path / str(world), ["doctor", folder_of(kind, trained), "--replay", step]
        codes = processes.launch(("-m", "mm_grpo.cli"), world, arguments, output, deadline=280)
        assert codes == [0] * world, processes.outputs(output, world)
        lines = (output / "rank-0.txt").read_text()
        # only the mixture has a checkpoint of the step
        assert "no difference" in lines and ("their change differs by" in lines) == (kind == "mixture")


@pytest.mark.long
def test_two_processes_go_on_when_one_was_killed_while_it_wrote_a_checkpoint(
    models: dict[str, Path], folder_of: FolderOf, tmp_path: Path
) -> None:
    """Of a mixture, whose places in the sources are kept too."""
    model, straight, killed = models["qwen2_5_vl"], folder_of("mixture", 2), tmp_path / "killed"
    config = write_config(model, killed, **MIXTURE)
    (killed / "notes").mkdir(parents=True)
    (killed / "notes" / "mine.txt").write_text("mine")
    base = digests(model)
    writing = (1, lambda: any((killed / "checkpoints").glob(".step-*.new")))
    lost = launched(config, 2, tmp_path / "of-killed", kill=writing)
    assert lost[0] == 1 and lost[1] == -signal.SIGKILL, processes.outputs(tmp_path / "of-killed", 2)
    assert launched(config, 2, tmp_path / "resumed") == [0, 0], processes.outputs(tmp_path / "resumed", 2)
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == STEPS + 1
    assert rollouts_of(killed) == rollouts_of(straight)
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
    files, left = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (straight, killed))
    assert left - {"error.txt"} == files | {"notes/mine.txt"}
    assert (killed / "notes" / "mine.txt").read_text() == "mine" and digests(model) == base


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
