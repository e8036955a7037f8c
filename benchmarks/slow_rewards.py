"""The rewards of overlap.py, which worker processes import: each takes `seconds` a call."""

from __future__ import annotations

import asyncio
import time


def waits(completion: str, *, seconds: float = 0.05) -> float:
    time.sleep(seconds)
    return float(len(completion) % 7)


def computes(completion: str, *, seconds: float = 0.05) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return float(len(completion) % 7)


async def awaits(completion: str, *, seconds: float = 0.05) -> float:
    await asyncio.sleep(seconds)
    return float(len(completion) % 7)
