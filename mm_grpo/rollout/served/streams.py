"""The other faces of a served engine: requests answered one by one, and one server alone for checks."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mm_grpo.rollout.engine import Follows, ReplicaLost, Request
from mm_grpo.rollout.served.client import ServerUnreachable
from mm_grpo.rollout.served.requests import raise_as_ours
from mm_grpo.rollout.vllm.requests import request_groups

if TYPE_CHECKING:
    from mm_grpo.rollout.served.engine import ServedEngine
    from mm_grpo.rollout.served.protocol import Answer, Work
    from mm_grpo.rollout.served.server import Server
    from mm_grpo.types import Completion, Prompt


FIRST = -1
"""Priority of a check: the learner waits for it, and samples of the next steps may have a whole step before it."""


@dataclass(frozen=True)
class Replica:
    """One server as an engine, for checks: `score` and `generate` raise ReplicaLost where it fails."""

    engine: ServedEngine
    server: Server

    @property
    def name(self) -> str:
        return self.server.url

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        engine, groups = self.engine, request_groups(requests)
        answers = [self._ask(engine.requests.sampled(group)) for group in groups]
        return [
            c
            for group, one in zip(groups, answers, strict=True)
            for c in engine.requests.completions(group, one)
        ]

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        return self.engine.requests.scores(
            prompt, token_ids, self._ask(self.engine.requests.scored(prompt, token_ids))
        )

    def _ask(self, work: Work) -> Answer:
        work = replace(work, priority=FIRST)
        try:
            return self.engine.all([self.engine.pool.submit_to(self.server, work)], [work])[0]
        except ServerUnreachable as error:
            raise ReplicaLost(str(error)) from error


class ServedStream:
    """A `RequestStream` over a `ServedEngine`. Raises what its `generate` raises, and gives the rest up then.

    A request that follows another one goes to the server that answered that: its prefix cache has the beginning.
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.running: dict[int, tuple[Request, Future[Answer]]] = {}
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._urls: dict[int, str] = {}
        self._count = 0

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        number, self._count = self._count, self._count + 1
        prefer = None if follows is None else self._urls.get(follows.number)
        future = self.engine.pool.submit(self.engine.requests.sampled([request]), prefer)
        self.running[number] = request, future
        future.add_done_callback(lambda _: self._done.put(number))
        return number

    def step(self) -> list[tuple[int, Completion]]:
        """The answers that have come; waits for the first."""
        if not self.running:
            return []
        numbers = [self._done.get()]
        with suppress(queue.Empty):
            while True:
                numbers.append(self._done.get_nowait())
        done = []
        for number in numbers:
            request, future = self.running.pop(number)
            if (error := future.exception()) is not None:
                raise_as_ours(error, request.prompt.uid)
            answer = future.result()
            self._urls[number] = answer.url
            done.append((number, self.engine.requests.completions([request], answer)[0]))
        return done

    def release(self, number: int) -> None:
        """Servers drop what they need room for."""
        self._urls.pop(number, None)

    def close(self) -> None:
        running, self.running = self.running, {}
        for _, future in running.values():
            future.cancel()

    def __enter__(self) -> ServedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
