"""The table of families: a row for each, and what every test over the families needs. A family joins by one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import tiny
from helpers.positions import defined_positions
from mm_grpo.config import GRPOConfig
from mm_grpo.data import Mixture, load
from mm_grpo.processors.base import Processor
from mm_grpo.types import Completion, Group, Medium, Prompt, Video


@dataclass(frozen=True)
class Row:
    """What is particular to a family: `vllm` is the number format in which vLLM on a CPU runs it, "" where it does not,
    `build` are options of its tiny model there. `videos` says whether it takes videos."""

    vllm: str = "float32"
    videos: bool = False
    build: Mapping[str, Any] = field(default_factory=dict)


TABLE: dict[str, Row] = {
    "qwen2_vl": Row(videos=True),
    "qwen2_5_vl": Row(videos=True),
    "qwen3_vl": Row(videos=True),
    "qwen3_5": Row(vllm="bfloat16", videos=True, build={"linear_width": 128}),
    "qwen3_vl_moe": Row(videos=True),
    # a token gets all experts: with two of them bfloat16 gives some tokens others than the plain forward
    "qwen3_5_moe": Row(vllm="bfloat16", videos=True, build={"linear_width": 128, "chosen": 4}),
    "internvl": Row(videos=True),
    "smolvlm": Row(),
    "idefics3": Row(),
    "llava_onevision": Row(videos=True),
    "gemma3": Row(vllm=""),
}
KINDS = ("text", "one image", "three images", "mixed")
"""Batches of every family."""
VIDEO_KINDS = ("one video", "two videos and an image", "mixed videos")
"""Batches of families with videos."""
LENGTHS = (3, 7, 1, 12)


DECAYS = (".A_log", ".dt_bias")
"""Ends of names whose gradients are sums of large parts that cancel (learner/linear_attention.py). In fp32 those of
packs and of the plain forward lie up to 1.8e-5 of their norm from those in fp64, on either side."""
_BALANCED = re.compile(r"vision_(tower|model)\..*k_proj\.bias$")


def limit_of(name: str) -> float:
    """The share of its norm by which rounding may move the gradient of a parameter of this name."""
    return 3e-5 if name.endswith(DECAYS) else 1e-5


def is_rounding(name: str) -> bool:
    """Whether the gradient of a parameter of this name is rounding and nothing else. A bias of keys without rotary
    positions moves all scores of a query alike."""
    return bool(_BALANCED.search(name))


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], limit: float = 1e-5) -> None:
    """Equal to `limit` of the norm of each tensor, but for gradients that are rounding."""
    assert any(bool(t.any()) for t in theirs.values())
    for name, want in theirs.items():
        assert float((ours[name] - want).norm()) <= limit * float(want.norm()) or is_rounding(name), name


def prompts_of(kind: str, processor: Processor) -> list[Prompt]:
    """The prompts of a batch: without an image, with one, with three of different sizes, or all of these; with videos,
    with an image between two of them, or both and a text."""
    text = tiny.sample("text", "no picture at all")
    one = tiny.sample("one", "and that one there", (tiny.picture(3, 112, 84),))
    pictures = tiny.picture(1, 84, 84), tiny.picture(2, 56, 140), tiny.picture(4, 230, 97)
    three = tiny.sample("three", "what is it", pictures)
    video = tiny.sample("video", "and that one there", videos=(tiny.video(3, 6, 84, 56),))
    # the first is longer in time than in space, and has an odd number of frames
    lengths = video_lengths(processor, 9, 4)
    videos = tiny.video(1, lengths[0], 56, 84, fps=1.0), tiny.video(2, lengths[1], 84, 84, fps=3.0)
    between = tiny.sample("videos", "what is it", (tiny.picture(1, 84, 56),), videos)
    image, *others, question = between.messages[0]["content"]
    content = [others[0], {"type": "text", "text": "and"}, image, others[1], question]
    between = replace(between, messages=[{"role": "user", "content": content}])
    batches = {
        "text": [text], "one image": [one], "three images": [three], "mixed": [three, text, one],
        "one video": [video], "two videos and an image": [between], "mixed videos": [between, text, video],
    }  # fmt: skip
    return [processor.prompt(sample) for sample in batches[kind]]


def video_lengths(processor: Any, *lengths: int) -> Sequence[int]:
    """These numbers of frames, or the last in place of each: some processors of transformers stack a row's videos."""
    stacked = processor.config.model_type in ("internvl", "llava_onevision")
    return lengths[-1:] * len(lengths) if stacked else lengths


THINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}"
)


def prompts_by_row(processor: Any) -> list[Prompt]:
    """Prompts with settings of parts, of a row and of a source; the template of `processor` learns to read one."""
    processor.template = processor.template.removesuffix(THINKING) + THINKING
    parts = [
        {"type": "image", "resized_height": 56, "resized_width": 112},
        {"type": "image", "max_pixels": 3136},
    ]
    limited = {
        "prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "which"}]}],
        "images": [tiny.picture(1, 140, 140), tiny.picture(2, 230, 97)],
        "chat_template_kwargs": {"enable_thinking": False, "style": None},
    }
    plain = {"prompt": "what is it", "image": tiny.picture(3, 200, 100)}
    mixture = Mixture([{"path": [limited, plain], "max_pixels": 9500}, [plain]])
    rows = load(mixture, GRPOConfig.from_dict({"model": {"path": "m"}}).data)
    return [processor.prompt(rows.sample(i)) for i in range(len(rows))]


def legal_tokens(processor: Any) -> list[int]:
    return [t for t in range(len(processor.tokenizer)) if t not in processor.media_token_ids]


def answers_of(processor: Processor, seed: int, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """Random completions of such lengths, without a media token."""
    generator = torch.Generator().manual_seed(seed)
    legal = torch.tensor(legal_tokens(processor))
    return [tuple(legal[torch.randint(len(legal), (n,), generator=generator)].tolist()) for n in lengths]


def groups_of(processor: Processor, kind: str = "mixed") -> list[Group]:
    """Three groups of a mixed batch, of four completions each."""
    advantages = ((1.0, -0.5, -0.5, 0.3), (0.2, 0.7, -0.9, 0.1), (-1.2, 0.2, 1.0, 0.4))
    groups = []
    for slot, prompt in enumerate(prompts_of(kind, processor)):
        done = tuple(
            Completion(ids, (-5.0,) * len(ids), "", "stop", seed=4 * slot + g)
            for g, ids in enumerate(answers_of(processor, slot))
        )
        groups.append(Group(slot, prompt, done, (0.0,) * 4, advantages[slot]))
    return groups


def plain_inputs(processor: Any, prompt: Prompt, answer: Sequence[int] = ()) -> dict[str, Tensor]:
    """What transformers' own processor makes of the row, its media at their final size, with an answer behind.
    Positions after a video are those of the definition, because transformers' are others (helpers/positions.py)."""
    hf = processor.hf
    options = {"chat_template": processor.template, **prompt.sample.chat_template_kwargs}
    messages = list(prompt.sample.messages)
    text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    made = dict(media_inputs(processor, text, prompt.engine_prompt.media))
    del made["attention_mask"]
    made["input_ids"] = torch.cat([made["input_ids"], torch.tensor([list(answer)], dtype=torch.long)], 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in made:
            made[name] = torch.nn.functional.pad(made[name], (0, len(answer)))
    if prompt.engine_prompt.videos and processor.family.position_axes:
        ids = made["input_ids"][0].tolist()
        made["position_ids"] = defined_positions(processor, ids, prompt.engine_prompt.media)[:, None]
    return made


def transformers_ids(processor: Any, token_ids: Sequence[int]) -> list[int]:
    """Ids as transformers' model takes them: InternVL's of a video are there those of an image."""
    image, video = processor.image_token_id, processor.family.video_token_id
    return [image if token == video else token for token in token_ids]


def media_inputs(processor: Any, text: str, media: Sequence[Medium]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a text with placeholders of media, which are at their final size."""
    videos = [medium for medium in media if isinstance(medium, Video)]
    images = [medium for medium in media if not isinstance(medium, Video)]
    options: dict[str, Any] = {"images": images or None}
    if videos:
        options["videos"] = [np.stack([np.asarray(frame) for frame in video.frames]) for video in videos]
        options["video_metadata"] = list(map(metadata_of, videos))
        options["videos_kwargs"] = {"do_resize": False, "do_sample_frames": False}
    made = processor.hf(text=[text], return_tensors="pt", add_special_tokens=False, **options)
    for name in ("video_metadata", "second_per_grid_ts"):
        made.pop(name, None)
    return dict(made)


def metadata_of(video: Video) -> dict[str, Any]:
    """A file of four times as many frames per second, of which the video shows every fourth."""
    rate = 4 * video.fps
    indices = [round(time * rate) for time in video.times]
    return {"fps": rate, "frames_indices": indices, "total_num_frames": 4 * len(indices)}


def plain_logprobs(
    model: Any, processor: Any, prompt: Prompt, answer: Sequence[int], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs [T] and entropies [T] by transformers' own processor and forward on prompt + answer, one row."""
    logits = model(**plain_inputs(processor, prompt, answer), use_cache=False).logits[0].float()
    logits = logits[-len(answer) - 1 : -1] / temperature
    keep = torch.ones(logits.shape[1], dtype=torch.bool)
    keep[sorted(processor.media_token_ids)] = False
    logp = logits.masked_fill(~keep, -1e9).log_softmax(-1)
    entropy = -(logp.exp() * logp)[:, keep].sum(-1)
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0], entropy
