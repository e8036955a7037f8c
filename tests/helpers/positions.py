"""M-RoPE positions by the definition (arXiv:2409.12191, section 2.1), from the sizes of the media alone.

transformers' own are others after a video: up to 5.19 text goes on from max(height, width) behind its first position,
which is inside of a video that is longer in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mm_grpo.types import Medium, Video


def defined_positions(processor: Any, token_ids: Sequence[int], media: Sequence[Medium]) -> Tensor:
    """Positions [3, L] of ids with the tokens of these media, one token after the other."""
    blocks = iter([block for medium in media for block in _blocks(processor.config, medium)])
    is_medium = {processor.image_token_id, processor.video_token_id}
    positions, first = list[tuple[int, int, int]](), 0
    while len(positions) < len(token_ids):
        block = next(blocks) if token_ids[len(positions)] in is_medium else [(0, 0, 0)]
        positions += [(first + t, first + y, first + x) for t, y, x in block]
        first = 1 + max(max(position) for position in positions)
    assert next(blocks, None) is None and len(positions) == len(token_ids)
    return torch.tensor(positions).T


def _blocks(config: Any, medium: Medium) -> list[list[tuple[int, int, int]]]:
    """(t, y, x) of the tokens of each run of a medium."""
    side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    width, height = (length // side for length in medium.size)
    pairs = -(-len(medium.frames) // 2) if isinstance(medium, Video) else 1
    times = [0] * pairs
    if not isinstance(medium, Video) or config.model_type == "qwen2_vl":
        times = list(range(pairs))
    elif config.model_type == "qwen2_5_vl":
        times = [int(pair * config.vision_config.tokens_per_second * 2 / medium.fps) for pair in range(pairs)]
    cells = [[(t, y, x) for y in range(height) for x in range(width)] for t in times]
    return cells if config.model_type.startswith("qwen3") else [[cell for pair in cells for cell in pair]]
