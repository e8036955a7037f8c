"""The certificate of a run: its numbers are those that one counts in the run's files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import calling
from helpers.ahead import trainer_of, use_server
from helpers.small_runs import rollouts_of, rows_of

from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.certificate import certificate
from mm_grpo.run.paths import RunPaths

GAP = "sampling/sampling_logp_difference"
PROCESS = {"starts", "warmed base", "gap at starts", "checkpoint"}
"""Facts that depend on how often a run was started, or on random states."""
FIELDS = {"max_steps": 4, "save_every": 1, "eval_every": 2, "eval_blind": "shuffled", "report": True}


def trained(models: dict[str, Path], folder: Path, **given: Any) -> Path:
    trainer_of(models["qwen2_vl"], folder, **{"run": FIELDS, **given}).train()
    return folder


@pytest.fixture(scope="module")
def finished(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    shadows = dict.fromkeys(("log/wrong", "log/tokens", "log/age", "start/step", "run/checked"), 7)
    callback = SimpleNamespace(on_step_end=lambda metrics: metrics.update(shadows))
    return trained(models, tmp_path_factory.mktemp("certified") / "run", callbacks=[callback])


def numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*(?:e-\d+)?", text)]


def test_the_numbers_of_a_finished_run(finished: Path, command: Any) -> None:
    rows, logs = rows_of(finished)[1:], [r for step in (1, 2, 3, 4) for r in rollouts_of(finished, step)]
    names = (f"{GAP}/tokens", "learner/updates", "prompts/images", "prompts/images_decoded")
    compared, updates, images, decoded = (sum(row[name] for row in rows) for name in names)
    plan = SeedPlan(run_seed=5, prompts=4, generations=3, attempts=1, max_steps=4)
    law = [seed for step in (1, 2, 3, 4) for slot in range(4) for seed in plan.group(step, slot)]
    assert [row["seed"] for row in logs] == law and len(set(law)) == 48
    sampled, largest = sum(row["tokens"] for row in logs), max(row[f"{GAP}/max"] for row in rows)
    facts = certificate(RunPaths(finished))
    assert numbers(facts["seeds"]) == [48, 48, 0] and numbers(facts["samples"]) == [48, 48, sampled, 0]
    assert numbers(facts["gap of samples"])[:3] == [compared, sampled, 4]
    assert numbers(facts["gap of samples"])[4] == pytest.approx(largest, rel=0.01)
    assert numbers(facts["updates"])[:3] + numbers(facts["images"])[:2] == [
        updates,
        updates,
        0,
        images,
        decoded,
    ]
    assert {facts["state"], facts["failed"], facts["prompt ids"]} == {"finished", "nothing", "not measured"}
    assert facts == json.loads((finished / "summary.json").read_text())["certificate"]
    assert facts["seeds"] in (finished / "report.html").read_text()
    done = command("view", finished, "--certificate")
    lines = done.out.splitlines()
    assert done.code == 0 and 28 <= len(lines) <= 45 and max(map(len, lines)) <= 80


def test_a_killed_run_has_each_step_once(models: Any, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):  # when the third step's rollouts are written
        trained(models, tmp_path, callbacks=[SimpleNamespace(on_rollouts=lambda step: 1 / (3 - step))])
    killed = certificate(RunPaths(tmp_path))
    assert killed["state"] == "not finished" and numbers(killed["seeds"]) == [24, 24, 0]
    resumed = certificate(RunPaths(trained(models, tmp_path, resume=True)))
    (tmp_path / "environment.json").write_text("{")  # a disk that was full; a resumed run writes it again
    trained(models, tmp_path, resume=True)
    assert numbers(certificate(RunPaths(tmp_path))["starts"])[:2] == [1, 4]
    whole = certificate(RunPaths(finished))
    assert numbers(resumed["starts"]) == [2, 0, 2, 1]
    assert {name for name in whole if resumed[name] != whole[name]} <= PROCESS


def test_files_that_are_not_what_the_run_wrote(models: Any, tmp_path: Path, command: Any) -> None:
    trained(models, tmp_path)
    first, second, third, _ = sorted((tmp_path / "rollouts").glob("step-*.jsonl"))
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:-1]))
    third.unlink()
    facts = certificate(RunPaths(tmp_path))
    assert numbers(facts["rollout log"]) == [3, 1, 2] and numbers(facts["rollout digests"])[:2] == [4, 0]
    line, *lines = second.read_text().splitlines()
    second.write_text("\n".join([json.dumps(json.loads(line) | {"seed": 7}), *lines]) + "\n")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 4', '"step": 3'))
    done = command("view", tmp_path, "--certificate")
    assert done.code == 3 and "\nFAILED" in done.out
    assert numbers(certificate(RunPaths(tmp_path))["seeds"])[2] == 1
    (tmp_path / "environment.json").write_text("[]")
    done = command("view", tmp_path, "--certificate")
    assert done.code == 2 and "is not what a run writes" in done.err and done.err.count("\n") == 1


def test_an_edited_rollout_file_fails_by_name(finished: Path, tmp_path: Path) -> None:
    changes = {
        "step-000002": {"completion": "x"},
        "step-000003": {"reward": 9.0},
        "eval-step-000000": {"parts": {}},
    }
    for name, change in changes.items():
        run = Path(shutil.copytree(finished, tmp_path / name))
        line, *lines = (file := run / f"rollouts/{name}.jsonl").read_text().splitlines()
        file.write_text("\n".join([json.dumps(json.loads(line) | change, ensure_ascii=False), *lines]) + "\n")
        facts = certificate(RunPaths(run))
        assert facts["FAILED"].count(".jsonl") == 1 and file.name in facts["FAILED"]
    shutil.rmtree(run / "checkpoints")  # its copy of the log has the digests
    rows = [{k: v for k, v in row.items() if not k.startswith("rollouts/")} for row in rows_of(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = certificate(RunPaths(run))
    assert facts["failed"] == "nothing" and numbers(facts["rollout digests"]) == [0, 6]


@pytest.mark.slow
def test_conversations_of_steps_ahead(models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    use_server(monkeypatch)
    talks = {"max_completion_length": 80, "max_turns": 2, "environment_workers": 0, "max_staleness": 1}
    talks |= {"environment": f"{calling.__file__}:Gallery"}
    trained(models, tmp_path, model={"processor": f"{calling.__file__}:Calling"}, rollout=talks, run={})
    logs = [row for step in (1, 2, 3) for row in rollouts_of(tmp_path, step)]
    turns = [turn["seed"] for row in logs for turn in row["turns"] if turn["role"] == "assistant"]
    facts = certificate(RunPaths(tmp_path))
    assert len(turns) > len(logs) and numbers(facts["seeds"]) == [len(turns), len(set(turns)), 0]
    assert numbers(facts["samples"])[3] == 1 and facts["evaluations"] == "not measured"
