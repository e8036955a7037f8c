"""examples/cluster: its files parse, agree with our defaults, and start processes (on the CPU, others by stand-ins)."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peers
import pytest
import typer
import yaml
from helpers import processes
from launches import ACCELERATE, running

from mm_grpo import GRPOConfig
from mm_grpo.cli.main import app

CLUSTER = processes.ROOT / "examples" / "cluster"
ONE, TWO = CLUSTER / "accelerate_one_host.yaml", CLUSTER / "accelerate_two_hosts.yaml"
SLURM = CLUSTER / "train.slurm"
KUBERAY, SKYPILOT = CLUSTER / "rayjob.yaml", CLUSTER / "skypilot.yaml"
DEADLINE = 300.0
OURS = GRPOConfig.from_dict({"model": {"path": "x", "device": "cpu"}})


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_their_values_are_our_defaults() -> None:
    for file, count in ((ONE, 8), (TWO, 16)):
        values = read(file)
        assert values["distributed_type"] == "DEEPSPEED" and values.get("mixed_precision", "no") == "no"
        assert values["num_processes"] == count == 8 * values["num_machines"]
    section = read(ONE)["deepspeed_config"]
    assert section["zero_stage"] == OURS.optim.zero_stage and section["gradient_accumulation_steps"] == 1
    assert section["gradient_clipping"] == OURS.optim.max_grad_norm
    section = read(TWO)["deepspeed_config"]
    assert section["zero_stage"] == 2 and section["gradient_accumulation_steps"] == 1


@pytest.mark.long
def test_the_file_of_two_hosts_joins_their_processes(tmp_path: Path) -> None:
    """Processes of peers.py, which compare the launcher with our defaults, as those of a training do."""
    port = processes.free_port()
    smaller = ["--num_processes", 2, "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    command = [*ACCELERATE, "--config_file", TWO, *smaller]
    outputs = [tmp_path / f"host-{n}.txt" for n in (0, 1)]
    with ExitStack() as stack:
        starts = [[*command, "--machine_rank", n, peers.__file__, tmp_path] for n in (0, 1)]
        hosts = [stack.enter_context(running(*both)) for both in zip(starts, outputs, strict=True)]
        for host in hosts:
            host.wait(DEADLINE)
    said = "".join(file.read_text() for file in outputs)
    assert [host.returncode for host in hosts] == [0, 0], said
    assert [(one["world"], one["sum"], one["local"]) for one in peers.joined(tmp_path)] == [(2, 3.0, "0")] * 2


def stand_in(folder: Path, name: str, lines: str) -> None:
    (folder / name).write_text("#!/bin/bash\n" + lines)
    (folder / name).chmod(0o755)


def slurm(folder: Path, srun: str) -> dict[str, str]:
    """The variables of a job on one host with two GPUs, and stand-ins for SLURM's commands."""
    folder.mkdir()
    stand_in(folder, "scontrol", '[ "$*" = "show hostnames n[7-8]" ] && printf "localhost\\nelsewhere\\n"')
    stand_in(folder, "srun", srun)
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

    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SLURM), *arguments]
        return subprocess.run(command, env=known | env, capture_output=True, text=True, timeout=30)

    done = script("my config.yaml", "run.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "3", "--kill-on-bad-exit=1", "torchrun", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-id", "123456", "--rdzv-endpoint", "localhost:23456", "-m", "mm_grpo.cli", "train", "my config.yaml",
        "run.max_steps=3", "--resume",
    ]  # fmt: skip
    bare = script()
    assert bare.returncode == 1 and "usage: sbatch examples/cluster/train.slurm CONFIG" in bare.stderr


def train_options(words: list[str]) -> dict[str, Any]:
    """The options of a command line, as our command reads them."""
    command, name, *arguments = words
    assert (command, name) == ("mm-grpo", "train")
    group: Any = typer.main.get_command(app)  # shared by the tests of a worker (conftest)
    # without its parent a command would keep `--help` as its only option for help, in the tests that follow
    parent = group.make_context(command, [name, *arguments])
    options: dict[str, Any] = group.commands[name].make_context(name, arguments, parent=parent).params
    return options


def test_the_job_for_kuberay_asks_for_the_gpus_that_it_trains_on() -> None:
    job = read(KUBERAY)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    head, (workers,) = (job["spec"]["rayClusterSpec"][name] for name in ("headGroupSpec", "workerGroupSpecs"))
    ((head_pod, volumes), (worker_pod, _)) = (
        (group["template"]["spec"]["containers"][0], group["template"]["spec"]["volumes"])
        for group in (head, workers)
    )
    options = train_options(shlex.split(job["spec"]["entrypoint"]))
    assert (options["ray"], options["resume"], head["rayStartParams"]["num-cpus"]) == ("auto", True, "0")
    limits = worker_pod["resources"]["limits"]
    assert options["processes"] == workers["replicas"] * limits["nvidia.com/gpu"]
    assert int(limits["cpu"]) >= limits["nvidia.com/gpu"] and worker_pod["image"] == head_pod["image"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    (mount,) = worker_pod["volumeMounts"]
    assert head_pod["volumeMounts"] == [mount] and mount["name"] == volumes[0]["name"]
    for path in (options["config"], *(field.removeprefix("run.dir=") for field in options["overrides"])):
        assert path.startswith(f"{mount['mountPath']}/")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_task_for_skypilot_starts(rank: int, tmp_path: Path) -> None:
    task = read(SKYPILOT)
    (mount,) = task["volumes"]
    for name in ("ray", "mm-grpo"):
        stop = f'[ "$(wc -l < {tmp_path}/calls)" != 1 ] || exit {rank}'
        stand_in(tmp_path, name, f'echo {name} "$@" | tee -a {tmp_path}/calls; {stop}')
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    script = task["run"].replace("sleep 5", "sleep 0")
    command = ["bash", "-c", script]
    env |= {"SKYPILOT_NODE_RANK": str(rank)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    started, second = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    if rank:  # the head was not up yet
        assert started == second == "ray start --address 10.0.0.5:6379 --disable-usage-stats"
        return
    assert started == "ray start --head --port 6379 --disable-usage-stats"
    options = train_options(shlex.split(second))
    assert (options["ray"], options["resume"]) == ("10.0.0.5:6379", True)
    gpus = task["resources"]["accelerators"].partition(":")[2]
    assert options["processes"] == task["num_nodes"] * int(gpus)
    assert options["config"].startswith(mount) and options["overrides"][0].startswith(f"run.dir={mount}/")
