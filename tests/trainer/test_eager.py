"""Groups that are sampled ahead without a schedule: what is learned from, what is dropped, what a checkpoint keeps."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.ahead import LITTLE, noting_seeds, trainer_of, use_server
from helpers.patience import PATIENCE
from helpers.small_runs import ROWS, config_for, rollouts_of, rows_of

from mm_grpo import GRPOTrainer
from mm_grpo.data import Mixture
from mm_grpo.data.order import PromptOrder
from mm_grpo.rollout.seeds import SeedPlan

STEPS = 5


def config(staleness: int, **changes: Any) -> dict[str, Any]:
    rollout = {"max_staleness": staleness, "staleness_order": "eager"} | changes.pop("rollout", {})
    return {"rollout": rollout, "run": {"max_steps": STEPS} | changes.pop("run", {}), **changes}


def check_log(folder: Path, staleness: int, attempts: int = 1) -> dict[tuple[int, int], int]:
    """Every place of the plan was learned from once, whole, with its row, its seeds and no token that is too old; the
    step of each."""
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=attempts, max_steps=STEPS)
    order = PromptOrder(6, 4, seed=5)
    learned: dict[tuple[int, int], int] = {}
    for step in range(1, STEPS + 1):
        rows = rollouts_of(folder, step)
        assert sorted({row["slot"] for row in rows}) == [0, 1, 2, 3]
        for row in rows:
            versions = [version for _, version in row["weight_versions"]]
            assert versions == sorted(versions) and step - 1 - staleness <= versions[0] <= versions[-1] < step
            if row["attempt"]:
                continue
            place = tuple(row["place"])
            assert row["seed"] == plan.group(*place)[row["generation"]]
            assert row["uid"] == f"train:{order.rows(place[0])[place[1]]}"
            if row["generation"] == 0:
                assert place not in learned
                learned[place] = step
    assert sorted(learned) == [(step, slot) for step in range(1, STEPS + 1) for slot in range(4)]
    return learned


@pytest.mark.slow
def test_every_group_is_learned_from_once_and_none_is_too_old(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the engine raises where weights come while it samples and it cannot take them
    use_server(monkeypatch, delay=0.003, updates_in_flight=False)
    trainer_of(models["qwen2_vl"], tmp_path / "r", **config(1, run={"eval_every": 4})).train()
    check_log(tmp_path / "r", 1)
    for row in rows_of(tmp_path / "r")[1:]:  # the first is the evaluation before any step
        assert 0 <= row["staleness/mean"] <= row["staleness/max"] <= 1
        assert row["staleness/mixed"] == 0


@pytest.mark.slow
def test_an_update_lands_while_completions_are_sampled(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is sent when a completion of a later step has begun, and that completion has both versions."""
    use_server(monkeypatch)
    trainer = trainer_of(models["qwen2_vl"], tmp_path / "r", **config(2))
    engine, landed, begun = trainer.engine, threading.Event(), threading.Event()
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS)
    held = plan.group(3, 0)[0]
    update = engine.update_weights

    def paused(requests: Any, tokens: int) -> None:
        if requests[0].seed == held and tokens == 2:
            begun.set()
            assert landed.wait(PATIENCE)

    def sent(tensors: Any, version: int) -> Any:
        if version == 1:
            assert begun.wait(PATIENCE)
        found = update(tensors, version)
        if version == 1:
            landed.set()
        return found

    monkeypatch.setattr(engine, "pause", paused)
    monkeypatch.setattr(engine, "update_weights", sent)
    trainer.train()
    learned = check_log(tmp_path / "r", 2)
    rows = rollouts_of(tmp_path / "r", learned[3, 0])
    assert [row["weight_versions"] for row in rows if tuple(row["place"]) == (3, 0)] == [[[0, 0], [2, 1]]] * 3
    mixed = sum(
        len(row["weight_versions"]) > 1 for row in rows
    )  # of another group too, if it happens to be under way
    assert rows_of(tmp_path / "r")[learned[3, 0] - 1]["staleness/mixed"] == mixed / 12


@pytest.mark.slow
def test_a_group_that_is_too_old_is_dropped_whole_and_sampled_again(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(monkeypatch)
    trainer = trainer_of(models["qwen2_vl"], tmp_path / "r", **config(1))
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS)
    late, asked = plan.group(1, 2)[0], []
    generate, third = trainer.engine.generate, threading.Event()

    def noted(requests: Any) -> Any:
        done = generate(requests)
        if requests[0].seed == late:
            asked.append(requests[0].seed)
            if len(asked) == 1:  # two updates pass it by
                assert third.wait(PATIENCE)
        return done

    update = trainer.sync.update

    def passed(step: int, *args: Any, **kwargs: Any) -> Any:
        report = update(step, *args, **kwargs)
        if step == 2:
            third.set()
        return report

    monkeypatch.setattr(trainer.engine, "generate", noted)
    monkeypatch.setattr(trainer.sync, "update", passed)
    trainer.train()
    assert asked == [late, late]
    learned = check_log(tmp_path / "r", 1)
    assert learned[1, 2] >= 3
    assert sum(row["staleness/dropped"] for row in rows_of(tmp_path / "r")) == 1


@pytest.mark.slow
def test_of_a_mixture_a_replacement_is_of_the_source_of_what_it_replaces(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(completion: str) -> float:
        return 1.0

    use_server(monkeypatch)
    rollout = {"max_staleness": 2, "staleness_order": "eager", "max_attempts": 3}
    guards = {"no_update": "warn", "logp_gap": "off"}  # nothing is sampled before the first step
    run = LITTLE | {"max_steps": STEPS, "seed": 5, "guards": guards}
    sources = [{"path": ROWS[i : i + 2], "weight": weight} for i, weight in ((0, 2), (2, 1), (4, 1))]
    trainer = GRPOTrainer(
        config_for(models["qwen2_vl"], tmp_path / "r", rollout=rollout, run=run),
        train=Mixture(sources),
        rewards=[flat],
    )
    engine, plan = trainer.engine, SeedPlan(run_seed=5, prompts=4, generations=3, attempts=3, max_steps=STEPS)
    late, passed, generate = plan.group(1, 0)[0], threading.Event(), engine.generate

    def delayed(requests: Any) -> Any:
        """The first place of the first step is learned from in a later one, in another place's slot."""
        done = generate(requests)
        if requests[0].seed == late:
            assert passed.wait(PATIENCE)
        return done

    update = trainer.sync.update

    def sent(step: int, *args: Any, **kwargs: Any) -> Any:
        passed.set()
        return update(step, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", delayed)
    monkeypatch.setattr(trainer.sync, "update", sent)
    trainer.train()
    order, moved = trainer.plan.order, 0
    for step in range(1, STEPS + 1):
        for row in rollouts_of(tmp_path / "r", step):
            of, slot = row["place"]
            moved += (of, slot) != (step, row["slot"])
            asked = order.spare(of, row["attempt"], slot, 3) if row["attempt"] else order.rows(of)[slot]
            assert row["uid"] == trainer.train_set.uid(asked)
            assert row["seed"] == plan.group(of, slot, row["attempt"])[row["generation"]]
    assert moved


@pytest.mark.slow
def test_a_killed_run_keeps_what_was_finished_and_asks_again_for_the_rest(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(monkeypatch)
    changes = config(1, run={"save_every": 1})
    broken = trainer_of(models["qwen2_vl"], tmp_path / "r", **changes)
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS)
    never, generate, update = plan.group(3, 1)[0], broken.engine.generate, broken.learner.update
    finished: dict[int, tuple[int, ...]] = {}

    def noted(requests: Any) -> Any:
        if requests[0].seed == never:
            threading.Event().wait(2)
        done = generate(requests)
        finished.update({c.seed: c.token_ids for c in done})
        return done

    def learn(groups: Any) -> Any:
        if broken.sync.version == 2:
            raise ZeroDivisionError
        return update(groups)

    monkeypatch.setattr(broken.engine, "generate", noted)
    monkeypatch.setattr(broken.learner, "update", learn)
    with pytest.raises(ZeroDivisionError):
        broken.train()

    kept = json.loads((tmp_path / "r/checkpoints/step-000002/manifest.json").read_text())["extra"]
    assert "ahead" in kept
    again = trainer_of(models["qwen2_vl"], tmp_path / "r", resume=True, **changes)
    asked = noting_seeds(monkeypatch, again.engine)
    again.train()
    check_log(tmp_path / "r", 1)
    assert never in asked  # it was on its way
    before = {seed for step in (1, 2) for slot in range(4) for seed in plan.group(step, slot)}
    rows = [row for step in (3, 4, 5) for row in rollouts_of(tmp_path / "r", step)]
    of_before = [row for row in rows if row["seed"] not in asked]
    assert all(row["seed"] in finished for row in of_before)
    assert {row["seed"] for row in rows} & before == {row["seed"] for row in of_before} & before
    assert of_before  # some had finished, and were learned from without being sampled again


def test_what_fails_in_a_request_ends_the_run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(monkeypatch)
    trainer = trainer_of(models["qwen2_vl"], tmp_path / "r", **config(1))
    generate = trainer.engine.generate
    seed = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS).group(4, 1)[0]

    def broken(requests: Any) -> Any:
        if requests[0].seed == seed:
            raise ConnectionError("no server is left")
        return generate(requests)

    monkeypatch.setattr(trainer.engine, "generate", broken)
    with pytest.raises(ConnectionError, match="no server is left"):
        trainer.train()
    assert len(rows_of(tmp_path / "r")) in (2, 3)  # asked for after the second update
