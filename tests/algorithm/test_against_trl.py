"""Every loss that TRL defines too equals TRL's own `_compute_loss`, value and gradient, on random inputs."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.algorithm.masks import top_entropy_mask
from mm_grpo.config import AlgorithmConfig
from mm_grpo.learner.loss import LossInputs, PackTokens, pack_loss
from mm_grpo.learner.step_report import LossStatistics

trl = pytest.importorskip("trl", reason="trl is not installed; it is among requirements/cpu.txt")

ROWS, WIDTH, LIMIT = 6, 9, 12
MASK = (torch.arange(WIDTH) < torch.tensor([9, 4, 1, 6, 7, 3])[:, None]).int()


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logp = -2 + 0.7 * noise(ROWS, WIDTH)
    return {
        "logp": logp,
        "old": logp + 0.4 * noise(ROWS, WIDTH),
        "sampling": logp + 0.4 * noise(ROWS, WIDTH),
        "ref": logp + 0.4 * noise(ROWS, WIDTH),
        "entropy": noise(ROWS, WIDTH).abs(),
        "advantages": noise(ROWS),
    }


def theirs(config: AlgorithmConfig, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's loss and its gradients to log-probs and entropies."""
    from trl import GRPOTrainer

    logp, entropy = (given[k].clone().requires_grad_() for k in ("logp", "entropy"))
    corrected = config.importance_sampling_mode not in ("none", "auto")
    batch = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.long),
        "completion_mask": MASK,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "sampling_per_token_logps": given["sampling"],
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": MASK.sum(),
    }
    if corrected:
        batch["importance_sampling_ratio"] = weights_as_trl(config, given)
    trainer: Any = SimpleNamespace(
        **{k: getattr(config, k) for k in ("importance_sampling_level", "beta", "loss_type", "entropy_coef")},
        args=SimpleNamespace(
            **{k: v for k, v in config.model_dump().items() if k.startswith(("sapo_", "vespo_"))},
            delta=config.delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        top_entropy_quantile=config.top_entropy_quantile,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, **_: x,
            sync_gradients=True,
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=config.entropy_coef > 0,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, entropy, None),
    )
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    trainer_class = GRPOTrainer
    if config.loss_type == "gmpo":
        from trl.experimental.gmpo import GMPOTrainer as trainer_class
    loss = trainer_class._compute_loss(trainer, None, batch)
    loss.backward()
    return loss.detach(), filled(logp.grad), filled(entropy.grad)


def filled(grad: Tensor | None) -> Tensor:
    return torch.zeros(ROWS, WIDTH) if grad is None else grad * MASK


def weights_as_trl(config: AlgorithmConfig, given: dict[str, Tensor]) -> Tensor:
    """TRL's mismatch ratios, written out from its formula: [rows, width] or [rows, 1]."""
    gap = (given["old"] - given["sampling"]) * MASK
    ratio = (gap.sum(-1, keepdim=True) if "sequence" in config.importance_sampling_mode else gap).exp()
    low, high = config.importance_sampling_clip_min or 0.0, config.importance_sampling_clip_max or torch.inf
    if config.importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def ours(config: AlgorithmConfig, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Our loss over the same tokens, flat and in two packs, and its gradients."""
    logp, entropy = (given[k].clone().requires_grad_() for k in ("logp", "entropy"))
    lengths = MASK.sum(1)
    chosen, active = MASK.bool(), MASK.bool()
    chosen[active] = top_entropy_mask(given["entropy"][active], config.top_entropy_quantile)
    weights = LOSSES[config.loss_type].weights(lengths, LIMIT)
    loss_inputs = LossInputs(given["advantages"].double(), weights, int(chosen.sum()))
    statistics, total = LossStatistics(), torch.zeros(())
    for rows in ([3, 1, 5], [0, 4, 2]):
        keep = MASK[rows].bool()
        completion_index = torch.tensor(rows)[:, None].expand(-1, WIDTH)[keep]

        def picked(values: Tensor, rows: list[int] = rows, keep: Tensor = keep) -> Tensor:
            return values[rows][keep]

        tokens = PackTokens(
            completion_index,
            picked(logp),
            picked(entropy),
            picked(given["old"]),
            picked(given["sampling"]),
            picked(given["ref"]) if config.beta else None,
            picked(chosen).float() if config.top_entropy_quantile < 1 else None,
        )
        total = total + pack_loss(config, loss_inputs, tokens, statistics)
    total.backward()
    return total.detach(), filled(logp.grad), filled(entropy.grad)


NOT_TRLS = ("dppo_tv", "dppo_kl")
GRPOS = [name for name in LOSSES if name not in (*NOT_TRLS, "gmpo")]
CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in GRPOS),
    *({"loss_type": name, "importance_sampling_level": "sequence"} for name in GRPOS),
    {"loss_type": "gmpo", "epsilon": 0.3},
    {"loss_type": "gmpo", "epsilon": 0.3, "epsilon_high": 0.5, "beta": 0.1},
    {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.5},
    {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1},
    {"loss_type": "grpo", "beta": 0.2, "entropy_coef": 0.03},
    {"loss_type": "dr_grpo", "off_policy_mask_threshold": 0.05},
    {"loss_type": "vespo", "importance_sampling_mode": "token_truncate"},
    {"loss_type": "cispo", "top_entropy_quantile": 0.3, "epsilon_high": 1.2},
    {"loss_type": "dapo", "top_entropy_quantile": 0.5, "beta": 0.1, "entropy_coef": 0.03},
    *(
        {"loss_type": "dapo", "importance_sampling_mode": mode, "importance_sampling_clip_max": 1.6}
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_the_loss_and_its_gradients_are_trls(case: dict[str, Any]) -> None:
    config, given = AlgorithmConfig(**case), inputs(0)
    for got, want in zip(ours(config, given), theirs(config, given), strict=True):
        assert (got - want).abs().max() <= 1e-5
    assert theirs(config, given)[1].abs().max() > 1e-3  # there was something to compare
