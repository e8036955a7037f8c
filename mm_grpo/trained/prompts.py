"""Prompts and completions that a run left in its folder, to compare a saved model with the trained one on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from transformers import AutoTokenizer

from mm_grpo.config import GRPOConfig
from mm_grpo.data.images import open_image
from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import Processor
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.types import Prompt, Sample

COUNT = 4
"""Prompts that are compared on."""
TOKENS = 64
"""Tokens of a completion that are compared, at most."""

Asked = list[tuple[Prompt, tuple[int, ...]]]
"""Prompts, each with the token ids [T] of a completion."""


def prompts_of_run(paths: RunPaths, processor: Processor, config: GRPOConfig, count: int = COUNT) -> Asked:
    """`count` prompts of the rollout log with a completion each, newest first, those with an image before others.

    ConfigError where the run left none.
    """
    found = list(itertools.islice(_logged(paths, processor, config), 8 * count))
    if not found:
        raise ConfigError(f"'{paths.root}' has no rollouts/ to compare on; put them back")
    found.sort(key=lambda asked: not asked[0].engine_prompt.images)
    return found[:count]


def _logged(paths: RunPaths, processor: Processor, config: GRPOConfig) -> Iterator[tuple[Prompt, Any]]:
    seen: set[str] = set()
    for step in reversed(logged_steps(paths)):
        for row in read_rollouts(paths, step):
            kept = all(IMAGE_NAME.fullmatch(n) and (paths.images / n).is_file() for n in row["images"])
            if row["uid"] in seen or not kept:
                continue
            seen.add(row["uid"])
            images = tuple(open_image(str(paths.images / n), row=row["uid"]) for n in row["images"])
            prompt = processor.prompt(Sample(uid=row["uid"], messages=row["messages"], images=images))
            yield prompt, _text_ids(processor, config, row["completion"])


def _text_ids(processor: Processor, config: GRPOConfig, text: str) -> tuple[int, ...]:
    """The ids of a completion's text, without media tokens, and an end token behind."""
    own = getattr(processor, "tokenizer", None)  # a processor of the user's own need not have one
    tokenizer: Any = own or AutoTokenizer.from_pretrained(config.model.path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    kept = [int(i) for i in ids if i not in processor.media_token_ids][: TOKENS - 1]
    return (*kept, min(processor.stop_token_ids))
