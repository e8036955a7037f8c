"""Images that nobody reads: the prompt with other pixels, when it is scored, and which change is a failure."""

from __future__ import annotations

import torch
from torch import Tensor

from mm_grpo.health.unread_images import is_due, unread_images, with_other_pixels
from mm_grpo.types import EnginePrompt, Prompt, Sample


def prompt(**vision: Tensor) -> Prompt:
    return Prompt(Sample("train:3", []), (1,), EnginePrompt((1,), ()), torch.zeros(3, 1), vision)


def test_other_pixels_have_the_shape_of_the_first_and_leave_grids_alone() -> None:
    grid = torch.tensor([[1, 2, 2]])
    given = prompt(pixel_values=torch.tensor([[0.5, -0.5]]), image_grid_thw=grid)
    other = with_other_pixels(given)
    assert other is not None and other.uid == "train:3" and other.token_ids == (1,)
    assert other.vision["pixel_values"].tolist() == [[0.0, 0.0]]
    assert torch.equal(other.vision["image_grid_thw"], grid)
    assert given.vision["pixel_values"].tolist() == [[0.5, -0.5]]


def test_pixels_that_are_0_already_become_1() -> None:
    other = with_other_pixels(prompt(pixel_values=torch.zeros(1, 2)))
    assert other is not None and other.vision["pixel_values"].tolist() == [[1.0, 1.0]]


def test_a_text_prompt_has_no_other_pixels() -> None:
    assert with_other_pixels(prompt()) is None
    assert with_other_pixels(prompt(image_grid_thw=torch.tensor([[1, 2, 2]]))) is None


def test_only_a_change_of_exactly_0_is_a_failure() -> None:
    message = unread_images(0.0, "train:3")
    assert message is not None and "a completion of train:3" in message and "mm-grpo doctor" in message
    assert unread_images(1e-9, "train:3") is None
    assert unread_images(float("nan"), "train:3") is None  # the log-prob gap says that


def test_the_first_step_and_every_50th_are_measured() -> None:
    assert [step for step in range(1, 151) if is_due(step)] == [1, 50, 100, 150]
