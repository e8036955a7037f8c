"""Two ranks under DeepSpeed ZeRO-2, each with an engine of its own: together they sample what one rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import forkserver, processes, tiny
from vllm_rig import Rig

from mm_grpo.rollout.engine import Sampling, requests_for

SCRIPT = """
import json, sys
sys.path.append("tests/engines")
import torch, torch.distributed as dist
from pathlib import Path
from mm_grpo.distributed import ranks
ranks.start("cpu")  # as a run joins its processes
deepspeed = ranks.use_deepspeed(gpu=False)
zero, *_ = deepspeed.initialize(
    model=torch.nn.Linear(4, 1), model_parameters=None,
    config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    },
)
from vllm_rig import Rig
from mm_grpo.rollout.engine import Sampling, requests_for
from helpers import tiny
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
    rig.send(step + 1)
total = torch.ones(1)
dist.all_reduce(total)  # the trainer's own group still works
assert total.item() == 2
print("ROWS " + json.dumps(rows), flush=True)
dist.barrier()
"""


@pytest.mark.long
def test_two_ranks_sample_the_union_of_one(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    codes = processes.launch(script, 2, [path], tmp_path, deadline=500, preload=forkserver.VLLM)
    assert codes == [0, 0], processes.outputs(tmp_path, 2)
    written = [(tmp_path / f"rank-{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    lines = [next(x for x in said if x.startswith("ROWS ")) for said in written]
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
        rig.send(step + 1)
    assert dict(rows) == alone
