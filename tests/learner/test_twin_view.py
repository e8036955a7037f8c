"""The twin view: gradients are those of plain autograd over whole rows, its pictures, and what it is refused for."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import assert_same
from helpers.passes import gradients
from helpers.steps import config_for, distribution, gradients_of, load, make_groups
from PIL import Image
from torch import Tensor

from mm_grpo.algorithm.losses import LOSSES
from mm_grpo.config import DataConfig
from mm_grpo.data.dataset import Dataset
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.learner.alternate_prompts import require_images
from mm_grpo.learner.features.perception import masked_prompt
from mm_grpo.learner.features.twin_view import TwinPrompts, TwinView, gold_crop
from mm_grpo.learner.learner import Learner
from mm_grpo.messages import with_limits
from mm_grpo.processors.base import load_processor
from mm_grpo.types import Group

SEEN, LIMIT = 3200, 12544
"""Pixels of an image for the student and for the teacher."""
MORE = {"view": "high_resolution", "coef": 0.3, "max_pixels": LIMIT}
CROP = {"view": "crop", "coef": 0.3}
BOXES = {"r:0": [10, 4, 50, 40], "r:2": [0, 0, 84, 20.5]}
"""Gold boxes; the last row with images has none."""


def rows_of(path: Any, *, videos: bool = False) -> list[Group]:
    """Two images, none, one, two, or with videos; the first and the third with a gold box."""
    processor = load_processor(str(path), max_pixels=SEEN)
    groups = make_groups(processor, videos=videos)
    samples = [
        replace(g.prompt.sample, columns={"box": BOXES.get(g.prompt.uid)} if g.prompt.vision else {})
        for g in groups
    ]
    return [replace(g, prompt=processor.prompt(s)) for g, s in zip(groups, samples, strict=True)]


def twins_of(path: Any, groups: list[Group], view: str) -> dict[int, Group]:
    """By hand: the crop of the third group is 84 x 21 of 84 x 84, enlarged to the 3136 (3072) pixels that are seen."""
    found = {}
    for group in groups:
        sample, box = group.prompt.sample, BOXES.get(group.prompt.uid)
        if view == "high_resolution" and sample.images:
            prompt = load_processor(str(path), max_pixels=LIMIT).prompt(sample)
        elif view == "crop" and box is not None and sample.images:
            x0, y0, x1, y1 = (round(edge + 0.1) for edge in box)
            image = sample.images[0].crop((x0, y0, x1, y1))
            seen = group.prompt.engine_prompt.images[0]
            factor = (seen.width * seen.height / ((x1 - x0) * (y1 - y0))) ** 0.5
            if factor > 1:
                image = image.resize((math.ceil((x1 - x0) * factor), math.ceil((y1 - y0) * factor)))
            sample = replace(sample, images=(image, *sample.images[1:]))
            prompt = load_processor(str(path), max_pixels=SEEN).prompt(sample)
        else:
            continue
        found[group.slot] = replace(group, prompt=prompt)
    return found


def oracle(
    model: Any, path: Any, groups: list[Group], config: Any
) -> tuple[dict[str, Tensor], float, float, float]:
    """Gradient, loss, mean KL and share of tokens with a twin, by a forward of each whole completion."""
    algorithm = config.algorithm
    twins = twins_of(path, groups, algorithm.twin_view.view)
    pairs = [(g, c, a) for g in groups for c, a in zip(g.completions, g.advantages, strict=True)]
    lengths = torch.tensor([len(c.token_ids) for _, c, _ in pairs])
    weights = LOSSES[algorithm.loss_type].weights(lengths, config.rollout.max_completion_length).tolist()
    total, kls = torch.zeros(()), list[float]()
    for (group, c, advantage), weight in zip(pairs, weights, strict=True):
        every = distribution(model, config, group, c)
        logp = every.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        total = total - weight * advantage * torch.exp(logp - logp.detach()).sum()
        if group.slot in twins:
            with torch.no_grad():
                teacher = distribution(model, config, twins[group.slot], c)
            kl = (teacher.exp() * (teacher - every)).sum(-1)
            total = total + algorithm.twin_view.coef * weight * kl.sum()
            kls += kl.tolist()
    total.backward()
    return gradients(model), float(total.detach()), sum(kls) / len(kls), len(kls) / int(lengths.sum())


def sharp(path: Any) -> Any:
    """The tiny model, whose answers depend on their images by a nat."""
    model = load(path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
        for name, weight in model.named_parameters():
            if "self_attn" in name and weight.dim() > 1:
                weight.mul_(2)
    return model


def learner_of(path: Any, policy: Any, **changes: Any) -> Learner:
    config = config_for(path, data={"max_pixels": SEEN}, **changes)
    return Learner(policy, load_processor(str(path), max_pixels=SEEN), config, 10)


@pytest.mark.parametrize(
    ("family", "packs", "algorithm", "videos"),
    [
        ("qwen2_5_vl", 4096, {"twin_view": MORE, "loss_type": "grpo"}, False),
        ("qwen3_vl", 70, {"twin_view": CROP}, False),
        ("qwen2_5_vl", 4096, {"twin_view": MORE}, True),
        ("qwen2_5_vl", 4096, {"twin_view": CROP}, True),
    ],
)
def test_gradients_equal_autograds(
    family: str, packs: int, algorithm: dict[str, Any], videos: bool, models: dict[str, Any]
) -> None:
    """A row with a video alone has no term, and the video beside an image stays as it is."""
    path = models[family]
    groups = rows_of(path, videos=videos)
    learner = learner_of(path, sharp(path), algorithm=algorithm, optim={"max_tokens_per_pack": packs})
    ours, report = gradients_of(learner, groups)
    theirs, loss, kl, share = oracle(sharp(path), path, groups, learner.config)
    whole = torch.stack([t.norm() for t in theirs.values()]).norm()
    assert_same(ours, theirs)
    plain = learner_of(path, sharp(path), algorithm=algorithm | {"twin_view": None})
    without, _ = gradients_of(plain, groups)
    difference = torch.stack([(without[n] - t).norm() for n, t in theirs.items()]).norm()
    assert float(difference) > 1e-2 * float(whole)  # the term is a visible part of it
    metrics = report.metrics
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["twin_view/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1e-3
    assert metrics["twin_view/share"] == pytest.approx(share)
    # five media and those of the twins, each once: without gradients, and with
    twins = twins_of(path, groups, learner.config.algorithm.twin_view.view)  # type: ignore[union-attr]
    assert metrics["learner/images_encoded"] == 5 + sum(len(g.prompt.sample.media) for g in twins.values())


def test_a_twin_that_no_pack_holds_is_left_out(models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]
    groups = rows_of(path)
    longest = [max(c.run_length for c in g.completions) for g in groups]
    twins = twins_of(path, groups, "high_resolution")
    most = len(twins[3].prompt.token_ids) + longest[3] - 1  # of slot 3 all but one, of slot 0 all
    assert len(twins[0].prompt.token_ids) + longest[0] <= most
    for tokens, slots in ((most, (0, 2)), (most + 1, (0, 2, 3))):
        changes: Any = {"algorithm": {"twin_view": MORE}, "optim": {"max_tokens_per_pack": tokens}}
        metrics = learner_of(path, sharp(path), **changes).update(groups).metrics
        share = sum(len(c.token_ids) for s in slots for c in groups[s].completions) / 48
        assert metrics["twin_view/share"] == pytest.approx(share)
    # files that are no larger than what is seen have no other view
    processor = load_processor(str(path), max_pixels=LIMIT)
    seen = Learner(sharp(path), processor, config_for(path, algorithm={"twin_view": MORE}), 10)
    same = [replace(g, prompt=processor.prompt(g.prompt.sample)) for g in groups]
    metrics = seen.update(same).metrics
    assert metrics["twin_view/share"] == 0 and "twin_view/kl" not in metrics


def test_a_crop_is_the_box_in_the_files_pixels() -> None:
    image = Image.new("RGB", (100, 80))
    image.paste((255, 0, 0), (20, 10, 60, 30))
    sample = tiny.sample("r:7", "what", (image,), box=[20, 10, 59.5, 30])
    for area, size in ((800, (40, 20)), (3200, (80, 40)), (100, (40, 20))):
        cut = gold_crop(sample, area)
        assert cut.size == size and cut.getcolors() == [(size[0] * size[1], (255, 0, 0))]
    beyond = gold_crop(replace(sample, columns={"box": [20, -3, 60, 30]}), 100)
    assert beyond.size == (40, 30)  # and no black edge for what is outside
    # over the edge it ends there, and nothing black is added
    over = gold_crop(replace(sample, columns={"box": [60, 40, 104, 85]}), 100)
    assert over.size == (40, 40) and over.getcolors() == [(1600, (0, 0, 0))]
    for box in ([20, 10, 20, 30], [0, 0, 400, 400], [101, 10, 104, 20], "here"):
        with pytest.raises(DataError, match="r:7"):
            gold_crop(replace(sample, columns={"box": box}), 800)


def test_the_twins_of_a_step_are_its_own(models: dict[str, Any]) -> None:
    """Groups of a later step have the numbers of an earlier one's."""
    path = models["qwen2_5_vl"]
    first, _, _, last = rows_of(path)
    changes: Any = {"algorithm": {"twin_view": MORE}, "optim": {"learning_rate": 0.0}}
    learner, fresh = (learner_of(path, sharp(path), **changes) for _ in range(2))
    kls = [learner.update([group]).metrics["twin_view/kl"] for group in (first, last)]
    assert kls[1] == fresh.update([last]).metrics["twin_view/kl"] != pytest.approx(kls[0])


def test_a_crop_is_enlarged_to_what_the_student_sees_and_limits_stay(models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]
    processor = load_processor(str(path), max_pixels=SEEN)
    prompt = processor.prompt(tiny.sample("r:0", "what", (tiny.picture(1, 28, 112),), box=[0, 0, 28, 28]))
    config = config_for(path, algorithm={"twin_view": CROP}, data={"max_pixels": SEEN})
    twin = TwinPrompts(processor, config).twin(prompt)
    assert twin is not None and prompt.engine_prompt.images[0].size == (28, 112)
    assert twin.sample.images[0].size == (56, 56)  # as many pixels
    data = {"max_pixels": SEEN, "min_pixels": 3136}
    small = tiny.sample("r:1", "what", (tiny.picture(2, 28, 28),))
    seen = TwinPrompts(processor, config_for(path, algorithm={"twin_view": MORE}, data=data)).processor
    own = load_processor(str(path), min_pixels=3136, max_pixels=LIMIT)
    assert seen.prompt(small).token_ids == own.prompt(small).token_ids
    assert len(own.prompt(small).token_ids) > len(processor.prompt(small).token_ids)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_pixels": 784},
        {"min_pixels": 2900, "max_pixels": 2900},
        {"resized_height": 28, "resized_width": 28},
    ],
)
def test_limits_of_a_row_are_the_students_alone_and_put_on_once(limits: Any, models: dict[str, Any]) -> None:
    path = models["qwen2_5_vl"]
    processor = load_processor(str(path), max_pixels=SEEN)
    row = tiny.sample("r:0", "what", (tiny.picture(1, 224, 140),))
    prompt = processor.prompt(replace(row, messages=with_limits(row.messages, limits)))
    (seen,) = prompt.engine_prompt.images
    assert seen.width * seen.height <= limits.get("max_pixels", 784)
    assert masked_prompt(processor, prompt, 0.5, 1).token_ids == prompt.token_ids
    config = config_for(path, algorithm={"twin_view": MORE}, data={"max_pixels": SEEN})
    twin = TwinPrompts(processor, config).twin(prompt)
    whole = load_processor(str(path), max_pixels=LIMIT).prompt(row)
    assert twin is not None and twin.token_ids == whole.token_ids


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "llava_onevision", "gemma3"]
)
def test_a_thin_box_is_widened_and_an_empty_one_has_no_term(
    family: str, models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen's rule refuses ratios above 200, the others none: there the crop is the box alone."""
    qwen = "qwen" in family
    processor = load_processor(str(models[family]), max_pixels=SEEN if qwen else None)
    twins = TwinPrompts(processor, config_for(models[family], algorithm={"twin_view": CROP}))
    for size, box, thin in (
        ((3000, 60), [0, 30, 3000, 31], True),
        ((60, 3000), [59, 0, 60, 3000], True),  # at the edge
        ((398, 2), [0, 0, 398, 1], True),  # the picture itself has 199:1
        ((3000, 60), [7, 7, 8, 8], False),
        ((3000, 60), [2999.5, 30, 3200, 30.5], False),
    ):
        prompt = processor.prompt(tiny.sample("r:7", "what", (Image.new("RGB", size),), box=box))
        seen, twin = prompt.engine_prompt.images[0], twins.twin(prompt)
        assert twin is not None
        shown = twin.sample.images[0].size
        if thin and qwen:  # and no further than it has to be
            assert 130 < max(shown) / min(shown) <= 200, (size, shown)
        else:
            assert shown == gold_crop(prompt.sample, seen.width * seen.height).size
    group = make_groups(processor)[0]
    bad = replace(group.prompt, sample=replace(group.prompt.sample, columns={"box": [20, 10, 20, 30]}))
    assert twins.of_group(replace(group, prompt=bad)) is None
    assert bad.uid in caplog.text and "algorithm.twin_view" in caplog.text


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("twin_view.coef", {"algorithm": {"twin_view": MORE | {"coef": 0}}}),
        ("twin_view.max_pixels", {"algorithm": {"twin_view": CROP | {"max_pixels": 100}}}),
        ("twin_view.max_pixels", {"algorithm": {"twin_view": MORE}, "data": {"max_pixels": LIMIT}}),
        ("twin_view.max_pixels", {"algorithm": {"twin_view": MORE | {"max_pixels": None}}}),
        ("twin_view", {"algorithm": {"twin_view": CROP}, "rollout": {"environment": "zoom"}}),
        ("twin_view", {"algorithm": {"twin_view": CROP, "perception_coef": 0.1}}),
    ],
)
def test_what_a_twin_view_is_refused_with(field: str, changes: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{field}")):
        config_for("x", **changes).check()


def test_a_set_without_what_the_view_needs_is_refused() -> None:
    rows = [{"prompt": f"say {i}", "answer": "a", "images": [tiny.picture(i)]} for i in range(3)]
    boxed = [*rows, rows[0] | {"box": [0, 0, 8, 8]}]
    for given, column in ((rows, None), (boxed, "box")):
        require_images(Dataset(given, DataConfig()), "twin_view", several_turns=False, column=column)
    films: list[dict[str, Any]] = [{"prompt": "say", "answer": "a", "video": "film.mp4"}]
    require_images(Dataset(films, DataConfig()), "perception_coef")
    with pytest.raises(ConfigError, match=r"algorithm\.twin_view: none of 1 rows .* has an image,"):
        TwinView.check_rows(config_for("x"), Dataset(films, DataConfig()), several_turns=False)
    texts: list[dict[str, Any]] = [{"prompt": "say", "answer": "a", "box": [0, 0, 8, 8]}]
    for several_turns, given, column in ((True, rows, None), (False, texts, "box"), (False, rows, "box")):
        with pytest.raises(ConfigError, match=r"algorithm\.twin_view"):
            rows = Dataset(given, DataConfig())
            require_images(rows, "twin_view", several_turns=several_turns, column=column)
