"""Groups over several packs: a prompt is run once a pass and its images encoded once, and nothing changes by it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import answers_of, groups_of, is_rounding, plain_logprobs, prompts_of
from helpers.passes import backward_of, counted, forward_of, gradients, orders_of
from helpers.steps import config_for, load, make_groups
from torch import Tensor

from mm_grpo.config import LoRAConfig
from mm_grpo.learner.forward_pass import ForwardPass, logprobs_and_entropies
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import add_adapters
from mm_grpo.learner.pack import Item, Pack, layout, plan, spread_prompts
from mm_grpo.learner.prompt_states import PromptState, PromptStates
from mm_grpo.learner.step_report import PackStatistics
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import EnginePrompt, Prompt

Plan = list[list[list[Item]]]
LENGTHS = (5, 2, 9, 4, 7, 3, 8, 6)


def items_of(processor: Processor, kind: str = "mixed") -> list[Item]:
    """Eight completions each after the three prompts of a batch: three images, a text and one image."""
    prompts = prompts_of(kind, processor)
    pairs = [(g, p, ids) for g, p in enumerate(prompts) for ids in answers_of(processor, g, LENGTHS)]
    return [Item(i, g, prompt, ids) for i, (g, prompt, ids) in enumerate(pairs)]


def over(items: list[Item], packs: int) -> Plan:
    """Each group over so many packs; the last of one holds the first of the next, where there are several."""
    groups = [items[start : start + len(LENGTHS)] for start in range(0, len(items), len(LENGTHS))]
    size = len(LENGTHS) // packs
    parts = [[[group[i : i + size]] for i in range(0, len(group), size)] for group in groups]
    planned: Plan = []
    for own in parts:
        if packs > 1 and planned:
            planned[-1][0] += own.pop(0)[0]
        planned += own
    return planned


def scattered(items: list[Item]) -> Plan:
    """Two parts of a group in one row, others in two rows of a pack, a group that is begun again after another."""
    one, two, three = (items[i : i + 8] for i in range(0, len(items), 8))
    return [
        [[*one[:2], *two[:3], *one[2:3]], [*three[:1]]],
        [[*three[1:4], *one[3:]], [*three[4:6]], [*two[3:]]],
        [[*three[6:]]],
    ]


def weighted(pack: Pack, logp: Tensor, entropy: Tensor) -> Tensor:
    """Weights that differ between completions, so that none can stand in for another."""
    weights = (pack.completion_index % 7 - 2.5).to(logp)
    return (weights * (logp + 0.3 * entropy)).sum()


def plainly(model: Any, processor: Processor, items: list[Item]) -> dict[int, tuple[Tensor, Tensor]]:
    """Log-probs and entropies by transformers' forward, after the backward of the same loss."""
    found = {i.index: plain_logprobs(model, processor, i.prompt, i.token_ids) for i in items}
    loss = torch.stack([(i % 7 - 2.5) * (lp + 0.3 * h).sum() for i, (lp, h) in found.items()]).sum()
    loss.backward()
    return {i: (logp.detach(), entropy.detach()) for i, (logp, entropy) in found.items()}


class Reference:
    """What transformers' forward gives for each item: log-probs and entropies by index, and the gradients."""

    def __init__(self, model: Any, processor: Processor, items: list[Item]) -> None:
        self.model, self.processor, self.items = copy.deepcopy(model), processor, items
        self.expected = plainly(self.model, processor, items)
        self.gradients = gradients(self.model)

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """The gradients in float64."""
        model = copy.deepcopy(self.model).double()
        model.zero_grad()
        plainly(model, self.processor, self.items)
        return gradients(model)

    def assert_gradients(self, ours: dict[str, Tensor]) -> None:
        """Equal to 1e-5; or, where what is summed partly cancels, nearer to float64's than those of transformers are:
        with the products of some processors theirs are 1.7e-5 away."""
        for name, want in self.gradients.items():
            if not want.any() or is_rounding(name):
                continue
            if float((ours[name] - want).norm()) > 1e-5 * float(want.norm()):
                away, theirs = ((found - self.exact[name]).norm() for found in (ours[name], want))
                assert float(away) <= float(theirs) <= 5e-5 * float(want.norm()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_prompts_packs_are_summed_in_float32(dtype: torch.dtype) -> None:
    """1, 2^-8 and 2^-8: each of the small ones is lost where 1 is bfloat16."""
    prompt = Prompt(tiny.sample("r:0", "what"), (1,), EnginePrompt((), ()), torch.arange(1), {})
    weight = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    states = PromptStates([[prompt]] * 3)
    for factor in (1.0, 2.0**-8, 2.0**-8):
        (state,) = states.of([prompt], lambda _: PromptState(1, {}, weight * 1))
        (state.last * factor).sum().backward()
    states.joined(prompt, None).backward()
    assert weight.grad is not None and float(weight.grad) == 1 + 2.0**-7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3_vl", "trained"),
        ("qwen3_vl", "frozen"),
        ("qwen3_5", "trained, checkpointed"),
        ("gemma3", "adapters, checkpointed"),
        ("qwen2_5_vl", "adapters, checkpointed, videos"),
        ("qwen3_vl", "untied, frozen, videos"),
        ("qwen3_5", "untied, checkpointed, videos"),
    ],
)
def test_groups_over_packs_equal_plain_forwards(
    case: str, family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Log-probs, entropies and gradients; and below everything a prompt and its media are seen once."""
    path = tiny.build(family, tmp_path, tie=False) if "untied" in case else models[family]
    processor, model = load_processor(str(path)), load(path)
    if case.startswith("adapters"):
        generator = torch.Generator().manual_seed(0)
        add_adapters(model, LoRAConfig(rank=2), processor.family)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B" in name:
                    parameter.normal_(std=0.05, generator=generator)
    if "frozen" in case:
        processor.family.tower(model).requires_grad_(False)
    items = items_of(processor, "mixed videos" if "videos" in case else "mixed")
    reference = Reference(model, processor, items)
    if "checkpointed" in case:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module, media = forward_of(model, processor), processor.media_token_ids
    prompts = {id(i.prompt): i.prompt for i in items}.values()
    video, image = processor.video_token_id, processor.image_token_id  # type: ignore[attr-defined]
    # features of videos are put in the place of images
    token_ids = [[image if t == video else t for t in prompt.token_ids] for prompt in prompts]
    pixels = sum(p.vision["pixel_values"].numel() for p in prompts if p.vision)

    def loss(pack: Pack, logp: Tensor, entropy: Tensor) -> Tensor:
        numbers = dict.fromkeys(pack.completion_index.tolist())
        wanted = zip(*(reference.expected[i] for i in numbers), strict=True)
        for got, want in zip((logp, entropy), wanted, strict=True):
            assert float((got - torch.cat(want)).detach().abs().max()) <= 1e-5
        return weighted(pack, logp, entropy)

    for planned in (over(items, 4), scattered(items)):
        model.zero_grad()
        with counted(model) as seen:
            work = backward_of(module, planned, media, loss)
        assert work.prompts == 3 == len(token_ids) and all(seen.runs(ids) == 1 for ids in token_ids)
        assert sum(seen.pixels) == pixels
        assert work.tokens == sum(len(i.prompt.token_ids) for i in items[:: len(LENGTHS)]) + 3 * sum(LENGTHS)
        reference.assert_gradients(gradients(model))
        assert module.prompts is None and module.features is None


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "smolvlm"])
def test_a_prompts_end_gives_gradients_in_order(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Of prompts with images and without; with a head of its own, which the prompt itself does not reach."""
    model: Any = load(tiny.build(family, tmp_path, tie=False))
    processor = load_processor(str(tmp_path))
    module, order = forward_of(model, processor), orders_of(model)
    orders = []
    planned = over(items_of(processor), 2)
    with ForwardPass(module, planned, processor.media_token_ids, PackStatistics()) as whole:
        assert whole.backwards == len(planned) + 3
        for pack in whole.packs():
            weighted(pack, *module(pack)[:2]).backward()
            orders.append(list(order))
            order.clear()
            for end in whole.ended(pack):
                module(end)[0].backward()
                orders.append(list(order))
                order.clear()
    assert len(orders) == whole.backwards and len(orders[0]) > 20
    assert all(each == orders[0] for each in orders)


def test_a_pass_without_gradients_keeps_a_prompt_as_long_as_it_is_needed(models: dict[str, Path]) -> None:
    path = models["qwen3_5"]
    processor = load_processor(str(path))
    module, items = forward_of(load(path), processor), items_of(processor)
    alone = [[[item]] for item in items]
    want = logprobs_and_entropies(module, (layout(rows, processor.media_token_ids) for rows in alone))[0]
    held = []
    with (
        counted(module.model) as seen,
        ForwardPass(module, over(items, 4), processor.media_token_ids, PackStatistics()) as whole,
    ):

        def packs() -> Any:
            for pack in whole.packs():
                yield pack
                assert module.prompts is not None
                held.append(len(module.prompts._states))

        found = logprobs_and_entropies(module, packs())[0]
    assert all(torch.allclose(found[i], want[i], atol=1e-5) for i in want)
    assert all(seen.runs(i.prompt.token_ids) == 1 for i in items[:: len(LENGTHS)])
    assert max(held) == 1 and held[-1] == 0


@pytest.mark.field_bug("images-again")
def test_a_learner_runs_prompts_and_images_once_in_every_pass(models: dict[str, Path]) -> None:
    """The old policy's pass, the reference's, two updates and two iterations, over packs of any size."""
    path = models["qwen2_5_vl"]
    processor, found = load_processor(str(path)), []
    for tokens in (4096, 70):
        config = config_for(
            path,
            algorithm={"beta": 0.2, "num_iterations": 2},
            optim={
                "updates_per_step": 2, "max_tokens_per_pack": tokens, "gradient_checkpointing": True
            },
        )  # fmt: skip
        learner = Learner(load(path), processor, config, 10)
        metrics = learner.update(make_groups(processor)).metrics
        found.append([metrics[f"learner/{n}"] for n in ("prompts_run", "images_encoded", "packs")])
    # four prompts with five images in four passes: reference, and two iterations; the old pass of two prompts
    assert [each[:2] for each in found] == [[14, 18]] * 2
    assert found[0][2] < found[1][2]


@pytest.mark.parametrize("tower_alone", [False, True])
def test_no_blank_image_is_run_if_order_does_not_matter(tower_alone: bool, models: dict[str, Path]) -> None:
    """Packs of completions alone, and texts: without ZeRO a tower need not be part of each backward."""
    path = models["internvl"]
    processor, model = load_processor(str(path)), load(path)
    if tower_alone:
        model.requires_grad_(False)
        processor.family.tower(model).requires_grad_(True)
    groups, blanks = groups_of(processor), []
    longest = max(len(g.prompt.token_ids) + c.run_length for g in groups for c in g.completions)
    rollout = {"prompts_per_step": 3, "num_generations": 4, "max_completion_length": 12}
    config = config_for(path, optim={"max_tokens_per_pack": longest}, rollout=rollout)
    learner = Learner(model, processor, config, 10)
    features = type(model.model).get_image_features

    def noted(self: Any, pixels: Tensor, *args: Any, **options: Any) -> Any:
        blanks.append(bool(pixels.min() == pixels.max()))
        return features(self, pixels, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model), "get_image_features", noted)
        report = learner.update(groups)
    assert report.metrics["learner/packs"] > 3 == report.metrics["learner/prompts_run"]
    assert report.updates[0].update_norm > 0
    assert any(blanks) == tower_alone and blanks.count(False) == 2  # two prompts with images


def test_the_plan_has_one_such_group_open_at_a_time(models: dict[str, Path]) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    items = items_of(processor)
    longest = max(len(i.prompt.token_ids) for i in items)
    planned = plan(items, longest + 12, apart=True)
    spread = {id(p) for p in spread_prompts(planned)}
    seen = [[id(i.prompt) for row in rows for i in row if id(i.prompt) in spread] for rows in planned]
    assert spread and all(len(set(each)) <= 1 for each in seen)
    order = [each[0] for each in seen if each]
    assert order == sorted(order, key=order.index)  # the packs of one stand together
    assert sorted(i.index for rows in planned for row in rows for i in row) == list(range(len(items)))
    for rows in planned:
        prompts = {id(i.prompt): len(i.prompt.token_ids) for row in rows for i in row}
        assert sum(prompts.values()) + sum(i.run_length for row in rows for i in row) <= longest + 12
    assert plan(items, 4096, apart=True) == plan(items, 4096)


def test_two_groups_of_one_row_are_two_and_share_nothing(models: dict[str, Path]) -> None:
    """A row that fills two slots is one prompt, and a group that fits its pack stays as it is."""
    processor = load_processor(str(models["qwen2_5_vl"]))
    one = items_of(processor)[: len(LENGTHS)]
    other = [replace(item, index=item.index + 50, group=7) for item in one]
    assert spread_prompts([[[*one, *other]]]) == [] == spread_prompts([[one], [other]])
    assert spread_prompts([[[*one[:3], *other]], [one[3:]]]) == [one[0].prompt]
