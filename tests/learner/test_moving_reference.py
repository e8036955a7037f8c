"""A reference policy that moves, against the same moves in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.steps import learner_of, load, make_groups
from torch import Tensor, nn

from mm_grpo.learner.reference import MovingReference
from mm_grpo.learner.state import load_reference, reference_file

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@DTYPES
def test_small_moves_are_kept(dtype: torch.dtype) -> None:
    """40 moves of a tenth from 1 towards 1.0625 go 1 - 0.9^40 = 0.985 of the way; in bfloat16 alone they stop soon."""
    reference, policy = (nn.Linear(1, 1, bias=False).to(dtype) for _ in range(2))
    nn.init.constant_(reference.weight, 1.0)
    nn.init.constant_(policy.weight, 1.0625)
    moving = MovingReference(reference)
    for _ in range(40):
        moving.move(dict(policy.named_parameters()), 0.1)
    assert float(moving.masters["weight"]) == pytest.approx(1 + 0.0625 * (1 - 0.9**40), abs=1e-6)
    assert reference.weight.item() == float(moving.masters["weight"].to(dtype))


@DTYPES
def test_moves_of_a_learner_are_those_of_fp32_and_outlive_a_checkpoint(
    dtype: torch.dtype, models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["qwen2_vl"]
    moving: dict[str, Any] = {"beta": 0.2, "sync_ref_model": True, "ref_model_mixup_alpha": 0.05}
    learner = learner_of(path, load(path).to(dtype), algorithm=moving)
    assert learner.reference is not None and learner.moving is not None
    want = {name: weight.float() for name, weight in weights_of(learner.reference.model).items()}
    start = weights_of(learner.reference.model)
    learner.update(make_groups(learner.processor))
    for _ in range(5):
        for name, goal in weights_of(learner.model).items():
            want[name] = torch.lerp(want[name], goal.float(), 0.05)
        learner.refresh_reference()
    found = weights_of(learner.reference.model)
    assert all(torch.equal(found[name], master.to(dtype)) for name, master in want.items())
    assert any(not torch.equal(found[name], weight) for name, weight in start.items())

    reference_file(learner.moving).write(tmp_path / "reference.safetensors")
    other = learner_of(path, load(path).to(dtype), algorithm=moving)
    assert other.reference is not None and other.moving is not None
    load_reference(other.moving, tmp_path / "reference.safetensors")
    assert all(torch.equal(other.moving.masters[name], master) for name, master in want.items())
    for name, weight in weights_of(other.reference.model).items():
        assert torch.equal(weight, found[name])


def test_a_reference_that_stays_keeps_no_second_copy(models: dict[str, Path]) -> None:
    learner = learner_of(models["qwen2_vl"], algorithm={"beta": 0.2})
    assert learner.reference is not None and learner.moving is None
