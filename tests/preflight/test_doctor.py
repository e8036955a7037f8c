"""`mm-grpo doctor`: what it reports of a sound pair, and that it stops with 3 on every fault."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import processes
from helpers.fake_engines import FakeRemoteEngine, use_engine

from mm_grpo import GRPOConfig, build
from mm_grpo.errors import GuardStop
from mm_grpo.preflight.doctor import examine
from mm_grpo.rollout.engine import BatchStream
from mm_grpo.rollout.seeds import SeedPlan

SHAPES = {"task": "shapes", "split": "train", "size": 6, "seed": 1, "image_size": 56}


@pytest.fixture
def config_path(tmp_path: Path, models: dict[str, Path]) -> Path:
    config = {
        "model": {"path": str(models["qwen2_5_vl"]), "dtype": "float32"},
        "data": {"train": SHAPES},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 10},
        "optim": {"warmup_steps": 2, "updates_per_step": 2},
        "run": {"dir": str(tmp_path / "run"), "max_steps": 2, "seed": 5},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    return partial(use_engine, monkeypatch)


def test_the_report_of_a_sound_pair(config_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    asleep: list[int] = []
    monkeypatch.setattr(FakeRemoteEngine, "sleep", lambda self: asleep.append(self.version))
    config = GRPOConfig.from_yaml(config_path)
    report = examine(config, 3)
    assert report.failures == [] and report.ok and report.ids_equal is True
    found = (report.engine, report.dtype, report.device, report.limit)
    assert found == ("transformers", "float32", "cpu", 1e-3)
    plan = SeedPlan(5, 4, 4, 1, 2)
    assert [p.seeds for p in report.before] == [tuple(plan.group(1, slot)) for slot in range(3)]
    assert len({p.uid for p in report.before}) == 3
    for before, after in zip(report.before, report.after, strict=True):
        assert (before.media, before.completions) == (1, 4) and before.distinct == 4
        assert before.seeds == after.seeds and before.uid == after.uid
        assert before.score.tokens == before.sampled.tokens == after.score.tokens
        for gap in (before.score, before.sampled, after.score, after.sampled):
            assert 0 <= gap.mean <= gap.max < 1e-5
    done = report.update
    assert done is not None and done.logp_moved >= 3e-3 and done.learning_rate >= 1e-6
    assert done.tensors > 60 and done.bytes > 4 * 60_000
    assert asleep == [0]  # while the learner updates
    assert config.optim.warmup_steps == 2  # the config itself is left alone


def test_the_table_and_the_exit_code(command: Any, config_path: Path) -> None:
    code, out, _ = command("doctor", config_path, "--prompts", 2)
    assert code == 0
    for words in (
        "engine transformers", "limit 0.001", "train:", "4 of 4", "prompt ids equal: yes",
        "weight update: ", "\nok\n",
    ):  # fmt: skip
        assert words in out, words
    assert not (config_path.parent / "run").exists()


@pytest.mark.slow
def test_two_processes_make_one_update_and_one_report(config_path: Path, tmp_path: Path) -> None:
    arguments = ("doctor", config_path, "--prompts", 3)
    codes = processes.launch(("-m", "mm_grpo.cli"), 2, arguments, tmp_path / "output", deadline=120)
    first, second = ((tmp_path / "output" / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert codes == [0, 0], first + second
    assert first.count("4 of 4 completions distinct") == 3 and first.endswith("\nok\n")
    assert "weight update" not in second


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no transfer", ["weight sync: of ", " never arrived: "]),
        ("no load", ["did not reach the engine"]),
        ("wrong image", ["given completions of train:", "another image"]),
        ("constant seed, hidden", ["4 of 4 completions are the same", "generator"]),
    ],
)
def test_each_fault_is_named(fault: str, words: list[str], config_path: Path, engine: Any) -> None:
    engine(fault)
    report = examine(GRPOConfig.from_yaml(config_path), 1)
    assert not report.ok
    for word in words:
        assert any(word in failure for failure in report.failures), report.failures


def test_other_prompt_ids_stop_it_with_exit_code_3(
    command: Any, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(FakeRemoteEngine):
        def stream(self) -> Any:
            return BatchStream(self.generate)

        def generate(self, requests: Any) -> Any:
            raise GuardStop(f"{requests[0].prompt.uid}: ran 17 prompt tokens where the learner trains on 9")

    monkeypatch.setitem(build.ENGINES, "transformers", lambda c, m, p, r: Other(m, p))
    code, out, err = command("doctor", config_path)
    assert code == 3 and "prompt ids equal: not shown" in out and "Traceback" not in err
    assert "ran 17 prompt tokens where the learner trains on 9" in out


@pytest.mark.slow
def test_an_update_that_moves_nothing_proves_nothing(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_grpo.health.checks.LIMITS", {"float32": 100.0, "bfloat16": 100.0})
    report = examine(GRPOConfig.from_yaml(config_path), 1)
    assert len(report.failures) == 1 and "300 would show an update" in report.failures[0]
