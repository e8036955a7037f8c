"""Several servers as one: which of them a request goes to, and what becomes of it when that one fails.

A request goes to the server with the fewest completions on their way, each server has MAX_SEQUENCES of them at most,
and the rest wait here without their bodies, so a thousand requests take the memory of those that are sent. A request
whose server refuses a connection, is cut, answers 5xx or hangs goes to another one as it was, seeds included.

A server that failed is `lost` and tried again after a while, longer each time. When it answers and holds other weights
than the run's (it was restarted), it gets those before it gets a request. All state is touched in the thread of the
clients alone (client.py).

Hanging is told in two ways: a server that has requests and does not answer `/health` within `health_timeout` (stopped,
or cut off without a word), and one that answers it and none of its requests for `timeout`. What a lost server had goes
elsewhere when it does not answer a try, or is a new process by then: not every proxy says that a connection has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from mm_grpo.errors import ConfigError, EngineError, GuardStop
from mm_grpo.rollout.served.client import (
    ServerClient,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    in_background,
    wait,
)
from mm_grpo.rollout.served.protocol import Limits, ServerInfo, ask, is_paused, probe, weights_name
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest

log = logging.getLogger(__name__)

MAX_SEQUENCES = 256
"""Completions that a server works on at once."""
BACK_OFF = (0.5, 15.0)
"""Seconds after which a lost server is tried again: at first, and at most."""
PERIOD = 0.25
"""Seconds between two looks at the servers."""
LOG_EVERY = 30.0
"""Seconds without an answer of a server that has requests, after which, and then again, a line says so."""
NEVER = 7 * 86400.0
"""Deadline of a single request, in seconds: whether a server hangs is told by all of its requests together."""


@dataclass(eq=False)
class Server:
    """One server. `weights` is the name of the weights that it was last seen to hold, `why` says what happened to it
    last, `load` is the completions that it works on, `heard` when it last answered a request, or had none, and `said`
    when a line last said that it has not.

    It is `ready` with the run's weights, `behind` when it answers and holds others, else `lost`.
    """

    client: ServerClient
    info: ServerInfo | None = None
    state: Literal["ready", "behind", "lost"] = "lost"
    why: str = "not asked yet"
    weights: str | None = None
    load: int = 0
    tries: int = 0
    next_try: float = 0.0
    lost_at: float = 0.0
    heard: float = 0.0
    said: float = 0.0
    checked: float = 0.0
    check: asyncio.Task[None] | None = None
    running: set[asyncio.Future[EngineAnswer]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.client.url

    def describe(self) -> str:
        """Its url and what it does, or what happened to it."""
        if self.state == "ready":
            return f"{self.url}: {len(self.running)} request(s) on their way"
        tried = f"; tried {self.tries} time(s) since" if self.tries else ""
        return f"{self.url}: {self.why}{tried}"


@dataclass(eq=False)
class Waiting:
    """Work that has no server yet: `prefer` is the url that it would go to first, `avoid` those where it failed."""

    work: EngineRequest
    prefer: str | None
    avoid: Collection[str]
    place: asyncio.Future[Server]


class ServerPool:
    """The servers of a run.

    `bring_up(server)`, called in a thread, gives a server the run's weights and then calls `took`; None in a process
    that sends none. `ours(name)` says whether this run gave weights their name. `current` is the name of the newest;
    `adapted` says that requests go to the servers' adapter.
    `losses` counts servers that were lost, `recoveries` are those that came back, with the seconds between.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        limits: Limits,
        *,
        ours: Callable[[str], bool],
        bring_up: Callable[[Server], None] | None,
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.limits, self.ours, self.bring_up = limits, ours, bring_up
        self.current: str | None = None
        self.adapted = False
        self.updating = False
        self.losses = 0
        self.recoveries: list[tuple[str, float]] = []
        self._waiting: deque[Waiting] = deque()
        self._none_since: float | None = None
        self._keeper: Future[None] | None = None
        self._threads = ThreadPoolExecutor(len(self.servers) + 1, "mm_grpo-servers")

    # from any thread -------------------------------------------------------------------------

    def connect(self) -> None:
        """Find servers, for `wait_timeout` at most; one is enough, the others join when they answer.

        Raises ConfigError where one lacks what a run needs, or where none answers.
        """
        end = time.monotonic() + self.limits.wait_timeout
        for attempt in count():
            for future in [self._threads.submit(self._probe, server) for server in self.servers]:
                wait(future)
            if any(server.info is not None for server in self.servers):
                break
            if time.monotonic() > end:
                raise ConfigError(
                    f"rollout.server.urls: no server answers within {self.limits.wait_timeout:g} s "
                    f"(rollout.server.wait_timeout): {self.describe()}; start them with `mm-grpo serve`, or check the "
                    "addresses"
                )
            if attempt == 10:
                log.warning("rollout: waiting for a server: %s", self.describe())
            time.sleep(min(0.5, self.limits.wait_timeout / 10))
        for server in self.servers:
            if server.info is None:
                log.warning(
                    "rollout: going on without %s (%s); it joins when it answers", server.url, server.why
                )
        self._keeper = in_background(self._keep())

    def submit(self, work: EngineRequest, prefer: str | None = None) -> Future[EngineAnswer]:
        """The answer to `work`, of the server `prefer` where that one has room. Cancelling it aborts the request."""
        return in_background(self._answer(work, prefer))

    def submit_to(self, server: Server, work: EngineRequest) -> Future[EngineAnswer]:
        """The answer of this server and no other. Raises ServerUnreachable, after which it is lost."""
        return in_background(self._run(server, work))

    def model_of(self, info: ServerInfo) -> str:
        """The name that requests to a server ask for."""
        return (self.adapted and info.adapter) or info.model

    def ready(self) -> list[Server]:
        return [server for server in self.servers if server.state == "ready"]

    def answering(self) -> list[Server]:
        return [server for server in self.servers if server.state != "lost"]

    def check(self) -> None:
        """Ask the ready servers which weights they hold; one that is gone, or holds others (it was restarted), is not
        ready afterwards."""

        async def one(server: Server) -> None:
            try:
                self._require(server, await self._weights_of(server), server.weights, self.current)
            except ServerUnreachable as error:
                self._lose(server, error.reason)

        for future in [in_background(one(server)) for server in self.ready()]:
            wait(future)

    def took(self, server: Server, weights: str) -> None:
        """`server` has taken the weights of this name, the newest."""
        self._in_loop(self._admit, server, weights)

    def lose(self, server: Server, why: str) -> None:
        """Send `server` nothing until it has been tried again."""
        self._in_loop(self._lose, server, why)

    def _in_loop(self, change: Callable[[Server, str], None], server: Server, text: str) -> None:
        async def changed() -> None:
            change(server, text)

        wait(in_background(changed()))

    @contextmanager
    def update(self, weights: str) -> Iterator[None]:
        """While new weights are sent, named so: no lost server is taken in meanwhile."""
        self.updating = True
        try:
            self.current = weights
            yield
        finally:
            self.updating = False

    def wait_ready(self) -> None:
        """Wait until a server is ready, for `wait_timeout` at most: EngineError."""
        end = time.monotonic() + self.limits.wait_timeout
        while not self.ready():
            if time.monotonic() > end:
                raise EngineError(self._none_left())
            time.sleep(0.05)

    def describe(self) -> str:
        """Each server and what happened to it."""
        return "; ".join(server.describe() for server in self.servers)

    def close(self) -> None:
        """Stop looking after the servers."""
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None
        self._threads.shutdown(wait=False, cancel_futures=True)

    # one request -----------------------------------------------------------------------------

    async def _answer(self, work: EngineRequest, prefer: str | None) -> EngineAnswer:
        avoid: list[str] = []
        while True:
            server = await self._place(work, prefer, avoid)
            try:
                return await self._run(server, work)
            except ServerUnreachable as error:
                avoid.append(server.url)
                if len(avoid) > 3 + 2 * len(self.servers):
                    raise EngineError(
                        f"{work.uid}: servers failed {len(avoid)} times over one request, the last with: {error}. If "
                        "it is always this row, leave it out; else see the servers' own output"
                    ) from error
            finally:
                server.load -= work.sequences
                self._dispatch()

    async def _run(self, server: Server, work: EngineRequest) -> EngineAnswer:
        """The answer of one server under this run's weights. Raises ServerUnreachable, after which it is lost; so it is
        given up when the server is found to hang."""
        assert server.info is not None
        if not server.running:
            server.heard = server.checked = time.monotonic()
        task = asyncio.ensure_future(ask(server.client, self.model_of(server.info), work, NEVER))
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ServerUnreachable(server.url, server.why)
            answer = task.result()
            server.heard = time.monotonic()
            for name in {name for sequence in answer.sequences for _, name in sequence.versions}:
                self._require(server, name)
            return answer
        except ServerUnreachable as error:
            self._lose(server, error.reason)
            raise
        finally:
            server.running.remove(task)
            task.cancel()

    def _require(self, server: Server, found: str, *expected: str | None) -> None:
        """ServerUnreachable where weights that were found on a server are none of the expected ones, or not ours."""
        if not self.ours(found) or (expected and found not in expected):
            raise ServerUnreachable(
                server.url,
                f"it holds weights '{found}', not '{self.current}': it was restarted, or missed an update, or another "
                "run sends it weights",
            )

    async def _weights_of(self, server: Server) -> str:
        """The name of the weights that a server says it holds."""
        try:
            return await weights_name(server.client, self.limits.health_timeout)
        except ServerRefused as error:
            raise ServerUnreachable(server.url, error.reason) from error

    async def _place(self, work: EngineRequest, prefer: str | None, avoid: Collection[str]) -> Server:
        """A server with room for `work`, which then counts in its load."""
        waiting = Waiting(work, prefer, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._dispatch()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled() and waiting.place.done() and not waiting.place.exception():
                waiting.place.result().load -= work.sequences
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give waiting requests their places, in order."""
        while self._waiting:
            waiting = self._waiting[0]
            if not waiting.place.done():  # else it was given up
                server = self._server_for(waiting)
                if server is None:
                    return
                server.load += waiting.work.sequences
                waiting.place.set_result(server)
            self._waiting.popleft()

    def _server_for(self, waiting: Waiting) -> Server | None:
        most = MAX_SEQUENCES - waiting.work.sequences
        room = [server for server in self.ready() if server.load <= max(most, 0)]
        preferred = next((server for server in room if server.url == waiting.prefer), None)
        others = [server for server in room if server.url not in waiting.avoid]
        return preferred or min(others or room, key=lambda server: server.load, default=None)

    # looking after servers -------------------------------------------------------------------

    def _lose(self, server: Server, why: str) -> None:
        """Send a server nothing until it has been tried again."""
        if server.state != "lost":
            log.warning("rollout: %s is lost: %s", server.url, why)
            now = time.monotonic()
            self.losses += 1
            server.state, server.why, server.tries = "lost", why, 0
            server.lost_at, server.next_try = now, now + BACK_OFF[0]

    def _give_up(self, server: Server) -> None:
        """Send what a lost server will not answer any more to other servers."""
        for task in list(server.running):
            task.cancel()

    def _admit(self, server: Server, weights: str) -> None:
        """Send a server requests that holds the run's `weights`."""
        if server.state == "lost" and server.lost_at:
            seconds = time.monotonic() - server.lost_at
            self.recoveries.append((server.url, seconds))
            log.warning("rollout: %s is back after %.1f s", server.url, seconds)
        elif server.state == "lost":  # it did not answer when the run began
            log.warning("rollout: %s joins", server.url)
        server.state, server.why, server.tries, server.weights = "ready", "", 0, weights
        self._dispatch()

    def _probe(self, server: Server) -> None:
        """Find out what a server has. Raises ConfigError where that is not enough."""
        server.tries += 1
        try:
            server.info = probe(server.client, self.limits)
            server.state, server.why = "behind", "it has no weights of this run yet"
        except ServerUnreachable as error:
            server.why = error.reason

    async def _keep(self) -> None:
        """Look after all servers, until cancelled."""
        period = min(PERIOD, self.limits.health_timeout / 4)
        while True:
            now = time.monotonic()
            for server in self.servers:
                if server.state != "ready":
                    if now >= server.next_try and not self.updating and self.current is not None:
                        self._start(server, self._try(server))
                elif server.running:
                    if now - server.checked >= self.limits.health_timeout / 3:
                        self._start(server, self._health(server))
                    if now - max(server.heard, server.said) > LOG_EVERY:
                        server.said = now
                        log.warning(
                            "rollout: no answer for %.0f s: %s", now - server.heard, server.describe()
                        )
                    if now - server.heard > self.limits.timeout:
                        why = (
                            f"it answers /health, and none of its {len(server.running)} request(s) within "
                            f"{self.limits.timeout:g} s (rollout.server.timeout)"
                        )
                        self._lose(server, why)
                        self._give_up(server)
            self._give_up_waiting(now)
            await asyncio.sleep(period)

    def _start(self, server: Server, work: Coroutine[Any, Any, None]) -> None:
        """Run one check of a server, unless one is running."""
        if server.check is not None and not server.check.done():
            work.close()
        else:
            server.check = asyncio.ensure_future(work)

    async def _health(self, server: Server) -> None:
        try:
            await server.client.request("/health", method="GET", timeout=self.limits.health_timeout)
        except ServerError as error:
            self._lose(server, f"while it had requests: {error.reason}")
            self._give_up(server)
        server.checked = time.monotonic()

    async def _try(self, server: Server) -> None:
        """Take a server in again, with the run's weights where it holds others."""
        loop = asyncio.get_running_loop()
        server.tries += 1
        try:
            if server.info is None or server.state == "lost":  # it may have come back as another version
                server.info = await loop.run_in_executor(self._threads, probe, server.client, self.limits)
            found = await self._weights_of(server)
            if not self.ours(found):  # a new process
                self._give_up(server)
            # one that failed at the end of an update has the name already, and is paused still; one that was brought
            # up and holds something else has it too, and is known by who sent it
            known = found == self.current and (self.bring_up is None or server.weights == found)
            if known and not await is_paused(server.client, self.limits.health_timeout):
                if not self.updating:
                    self._admit(server, found)
            elif self.bring_up is None:
                server.why = f"it holds weights '{found}', and another process sends it '{self.current}'"
            else:
                await loop.run_in_executor(self._threads, self.bring_up, server)
        except Exception as error:  # what it is tried for must not end the keeper
            if not isinstance(error, (ServerError, ConfigError, EngineError, GuardStop)):
                log.exception("rollout: %s could not be taken in", server.url)
            server.why = error.reason if isinstance(error, ServerError) else str(error)
            if isinstance(error, ServerUnreachable):
                self._give_up(server)
        least, most = BACK_OFF
        server.next_try = time.monotonic() + min(most, least * 2 ** min(server.tries, 8))

    def _give_up_waiting(self, now: float) -> None:
        """EngineError for the requests that wait when no server has been ready for `wait_timeout`."""
        if self.ready() or not self._waiting:
            self._none_since = None
            return
        self._none_since = self._none_since or now
        if now - self._none_since > self.limits.wait_timeout:
            message = self._none_left()
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.place.done():
                    waiting.place.set_exception(EngineError(message))

    def _none_left(self) -> str:
        return (
            f"no server has been left to sample for {self.limits.wait_timeout:g} s (rollout.server.wait_timeout): "
            f"{self.describe()}. Start them again, and go on from the newest checkpoint with --resume"
        )
