"""A learner's step against a plain loop: transformers' own forward, one completion at a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.steps import LENGTHS, config_for, learner_of, load, make_groups, plain_logp

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.health.checks import update_happens
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import use_checkpointing
from mm_grpo.learner.optimizer import Optimizer, schedule
from mm_grpo.learner.step_report import gap_metrics
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Group


def plain_step(model: Any, config: GRPOConfig, groups: list[Group]) -> None:
    """The same updates by the book: every completion alone, losses written out, torch's AdamW."""
    algorithm, optim = config.algorithm, config.optim
    options: Any = {"lr": optim.learning_rate, "eps": optim.adam_epsilon, "weight_decay": 0.0}
    adam = torch.optim.AdamW(model.parameters(), **options)
    rows = [(g, c, a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)]
    with torch.no_grad():
        old = {c.seed: plain_logp(model, config, g, c)[0] for g, c, _ in rows}
    size = len(groups) // optim.updates_per_step
    for _ in range(algorithm.num_iterations):
        for part in range(optim.updates_per_step):
            mine = [(g, c, a) for g, c, a in rows if g.slot // size == part]
            may_mask = mine if algorithm.mask_truncated_completions else []
            masked = {c.seed for _, c, _ in may_mask if c.finish_reason == "length"}
            tokens = sum(len(c.token_ids) for _, c, _ in mine if c.seed not in masked)
            loss = torch.zeros(())
            for g, c, a in mine:
                if c.seed in masked:
                    continue
                logp, entropy = plain_logp(model, config, g, c)
                ratio = (logp - old[c.seed]).exp()
                term = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                d = old[c.seed] - logp
                term = term + algorithm.beta * (d.exp() - d - 1)
                loss = loss - algorithm.entropy_coef * entropy.sum() / tokens  # whatever the loss type
                if algorithm.loss_type == "grpo":
                    loss = loss + term.mean() / len(mine)
                elif algorithm.loss_type == "dr_grpo":
                    loss = loss + term.sum() / (len(mine) * config.rollout.max_completion_length)
                else:
                    loss = loss + term.sum() / tokens
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
            adam.step()


CASES: list[dict[str, Any]] = [
    {"algorithm": {"loss_type": "grpo", "entropy_coef": 0.05}},
    {"algorithm": {"loss_type": "dr_grpo", "mask_truncated_completions": True}},
    {"algorithm": {"beta": 0.3, "num_iterations": 2}, "optim": {"updates_per_step": 2}},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.field_bug("mixed-batch", "last-micro-batch", "accumulated-twice")
def test_the_update_equals_that_of_a_plain_loop(case: dict[str, Any], models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]
    optim = {**case.get("optim", {}), "max_tokens_per_pack": 60}
    config = config_for(path, **{**case, "optim": optim})
    processor = load_processor(str(path))
    groups = make_groups(processor)
    ours, theirs = load(path), load(path)
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}

    report = Learner(ours, processor, config, total_updates=10).update(groups)
    plain_step(theirs, config, groups)

    for name, parameter in theirs.named_parameters():
        want = parameter.detach() - before[name]
        got = dict(ours.named_parameters())[name].detach() - before[name]
        assert want.norm() > 0, name
        assert (got - want).norm() <= 1e-4 * want.norm(), name
    assert all(update_happens(u) is None for u in report.updates)
    assert report.metrics["learner/packs"] > 1


def test_groups_without_advantage_are_left_out_and_change_nothing(models: dict[str, Any]) -> None:
    learner = learner_of(models["qwen2_vl"])
    groups = make_groups(learner.processor)
    report = learner.update(groups)
    # prompts of three groups, and of their nine completions the eight with advantage
    kept = [len(g.prompt.token_ids) for g in groups if g.slot != 1]
    completions = sum(n for slot in (0, 2, 3) for n in LENGTHS[slot]) - LENGTHS[3][2]
    assert report.metrics["learner/tokens"] == sum(kept) + completions
    assert report.metrics["learner/images_encoded"] == 5
    zero = [Group(g.slot, g.prompt, g.completions, g.rewards, (0.0, 0.0, 0.0)) for g in groups]
    state = copy.deepcopy(learner.model.state_dict())
    record = learner.update(zero).updates[0]
    assert not record.stepped and update_happens(record) is None
    assert all(torch.equal(state[n], t) for n, t in learner.model.state_dict().items())


def test_an_update_whose_prompts_were_dropped_is_skipped(models: dict[str, Any]) -> None:
    """Slots 2 and 3 are empty, and they are all of the second update."""
    changes: Any = {"algorithm": {"loss_type": "dr_grpo"}, "optim": {"updates_per_step": 2}}
    learner = learner_of(models["qwen2_vl"], **changes)
    report = learner.update(make_groups(learner.processor)[:2])
    assert [u.stepped for u in report.updates] == [True, False]


def test_means_are_over_every_token_and_absent_where_none_was_run(models: dict[str, Any]) -> None:
    path, far = models["qwen2_vl"], {"learning_rate": 0.05}
    groups = make_groups(load_processor(str(path)))
    # the second iteration starts from weights that have moved far, so that tokens are clipped
    report = learner_of(path, algorithm={"num_iterations": 2}, optim=far).update(groups)
    bonus = {"num_iterations": 2, "entropy_coef": 1e-30}  # which leaves no completion out
    every = learner_of(path, algorithm=bonus, optim=far).update(groups)
    assert report.metrics["clip_ratio/region_mean"] > 0
    for name in ("low", "high", "region"):
        key = f"clip_ratio/{name}_mean"
        assert report.metrics[key] == pytest.approx(every.metrics[key])
    zero = [Group(g.slot, g.prompt, g.completions, g.rewards, (0.0, 0.0, 0.0)) for g in groups]
    idle = learner_of(path).update(zero).metrics
    assert "entropy" not in idle  # 0 would say that the policy has collapsed
    assert idle["loss"] == 0.0 and idle["clip_ratio/region_mean"] == 0.0


def test_the_loss_of_a_step_is_the_mean_of_its_updates(models: dict[str, Any]) -> None:
    """With a rate of 0 every iteration has the same loss."""
    losses = []
    for iterations in (1, 2):
        algorithm = {"num_iterations": iterations, "entropy_coef": 0.1}
        optim = {"learning_rate": 0.0, "updates_per_step": 2}
        learner = learner_of(models["qwen2_vl"], algorithm=algorithm, optim=optim)
        report = learner.update(make_groups(learner.processor))
        assert len(report.updates) == 2 * iterations
        losses.append(report.metrics["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # an entropy bonus of 0.1 * 5.6 in each update, beside which the other terms are small
    assert losses[0] == pytest.approx(-0.56, abs=0.15)


def test_metrics_by_hand(models: dict[str, Any]) -> None:
    learner = learner_of(models["qwen2_vl"], algorithm={"entropy_coef": 1e-9})
    groups = make_groups(learner.processor)
    report, model = learner.update(groups), load(models["qwen2_vl"])
    with torch.no_grad():
        pieces = [plain_logp(model, learner.config, g, c) for g in groups for c in g.completions]
    logp, entropy = torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
    assert report.metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
    gap = (logp + 5.0).abs()  # the "engine" said -5 for every token
    for name, wanted in (("mean", gap.mean()), ("max", gap.max())):
        key = f"sampling/sampling_logp_difference/{name}"
        assert report.metrics[key] == pytest.approx(float(wanted), rel=1e-5)
    assert report.metrics["clip_ratio/region_mean"] == 0.0
    assert report.metrics["learning_rate"] == 1e-3
    plain_tokens = sum(len(g.prompt.token_ids) * 3 + sum(n) for g, n in zip(groups, LENGTHS, strict=True))
    assert report.metrics["learner/tokens_saved"] == plain_tokens - report.metrics["learner/tokens"]


def test_gaps_are_those_of_the_oldest_version_of_a_completion() -> None:
    engine = [(-1.0, -2.0), (-1.0,), (-3.0, -3.0), (-9.0,)]
    learned = {0: torch.tensor([-1.0, -2.5]), 1: torch.tensor([-4.0]), 2: torch.tensor([-3.0, -3.25])}
    learned[3] = torch.tensor([-1.0])
    metrics, found = gap_metrics(engine, learned, [(2,), (1,), (2,), (1, 2)], Ranks())
    assert metrics["sampling/sampling_logp_difference/mean"] == (3.0 + 8.0 + 0.5 + 0.25) / 6
    assert (found[1].mean, found[1].max) == ((3.0 + 8.0) / 2, 8.0)
    assert (found[2].mean, found[2].max) == ((0.5 + 0.25) / 4, 0.5)


def test_a_model_without_trainable_parameters_is_caught(models: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        learner_of(models["qwen2_vl"], load(models["qwen2_vl"]).requires_grad_(False))


def optimizer_of(module: torch.nn.Module, **changes: float) -> Optimizer:
    return Optimizer(module, config_for("x", optim=changes).optim, 500, Ranks())


def test_bfloat16_keeps_updates_that_its_weights_cannot_show() -> None:
    """100 updates of 1e-5 on a weight of 1: bfloat16 alone would stay at 1 for ever."""
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = optimizer_of(module, learning_rate=1e-5, max_grad_norm=0.0, adam_epsilon=1e-8)
    for _ in range(500):
        module.weight.grad = torch.ones_like(module.weight)
        record = optimizer.apply(live_tokens=1)
        assert record.update_norm == pytest.approx(1e-5, rel=0.02)
    assert float(optimizer.masters[0]) == pytest.approx(1 - 500e-5, abs=2e-5)
    assert module.weight.item() == pytest.approx(0.9949, abs=4e-3) and module.weight.item() < 1.0


def test_gradients_of_bfloat16_packs_are_summed_in_float32() -> None:
    """Three packs of gradients 1, 2^-9 and 2^-9: each of the small ones is lost where 1 is bfloat16."""
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = optimizer_of(module, learning_rate=0.1, max_grad_norm=0.0)
    for number, gradient in enumerate((1.0, 2.0**-9, 2.0**-9)):
        optimizer.backward((module.weight * gradient).sum(), last=number == 2)
    (master,) = optimizer.masters
    assert master.grad is not None and master.grad.item() == 1 + 2.0**-8
    assert optimizer.apply(live_tokens=1).grad_norm == 1 + 2.0**-8


def test_matrices_alone_decay() -> None:
    module = torch.nn.Linear(1, 1).bfloat16()
    torch.nn.init.ones_(module.weight)
    torch.nn.init.ones_(module.bias)
    optimizer = optimizer_of(module, learning_rate=0.5, weight_decay=0.5)
    optimizer.backward(sum(p.sum() * 0 for p in module.parameters()), last=True)  # type: ignore[arg-type]
    optimizer.apply(live_tokens=0)
    assert (module.weight.item(), module.bias.item()) == (0.75, 1.0)


def test_a_second_optimizer_of_one_model_gets_its_gradients() -> None:
    module = torch.nn.Linear(2, 1, bias=False).bfloat16()
    for _ in range(3):  # one after the other, as trainers of one process are
        optimizer = optimizer_of(module, learning_rate=0.1, max_grad_norm=0.0)
        optimizer.backward(module(torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)).sum(), last=True)
        record = optimizer.apply(live_tokens=1)
        assert record.grad_norm == pytest.approx(5.0) and record.update_norm > 0.1


def test_a_gradient_that_is_not_finite_is_held_back() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    before = module.weight.detach().clone()
    optimizer = Optimizer(module, config_for("x").optim, 10, Ranks())
    module.weight.grad = torch.tensor([[float("inf"), 1.0]])
    record = optimizer.apply(live_tokens=3)
    assert not record.stepped and record.grad_norm == float("inf")
    assert torch.equal(module.weight, before) and module.weight.grad is None
    message = update_happens(record)
    assert message is not None and "overflow" in message


def test_clipping_by_norm_by_hand() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = optimizer_of(module, max_grad_norm=1.0, adam_epsilon=1e-4)
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.apply(1).grad_norm == pytest.approx(5.0)
    # clipped to 0.6, 0.8; Adam's first step is g / (|g| + eps)
    moved = (before - module.weight.detach())[0].tolist()
    assert moved == pytest.approx([1e-3 * 0.6 / 0.6001, 1e-3 * 0.8 / 0.8001], rel=1e-4)


def test_the_change_of_a_large_tensor_is_that_of_all_its_elements() -> None:
    """Adam's first step moves each of 512 * 512 weights by the rate: their change is 512 * rate."""
    module = torch.nn.Linear(512, 512, bias=False)
    optimizer = optimizer_of(module, adam_epsilon=1e-8)
    module.weight.grad = torch.ones_like(module.weight)
    assert optimizer.apply(1).update_norm == pytest.approx(512 * 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5]),
        ("cosine", [0.0, 0.5, 1.0, 0.5 + 0.5 * 0.70710678, 0.5]),
    ],
)
def test_schedules_by_hand(kind: str, rates: list[float]) -> None:
    optim = config_for("x", optim={"learning_rate": 1.0, "warmup_steps": 2, "lr_scheduler_type": kind}).optim
    assert [schedule(optim, u, 6) for u in range(5)] == pytest.approx(rates)
    # a warm-up longer than the run is cut to its 2 updates, and reaches the peak with them
    assert [schedule(optim.with_values({"warmup_steps": 9}), u, 2) for u in range(3)][:2] == [0.0, 0.5]


@pytest.mark.parametrize("change", [{"token_ids": (), "logprobs": ()}, {"logprobs": (-1.0,)}, None, 99])
def test_groups_that_no_engine_makes_are_one_message(models: dict[str, Any], change: Any) -> None:
    """No token, a log-prob too few, no advantages yet, and a slot that no step has."""
    learner = learner_of(models["qwen2_vl"])
    first, _, third, _ = make_groups(learner.processor)
    spoilt = replace(third, advantages=()) if change is None else replace(third, slot=99)
    if isinstance(change, dict):
        spoilt = replace(third, completions=(*third.completions[:2], replace(third.completions[2], **change)))
    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    with pytest.raises(ValueError, match="r:2"):
        learner.update([first, spoilt])
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())


@pytest.mark.parametrize(
    ("asked", "device", "able", "done"),
    [
        (None, "cuda", True, True),
        (None, "cpu", True, False),
        (None, "cuda", False, False),  # null asks for nothing that the model does not have
        (True, "cpu", True, True),
    ],
)
def test_checkpointing_is_default_on_a_gpu(asked: bool | None, device: str, able: bool, done: bool) -> None:
    turned: list[Any] = []
    model = SimpleNamespace(
        device=torch.device(device), supports_gradient_checkpointing=able,
        config=SimpleNamespace(to_dict=dict), gradient_checkpointing_enable=turned.append,
    )  # fmt: skip
    assert use_checkpointing(model, asked) is done and bool(turned) is done


@pytest.mark.parametrize("kind", ["gradient", "activation"])
def test_checkpointing_goes_by_the_name_that_the_model_has(kind: str) -> None:
    calls: list[str] = []
    model = SimpleNamespace(device=torch.device("cpu"), supports_gradient_checkpointing=True)
    setattr(model, f"is_{kind}_checkpointing", True)
    setattr(model, f"{kind}_checkpointing_enable", lambda options: calls.append("on"))
    setattr(model, f"{kind}_checkpointing_disable", lambda: calls.append("off"))
    assert [use_checkpointing(model, wanted) for wanted in (True, False)] == [True, False]
    assert calls == ["on", "off"]
