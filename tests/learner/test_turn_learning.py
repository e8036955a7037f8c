"""Advantages of turns in the learner: the update is that of a plain loop where each token has its turn's advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import assert_same
from helpers.passes import gradients
from helpers.steps import config_for, gradients_of, learner_of, load, make_groups, plain_logp
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.health.checks import update_happens
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Completion, Group, Turn

GAMMA = {"turn_gamma": 0.9}


def in_turns(group: Group, advantages: Sequence[Sequence[float]]) -> Group:
    """The group with completions cut into turns of equal length, the last one longer."""

    def cut(done: Completion, turns: int) -> Completion:
        size = len(done.token_ids) // turns
        lengths = [size] * (turns - 1) + [len(done.token_ids) - size * (turns - 1)]
        return replace(done, turns=tuple(Turn("assistant", "", n, seed=i) for i, n in enumerate(lengths)))

    done = tuple(cut(c, len(own)) for c, own in zip(group.completions, advantages, strict=True))
    own = tuple(map(tuple, advantages))
    return replace(group, completions=done, advantages=tuple(a[0] for a in own), turn_advantages=own)


def conversations(processor: Any) -> list[Group]:
    """Of three turns one of which has no advantage; a group without any; first turns of 0, whose second ones act."""
    first, second, third, fourth = make_groups(processor)
    return [
        in_turns(first, [(1.0, -2.0), (-0.5, 0.0, 0.7), (-0.5, 0.2)]),
        in_turns(second, [(0.0, 0.0)] * 3),
        in_turns(third, [(0.0,), (0.0, 1.5, -1.5), (0.0, -0.4)]),
        in_turns(fourth, [(0.7,), (-0.7,), (0.0, 0.0)]),
    ]


def of_tokens(done: Completion, turns: Sequence[float]) -> Tensor:
    return torch.tensor([a for n, a in zip(done.turn_lengths, turns, strict=True) for _ in range(n)])


def plain_loss(model: Any, config: GRPOConfig, groups: list[Group]) -> Tensor:
    """The loss of the step, on policy, written out: every completion alone by transformers' forward."""
    rows = [(g, c, a) for g in groups for c, a in zip(g.completions, g.turn_advantages, strict=True)]
    tokens = sum(len(c.token_ids) for _, c, _ in rows)
    loss = torch.zeros(())
    for group, done, turns in rows:
        logp, _ = plain_logp(model, config, group, done)
        terms = -(logp - logp.detach()).exp() * of_tokens(done, turns)
        per_token = 1 / tokens if config.algorithm.loss_type == "dapo" else 1 / len(rows) / len(terms)
        loss = loss + terms.sum() * per_token
    return loss


@pytest.mark.parametrize(("loss_type", "max_tokens"), [("dapo", 60), ("grpo", 16384)])
def test_gradients_equal_a_plain_loop(loss_type: str, max_tokens: int, models: dict[str, Path]) -> None:
    path, processor = models["qwen2_5_vl"], load_processor(str(models["qwen2_5_vl"]))
    algorithm = {**GAMMA, "loss_type": loss_type}
    config = config_for(path, algorithm=algorithm, optim={"max_tokens_per_pack": max_tokens})
    groups, plain = conversations(processor), load(path)
    got, report = gradients_of(Learner(load(path), processor, config, 10), groups)
    assert all(update_happens(u) is None and u.stepped for u in report.updates)
    plain_loss(plain, config, groups).backward()
    theirs = gradients(plain)
    assert all(bool(gradient.any()) for gradient in theirs.values())
    assert_same(got, theirs)


def test_turns_of_one_advantage_make_the_update_of_a_completion_bit_by_bit(models: dict[str, Path]) -> None:
    path, processor = models["qwen2_vl"], load_processor(str(models["qwen2_vl"]))
    groups = make_groups(processor)
    alike = [in_turns(g, [(a,) * (1 + i % 2) for i, a in enumerate(g.advantages)]) for g in groups]
    states = []
    for algorithm, given in (({}, groups), (GAMMA, alike)):
        learner = learner_of(path, load(path).bfloat16(), algorithm=algorithm)
        metrics = learner.update(given).metrics
        states.append((learner.model.state_dict(), metrics))
    assert all(torch.equal(t, states[1][0][n]) for n, t in states[0][0].items())
    assert states[0][1] == states[1][1]


def test_completions_are_left_out_where_no_turn_has_an_advantage(models: dict[str, Path]) -> None:
    """Not where the first one has none, which is the completion's own."""
    path, processor = models["qwen2_vl"], load_processor(str(models["qwen2_vl"]))
    groups = conversations(processor)
    assert [g.has_advantage for g in groups] == [
        [True] * 3, [False] * 3, [False, True, True], [True, True, False],
    ]  # fmt: skip
    lengths = [[len(c.token_ids) for c in g.completions] for g in groups]
    prompts = [len(g.prompt.token_ids) for g in groups]
    costs = [
        prompts[0] + sum(lengths[0]), 0, prompts[2] + sum(lengths[2][1:]), prompts[3] + sum(lengths[3][:2]),
    ]  # fmt: skip
    report = learner_of(path, algorithm=GAMMA).update(groups)
    assert report.metrics["learner/tokens"] == sum(costs)
    (record,) = report.updates
    acting = [
        int((of_tokens(c, a) != 0).sum())
        for g in groups
        for c, a in zip(g.completions, g.turn_advantages, strict=True)
    ]
    assert record.live_tokens == sum(acting) < sum(map(sum, lengths))
    still = [in_turns(g, [(0.0, 0.0)] * 3) for g in make_groups(processor)]
    assert not learner_of(path, algorithm=GAMMA).update(still).updates[0].stepped
