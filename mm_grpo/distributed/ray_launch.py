"""`mm-grpo train CONFIG --ray ADDRESS --processes N`: the processes of a run on the hosts of a Ray cluster.

Ray places actors, and each watches one ordinary process, which has the variables that torchrun sets, starts in this
command's working folder, gets its signals, and dies with its actor. A process that is lost ends the others.

A lost server is restarted by Ray, at the same address. When its host is gone, it stays away, because a run knows the
addresses of its servers from the start; the run goes on with the other ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_grpo.distributed.launch import RUN_ID, exit_code
from mm_grpo.errors import ConfigError, shorten
from mm_grpo.terminal import print_phase

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

START_TIMEOUT = 900.0
"""Seconds that the cluster may take to make room, and then servers to load a model."""
END_TIMEOUT = 30.0
"""Seconds from the first process that fails until the others are killed."""
PERIOD = 0.2
"""Seconds between two looks at signals and ends."""


class ProcessActor:
    """Ray actor that watches one process of its host. Its methods run in threads."""

    def place(self, folder: str) -> tuple[str, str, int]:
        """Return the id and address of this host, and a port. Raises OSError if it does not have `folder`."""
        import ray

        os.listdir(folder)
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        port = random.randrange(20_000, 30_000)  # neither Ray nor the system hands these out
        return ray.get_runtime_context().get_node_id(), address, port

    def run(self, arguments: Sequence[str], variables: Mapping[str, object], folder: str) -> Iterator[Any]:
        """Run `python ARGUMENTS`; yield ("pid", number), (stream, bytes) for its output, and ("code", number)."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {name: str(value) for name, value in variables.items()}
        env["TORCHELASTIC_RUN_ID"] = f"{RUN_ID}{os.getpid()}-ray"  # for launch.end_with_launcher
        pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-P", *arguments]
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and a child inherits that
        self.process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, **pipes)
        yield "pid", self.process.pid
        code = None
        while code is None:
            code = self.process.poll()
            for name in pipes:
                stream = getattr(self.process, name)
                os.set_blocking(stream.fileno(), False)  # a child of the process may hold it after its end
                if text := stream.read():
                    yield name, text
            time.sleep(0.1)
        yield "code", code

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)


@dataclass(eq=False)
class Process:
    """Process that an actor watches, on the side of this command. Its fields are those that `exit_code` reads."""

    actor: Any
    place: tuple[str, str, int]
    is_server: bool
    is_ready: bool = False
    pid: int | None = None
    exitcode: int | None = None
    timestamp: float = 0.0
    loss: str = ""

    def signal_name(self) -> str:
        return self.loss or signal.Signals(-(self.exitcode or 0)).name

    def run(self, *job: Any) -> None:
        """Run it, print what it prints, and set its exit code. A lost server is run again on the same host."""
        import ray

        try:
            for event in self.actor.run.options(num_returns="streaming").remote(*job):
                kind, value = ray.get(event)
                if kind == "pid":
                    self.pid = value
                elif kind == "code":
                    self.timestamp, self.exitcode = time.time(), value
                else:
                    self.is_ready |= b" is ready (" in value  # printed by `mm-grpo serve`
                    with suppress(OSError, ValueError):  # a closed terminal
                        getattr(sys, kind).buffer.write(value)
                        getattr(sys, kind).flush()
        except Exception as error:
            self.loss = f"the loss of its Ray actor on {self.place[1]} ({type(error).__name__})"
            self.exitcode = -signal.SIGKILL
        if self.is_server and self.is_ready and (self.exitcode or 0) < 0:
            place = self.actor.place.options(max_task_retries=-1).remote(job[-1])
            if ray.get(place)[0] == self.place[0]:
                self.run(*job)


@dataclass
class RayLaunch:
    """Launch of `PROGRAM train ARGUMENTS` in each process, and of `PROGRAM serve ARGUMENTS` in each server."""

    address: str
    processes: int
    arguments: Sequence[str]
    resume: bool
    use_gpus: bool
    """Ask for GPUs if the cluster has any: one for each process, `tensor_parallel` for each server."""
    servers: int
    tensor_parallel: int
    secrets: Mapping[str, str]
    """Variables that stand in no command line."""
    program: Sequence[str] = ("-m", "mm_grpo.cli")

    def start(self, saved_config: Path, retries: int) -> int:
        """Run it, again with --resume while a process is lost and retries are left; return the exit code.

        `saved_config` is the file that a run writes when it begins; before, there is nothing to resume.
        """
        ray, before = connect(self.address), _modified(saved_config)
        self.signals: list[int] = []
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        handlers = {n: signal.signal(n, self._note) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
        try:
            while True:
                code, message = self._attempt(ray)
                if message:
                    print(message, file=sys.stderr, flush=True)
                if code != 1 or not retries:
                    return code
                retries -= 1
                print_phase(f"starting all processes again; then {retries} retries are left")
                self.resume |= _modified(saved_config) != before
        finally:
            ray.shutdown()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.signals.append(number)
        if not self.started:
            raise KeyboardInterrupt

    def _attempt(self, ray: Any) -> tuple[int, str]:
        """Place the actors, and watch the processes until they end; return exit code and message."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.started, total = False, ray.cluster_resources()
        gpus = [1] * self.processes + [self.tensor_parallel] * self.servers
        bundles = [{"CPU": 1} | ({"GPU": n} if self.use_gpus and "GPU" in total else {}) for n in gpus]
        group, end, actors = placement_group(bundles), time.monotonic() + START_TIMEOUT, list[Any]()
        with ThreadPoolExecutor(len(bundles)) as pool:
            try:
                while not group.wait(1):
                    if time.monotonic() > end:
                        raise ConfigError(
                            f"--ray {self.address}: no room for {bundles} within {START_TIMEOUT:g} s; the cluster has "
                            f"{total} in all; add hosts, or ask for fewer --processes"
                        )
                for number, bundle in enumerate(bundles):
                    options = {"num_cpus": 1, "num_gpus": bundle.get("GPU", 0), "max_concurrency": 2}
                    if number >= self.processes:  # a process that comes back alone cannot join the others
                        options["max_restarts"] = -1
                    place = PlacementGroupSchedulingStrategy(group, number)
                    actor = ray.remote(ProcessActor).options(scheduling_strategy=place, **options)
                    actors.append(actor.remote())
                places = ray.get([actor.place.remote(os.getcwd()) for actor in actors], timeout=START_TIMEOUT)
                kinds = [number >= self.processes for number in range(len(actors))]
                return self._watch(pool, [*map(Process, actors, places, kinds)])
            except ray.exceptions.RayError as error:
                cause = shorten(getattr(error, "cause", error), 300)
                raise ConfigError(f"--ray {self.address}: a host cannot start a process ({cause})") from None
            except KeyboardInterrupt:
                return exit_code({}, self.processes, self.signals[0])
            finally:
                for actor in actors:
                    ray.kill(actor)
                remove_placement_group(group)

    def _watch(self, pool: ThreadPoolExecutor, processes: list[Process]) -> tuple[int, str]:
        """Run the servers until they are ready, and beside them the processes until they end."""
        ranks, servers, folder = processes[: self.processes], processes[self.processes :], os.getcwd()
        for server in servers:
            _, host, port = server.place
            options = ["--tensor-parallel", str(self.tensor_parallel), "--host", host, "--port", str(port)]
            pool.submit(server.run, [*self.program, "serve", *self.arguments, *options], self.secrets, folder)
        end = time.monotonic() + START_TIMEOUT
        while not all(server.is_ready for server in servers):
            if ended := {n: server for n, server in enumerate(servers) if server.exitcode is not None}:
                return exit_code(ended, len(servers))
            if time.monotonic() > end:
                raise ConfigError(f"--serve {self.servers}: not ready within {START_TIMEOUT:g} s")
            time.sleep(PERIOD)
        urls = [f"http://{host}:{port}" for _, host, port in (server.place for server in servers)]
        fields = ["rollout.engine=vllm_server", f"rollout.server.urls={json.dumps(urls)}"] if urls else []
        train = [*self.program, "train", *self.arguments, *fields, *["--resume"] * self.resume]
        hosts, (_, host, port) = [rank.place[0] for rank in ranks], ranks[0].place
        variables = {"WORLD_SIZE": len(ranks), "LOCAL_RANK": 0, "MASTER_ADDR": host, "MASTER_PORT": port}
        for number, rank in enumerate(ranks):
            local = {"RANK": number, "LOCAL_WORLD_SIZE": hosts.count(hosts[number]), **self.secrets}
            pool.submit(rank.run, train, variables | local, folder)
        self.started, sent, end = True, 0, math.inf
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
            for number in self.signals[sent:] if all(rank.pid for rank in ranks) else ():
                for rank in ranks if not sent or number == signal.SIGINT else ():
                    rank.actor.signal.remote(signal.SIGKILL if sent else number)
                sent += 1
            if any(rank.exitcode for rank in ranks):
                end = min(end, time.monotonic() + END_TIMEOUT)
            time.sleep(PERIOD)
        failures = {number: rank for number, rank in enumerate(ranks) if rank.exitcode}
        return exit_code(failures, len(ranks), next(iter(self.signals), None)) if failures else (0, "")


def check_ray(address: str | None, config: GRPOConfig, *, retries: int, smoke: bool) -> None:
    """Raise ConfigError if `--ray` or `--retries` contradicts another option or the config."""
    for is_conflict, message in (
        (address is None and retries, f"--retries {retries}: only --ray tries again; elsewhere use --resume"),
        (address and smoke, f"--ray {address}: --smoke runs in one process; leave one of the two out"),
        (
            address and config.rollout.server.share_gpus,
            f"--ray {address}: its servers share no GPUs (--share-gpus)",
        ),
    ):
        if is_conflict:
            raise ConfigError(message)


def connect(address: str) -> Any:
    """Connect to the cluster, and return the module ray. Raises ConfigError if it does not answer."""
    if find_spec("ray") is None:
        raise ConfigError(f"--ray {address}: Ray is not installed; install mm_grpo[ray] on every host")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else ray.init tries for minutes
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ConfigError(
            f"--ray {address}: no Ray cluster answers there ({shorten(error, 200)}); give HOST:PORT of its head, or "
            "auto, on one of its hosts"
        ) from None
    return ray


def _modified(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None
