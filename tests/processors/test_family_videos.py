"""Videos in the families with tiles: prompts, passes and sampling against transformers' own processor and forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import answers_of, is_rounding
from helpers.passes import backward_of, forward_of
from helpers.steps import config_for, load
from torch import Tensor

from mm_grpo.errors import BadMedia, DataError
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.pack import Item, Pack, plan
from mm_grpo.processors.base import load_processor
from mm_grpo.processors.video_input import frames_array, video_metadata
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Prompt, Sample, Video

FAMILIES = ("internvl", "llava_onevision")


def row(uid: str, *media: Any, text: str = "what is it") -> Sample:
    """A row whose media stand before its text, in this order."""
    kinds = ["video" if isinstance(medium, Video) else "image" for medium in media]
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]
    images = tuple(medium for medium in media if not isinstance(medium, Video))
    videos = tuple(medium for medium in media if isinstance(medium, Video))
    return Sample(uid, [{"role": "user", "content": content}], images, videos)


def rows() -> list[Sample]:
    """Rows with a video of an odd number of frames, with two around an image, without a video, and of text."""
    image, other = tiny.picture(3, 112, 60), tiny.picture(4, 84, 84)
    return [
        row("one", tiny.video(1, 3, 90, 50)),
        row("two", tiny.video(2, 2), image, tiny.video(3, 2, 200, 100), text="and these"),
        row("image", other, text="or this one"),
        row("text"),
    ]


def plain_inputs(processor: Any, prompt: Prompt, answer: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """What transformers' own processor makes of the row, its media at their final size, with an answer behind."""
    hf, media = processor.hf, prompt.engine_prompt
    text = hf.tokenizer.apply_chat_template(
        prompt.sample.messages, chat_template=processor.template, tokenize=False, add_generation_prompt=True
    )
    options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    if media.videos:
        options["videos"] = [frames_array(video) for video in media.videos]
        options["video_metadata"] = [video_metadata(video) for video in media.videos]
    made = dict(hf(text=[text], images=list(media.images) or None, **options))
    del made["attention_mask"]
    made["input_ids"] = torch.cat([made["input_ids"], torch.tensor([list(answer)], dtype=torch.long)], 1)
    return made


def plain_logprobs(model: Any, processor: Any, prompt: Prompt, answer: tuple[int, ...]) -> Tensor:
    """Log-probs [T] by transformers' own processor and forward on prompt + answer, one row."""
    logits = model(**plain_inputs(processor, prompt, answer), use_cache=False).logits[
        0, -len(answer) - 1 : -1
    ]
    keep = torch.ones(logits.shape[1], dtype=torch.bool)
    keep[sorted(processor.media_token_ids)] = False
    return logits.masked_fill(~keep, -1e9).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_pixels_equal_transformers_own(family: str, models: dict[str, Path]) -> None:
    processor: Any = load_processor(str(models[family]))
    for sample in rows():
        prompt = processor.prompt(sample)
        theirs = plain_inputs(processor, prompt)
        ids = list(prompt.token_ids)
        if family == "internvl":  # vLLM's ids: `<video>` in the frames of a video
            assert (processor.video_token_id in ids) == bool(sample.videos)
            ids = [processor.image_token_id if token == processor.video_token_id else token for token in ids]
        assert ids == theirs["input_ids"][0].tolist()
        assert all(video.size == (56, 56) for video in prompt.engine_prompt.videos)
        pixels = [
            theirs[key].flatten(0, -4) for key in ("pixel_values", "pixel_values_videos") if key in theirs
        ]
        ours = prompt.vision.get("pixel_values", torch.zeros(0, 3, 56, 56))
        if family == "llava_onevision" and len(pixels) == 2:  # transformers has images first
            ours = torch.cat([ours[2:-2], ours[:2], ours[-2:]])
        assert torch.equal(ours, torch.cat([*pixels, torch.zeros(0, 3, 56, 56)]))
        frames = sum(processor.max_video_tokens(len(video.frames)) for video in sample.videos)
        assert len(ids) <= processor.max_prompt_tokens(sample, len(sample.images)) + frames
        assert processor.prompt(prompt.sample).token_ids == prompt.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_packs_equal_forwards(family: str, models: dict[str, Path]) -> None:
    """Log-probs and gradients, in packs of groups with videos, images and text alone."""
    model, reference = load(models[family]), load(models[family])
    processor = load_processor(str(models[family]))
    items, expected = [], []
    for g, sample in enumerate(rows()):
        prompt = processor.prompt(sample)
        for answer in answers_of(processor, g):
            items.append(Item(len(items), g, prompt, answer))
            expected.append(plain_logprobs(reference, processor, prompt, answer))
    weight = [torch.linspace(-1, 2, len(i.token_ids)) * (1 + i.index % 3) for i in items]
    loss = sum((w * logp).sum() for w, logp in zip(weight, expected, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    gaps = []

    def loss_of(pack: Pack, logp: Tensor, _: Tensor) -> Tensor:
        order = list(dict.fromkeys(pack.completion_index.tolist()))
        gaps.append(float((logp - torch.cat([expected[i] for i in order])).detach().abs().max()))
        return (torch.cat([weight[i] for i in order]) * logp).sum()

    packs = plan(items, max_tokens=330, apart=True)
    assert len(packs) > 1
    work = backward_of(forward_of(model, processor), packs, processor.media_token_ids, loss_of)
    assert work.prompts == 4 < sum(len(row) for rows in packs for row in rows)
    assert max(gaps) <= 1e-5
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        want = theirs[name].grad
        if want is None or not want.any():
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            gap = float((parameter.grad - want).norm())
            assert gap <= 1e-5 * float(want.norm()) or is_rounding(name), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_what_the_learner_scores(family: str, models: dict[str, Path]) -> None:
    """The prefill of a mixed batch, the learner's packs and transformers' forward: one distribution."""
    processor, model = load_processor(str(models[family])), load(models[family])
    learner = Learner(model, processor, config_for(models[family]), 10)
    engine, prompts = TransformersEngine(model, processor), [processor.prompt(sample) for sample in rows()]
    done = engine.generate(
        requests_for(prompts, [range(10 * i, 10 * i + 2) for i in range(4)], Sampling(6, temperature=1.0))
    )
    assert len({c.token_ids for c in done}) == 8
    for number, completion in enumerate(done):
        prompt = prompts[number // 2]
        (whole,) = learner.score(prompt, [completion.token_ids])
        assert engine.score(prompt, completion.token_ids) == pytest.approx(whole, abs=1e-5)
        with torch.no_grad():
            plain = plain_logprobs(model, processor, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(plain.tolist(), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_depend_on_every_frame(family: str, models: dict[str, Path]) -> None:
    processor, model = load_processor(str(models[family])), load(models[family])
    engine, answer = TransformersEngine(model, processor), answers_of(processor, 5)[3]
    video, image = tiny.video(1, 3), tiny.picture(9)

    def scored(*media: Any) -> Tensor:
        return torch.tensor(engine.score(processor.prompt(row("r", *media)), answer))

    first = scored(video, image)
    for number in range(3):
        frames = list(video.frames)
        frames[number] = tiny.picture(77 + number)
        changed = scored(replace(video, frames=tuple(frames)), image)
        assert float((changed - first).abs().max()) > 1e-3
    assert float((scored(image, video) - first).abs().max()) > 1e-3


def test_a_picture_of_an_observation_may_be_a_video(models: dict[str, Path]) -> None:
    for family in FAMILIES:
        processor: Any = load_processor(str(models[family]))
        image, video = tiny.picture(1), tiny.video(2, 3)
        start, both = processor.prompt(row("r", image)), processor.prompt(row("r", image, video))
        picture = processor.picture(video, row="r")
        longer = processor.extended(start, [processor.video_token_id], [picture])
        assert longer.token_ids == (*start.token_ids, *picture.token_ids)
        for key, tensor in both.vision.items():
            assert torch.equal(longer.vision[key], tensor)


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_families_without_videos_refuse_the_row(family: str, models: dict[str, Path]) -> None:
    processor = load_processor(str(models[family]))
    with pytest.raises(DataError, match=rf"^train:5: the row has 1 video\(s\).*'{family}' get images alone"):
        processor.prompt(row("train:5", tiny.video(1)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", ["max_pixels", "min_pixels", "resized_height"])
def test_limits_that_no_frame_keeps_are_refused(family: str, limit: str, models: dict[str, Path]) -> None:
    processor = load_processor(str(models[family]))
    sample = row("train:5", tiny.video(1))
    values = {"max_pixels": 56 * 56, "min_pixels": 56 * 56, "resized_height": 56, "resized_width": 56}
    sample.messages[0]["content"][0].update(values)
    assert processor.prompt(sample).engine_prompt.videos[0].size == (56, 56)
    sample.messages[0]["content"][0][limit] += 1 if limit == "min_pixels" else -1
    with pytest.raises(BadMedia, match=r"train:5: video 0: .* every frame at 56x56 = 3136 pixels"):
        processor.prompt(sample)
    small = load_processor(str(models[family]), video_max_pixels=3000)
    with pytest.raises(BadMedia, match=r"data\.video_max_pixels = 3000"):
        small.prompt(row("train:5", tiny.video(1)))
