"""What TRL documents of `environment_factory`, rule by rule; the classes here are ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.scripted import ScriptedEngine, call
from helpers.small_runs import config_for, rollouts_of, rows_of
from helpers.tiny import picture, sample
from helpers.tool_calls import call_tool

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.environments.host import LocalHost
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError
from mm_grpo.files import encoded_image


class Lamp:
    """Keeps its reward on itself; `reset` shows nothing and takes every column."""

    def __init__(self) -> None:
        self.reward = -1.0

    def reset(self, **kwargs: Any) -> None:
        self.columns, self.reward = sorted(kwargs), 0.0

    def switch(self, times: int) -> str:
        """
        Press the switch.

        Args:
            times: How often to press it

        Returns:
            Whether the lamp is on.
        """
        if times > 5:
            raise ValueError("Game over.")
        self.reward = times / 4
        return "on" if times % 2 else "off"

    def _burn(self) -> None: ...


class Album:
    """`reset` returns parts of content, a tool an image; owns its reward, asynchronously."""

    def reset(self, page: int, **kwargs: Any) -> list[dict[str, Any]]:
        self.page = page
        return [
            {"type": "text", "text": f" Page {page}:"},
            {"type": "image", "image": picture(page, 40, 40)},
        ]

    def turn(self, forward: bool) -> Any:
        """Turn the page.

        Args:
            forward: Whether to go on.
        """
        self.page += 1 if forward else -1
        return [{"type": "image", "image": picture(self.page, 40, 40)}]

    async def get_reward(self) -> float:
        return self.page / 10


class Diary(Album):
    """`reset` returns a text."""

    def reset(self, page: int, **kwargs: Any) -> str:  # type: ignore[override]
        super().reset(page)
        return f" Day {page}."


def box_of(factory: Any) -> Toolbox:
    return Toolbox(small_config("m", rollout={"environment_workers": 0}), [], factory)


def test_one_environment_for_all_rows() -> None:
    box = box_of(Lamp)
    (schema,) = box.schemas
    assert schema["function"] == {
        "name": "switch", "description": "Press the switch.",
        "parameters": {
            "type": "object", "required": ["times"],
            "properties": {"times": {"type": "integer", "description": "How often to press it"}},
        },
    }  # fmt: skip
    row = box.prepare(sample("train:0", level=3))
    assert row.messages == sample("train:0").messages  # nothing was shown
    one = box.episodes([row])[0]
    assert call_tool(box, one, "switch", {"times": 3}).text == "on" and one.environment.reward == 0.75
    assert call_tool(box, one, "switch", {"times": 9}).text == "error: ValueError: Game over."
    assert one.environment.columns == ["images", "level", "prompt", "videos"]
    assert one.environment is not box.episodes([row])[0].environment


class Riddle(Lamp):
    def reset(self, problem: str, image: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.columns, self.problem, self.image = sorted(kwargs), problem, image


def test_reset_gets_columns_of_the_prompt_that_it_names() -> None:
    box, image = box_of(Riddle), {"bytes": encoded_image(picture(1, 8, 6)), "path": None}
    columns = {"problem": "Why?", "image": image, "system": "x", "level": 1}
    row = replace(sample("train:0", **columns), prompt_columns=frozenset({"problem", "image", "system"}))
    riddle: Any = box.episodes([box.prepare(row)])[0].environment
    assert (riddle.problem, riddle.image.size) == ("Why?", (8, 6))
    assert riddle.columns == ["images", "level", "prompt", "videos"], "**kwargs get prompt and media once"


def test_what_reset_shows_is_put_at_the_end_of_the_prompt() -> None:
    text, row = (box_of(kind).prepare(sample("train:2", page=2, text="Look.")) for kind in (Diary, Album))
    assert text.messages[-1]["content"][-1] == {"type": "text", "text": " Day 2."} and text.images == ()
    assert row.images[0].tobytes() == picture(2, 40, 40).tobytes()


def test_a_step_with_a_reward_of_the_environment_and_one_that_looks_at_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{**row, "page": 3} for row in shapes_rows(split="train", size=2, seed=1, image_size=56)]

    def pages(environments: Any, **kwargs: Any) -> list[float | None]:
        return [float(e.page) for e in environments]

    rollout = {"max_completion_length": 300, "max_turns": 3, "prompts_per_step": 2, "num_generations": 3}

    def made(folder: str, workers: int | None) -> Any:
        values = {**rollout, "environment_workers": workers}
        config = config_for(models["qwen2_5_vl"], tmp_path / folder, rollout=values, run={"max_steps": 1})
        return GRPOTrainer(config, train=rows, rewards=[pages], environment_factory=Album)

    with pytest.raises(ConfigError, match="reward 'pages' asks for the environment itself"):
        made("refused", 2)
    trainer = made("run", None)
    assert isinstance(trainer.parts.toolbox.host, LocalHost)  # where the reward sees the environment
    trainer.runner.sampler.engine = ScriptedEngine(
        trainer.runner.sampler.engine,
        lambda seed, turn: "done" if turn else call("turn", forward=bool(seed % 2)),
    )
    trainer.train()
    trainer.close()
    found = set()
    for line in rollouts_of(tmp_path / "run", 1):
        (turn,) = [t for t in line["turns"] if t["role"] == "tool"]
        page = 4 if turn["arguments"]["forward"] else 2
        assert line["reward"] == pytest.approx(page + page / 10) and turn["fault"] is None
        found.add(page)
    assert found == {2, 4}
    (row,) = rows_of(tmp_path / "run")
    assert row["rewards/pages/none"] == row["rewards/Album/none"] == 0
