"""Prompts and completions of a run's rollout log, on which an export is compared with the trained model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL.Image import Image
from transformers import AutoTokenizer

from mm_grpo.config import GRPOConfig
from mm_grpo.data.images import open_image
from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import Processor
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.types import Prompt, Sample, Video

COUNT = 4  # prompts of a comparison
MAX_TOKENS = 64  # of a completion

ProofPrompts = list[tuple[Prompt, tuple[int, ...]]]
"""Prompts, each with the token ids [T] of a completion."""


def prompts_of_run(paths: RunPaths, processor: Processor, config: GRPOConfig) -> ProofPrompts:
    """Return COUNT logged prompts, preferably with media, each with a completion; ConfigError if there are none."""
    prompts = list(itertools.islice(_logged_prompts(paths, processor, config), 8 * COUNT))
    if not prompts:
        raise ConfigError(f"'{paths.root}' has no rollouts/ to compare on; put them back")
    prompts.sort(key=lambda pair: not pair[0].engine_prompt.media)
    return prompts[:COUNT]


def _logged_prompts(
    paths: RunPaths, processor: Processor, config: GRPOConfig
) -> Iterator[tuple[Prompt, Any]]:
    uids: set[str] = set()
    for step in reversed(logged_steps(paths)):
        for row in read_rollouts(paths, step):
            names = [*row["images"], *(name for video in row["videos"] for name in video["frames"])]
            exist = all(IMAGE_NAME.fullmatch(n) and (paths.images / n).is_file() for n in names)
            if row["uid"] in uids or not exist:
                continue
            uids.add(row["uid"])
            yield processor.prompt(_sample(paths, row)), _text_ids(processor, config, row["completion"])


def _sample(paths: RunPaths, row: Mapping[str, Any]) -> Sample:
    """Return the sample that was logged in a row, with its media at their final size; frames were compressed."""

    def read(names: Sequence[str]) -> tuple[Image, ...]:
        return tuple(open_image(str(paths.images / name), row=row["uid"]) for name in names)

    videos = (Video(read(v["frames"]), tuple(v["times"]), v["fps"]) for v in row["videos"])
    return Sample(row["uid"], row["messages"], read(row["images"]), tuple(videos))


def _text_ids(processor: Processor, config: GRPOConfig, text: str) -> tuple[int, ...]:
    """Return the ids of a completion's text without media tokens, and an end token behind them."""
    # a processor of the user's own need not have a tokenizer
    tokenizer: Any = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(config.model.path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    text_ids = [int(i) for i in ids if i not in processor.media_token_ids][: MAX_TOKENS - 1]
    return (*text_ids, min(processor.stop_token_ids))
