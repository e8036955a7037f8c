"""Two ranks under DeepSpeed ZeRO-2 over two real vLLM servers, one of which is killed: the run of one rank."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import processes
from helpers.run_folders import metrics_of
from helpers.small_runs import rollouts_of
from transformers import AutoModelForImageTextToText

from mm_grpo import GRPOConfig
from mm_grpo.cli.serve import server_settings
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.launch import ServerProcess, serve
from mm_grpo.rollout.weights import digest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RECIPE = Path(__file__).parents[2] / "examples" / "shapes" / "config.yaml"
SCRIPT = Path(__file__).parents[1] / "distributed" / "runs.py"
STEPS, PROMPTS, GENERATIONS = 10, 8, 4
RUNS = {"one": 1, "killed": 2}
"""Ranks by run; in the last one a server is killed."""


def config_of(folder: Path, urls: list[str], **rollout: Any) -> Path:
    values = GRPOConfig.from_yaml(RECIPE).model_dump()
    values["data"]["eval"] = None
    values["model"] |= {"dtype": "float32", "device": "cpu"}
    values["rollout"] |= {
        "engine": "vllm_server", "prompts_per_step": PROMPTS, "num_generations": GENERATIONS, **rollout,
    }  # fmt: skip
    values["rollout"]["server"] |= {"urls": urls, "timeout": 60.0}
    values["optim"] |= {"zero_stage": 2, "adam_epsilon": 1e-4}
    values["run"] |= {
        "dir": str(folder), "max_steps": STEPS, "eval_every": 0, "save_every": 0, "report": False, "sight_every": 0,
        "eval_blind": None, "expected_curve": None, "headline": None,
    }  # fmt: skip
    file = folder.with_suffix(".yaml")
    GRPOConfig.from_dict(values).save(file)
    return file


def held_by(server: ServerProcess) -> tuple[str, dict[str, str]]:
    """The name of the weights that a server holds, and the digests of what its worker received."""
    client = ServerClient(server.url, timeout=30)
    try:
        name = client.call("/weight_info", method="GET")["weight_version"]
        (account,) = client.call("/collective_rpc", {"method": "mm_grpo_received"})["results"]
        return name, account["digests"]
    finally:
        client.close()


def kill_later(server: ServerProcess, log: Path) -> threading.Thread:
    """Kill a server when two rows are in the log of a run."""

    def later() -> None:
        end = time.monotonic() + 600
        while not log.exists() or log.read_bytes().count(b"\n") < 2:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        os.killpg(server.pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=later, daemon=True)
    thread.start()
    return thread


def test_two_ranks_that_lose_a_server_make_the_run_of_one(tmp_path: Path) -> None:
    said: list[str] = []
    settings = server_settings(GRPOConfig.from_yaml(config_of(tmp_path / "unused", ["unix:///unused"])), 2)
    with serve(settings, log_folder=tmp_path / "logs", report=said.append) as servers:
        urls = [server.url for server in servers]
        for name, world in RUNS.items():
            config = config_of(tmp_path / name, urls)
            if name == "killed":
                killer = kill_later(servers[0], tmp_path / name / "metrics.jsonl")
            codes = processes.launch(SCRIPT, world, [config], tmp_path / f"of-{name}", deadline=600)
            assert codes == [0] * world, processes.outputs(tmp_path / f"of-{name}", world)
            model = AutoModelForImageTextToText.from_pretrained(
                tmp_path / name / "model", dtype=torch.float32
            )
            learned = {key: digest(t.detach()) for key, t in model.named_parameters(remove_duplicate=False)}
            held = [held_by(server) for server in servers if name != "killed" or server is servers[1]]
            for version, digests in held:
                assert version.endswith(f":{STEPS}")
                assert len(digests) > 90 and digests.items() <= learned.items()
        killer.join(1)
        assert not killer.is_alive() and "it is started anew" in said[0]
    plan = SeedPlan(run_seed=0, prompts=PROMPTS, generations=GENERATIONS, attempts=1, max_steps=STEPS)
    for step in range(1, STEPS + 1):
        rows = rollouts_of(tmp_path / "killed", step)
        assert [r["seed"] for r in rows] == [s for slot in range(PROMPTS) for s in plan.group(step, slot)]
        assert {json.dumps(row["weight_versions"]) for row in rows} == {f"[[0, {step - 1}]]"}
        bytes_of = {n: (tmp_path / n / f"rollouts/step-{step:06d}.jsonl").read_bytes() for n in RUNS}
        assert bytes_of["one"] == bytes_of["killed"]
    killed = metrics_of(tmp_path / "killed")
    assert sum(row["served/losses"] for row in killed) == 1
    for mine, alone in zip(killed, metrics_of(tmp_path / "one"), strict=True):
        assert (mine["reward"], mine["num_tokens"]) == (alone["reward"], alone["num_tokens"])
        assert mine["learner/update_norm"] == pytest.approx(alone["learner/update_norm"], rel=1e-3)
