"""Advantages equal those that TRL's own trainers compute, on random rewards with gaps.

TRL computes them in the middle of `_generate_and_score_completions`; the trainers here are stand-ins
that hand it given rewards and, for the KL in the reward, given log-probabilities.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_grpo.algorithm.advantages import Objective, advantages
from mm_grpo.algorithm.kl import completion_kl, penalised
from mm_grpo.config import AlgorithmConfig

trl = pytest.importorskip("trl", reason="trl is not installed; it is among requirements/cpu.txt")

P, G, K, T = 6, 4, 3, 5
WEIGHTS = [1.0, 0.5, -0.25]
LENGTHS = [1 + (7 * i) % T for i in range(P * G)]
Totals = list[list[float | None]]


def scores(seed: int) -> Tensor:
    """Scores [P * G, K] in quarters; NaN is what TRL has for None. Group 0 is all equal, group 1 has a lone one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, (P, G, K), generator=generator).float() / 4
    values[torch.rand(P, G, K, generator=generator) < 0.15] = math.nan
    values[0] = torch.tensor([0.75, -1.0, 0.5])
    values[1, 1:] = math.nan
    values[1, 0] = 1.0
    values[2, 3] = math.nan
    return values.view(P * G, K)


def stand_in(**fields: Any) -> Any:
    logs: dict[str, Any] = {name: [] for name in ("prompt", "completion", "advantages", "images")}
    return SimpleNamespace(
        **{
            "accelerator": SimpleNamespace(
                device=torch.device("cpu"), process_index=0, gather=lambda x: x, reduce=lambda x, reduction: x
            ),
            "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
            "ref_model": None,
            "args": SimpleNamespace(
                per_device_train_batch_size=P * G,
                steps_per_generation=1,
                gradient_accumulation_steps=1,
                gradient_checkpointing_kwargs=None,
            ),
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "_tokenizer": SimpleNamespace(pad_token_id=0),
            "pad_to_multiple_of": None,
            "mask_truncated_completions": False,
            "num_iterations": 1,
            "use_vllm": False,
            "beta": 0.0,
            "num_generations": G,
            "reward_weights": torch.tensor(WEIGHTS),
            "reward_funcs": [None] * K,
            "reward_func_names": [f"r{k}" for k in range(K)],
            "reward_clip_range": None,
            "log_multimodal": False,
            "_metrics": {"train": defaultdict(list)},
            "_logs": {**logs, "rewards": defaultdict(list), "extra": defaultdict(list)},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
            **fields,
        }
    )


INPUTS = [{"prompt": "p"} for _ in range(P * G)]
TOKENS = [[1] * n for n in LENGTHS]


def of_grpo(given: Tensor, **fields: Any) -> Tensor:
    trainer = stand_in(
        _generate=lambda prompts: (TOKENS, TOKENS, None, ["c"] * len(prompts), None, {}, None, None),
        _calculate_rewards=lambda *_: given,
        **fields,
    )
    output = trl.GRPOTrainer._generate_and_score_completions(trainer, INPUTS)
    return torch.as_tensor(output["advantages"]).view(P, G)


def of_rloo(given: Tensor, logp: Tensor, ref: Tensor, **fields: Any) -> Tensor:
    policy, reference = stand_in().model, object()
    trainer = stand_in(
        model=policy,
        ref_model=reference,
        _generate=lambda prompts: (TOKENS, TOKENS, ["c"] * len(prompts)),
        _calculate_rewards=lambda *_: given,
        _get_per_token_logps_and_entropies=lambda model, *_, **__: (
            ref if model is reference else logp,
            None,
            None,
        ),
        normalize_advantages=False,
        **fields,
    )
    output = trl.RLOOTrainer._generate_and_score_completions(trainer, INPUTS)
    return torch.as_tensor(output["advantages"]).view(P, G)


def total(parts: list[float | None]) -> float | None:
    applied = [w * x for w, x in zip(WEIGHTS, parts, strict=True) if x is not None]
    return sum(applied) if applied else None


def ours(config: AlgorithmConfig, given: Tensor, costs: list[list[float]] | None = None) -> Tensor:
    """Our advantages of the same rewards, by way of totals made as TRL makes them."""
    parts: list[Totals] = [
        [[None if math.isnan(x) else x for x in row] for row in given[:, k].view(P, G).tolist()]
        for k in range(K)
    ]
    rewards: Totals = [[total([part[p][g] for part in parts]) for g in range(G)] for p in range(P)]
    if costs is not None:
        rewards = [list(row) for row in penalised(rewards, costs)]
    objectives = [Objective(w, part) for w, part in zip(WEIGHTS, parts, strict=True)]
    return torch.tensor(advantages(rewards, config, objectives), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "fields",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda fields: next(iter(fields.values())),
)
def test_advantages_of_groups_are_trls(fields: dict[str, str], seed: int) -> None:
    given = scores(seed)
    got = ours(AlgorithmConfig.model_validate(fields), given)
    defaults = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
    want = of_grpo(given, **defaults | fields)
    assert (got - want).abs().max() <= 1e-5
    assert want.abs().max() > 0.5 and torch.equal(got[0], torch.zeros(G, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(2))
def test_rloo_with_and_without_the_kl_in_the_reward(seed: int, beta: float) -> None:
    given, generator = scores(seed), torch.Generator().manual_seed(seed + 100)
    logp, ref = (-torch.rand(P * G, T, generator=generator) for _ in range(2))
    costs = [
        [
            beta * completion_kl(logp[i, : LENGTHS[i]].tolist(), ref[i, : LENGTHS[i]].tolist(), "k1")
            for i in range(p * G, (p + 1) * G)
        ]
        for p in range(P)
    ]
    got = ours(AlgorithmConfig(advantage_estimator="rloo"), given, costs)
    want = of_rloo(given, logp, ref, beta=beta)
    assert (got - want).abs().max() <= 1e-5
    assert want.abs().max() > 0.5
    assert (got[0].abs().max() > 0) == (beta > 0)  # group 0 has equal rewards: only the KL tells them apart
