"""Credit by sight in updates: gradients are those of plain autograd over whole rows, weighed by plain forwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import assert_same
from helpers.passes import gradients
from helpers.steps import config_for, gradients_of, learner_of, load, make_groups, plain_logp
from torch import Tensor

from mm_grpo.algorithm.credit import dependency, keep_mass, rule_weights
from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.config import AlgorithmConfig, GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.learner.features import perception
from mm_grpo.learner.features.credit import credit_metrics, weighed
from mm_grpo.learner.features.perception import masked_prompt
from mm_grpo.learner.minibatch import LogProbs, Minibatch
from mm_grpo.learner.pack import Item
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Completion, Group

Forward = Callable[[Any, Group, Completion], Tensor]
TEXT = (1.0, -1.0, 0.5)
"""Advantages of the row without images."""
ROUNDING = 3e-5
"""Weights scale small differences of log-probs, and with them their rounding."""


def sharp(path: Any) -> Any:
    """The tiny model, whose answers depend on their images by some tenths of a nat."""
    model = load(path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    return model


def rows_of(path: Any, forward: Forward, *, videos: bool = False) -> list[Group]:
    """Two images, none, one, two, or with videos; the engine's log-probs are those of the model."""
    groups, model = make_groups(load_processor(str(path)), videos=videos), sharp(path)
    groups[1] = replace(groups[1], advantages=TEXT)
    with torch.no_grad():
        return [
            replace(g, completions=tuple(
                replace(c, logprobs=tuple(forward(model, g, c).tolist())) for c in g.completions
            )) for g in groups
        ]  # fmt: skip


def oracle(
    path: Any, groups: list[Group], controls: dict[int, Group], algorithm: AlgorithmConfig, forward: Forward
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of an on-policy step, a forward for each row, and the weights of completions with a control."""
    model, credit = sharp(path), algorithm.credit
    assert credit is not None
    done = {
        (g.slot, k): (g, c, a)
        for g in groups
        for k, (c, a) in enumerate(zip(g.completions, g.advantages, strict=True))
    }
    acting = [(slot, k) for (slot, k), (_, _, a) in done.items() if a and slot in controls]
    with torch.no_grad():
        seen = [forward(model, *done[key][:2]) for key in acting]
        unseen = [forward(model, controls[slot], controls[slot].completions[k]) for slot, k in acting]
    found = list(map(dependency, seen, unseen))
    made = rule_weights(found, [float(s.mean()) for s in found], credit)
    weights = dict(zip(acting, made, strict=True))
    for own in ([key for key in acting if key[0] == slot] for slot in controls):
        sizes = [torch.full_like(weights[key], done[key][2]) for key in own]
        weights |= zip(own, keep_mass([weights[key] for key in own], sizes), strict=True)
    lengths = torch.tensor([len(c.token_ids) for _, c, _ in done.values()])
    scale = LOSSES[algorithm.loss_type].weights(lengths, 8).tolist()
    total = torch.zeros(())
    for (key, (group, c, a)), each in zip(done.items(), scale, strict=True):
        logp = forward(model, group, c)
        total = total - each * (a * weights.get(key, 1.0) * torch.exp(logp - logp.detach())).sum()
    total.backward()
    return gradients(model), [*weights.values()]


def after_masked(path: Any, groups: list[Group], ratio: float) -> dict[int, Group]:
    """The groups with images after their masked prompts, by slot."""
    processor = load_processor(str(path))
    return {
        g.slot: replace(g, prompt=masked_prompt(processor, g.prompt, ratio, g.completions[0].seed))
        for g in groups
        if g.prompt.vision
    }


@pytest.mark.parametrize(
    ("packs", "algorithm", "videos"),
    [
        (4096, {"credit": "pgpo", "perception_mask_ratio": 0.9}, False),
        (70, {"credit": "vppo", "loss_type": "grpo", "perception_mask_ratio": 0.5}, False),
        (4096, {"credit": "vppo", "perception_mask_ratio": 0.9}, True),
    ],
)
def test_gradients_equal_autograds(
    packs: int, algorithm: dict[str, Any], videos: bool, models: dict[str, Any]
) -> None:
    path = models["qwen2_5_vl"]
    changes: Any = {"algorithm": algorithm, "optim": {"max_tokens_per_pack": packs}}
    config = config_for(path, **changes)
    forward = forward_of(config)
    groups = rows_of(path, forward, videos=videos)
    controls = after_masked(path, groups, config.algorithm.perception_mask_ratio)
    ours, report = gradients_of(learner_of(path, sharp(path), **changes), groups)
    theirs, weights = oracle(path, groups, controls, config.algorithm, forward)
    assert_same(ours, theirs, ROUNDING)
    every = torch.cat(weights)
    assert float((every - 1).abs().max()) > 0.3  # the weights are a visible part of it
    metrics = report.metrics
    assert metrics["time/credit"] > 0
    assert metrics["credit/above_1"] == pytest.approx(float((every > 1 + 1e-6).double().mean()))
    top = every.topk(-(-len(every) // 4)).values
    assert metrics["credit/top_quartile"] == pytest.approx(float(top.mean()), rel=1e-4)


def forward_of(config: GRPOConfig) -> Forward:
    return lambda model, group, c: plain_logp(model, config, group, c)[0]


def test_only_rows_that_can_change_are_run_once_more(models: dict[str, Any]) -> None:
    """Slot 2 has no advantages and 1 no images: a pass after the masked prompts of 0 and 3, each once."""
    path = models["qwen2_5_vl"]
    groups = rows_of(path, forward_of(config_for(path)))
    groups[2] = replace(groups[2], advantages=(0.0,) * 3)
    policies = [(learner_of(path, sharp(path), algorithm=a)) for a in ({}, {"credit": "pgpo"})]
    runs = [learner.update(groups).metrics for learner in policies]
    # 3 has one completion of advantage 0
    more = sum(len(groups[s].prompt.token_ids) for s in (0, 3)) + 3 + 6 + 2 + 2 + 2
    for name, count in (("tokens", more), ("images_encoded", 4)):
        assert runs[1][f"learner/{name}"] == runs[0][f"learner/{name}"] + count


def test_later_updates_take_the_log_probs_that_the_learner_has(models: dict[str, Any]) -> None:
    """An engine's that are far off change nothing where the learner has run the policy of the step's start."""
    path = models["qwen2_5_vl"]
    forward = forward_of(config_for(path))
    groups, odd = rows_of(path, forward), rows_of(path, lambda *given: 7 * forward(*given))
    found = []
    for given, staleness in ((groups, 0), (odd, 1), (odd, 0)):
        algorithm = {"credit": "pgpo", "importance_sampling_mode": "none"}
        changes: Any = {"algorithm": algorithm, "rollout": {"max_staleness": staleness}}
        found.append(gradients_of(learner_of(path, sharp(path), **changes), given))
    assert_same(found[1][0], found[0][0], ROUNDING)
    first, _, last = (report.metrics["credit/top_quartile"] for _, report in found)
    assert last != pytest.approx(first, rel=1e-3)


def test_weights_do_not_depend_on_which_process_runs_a_group() -> None:
    """Two processes with two groups each, against one with all four: VPPO's means are those of the whole update."""
    algorithm = AlgorithmConfig(credit={"rule": "vppo", "beta_min": 0.2})  # type: ignore[arg-type]
    anything: Any = SimpleNamespace(vision={"x": 1})
    items = [Item(k, k // 2, anything, (5,) * 4) for k in range(8)]
    generator = torch.Generator().manual_seed(0)
    engine = [(-2 * torch.rand(4, generator=generator)).tolist() for _ in items]
    control = {k: -2 * torch.rand(4, generator=generator, dtype=torch.float64) for k in range(8)}

    def of(process: Sequence[int], ranks: Any = None) -> tuple[list[list[float]], Tensor]:
        own = [item for item in items if item.group in process]
        inputs: Any = SimpleNamespace(advantages=torch.zeros(8))
        advantages = {i.index: torch.ones(4, dtype=torch.float64) for i in own}
        given = Minibatch(own, own, inputs, advantages), {i.index: control[i.index] for i in own}
        minibatch, weights = weighed(*given, LogProbs(engine), algorithm, ranks or Ranks())
        assert minibatch.advantages is not None and len(weights) == 4 * len(own)
        return [a.tolist() for a in minibatch.advantages.values()], weights

    def gathers(*values: Any) -> Any:
        """Ranks of two processes, of which this one has None here, and the other the value that it sends."""
        return SimpleNamespace(
            rank=values.index(None), all_gather=lambda own, what: [own if v is None else v for v in values]
        )

    said: list[Any] = []
    for process in ((0, 1), (2, 3)):
        noted: Any = SimpleNamespace(rank=0, all_gather=lambda own, what: said.append(own) or [own])
        of(process, noted)
    halves = of((0, 1), gathers(None, said[1])), of((2, 3), gathers(said[0], None))
    whole, weights = of(range(4))
    assert [*halves[0][0], *halves[1][0]] == [pytest.approx(values) for values in whole]
    assert [*of((0, 1))[0], *of((2, 3))[0]] != [pytest.approx(values) for values in whole]
    metrics = credit_metrics([weights], Ranks())
    assert credit_metrics([halves[0][1]], gathers(None, halves[1][1])) == pytest.approx(metrics)
    assert credit_metrics([halves[0][1]], Ranks()) != pytest.approx(metrics)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("loss_type", {"loss_type": "gmpo"}),
        ("importance_sampling_level", {"importance_sampling_level": "sequence"}),
        ("credit", {"credit": "prpo"}),
        ("credit = {'rule': 'pgpo', 'beta_min': 0.5}: must", {"credit": {"rule": "pgpo", "beta_min": 0.5}}),
        ("credit.tau", {"credit": {"rule": "pgpo", "tau": 1.5}}),
    ],
)
def test_what_credit_is_refused_with(field: str, changes: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{field}")):
        config_for("x", algorithm={"credit": "pgpo", **changes})


def test_features_share_the_masked_prompts_of_a_step(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(perception, "masked_prompt", lambda *a: calls.append(a[-1]) or masked_prompt(*a))
    path = models["qwen2_5_vl"]
    groups = make_groups(load_processor(str(path)))
    learner = learner_of(path, algorithm={"credit": "pgpo", "perception_coef": 0.01})
    for step in (1, 2):
        learner.update(groups)
        pictured = [g.completions[0].seed for g in groups if g.prompt.vision]
        assert sorted(calls) == sorted(pictured * step) and learner.alternates == {}
