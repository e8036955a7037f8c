"""The perception term against plain autograd, its masks, and what it is refused for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.families import assert_same
from helpers.passes import gradients
from helpers.steps import config_for, gradients_of, learner_of, load, make_groups, plain_logp
from PIL import Image
from torch import Tensor

from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.algorithm.perception import masked_image, perception_kl
from mm_grpo.config import DataConfig, GRPOConfig
from mm_grpo.data.dataset import Dataset
from mm_grpo.errors import ConfigError
from mm_grpo.learner.features.credit import Credit
from mm_grpo.learner.features.perception import Perception, masked_prompt
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Group

TERM = {"perception_coef": 0.3, "perception_entropy_coef": 0.1, "perception_mask_ratio": 0.5}


def oracle(path: Any, groups: list[Group], config: GRPOConfig) -> tuple[dict[str, Tensor], float, float]:
    """The same by a forward of each whole completion with either image: gradient, loss, mean KL of rows with images."""
    model, processor = load(path), load_processor(str(path))
    algorithm = config.algorithm
    pairs = [(g, c, a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)]
    lengths = torch.tensor([len(c.token_ids) for _, c, _ in pairs])
    weights = LOSSES[algorithm.loss_type].weights(lengths, config.rollout.max_completion_length).tolist()
    tokens, total, kls = int(lengths.sum()), torch.zeros(()), list[float]()
    for (group, c, advantage), weight in zip(pairs, weights, strict=True):
        logp = plain_logp(model, config, group, c)[0]
        loss = -weight * advantage * torch.exp(logp - logp.detach()).sum()  # on policy nothing is clipped
        if group.prompt.vision:
            ratio, seed = algorithm.perception_mask_ratio, group.completions[0].seed
            prompt = masked_prompt(processor, group.prompt, ratio, seed)
            other = Group(group.slot, prompt, group.completions)
            masked = plain_logp(model, config, other, c)[0]
            ratio_of = torch.exp(masked - logp)  # far from the bounds here
            kl = ratio_of - torch.log(ratio_of) - 1
            loss = loss - algorithm.perception_coef * weight * kl.sum()
            loss = loss - algorithm.perception_entropy_coef / tokens * (logp + masked).sum()
            kls += kl.tolist()
        total = total + loss
    total.backward()
    return gradients(model), float(total.detach()), sum(kls) / len(kls)


@pytest.mark.parametrize(
    ("family", "packs", "loss_type", "videos"),
    [
        ("qwen2_5_vl", 4096, "dapo", False),
        ("qwen3_vl", 200, "grpo", False),
        ("qwen2_5_vl", 200, "grpo", True),
    ],
)
def test_gradients_equal_autograds(
    family: str, packs: int, loss_type: str, videos: bool, models: dict[str, Any]
) -> None:
    path = models[family]
    changes: Any = {"algorithm": {**TERM, "loss_type": loss_type}, "optim": {"max_tokens_per_pack": packs}}
    groups = make_groups(load_processor(str(path)), videos=videos)
    groups[1] = replace(groups[1], advantages=(1.0, -1.0, 0.5))  # a row without images, which has no twin
    ours, report = gradients_of(learner_of(path, **changes), groups)
    theirs, loss, kl = oracle(path, groups, config_for(path, **changes))
    without = {**changes, "algorithm": {"loss_type": loss_type}}
    plain, _ = gradients_of(learner_of(path, **without), groups)
    whole = torch.stack([t.norm() for t in theirs.values()]).norm()
    assert_same(ours, theirs)
    difference = torch.stack([(plain[n] - t).norm() for n, t in theirs.items()]).norm()
    assert float(difference) > 1e-3 * float(whole)  # the term is a visible part of it
    metrics = report.metrics
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["perception/kl"] == pytest.approx(kl, rel=1e-3) and kl > 1e-6
    # three rows with five media, each of these and its masked one encoded once
    assert metrics["learner/images_encoded"] == 10


def test_groups_without_advantage_are_run_where_they_have_images(models: dict[str, Any]) -> None:
    """Slot 1 has no image, and slot 1 alone has no advantages: with the others at 0 it stays out and they stay in."""
    path = models["qwen2_5_vl"]
    groups = make_groups(load_processor(str(path)))
    level = [Group(g.slot, g.prompt, g.completions, g.rewards, (0.0,) * 3) for g in groups]
    grads, report = gradients_of(learner_of(path, algorithm=TERM), level)
    rows = [g for g in groups if g.prompt.vision]
    tokens = sum(2 * (len(g.prompt.token_ids) + sum(c.run_length for c in g.completions)) for g in rows)
    assert report.metrics["learner/tokens"] == tokens
    assert any(bool(g.any()) for g in grads.values())


def test_kl_by_hand_and_at_its_bounds() -> None:
    logp = torch.tensor([-1.0, -1.0, -1.0, -30.0], requires_grad=True)
    masked = torch.tensor([-1.0, -3.0, -60.0, -1.0], requires_grad=True)
    kl = perception_kl(logp, masked)
    # e^-2 + 2 - 1; a difference of -59 counts as -20, and is then past the bound of 10
    assert kl.tolist() == pytest.approx([0.0, 1.1353353, 10.0, 10.0])
    kl.sum().backward()
    assert logp.grad is not None and masked.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, 1 - 0.1353353, 0.0, 0.0])
    assert masked.grad.tolist() == pytest.approx([0.0, 0.1353353 - 1, 0.0, 0.0])


def test_squares_of_14_pixels_become_black_with_the_chance_that_was_asked_for() -> None:
    white = Image.new("RGB", (14 * 40, 14 * 40 + 5), "white")
    found = np.array(masked_image(white, 0.6, torch.Generator().manual_seed(1)))
    assert found.shape == (565, 560, 3) and set(np.unique(found)) == {0, 255}
    squares = found[:560].reshape(40, 14, 40, 14, 3)
    assert (squares == squares[:, :1, :, :1]).all()  # a square is all black or all white
    assert (squares[:, 0, :, 0, 0] == 0).mean() == pytest.approx(0.6, abs=0.04)
    again, other = (masked_image(white, 0.6, torch.Generator().manual_seed(s)) for s in (1, 2))
    assert np.array_equal(found, again) and not np.array_equal(found, other)
    assert not np.array(masked_image(white, 1.0, torch.Generator().manual_seed(1))).any()
    assert np.array(white).all()


def test_masks_of_a_prompt_follow_from_its_seed_and_differ(models: dict[str, Any]) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    white = Image.new("RGB", (112, 112), "white")
    prompt = processor.prompt(tiny.sample("r:0", "what", (white, white)))
    first, again, other = (
        [image.tobytes() for image in masked_prompt(processor, prompt, 0.5, seed).sample.images]
        for seed in (7, 7, 8)
    )
    assert first == again and len({*first, *other}) == 4


def test_squares_are_the_same_in_all_frames_and_others_in_the_next_video(models: dict[str, Any]) -> None:
    processor = load_processor(str(models["qwen2_5_vl"]))
    white = tiny.video(1, 6, 112, 112)
    white = replace(white, frames=(Image.new("RGB", (112, 112), "white"),) * 6)
    prompt = processor.prompt(tiny.sample("r:0", "what", (white.frames[0],), (white, white)))
    masked = masked_prompt(processor, prompt, 0.5, 7)
    frames = [[frame.tobytes() for frame in video.frames] for video in masked.sample.videos]
    assert [len(set(each)) for each in frames] == [1, 1]
    shown = {frames[0][0], frames[1][0], masked.sample.images[0].tobytes(), white.frames[0].tobytes()}
    assert len(shown) == 4
    assert masked.token_ids == prompt.token_ids and masked.sample.videos[1].times == white.times


def test_a_pack_has_to_hold_a_completion_twice(models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]
    groups = make_groups(load_processor(str(path)))
    largest = max(len(g.prompt.token_ids) + c.run_length for g in groups for c in g.completions)
    optim = {"max_tokens_per_pack": 2 * largest - 1}
    with pytest.raises(ConfigError, match=rf"= {2 * largest - 1} is smaller than .* tokens, 2 times with"):
        learner_of(path, algorithm=TERM, optim=optim).update(groups)
    learner_of(path, algorithm=TERM, optim={"max_tokens_per_pack": 2 * largest}).update(groups)


def test_conversations_and_text_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"perception_coef = 0.3: must be 0 with"):
        config_for("x", algorithm=TERM, rollout={"environment": "zoom"}).check()
    config, rows = config_for("x"), [{"prompt": f"say {i}", "answer": "a"} for i in range(5)]
    for feature, field in ((Perception, "perception_coef"), (Credit, "credit")):
        with pytest.raises(ConfigError, match=f"{field}: none of 5 rows of the training set has an image"):
            feature.check_rows(config, Dataset(rows, DataConfig()), several_turns=False)
    pictured = [*rows, {"prompt": "what is it", "images": [tiny.picture(1)], "answer": "a"}]
    Perception.check_rows(config, Dataset(pictured, DataConfig()), several_turns=False)
    filmed = [*rows, {"prompt": "what is it", "video": "film.mp4", "answer": "a"}]
    Credit.check_rows(config, Dataset(filmed, DataConfig()), several_turns=False)
    with pytest.raises(ConfigError, match=r"perception_coef.*several turns"):
        Perception.check_rows(config, Dataset(pictured, DataConfig()), several_turns=True)
    Credit.check_rows(config, Dataset(pictured, DataConfig()), several_turns=True)
