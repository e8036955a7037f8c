"""The certificate of a run: its numbers are those that one counts in the run's files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import calling
from helpers.ahead import trainer_of, use_server
from helpers.small_runs import HELDOUT, ROWS, config_for, rollouts_of, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.certificate import certificate
from mm_grpo.run.paths import RunPaths

STEPS = 4
PROCESS = ("starts", "warmed base", "gap at starts", "checkpoint")
"""Facts that depend on how often a run was started, or on random states."""


class Kill:
    """Ends a run in its third step, whose rollouts are written."""

    def on_rollouts(self, step: int) -> None:
        if step == 3:
            raise ZeroDivisionError


def trained(path: Path, folder: Path, *callbacks: Any, resume: bool = False) -> Path:
    fields = {"max_steps": STEPS, "save_every": 1, "eval_every": 2, "eval_blind": "shuffled"}
    config = config_for(path, folder, run=fields)
    GRPOTrainer(
        config, train=ROWS, eval=HELDOUT, rewards=[vowels], callbacks=callbacks, resume=resume
    ).train()
    return folder


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["qwen2_vl"]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("certified") / "run")


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*(?:e-\d+)?", text)]


def test_the_numbers_of_a_finished_run(finished: Path, command: Any) -> None:
    rows, logs = rows_of(finished)[1:], [r for s in range(1, STEPS + 1) for r in rollouts_of(finished, s)]
    facts, gap = certificate(RunPaths(finished)), "sampling/sampling_logp_difference"
    assert facts == json.loads((finished / "summary.json").read_text())["certificate"]
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=STEPS)
    law = [seed for step in range(1, STEPS + 1) for slot in range(4) for seed in plan.group(step, slot)]
    assert [row["seed"] for row in logs] == law and numbers(facts["seeds"]) == [48, len(set(law)), 0]
    assert numbers(facts["samples"]) == [48, 48, sum(row["tokens"] for row in logs), 0]
    assert numbers(facts["gap of samples"])[0] == sum(row[f"{gap}/tokens"] for row in rows)
    assert numbers(facts["gap of samples"])[4] == pytest.approx(
        max(row[f"{gap}/max"] for row in rows), rel=0.01
    )
    assert numbers(facts["updates"])[:2] == [sum(row["learner/updates"] for row in rows), 0]
    images = [sum(row[name] for row in rows) for name in ("prompts/images", "prompts/images_decoded")]
    assert numbers(facts["images"])[:2] == images and facts["prompt ids"] == "not measured"
    assert (facts["state"], facts["failed"], facts["steps"][0]) == ("finished", "nothing", "4")
    done = command("view", finished, "--certificate")
    lines = done.out.splitlines()
    assert done.code == 0 and 28 <= len(lines) <= 45 and max(map(len, lines)) <= 80
    assert facts["seeds"] in (finished / "report.html").read_text()


def test_a_run_that_was_killed_has_each_step_once(model: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        trained(model, tmp_path / "run", Kill())
    killed = certificate(RunPaths(tmp_path / "run"))
    assert killed["state"] == "not finished" and numbers(killed["seeds"]) == [24, 24, 0]
    resumed = certificate(RunPaths(trained(model, tmp_path / "run", resume=True)))
    assert resumed["starts"] == "2, after steps 0, 2; processes: 1; rows changed between: 0"
    whole = certificate(RunPaths(finished))
    assert {k: v for k, v in resumed.items() if k not in PROCESS} == {
        k: v for k, v in whole.items() if k not in PROCESS
    }


def test_files_that_are_not_what_the_run_wrote(model: Path, tmp_path: Path, command: Any) -> None:
    run = trained(model, tmp_path / "run")
    first, second, third, _ = sorted((run / "rollouts").glob("step-*.jsonl"))
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:-1]))
    third.unlink()
    facts = certificate(RunPaths(run))
    assert facts["rollout log"] == "missing: 3; not whole: 1; read: 2 steps" and facts["failed"] == "nothing"
    lines = second.read_text().splitlines()
    second.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"seed": 7}), *lines[1:]]) + "\n")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 4', '"step": 3'))
    facts = certificate(RunPaths(run))
    assert numbers(facts["seeds"])[2] == 1 and "FAILED" in facts
    done = command("view", run, "--certificate")
    assert done.code == 3 and "\nFAILED" in done.out and "1 answers have" in done.out


@pytest.mark.slow
def test_conversations_of_steps_ahead(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_server(monkeypatch)
    talks = {"max_completion_length": 80, "max_turns": 2, "environment_workers": 0, "max_staleness": 1}
    code = {"environment": f"{calling.__file__}:Gallery"}
    processor = {"processor": f"{calling.__file__}:Calling"}
    trainer_of(model, tmp_path / "run", model=processor, rollout=talks | code).train()
    logs = [row for step in (1, 2, 3) for row in rollouts_of(tmp_path / "run", step)]
    turns = [turn["seed"] for row in logs for turn in row["turns"] if turn["role"] == "assistant"]
    facts = certificate(RunPaths(tmp_path / "run"))
    assert len(turns) > len(logs) and numbers(facts["seeds"]) == [len(turns), len(set(turns)), 0]
    assert numbers(facts["samples"])[3] == 1 and facts["evaluations"] == "not measured"
