"""What makes minibatches, by hand: which update a slot belongs to, weights, live completions, orders of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from helpers import tiny
from helpers.steps import config_for

from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.config import AlgorithmConfig
from mm_grpo.config.sections import CorrectionMode
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner import minibatch
from mm_grpo.learner.loss import LossInputs, PackTokens, pack_loss
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt

PROMPT = Prompt(tiny.sample("r:0", "what"), (1, 2, 3), EnginePrompt((), ()), torch.arange(3), {})


def group(slot: int, lengths: tuple[int, ...], advantages: tuple[float, ...]) -> Group:
    """Completions of 8 tokens ran into the limit."""
    completions = tuple(
        Completion((7,) * n, (-1.0,) * n, "", "length" if n == 8 else "stop", seed=g)
        for g, n in enumerate(lengths)
    )
    return Group(slot, PROMPT, completions, (0.0,) * len(lengths), advantages)


GROUPS = [group(0, (2, 8), (1.0, -1.0)), group(1, (3, 3), (0.0, 0.0)), group(3, (4, 1), (0.5, -0.5))]


def minibatches(**changes: Any) -> list[tuple[list[int], list[int], list[float], int]]:
    """Of each: the completions, those that can change the update, the weights of all, and the tokens."""
    made = minibatch.make_minibatches(GROUPS, config_for("x", **changes), Ranks(), torch.device("cpu"))
    return [
        ([i.index for i in m.items], [i.index for i in m.live], m.inputs.weights.tolist(), m.inputs.tokens)
        for m in made
    ]


def test_a_step_of_one_update_by_hand() -> None:
    # 21 tokens, each of weight 1 / 21; completions 2 and 3 have no advantage
    ((items, live, weights, tokens),) = minibatches()
    assert (items, live, tokens) == ([0, 1, 2, 3, 4, 5], [0, 1, 4, 5], 21)
    assert weights == pytest.approx([1 / 21] * 6, abs=1e-15)


@pytest.mark.field_bug("accumulated-twice")
def test_two_updates_each_have_their_own_denominator() -> None:
    # slots 0 and 1 make the first update: 2 + 8 + 3 + 3 tokens; slot 2 is empty, and 3 has 4 + 1
    first, second = minibatches(optim={"updates_per_step": 2})
    assert (first[0], first[1], first[3]) == ([0, 1, 2, 3], [0, 1], 16)
    assert first[2] == [1 / 16] * 4 + [0.0, 0.0]
    assert (second[0], second[1], second[3]) == ([4, 5], [4, 5], 5)
    assert second[2] == [0.0] * 4 + [0.2, 0.2]


@pytest.mark.parametrize("slot", [-1, 4, 5])
def test_a_slot_outside_of_the_step_is_refused(slot: int) -> None:
    minibatch.check_groups(GROUPS, slots=4)
    with pytest.raises(ValueError, match=rf"^r:0: slot {slot} "):
        minibatch.check_groups([*GROUPS, group(slot, (2, 2), (1.0, -1.0))], slots=4)


@pytest.mark.parametrize("dense", [{}, {"beta": 0.1}, {"entropy_coef": 0.1}])
@pytest.mark.parametrize("kept_out", ["truncated", "a tool came too late"])
def test_masked_completions_have_no_weight_and_are_not_run(
    kept_out: str, dense: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    truncated = kept_out == "truncated"
    if not truncated:
        first, second = GROUPS[0].completions
        masked = replace(GROUPS[0], completions=(first, replace(second, masked=kept_out)))
        monkeypatch.setitem(globals(), "GROUPS", [masked, *GROUPS[1:]])
    algorithm = {"mask_truncated_completions": truncated, **dense}
    ((items, live, weights, tokens),) = minibatches(algorithm=algorithm)
    live = [index for index in live if not dense or index not in (2, 3)]  # these have no advantage
    assert (items, live, tokens) == ([0, 1, 2, 3, 4, 5], [0, 4, 5], 13)
    assert weights == pytest.approx([1 / 13, 0.0, 1 / 13, 1 / 13, 1 / 13, 1 / 13], abs=1e-15)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_in_reward": True}, False),
        ({"entropy_coef": 0.1}, True),
    ],
)
def test_penalty_and_bonus_keep_completions_without_advantage(fields: dict[str, Any], dense: bool) -> None:
    assert minibatch.has_dense_objective(config_for("x", algorithm=fields).algorithm) is dense
    ((_, live, _, _),) = minibatches(algorithm=fields)
    assert (2 in live) is dense


def test_values_are_cut_by_completion_and_put_back_in_another_order() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    kept = minibatch.split_by_completion(values, [7, 7, 3, 5, 5])
    pieces = {index: piece.tolist() for index, piece in kept.items()}
    assert pieces == {7: [1.0, 2.0], 3: [3.0], 5: [4.0, 5.0]}
    default = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    # completion 9 has no kept value
    assert minibatch.to_pack_order(kept, [3, 9, 7, 7], default).tolist() == [3.0, -2.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_live_that_have_weight_an_advantage_and_a_gradient(dtype: torch.dtype) -> None:
    # ratios 2, 2, 0.5, 0.5, 1, 1: clipped is the first, and the fourth; the fifth has no advantage, the last no weight
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 1.0, 1.0]).log().to(dtype)
    advantages, weights = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]), torch.tensor([1.0] * 5 + [0.0])
    zeros, statistics = torch.zeros(6, dtype=dtype), LossStatistics()
    tokens = PackTokens(torch.arange(6), ratio, zeros, zeros, zeros, None)
    pack_loss(AlgorithmConfig(loss_type="dapo"), LossInputs(advantages, weights, 6), tokens, statistics)
    assert (statistics.take_live(), statistics.take_live()) == (2, 0)


def test_the_share_that_the_off_policy_mask_drops_by_hand() -> None:
    """Completions of 2, 1, 3 and 1 tokens: the first two have a negative advantage, and the first fell by 2 nats."""
    completion = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    sampling = torch.full((7,), -1.0)
    logp = torch.tensor([-3.0, -3.0, -1.1, -4.0, -4.0, -4.0, -9.0])
    weights = torch.tensor([0.1, 0.1, 0.1, 0.0])  # the last is masked, and does not count
    inputs = LossInputs(torch.tensor([-1.0, -1.0, 1.0, -1.0]), weights, 6)
    tokens = PackTokens(completion, logp, torch.zeros(7), logp, sampling, None)
    statistics = LossStatistics()
    pack_loss(AlgorithmConfig(off_policy_mask_threshold=0.5), inputs, tokens, statistics)
    assert statistics.metrics()["sampling/off_policy_ratio"] == pytest.approx(2 / 3)
    unmasked = LossStatistics()
    pack_loss(AlgorithmConfig(), inputs, tokens, unmasked)
    assert "sampling/off_policy_ratio" not in unmasked.metrics()


MODES: list[dict[str, Any]] = [{"importance_sampling_mode": mode} for mode in get_args(CorrectionMode)]


@pytest.mark.parametrize("fields", [*({"loss_type": name} for name in LOSSES), *MODES], ids=str)
def test_the_loss_of_a_pack_waits_for_no_device(fields: dict[str, Any]) -> None:
    """Its tensors have no data here, so that reading one is an error; metrics are read once an update."""
    logp, entropy, other = (torch.empty(12, device="meta", requires_grad=True) for _ in range(3))
    index = torch.empty(12, dtype=torch.long, device="meta")
    inputs = LossInputs(*(torch.empty(3, device="meta", dtype=torch.float64) for _ in range(2)), 12)
    algorithm = AlgorithmConfig(beta=0.1, entropy_coef=0.1, off_policy_mask_threshold=0.5, **fields)
    statistics = LossStatistics()
    tokens = PackTokens(index, logp, entropy, other.detach(), other.detach(), other.detach())
    for _ in range(2):
        pack_loss(algorithm, inputs, tokens, statistics).backward()
    with pytest.raises(RuntimeError):
        statistics.read()
