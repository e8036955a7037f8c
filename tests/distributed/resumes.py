"""Run as a script in several processes: checkpoints written by some number of processes, read by another.

`resumes.py MODEL FOLDER` makes one step, writes FOLDER/checkpoints/step-000001, and makes a second one. Then
learners of other ZeRO stages resume from it, and from FOLDER/alone, and make the second step too; and from checkpoints
of stages 0 and 3. The weights after it go to FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import updates

from mm_grpo.distributed import ranks as distributed
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.paths import RunPaths


def case(optim: dict[str, Any], **fields: Any) -> dict[str, Any]:
    schedule = {"learning_rate": 0.01, "lr_scheduler_type": "linear", "warmup_steps": 1}
    return {"optimizer": "adamw", "config": {"optim": {**schedule, **optim}}, **fields}


CASES: dict[str, dict[str, Any]] = {
    "replicated": case({"zero_stage": 0}),
    "optimizer-shared": case({"zero_stage": 1}),
    "gradients-shared": case({"zero_stage": 2}),
    "offloaded": case({"zero_stage": 2, "offload_optimizer": True}),
    "weights-shared": case({"zero_stage": 3}),
}


def two_steps(path: Path, folder: Path, ranks: Ranks, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two steps with a checkpoint between them; the weights then."""
    learner, groups = updates.build(path, case, ranks)
    learner.update(groups)
    checkpoints = Checkpoints(RunPaths(folder), learner, learner.config)
    checkpoints.save(1, {"tokens_seen": 123})
    learner.update(groups)
    assert len([*checkpoints.folder.glob("step-*")]) == 1
    updates.close(learner)
    return updates.weights_of(learner)


def second_step(path: Path, folder: Path, ranks: Ranks, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The second step from the checkpoint; the weights at the end."""
    learner, groups = updates.build(path, case, ranks)
    checkpoints = Checkpoints(RunPaths(folder), learner, learner.config)
    found = checkpoints.newest()
    assert found is not None and found.step == 1 and found.extra == {"tokens_seen": 123}
    checkpoints.load(found)
    assert learner.optimizer.updates == learner.optimizer.adam_steps == 1
    learner.update(groups)
    updates.close(learner)
    return updates.weights_of(learner)


def main(path: str, folder: str) -> None:
    ranks = distributed.start("cpu", deadline=60.0)
    results = {"straight": two_steps(Path(path), Path(folder), ranks, CASES["gradients-shared"])}
    for name, each in CASES.items():
        results[f"from-two-{name}"] = second_step(Path(path), Path(folder), ranks, each)
        results[f"from-one-{name}"] = second_step(Path(path), Path(folder) / "alone", ranks, each)
    for name in ("replicated", "weights-shared"):  # both hold some weights whole in each process
        (work := Path(folder) / name).mkdir(exist_ok=True)
        results[f"straight-{name}"] = two_steps(Path(path), work, ranks, CASES[name])
        for other in (name, "gradients-shared"):
            results[f"{other}-from-{name}"] = second_step(Path(path), work, ranks, CASES[other])
    torch.save(results, Path(folder) / f"results-{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
