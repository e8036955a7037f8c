"""What an evaluation says where there is nothing to say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.ahead import noting_seeds
from helpers.configs import merged, small_config

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.rollout import evaluate
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.evaluate import Best, Evaluation, RowScores, as_metrics, better, summarise
from mm_grpo.run.metrics import read_rows
from mm_grpo.types import Completion, Group, Prompt, Sample

ROWS = shapes_rows(split="train", size=4, seed=1, image_size=56)


def always_right(completion: str) -> float:
    return 1.0


def core(one: Evaluation) -> tuple[Any, ...]:
    return one.accuracy, one.reward, one.rows, one.score


def made(path: Path, folder: Path, heldout: Any, reward: Any, **changes: Any) -> GRPOTrainer:
    values: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3},
        "run": {"max_steps": 1, "report": False, "save_model": False, "guards": {"no_update": "off"}},
    }
    config = small_config(path, folder, **merged(values, changes))
    return GRPOTrainer(config, train=ROWS, eval=heldout, rewards=[reward])


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
    cores = {name: core(one) for name, one in found.items()}
    assert cores == {"new": (None, None, 4, None), "known": (None, 0.5, 1, 0.5)}
    assert found["new"].interval is None and found["new"].parts == {}
    measured = as_metrics(found)
    lengths = {
        f"eval/{name}/{what}": value
        for name, one in found.items()
        for what, value in (("mean_length", one.length), ("clipped_ratio", one.clipped))
    }
    part = next(iter(found["known"].parts))
    assert measured == {
        "eval/known/reward": 0.5, "eval/known/score": 0.5, f"eval/known/rewards/{part}/mean": 0.5, **lengths
    }  # fmt: skip
    assert better(None, found, 0) is None and better(Best(0.5, 1), found, 2) == Best(0.5, 1)
    summary = trainer.train()
    assert summary["score_before"] is None and summary["score_after"] is None
    assert summary["eval"] == {"known": {"before": 0.5, "after": 0.5, "rows": 1}}
    start, metrics = read_rows(trainer.folder.paths.metrics)
    assert start.pop("time/eval") > 0 and start.pop("rollouts/eval-step")
    assert start == {"step": 0, **measured}
    assert "eval/new/reward" not in metrics and metrics["eval/known/reward"] == 0.5


def test_lengths_and_cuts_are_of_completions_not_of_rows() -> None:
    """Three generations of a row and two of another: of five completions two were cut."""
    anything: Any = object()
    answered = (("length", 4), ("stop", 1), ("length", 4)), (("stop", 3), ("stop", 3))
    rows = []
    for slot, own in enumerate(answered):
        done = tuple(Completion((5,) * n, (-1.0,) * n, "", reason, 0) for reason, n in own)  # type: ignore[arg-type]
        prompt = Prompt(Sample(f"r:{slot}", []), (), anything, anything, {})
        group = Group(slot, prompt, done, (1.0,) * len(done))
        rows.append(RowScores.of(group, EvalMetric()))
    assert [(row.clipped, row.lengths) for row in rows] == [(2, [4, 1, 4]), (0, [3, 3])]
    found = summarise(rows, EvalMetric())
    assert (found.clipped, found.length, found.score) == (pytest.approx(0.4), pytest.approx(3.0), 1.0)
    without = [replace(rows[1], values=[0.5, 0.0]), replace(rows[0], values=[1.0, 1.0, 1.0])]
    blind = summarise(rows, EvalMetric(), blind=without, blind_kind="shuffled").blind
    assert blind is not None and blind.gap == pytest.approx(0.375)  # 0.75 of one row, 0 of the other


def test_the_first_of_equal_scores_is_the_best() -> None:
    best = None
    for step, score in enumerate((0.5, 0.7, 0.7, 0.6)):
        best = better(best, {"a": Evaluation(None, score, 1, score)}, step)
    assert best == Best(0.7, 1)


def test_the_headline_is_the_mean_or_the_share_above_a_mark(models: dict[str, Path], tmp_path: Path) -> None:
    """A reward that is never 1, such as an IoU, has an accuracy where the mark says what counts as right."""

    def overlap(completion: str, overlap: float = 0.5) -> float:
        return overlap

    rows = [dict(row, overlap=value) for row, value in zip(ROWS, (0.95, 0.7, 0.5, 0.1), strict=True)]
    mean = made(models["qwen2_vl"], tmp_path / "a", rows, overlap)
    found = mean.evaluate()["eval"]
    assert core(found) == (None, pytest.approx(0.5625), 4, pytest.approx(0.5625))
    interval = pytest.approx((0.5625 - 0.3519, 0.5625 + 0.3519), abs=1e-4)
    assert found.interval == found.reward_interval == interval
    assert str(mean.evaluations.headline) == "mean reward"
    marked = made(models["qwen2_vl"], tmp_path / "b", rows, overlap, run={"headline": "overlap >= 0.5"})
    found = marked.evaluate()["eval"]
    assert core(found) == (0.75, pytest.approx(0.5625), 4, 0.75)
    assert found.interval == pytest.approx((0.3006, 0.9544), abs=1e-4)  # Wilson
    assert found.parts == {"overlap": pytest.approx(0.5625)}
    assert str(marked.evaluations.headline) == "accuracy (overlap >= 0.5)"
    summary = marked.train()
    assert summary["headline"] == "accuracy (overlap >= 0.5)" and summary["accuracy_best"] == 0.75
    assert summary["first_set"]["after"]["interval"] == pytest.approx((0.3006, 0.9544), abs=1e-4)
    named = made(models["qwen2_vl"], tmp_path / "c", rows, overlap, run={"headline": "overlap mean"})
    assert core(named.evaluate()["eval"]) == (None, pytest.approx(0.5625), 4, pytest.approx(0.5625))
    assert str(named.evaluations.headline) == "mean overlap"
    for wrong in ("overlop >= 1", "overlop mean"):
        with pytest.raises(ConfigError, match=f"run.headline = '{wrong}': no reward of the run is named"):
            made(models["qwen2_vl"], tmp_path / "c", rows, overlap, run={"headline": wrong})


def test_rows_that_are_too_long_are_dropped_if_configured(models: dict[str, Path], tmp_path: Path) -> None:
    heldout = [dict(row) for row in ROWS[:3]]
    parts = heldout[1]["prompt"][0]["content"]
    heldout[1]["prompt"] = [{"role": "user", "content": [*parts, {"type": "text", "text": "x" * 400}]}]

    def trainer(rows: Any, policy: str) -> GRPOTrainer:
        data = {"max_prompt_length": 200, "on_overlong": policy}
        return made(models["qwen2_vl"], tmp_path / policy, rows, always_right, data=data)

    assert core(trainer(heldout, "drop").evaluate()["eval"]) == (None, 1.0, 2, 1.0)
    assert core(trainer([heldout[1]], "drop").evaluate()["eval"]) == (None, None, 0, None)
    with pytest.raises(DataError, match=r"drop such rows with data\.on_overlong=drop"):
        trainer(heldout, "stop").evaluate()


def test_sets_are_answered_from_seeds_of_their_own(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets with the same rows, sampled: equal seeds would give equal answers."""
    sampled = {"eval": {"temperature": 1.0, "num_generations": 2}}
    trainer = made(models["qwen2_vl"], tmp_path / "r", {"a": ROWS, "b": ROWS}, always_right, rollout=sampled)
    seeds = noting_seeds(monkeypatch, trainer.engine)
    trainer.evaluate()
    assert len(seeds) == 16 == len(set(seeds))


def test_chunks_are_neutral(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heldout = shapes_rows(split="heldout", size=9, seed=2, image_size=56)
    rollout = {"num_generations": 2, "eval": {"temperature": 1.0}}
    trainer = made(models["qwen2_vl"], tmp_path / "run", heldout, always_right, rollout=rollout)
    answers = list[list[tuple[int, str]]]()
    for chunk in (4, 64):  # a step has 4 completions
        monkeypatch.setattr(evaluate, "CHUNK", chunk)
        rows, done = list[tuple[int, str]](), list[int]()
        trainer.evaluations.answer(
            trainer.runner,
            0,
            keep=lambda name, blind, groups, rows=rows: rows.extend(
                (g.slot, g.completions[0].text) for g in groups
            ),
            report=lambda label, at, of, done=done: done.append(at),
        )
        answers.append(rows)
        assert done == list(range(0, 9, chunk))
    assert answers[0] == answers[1]
    assert [slot for slot, _ in answers[0]] == list(range(9)) and len({text for _, text in answers[0]}) > 4
    trainer.close()


def test_an_evaluation_prompt_and_its_answer_fit_the_context(models: dict[str, Path], tmp_path: Path) -> None:
    longer, whole = ({"eval": {"max_completion_length": most}} for most in (2048 - 40, 2048))
    trainer = made(models["qwen2_vl"], tmp_path / "a", ROWS[:1], always_right, rollout=longer)
    with pytest.raises(DataError, match=r"context of 2048 less rollout.eval.max_completion_length allows 40"):
        trainer.evaluate()
    with pytest.raises(ConfigError, match=r"rollout.eval.max_completion_length = 2048: the model's context"):
        made(models["qwen2_vl"], tmp_path / "b", ROWS[:1], always_right, rollout=whole)
