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
from collections.abc import Mapping, Sequence
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
"""Seconds between two looks at the processes."""


class ProcessActor:
    """Ray actor that watches one process of its host."""

    process: Any = None

    def place(self) -> tuple[str, str, int]:
        """Return the id and the address of this host, and a port."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        port = random.randrange(20_000, 30_000)  # neither Ray nor the system hands these out
        return ray.get_runtime_context().get_node_id(), address, port

    def start(self, arguments: Sequence[str], variables: Mapping[str, object], folder: str) -> None:
        """Start `python ARGUMENTS` in `folder`, so that it dies with this actor."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {name: str(value) for name, value in variables.items()}
        env["TORCHELASTIC_RUN_ID"] = f"{RUN_ID}{os.getpid()}-ray"  # for launch.end_with_launcher
        pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-P", *arguments]
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and a child inherits that
        self.process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, **pipes)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for pipe in (self.process.stdout, self.process.stderr):
            os.set_blocking(pipe.fileno(), False)  # its children may hold it after its end

    def poll(self) -> tuple[int | None, int | None, dict[str, bytes]]:
        """Return pid, exit code and new output of the process, None for what there is not."""
        if self.process is None:
            return None, None, {}
        code = self.process.poll()
        output = {name: getattr(self.process, name).read() or b"" for name in ("stdout", "stderr")}
        return self.process.pid, code, output

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)


@dataclass(eq=False)
class Process:
    """Process that an actor watches, with the fields that `exit_code` reads; `job` are arguments of its start."""

    actor: Any
    place: tuple[str, str, int]
    is_server: bool
    job: Sequence[Any] = ()
    is_ready: bool = False
    pid: int | None = None
    exitcode: int | None = None
    timestamp: int = 0
    """Looks until its end was seen; one process ends right after another. 0 if its actor was lost."""
    loss: str = ""

    def signal_name(self) -> str:
        return self.loss or signal.Signals(-(self.exitcode or 0)).name

    def look(self, ray: Any) -> None:
        """Print new output, and note an end or a loss. Start a lost server again when Ray has restarted its actor."""
        try:
            pid, code, output = ray.get(self.actor.poll.remote())
            if self.is_ready and (pid is None or (code or 0) < 0):
                if ray.get(self.actor.place.remote())[0] == self.place[0]:
                    code = ray.get(self.actor.start.remote(*self.job))
                else:
                    code = 1
                    print_phase(f"the server at {self.place[1]}:{self.place[2]} is gone with its host")
        except ray.exceptions.RayError as error:
            if not self.is_ready:
                self.loss = f"the loss of its Ray actor on {self.place[1]} ({type(error).__name__})"
                self.exitcode, self.timestamp = -signal.SIGKILL, 0
            return
        self.pid, self.exitcode, self.timestamp = pid, code, self.timestamp + 1
        for name, text in output.items():
            self.is_ready |= self.is_server and b" is ready (" in text  # printed by `mm-grpo serve`
            with suppress(OSError, ValueError):  # a closed terminal
                getattr(sys, name).buffer.write(text)
                getattr(sys, name).flush()


@dataclass
class RayLaunch:
    """Launch of `PROGRAM train ARGUMENTS` in each process, and of `PROGRAM serve ARGUMENTS` in each server."""

    address: str
    processes: int
    arguments: Sequence[str]
    resume: bool
    device: str
    """`model.device`. No GPU is asked for with cpu, nor with auto if the cluster has none."""
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
                self.started = False
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

        total, end, actors = ray.cluster_resources(), time.monotonic() + START_TIMEOUT, list[Any]()
        gpus = [1] * self.processes + [self.tensor_parallel] * self.servers
        uses_gpus = "GPU" in total if self.device == "auto" else self.device != "cpu"
        bundles = [{"CPU": 1} | ({"GPU": n} if uses_gpus else {}) for n in gpus]
        group = placement_group(bundles)
        try:
            while not group.wait(1):
                if time.monotonic() > end:
                    raise ConfigError(
                        f"--ray {self.address}: no room for {bundles} within {START_TIMEOUT:g} s in a cluster of "
                        f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs; ask for fewer, or add hosts"
                    )
            kinds = [number >= self.processes for number in range(len(bundles))]
            for number, is_server in enumerate(kinds):
                options = {"num_cpus": 1, "num_gpus": bundles[number].get("GPU", 0)}
                options["max_restarts"] = -is_server  # a process that comes back alone cannot join the others
                place = PlacementGroupSchedulingStrategy(group, number)
                actors.append(ray.remote(ProcessActor).options(scheduling_strategy=place, **options).remote())
            places = ray.get([actor.place.remote() for actor in actors], timeout=START_TIMEOUT)
            return self._watch(ray, [*map(Process, actors, places, kinds)])
        except ray.exceptions.RayError as error:
            message = f"--ray {self.address}: a host starts no process ({shorten(getattr(error, 'cause', error), 300)})"
            if isinstance(error, ray.exceptions.RayTaskError):
                raise ConfigError(message) from None
            return 1, f"error: {message}"
        except KeyboardInterrupt:
            return exit_code({}, self.processes, self.signals[0])
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    def _watch(self, ray: Any, processes: list[Process]) -> tuple[int, str]:
        """Start the servers, and when they are ready the processes; wait until these end."""
        ranks, servers = processes[: self.processes], processes[self.processes :]
        self._set_jobs(ranks, servers)
        ray.get([server.actor.start.remote(*server.job) for server in servers])
        failures, sent, end = dict[int, Process](), 0, time.monotonic() + START_TIMEOUT
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
            if not self.started and all(server.is_ready for server in servers):
                ray.get([rank.actor.start.remote(*rank.job) for rank in ranks])
                self.started, end = True, math.inf
            for number in self.signals[sent:]:
                for rank in ranks if not sent or number == signal.SIGINT else ():
                    rank.actor.signal.remote(signal.SIGKILL if sent else number)
                sent += 1
            for process in (process for process in processes if process.exitcode is None):
                process.look(ray)
            failures = {n: p for n, p in enumerate(processes) if p.exitcode and not p.is_ready}
            if failures:
                end = min(end, time.monotonic() + (END_TIMEOUT if self.started else 0))
            time.sleep(PERIOD)
        if not failures and not self.started:
            raise ConfigError(f"--serve {self.servers}: not ready within {START_TIMEOUT:g} s")
        return exit_code(failures, len(ranks), next(iter(self.signals), None)) if failures else (0, "")

    def _set_jobs(self, ranks: Sequence[Process], servers: Sequence[Process]) -> None:
        urls = []
        for server in servers:
            _, host, port = server.place
            urls.append(f"http://{host}:{port}")
            options = ["--tensor-parallel", self.tensor_parallel, "--host", host, "--port", port]
            command = [*self.program, "serve", *self.arguments, *map(str, options)]
            server.job = command, self.secrets, os.getcwd()
        fields = ["rollout.engine=vllm_server", f"rollout.server.urls={json.dumps(urls)}"] if urls else []
        command = [*self.program, "train", *self.arguments, *fields, *["--resume"] * self.resume]
        hosts, (_, host, port) = [rank.place[0] for rank in ranks], ranks[0].place
        for number, rank in enumerate(ranks):
            places = {"RANK": number, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": hosts.count(hosts[number])}
            group = {"WORLD_SIZE": len(ranks), "MASTER_ADDR": host, "MASTER_PORT": port}
            rank.job = command, {**self.secrets, **group, **places}, os.getcwd()


def check_ray(address: str | None, config: GRPOConfig, *, retries: int, smoke: bool) -> None:
    """Raise ConfigError if `--ray` or `--retries` contradicts another option or the config."""
    share_gpus = config.rollout.server.share_gpus
    for is_conflict, message in (
        (retries and not address, f"--retries {retries}: only --ray tries again; elsewhere use --resume"),
        (address and smoke, f"--ray {address}: --smoke runs in one process; leave one of the two out"),
        (address and share_gpus, f"--ray {address}: its servers share no GPUs (--share-gpus)"),
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
