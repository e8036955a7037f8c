"""Steps that are sampled ahead on a schedule: which weights they are sampled under, and that a run repeats."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from helpers import calling
from helpers.ahead import logged, noting_seeds, trainer_of, use_server, without_times
from helpers.patience import PATIENCE, until
from helpers.small_runs import config_for, rollouts_of, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.rollout.pipeline import scheduled_version
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.types import Completion, Group

STEPS = 5
CONVERSATIONS: dict[str, Any] = {
    "model": {"processor": f"{calling.__file__}:Calling"},
    "rollout": {"max_staleness": 1, "max_completion_length": 80, "max_turns": 2,
                "environment": f"{calling.__file__}:Gallery", "environment_workers": 0},
}  # fmt: skip
SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "base"


def run(path: Path, folder: Path, staleness: int, **changes: Any) -> GRPOTrainer:
    rollout = {"max_staleness": staleness} | changes.pop("rollout", {})
    changes["run"] = {"max_steps": STEPS} | changes.get("run", {})
    trainer = trainer_of(path, folder, rollout=rollout, **changes)
    trainer.train()
    return trainer


def break_after(version: int, trainer: GRPOTrainer, patch: pytest.MonkeyPatch) -> None:
    """Train until weights of this version are learned from."""
    update = trainer.learner.update
    patch.setattr(trainer.learner, "update", lambda g: update(g) if trainer.sync.version < version else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def assert_equal_runs(one: Path, other: Path, steps: int = STEPS, *, weights: bool = True) -> None:
    assert without_times(one) == without_times(other)
    for step in range(1, steps + 1):
        assert logged(one, step) == logged(other, step)
    if weights:
        files = [(folder / "model/model.safetensors").read_bytes() for folder in (one, other)]
        assert files[0] == files[1]


@pytest.mark.slow
def test_each_step_has_the_version_of_the_schedule_and_a_run_repeats_whatever_the_timing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[set[int]] = []
    for name, delay in (("slow", 0.005), ("fast", 0.0)):
        use_server(monkeypatch, delay=delay)
        changes: dict[str, Any] = {"run": {"max_steps": STEPS, "eval_every": 2, "save_model": True}}
        trainer = trainer_of(model, tmp_path / name, rollout={"max_staleness": 2}, **changes)
        generate = trainer.engine.generate

        def noted(requests: Any, generate: Any = generate) -> Any:
            done = generate(requests)
            if requests[0].sampling.temperature == 0:
                evaluated.append({version for c in done for _, version in c.weight_versions})
            return done

        monkeypatch.setattr(trainer.engine, "generate", noted)
        trainer.train()
    assert evaluated == [{0}, {2}, {4}, {STEPS}] * 2
    assert_equal_runs(tmp_path / "fast", tmp_path / "slow")
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS)
    for step in range(1, STEPS + 1):
        version = scheduled_version(step, 2)
        rows = rollouts_of(tmp_path / "fast", step)
        assert {json.dumps(row["weight_versions"]) for row in rows} == {f"[[0, {version}]]"}
        assert [r["seed"] for r in rows] == [s for slot in range(4) for s in plan.group(step, slot)]
        # the correction is on by default
        ratio = rows_of(tmp_path / "fast")[step]["sampling/importance_sampling_ratio/mean"]
        assert ratio != 1.0 if step > 1 else ratio == pytest.approx(1.0, abs=1e-4)


def test_sampling_goes_on_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None
) -> None:
    trainer = trainer_of(model, tmp_path / "r", rollout={"max_staleness": 1})
    update, generate = trainer.learner.update, trainer.engine.generate
    learning, sampled = ([threading.Event() for _ in range(5)] for _ in range(2))
    steps, threads = iter((1, 2, 3)), set()

    def learn(groups: Any) -> Any:
        step = trainer.sync.version + 1
        learning[step].set()
        assert step == 3 or sampled[step + 1].wait(PATIENCE)
        return update(groups)

    def noted(requests: Any) -> Any:
        if len(requests) < 12:  # of the parity check, an evaluation or the sync
            return generate(requests)
        step = next(steps)
        threads.add(threading.current_thread().name)
        assert step == 1 or learning[step - 1].wait(PATIENCE)
        done = generate(requests)
        sampled[step].set()
        return done

    monkeypatch.setattr(trainer.learner, "update", learn)
    monkeypatch.setattr(trainer.engine, "generate", noted)
    trainer.train()
    assert threads == {"mm_grpo steps ahead 1"}


@pytest.mark.slow
@pytest.mark.field_bug("lost-order")
def test_a_resumed_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None) -> None:
    rollout = {"max_staleness": 2, "max_attempts": 2}
    changes: dict[str, Any] = {"rollout": rollout, "reward": partly_flat, "data": {"pass_rate": 0.5}}
    run = {"max_steps": STEPS, "save_every": 1, "save_model": True, "keep_checkpoints": 9}
    changes["run"] = run | {"guards": {"no_update": "warn"}}
    trainer_of(model, tmp_path / "whole", **changes).train()

    break_after(2, trainer_of(model, tmp_path / "r", **changes), monkeypatch)
    again = trainer_of(model, tmp_path / "r", resume=True, **changes)
    asked = noting_seeds(monkeypatch, again.engine)
    again.train()
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=2, max_steps=STEPS)
    kept = {s for step in (3, 4) for slot in range(4) for a in range(2) for s in plan.group(step, slot, a)}
    assert kept.isdisjoint(asked)  # steps 3 and 4 were finished, and are not sampled again
    assert set(plan.group(5, 0)) <= set(asked)
    assert_equal_runs(tmp_path / "r", tmp_path / "whole")


def partly_flat(completions: list[Any], trainer_state: Any, log_extra: Any, **columns: Any) -> list[float]:
    """Without spread in every other group."""
    log_extra("place", list(range(len(completions))))
    return [0.5 if place // 3 % 2 else len(text) / 7 + place for place, text in enumerate(completions)]


@pytest.mark.long
def test_a_callback_evaluates_while_the_next_step_is_sampled(
    models: dict[str, Path], tmp_path: Path, server: None
) -> None:
    """Environments are those of one loop of turns: an evaluation waits until the steps ahead are done with them."""
    found: list[float | None] = []

    class Evaluates:
        def on_rollouts(self, trainer: GRPOTrainer) -> None:
            found.append(trainer.evaluate()["eval"].reward)

    changes = CONVERSATIONS | {"run": {"max_steps": 2, "eval_every": 2, "headline": "vowels mean"}}
    for name, callbacks in (("plain", []), ("evaluates", [Evaluates()])):
        trainer = trainer_of(models["qwen2_5_vl"], tmp_path / name, callbacks=callbacks, **changes)
        trainer.train()
    assert len(found) == 2 and None not in found
    assert_equal_runs(tmp_path / "evaluates", tmp_path / "plain", 2, weights=False)


@pytest.mark.long
def test_what_rewards_and_callbacks_do_to_conversations_changes_nothing_of_the_run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None
) -> None:
    """Nor of one that goes on from pictures in a checkpoint."""

    def scores(completion: str, turns: list[dict[str, Any]]) -> float:
        if spoiling:
            for turn in turns:
                turn["arguments"].clear()
                for image in turn["images"]:
                    image.paste((255, 0, 0), (0, 0, *image.size))
            turns.clear()
        return vowels(completion)

    class Spoils:
        def on_rollouts(self, groups: list[Group]) -> None:
            for group in groups:
                for completion in group.completions:
                    for turn in completion.turns:
                        cast("dict[str, Any]", turn.arguments).clear()
                        for image in turn.images:
                            image.paste((0, 255, 0), (0, 0, *image.size))
            groups.clear()

        def on_evaluate(self, evaluations: dict[str, Any]) -> None:
            evaluations.clear()

    run = {"max_steps": 3, "save_every": 1, "save_model": True, "eval_every": 3, "headline": "scores mean"}
    changes = CONVERSATIONS | {"run": run, "reward": scores}
    spoiling = False
    trainer_of(models["qwen2_5_vl"], tmp_path / "whole", **changes).train()
    spoiling, trained = True, {"callbacks": [Spoils()], **changes}
    break_after(1, trainer_of(models["qwen2_5_vl"], tmp_path / "r", **trained), monkeypatch)
    trainer_of(models["qwen2_5_vl"], tmp_path / "r", resume=True, **trained).train()
    pictures = [turn.get("images") for row in rollouts_of(tmp_path / "r", 2) for turn in row["turns"][1:]]
    assert any(pictures)
    assert_equal_runs(tmp_path / "r", tmp_path / "whole", 3)


def test_what_fails_ahead_ends_the_run(model: Path, tmp_path: Path, server: None) -> None:
    def broken(completion: str, trainer_state: Any) -> float:
        if trainer_state.global_step == 3:
            raise ValueError("no score today")
        return vowels(completion)

    with pytest.raises(Exception, match="no score today"):
        run(model, tmp_path / "r", 2, reward=broken)
    until(lambda: not any(t.name.startswith("mm_grpo steps") for t in threading.enumerate()))


def test_a_stale_engine_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(monkeypatch, "no load")
    with pytest.raises(GuardStop, match=r"version 1"):
        run(model, tmp_path / "r", 2)
    assert not (tmp_path / "r/metrics.jsonl").exists()  # found in the first step


def test_stale_samples_do_not_look_like_a_broken_engine(model: Path, tmp_path: Path, server: None) -> None:
    """The policy moves far beyond what rounding explains; only samples of its own version are compared with it."""
    run(model, tmp_path / "r", 2, optim={"learning_rate": 5e-2}, run={"max_steps": 3})
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in rows_of(tmp_path / "r")]
    assert gaps[0] < 1e-4 < 1e-2 < max(gaps)


def test_an_engine_in_this_process_and_kl_in_rewards_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness = 1: must be 0 with .* 'transformers'"):
        trainer_of(model, tmp_path / "r", rollout={"max_staleness": 1})
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="kl_in_reward"):
        config_for("m", tmp_path, rollout={"max_staleness": 1}, algorithm={"kl_in_reward": True, "beta": 0.1})


def test_the_correction_is_on_where_samples_are_stale(tmp_path: Path) -> None:
    for staleness, mode, meant in ((0, "auto", "none"), (1, "auto", "token_truncate"), (1, "none", "none")):
        algorithm = {"importance_sampling_mode": mode}
        config = config_for("m", tmp_path, rollout={"max_staleness": staleness}, algorithm=algorithm)
        assert config.importance_sampling_mode == meant
        assert config.with_correction().algorithm.importance_sampling_mode == meant
        # without staleness the model decides, so a resumed run may not say none in the place of auto
        decided = config.resolved_fields["algorithm.importance_sampling_mode"]
        assert decided == (meant if staleness else mode)
        for_experts = "token_truncate" if mode == "auto" else mode
        assert config.with_correction([object()]).algorithm.importance_sampling_mode == for_experts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "lie"), [("float32", "wrong from the second"), ("bfloat16", "of another prompt")]
)
def test_wrong_log_probs_stop_the_run(
    dtype: str, lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: None
) -> None:
    changes: dict[str, Any] = {"model": {"dtype": dtype}, "optim": {"learning_rate": 1e-6}}
    changes["run"] = {"max_steps": 20}
    changes["rollout"] = {"max_staleness": 1, "max_completion_length": 8}
    trainer = trainer_of(SHAPES, tmp_path / "r", **changes)
    generate, before = trainer.engine.generate, list[Completion]()

    def lying(requests: Any) -> list[Completion]:
        sound: list[Completion] = generate(requests)
        # requests of a check are answered well
        if not trainer.sync.version or requests[0].sampling.max_tokens != 8:
            return sound
        others = list(before or sound)
        before[:] = sound
        if lie == "of another prompt":
            pairs = zip(sound, others, strict=True)
            return [replace(o, seed=c.seed, weight_versions=c.weight_versions) for c, o in pairs]
        return [replace(c, logprobs=(c.logprobs[0], *(x - 3.0 for x in c.logprobs[1:]))) for c in sound]

    monkeypatch.setattr(trainer.engine, "generate", lying)
    with pytest.raises(GuardStop, match="logp_gap"):
        trainer.train()
