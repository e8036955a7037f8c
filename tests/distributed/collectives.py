"""Run as a script in two processes: the results of `Ranks`' collectives, and its errors when one process fails."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from mm_grpo.distributed import ranks as distributed
from mm_grpo.distributed.ranks import RankLost, Ranks
from mm_grpo.errors import ConfigError, DataError, GuardStop


def fails(ranks: Ranks, error: Exception) -> str:
    """What each process raises when the second one fails with `error`."""
    try:
        with ranks.fail_together("rewards"):
            if ranks.rank == 1:
                raise error
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def main(folder: str) -> None:
    ranks = distributed.start("cpu", deadline=60.0)
    tensors = [torch.full((2, 2), float(ranks.rank + 1)), torch.tensor(3.0)]
    ranks.all_reduce(tensors)
    with ranks.fail_together("all is well"):
        pass
    results = [
        ranks.all_gather("ab"[ranks.rank], "letters"),
        ranks.gather(ranks.rank, "numbers"),
        ranks.sum({"both": 1.5, f"only-{ranks.rank}": 2.0}, "sums"),
        ranks.max(ranks.rank, "largest") + ranks.broadcast(10 * (1 - ranks.rank), "the first's"),
        [
            ranks.shard(["s0", "s1", "s2"]),
            ranks.all_to_all([f"{ranks.rank} to {to}" * to for to in (0, 1)], "parcels"),
        ],
        [t.tolist() for t in tensors],
        fails(ranks, DataError("row 7 is bad")),
        fails(ranks, GuardStop("guard x: stop")),
        fails(ranks, ZeroDivisionError("division by zero")),
        fails(ranks, type("Special", (ConfigError,), {})("a subclass of one of ours")),
    ]
    hasty = replace(ranks, deadline=1.0).second()
    started = time.monotonic()
    if ranks.rank == 0:
        try:
            hasty.all_gather(1, "lengths")
        except RankLost as error:
            results.append([str(error), time.monotonic() - started])
    else:  # away until the other one has given up
        end = time.monotonic() + 120
        while not (Path(folder) / "results-0.txt").exists() and time.monotonic() < end:
            time.sleep(0.05)
    (Path(folder) / f"results-{ranks.rank}.txt").write_text(repr(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
