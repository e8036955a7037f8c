"""Every family through processor, embedded engine and learner, against transformers' own processor and forward."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import tiny
from helpers.families import (
    KINDS,
    LENGTHS,
    TABLE,
    VIDEO_KINDS,
    answers_of,
    groups_of,
    is_rounding,
    limit_of,
    plain_inputs,
    plain_logprobs,
    prompts_by_row,
    prompts_of,
    transformers_ids,
)
from helpers.passes import backward_of, forward_of
from helpers.steps import config_for, load
from torch import Tensor

from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.pack import Item, Pack, by_group, plan
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.qwen_vl import QwenVLFamily
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Completion, Prompt, Video

pytestmark = pytest.mark.lowest

ALIKE = ("qwen2_vl", "idefics3")
"""Families whose models are built and run as another one's of the table; what runs a model leaves them out."""
DIFFERENT = [family for family in TABLE if family not in ALIKE]
SINGLE = [
    *((family, kind) for kind in KINDS[:3] for family in TABLE),
    *((family, kind) for kind in VIDEO_KINDS[:2] for family, row in TABLE.items() if row.videos),
]
MIXED = [
    *((family, "mixed") for family in DIFFERENT),
    *((family, "mixed videos") for family in DIFFERENT if TABLE[family].videos),
]
LAYERS = ("qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3")
"""Families whose layers differ: features of images in several levels, linear attention, experts, windows."""
SIZES = ((84, 84), (56, 140), (230, 97))
WINDOW = 6


def test_every_family_is_in_the_table() -> None:
    from mm_grpo.processors import base

    assert set(TABLE) == set(tiny.ALL) == set(base._FAMILIES)


@pytest.mark.parametrize(("family", "kind"), SINGLE)
@pytest.mark.field_bug("tokens-and-features")
def test_a_prompt_equals_transformers_own(family: str, kind: str, models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models[family]))
    assert (processor.video_token_id is not None) == TABLE[family].videos
    (prompt,) = prompts_of(kind, processor)
    theirs = plain_inputs(processor, prompt)
    assert transformers_ids(processor, prompt.token_ids) == theirs["input_ids"][0].tolist()
    pixels = theirs.get("pixel_values", torch.zeros(0))
    if "pixel_values_videos" in theirs:
        pixels = torch.cat([*in_order(prompt, theirs)])
    if "position_ids" in theirs:
        assert torch.equal(prompt.position_ids, theirs["position_ids"][:, 0])
    if pixels.ndim == 5:  # tiles of each image, padded with zeros to one number
        pixels = pixels.flatten(0, 1)
        pixels = pixels[pixels.flatten(1).any(1)]
    assert torch.equal(prompt.vision.get("pixel_values", torch.zeros(0)), pixels)
    bound = processor.max_prompt_tokens(prompt.sample, len(prompt.sample.images))
    bound += sum(processor.max_video_tokens(len(video.frames)) for video in prompt.sample.videos)
    assert len(prompt.token_ids) <= bound
    collapsed = prompt.engine_prompt.token_ids
    assert collapsed.count(processor.image_token_id) == len(prompt.sample.images)
    assert collapsed.count(processor.video_token_id) == len(prompt.sample.videos)
    outside = [t for t in prompt.token_ids if t not in processor.media_token_ids]
    assert set(outside) >= {t for t in collapsed if t not in processor.media_token_ids}


def in_order(prompt: Prompt, theirs: dict[str, Tensor]) -> Iterator[Tensor]:
    """The patches of images and of videos, which transformers keeps apart, in the order of the media."""
    kinds = {}
    for name, grids in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if name in theirs:
            parts = theirs[name].split(theirs[grids].prod(1).tolist()) if grids in theirs else theirs[name]
            kinds[grids[:5]] = iter(parts)
    return (next(kinds["video" if isinstance(m, Video) else "image"]) for m in prompt.engine_prompt.media)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision"])
def test_settings_by_row_are_the_engines_too(family: str, models: dict[str, Path]) -> None:
    """Ids of the engine's side (the model's own processor under the run's limits, on our images), and its log-probs."""
    processor, learner, engine, _ = sides(models[family])
    prompts = prompts_by_row(processor)
    areas = [[i.width * i.height for i in prompt.engine_prompt.images] for prompt in prompts]
    assert areas[0][0] == 56 * 112 or family.startswith("qwen3")
    assert areas[0][1] <= 3136 < areas[1][0] <= 9500 < areas[2][0]
    for prompt, ends in zip(prompts, (True, False, False), strict=True):
        theirs = plain_inputs(processor, prompt)["input_ids"][0].tolist()
        assert list(prompt.token_ids) == theirs
        assert processor.decode(theirs).endswith("<think></think>") is ends
    sampling = Sampling(5, temperature=learner.config.rollout.temperature)
    done = engine.generate(requests_for(prompts, [range(1)] * 3, sampling))
    for prompt, completion in zip(prompts, done, strict=True):
        ours = learner.score(prompt, [completion.token_ids], as_sampled=True)[0]
        assert completion.logprobs == pytest.approx(ours, abs=1e-5)


def sides(
    path: Path, dtype: torch.dtype = torch.float32, kind: str = "mixed"
) -> tuple[Any, Learner, TransformersEngine, list[Prompt]]:
    """Processor, learner and engine of one model, and a mixed batch."""
    processor, model = load_processor(str(path)), load(path).to(dtype)
    config = config_for(path, model={"dtype": str(dtype).removeprefix("torch.")})
    learner, engine = Learner(model, processor, config, 10), TransformersEngine(model, processor)
    return processor, learner, engine, prompts_of(kind, processor)


def answered(engine: TransformersEngine, prompts: list[Prompt], sampling: Sampling) -> list[list[Completion]]:
    """Four completions of each prompt."""
    done = engine.generate(requests_for(prompts, [range(10 * i, 10 * i + 4) for i in range(3)], sampling))
    return [done[4 * i : 4 * i + 4] for i in range(3)]


@pytest.mark.parametrize(("family", "kind"), MIXED)
def test_the_engine_samples_what_the_learner_scores(family: str, kind: str, models: dict[str, Path]) -> None:
    """Prefill and decoding of a mixed batch, the learner's packs, and transformers' forward: one distribution."""
    processor, learner, engine, prompts = sides(models[family], kind=kind)
    sampling = Sampling(10, temperature=learner.config.rollout.temperature)
    groups = answered(engine, prompts, sampling)
    assert len({c.token_ids for group in groups for c in group}) == 12
    for prompt, completions in zip(prompts, groups, strict=True):
        ids = [c.token_ids for c in completions]
        sampled = learner.score(prompt, ids, as_sampled=True)
        for c, ours, whole in zip(completions, sampled, learner.score(prompt, ids), strict=True):
            assert c.logprobs == pytest.approx(ours, abs=1e-5)
            assert engine.score(prompt, c.token_ids) == pytest.approx(whole, abs=1e-5)
            with torch.no_grad():
                plain, _ = plain_logprobs(engine.model, processor, prompt, c.token_ids, sampling.temperature)
            assert ours == pytest.approx(plain.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def narrow(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma whose windows are shorter than its answers, and whose queries are not scaled by the size of a head."""
    path = tmp_path_factory.mktemp("narrow") / "gemma3"
    shutil.copytree(models["gemma3"], path)
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["head_dim"] == 32 == config["text_config"]["query_pre_attn_scalar"]
    config["text_config"] |= {"sliding_window": WINDOW, "query_pre_attn_scalar": 5}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
def test_answers_longer_than_a_window(dtype: torch.dtype, limit: float, narrow: Path) -> None:
    """By one token, at which their own first one is out of sight, and by more; transformers' forward is in float32."""
    processor, learner, engine, prompts = sides(narrow, dtype)
    plain = load(narrow)
    sampling = Sampling(WINDOW + 4, temperature=learner.config.rollout.temperature)
    groups = answered(engine, prompts, sampling)
    assert min(max(len(c.token_ids) for c in group) for group in groups) == WINDOW + 4
    for prompt, completions in zip(prompts, groups, strict=True):
        answers = [c.token_ids for c in completions]
        answers += [answers[0][: WINDOW + more] for more in (0, 1, 2)]
        sampled = learner.score(prompt, answers, as_sampled=True)
        for place, (answer, ours) in enumerate(zip(answers, sampled, strict=True)):
            with torch.no_grad():
                want = plain_logprobs(plain, processor, prompt, answer, sampling.temperature)[0].tolist()
            assert ours == pytest.approx(want, abs=limit)
            if place < 4:
                assert completions[place].logprobs == pytest.approx(want, abs=limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "mixed") for family in LAYERS[1:]), *(pair for pair in MIXED if pair[1] == "mixed videos")],
)
def test_in_bfloat16_engine_and_learner_agree_but_for_rounding(
    family: str, kind: str, models: dict[str, Path]
) -> None:
    processor, learner, engine, prompts = sides(models[family], torch.bfloat16, kind)
    gaps = []
    for number, prompt in enumerate(prompts):
        answers = answers_of(processor, number)
        for answer, ours in zip(answers, learner.score(prompt, answers), strict=True):
            gaps += [abs(a - b) for a, b in zip(ours, engine.score(prompt, answer), strict=True)]
    assert 0 < fmean(gaps) < 0.01
    # a token that gets other experts than in the engine may be far off
    assert max(gaps) < (0.1 if not processor.family.routers(learner.model) else 1.0)
    assert learner.update(groups_of(processor, kind)).metrics["learner/update_norm"] > 0


def test_flex_attention_is_refused_where_masks_are_more_than_segments(models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models["gemma3"]))
    config = config_for(models["gemma3"], model={"attn": "flex_attention"})
    with pytest.raises(ConfigError, match=r"model\.attn = 'flex_attention' does not work for a gemma3_text"):
        Learner(load(models["gemma3"]), processor, config, 10)


@pytest.mark.parametrize("family", DIFFERENT)
@pytest.mark.field_bug("several-images")
def test_log_probs_depend_on_every_image(family: str, models: dict[str, Path]) -> None:
    """Else no other test would see a wrong image; also on zeros, as the guard against unread images gives them."""
    processor, model = load_processor(str(models[family])), load(models[family])
    engine, answer = TransformersEngine(model, processor), answers_of(processor, 5)[3]

    def asked(*numbers: int) -> Prompt:
        images = tuple(tiny.picture(n, *SIZES[place]) for place, n in enumerate(numbers))
        return processor.prompt(tiny.sample("r", "what", images))

    first = asked(1, 2, 3)
    blank = replace(first, vision={k: v * 0 if v.is_floating_point() else v for k, v in first.vision.items()})
    scored = torch.tensor(engine.score(first, answer))
    for other in (asked(7, 2, 3), asked(1, 8, 3), asked(1, 2, 9), asked(1, 3, 2), blank):
        found = torch.tensor(engine.score(other, answer))
        assert bool(found.isfinite().all()) and float((found - scored).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("family", "kind", "checkpointing"),
    [
        *((*pair, False) for pair in MIXED),
        *(pytest.param(family, "text", False, marks=pytest.mark.long) for family in ("qwen3_5", "gemma3")),
        *(pytest.param(family, "mixed", True, marks=pytest.mark.long) for family in LAYERS),
        *(
            pytest.param(family, "mixed videos", True, marks=pytest.mark.long)
            for family in ("qwen2_5_vl", "qwen3_5")
        ),
    ],
)
@pytest.mark.field_bug("prefix-without-images")
def test_packs_equal_forwards(
    family: str, kind: str, checkpointing: bool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, entropies and gradients, in several packs and tiles, with images as pixels."""
    model, reference = load(models[family]), load(models[family])
    processor = load_processor(str(models[family]))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    items, expected = [], []
    for g, prompt in enumerate(prompts_of(kind, processor)):
        for answer in answers_of(processor, g):
            items.append(Item(len(items), g, prompt, answer))
            expected.append(plain_logprobs(reference, processor, prompt, answer))
    weight = [torch.linspace(-1, 2, len(i.token_ids)) * (1 + i.index % 3) for i in items]
    loss = sum((w * logp).sum() + 0.3 * (w * h).sum() for w, (logp, h) in zip(weight, expected, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()

    monkeypatch.setattr("mm_grpo.learner.logprobs.chunk_bytes_of", lambda gpu: 5000)
    module = forward_of(model, processor)
    longest = max(len(i.prompt.token_ids) for i in items) + max(LENGTHS)
    pair = sum(sorted(len(p.token_ids) + sum(LENGTHS) for p in prompts_of(kind, processor))[:2])
    packs = plan(items, max_tokens=max(longest + 8, pair if kind != "text" else 0), apart=True)
    assert len(packs) > 1  # the budget makes several packs, so their sums are tested too
    # and the masks between groups of a row, where there are several
    assert any(len(by_group(row)) > 1 for rows in packs for row in rows) == (kind != "text")

    def loss_of(pack: Pack, logp: Tensor, entropy: Tensor) -> Tensor:
        own = list(dict.fromkeys(pack.completion_index.tolist()))
        assert float((logp - torch.cat([expected[i][0] for i in own])).detach().abs().max()) <= 1e-5
        assert float((entropy - torch.cat([expected[i][1] for i in own])).detach().abs().max()) <= 1e-5
        w = torch.cat([weight[i] for i in own])
        return (w * logp).sum() + 0.3 * (w * entropy).sum()

    work = backward_of(module, packs, processor.media_token_ids, loss_of)
    assert work.prompts == len(prompts_of(kind, processor)) < sum(len(row) for rows in packs for row in rows)
    assert_gradients(model, reference)


def assert_gradients(model: Any, reference: Any) -> None:
    """Equal to 1e-5 of their norm; where transformers' forward gives none (a text), ours are none or 0."""
    theirs = dict(reference.named_parameters())
    largest = max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for name, parameter in model.named_parameters():
        want = theirs[name].grad
        if want is None or not want.any():
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None, name
        assert_close(name, parameter.grad, want, largest)


def assert_close(name: str, ours: Tensor, theirs: Tensor, largest: float) -> None:
    """Equal to the limit of their norm; `largest` is that of the largest tensor's."""
    if is_rounding(name):
        assert float(ours.norm()) <= 1e-6 * largest, name
        return
    assert float((ours - theirs).norm()) <= limit_of(name) * float(theirs.norm()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "kind"),
    [
        *((f, "shared_prefix", "mixed") for f in LAYERS),
        ("gemma3", "unshared", "mixed"),
        pytest.param("qwen3_5", "unshared", "mixed", marks=pytest.mark.long),
        *((f, "shared_prefix", "mixed videos") for f in ("qwen2_5_vl", "qwen3_vl")),
        pytest.param("qwen3_5", "shared_prefix", "mixed videos", marks=pytest.mark.long),
    ],
)
def test_the_update_equals_that_of_a_plain_loop(
    family: str, shape: str, kind: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGD: AdamW's first step divides each gradient by itself, and makes as much of a small one's rounding."""
    from mm_grpo.learner import optimizer

    monkeypatch.setattr(optimizer, "adamw", lambda params, *_, **__: torch.optim.SGD(params, lr=1.0))
    path = models[family]
    processor: Any = load_processor(str(path))
    processor.layout = shape
    ours, theirs = load(path), load(path)
    groups = groups_of(processor, kind)
    longest = max(len(g.prompt.token_ids) for g in groups) + max(LENGTHS)
    optim = {"learning_rate": 1000.0, "max_tokens_per_pack": longest, "max_grad_norm": 1e9}
    rollout = {"prompts_per_step": 3, "num_generations": 4, "max_completion_length": 12}
    algorithm = {"importance_sampling_mode": "none"}  # the log-probs of these completions are no engine's
    config = config_for(path, optim=optim, rollout=rollout, algorithm=algorithm)
    report = Learner(ours, processor, config, 10).update(groups)
    assert report.metrics["learner/packs"] >= 3
    prompts = sum(len(g.prompt.token_ids) for g in groups)
    answers = sum(len(c.token_ids) for g in groups for c in g.completions)
    if shape == "unshared":
        assert report.metrics["learner/tokens"] == 4 * prompts + answers
    else:
        assert report.metrics["learner/tokens"] < 3 * prompts + answers
        assert report.metrics["learner/images_encoded"] == 4

    pairs = [(g, c, a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)]
    tokens = sum(len(c.token_ids) for _, c, _ in pairs)
    for group, completion, advantage in pairs:  # dapo at the sampling policy: the ratio is 1
        temperature = config.rollout.temperature
        logp, _ = plain_logprobs(theirs, processor, group.prompt, completion.token_ids, temperature)
        (-(logp - logp.detach()).exp() * advantage).sum().div(tokens).backward()
    before = dict(load(path).named_parameters())
    want = {n: -1000.0 * p.grad for n, p in theirs.named_parameters() if p.grad is not None and p.grad.any()}
    after, largest = dict(ours.named_parameters()), max(float(t.norm()) for t in want.values())
    for name, start in before.items():
        moved = after[name].detach() - start.detach()
        if name not in want:
            assert not moved.any(), name
            continue
        assert_close(name, moved, want[name], largest)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_goes_by_the_name_that_the_model_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an error: a forward that takes other keywords too would drop one of another name."""

    def old(past_key_values: Any = None, **others: Any) -> Any:
        return SimpleNamespace(last_hidden_state=(past_key_values, others))

    def new(cache: Any = None, **others: Any) -> Any:
        return SimpleNamespace(last_hidden_state=(cache, others))

    class Backbone(torch.nn.Module):
        forward = staticmethod(old if name == "past_key_values" else new)

    model, signature = SimpleNamespace(model=Backbone()), Mock(side_effect=inspect.signature)
    monkeypatch.setattr(inspect, "signature", signature)
    for step in range(3):
        states: Any = QwenVLFamily().hidden_states(model, past_key_values=step, use_cache=True)
        assert states == (step, {"use_cache": True})
    assert signature.call_count == 1, "not at every token"
