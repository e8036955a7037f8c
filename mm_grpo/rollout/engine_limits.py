"""vLLM's limits of sequence length and images, where the config leaves them to the rows.

vLLM reserves room for one sequence of `rollout.vllm.max_model_len` at least, so the whole context of a model (128,000
tokens of Qwen2.5-VL) is more than a run needs and often more than fits. Rows are read with their images closed; an
image counts as large as `data.max_pixels` lets it be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Sample

ROWS = 1000
"""Rows of a set that are looked at: of a list the longest ones, else evenly spaced ones."""
IMAGE = 5000
"""Characters that an image counts as there."""
MARGIN = 1.25
"""Factor on the longest row that was looked at, where there are others."""
STEP = 256
OPENED = 8
"""Rows whose environment is begun, to see how long what it shows first is."""
UNKNOWN = 32768
"""Tokens of a sequence where there are neither rows to look at nor a context in the model's config."""


@dataclass(frozen=True)
class EngineLimits:
    """Most tokens of a sequence, and most images of a prompt. `sentence` says where they come from; "" if set."""

    max_model_len: int
    max_images: int
    sentence: str = ""

    def in_config(self, config: GRPOConfig) -> GRPOConfig:
        """The config with these for its limits."""
        fields = {"max_model_len": self.max_model_len, "max_images": self.max_images}
        return config.with_values({f"rollout.vllm.{name}": value for name, value in fields.items()})


def engine_limits(
    config: GRPOConfig,
    processor: Processor,
    datasets: Iterable[Rows],
    context: int | None,
    toolbox: Toolbox | None = None,
) -> EngineLimits:
    """The limits of `rollout.vllm`, and for those that are null what the rows of `datasets` need.

    A sequence is a prompt, the longest completion of training or evaluation, and one token for scoring; it is never
    longer than the model's `context`, and as long without rows. Raises DataError for a row that is wrong.
    """
    given, rollout = config.rollout.vllm, config.rollout
    answer = max(rollout.max_completion_length, rollout.eval.max_completion_length or 0) + 1
    if given.max_model_len is not None and given.max_images is not None:
        return EngineLimits(given.max_model_len, given.max_images)
    parts = [part for each in datasets for part in each.sources]
    looked, total = [(part, i) for part in parts for i in _rows_to_look_at(part)], sum(map(len, parts))
    longest = images = 1
    for dataset, index in looked:
        fields = dataset.fields(index)
        row, count = dataset.row_name(index), len(fields.images)
        longest = max(longest, processor.max_prompt_tokens(fields.messages, count, row=row))
        images = max(images, count)
    if toolbox is not None:
        added = [_added(toolbox, processor, dataset.sample(index)) for dataset, index in looked[:OPENED]]
        longest += max((tokens for tokens, _ in added), default=0)
        images += max((shown for _, shown in added), default=0) + rollout.max_images_per_episode
    if len(looked) < total:
        longest = int(longest * MARGIN)
    most = min(longest, config.data.max_prompt_length or longest)
    need = -(-(most + answer) // STEP) * STEP if total else context or UNKNOWN
    length, images = given.max_model_len or min(need, context or need), given.max_images or images
    return EngineLimits(
        length,
        images,
        f"vLLM: up to {length:,} tokens of prompt and completion (rollout.vllm.max_model_len) and "
        f"{images} image(s) in a prompt (rollout.vllm.max_images), for {len(looked):,} of {total:,} rows",
    )


def _added(toolbox: Toolbox, processor: Processor, sample: Sample) -> tuple[int, int]:
    """The tokens and images that tools and environment add to the prompt of a row."""
    prepared = toolbox.prepare(sample)
    lengths = [len(processor.prompt(one).token_ids) for one in (sample, prepared)]
    return lengths[1] - lengths[0], len(prepared.images) - len(sample.images)


def _rows_to_look_at(dataset: Rows) -> list[int]:
    if len(dataset) <= ROWS:
        return list(range(len(dataset)))
    if not dataset.in_memory:
        return list(range(0, len(dataset), -(-len(dataset) // ROWS)))

    def size(index: int) -> int:
        fields = dataset.fields(index)
        return len(str(fields.messages)) + IMAGE * len(fields.images)

    return sorted(range(len(dataset)), key=size, reverse=True)[:ROWS]
