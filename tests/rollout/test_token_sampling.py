"""Drawing tokens: in parts of the rows to the bit as at once, within a bound of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_grpo.rollout import token_sampling
from mm_grpo.rollout.engine import Sampling
from mm_grpo.rollout.token_sampling import LOGIT_BYTES, sample

ROWS, WORDS = 13, 3000
WAYS = {
    "plain": Sampling(4, 0.7),
    "greedy": Sampling(4, 0.0),
    "truncated": Sampling(4, 1.0, top_p=0.9, top_k=500, min_p=1e-5, repetition_penalty=1.1),
}


class Bytes(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        sizes = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.alive.values()]
        self.most = max(self.most, sum(s.nbytes() for s in sizes if s is not None))
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_sampling_in_parts_is_exact(way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, WORDS, generator=generator)).to(dtype)
    noise = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    context = [list(range(i, i + 9)) for i in range(ROWS)] if way == "truncated" else None
    at_once = sample(logits.clone(), noise, WAYS[way], [5, 7], context)
    assert len(set(at_once[0].tolist())) > 3
    bound = 2 * WORDS * LOGIT_BYTES + 100  # two rows
    monkeypatch.setattr(token_sampling, "PART_BYTES", bound)
    given = logits.clone()
    with Bytes() as memory:
        parts = sample(given, noise, WAYS[way], [5, 7], context)
    assert torch.equal(parts[0], at_once[0]) and torch.equal(parts[1], at_once[1])
    assert parts[1].dtype == torch.float32
    own = given.nbytes if dtype == torch.float32 else 0  # whose parts are views of what came
    assert memory.most - own < bound + 100 * ROWS
