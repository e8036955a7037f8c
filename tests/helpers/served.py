"""Engines over servers without a model (fake_vllm.py), requests to them, and faults in their midst."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from helpers import tiny
from helpers.fake_vllm import FakeVLLM, Processor, prompt_of
from helpers.patience import until
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.engine import ServedEngine
from mm_grpo.rollout.served.server import Limits
from mm_grpo.rollout.served.transfer import transfer_of
from mm_grpo.types import Completion

FIVE = Sampling(max_tokens=5)
WEIGHTS = {
    "a.q.weight": torch.arange(6.0).view(2, 3),
    "a.k.weight": torch.ones(2),
    "b.weight": torch.zeros(4),
}
Made = Callable[..., tuple[ServedEngine, list[FakeVLLM]]]


def engine_over(
    held: ExitStack,
    count: int = 2,
    *,
    send: bool = True,
    transfer: Any = None,
    servers: Any = None,
    key: str = "",
    **limits: Any,
) -> tuple[ServedEngine, list[FakeVLLM]]:
    """An engine over fakes that hold WEIGHTS as version 0, unless `send` is false; `held` closes it."""
    fakes: list[FakeVLLM] = servers or [FakeVLLM() for _ in range(count)]
    for fake in fakes:
        held.callback(fake.kill)
    given = {"health_timeout": 1.0, "wait_timeout": 60.0, "max_model_len": 100, **limits}
    engine = ServedEngine(
        [ServerClient(fake.url, key=key, timeout=5, connect_timeout=5) for fake in fakes],
        transfer or transfer_of("file", timeout=5.0),
        Processor(),  # type: ignore[arg-type]
        limits=Limits(**given),
        max_images=2,
    )
    held.callback(engine.close)
    if send:
        engine.update_weights(WEIGHTS.items(), 0)
        if all(fake.alive for fake in fakes):
            back(engine)  # one that was too slow to be there at the start
        engine.pool.recoveries.clear()
    return engine, fakes


def requests(prompts: int = 12, each: int = 4, first: int = 0) -> list[Request]:
    made = [prompt_of(f"row-{i}", f"say {i}", tiny.picture(i % 5, 8, 8)) for i in range(prompts)]
    return requests_for(made, [range(first + 100 * i, first + 100 * i + each) for i in range(prompts)], FIVE)


def in_midst(engine: ServedEngine, fakes: list[FakeVLLM], fault: Callable[[], None]) -> list[Completion]:
    """The completions of a step, in which a fault comes when servers are at work."""
    for fake in fakes:
        fake.delay = 0.1
    begun = len(fakes[0].asked)

    def later() -> None:
        until(lambda: len(fakes[0].asked) > begun)
        fault()

    thread = threading.Thread(target=later)
    thread.start()
    try:
        return engine.generate(requests())
    finally:
        thread.join()


def back(engine: ServedEngine) -> None:
    until(lambda: len(engine.pool.ready()) == len(engine.pool.servers), engine.pool.describe())


def cut(fake: FakeVLLM) -> None:
    fake.cut = 2


def fail(fake: FakeVLLM) -> None:
    fake.status = 2


def restart(fake: FakeVLLM) -> None:
    fake.kill()
    fake.restart()


def stop_and_go(fake: FakeVLLM) -> None:
    fake.stopped.set()
    threading.Timer(1.8, fake.stopped.clear).start()
