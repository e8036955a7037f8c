"""vLLM servers of this machine: started as the config says, watched, and ended with whoever started them.

A server is a process group of its own: vLLM's API server, its engine and its workers. `stop` ends the whole group, at
the end of a block or by Ctrl-C; where this process ends otherwise, by SIGKILL say, its `Lifeline` does so
(user_code/server.py). What a server prints goes to a log file.

A server listens on a Unix socket in a folder of ours, which nobody but this user reaches, or at a port of 127.0.0.1.
vLLM's own key would guard a part of its endpoints only, and whoever reaches the others replaces the weights; so a port
has the key of `server_key.py`, which is made for 127.0.0.1, and has to be set for any other address.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from mm_grpo.errors import ConfigError, EngineError
from mm_grpo.files import temporary_folder
from mm_grpo.rollout.served.broadcast import listen
from mm_grpo.rollout.served.client import ServerClient, ServerError
from mm_grpo.rollout.served.command import ServerSettings, server_command, server_environment
from mm_grpo.rollout.served.server_key import VARIABLE, is_loopback, kept_key
from mm_grpo.user_code.server import Lifeline, ended

START_TIMEOUT = 900.0
"""Seconds that a server may take to load a model."""
STOP_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS = 3
"""Times in a row that a server which ends before it answers is started anew."""
WATCH_EVERY = 0.5
ENDING = 15.0
"""Seconds that a server which listens no more may take to end; vLLM's takes for ever where a connection is open."""
SHOWN_LINES = 15


def check_exposure(host: str) -> None:
    """ConfigError for an address that other machines would reach without a key."""
    if not is_loopback(host) and not os.environ.get(VARIABLE):
        raise ConfigError(
            f"--host {host}: other machines reach this address, and a vLLM server lets whoever reaches it replace its "
            f"weights; set a key in the environment variable {VARIABLE}, here and where the trainer runs, or leave "
            "--host out for 127.0.0.1"
        )


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
        """Start it, anew where it has ended; at the same url."""
        self.stop()
        settings = self.settings
        if settings.socket is not None:
            settings.socket.unlink(missing_ok=True)
            self.url = f"unix://{settings.socket}"
        else:
            check_exposure(settings.host)
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

    def wait_ready(self, timeout: float = START_TIMEOUT) -> float:
        """Wait until it answers; returns the seconds since its start. EngineError when it ends before, or is late."""
        while True:
            waited = time.monotonic() - self._started
            code = self.poll()
            if code is not None:
                raise EngineError(
                    f"the vLLM server at {self.url} {ended(code)} before it was ready; {self.tail()}"
                )
            if self.ready:
                return waited
            if waited > timeout:
                raise EngineError(
                    f"the vLLM server at {self.url} was not ready within {timeout:g} s; {self.tail()}"
                )
            time.sleep(0.25)

    @property
    def ready(self) -> bool:
        """True when it answers /health just now."""
        client = ServerClient(self.url, key=self.settings.key or os.environ.get(VARIABLE), timeout=5.0)
        with closing(client), suppress(ServerError):
            client.call("/health", method="GET")
            return True
        return False

    @property
    def listening(self) -> bool:
        """True when connections to it are taken, which they are of a process that is stopped too."""
        place = urlsplit(self.url)
        try:
            if self.settings.socket is None:
                socket.create_connection((str(place.hostname), place.port or 0), 5.0).close()
            else:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(5.0)
                    probe.connect(str(self.settings.socket))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # it is slow to take them
        return True

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """End it and all that it started: asked first, and killed after `timeout` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process takes no signal
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        with suppress(ProcessLookupError, PermissionError):  # workers that outlived their parent
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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

    A server without a socket and without a port of its own gets a Unix socket in a folder of this block, one at a port
    of 127.0.0.1 a key where none is set. With `report` one that ends within the block is started anew, and `report`
    is told so.
    """
    with ExitStack() as held:
        folder = held.enter_context(temporary_folder("servers"))  # its owner alone may enter it
        logs = log_folder or folder
        logs.mkdir(parents=True, exist_ok=True)
        servers = [
            ServerProcess(_placed(each, folder, number, held), logs / f"server-{number}.log")
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
    """Start those anew that end or listen no more, until the block does; after RESTARTS in a row one is given up."""
    ending = threading.Event()
    failures = [0] * len(servers)
    # when each last listened, None while it starts
    heard: list[float | None] = [time.monotonic()] * len(servers)

    def look(number: int, server: ServerProcess) -> None:
        code = server.poll()
        if code is None:
            if server.listening:
                heard[number] = time.monotonic()
                if failures[number] and server.ready:
                    failures[number] = 0
            if (last := heard[number]) is None or time.monotonic() - last < ENDING:
                return
            how = f"has stopped listening and not ended for {ENDING:g} s: has its engine died?"
        else:
            how = ended(code)
        failures[number] += 1
        heard[number] = None
        what = f"the vLLM server at {server.url} {how}"
        server.stop(0.0)
        if failures[number] > RESTARTS:
            report(f"{what}, {failures[number]} times in a row, and is not started again; {server.tail()}")
        else:
            report(f"{what}; it is started anew")
            server.start()

    def watch() -> None:
        while not ending.wait(WATCH_EVERY):
            for number, server in enumerate(servers):
                look(number, server)

    thread = threading.Thread(target=watch, name="mm_grpo-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _placed(settings: ServerSettings, folder: Path, number: int, held: ExitStack) -> ServerSettings:
    host, port = settings.host, settings.port
    if settings.socket is not None or not is_loopback(host) or (port and os.environ.get(VARIABLE)):
        return settings
    if not port:
        return replace(settings, socket=folder / f"{number}.sock")
    try:  # else the key of the server that is there would be lost
        listen(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {host} cannot be listened at ({error.strerror}); take another"
        ) from None
    return replace(settings, key=held.enter_context(kept_key(port)))


def stop_all(servers: Sequence[ServerProcess]) -> None:
    """Ask all to end, then end each; an interrupt in between does not keep one alive."""
    for server in servers:
        if server.pid is not None and server.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)
    try:
        for server in servers:
            server.stop()
    finally:
        for server in servers:
            server.stop(0.0)
