"""Faults of servers and of the learner in the midst of a run, as a table: what happens, at which request, and its end.

A fault is `begin(world, number)`, of which `number` is the server that it happens to, and `end`, called `lasts` seconds
later. It begins once a request whose path ends with `at` is on its way through that server's proxy; "" is between two
steps, while nothing is asked. To add one: a line in FAULTS.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.launch import ServerProcess
from mm_grpo.rollout.served.transfer import FileTransfer
from robustness.http_proxy import Proxy

GENERATE, UPDATE, FINISH = "/generate", "/update_weights", "/finish_weight_update"
TIMEOUT = 12.0
HEALTH_TIMEOUT = TIMEOUT / 3
"""Those of the run, in seconds."""


class World(Protocol):
    """What a fault may touch."""

    servers: list[ServerProcess]
    proxies: list[Proxy]

    def signal_learner(self, number: int) -> None: ...


Act = Callable[[Any, int], None]


@dataclass(frozen=True)
class Fault:
    name: str
    at: str
    begin: Act
    end: Act = lambda world, number: None
    lasts: float = 0.0


def kill(world: World, number: int) -> None:
    """End a server at once, with all that it started; `serve` starts it anew."""
    _send(world.servers[number].pid, signal.SIGKILL)


def kill_both(world: World, number: int) -> None:
    for each in range(len(world.servers)):
        kill(world, each)


def kill_engine(world: World, number: int) -> None:
    """End what a server started, and not the process that answers."""
    pid = world.servers[number].pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def stop(world: World, number: int) -> None:
    _send(world.servers[number].pid, signal.SIGSTOP)


def go_on(world: World, number: int) -> None:
    _send(world.servers[number].pid, signal.SIGCONT)


def _send(group: int | None, number: int) -> None:
    if group is not None:
        with suppress(ProcessLookupError):
            os.killpg(group, number)


def proxy(**values: Any) -> Act:
    def begin(world: World, number: int) -> None:
        for name, value in values.items():
            setattr(world.proxies[number], name, value)

    return begin


def heal(world: World, number: int) -> None:
    world.proxies[number].heal()


def refuse(world: World, number: int) -> None:
    world.proxies[number].refuse()


def accept(world: World, number: int) -> None:
    world.proxies[number].accept()


def reset(world: World, number: int) -> None:
    world.proxies[number].reset()


def close(world: World, number: int) -> None:
    world.proxies[number].closing = True
    world.proxies[number].reset()


def rename(world: World, number: int) -> None:
    """Give a server's weights another run's name, as another run's update would."""
    client, another = ServerClient(world.servers[number].url, timeout=30), FileTransfer(timeout=30.0)
    another.send([client], [], 3)
    another.close()
    client.close()


def learner(number: int) -> Act:
    return lambda world, _: world.signal_learner(number)


def both_ends(world: World, number: int) -> None:
    world.signal_learner(signal.SIGKILL)
    kill(world, number)


def silent_both(world: World, number: int) -> None:
    for each in world.proxies:
        each.silent = True


def heal_both(world: World, number: int) -> None:
    for each in world.proxies:
        each.heal()


FAULTS = (
    Fault("a server is killed (SIGKILL), and started anew", GENERATE, kill),
    Fault("stopped (SIGSTOP) for 9 s", GENERATE, stop, go_on, 9.0),
    Fault("stopped for 2 s", GENERATE, stop, go_on, 2.0),
    Fault("cut off: nothing passes for 9 s, connections stay open", GENERATE, proxy(silent=True), heal, 9.0),
    Fault("both cut off so for 9 s", GENERATE, silent_both, heal_both, 9.0),
    Fault("all connections reset", GENERATE, reset),
    Fault("connections refused for 5 s", GENERATE, refuse, accept, 5.0),
    Fault("connections accepted and reset for 5 s", GENERATE, close, heal, 5.0),
    Fault("an answer cut in its middle", GENERATE, proxy(halved=GENERATE, times=1), heal, 4.0),
    Fault("every answer 503 for 4 s", GENERATE, proxy(status={"": 503}), heal, 4.0),
    Fault("one answer 500", GENERATE, proxy(status={GENERATE: 500}, times=1), heal, 4.0),
    Fault("one answer 429", GENERATE, proxy(status={GENERATE: 429}, times=1), heal, 4.0),
    Fault(
        "an answer that is a page of HTML, with 200", GENERATE, proxy(garbled=GENERATE, times=1), heal, 4.0
    ),
    Fault("slow: every answer 1.5 s late, for 6 s", GENERATE, proxy(delay=1.5), heal, 6.0),
    Fault("answers /health, and no request for 16 s", GENERATE, proxy(held=True), heal, 16.0),
    Fault("its weights get another run's name", GENERATE, rename),
    Fault("the learner is killed, and resumed", GENERATE, learner(signal.SIGKILL)),
    Fault("the learner is ended (SIGTERM), and resumed", GENERATE, learner(signal.SIGTERM)),
    Fault("a server killed", UPDATE, kill),
    Fault("stopped for 13 s", UPDATE, stop, go_on, 13.0),
    Fault("cut off for 13 s", UPDATE, proxy(silent=True), heal, 13.0),
    Fault("503 for 4 s", UPDATE, proxy(status={UPDATE: 503, FINISH: 503}), heal, 4.0),
    Fault("all connections reset", UPDATE, reset),
    Fault("connections reset", FINISH, reset),
    Fault("the learner is killed, and resumed", UPDATE, learner(signal.SIGKILL)),
    Fault("a server killed", "", kill),
    Fault("its engine alone is killed, the process that answers is not", GENERATE, kill_engine),
    Fault("both servers killed at once", GENERATE, kill_both),
    Fault("the learner and a server killed", GENERATE, both_ends),
)
