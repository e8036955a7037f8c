"""Run as a script by a launcher: processes that join and do next to nothing, in place of whole trainings.

`peers.py FOLDER` joins the others, compares the launcher with our defaults and writes FOLDER/rank-N.json. With
`peers.py FOLDER MODE` each process then ends as `mm-grpo` does, in one of these ways:

    loop        exchanges objects and gradients for ever; FOLDER/exchanged is there after the first time
    guard       every process raises the same GuardStop, the first one after it has written FOLDER/report
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm_grpo.cli import main
from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.accelerate_env import check_launcher
from mm_grpo.distributed.ranks import Ranks, start
from mm_grpo.errors import GuardStop

DEADLINE = 15.0
"""Seconds that a process waits for the others, to join them."""
LOOP_DEADLINE = 6.0
"""The same while they exchange objects."""


def join(folder: Path) -> Ranks:
    ranks = start("cpu", DEADLINE)
    check_launcher(GRPOConfig.from_dict({"model": {"path": "x"}}), torch.device("cpu"), torch.float32)
    total = torch.tensor([float(ranks.rank + 1)])
    ranks.all_reduce([total])
    answer = {
        "rank": ranks.rank,
        "world": ranks.world,
        "ranks": ranks.all_gather(ranks.rank, "ranks"),
        "sum": total.item(),
        "local": os.environ.get("LOCAL_RANK"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "arguments": sys.argv[2:],
    }
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(answer))
    return ranks


def loop(folder: Path, ranks: Ranks) -> None:
    ranks = replace(ranks, deadline=LOOP_DEADLINE).second()
    while True:
        ranks.all_gather("x", "lengths")
        dist.all_reduce(torch.ones(1))  # as DeepSpeed does: what fails here is gloo's own error
        (folder / "exchanged").touch()


def guard(folder: Path, ranks: Ranks) -> None:
    try:
        with ranks.fail_together("guards"):
            raise GuardStop("guard logp_gap: too far")
    finally:
        if ranks.first:
            time.sleep(1)
            (folder / "report").write_text("whole")


MODES: dict[str, Callable[[Path, Ranks], None]] = {"loop": loop, "guard": guard}


def command(_: list[str]) -> None:
    """In place of the commands of `mm-grpo`, whose `main` handles errors and exit codes."""
    folder, mode = Path(sys.argv[1]), MODES.get("".join(sys.argv[2:3]))
    ranks = join(folder)
    if mode is not None:
        mode(folder, ranks)


def joined(folder: Path) -> list[dict[str, Any]]:
    """What the processes wrote, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


if __name__ == "__main__":
    sys.modules["mm_grpo.cli.main"].app = command  # type: ignore[attr-defined]
    main()
