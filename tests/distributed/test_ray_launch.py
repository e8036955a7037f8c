"""`mm-grpo train --ray` on a cluster of two simulated hosts: whole runs, and what is lost in their midst.

Where only the end matters, the processes are those of peers.py. Only processes of the cluster that these tests start
are killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peers
import pytest
from helpers import forkserver, processes
from helpers.patience import until
from helpers.run_folders import rollouts_of, write_config
from helpers.sessions import died, stat
from launches import children

STEPS = 8
DEADLINE = 240.0
KEY = "the-key-of-this-test"
BASE = processes.ROOT / "examples" / "shapes" / "base"
TRAIN = ("-m", "mm_grpo.cli", "train")
LAUNCH = """
import json, sys
from pathlib import Path
from mm_grpo.cli.main import main
from mm_grpo.distributed import ray_launch
given = json.loads(sys.argv[1])
ray_launch.START_TIMEOUT, retries, cwd = (given.pop(name) for name in ("timeout", "retries", "cwd"))
ray_launch.os.getcwd = lambda: cwd
fields = {"arguments": [], "resume": False, "device": "cpu", "servers": 0, "tensor_parallel": 1, "secrets": {}}
launch = ray_launch.RayLaunch(**fields | given)
sys.modules["mm_grpo.cli.main"].app = lambda _: sys.exit(launch.start(Path("none"), retries))
main()
"""
"""`mm-grpo train --ray` with other processes than those of a training."""
SERVED = """
import os, sys, time
from pathlib import Path
folder, mode, *more = sys.argv[1:]
if mode == "serve":
    with open(folder + "/starts", "a") as file:
        print(os.getpid(), os.getppid(), os.environ["KEY"], os.environ["CUDA_VISIBLE_DEVICES"], *more, file=file)
    print("server 0: it is ready (at once)", flush=True)
else:
    Path(folder + "/fields").write_text(os.environ["CUDA_VISIBLE_DEVICES"] + " " + more[-1])
while mode == "serve" or not Path(folder + "/enough").exists():
    time.sleep(0.05)
"""
"""A process that waits for a file, or a server that notes each of its starts."""


class Hosts:
    """Two hosts of one CPU and two GPUs each, which nothing here uses, and a head without any."""

    def __init__(self, folder: str) -> None:
        from ray._common.utils import get_default_ray_temp_dir
        from ray.cluster_utils import Cluster

        Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)  # Ray writes there too, whatever the folder
        self.options = {"object_store_memory": 80 << 20, "include_dashboard": False, "temp_dir": folder}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self.options, "num_cpus": 0})
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self.cluster.add_node(num_cpus=1, num_gpus=2, **self.options)

    def lose(self, raylet: int) -> None:
        """Remove the host whose raylet has this pid."""
        for node in self.cluster.worker_nodes:
            if node.all_processes["raylet"][0].process.pid == raylet:
                return self.cluster.remove_node(node, allow_graceful=False)
        raise AssertionError(f"no raylet {raylet}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # sockets have short paths
        hosts = Hosts(folder)
        yield hosts
        hosts.cluster.shutdown()


class Running:
    """A command that launches on the cluster, and its processes: `folder` is in the arguments of each."""

    def __init__(self, process: forkserver.Forked, folder: Path, output: Path) -> None:
        self.process, self.folder, self.output = process, folder, output

    def living(self) -> dict[int, bytes]:
        """Commands by pid; none holds the key, and no process has a variable of Ray's."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (path / "cmdline").read_bytes()
                if str(self.folder).encode() in command:
                    assert b"\0RAY_" not in (path / "environ").read_bytes() and KEY.encode() not in command
                    found[int(path.name)] = command
        return found

    def ranks(self) -> dict[int, int]:
        """Living processes that train: pid by rank."""
        variables = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in self.living()}
        return {int(v[5:]): pid for pid, names in variables.items() for v in names if v.startswith("RANK=")}

    def wait_for(self, path: Path) -> dict[int, int]:
        until(lambda: path.exists() or self.process.poll() is not None, str(path), DEADLINE)
        assert path.exists(), self.output.read_text()
        return self.ranks()

    def end(self) -> tuple[int, str]:
        """Exit code and output; none of the processes is left."""
        code = self.process.wait(DEADLINE)
        until(lambda: not self.living(), "the end of all")
        return code, self.output.read_text()


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[Running]:
    output = folder.with_suffix(".txt")
    env = processes.alone() | {"MM_GRPO_SERVER_KEY": KEY}
    process = processes.start(arguments, output, env, cwd=folder.parent)
    try:
        yield Running(process, folder, output)
    finally:
        process.end()


@pytest.fixture(scope="module")
def straight(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes of this machine."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with running(folder, *TRAIN, config_of(models, folder), "--processes", 2) as command:
        code, output = command.end()
    assert code == 0, output
    return folder


def config_of(models: dict[str, Path], folder: Path, **run: Any) -> Path:
    run = {"max_steps": STEPS, "save_every": 1, "eval_every": 0, **run}
    return write_config(models["qwen2_5_vl"], folder, run=run)


def assert_the_same(folder: Path, straight: Path) -> None:
    assert len(rollouts_of(straight)) == STEPS and rollouts_of(folder) == rollouts_of(straight)
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, straight)]
    assert weights[0] == weights[1]


@pytest.mark.long
def test_a_run_whose_process_is_killed_goes_on_where_it_was(
    hosts: Hosts, models: dict[str, Path], straight: Path, tmp_path: Path
) -> None:
    """The config is named from the command's own working folder."""
    folder = tmp_path / "run"
    config = config_of(models, folder, dir="elsewhere")
    options = ("--ray", hosts.cluster.address, "--processes", 2, "--retries", 1)
    with running(folder, *TRAIN, config.name, f"run.dir={folder}", *options) as command:
        rank = command.wait_for(folder / "checkpoints" / "step-000002")[1]
        os.kill(rank, signal.SIGKILL)
        code, output = command.end()
    assert code == 0, output
    assert f"error: process 1 of 2 (pid {rank}) was ended by SIGKILL" in output
    assert output.count("checking that engine and learner agree") == 2
    assert output.count("step 1/8") == 1  # it was not begun anew
    assert output.count(f"done: {STEPS} steps") == 1
    assert_the_same(folder, straight)


@pytest.mark.long
def test_ctrl_c_ends_the_run_with_a_checkpoint(hosts: Hosts, models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(models, folder, max_steps=4000)
    options = "--ray", hosts.cluster.address, "--processes", 2, "--retries", 1
    with running(folder, *TRAIN, config, *options) as command:
        assert sorted(command.wait_for(folder / "checkpoints" / "step-000001")) == [0, 1]
        command.process.send_signal(signal.SIGINT)
        code, output = command.end()
    assert code == 130, output
    newest = max(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())
    assert output.splitlines()[-1].startswith(f"stopped by SIGINT after step {newest}; ")
    assert newest == max(int(name[5:11]) for name in rollouts_of(folder))


@contextmanager
def launched(
    hosts: Hosts, folder: Path, program: list[object], processes: int = 2, **more: Any
) -> Iterator[Running]:
    folder = folder / "peers"
    folder.mkdir()
    program = [str(folder) if word is None else str(word) for word in program]
    given = {"address": hosts.cluster.address, "processes": processes, "program": program}
    given |= {"timeout": 60.0, "retries": 0, "cwd": str(folder), **more}
    with running(folder, "-c", LAUNCH, json.dumps(given)) as command:
        yield command


def peers_of(mode: str) -> list[object]:
    return [peers.__file__, None, mode]


@pytest.mark.long
def test_a_guard_ends_the_run_with_3_and_the_report_is_written(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path, peers_of("guard")) as command:
        code, output = command.end()
    assert (code, output) == (3, "stopped: guard logp_gap: too far\n")
    assert (command.folder / "report").read_text() == "whole"
    answers = [(a["world"], a["sum"], a["local"]) for a in peers.joined(command.folder)]
    assert answers == [(2, 3.0, "0")] * 2


@pytest.mark.long
def test_a_lost_process_is_named_and_ends_the_other(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path, peers_of("loop")) as command:
        rank = command.wait_for(command.folder / "exchanged")[1]
        os.kill(int(stat(rank)[1]), signal.SIGKILL)
        code, output = command.end()
    lost = f"error: process 1 of 2 (pid {rank}) was ended by the loss of its Ray actor on"
    assert code == 1 and lost in output


@pytest.mark.long
def test_all_start_again_on_another_host_and_end_at_sigterm(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path, peers_of("loop"), retries=1) as command:
        before = command.wait_for(command.folder / "exchanged")
        hosts.lose(int(stat(int(stat(before[1])[1]))[1]))
        hosts.add()
        until(lambda: not command.living(), "the end of both", DEADLINE)
        (command.folder / "exchanged").unlink()
        after = command.wait_for(command.folder / "exchanged")
        command.process.send_signal(signal.SIGTERM)
        code, output = command.end()
    assert f"(pid {before[1]}) was ended by the loss of its Ray actor" in output
    assert len({*before.values(), *after.values()}) == 4
    assert code == 143 and "ended by SIGTERM\n" in output


@pytest.mark.long
def test_a_lost_server_is_started_again_on_its_host_alone(hosts: Hosts, tmp_path: Path) -> None:
    more = {"servers": 1, "tensor_parallel": 2, "device": "auto", "secrets": {"KEY": KEY}}
    with launched(hosts, tmp_path, ["-c", SERVED, None], 1, **more) as command:
        starts, fields = (command.folder / name for name in ("starts", "fields"))
        until(lambda: fields.exists() and fields.read_text(), "the process", DEADLINE)
        for number in range(1, 4):
            until(lambda n=number: starts.read_text().count("\n") == n, f"start {number}", DEADLINE)  # type: ignore[misc]
            server, actor, key, gpus, *words = starts.read_text().split("\n")[number - 1].split()
            assert (key, gpus, words[0::2]) == (KEY, "0,1", ["--tensor-parallel", "--host", "--port"])
            url = f"http://{words[3]}:{words[5]}"
            servers = rf'[01] rollout.server.urls=\["{url}"\]'
            assert words[1] == "2" and re.fullmatch(servers, fields.read_text())
            if number < 3:
                os.kill(int((server, actor)[number - 1]), signal.SIGKILL)
        hosts.add()
        hosts.lose(int(stat(int(actor))[1]))
        until(lambda: "is gone with its host" in command.output.read_text(), "the other host", DEADLINE)
        (command.folder / "enough").touch()
        code, output = command.end()
    assert (code, starts.read_text().count("\n")) == (0, 3), output


@pytest.mark.long
def test_a_cluster_without_room_or_this_folder_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path, [], 3, timeout=1.0) as command:
        code, output = command.end()
    assert code == 2 and output.startswith(f"error: --ray {hosts.cluster.address}: no room for ")
    assert output.count("\n") == 1 and "a cluster of 2 CPUs and 4 GPUs" in output
    with launched(hosts, tmp_path / "peers", [], cwd="/nowhere") as command:
        code, output = command.end()
    assert (code, output.count("\n")) == (2, 1) and "starts no process" in output and "'/nowhere'" in output


@pytest.mark.long
def test_a_run_whose_only_server_is_killed_is_that_of_vllm_here(hosts: Hosts, tmp_path: Path) -> None:
    """In float32, and the one here has one process."""
    one, served = tmp_path / "one", tmp_path / "served"
    more = {"model": {"dtype": "float32", "device": "cpu"}, "run": {"max_steps": 5, "eval_every": 0}}
    engines = {one: "vllm", served: "vllm_server"}
    configs = [write_config(BASE, f, rollout={"engine": engine}, **more) for f, engine in engines.items()]
    command = [*TRAIN, configs[0]]
    code, output = processes.finished(command, tmp_path / "one.txt", preload=forkserver.VLLM)
    assert code == 0, output
    hosts.add()
    options = ("--ray", hosts.cluster.address, "--processes", 2, "--serve", 1)
    with running(served, *TRAIN, configs[1], *options) as run:
        run.wait_for(served / "rollouts" / "step-000002.jsonl")
        (server,) = (pid for pid, words in run.living().items() if b"\0serve\0" in words)
        vllm = children(server)
        os.kill(int(stat(server)[1]), signal.SIGKILL)
        code, output = run.end()
    assert code == 0 and output.count(" is ready (process ") == 2, output
    assert vllm and died(vllm)
    assert rollouts_of(served) == rollouts_of(one) and len(rollouts_of(one)) == 5
