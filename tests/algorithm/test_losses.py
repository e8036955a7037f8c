"""Loss weights against numbers worked by hand, and their independence of how an update is split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mm_grpo.algorithm.correction import mismatch_weights, off_policy_keep
from mm_grpo.algorithm.losses import LOSSES, Tokens
from mm_grpo.config import AlgorithmConfig

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
        # 4 completions: (2 * 1 - 4 * 1 + 10 * 0.5) / 4
        ("luspo", [0.25, 0.25, None, 0.25], 0.75),
        # 4 completions of at most 20: 3 / 80
        ("dr_grpo", [0.0125, 0.0125, None, 0.0125], 0.0375),
        # these change the term, not the weights: sapo's are grpo's, the others' dapo's
        ("sapo", [0.125, 0.0625, None, 0.025], 0.125),
        ("cispo", [0.0625, 0.0625, None, 0.0625], 0.1875),
        ("vespo", [0.0625, 0.0625, None, 0.0625], 0.1875),
        ("dppo_tv", [0.0625, 0.0625, None, 0.0625], 0.1875),
        ("dppo_kl", [0.0625, 0.0625, None, 0.0625], 0.1875),
        ("gmpo", [0.125, 0.0625, None, 0.025], 0.125),
    ],
)
def test_weights_and_loss_by_hand(loss_type: str, weights: list[float | None], loss: float) -> None:
    got = LOSSES[loss_type].weights(LENGTHS, 20)
    found = [float(g) for g, w in zip(got, weights, strict=True) if w is not None]
    assert found == pytest.approx([w for w in weights if w is not None], abs=1e-12)
    assert float((got * LENGTHS * TERMS).sum()) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_an_update_without_completions_has_no_weights(loss_type: str) -> None:
    """Its slots may all have held prompts that were too long and dropped."""
    assert LOSSES[loss_type].weights(torch.zeros(0, dtype=torch.long), 20).tolist() == []


def test_every_loss_type_of_the_config_is_there() -> None:
    from typing import get_args

    assert set(LOSSES) == set(get_args(AlgorithmConfig.model_fields["loss_type"].annotation))


TOKENS = Tokens(
    logp=torch.tensor([-1.0, -2.0, -0.5]),
    old_logp=torch.tensor([-1.0, -2.0, -0.5]) - torch.tensor([0.5, 2.0, 1.5]).log(),
    advantages=torch.tensor([1.0, 1.0, -2.0]),
    completion_index=torch.tensor([3, 3, 7]),
)


def config(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**fields)


SEQUENCE = {"importance_sampling_level": "sequence"}
TAUS = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}
# of tau (r - 1), tau 1 for A > 0 and 2 for the last
GATES = [4 / (1 + math.exp(-x)) for x in (-0.5, 1.0, 1.0)]
PHI, PHI_3 = 4 * math.exp(-3.0), 27 * math.exp(-4.0)  # of w 2: e^(3 - 6) * 2^2; of w 3: e^(2 - 6) * 3^3
WHOLE = [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("loss_type", "fields", "correction", "loss"),
    [
        # ratios 0.5, 2, 1.5 cut at 1.4: -(0.5 * 1 * -1), -(1.4 * 1 * -2), -(1.4 * -2 * -0.5)
        ("cispo", {"epsilon_high": 1.4}, None, [0.5, 2.8, -1.4]),
        ("cispo", {"epsilon": 0.4}, None, [0.4, 0.8, -0.4]),  # cut at 0.4
        ("cispo", {"epsilon_high": 1.4, **SEQUENCE}, None, [1.0, 2.0, -1.4]),  # geometric means 1 and 1.5
        ("dapo", {}, None, [-0.5, -1.2, 3.0]),  # 2 is cut to 1.2
        ("dapo", SEQUENCE, None, [-1.0, -1.0, 3.0]),  # nothing is
        ("sapo", {"loss_type": "sapo", **TAUS}, None, [-GATES[0], -GATES[1], GATES[2]]),
        # w = 0.5 * 2 = 1, so phi = 1; 1.5: e^(2 - 3) * 1.5^3, k 3 and lambda 2
        ("vespo", {}, None, [1.0, 2.0, -(math.exp(-1.0) * 3.375)]),
        # w = 1 * (2 * 1) and 1.5 * 2; where a token has the weight of its completion this counts once
        ("vespo", {}, [2.0, 1.0, 2.0], [PHI, 2 * PHI, -PHI_3]),
        ("vespo", {"importance_sampling_mode": "sequence_truncate"}, WHOLE, [PHI, 2 * PHI, -PHI_3]),
        ("vespo", {"importance_sampling_mode": "sequence_mask"}, WHOLE, [PHI, 2 * PHI, -PHI_3]),
    ],
)
def test_losses_of_tokens_by_hand(
    loss_type: str, fields: dict[str, Any], correction: list[float] | None, loss: list[float]
) -> None:
    tokens = TOKENS if correction is None else replace(TOKENS, correction=torch.tensor(correction))
    got = LOSSES[loss_type].token_loss(tokens, config(**fields))
    assert got.loss.tolist() == pytest.approx(loss, abs=1e-5)


GEOMETRIC = math.exp((math.log(0.5) + 0.5) / 2)


@pytest.mark.parametrize(
    ("name", "epsilon", "upper", "loss", "high"),
    [
        # probabilities .368, .135, .607 that were .736, .068, .404: the second, with A > 0, has risen by .068. The
        # first has fallen and the third risen, both against their advantage. -(ratio * A * logp) for those
        ("dppo_tv", 0.2, 0.05, [0.5, 0.0, -1.5], True),
        ("dppo_tv", 0.2, 0.07, [0.5, 4.0, -1.5], False),
        # of the second: .0677 log(.5) + .9323 log(.9323 / .8647) = .0233 nats
        ("dppo_kl", 1e-9, 0.023, [0.5, 0.0, -1.5], True),
        ("dppo_kl", 1e-9, 0.024, [0.5, 4.0, -1.5], False),
        # logs of the ratios -.693 and .693, cut to .5: exp of their mean; 1.5 with A < 0 is bounded from below alone
        ("gmpo", 0.3, 0.5, [-GEOMETRIC, -GEOMETRIC, 3.0], True),
    ],
)
def test_bounds_by_hand(name: str, epsilon: float, upper: float, loss: list[float], high: bool) -> None:
    got = LOSSES[name].token_loss(TOKENS, config(epsilon=epsilon, epsilon_high=upper))
    assert got.loss.tolist() == pytest.approx(loss, abs=1e-6)
    assert got.clipped_high.tolist() == [False, high, False] and not got.clipped_low.any()


@pytest.mark.parametrize(
    ("name", "epsilon", "loss"),
    [
        ("dppo_tv", 0.14, 0.0),
        ("dppo_tv", 0.16, 0.7 * math.log(0.35)),
        ("dppo_kl", 0.047, 0.0),  # .5 log(.5 / .35) + .5 log(.5 / .65) = .0472 nats
        ("dppo_kl", 0.048, 0.7 * math.log(0.35)),
    ],
)
def test_dppo_bounds_what_falls_by_epsilon_alone(name: str, epsilon: float, loss: float) -> None:
    # from .5 to .35 with A < 0, and, which nothing bounds, with A > 0
    fallen = torch.tensor([0.35, 0.35]).log()
    old, advantages = torch.tensor([0.5, 0.5]).log(), torch.tensor([-1.0, 1.0])
    tokens = Tokens(fallen, old, advantages, completion_index=torch.tensor([0, 1]))
    got = LOSSES[name].token_loss(tokens, config(epsilon=epsilon, epsilon_high=0.01))
    assert got.loss.tolist() == pytest.approx([loss, -0.7 * math.log(0.35)], abs=1e-6)
    assert got.clipped_low.tolist() == [loss == 0, False] and not got.clipped_high.any()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_lets_go_of_what_falls_too_far_and_bounds_the_weight(name: str) -> None:
    # p: .1 from .9 with A < 0 is let go; .5 from .01 with A < 0 has a ratio of 50, of which 20 count
    tokens = Tokens(
        logp=torch.tensor([0.1, 0.5]).log().requires_grad_(),
        old_logp=torch.tensor([0.9, 0.01]).log(),
        advantages=torch.tensor([-1.0, -1.0]),
        completion_index=torch.tensor([0, 1]),
    )
    got = LOSSES[name].token_loss(tokens, config())
    assert got.clipped_low.tolist() == [True, False]
    assert got.loss.tolist() == pytest.approx([0.0, 20 * math.log(0.5)], abs=1e-5)
    (gradient,) = torch.autograd.grad(got.loss.sum(), tokens.logp)
    assert gradient.tolist() == pytest.approx([0.0, 20.0], abs=1e-5)


def test_vespo_forgets_what_the_correction_masks_and_moves_only_log_probs() -> None:
    # a weight of 0 is a w of 1e-8: 1e-16 * e^3 for k = 2; the gradient of the others is -phi * A
    logp = TOKENS.logp.clone().requires_grad_()
    masked = replace(TOKENS, logp=logp, correction=torch.tensor([0.0, 1.0, 1.0]))
    got = LOSSES["vespo"].token_loss(masked, config())
    got.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, 2 * math.exp(-1.0) * 3.375], abs=1e-5)


def test_mismatch_weights_by_hand() -> None:
    # learner over engine: 2, 0.5 in one completion (product 1), 4 in the other
    old = torch.tensor([2.0, 0.5, 4.0]).log()
    sampled, completion_index = torch.zeros(3), torch.tensor([3, 3, 7])
    for mode, want in {
        "token_truncate": [2.0, 0.6, 3.0],
        "token_mask": [2.0, 0.0, 0.0],
        "sequence_truncate": [1.0, 1.0, 3.0],
        "sequence_mask": [1.0, 1.0, 0.0],
    }.items():
        got = mismatch_weights(old, sampled, completion_index, mode, 0.6, 3.0)  # type: ignore[arg-type]
        assert got.tolist() == pytest.approx(want, abs=1e-6), mode
    unbounded = mismatch_weights(old, sampled, completion_index, "token_mask", None, None)
    assert unbounded.tolist() == pytest.approx([2.0, 0.5, 4.0])


def test_off_policy_keep_by_hand() -> None:
    # mean drift 0.75 and 0.2; only the first is too far, and only where its advantage is negative
    logp, sampled = torch.tensor([-2.0, -1.5, -1.0]), torch.tensor([-1.0, -1.0, -0.8])
    completion_index = torch.tensor([0, 0, 1])
    negative = off_policy_keep(logp, sampled, torch.tensor([-1.0, -1.0, -1.0]), completion_index, 0.5)
    positive = off_policy_keep(logp, sampled, torch.tensor([1.0, 1.0, -1.0]), completion_index, 0.5)
    assert (negative.tolist(), positive.tolist()) == ([False, False, True], [True, True, True])
