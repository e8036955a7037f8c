"""An engine whose tokens are sampled and whose texts are written by a test: a tiny random model never calls a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mm_grpo.rollout.engine import Request, RolloutEngine
from mm_grpo.types import Completion


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ScriptedEngine:
    """Samples at most `tokens` tokens a turn from `engine`, and says that they mean `script(seed, turn)`.

    `seen` are the requests of each call.
    """

    def __init__(self, engine: RolloutEngine, script: Callable[[int, int], str], tokens: int = 6) -> None:
        self.engine, self.script, self.tokens = engine, script, tokens
        self.seen: list[list[Request]] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.seen.append(list(requests))
        short = [
            replace(r, sampling=replace(r.sampling, max_tokens=min(self.tokens, r.sampling.max_tokens)))
            for r in requests
        ]
        found = self.engine.generate(short)
        turn = len(self.seen) - 1
        return [replace(c, text=self.script(c.seed, turn), finish_reason="stop") for c in found]
