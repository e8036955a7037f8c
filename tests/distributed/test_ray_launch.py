"""`mm-grpo train --ray` on a cluster of two simulated hosts: whole runs, and what is lost in their midst.

Where only the end matters, the processes are those of peers.py. Only processes of the cluster that these tests start
are killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import peers
import pytest
from helpers import forkserver, processes
from helpers.patience import until
from helpers.run_folders import rollouts_of, write_config
from helpers.sessions import stat

STEPS = 8
DEADLINE = 240.0
TRAIN = ("-m", "mm_grpo.cli", "train")
PEERS = (
    "import sys; from pathlib import Path; from mm_grpo.distributed import ray_launch; "
    "address, timeout, count, *program = sys.argv[1:]; ray_launch.START_TIMEOUT = float(timeout); "
    "launch = ray_launch.RayLaunch(address, int(count), program, False, 0, [], 1, {}); "
    "from mm_grpo.cli import main; sys.modules['mm_grpo.cli.main'].app = lambda _: sys.exit(launch.run(Path('none'), 0)); main()"
)


class Hosts:
    """Two hosts of one CPU each, and a head without any."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.options = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self.options, "num_cpus": 0})
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self.cluster.add_node(num_cpus=1, **self.options)

    def lose(self, raylet: int) -> None:
        """Remove the host whose raylet has this pid."""
        for node in self.cluster.worker_nodes:
            if node.all_processes["raylet"][0].process.pid == raylet:
                return self.cluster.remove_node(node, allow_graceful=False)
        raise AssertionError(f"no raylet {raylet}")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.cluster.shutdown()


class Running:
    """A command that launches on the cluster, and its processes: `folder` is in the arguments of each."""

    def __init__(self, process: forkserver.Forked, folder: Path, output: Path) -> None:
        self.process, self.folder, self.output = process, folder, output

    def ranks(self) -> dict[int, int]:
        """Living processes: pid by rank."""
        pids = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.folder).encode() in (path / "cmdline").read_bytes():
                    variables = (path / "environ").read_bytes().decode().split("\0")
                    assert not [name for name in variables if name.startswith("RAY_")]
                    pids |= {int(v[5:]): int(path.name) for v in variables if v.startswith("RANK=")}
        return pids

    def wait_for(self, path: Path) -> dict[int, int]:
        until(lambda: path.exists() or self.process.poll() is not None, str(path), DEADLINE)
        return self.ranks()

    def end(self) -> tuple[int, str]:
        """Exit code and output; none of the processes is left."""
        code = self.process.wait(DEADLINE)
        until(lambda: not self.ranks(), "the end of all")
        return code, self.output.read_text()


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[Running]:
    output = folder.with_suffix(".txt")
    process = processes.start(arguments, output, processes.alone(), cwd=folder.parent)
    try:
        yield Running(process, folder, output)
    finally:
        process.end()


@pytest.fixture(scope="module")
def straight(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes of this machine."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with running(folder, *TRAIN, config_of(models, folder), "--processes", 2) as launched:
        code, output = launched.end()
    assert code == 0, output
    return folder


def config_of(models: dict[str, Path], folder: Path, **run: Any) -> Path:
    return write_config(
        models["qwen2_5_vl"], folder, run={"max_steps": STEPS, "save_every": 1, "eval_every": 0, **run}
    )


def assert_the_same(folder: Path, straight: Path) -> None:
    assert len(rollouts_of(straight)) == STEPS and rollouts_of(folder) == rollouts_of(straight)
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, straight)]
    assert weights[0] == weights[1]


@pytest.mark.long
def test_processes_on_two_hosts_make_the_run_of_two_here(
    hosts: Hosts, models: dict[str, Path], straight: Path, tmp_path: Path
) -> None:
    """The config, its run's folder and this command's are named from the command's own working folder."""
    folder = tmp_path / "run"
    config = config_of(models, folder, dir="run")
    options = ("--ray", hosts.cluster.address, "--processes", 2)
    with running(folder, *TRAIN, config.name, *options) as launched:
        code, output = launched.end()
    assert code == 0, output
    assert output.count(f"done: {STEPS} steps") == 1
    assert_the_same(folder, straight)


@pytest.mark.long
def test_a_run_whose_process_is_killed_goes_on_where_it_was(
    hosts: Hosts, models: dict[str, Path], straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = config_of(models, folder)
    options = ("--ray", hosts.cluster.address, "--processes", 2, "--retries", 1)
    with running(folder, *TRAIN, config, *options) as launched:
        rank = launched.wait_for(folder / "checkpoints" / "step-000002")[1]
        os.kill(rank, signal.SIGKILL)
        code, output = launched.end()
    assert code == 0, output
    assert f"error: process 1 of 2 (pid {rank}) was ended by SIGKILL" in output
    assert output.count("checking that engine and learner agree") == 2
    assert output.count("step 1/8") == 1  # it was not begun anew
    assert_the_same(folder, straight)


@pytest.mark.long
def test_ctrl_c_ends_the_run_with_a_checkpoint(hosts: Hosts, models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(models, folder, max_steps=4000)
    with running(
        folder, *TRAIN, config, "--ray", hosts.cluster.address, "--processes", 2, "--retries", 1
    ) as launched:
        assert sorted(launched.wait_for(folder / "checkpoints" / "step-000001")) == [0, 1]
        launched.process.send_signal(signal.SIGINT)
        code, output = launched.end()
    assert code == 130, output
    newest = max(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())
    assert output.splitlines()[-1].startswith(f"stopped by SIGINT after step {newest}; ")
    assert newest == max(int(name[5:11]) for name in rollouts_of(folder))


@contextmanager
def exchanging_peers(hosts: Hosts, folder: Path, mode: str = "loop") -> Iterator[Running]:
    folder = folder / "peers"
    folder.mkdir()
    program = (hosts.cluster.address, 60.0, 2, peers.__file__, folder, mode)
    with running(folder, "-c", PEERS, *program) as launched:
        yield launched


@pytest.mark.long
def test_a_guard_ends_the_run_with_3_and_the_report_is_written(hosts: Hosts, tmp_path: Path) -> None:
    with exchanging_peers(hosts, tmp_path, "guard") as launched:
        code, output = launched.end()
    assert (code, output) == (3, "stopped: guard logp_gap: too far\n")
    assert (launched.folder / "report").read_text() == "whole"
    answers = [(a["world"], a["sum"], a["local"]) for a in peers.joined(launched.folder)]
    assert answers == [(2, 3.0, "0")] * 2


@pytest.mark.long
@pytest.mark.parametrize("lost", ["actor", "host"])
def test_a_lost_process_is_named_and_ends_the_other(lost: str, hosts: Hosts, tmp_path: Path) -> None:
    with exchanging_peers(hosts, tmp_path) as launched:
        rank = launched.wait_for(launched.folder / "exchanged")[1]
        actor = int(stat(rank)[1])
        begin = time.monotonic()
        if lost == "actor":
            os.kill(actor, signal.SIGKILL)
        else:
            hosts.lose(int(stat(actor)[1]))
            hosts.add()
        code, output = launched.end()
    assert (
        code == 1
        and f"error: process 1 of 2 (pid {rank}) was ended by the loss of its Ray actor on" in output
    ), output
    print(time.monotonic() - begin, output)


@pytest.mark.long
def test_sigterm_ends_processes_that_do_not_handle_it(hosts: Hosts, tmp_path: Path) -> None:
    with exchanging_peers(hosts, tmp_path) as launched:
        launched.wait_for(launched.folder / "exchanged")
        launched.process.send_signal(signal.SIGTERM)
        code, output = launched.end()
    assert (code, output.splitlines()[-1]) == (143, "ended by SIGTERM")
