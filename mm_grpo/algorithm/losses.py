"""Loss types: the loss of each token, and the weight with which it enters the loss of the update.

    loss = sum over the update's tokens of  weight * token loss

A loss type is a pair of functions in `LOSSES`: `weights(lengths, max_completion_length) -> [R]`, the weight of
every token of completion r, from the token counts of all R completions of the update (0 for a masked one), and
`token_loss(tokens, config) -> TokenLoss`. The weights count the whole update, so packs, accumulation and processes
cannot change the loss. `learner/loss.py` adds what all types share: corrections, the KL term and the entropy bonus.

Axes: [M], M completion tokens, flat, in any order; [R], R completions. `completion_index` [M] names the
completion of each token, and all tokens of a completion are among the M.

A new type is one function, one line in `LOSSES` and one word in the config's `loss_type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


class LossOptions(Protocol):
    """Options that losses read; `AlgorithmConfig` has them."""

    epsilon: float
    epsilon_high: float | None
    delta: float | None
    importance_sampling_level: Level
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float

    @property
    def importance_sampling_mode(self) -> str: ...


@dataclass(frozen=True)
class Tokens:
    """M completion tokens: log-probabilities under the new and the old policy, advantage and completion, all [M]."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    completion_index: Tensor
    correction: Tensor | None = None
    """Mismatch weights of learner against engine [M], if there are any."""

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.old_logp


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token [M], and which tokens [M] get no gradient: by the lower bound, the upper bound or `delta`."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    capped: Tensor


# importance weights ------------------------------------------------------------------------------


def log_importance(log_ratio: Tensor, completion_index: Tensor, level: Level) -> Tensor:
    """Return log importance weights [M] from log-ratios [M]: how much more probable the new policy makes a token.

    At token level the weight of a token is its ratio. At sequence level (GSPO, Zheng et al. 2025,
    arXiv:2507.18071) every token of a completion has the completion's length-normalised ratio, the exponential
    of the mean log-ratio. Gradients flow through both.
    """
    return log_ratio if level == "token" else sequence_mean(log_ratio, completion_index)


def sequence_sum(values: Tensor, completion_index: Tensor) -> Tensor:
    """Return for each token [M] the sum of `values` [M] over its completion."""
    # numbers from 0, which are fewer than M; torch.unique would wait for the device to count them
    ordered, order = completion_index.sort()
    number = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    index = torch.empty_like(number).index_copy(0, order, number)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def sequence_mean(values: Tensor, completion_index: Tensor) -> Tensor:
    """Return for each token [M] the mean of `values` [M] over its completion."""
    return sequence_sum(values, completion_index) / sequence_sum(torch.ones_like(values), completion_index)


# the loss of a token -----------------------------------------------------------------------------


def clipped(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """PPO's clipped surrogate at the config's importance level: `grpo`, `bnpo`, `dr_grpo`, `dapo`, `luspo`."""
    weight = log_importance(tokens.log_ratio, tokens.completion_index, config.importance_sampling_level)
    return clipped_surrogate(weight, tokens.advantages, config.epsilon, _upper(config), config.delta)


def clipped_surrogate(
    log_weight: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> TokenLoss:
    """Clipped policy-gradient loss of M tokens (PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        loss_t = -min(min(ratio_t, delta) * A, clip(ratio_t, 1 - epsilon, 1 + epsilon_high) * A)

    `log_weight` [M] are log-ratios, `advantages` [M] are the completions'. A separate upper bound
    `epsilon_high` is "clip-higher" of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10). `delta` bounds the ratio of
    tokens with a negative advantage, which the pair of bounds leaves open above (two-sided clipping,
    INTELLECT-2, arXiv:2505.07291).

    A token is clipped when the bound is active and takes its gradient away: below 1 - epsilon with a
    negative advantage, above 1 + epsilon_high with a positive one, above `delta` with a negative one.
    """
    ratio = torch.exp(log_weight)
    cap = math.inf if delta is None else delta
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    limited = ratio.clamp(max=cap)
    return TokenLoss(
        loss=-torch.minimum(limited * advantages, bounded * advantages),
        clipped_low=(ratio.detach() < 1 - epsilon) & (advantages < 0),
        clipped_high=(ratio.detach() > 1 + epsilon_high) & (advantages > 0),
        capped=(ratio.detach() > cap) & (advantages < 0),
    )


def cispo(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """REINFORCE with a clipped importance weight: every token keeps its gradient (MiniMax-M1, arXiv:2506.13585).

        loss_t = -stop_gradient(min(ratio_t, epsilon_high)) * A * logp_t

    As in TRL, `epsilon_high` is here the bound itself, not a distance from 1 (the paper's 1 + epsilon);
    values around 5 are usual.
    """
    weight = log_importance(tokens.log_ratio, tokens.completion_index, config.importance_sampling_level)
    ratio = torch.exp(weight).detach()
    return unclipped(-ratio.clamp(max=_upper(config)) * tokens.advantages * tokens.logp)


def sapo(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """A soft gate in place of the hard clip (SAPO, arXiv:2511.20347).

        loss_t = -sigmoid(tau * (ratio_t - 1)) * 4 / tau * A

    `tau` is `sapo_temperature_pos` for positive advantages and `sapo_temperature_neg` for others; the gate's
    slope at ratio 1 is 1 whatever tau is.
    """
    weight = log_importance(tokens.log_ratio, tokens.completion_index, config.importance_sampling_level)
    tau = torch.where(tokens.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return unclipped(-torch.sigmoid(tau * (torch.exp(weight) - 1)) * 4 / tau * tokens.advantages)


DPPO_MAX = 20.0
"""Upper bound of the importance weight in `dppo_tv` and `dppo_kl`, verl's."""


def dppo_tv(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """REINFORCE without tokens that have become too much likelier or less likely, as their advantage says (DPPO).

        loss_t = -stop_gradient(min(ratio_t, 20)) * A * logp_t     if |p_t - p_old_t| is within its bound

    Qi et al. 2026, arXiv:2602.04879, with the total variation of "this token or another". `epsilon_high` bounds
    p - p_old where A > 0, and `epsilon` p_old - p where A <= 0. A ratio says little about rare tokens: from 0.001 to
    0.01 is a ratio of 10 and hardly a change. As in verl, the weight is bounded by 20.
    """
    change = tokens.logp.detach().exp() - tokens.old_logp.exp()
    return _within(tokens, change > _upper(config), change < -config.epsilon)


def dppo_kl(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """`dppo_tv`, but it bounds the Kullback-Leibler divergence of "this token or another", in nats.

        D_t = p_old * log(p_old / p) + (1 - p_old) * log((1 - p_old) / (1 - p))

    The bound is `epsilon_high` if A > 0 and p > p_old, `epsilon` if A <= 0 and p < p_old; 0.05 is usual. 1e-8 is added
    to both 1 - p, as in verl.
    """
    p, old = tokens.logp.detach().exp(), tokens.old_logp.exp()
    another_token = (1 - old) * torch.log((1 - old + 1e-8) / (1 - p + 1e-8))
    divergence = old * (tokens.old_logp - tokens.logp.detach()) + another_token
    return _within(
        tokens, (divergence > _upper(config)) & (p > old), (divergence > config.epsilon) & (p < old)
    )


def _within(tokens: Tokens, above: Tensor, below: Tensor) -> TokenLoss:
    """REINFORCE without tokens `above` their bound at A > 0 and `below` it at other A, both [M]."""
    high, low = above & (tokens.advantages > 0), below & (tokens.advantages <= 0)
    ratio = torch.exp(tokens.log_ratio.detach()).clamp(max=DPPO_MAX)
    loss = (-ratio * tokens.advantages * tokens.logp).masked_fill(high | low, 0.0)
    return TokenLoss(loss, clipped_low=low, clipped_high=high, capped=torch.zeros_like(low))


def _upper(config: LossOptions) -> float:
    return config.epsilon if config.epsilon_high is None else config.epsilon_high


def gmpo(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """Geometric mean of a completion's clipped ratios (GMPO: Zhao et al. 2025, arXiv:2507.20673, eq. 4).

        loss of a completion = -A * exp(mean over its tokens of l_t)
        l_t = min(log ratio_t, epsilon_high) if A > 0,  max(log ratio_t, -epsilon) otherwise

    Every token has its completion's loss, and the weight divides by the length. Bounds are distances of log ratios
    from 0; the paper's are 0.4. As in TRL, a ratio has no bound on the other side: it would never act.
    """
    positive = tokens.advantages > 0
    log_ratio = tokens.log_ratio
    high, low = (log_ratio > _upper(config)) & positive, (log_ratio < -config.epsilon) & ~positive
    bounded = torch.where(positive, log_ratio.clamp(max=_upper(config)), log_ratio.clamp(min=-config.epsilon))
    ratio = torch.exp(sequence_mean(bounded, tokens.completion_index))
    return TokenLoss(
        -ratio * tokens.advantages, clipped_low=low, clipped_high=high, capped=torch.zeros_like(low)
    )


VESPO_MIN, VESPO_MAX = math.log(1e-8), 20.0
"""Bounds of logarithms in `vespo`, TRL's."""


def vespo(tokens: Tokens, config: LossOptions) -> TokenLoss:
    """REINFORCE weighed by a smooth function of the whole completion's ratio (VESPO, arXiv:2602.10693).

        loss_t = -phi(w) * A * logp_t,   phi(w) = exp(lambda) * w^k * exp(-lambda * w),   phi(1) = 1

    w is the product of the ratios of the completion's tokens, times the ratio of learner to engine if there is
    a mismatch correction; phi carries no gradient. k and lambda differ by the sign of the advantage
    (`vespo_k_pos`, `vespo_lambda_pos`, `vespo_k_neg`, `vespo_lambda_neg`).
    """
    log_w = sequence_sum(tokens.log_ratio.detach().clamp(-VESPO_MAX, VESPO_MAX), tokens.completion_index)
    if tokens.correction is not None:
        gap = tokens.correction.log().clamp(VESPO_MIN, VESPO_MAX)
        # in these modes every token has the weight of its whole completion already
        if not config.importance_sampling_mode.startswith("sequence"):
            gap = sequence_sum(gap, tokens.completion_index)
        log_w = log_w + gap
    log_w = log_w.clamp(VESPO_MIN, VESPO_MAX)
    positive = tokens.advantages >= 0
    k = torch.where(positive, config.vespo_k_pos, config.vespo_k_neg)
    rate = torch.where(positive, config.vespo_lambda_pos, config.vespo_lambda_neg).clamp(min=1e-4)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return unclipped(-phi * tokens.advantages * tokens.logp)


def unclipped(loss: Tensor) -> TokenLoss:
    """Return a loss [M] in which every token keeps its gradient, also if its weight was cut."""
    none = torch.zeros(loss.shape, dtype=torch.bool, device=loss.device)
    return TokenLoss(loss, none, none, none)


# the weight of a token ---------------------------------------------------------------------------


def token_mean(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (tokens of the update): the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8).

    Every token counts the same, whatever the length of its answer.
    """
    return torch.full(lengths.shape, 1.0 / max(int(lengths.sum()), 1), dtype=torch.float64)


def sequence_mean_token_mean(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (R * length): the mean over a completion's tokens, then over completions (arXiv:2402.03300, eq. 3).

    Each completion counts once, so a token of a long answer weighs less than one of a short answer. A masked
    completion stays in R, as in TRL.
    """
    return 1.0 / (len(lengths) * lengths.clamp(min=1).double())


def sequence_mean_token_sum(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / R: the sum over a completion's tokens, then the mean over completions (LUSPO, arXiv:2602.05261).

    A completion's loss grows with its length, which undoes the length bias of sequence-level weights; use it
    with `importance_sampling_level: sequence`.
    """
    return torch.full(lengths.shape, 1.0 / max(len(lengths), 1), dtype=torch.float64)


def constant_denominator(lengths: Tensor, max_completion_length: int) -> Tensor:
    """1 / (R * max_completion_length) (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2).

    Dividing by the length limit instead of the length removes the bias towards long wrong answers. Pair it
    with `scale_rewards: none`, which removes the other bias the paper names.
    """
    return torch.full(lengths.shape, 1.0 / max(len(lengths) * max_completion_length, 1), dtype=torch.float64)


class Loss(NamedTuple):
    """A loss type: the weights [R] of completions' tokens, from their token counts [R] and the length limit in tokens,
    and the loss [M] of each token."""

    weights: Callable[[Tensor, int], Tensor]
    token_loss: Callable[[Tokens, LossOptions], TokenLoss]


LOSSES: dict[str, Loss] = {
    "grpo": Loss(sequence_mean_token_mean, clipped),
    # Departure: TRL's bnpo is a mean over the tokens of one micro-batch, and depends on how an update is split. Here
    # packs and processes change no result, the batch is the whole update, and bnpo is dapo.
    "bnpo": Loss(token_mean, clipped),
    "dr_grpo": Loss(constant_denominator, clipped),
    "dapo": Loss(token_mean, clipped),
    "cispo": Loss(token_mean, cispo),
    "sapo": Loss(sequence_mean_token_mean, sapo),
    "luspo": Loss(sequence_mean_token_sum, clipped),
    "vespo": Loss(token_mean, vespo),
    "dppo_tv": Loss(token_mean, dppo_tv),
    "dppo_kl": Loss(token_mean, dppo_kl),
    "gmpo": Loss(sequence_mean_token_mean, gmpo),
}
