"""examples/cluster: its files parse, agree with our defaults, and start runs (on the CPU, with stand-ins for SLURM)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import several
import yaml
from folders import metrics_of, write_config
from launches import ACCELERATE, TRAIN, finished, running

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.launchers import check_launcher

CLUSTER = several.ROOT / "examples" / "cluster"
ONE, TWO = CLUSTER / "accelerate_one_host.yaml", CLUSTER / "accelerate_two_hosts.yaml"
SLURM = CLUSTER / "train.slurm"
DEADLINE = 150.0
OURS = GRPOConfig.from_dict({"model": {"path": "x", "device": "cpu"}})


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_the_files_are_those_that_the_page_names() -> None:
    page = (CLUSTER / "README.md").read_text()
    files = {p.name for p in CLUSTER.iterdir()}
    assert files == {ONE.name, TWO.name, SLURM.name, "deepspeed.json", "README.md"}
    named = set(re.findall(r"examples/cluster/([\w.]+\w)", page))
    assert named == {ONE.name, TWO.name, SLURM.name}
    fields = {path for path, *_ in GRPOConfig.field_help()}
    leaves = re.findall(r"`((?:model|optim|rollout|run)\.\w+(?:\.\w+)?)[`:]", page)
    assert len(leaves) > 12 and set(leaves) <= fields


def test_their_values_are_our_defaults() -> None:
    for file, processes in ((ONE, 8), (TWO, 16)):
        values = read(file)
        assert (values["distributed_type"], values["mixed_precision"]) == ("DEEPSPEED", "no")
        assert values["num_processes"] == processes == 8 * values["num_machines"]
    section = read(ONE)["deepspeed_config"]
    assert section["zero_stage"] == OURS.optim.zero_stage and section["gradient_accumulation_steps"] == 1
    assert section["gradient_clipping"] == OURS.optim.max_grad_norm
    assert read(TWO)["deepspeed_config"]["deepspeed_config_file"] == "examples/cluster/deepspeed.json"
    said = json.loads((CLUSTER / "deepspeed.json").read_text())
    assert said["zero_optimization"]["stage"] == OURS.optim.zero_stage
    assert said["gradient_accumulation_steps"] == 1
    env = {"WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}
    check_launcher(OURS, {**env, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(CLUSTER / "deepspeed.json")})


def test_the_first_lines_say_command_hardware_and_outcome() -> None:
    for file, command in ((ONE, "accelerate launch"), (TWO, "accelerate launch"), (SLURM, "sbatch")):
        first, second = [x for x in file.read_text().splitlines() if not x.startswith("#!")][:2]
        assert command in first and f"examples/cluster/{file.name}" in first
        assert "of 8 GPUs" in second and second.endswith("yet")


def config_for(models: dict[str, Path], folder: Path) -> Path:
    settings = {"dir": str(folder), "max_steps": 1, "eval_every": 0, "report": False, "save_every": 1}
    return write_config(models["qwen2_5_vl"], folder, run=settings)


@pytest.mark.long
def test_accelerate_takes_the_file_of_one_host(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models, tmp_path / "run")
    smaller = ["--num_processes", 2, "--main_process_port", several.free_port()]
    code, said = finished(
        [*ACCELERATE, "--config_file", ONE, *smaller, *TRAIN, config], tmp_path / "said.txt", DEADLINE
    )
    assert code == 0 and "tokens on 2 processes" in said, said
    assert len(metrics_of(tmp_path / "run")) == 1


@pytest.mark.long
def test_accelerate_takes_the_file_of_two_hosts(models: dict[str, Path], tmp_path: Path) -> None:
    config, port = config_for(models, tmp_path / "run"), several.free_port()
    smaller = ["--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                running(
                    [*ACCELERATE, "--config_file", TWO, *smaller, "--machine_rank", n, *TRAIN, config],
                    tmp_path / f"host-{n}.txt",
                )
            )
            for n in (0, 1)
        ]
        for host in hosts:
            host.wait(DEADLINE)
    said = [(tmp_path / f"host-{n}.txt").read_text() for n in (0, 1)]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "tokens on 2 processes" in said[0] and "has no effect" not in said[0]
    assert len(metrics_of(tmp_path / "run")) == 1


def stand_in(folder: Path, name: str, lines: str) -> None:
    (folder / name).write_text("#!/bin/bash\n" + lines)
    (folder / name).chmod(0o755)


def slurm(folder: Path, srun: str) -> dict[str, str]:
    """The variables of a job on one host with two GPUs, and stand-ins for SLURM's commands."""
    folder.mkdir()
    stand_in(folder, "scontrol", '[ "$*" = "show hostnames n[7-8]" ] && printf "localhost\\nelsewhere\\n"')
    stand_in(folder, "srun", srun)
    stand_in(folder, "torchrun", f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"')
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "7",
    }


def test_what_the_slurm_script_starts(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True, timeout=30)
    env = slurm(tmp_path / "bin", 'printf "%s\\n" "$OMP_NUM_THREADS" "$@"')
    known = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = ["bash", str(SLURM), "my config.yaml", "run.max_steps=3"]
    done = subprocess.run(
        command, env={**known, **env}, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == [
        "3", "--kill-on-bad-exit=1", "torchrun", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-id", "123456", "--rdzv-endpoint", "localhost:23456", "-m", "mm_grpo.cli", "train", "my config.yaml",
        "run.max_steps=3", "--resume",
    ]  # fmt: skip
    left = subprocess.run(
        ["bash", str(SLURM)], env={**known, **env}, capture_output=True, text=True, timeout=30
    )
    assert left.returncode == 1 and "usage: sbatch examples/cluster/train.slurm CONFIG" in left.stderr


@pytest.mark.long
def test_the_slurm_script_trains_and_goes_on(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models, tmp_path / "run")
    env = slurm(tmp_path / "bin", 'shift; exec "$@"')  # its own option, then the command
    for steps in (1, 2):  # the second time as a job that was put back into the queue
        job = ["bash", SLURM, config, f"run.max_steps={steps}"]
        code, said = finished(job, tmp_path / f"said-{steps}.txt", DEADLINE, **env)
        assert code == 0 and "tokens on 2 processes" in said, said
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]
    assert "step 1/" not in said
