"""Limits in tokens: of a prompt, and of vLLM if the config leaves them to the rows.

vLLM reserves room for one sequence of `rollout.vllm.max_model_len` at least. The whole context of a model (128,000
tokens of Qwen2.5-VL) is more than a run needs and often more than fits. So rows are read with their media closed; an
image counts as large as `data.max_pixels` lets it be, a video as `data.video_max_frames` and `data.video_max_pixels`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_grpo.errors import ConfigError
from mm_grpo.types import Sample

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import Processor

ROWS = 1000
"""Rows of a set that are looked at: the longest ones of a list, else evenly spaced ones."""
MEDIUM = 5000
"""Characters that an image or a video counts as when the longest rows are chosen."""
MARGIN = 1.25
"""Factor on the longest row that was looked at, if there are more rows."""
STEP = 256
OPENED = 8
"""Rows whose environment is begun, to see how long its first observation is."""
UNKNOWN = 32768
"""Tokens of a sequence when there are neither rows to look at nor a context in the model's config."""


def prompt_limit(
    config: GRPOConfig, context: int | None, max_model_len: int | None, *, training: bool
) -> tuple[str | None, int | None]:
    """Return the smallest limit of a prompt of training or evaluation: its name and tokens; (None, None) without one.

    `context` is the model's, `max_model_len` vLLM's. Raises ConfigError when the longest completion takes all of one.
    """
    field, answer = "rollout.max_completion_length", config.rollout.max_completion_length
    if not training:
        field = "rollout.eval.max_completion_length"
        answer = config.rollout.eval.max_completion_length or answer
    limits = [("data.max_prompt_length", config.data.max_prompt_length)]
    for name, size, extra in (
        (f"the model's context of {context}", context, 0),
        (f"rollout.vllm.max_model_len = {max_model_len}", max_model_len, 1),  # scoring samples one token more
    ):
        room = None if size is None else size - answer - extra
        if room is not None and room < 1:
            raise ConfigError(
                f"{field} = {answer}: {name} leaves a prompt none of it; lower the first, or raise the second where it "
                "can be"
            )
        limits.append((f"{name} less {field}", room))
    if training and config.data.on_overlong == "drop":
        pack = config.optim.max_tokens_per_pack
        limits.append((f"optim.max_tokens_per_pack = {pack}, with any completion,", config.pack_room))
    finite = [(name, limit) for name, limit in limits if limit is not None]
    return min(finite, key=lambda pair: pair[1]) if finite else (None, None)


@dataclass(frozen=True)
class EngineLimits:
    """Largest sequence, in tokens, and largest numbers of images and of videos in a prompt."""

    max_model_len: int
    max_images: int
    max_videos: int
    sentence: str = ""
    """Origin of the limits, for the user; "" if the config sets all."""

    def in_config(self, config: GRPOConfig) -> GRPOConfig:
        """Return the config with these limits."""
        names = ("max_model_len", "max_images", "max_videos")
        return config.with_values({f"rollout.vllm.{name}": getattr(self, name) for name in names})


def engine_limits(
    config: GRPOConfig,
    processor: Processor,
    datasets: Iterable[Rows],
    context: int | None,
    toolbox: Toolbox | None = None,
) -> EngineLimits:
    """Return the limits of `rollout.vllm`, and in place of null what the rows of `datasets` need.

    A sequence is a prompt, the longest completion of training or evaluation, and one token for scoring. It is never
    longer than the model's `context`, and as long without rows. Raises DataError for a row that is wrong.
    """
    vllm, rollout = config.rollout.vllm, config.rollout
    answer = max(rollout.max_completion_length, rollout.eval.max_completion_length or 0) + 1
    if vllm.max_model_len is not None and vllm.max_images is not None and vllm.max_videos is not None:
        return EngineLimits(vllm.max_model_len, vllm.max_images, vllm.max_videos)
    parts = [part for dataset in datasets for part in dataset.sources]
    places, total = [(part, i) for part in parts for i in _rows_to_look_at(part)], sum(map(len, parts))
    longest, images, videos = 1, 1, 0
    video_tokens = getattr(processor, "max_video_tokens", lambda frames: 0)(config.data.video_max_frames)
    for dataset, index in places:
        fields = dataset.fields(index)
        counts, kwargs = (len(fields.images), len(fields.videos)), fields.chat_template_kwargs
        closed = Sample(dataset.row_name(index), fields.messages, chat_template_kwargs=kwargs)
        longest = max(longest, processor.max_prompt_tokens(closed, counts[0]) + counts[1] * video_tokens)
        images, videos = max(images, counts[0]), max(videos, counts[1])
    if toolbox is not None:
        added = [_added(toolbox, processor, dataset.sample(index)) for dataset, index in places[:OPENED]]
        more_tokens, more_images, more_videos = map(max, zip(*added, strict=True)) if added else (0, 0, 0)
        longest += more_tokens
        images += more_images + rollout.max_images_per_episode
        videos += more_videos
        if videos:  # most tools show none, and room for videos costs memory
            videos += rollout.max_images_per_episode
    if len(places) < total:
        longest = int(longest * MARGIN)
    prompt = min(longest, config.data.max_prompt_length or longest)
    need = -(-(prompt + answer) // STEP) * STEP if total else context or UNKNOWN
    length, images = vllm.max_model_len or min(need, context or need), vllm.max_images or images
    videos = videos if vllm.max_videos is None else vllm.max_videos
    return EngineLimits(
        length,
        images,
        videos,
        f"vLLM: up to {length:,} tokens of prompt and completion (rollout.vllm.max_model_len), {images} image(s) "
        f"(max_images) and {videos} video(s) (max_videos) in a prompt, for {len(places):,} of {total:,} rows",
    )


def _added(toolbox: Toolbox, processor: Processor, sample: Sample) -> tuple[int, int, int]:
    """Return the tokens, images and videos that tools and environment add to the prompt of a row."""
    prepared = toolbox.prepare(sample)
    before, after = (len(processor.prompt(version).token_ids) for version in (sample, prepared))
    images, videos = len(prepared.images) - len(sample.images), len(prepared.videos) - len(sample.videos)
    return after - before, images, videos


def _rows_to_look_at(dataset: Rows) -> list[int]:
    if len(dataset) <= ROWS or not dataset.in_memory:
        return list(dataset.spaced(ROWS))

    def size(index: int) -> int:
        fields = dataset.fields(index)
        return len(str(fields.messages)) + MEDIUM * (len(fields.images) + len(fields.videos))

    return sorted(range(len(dataset)), key=size, reverse=True)[:ROWS]
