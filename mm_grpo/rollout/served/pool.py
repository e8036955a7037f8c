"""Several servers as one: which of them a request goes to, and what becomes of it when that one fails.

A request goes to the server with the fewest completions on their way, each server has MAX_SEQUENCES of them at most,
and the rest wait here without their bodies, so a thousand requests take the memory of those that are sent.

A server is `lost` when it refuses a connection, cuts one, answers 5xx or under other weights than the run's, or answers
none of its requests for `timeout`. All its requests go to other servers as they were, seeds included. It is tried again
every RETRY seconds. When it answers and holds other weights than the run's (it was restarted), it gets those before it
gets a request. All state is touched in the thread of the clients alone (client.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from mm_grpo.errors import ConfigError, EngineError, GuardStop
from mm_grpo.rollout.served.client import ServerClient, ServerError, ServerUnreachable, in_background, wait
from mm_grpo.rollout.served.protocol import Limits, ask, probe, weights_name
from mm_grpo.rollout.vllm.adapters import NAME
from mm_grpo.rollout.vllm.requests import EngineAnswer, EngineRequest

log = logging.getLogger(__name__)

MAX_SEQUENCES = 256
"""Completions that a server works on at once."""
RETRY = 3.0
"""Seconds between two tries of a lost server."""
PERIOD = 0.25
"""Seconds between two looks at the servers."""
NEVER = 7 * 86400.0
"""Deadline of a single request, in seconds: whether a server hangs is told by all of its requests together."""


@dataclass(eq=False)
class Server:
    """One server. `model` names what it serves, `weights` those that it was last admitted with, `why` says what
    happened to it last, `load` is the completions that it works on, `heard` when it last answered a request, or had
    none.

    It is `ready` with the run's weights, `behind` when it answers and holds others, else `lost`.
    """

    client: ServerClient
    model: str | None = None
    state: Literal["ready", "behind", "lost"] = "lost"
    why: str = "not asked yet"
    weights: str | None = None
    load: int = 0
    next_try: float = 0.0
    heard: float = 0.0
    trying: asyncio.Task[None] | None = None
    running: set[asyncio.Future[EngineAnswer]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.client.url

    def describe(self) -> str:
        """Its url and what it does, or what happened to it."""
        working = f"{len(self.running)} request(s) on their way"
        return f"{self.url}: {working if self.state == 'ready' else self.why}"


class ServerPool:
    """The servers of a run.

    `bring_up(server)`, called in a thread, gives a server the run's weights and then calls `took`; None in a process
    that sends none. `current` is the name of the newest weights; `adapted` says that requests go to the servers'
    adapter. `losses` counts servers that were lost.
    """

    def __init__(
        self, clients: Sequence[ServerClient], limits: Limits, *, bring_up: Callable[[Server], None] | None
    ) -> None:
        self.servers = [Server(client) for client in clients]
        self.limits, self.bring_up = limits, bring_up
        self.current: str | None = None
        self.adapted = False
        self.updating = self.closed = False
        self.losses = 0
        self._waiting: deque[tuple[int, asyncio.Future[Server]]] = deque()  # with the completions of each
        self._none_since: float | None = None
        self._keeper: Future[None] | None = None
        self._threads = ThreadPoolExecutor(len(self.servers) + 1, "mm_grpo-servers")

    # from any thread -------------------------------------------------------------------------

    def connect(self) -> None:
        """Find servers, for `wait_timeout` at most; one is enough, the others join when they answer.

        Raises ConfigError where one lacks what a run needs, or where none answers.
        """
        end = time.monotonic() + self.limits.wait_timeout
        self._probe_all()
        if not self.answering():
            log.warning("rollout: waiting for a server: %s", self.describe())
        while not self.answering():
            if time.monotonic() > end:
                raise ConfigError(
                    f"rollout.server.urls: no server answers within {self.limits.wait_timeout:g} s "
                    f"(rollout.server.wait_timeout): {self.describe()}; start them with `mm-grpo serve`, or check the "
                    "addresses"
                )
            time.sleep(min(0.5, self.limits.wait_timeout / 10))
            self._probe_all()
        for server in self.servers:
            if server.model is None:
                log.warning(
                    "rollout: going on without %s (%s); it joins when it answers", server.url, server.why
                )
        self._keeper = in_background(self._keep())

    def submit(self, work: EngineRequest) -> Future[EngineAnswer]:
        """The answer to `work`, of any server. Cancelling it aborts the request."""
        return in_background(self._answer(work))

    def submit_to(self, server: Server, work: EngineRequest) -> Future[EngineAnswer]:
        """The answer of this server and no other. Raises ServerUnreachable, after which it is lost."""
        return in_background(self._run(server, work))

    def ready(self) -> list[Server]:
        return [server for server in self.servers if server.state == "ready"]

    def answering(self) -> list[Server]:
        return [server for server in self.servers if server.state != "lost"]

    def check(self) -> None:
        """Lose the ready servers that are gone, or hold other weights than the run's because they were restarted."""

        async def one(server: Server) -> None:
            try:
                self._require(server, await weights_name(server.client, self.limits.probe_timeout))
            except ServerError as error:
                self._lose(server, error.reason)

        for future in [in_background(one(server)) for server in self.ready()]:
            wait(future)

    def took(self, server: Server) -> None:
        """`server` has taken the newest weights."""
        self._in_loop(self._admit, server)

    def lose(self, server: Server, why: str) -> None:
        """Send `server` nothing until it has been tried again."""
        self._in_loop(self._lose, server, why)

    def _in_loop(self, change: Callable[..., object], *given: Any) -> None:
        async def changed() -> None:
            change(*given)

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
            for server in self.servers:  # a try would go on in threads that are gone
                self._in_loop(lambda s: s.trying and s.trying.cancel(), server)
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    # one request -----------------------------------------------------------------------------

    async def _answer(self, work: EngineRequest) -> EngineAnswer:
        failures = 0
        while True:
            server = await self._place(work)
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
        """The answer of one server under the run's weights. Raises ServerUnreachable where it is lost."""
        assert server.model is not None
        if not server.running:
            server.heard = time.monotonic()
        task = asyncio.ensure_future(ask(server.client, NAME if self.adapted else server.model, work, NEVER))
        server.running.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise ServerUnreachable(server.url, server.why)
            try:
                answer = task.result()
            except ServerError as error:
                if not isinstance(error, ServerUnreachable):  # it may have been restarted, with another model
                    self._require(server, await weights_name(server.client, self.limits.probe_timeout))
                raise
            server.heard = time.monotonic()
            self._require(server, answer.weights)
            return answer
        except ServerUnreachable as error:
            self._lose(server, error.reason)
            raise
        finally:
            server.running.remove(task)
            task.cancel()

    def _require(self, server: Server, found: str) -> None:
        """ServerUnreachable where weights that were found on a server are not the run's newest."""
        if found != self.current:
            raise ServerUnreachable(
                server.url,
                f"it holds weights '{found}', not '{self.current}': it was restarted, or missed an update, or another "
                "run sends it weights",
            )

    async def _place(self, work: EngineRequest) -> Server:
        """A server with room for `work`, which then counts in its load."""
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
        """Give waiting requests their places, in order."""
        while self._waiting:
            sequences, place = self._waiting[0]
            if not place.done():  # else it was given up
                most = max(MAX_SEQUENCES - sequences, 0)
                room = [server for server in self.ready() if server.load <= most]
                if not room:
                    return
                server = min(room, key=lambda server: server.load)
                server.load += sequences
                place.set_result(server)
            self._waiting.popleft()

    # looking after servers -------------------------------------------------------------------

    def _lose(self, server: Server, why: str) -> None:
        """Send a server nothing until it has been tried again, and what it has to other servers."""
        if server.state != "lost":
            log.warning("rollout: %s is lost: %s", server.url, why)
            self.losses += 1
            server.state, server.why = "lost", why
            server.next_try = time.monotonic() + RETRY
            for task in list(server.running):
                task.cancel()

    def _admit(self, server: Server) -> None:
        """Send a server requests that holds the newest weights."""
        if server.state == "lost":
            log.warning("rollout: %s joins", server.url)
        server.state, server.why, server.weights = "ready", "", self.current
        self._dispatch()

    def _probe_all(self) -> None:
        for future in [self._threads.submit(self._probe, server) for server in self.servers]:
            wait(future)

    def _probe(self, server: Server) -> None:
        """Find out what a server has. Raises ConfigError where that is not enough."""
        try:
            server.model = probe(server.client, self.limits)
            server.state, server.why = "behind", "it has no weights of this run yet"
        except ServerUnreachable as error:
            server.why = error.reason

    async def _keep(self) -> None:
        """Look after all servers, until cancelled."""
        while True:
            now, limit = time.monotonic(), self.limits.timeout
            for server in self.servers:
                if server.state == "ready":
                    if server.running and now - server.heard > limit:
                        what = f"none of its {len(server.running)} request(s) within {limit:g} s"
                        self._lose(server, f"it has answered {what} (rollout.server.timeout)")
                elif now >= server.next_try and not self.updating and self.current is not None:
                    server.next_try = math.inf  # until this one has ended
                    server.trying = asyncio.ensure_future(self._try(server))
            self._give_up_waiting(now)
            await asyncio.sleep(PERIOD)

    async def _try(self, server: Server) -> None:
        """Take a server in again, with the run's weights where it holds others."""
        loop = asyncio.get_running_loop()
        try:
            if server.model is None or server.state == "lost":  # it may have come back as another version
                server.model = await loop.run_in_executor(self._threads, probe, server.client, self.limits)
            found = await weights_name(server.client, self.limits.probe_timeout)
            # one that was brought up and holds something else has the name too, and is known by who sent it
            if found == self.current and (self.bring_up is None or server.weights == found):
                if not self.updating:
                    self._admit(server)
            elif self.bring_up is None:
                server.why = f"it holds weights '{found}', and another process sends it '{self.current}'"
            else:
                await loop.run_in_executor(self._threads, self.bring_up, server)
        except Exception as error:  # what it is tried for must not end the keeper
            if not isinstance(error, (ServerError, ConfigError, EngineError, GuardStop)):
                log.exception("rollout: %s could not be taken in", server.url)
            server.why = error.reason if isinstance(error, ServerError) else str(error)
        server.next_try = time.monotonic() + RETRY

    def _give_up_waiting(self, now: float) -> None:
        """EngineError for the requests that wait when no server has been ready for `wait_timeout`."""
        if self.ready() or not self._waiting:
            self._none_since = None
            return
        self._none_since = self._none_since or now
        if now - self._none_since > self.limits.wait_timeout:
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
