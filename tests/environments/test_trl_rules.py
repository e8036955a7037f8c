"""What TRL documents of `environment_factory`, rule by rule; the classes here are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.scripted import ScriptedEngine, call
from helpers.small_runs import config_for, rollouts_of, rows_of
from helpers.tiny import picture, sample

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.environments.host import LocalHost
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.errors import ConfigError, DataError


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
    one = box.episode(row)
    assert one.call("switch", {"times": 3}).text == "on" and one.environment.reward == 0.75
    assert one.call("switch", {"times": 9}).text == "error: ValueError: Game over."
    assert one.environment.columns == ["images", "level", "prompt"]
    assert one.environment is not box.episode(row).environment


NAMED = {"lamp": Lamp, "album": Album, "diary": Diary, "old album": Album}


def test_environments_by_name_are_chosen_by_a_column() -> None:
    box = box_of(NAMED)
    rows = [
        box.prepare(sample(f"train:{n}", environment=name, page=n, text="Look."))
        for n, name in enumerate(NAMED)
    ]
    assert [[s["function"]["name"] for s in row.tools] for row in rows] == [
        ["switch"], ["turn"], ["turn"], ["turn"]
    ]  # fmt: skip
    assert [len(row.images) for row in rows] == [0, 1, 0, 1]
    assert rows[2].messages[-1]["content"][-1] == {"type": "text", "text": " Day 2."}
    assert rows[1].images[0].tobytes() == picture(1, 40, 40).tobytes()
    episodes = box.episodes(rows)
    assert [type(e.environment) for e in episodes] == list(NAMED.values())
    assert "environment" not in episodes[0].environment.columns  # it chooses, and is no column of reset's
    seen = episodes[1].call("turn", {"forward": True})
    assert seen.images[0].tobytes() == picture(2, 40, 40).tobytes()
    assert (
        episodes[0].call("turn", {"forward": True}).text == "error: there is no tool 'turn'; there are switch"
    )
    assert box.host.rewards(episodes) == [None, 0.2, 0.2, 0.3]
    assert [reward.__name__ for reward in box.rewards] == ["Album", "Diary"]
    given = [[own(completion="", environment_reward=0.5, sample=row) for row in rows] for own in box.rewards]
    assert given == [[None, 0.5, None, 0.5], [None, None, 0.5, None]]


def test_what_is_wrong_with_names() -> None:
    box = box_of(NAMED)
    for name in ("albun", None):
        with pytest.raises(DataError, match=f"train:4: .* 'environment' = {name!r}; .* lamp, album, diary"):
            box.prepare(sample("train:4", environment=name, page=1))
    with pytest.raises(ConfigError, match="give at least one environment, by name"):
        box_of({})
    with pytest.raises(ConfigError, match="two tools have one name"):
        Toolbox(small_config("m"), [Album().turn], {"lamp": Lamp, "album": Album})


def test_a_step_over_two_environments(models: dict[str, Path], tmp_path: Path) -> None:
    shapes = shapes_rows(split="train", size=2, seed=1, image_size=56)
    rows = [
        {**row, "environment": name, "page": 3} for row, name in zip(shapes, ("lamp", "album"), strict=True)
    ]

    def of_lamp(environments: Any, **kwargs: Any) -> list[float | None]:
        return [e.reward if isinstance(e, Lamp) else None for e in environments]

    rollout = {"max_completion_length": 300, "max_turns": 3, "prompts_per_step": 2, "num_generations": 3}

    def made(folder: str, workers: int | None) -> Any:
        values = {**rollout, "environment_workers": workers}
        config = config_for(models["qwen2_5_vl"], tmp_path / folder, rollout=values, run={"max_steps": 1})
        factory = {"lamp": Lamp, "album": Album}
        return GRPOTrainer(config, train=rows, rewards=[of_lamp], environment_factory=factory)

    with pytest.raises(ConfigError, match="reward 'of_lamp' asks for the environment itself"):
        made("refused", 2)
    trainer = made("run", None)
    assert isinstance(trainer.toolbox.host, LocalHost)  # where the reward sees the environment
    engine = trainer.sampler.engine = ScriptedEngine(trainer.sampler.engine, lambda seed, turn: "")

    def script(seed: int, turn: int) -> str:
        request = next(r for r in engine.seen[-1] if r.seed == seed)
        lamp = request.prompt.sample.columns["environment"] == "lamp"
        if turn:
            return "done"
        return call("switch", times=seed % 3) if lamp else call("turn", forward=bool(seed % 2))

    engine.script = script
    trainer.train()
    trainer.close()
    rewards: dict[str, list[float]] = {"switch": [], "turn": []}
    for line in rollouts_of(tmp_path / "run", 1):
        (turn,) = [t for t in line["turns"] if t["role"] == "tool"]
        given = turn["arguments"]
        expected = given["times"] / 4 if turn["name"] == "switch" else 0.4 if given["forward"] else 0.2
        assert line["reward"] == pytest.approx(expected) and turn["fault"] is None
        rewards[turn["name"]].append(line["reward"])
    assert [len(each) for each in rewards.values()] == [3, 3]
    assert all(len(set(each)) > 1 for each in rewards.values())
    (row,) = rows_of(tmp_path / "run")
    assert row["rewards/of_lamp/none"] == 3 and row["rewards/Album/none"] == 3
