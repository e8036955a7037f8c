"""Whole runs with rewards of turns: what environments and functions pay, the log, and what is refused."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from helpers.configs import merged, small_config
from helpers.scripted import ScriptedEngine, call
from helpers.small_runs import ROWS, TURNS, config_for, rollouts_of, rows_of
from helpers.tiny import picture, sample
from helpers.tool_calls import call_tool, reward

from mm_grpo import GRPOTrainer
from mm_grpo.environments.observation import Observation
from mm_grpo.environments.session import CallResult
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.environments.worker import pack_result, unpack_result
from mm_grpo.errors import ConfigError, RewardError, ToolError
from mm_grpo.rollout.scored_groups import advantage_fields, has_zero_std
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt

PAID = {0: 1.0, 1: None, 2: 4.0}


class Paying:
    """Pays for looks by their number; the last call of a turn says nothing of itself."""

    step_reward: float | None = None

    def reset(self, **row: Any) -> None:
        self.looks = 0

    def look(self, side: int) -> Any:
        """Look.

        Args:
            side: Pixels.
        """
        self.looks += 1
        if PAID[side % 3] is not None:
            self.step_reward = PAID[side % 3]
        return picture(side, 56, 56)

    def get_reward(self) -> float:
        return float(self.looks % 2)


def script(seed: int, turn: int) -> str:
    """A turn calls twice, once or not at all, by its seed."""
    return call("look", side=seed % 5) * (1 + seed % 2) if seed % 4 else "done"


def run(path: Path, folder: Path, **changes: Any) -> GRPOTrainer:
    config = config_for(path, folder, **merged(TURNS, changes))
    trainer = GRPOTrainer(config, train=ROWS, rewards=[], environment_factory=Paying)
    loop: Any = trainer.runner.sampler
    loop.engine = ScriptedEngine(loop.engine, script)
    trainer.train()
    return trainer


def by_hand(row: dict[str, Any]) -> list[float | None]:
    """The rewards of a logged conversation's turns, from what was called in them."""
    paid: list[float | None] = []
    for turn in row["turns"]:
        if turn["role"] == "assistant":
            paid.append(None)
        elif (worth := PAID[turn["arguments"]["side"] % 3]) is not None:
            paid[-1] = (paid[-1] or 0.0) + worth
    looks = sum(turn["role"] == "tool" for turn in row["turns"])
    paid[-1] = (paid[-1] or 0.0) + looks % 2  # get_reward, when all is over
    return paid


@pytest.mark.slow
def test_a_run_learns_turn_by_turn(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    trainer: Any = run(path, tmp_path / "run", algorithm={"turn_gamma": 0.5})
    logged = rollouts_of(tmp_path / "run", 1)
    assert {sum(turn["role"] == "assistant" for turn in row["turns"]) for row in logged} == {1, 2, 3}
    for slot in {row["slot"] for row in logged}:
        rows = [row for row in logged if row["slot"] == slot]
        rewards = [by_hand(row) for row in rows]
        returns: list[list[float]] = []
        for row, own in zip(rows, rewards, strict=True):
            turns = [turn for turn in row["turns"] if turn["role"] == "assistant"]
            assert [turn["reward"] for turn in turns] == own
            assert row["reward"] == math.fsum(r for r in own if r is not None)
            assert row["advantage"] == turns[0]["advantage"]
            values = [math.fsum(0.5**k * (r or 0.0) for k, r in enumerate(own[t:])) for t in range(len(own))]
            returns.append(values)
        for t in range(3):
            known = [own[t] for own in returns if t < len(own)]
            for row, own in zip(rows, returns, strict=True):
                if t < len(own):
                    scale = stdev(known) + 1e-4 if len(known) > 1 else 1.0
                    got = [x for x in row["turns"] if x["role"] == "assistant"][t]["advantage"]
                    assert got == pytest.approx((own[t] - fmean(known)) / scale, abs=1e-9)
    first = rows_of(tmp_path / "run")[1]
    assert first["sampling/sampling_logp_difference/max"] <= 1e-5
    assert first["grad_norm"] > 0 and first["learner/update_norm"] > 0
    weights = trainer.model.state_dict()
    again = type(trainer.model).from_pretrained(path, dtype=torch.float32).state_dict()
    assert sum(not torch.equal(weights[name], tensor) for name, tensor in again.items()) > len(again) / 2


def test_a_discount_without_tools_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models["qwen2_5_vl"], tmp_path / "run", algorithm={"turn_gamma": 1.0})
    with pytest.raises(ConfigError, match=r"algorithm.turn_gamma = 1: .* set rollout.tools or"):
        GRPOTrainer(config, train=ROWS, rewards=["length"])
    config = config_for(models["qwen2_5_vl"], tmp_path / "run")
    by_turn = {"name": lambda completion: [1.0], "as": "r", "per_turn": True}
    with pytest.raises(RewardError, match=r"reward 'r': per_turn = true scores the turns of conversations"):
        GRPOTrainer(config, train=ROWS, rewards=[by_turn])


@pytest.mark.parametrize("left", ["much", math.nan])
def test_a_reward_of_a_step_that_is_no_number_stops_the_run(left: Any) -> None:
    """Whatever is done about tools that raise: the model has done nothing wrong."""

    class Misspaying(Paying):
        def look(self, side: int) -> Any:
            """Look.

            Args:
                side: Pixels.
            """
            self.step_reward = left

    config = small_config("model", rollout=TURNS["rollout"] | {"on_tool_error": "reply"})
    refused = pytest.raises(ToolError, match=r"row: look .*step_reward")
    with closing(Toolbox(config, [], Misspaying)) as toolbox, refused:
        call_tool(toolbox, toolbox.episodes([sample("row")])[0], "look", {"side": 3})


def test_an_answer_of_a_worker_is_what_it_was() -> None:
    said = CallResult(Observation(("seen",)), reward=1.5, raised="left a bad step_reward")
    assert unpack_result(pack_result(said)) == said


@pytest.mark.field_bug("default-zero")
def test_what_a_call_does_not_set_is_not_paid_again() -> None:
    config = small_config("model", rollout={"environment_workers": 0})
    with closing(Toolbox(config, [], Paying)) as toolbox:
        episode = toolbox.episodes([sample("row")])[0]
        paid = []
        for sides in ((3,), (4,), (5, 4, 3), ()):
            for side in sides:
                call_tool(toolbox, episode, "look", {"side": side})
            paid.append(episode.take_step_reward())
        assert paid == [1.0, None, 5.0, None] and reward(toolbox, episode) == 1.0


def group(*rewards: tuple[float | None, ...]) -> Group:
    prompt = Prompt(sample("r"), (1,), EnginePrompt((1,), ()), torch.arange(1), {})
    done = tuple(Completion((1,), (-1.0,), "", "stop", g) for g in range(len(rewards)))
    totals = tuple(math.fsum(r for r in own if r is not None) for own in rewards)
    return Group(0, prompt, done, totals, turn_rewards=rewards)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        (((1.0, 0.0), (0.0, 1.0)), False),  # equal totals, and turns that were worth different things
        (((1.0,), (1.0, None)), True),
        (((2.0,), (1.0, 2.0)), True),  # 1 now and 2 a turn later, at half
        (((2.0,), (1.0, 3.0)), False),
    ],
)
def test_zero_std_groups_are_those_with_turns_of_equal_worth(rewards: tuple[Any, ...], flat: bool) -> None:
    algorithm = small_config("model", algorithm={"turn_gamma": 0.5}).algorithm
    one = group(*rewards)
    assert has_zero_std(one, [], algorithm) is flat
    (fields,) = advantage_fields([one], [], algorithm)
    assert any(any(turns) for turns in fields["turn_advantages"]) is not flat
    assert fields["advantages"] == tuple(turns[0] for turns in fields["turn_advantages"])
