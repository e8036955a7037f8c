"""The mask of high-entropy tokens, by hand and against TRL's."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mm_grpo.algorithm.masks import entropy_threshold, top_entropy_mask

ENTROPIES = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7])


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        # floor(share * 4) + 1 of five tokens
        (1.0, [True, True, True, True, True]),
        (0.75, [False, True, True, True, True]),
        (0.5, [False, True, True, False, True]),
        (0.4, [False, True, False, False, True]),
        (0.2, [False, True, False, False, False]),
        (1e-6, [False, True, False, False, False]),
    ],
)
def test_the_top_entropy_mask_by_hand(share: float, kept: list[bool]) -> None:
    assert top_entropy_mask(ENTROPIES, share).tolist() == kept


def test_the_entropy_threshold_by_hand() -> None:
    assert entropy_threshold(ENTROPIES, 0.5) == pytest.approx(0.5)
    assert entropy_threshold(torch.zeros(0), 0.5) == math.inf
    # 0.29 * 100 is 28.999999999999996: 30 of 101 tokens all the same, from the 72nd, which is 71
    assert entropy_threshold(torch.arange(101.0), 0.29) == 71.0


def test_ties_that_were_rounded_apart_stay_together() -> None:
    tied = torch.tensor([0.5, 0.2, 0.5 - 1e-6, 0.5 + 1e-6, 0.49998])
    assert top_entropy_mask(tied, 0.01).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("share", [0.1, 0.29, 0.8])
@pytest.mark.parametrize("ties", [False, True])
def test_the_top_entropy_mask_is_trls(share: float, ties: bool) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed; it is among requirements/cpu.txt")
    accelerator = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    trainer = SimpleNamespace(accelerator=accelerator)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        entropies = 3 * torch.rand(7, 11 + seed, generator=generator)
        entropies = (entropies * 4).round() / 4 if ties else entropies
        active = torch.rand(entropies.shape, generator=generator) < 0.7
        want = trl.GRPOTrainer.get_high_entropy_mask(trainer, entropies, active.int(), 1 - share)
        assert torch.equal(top_entropy_mask(entropies[active], share), want[active]), (share, seed)
        assert not want[~active].any()
