"""An engine whose tokens are sampled and whose texts are written by a test: a tiny random model never calls a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mm_grpo.rollout.engine import BatchStream, Follows, Request, RolloutEngine
from mm_grpo.types import Completion


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ScriptedEngine:
    """Samples at most `tokens` tokens a turn from `engine`, and says that they mean `script(seed, turn)`. `seen` are
    the requests of each call."""

    def __init__(self, engine: RolloutEngine, script: Callable[[int, int], str], tokens: int = 6) -> None:
        self.engine, self.script, self.tokens = engine, script, tokens
        self.seen: list[list[Request]] = []

    def stream(self) -> BatchStream:
        return BatchStream(self.generate)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.seen.append(list(requests))
        short = [
            replace(r, sampling=replace(r.sampling, max_tokens=min(self.tokens, r.sampling.max_tokens)))
            for r in requests
        ]
        found = self.engine.generate(short)
        turn = len(self.seen) - 1
        return [replace(c, text=self.script(c.seed, turn), finish_reason="stop") for c in found]


class ScriptedStreamEngine:
    """As `ScriptedEngine`, over the stream of `engine`: each request is answered when it is done. `script(seed,
    turn)` gets the seed of a conversation's first turn, and so does `tokens(seed)`, the most tokens of its turns;
    `order` are (seed, turn) as they were answered."""

    def __init__(self, engine: Any, script: Callable[[int, int], str]) -> None:
        self.engine, self.script = engine, script
        self.tokens: Callable[[int], int] = lambda seed: 6
        self.order: list[tuple[int, int]] = []

    def stream(self) -> ScriptedStream:
        return ScriptedStream(self)


class ScriptedStream:
    def __init__(self, owner: ScriptedStreamEngine) -> None:
        self.owner, self.inner = owner, owner.engine.stream()
        self.turns: dict[int, tuple[int, int]] = {}

    @property
    def unfinished(self) -> int:
        count: int = self.inner.unfinished
        return count

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        seed, turn = (request.seed, -1) if follows is None else self.turns[follows.number]
        most = min(self.owner.tokens(seed), request.sampling.max_tokens)
        shorter = replace(request, sampling=replace(request.sampling, max_tokens=most))
        number: int = self.inner.add_request(shorter, follows)
        self.turns[number] = seed, turn + 1
        return number

    def step(self) -> list[tuple[int, Completion]]:
        done = self.inner.step()
        self.owner.order += [self.turns[number] for number, _ in done]
        script, turns = self.owner.script, self.turns
        return [(n, replace(c, text=script(*turns[n]), finish_reason="stop")) for n, c in done]

    def release(self, number: int) -> None:
        self.inner.release(number)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> ScriptedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
