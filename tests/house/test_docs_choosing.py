"""The tables of docs/choosing.md are what the formulas say."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mm_grpo.learner.memory import ModelSizes, memory_estimate

PAGE = (Path(__file__).parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")


def rows(first_cell: str) -> list[list[str]]:
    """The cells of the table rows whose first cell has this form."""
    lines = re.findall(rf"^\| ({first_cell}) \| (.+) \|$", PAGE, re.MULTILINE)
    return [[first, *rest.split(" | ")] for first, rest in lines]


def test_the_shares_of_groups_that_teach() -> None:
    table = rows(r"0\.\d+")
    assert len(table) == 4
    for p, *shares in table:
        right = float(p)
        for generations, share in zip((4, 8, 16), shares, strict=True):
            assert share == f"{1 - right**generations - (1 - right) ** generations:.2f}"


def test_the_tokens_of_images() -> None:
    table = rows(r"\d{5,7}")
    assert len(table) == 4
    for pixels, side, small, large in table:
        count = int(pixels)
        assert [side, small, large] == [str(int(math.sqrt(count))), str(count // 784), str(count // 1024)]


def test_the_memory_of_weights_gradients_and_optimizer() -> None:
    table = rows(r"\d billion")
    assert len(table) == 3
    for weights, *shown in table:
        count = int(weights.split()[0]) * 10**9
        found = []
        for trained, given in (
            (count, {}),
            (count, {"zero_stage": 2, "offload": True}),
            (count, {"zero_stage": 2, "processes": 8}),
            (0, {}),
        ):
            sizes = ModelSizes(count, trained, 2, 36, 2048, 2048, 11008, 151936)
            parts = memory_estimate(sizes, tokens=1, checkpointing=True, **given)  # type: ignore[arg-type]
            found.append(f"{(parts.weights + parts.gradients + parts.optimizer) / 1e9:.1f}")
        assert shown == found


def test_rates_and_limits_that_the_page_gives_are_the_defaults() -> None:
    from mm_grpo.config import GRPOConfig

    fields = {field.path: field.description for field in GRPOConfig.field_help()}
    assert "null is 1e-6, and 1e-4 for the adapters of model.lora" in fields["optim.learning_rate"]
    assert "null is true on a GPU" in fields["optim.gradient_checkpointing"]
    assert "2 its weights are dropped too" in fields["rollout.vllm.sleep_level"]
