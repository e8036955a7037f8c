"""Loss weights against numbers worked by hand, and their independence of how an update is split."""

from __future__ import annotations

import pytest
import torch

from mm_grpo.algorithm.losses import LOSSES, token_weights

LENGTHS = torch.tensor([2, 4, 0, 10])  # the third is masked
TERMS = torch.tensor([1.0, -1.0, 9.0, 0.5])  # the same term for every token of a completion


@pytest.mark.parametrize(
    ("loss_type", "weights", "loss"),
    [
        # 1/(4*2), 1/(4*4), -, 1/(4*10): (1 - 1 + 0.5) / 4
        ("grpo", [0.125, 0.0625, None, 0.025], 0.125),
        # 16 tokens: (2 * 1 - 4 * 1 + 10 * 0.5) / 16
        ("dapo", [0.0625, 0.0625, None, 0.0625], 0.1875),
        ("bnpo", [0.0625, 0.0625, None, 0.0625], 0.1875),
        # 4 completions of at most 20: 3 / 80
        ("dr_grpo", [0.0125, 0.0125, None, 0.0125], 0.0375),
    ],
)
def test_weights_and_loss_by_hand(loss_type: str, weights: list[float | None], loss: float) -> None:
    got = token_weights(loss_type, LENGTHS, 20)
    assert [float(g) for g, w in zip(got, weights, strict=True) if w is not None] == pytest.approx(
        [w for w in weights if w is not None], abs=1e-12
    )
    assert float((got * LENGTHS * TERMS).sum()) == pytest.approx(loss, abs=1e-12)


def test_every_loss_type_of_the_config_is_there() -> None:
    from typing import get_args

    from mm_grpo.config import AlgorithmConfig

    assert set(LOSSES) == set(get_args(AlgorithmConfig.model_fields["loss_type"].annotation))
