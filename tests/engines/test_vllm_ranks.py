"""Two ranks under DeepSpeed ZeRO-2, each with an engine of its own: together they sample what one rank does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from vllm_rig import Rig

from mm_grpo.rollout.engine import Sampling, requests_for

RANK = """
import json, sys
import torch, torch.distributed as dist
from pathlib import Path
import deepspeed
deepspeed.init_distributed("gloo")
zero, *_ = deepspeed.initialize(
    model=torch.nn.Linear(4, 1), model_parameters=None,
    config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    },
)
from vllm_rig import Rig
from mm_grpo.rollout.engine import Sampling, requests_for
import tiny
rig, rank = Rig(Path(sys.argv[1])), dist.get_rank()
rows = []
for step in range(2):
    prompts = [rig.prompt(f"row-{i}", tiny.picture(i)) for i in range(4)][rank::2]
    seeds = [range(100 * (10 * step + i), 100 * (10 * step + i) + 4) for i in range(4)][rank::2]
    done = rig.engine.generate(requests_for(prompts, seeds, Sampling(12)))
    assert rig.gap(prompts, done) <= 1e-5
    rows += [(c.seed, list(c.token_ids)) for c in done]
    before = zero.module.weight.detach().clone()
    zero.backward(zero(torch.full((1, 4), float(rank + 1))).sum())
    zero.step()
    assert not torch.equal(before, zero.module.weight)
    rig.change("")
    rig.engine.update_weights(rig.tensors(), step + 1)
total = torch.ones(1)
dist.all_reduce(total)  # the trainer's own group still works
assert total.item() == 2
print("ROWS " + json.dumps(rows), flush=True)
dist.barrier()
"""


@pytest.mark.long
def test_two_ranks_sample_the_union_of_one(models: dict[str, Path]) -> None:
    path = models["qwen2_5_vl"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-c", RANK, str(path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=env, text=True, **pipes))
    try:
        answers = [process.communicate(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    lines = [next(x for x in out.splitlines() if x.startswith("ROWS ")) for out, _ in answers]
    rows = [(seed, tuple(ids)) for line in lines for seed, ids in json.loads(line[5:])]
    assert len({seed for seed, _ in rows}) == len(rows) == 32
    assert len({ids for _, ids in rows}) == 32  # distinct samples across ranks

    rig = Rig(path)
    alone: dict[int, tuple[int, ...]] = {}
    rig.reset()
    for step in range(2):
        prompts = [rig.prompt(f"row-{i}", tiny.picture(i)) for i in range(4)]
        seeds = [range(100 * (10 * step + i), 100 * (10 * step + i) + 4) for i in range(4)]
        done = rig.engine.generate(requests_for(prompts, seeds, Sampling(12)))
        alone |= {c.seed: c.token_ids for c in done}
        rig.change("")
        rig.engine.update_weights(rig.tensors(), step + 1)
    assert dict(rows) == alone
