"""vLLM servers of this machine: started as the config says, watched, and ended with whoever started them.

A server's part that is vLLM's is started as the engine in the trainer's process is (`vllm/launch.py`), so it samples as
that does. It is a process group of its own: vLLM's API server, its engine and its workers. `stop` ends the whole group,
at the end of a block or by Ctrl-C; where this process ends otherwise, by SIGKILL say, its `Lifeline` does so
(user_code/server.py). What a server prints goes to a log file.

A server listens on a Unix socket in a folder of ours, which nobody but this user reaches, or at a port with the key of
`server_key.py`: vLLM's own would guard a part of its endpoints only, and whoever reaches the others replaces weights.
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
"""Options that vLLM's command line knows no `--no-` of."""
NOT_FOR_SERVERS = ("use_tqdm_on_load", "distributed_executor_backend", "enable_sleep_mode")
OF_THE_TRAINER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "PYTHONDONTWRITEBYTECODE",
)
"""Variables that a server does not get, most of them a launcher's about this process's group, which it is not in."""
ON_A_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""The last keeps the worker in the process of its engine, which saves the import of vLLM there, a third of the start. A
worker that binds threads needs a process of its own."""
START_TIMEOUT = 900.0
"""Seconds that a server may take to load a model."""
STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS = 3
"""Times that a server which has ended is started anew."""
WATCH_EVERY = 0.5
SHOWN_LINES = 15


@dataclass(frozen=True)
class ServerSettings:
    """One server. `engine` is what an in-process engine would be started with, `transfer` file, gloo or nccl.

    `gpus` are its GPUs as CUDA_VISIBLE_DEVICES names them, as many as `tensor_parallel`, None where it has all. It
    listens at `host` and `port`, or without a host on `socket`, which `serve` makes where there is none.
    """

    engine: EngineSettings
    transfer: str = "file"
    tensor_parallel: int = 1
    gpus: tuple[str, ...] | None = None
    socket: Path | None = None
    host: str | None = None
    port: int = 8000


# command and environment -----------------------------------------------------------------------


def require_vllm() -> None:
    """ConfigError where no vLLM is installed; it is not imported, for that takes seconds."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine = 'vllm_server': vLLM 0.32 or newer is not installed where the server is to run; install "
            "mm_grpo[vllm] on a GPU machine, mm_grpo[cpu] on a CPU"
        )


def server_command(settings: ServerSettings) -> list[str]:
    """The command of a server, without its key: everybody on this machine can read it."""
    require_vllm()
    given = engine_arguments(settings.engine, alone=True)
    arguments = {k: v for k, v in given.items() if k not in NOT_FOR_SERVERS}
    arguments |= {
        "tensor_parallel_size": settings.tensor_parallel,
        "weight_transfer_config": {"backend": BACKENDS[settings.transfer]},
        "worker_extension_cls": EXTENSION,
        "enable_scale_out": True,  # /inference/v1/generate
    }
    if settings.host is None:
        arguments["uds"] = str(settings.socket)
    else:
        arguments |= {"host": settings.host, "port": settings.port, "middleware": MIDDLEWARE}
    # -P: it imports nothing from the working folder, where a json.py may stand
    start = [ADAPTERS, json.dumps(asdict(settings.engine))] if settings.engine.lora_rank else [ENTRY]
    return [sys.executable, "-P", "-m", *start, *flags(arguments)]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's classes as it takes them on the command line.

    >>> flags({"max_num_seqs": 8, "enforce_eager": True, "enable_chunked_prefill": False, "limit": {"image": 1}})
    ['--max-num-seqs', '8', '--enforce-eager', '--no-enable-chunked-prefill', '--limit', '{"image": 1}']
    >>> flags({"disable_log_stats": False})
    []
    """
    found: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            if value or name not in ONLY_ON:
                found.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            if value:
                found += [f"--{option}", json.dumps(dict(value))]
        elif isinstance(value, (list, tuple)):
            found += [f"--{option}", *map(str, value)]
        else:
            found += [f"--{option}", str(value)]
    return found


def server_environment(settings: ServerSettings) -> dict[str, str]:
    """The environment of a server: ours, with vLLM's switches where the user has not set them."""
    here = {name: value for name, value in os.environ.items() if name not in OF_THE_TRAINER}
    if "VLLM_CPU_OMP_THREADS_BIND" in here:
        here["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **({} if torch.cuda.is_available() else ON_A_CPU),
        **here,
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints of weights, pauses and caches
    }
    if settings.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
    if environment.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True":  # of mm_grpo's command
        del environment["PYTORCH_CUDA_ALLOC_CONF"]  # GPUs of one server cannot map each other's
    folder = str(Path(__file__).parents[3])  # the worker imports this package, wherever it was imported from
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != folder]
    environment["PYTHONPATH"] = os.pathsep.join([folder, *paths])
    return environment


# processes -------------------------------------------------------------------------------------


def require_key(host: str) -> None:
    """ConfigError for a server at an address without a key."""
    if not os.environ.get(VARIABLE):
        raise ConfigError(
            f"--host {host}: a vLLM server lets whoever reaches its port replace its weights; set a key in the "
            f"environment variable {VARIABLE}, here and where the trainer runs, or leave --host and --port out for "
            "Unix sockets, which you alone reach"
        )


def require_free(host: str, port: int) -> None:
    """ConfigError if a server cannot listen at this address, mostly because another program does."""
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
    """A server of this machine, at `url` once it was started; `log` is what it prints."""

    settings: ServerSettings
    log: Path
    url: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _lifeline: Lifeline | None = None
    _started: float = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, anew if it has ended, at the same url. ConfigError for a port that is taken."""
        self.stop()
        settings = self.settings
        if settings.host is None:
            assert settings.socket is not None
            settings.socket.unlink(missing_ok=True)
            self.url = f"unix://{settings.socket}"
        else:
            require_key(settings.host)
            if not self._started:  # later the port is its own, which a worker may hold a moment longer
                require_free(settings.host, settings.port)
            shown = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.url = f"http://{shown}:{settings.port}"
        command, environment = server_command(settings), server_environment(settings)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._lifeline = Lifeline(pid=self._process.pid)

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until it answers. EngineError when it ends before, or takes longer than `timeout` since its start."""
        while not self.ready:
            if (code := self.poll()) is not None:
                raise EngineError(
                    f"the vLLM server at {self.url} {ended(code)} before it was ready; {self.tail()}"
                )
            if time.monotonic() - self._started > timeout:
                raise EngineError(
                    f"the vLLM server at {self.url} was not ready within {timeout:g} s; {self.tail()}"
                )
            time.sleep(0.25)

    @property
    def ready(self) -> bool:
        """True when /health is answered just now, and by it: another program may answer at its port."""
        if self.pid is None or self.poll() is not None or not self._listens():
            return False
        client = ServerClient(self.url, key=os.environ.get(VARIABLE), timeout=5.0)
        with closing(client), suppress(ServerError):
            client.call("/health", method="GET")
            return True
        return False

    def _listens(self) -> bool:
        """True when one of its processes listens at its port. Nobody else reaches a socket's folder."""
        import psutil  # type: ignore[import-untyped]  # vLLM needs it

        with suppress(psutil.Error):
            leader = psutil.Process(self.pid)
            family = (leader, *leader.children(recursive=True))
            sockets = [each for process in family for each in process.net_connections("tcp")]
            ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
            return self.settings.host is None or self.settings.port in ports
        return False

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """End it and all that it started: asked first, and killed after `timeout` seconds."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)  # a stopped process takes no signal
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
        """The end of its log, for a message."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            return f"the end of its log, '{self.log}':\n" + "\n".join(lines)
        return f"its log '{self.log}' cannot be read"


@contextmanager
def serve(
    settings: Sequence[ServerSettings],
    *,
    log_folder: Path | None = None,
    timeout: float = START_TIMEOUT,
    report: Callable[[str], None] | None = None,
) -> Iterator[list[ServerProcess]]:
    """Start these servers together, yield them when all are ready, and end them after the block.

    A server without a host and a socket gets one in a folder of this block. With `report` one that ends within the
    block is started anew, and `report` is told so.
    """
    with ExitStack() as held:
        folder = held.enter_context(temporary_folder("servers"))  # its owner alone may enter it
        logs = log_folder or folder
        logs.mkdir(parents=True, exist_ok=True)
        servers = [
            ServerProcess(
                replace(each, socket=each.socket or folder / f"{number}.sock"), logs / f"server-{number}.log"
            )
            for number, each in enumerate(settings)
        ]
        held.callback(stop_all, servers)
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(timeout)
        if report is not None:
            held.enter_context(_kept_running(servers, report))
        yield servers


@contextmanager
def _kept_running(servers: Sequence[ServerProcess], report: Callable[[str], None]) -> Iterator[None]:
    """Start those anew that end, until the block does; each RESTARTS times."""
    ending = threading.Event()

    def watch() -> None:
        left = dict.fromkeys(servers, RESTARTS)
        while not ending.wait(WATCH_EVERY):
            for server in list(left):
                if (code := server.poll()) is None:
                    continue
                what = f"the vLLM server at {server.url} {ended(code)}"
                server.stop(0.0)
                left[server] -= 1
                if left[server] < 0:
                    del left[server]
                    report(f"{what} and is not started again; {server.tail()}")
                else:
                    report(f"{what}; it is started anew")
                    for log in (server.log, Path(os.devnull)):  # a disk may be full, or a folder gone
                        server.log = log
                        try:
                            server.start()
                            break
                        except Exception as error:  # the others are watched all the same
                            report(f"{server.url} was not started with the log '{log}': {error}")

    thread = threading.Thread(target=watch, name="mm_grpo-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def stop_all(servers: Sequence[ServerProcess]) -> None:
    """Ask all to end, and kill all after STOP_TIMEOUT seconds, or at once if a signal ends the wait."""
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
