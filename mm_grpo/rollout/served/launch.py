"""vLLM servers of this machine: command line, start, watch, end.

A server gets the arguments of the engine in the trainer's process (`vllm/launch.py`), so it samples the same. It is its
own process group: vLLM's API server, its engine and its workers. `stop` ends the whole group at the end of a block or
by Ctrl-C; if this process is killed, its `Lifeline` ends the group (user_code/server.py). Output goes to a log file.

A server listens on a Unix socket in a folder that only this user reaches, or at a port with the key of `server_key.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.files import temporary_folder
from mm_grpo.rollout.served import videos
from mm_grpo.rollout.served.broadcast import listen
from mm_grpo.rollout.served.client import ServerClient, ServerError
from mm_grpo.rollout.served.plugin import BACKENDS, EXTENSION
from mm_grpo.rollout.served.server_key import MIDDLEWARE, VARIABLE
from mm_grpo.rollout.vllm.launch import EngineSettings, engine_arguments
from mm_grpo.user_code.server import Lifeline, ended

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
ADAPTERS = "mm_grpo.rollout.served.with_adapters"
"""Modules that become a server: vLLM's own, and the one before it that adds LoRA layers."""
ONLY_ON = ("disable_log_stats", "data_parallel_hybrid_lb", "data_parallel_external_lb")
"""Options without a `--no-` form in vLLM's command line."""
NOT_FOR_SERVERS = ("use_tqdm_on_load", "distributed_executor_backend")
TRAINER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "VLLM_ENABLE_V1_MULTIPROCESSING", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Variables that a server does not get. Most describe the trainer's process group, which a server is not in."""
CPU_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""The last keeps the worker in the engine's process, which saves a third of the start."""
START_TIMEOUT = 900.0
"""Seconds that a server may take to load a model."""
STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS = 3
"""Times that a server is restarted after it ended."""
WATCH_EVERY = 0.5
SHOWN_LINES = 15


@dataclass(frozen=True)
class ServerSettings:
    """Arguments of one server, which listens at `host` and `port`, or without a host on `socket`."""

    engine: EngineSettings
    """Arguments of an engine in the trainer's process."""
    transfer: str = "file"
    """file, gloo or nccl."""
    tensor_parallel: int = 1
    share_gpus: bool = False
    """The learner has the same GPUs."""
    gpus: tuple[str, ...] | None = None
    """As many GPUs as `tensor_parallel`, as CUDA_VISIBLE_DEVICES names them; None for all."""
    socket: Path | None = None
    """`serve` makes one if it is None."""
    host: str | None = None
    port: int = 8000


def server_command(settings: ServerSettings) -> list[str]:
    """Return the command of a server, without its key, because everybody on this machine can read it.

    Raises ConfigError if vLLM is not installed.
    """
    if find_spec("vllm") is None:  # its import takes seconds
        raise ConfigError(
            "rollout.engine = 'vllm_server': vLLM 0.32 or newer is not installed where the server is to run; install "
            "mm_grpo[vllm] on a GPU machine, mm_grpo[cpu] on a CPU"
        )
    arguments = engine_arguments(settings.engine, dedicated=not settings.share_gpus)
    arguments = {k: v for k, v in arguments.items() if k not in NOT_FOR_SERVERS}
    arguments |= {
        "tensor_parallel_size": settings.tensor_parallel,
        "weight_transfer_config": {"backend": BACKENDS[settings.transfer]},
        "worker_extension_cls": EXTENSION,
        "enable_scale_out": True,  # /inference/v1/generate
    }
    middleware = arguments["middleware"] = list[str]()
    if settings.engine.max_videos:
        arguments["media_io_kwargs"] = {"video": {"video_backend": videos.BACKEND}}
        middleware.append(videos.MIDDLEWARE)
    if settings.host is None:
        arguments["uds"] = str(settings.socket)
    else:
        arguments |= {"host": settings.host, "port": settings.port}
        middleware.append(MIDDLEWARE)
    # -P: imports nothing from the working folder, which may hold a json.py
    start = [ADAPTERS, json.dumps(asdict(settings.engine))] if settings.engine.lora_rank else [ENTRY]
    return [sys.executable, "-P", "-m", *start, *flags(arguments)]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Convert arguments of vLLM's classes to its command line.

    >>> flags({"max_num_seqs": 8, "enforce_eager": True, "enable_chunked_prefill": False, "limit": {"image": 1}})
    ['--max-num-seqs', '8', '--enforce-eager', '--no-enable-chunked-prefill', '--limit', '{"image": 1}']
    >>> flags({"disable_log_stats": False})
    []
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            if value or name not in ONLY_ON:
                words.append(f"--{option}" if value else f"--no-{option}")
        elif name == "middleware":  # an option that takes one value, and may be repeated
            words += [word for path in value for word in (f"--{option}", path)]
        elif isinstance(value, Mapping):
            if value:
                words += [f"--{option}", json.dumps(dict(value))]
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """Return the environment of a server: this process's, with switches of vLLM that the user has not set."""
    inherited = {name: value for name, value in os.environ.items() if name not in TRAINER_VARIABLES}
    if "VLLM_CPU_OMP_THREADS_BIND" in inherited:  # a worker that binds threads needs a process of its own
        inherited["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **({} if torch.cuda.is_available() else CPU_VARIABLES),
        **inherited,
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints of weights, pauses and caches
    }
    if settings.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
    if environment.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True":  # set by mm_grpo's command
        del environment["PYTORCH_CUDA_ALLOC_CONF"]  # GPUs of one server cannot map each other's segments
    folder = str(Path(__file__).parents[3])  # the worker has to import this very package
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != folder]
    environment["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    return environment


def require_key(host: str) -> None:
    """Raise ConfigError if a server at an address has no key."""
    if not os.environ.get(VARIABLE):
        raise ConfigError(
            f"--host {host}: a vLLM server lets whoever reaches its port replace its weights; set a key in the "
            f"environment variable {VARIABLE}, here and where the trainer runs, or leave --host and --port out for "
            "Unix sockets, which only you reach"
        )


def require_free(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen at this address, mostly because another program does."""
    try:
        listen(host, port).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = str(getattr(error, "strerror", error)).split(" (")[0]
        raise ConfigError(
            f"--port {port}: a server cannot listen at {host}, port {port} ({reason}); end the program that listens "
            "there, or choose another --port, 65535 at most"
        ) from None


@dataclass(eq=False)
class ServerProcess:
    """Server of this machine, at `url` once it was started. Its output goes to `log`."""

    settings: ServerSettings
    log: Path
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _lifeline: Lifeline | None = None
    _start_time: float = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start or restart it. Raises ConfigError if the port is in use."""
        self.stop()
        settings = self.settings
        if settings.host is None:
            assert settings.socket is not None
            settings.socket.unlink(missing_ok=True)
            self.url = f"unix://{settings.socket}"
        else:
            require_key(settings.host)
            if not self._start_time:  # at a restart its own worker may hold the port a moment longer
                require_free(settings.host, settings.port)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.url = f"http://{host}:{settings.port}"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                server_command(settings),
                env=server_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._start_time = time.monotonic()
        self._lifeline = Lifeline(pid=self._process.pid)

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until it answers. Raises EngineError if it ends, or takes more than `timeout` seconds from its start."""
        while not self.ready:
            code = self.poll()
            if code is not None or time.monotonic() - self._start_time > timeout:
                late = f"was not ready within {timeout:g} s"
                event = late if code is None else f"{ended(code)} before it was ready"
                raise EngineError(f"the vLLM server at {self.url} {event}; {self.tail()}")
            time.sleep(0.25)

    @property
    def ready(self) -> bool:
        """Return True if it answers /health now, and not another program at its port."""
        if self.pid is None or self.poll() is not None or not self._listens():
            return False
        client = ServerClient(self.url, key=os.environ.get(VARIABLE), timeout=5.0)
        with closing(client), suppress(ServerError):
            client.call("/health", method="GET")
            return True
        return False

    def _listens(self) -> bool:
        """Return True if one of its processes listens at its port, or it has a socket."""
        import psutil  # type: ignore[import-untyped]  # vLLM needs it

        with suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            processes = (leader, *leader.children(recursive=True))
            connections = [c for process in processes for c in process.net_connections("tcp")]
            ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
            return self.settings.host is None or self.settings.port in ports
        return False

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """End its process group: SIGTERM first, and SIGKILL after `timeout` seconds."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # a stopped process handles no signal
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        with suppress(ProcessLookupError, PermissionError):  # workers that outlived their parent
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        if self._lifeline is not None:
            self._lifeline.leave()
        if self.settings.socket is not None:
            self.settings.socket.unlink(missing_ok=True)

    def tail(self) -> str:
        """Return the end of its log as part of a message."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            return f"the end of its log, '{self.log}':\n" + "\n".join(lines)
        return f"its log '{self.log}' cannot be read"


@contextmanager
def serve(
    settings: Sequence[ServerSettings],
    *,
    log_folder: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> Iterator[list[ServerProcess]]:
    """Start these servers together, yield them when all are ready, and end them after the block.

    With `report` a server that ends within the block is restarted, and `report` is called with a message.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("servers"))  # only its owner may enter it
        logs = log_folder or folder
        logs.mkdir(parents=True, exist_ok=True)
        servers = [
            ServerProcess(replace(s, socket=s.socket or folder / f"{i}.sock"), logs / f"server-{i}.log")
            for i, s in enumerate(settings)
        ]
        stack.callback(stop_all, servers)
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        if report is not None:
            stack.enter_context(_restart_ended(servers, report))
        yield servers


@contextmanager
def _restart_ended(servers: Sequence[ServerProcess], report: Callable[[str], None]) -> Iterator[None]:
    """Restart servers that end during the block, each RESTARTS times."""
    stop = threading.Event()

    def watch() -> None:
        restarts = dict.fromkeys(servers, RESTARTS)
        while not stop.wait(WATCH_EVERY):
            for server in list(restarts):
                if (code := server.poll()) is None:
                    continue
                event = f"the vLLM server at {server.url} {ended(code)}"
                server.stop(0.0)
                restarts[server] -= 1
                if restarts[server] < 0:
                    del restarts[server]
                    report(f"{event} and is not started again; {server.tail()}")
                else:
                    report(f"{event}; it is restarted")
                    for log in (server.log, Path(os.devnull)):  # the disk may be full, or the folder gone
                        server.log = log
                        try:
                            server.start()
                            break
                        except Exception as error:  # go on watching the others
                            report(f"{server.url} was not started with the log '{log}': {error}")

    thread = threading.Thread(target=watch, name="mm_grpo-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def stop_all(servers: Sequence[ServerProcess]) -> None:
    """Send all SIGTERM, and kill all after STOP_TIMEOUT seconds, or at once if a signal ends the wait."""
    end = time.monotonic() + STOP_TIMEOUT
    try:
        for server in servers:
            if server._process is not None:
                server._process.send_signal(signal.SIGTERM)
        for server in servers:
            server.stop(max(0.0, end - time.monotonic()))
    finally:
        for server in servers:
            server.stop(0.0)
