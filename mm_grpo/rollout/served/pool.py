"""Load balancing and failover over several servers.

A request goes to the server that works on the fewest completions, MAX_SEQUENCES at most; the rest wait here.

A server is `lost` when it refuses or cuts a connection, answers 5xx or under other weights than the run's, or answers
none of its requests for `timeout`. Its requests go to other servers unchanged, seeds included. It is tried again every
RETRY seconds. If it answers and holds other weights than the run's (it was restarted), it gets the run's weights before
it gets a request. Only the thread of the clients (client.py) changes state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from mm_grpo.background import BackgroundThreads
from mm_grpo.errors import ConfigError, EngineError, GuardStop
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerUnreachable, in_background, wait
from mm_grpo.rollout.served.protocol import ServerLimits, ask, probe, weights_name
from mm_grpo.rollout.vllm.adapters import NAME
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest

log = logging.getLogger(__name__)

MAX_SEQUENCES = 256
"""Most completions that a server works on at once."""
RETRY = 3.0
"""Seconds between two tries of a lost server."""
PERIOD = 0.25
"""Seconds between two checks of the servers."""
NO_DEADLINE = 7 * 86400.0
"""Deadline of a single request, in seconds. A server hangs when it answers none of its requests for `timeout`."""


@dataclass(eq=False)
class Server:
    """Server and its state."""

    client: ServerClient
    model: str | None = None
    """The server's name of its model."""
    state: Literal["ready", "behind", "lost"] = "lost"
    """`ready` with the run's weights, `behind` when it answers and holds others, else `lost`."""
    last_event: str = "not asked yet"
    weights: str | None = None
    """Name of the weights with which it was last admitted."""
    load: int = 0
    """Completions that it works on."""
    next_try: float = 0.0
    last_answer: float = 0.0
    """Time when it last answered a request, or got one while it had none."""
    readmission: asyncio.Task[None] | None = None
    running: set[asyncio.Future[EngineAnswer]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.client.url

    def describe(self) -> str:
        """Return its url with its work or its last event."""
        work = f"{len(self.running)} request(s) on their way"
        return f"{self.url}: {work if self.state == 'ready' else self.last_event}"


class ServerPool:
    """Server pool of a run.

    `bring_up(server)`, called in a thread, sends a server the run's weights and then calls `admit`; None in a process
    that sends none. `current` is the name of the newest weights. If `adapted`, requests go to the servers' adapter.
    `losses` counts servers that were lost. While servers are `asleep`, none is brought up.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        limits: ServerLimits,
        *,
        bring_up: Callable[[Server], None] | None,
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.limits, self.bring_up = limits, bring_up
        self.current: str | None = None
        self.adapted = self.asleep = False
        self.updating = self.closed = False
        self.losses = 0
        self._waiting: deque[tuple[int, asyncio.Future[Server]]] = deque()  # with the completions of each
        self._none_ready_since: float | None = None
        self._watcher: Future[None] | None = None
        self._threads = BackgroundThreads(len(self.servers) + 1, "mm_grpo-servers")

    # from any thread -------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait at most `wait_timeout` until a server answers; the others join when they answer.

        Raises ConfigError if a server lacks what a run needs, or none answers.
        """
        start = time.monotonic()
        for attempt in count():
            for future in [self._threads.submit(self._probe, server) for server in self.servers]:
                wait(future)
            if self.answering():
                break
            if attempt == 0:
                log.warning("waiting %g s for a server: %s", self.limits.wait_timeout, self.describe())
            if time.monotonic() > start + self.limits.wait_timeout:
                raise ConfigError(
                    f"rollout.server.urls: no server answers within {self.limits.wait_timeout:g} s "
                    f"(rollout.server.wait_timeout): {self.describe()}; start them with `mm-grpo serve`, or check the "
                    "addresses"
                )
            time.sleep(min(0.5, self.limits.wait_timeout / 10))
        for server in self.servers:
            if server.model is None:
                message = "rollout: going on without %s (%s); it joins when it answers"
                log.warning(message, server.url, server.last_event)
        self._watcher = in_background(self._watch())

    def submit(self, work: EngineRequest) -> Future[EngineAnswer]:
        """Send `work` to any server. Cancelling the future aborts the request."""
        return in_background(self._answer(work))

    def submit_to(self, server: Server, work: EngineRequest) -> Future[EngineAnswer]:
        """Send `work` to this server only. The future raises ServerUnreachable, after which the server is lost."""
        return in_background(self._run(server, work))

    def ready(self) -> list[Server]:
        return [server for server in self.servers if server.state == "ready"]

    def answering(self) -> list[Server]:
        return [server for server in self.servers if server.state != "lost"]

    def check(self) -> None:
        """Mark ready servers as lost that are gone, or hold other weights because they were restarted."""

        async def check(server: Server) -> None:
            self._require(server, await weights_name(server.client, self.limits.probe_timeout))

        self._on_each(self.ready(), check)

    def sleep(self) -> None:
        """Have ready servers free their GPUs' memory."""
        self._on_each(self.ready(), self._sleep)

    def wake(self) -> None:
        """Have all servers take the memory back, those too that were lost in their sleep."""
        self._on_each(self.servers, self._wake)

    def _on_each(self, servers: Iterable[Server], work: Callable[[Server], Awaitable[Any]]) -> None:
        """Run `work` on these servers at once, and lose those that fail."""

        async def run(server: Server) -> None:
            try:
                await work(server)
            except ServerError as error:
                self._lose(server, error.reason)

        for future in [in_background(run(server)) for server in servers]:
            wait(future)

    def admit(self, server: Server) -> None:
        """Send requests to `server`, which holds the newest weights."""
        self._in_loop(self._admit, server)

    def lose(self, server: Server, reason: str) -> None:
        """Send `server` nothing until it has been tried again, and its requests to other servers."""
        self._in_loop(self._lose, server, reason)

    def _in_loop(self, change: Callable[..., object], *arguments: Any) -> None:
        async def call() -> None:
            change(*arguments)

        wait(in_background(call()))

    @contextmanager
    def update(self, weights: str) -> Iterator[None]:
        """Make `weights` the newest ones while they are sent, which wakes. No lost server is readmitted meanwhile."""
        self.updating = True
        try:
            self.current = weights
            yield
            self.asleep = False
        finally:
            self.updating = False

    def wait_ready(self) -> None:
        """Wait until a server is ready. Raises EngineError after `wait_timeout`."""
        end = time.monotonic() + self.limits.wait_timeout
        while not self.ready():
            if time.monotonic() > end:
                raise EngineError(self._none_left())
            time.sleep(0.05)

    def describe(self) -> str:
        return "; ".join(server.describe() for server in self.servers)

    def close(self) -> None:
        """Stop watching the servers."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
            for server in self.servers:  # a readmission would go on in threads that are gone
                self._in_loop(lambda s: s.readmission and s.readmission.cancel(), server)
        self.closed = True
        self._threads.close()

    # one request -----------------------------------------------------------------------------

    async def _answer(self, work: EngineRequest) -> EngineAnswer:
        failures = 0
        while True:
            server = await self._reserve(work)
            try:
                return await self._run(server, work)
            except ServerUnreachable as error:
                failures += 1
                if failures > 3 + 2 * len(self.servers):
                    raise EngineError(
                        f"{work.uid}: servers failed {failures} times over one request, the last with: {error}. If it "
                        "is always this row, leave it out; else see the servers' own output"
                    ) from error
            finally:
                server.load -= work.sequences
                self._dispatch()

    async def _run(self, server: Server, work: EngineRequest) -> EngineAnswer:
        """Return one server's answer under the run's weights. Raises ServerUnreachable if it is lost."""
        assert server.model is not None
        if not server.running:
            server.last_answer = time.monotonic()
        model = NAME if self.adapted else server.model
        task = asyncio.ensure_future(ask(server.client, model, work, NO_DEADLINE))
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ServerUnreachable(server.url, server.last_event)
            try:
                answer = task.result()
            except ServerError as error:
                # the server may have restarted with another model
                if not isinstance(error, ServerUnreachable):
                    self._require(server, await weights_name(server.client, self.limits.probe_timeout))
                raise
            server.last_answer = time.monotonic()
            self._require(server, answer.weights)
            return answer
        except ServerUnreachable as error:
            self._lose(server, error.reason)
            raise
        finally:
            server.running.remove(task)
            task.cancel()

    def _require(self, server: Server, weights: str) -> None:
        """Raise ServerUnreachable if a server's `weights` are not the run's newest."""
        if weights != self.current:
            raise ServerUnreachable(
                server.url,
                f"it holds weights '{weights}', not '{self.current}': it was restarted, or missed an update, or "
                "another run sends it weights",
            )

    async def _reserve(self, work: EngineRequest) -> Server:
        """Wait for a server with room for `work`, and count it in the server's load."""
        place: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.append((work.sequences, place))
        self._dispatch()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.done() and not place.exception():
                place.result().load -= work.sequences
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Reserve servers for waiting requests, in order."""
        while self._waiting:
            sequences, place = self._waiting[0]
            if not place.done():  # else the request was cancelled
                server = min(self.ready(), key=lambda server: server.load, default=None)
                if server is None or server.load > max(MAX_SEQUENCES - sequences, 0):
                    return
                server.load += sequences
                place.set_result(server)
            self._waiting.popleft()

    # watching servers ------------------------------------------------------------------------

    def _lose(self, server: Server, reason: str) -> None:
        if server.state != "lost":
            log.warning("rollout: %s is lost: %s", server.url, reason)
            self.losses += 1
            server.state, server.last_event = "lost", reason
            server.next_try = time.monotonic() + RETRY
            for task in list(server.running):
                task.cancel()

    def _admit(self, server: Server) -> None:
        if server.state == "lost":
            log.warning("rollout: %s joins", server.url)
        server.state, server.last_event, server.weights = "ready", "", self.current
        self._dispatch()

    def _probe(self, server: Server) -> None:
        """Ask a server for its model. Raises ConfigError if it lacks what a run needs."""
        try:
            server.model = probe(server.client, self.limits)
            server.state, server.last_event = "behind", "it has no weights of this run yet"
        except ServerUnreachable as error:
            server.last_event = error.reason

    async def _sleep(self, server: Server) -> None:
        level = str(self.limits.sleep_level)
        await server.client.request("/sleep", params={"level": level}, timeout=self.limits.timeout)

    async def _wake(self, server: Server) -> None:
        """Wake a server, which may be awake."""
        seconds = self.limits.timeout if server.state == "ready" else self.limits.probe_timeout
        await server.client.request("/wake_up", timeout=seconds)

    async def _watch(self) -> None:
        """Watch all servers until cancelled."""
        while True:
            now, limit = time.monotonic(), self.limits.timeout
            for server in self.servers:
                if server.state == "ready" and not self.asleep:
                    if server.running and now - server.last_answer > limit:
                        requests = f"none of its {len(server.running)} request(s) within {limit:g} s"
                        self._lose(server, f"it has answered {requests} (rollout.server.timeout)")
                elif now >= server.next_try and not self.updating and self.current is not None:
                    server.next_try = math.inf  # until this try has ended
                    server.readmission = asyncio.ensure_future(self._readmit(server))
            self._fail_waiting(now)
            await asyncio.sleep(PERIOD)

    async def _readmit(self, server: Server) -> None:
        """Bring a server back, with the run's weights if it holds others; while servers sleep, have it sleep too."""
        loop = asyncio.get_running_loop()
        asleep, current = self.asleep, self.current
        try:
            if server.model is None or server.state == "lost":  # it may have come back as another version
                server.model = await loop.run_in_executor(self._threads, probe, server.client, self.limits)
            if self.limits.sleep_level and self.bring_up is not None and server.state != "ready":
                await (self._sleep if asleep else self._wake)(server)
            weights = await weights_name(server.client, self.limits.probe_timeout)
            # a server whose tensors were refused has the name too, but was never admitted with it
            if asleep:
                server.last_event = "it sleeps while the learner works"
                # in this order: an update changes the name before it ends
                if weights != current and not self.updating and self.asleep:
                    self._lose(server, "it was restarted while it slept")
            elif weights == self.current and (self.bring_up is None or server.weights == weights):
                if not (self.updating or self.asleep):
                    self._admit(server)
            elif self.bring_up is None:
                server.last_event = (
                    f"it holds weights '{weights}', and another process sends it '{self.current}'"
                )
            else:
                await loop.run_in_executor(self._threads, self.bring_up, server)
        except Exception as error:  # it is tried again
            if not isinstance(error, (ServerError, ConfigError, EngineError, GuardStop)):
                log.exception("rollout: %s could not be brought back", server.url)
            reason = error.reason if isinstance(error, ServerError) else str(error)
            if server.state == "ready":  # it died in its sleep
                self._lose(server, reason)
            server.last_event = reason
        server.next_try = time.monotonic() + RETRY

    def _fail_waiting(self, now: float) -> None:
        """Fail the waiting requests with EngineError when no server has been ready for `wait_timeout`."""
        if self.ready() or not self._waiting:
            self._none_ready_since = None
            return
        self._none_ready_since = self._none_ready_since or now
        if now - self._none_ready_since > self.limits.wait_timeout:
            message = self._none_left()
            while self._waiting:
                _, place = self._waiting.popleft()
                if not place.done():
                    place.set_exception(EngineError(message))

    def _none_left(self) -> str:
        return (
            f"no server has been left to sample for {self.limits.wait_timeout:g} s (rollout.server.wait_timeout): "
            f"{self.describe()}. Start them again, and go on from the newest checkpoint with --resume"
        )
