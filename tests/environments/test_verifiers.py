"""Environments of the package verifiers, which conflicts with our pins: run where it is installed (0.2.1 or 0.3.1)."""

from __future__ import annotations

import base64
import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.scripted import ScriptedEngine, call
from helpers.small_runs import config_for, rollouts_of
from helpers.tiny import picture

from mm_grpo import GRPOTrainer
from mm_grpo.environments.toolbox import Toolbox, toolbox_of
from mm_grpo.environments.verifiers import VerifiersEnvironment, factory_of, rows_of
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.types import Sample, Turn

vf: Any = pytest.importorskip("verifiers")
datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """An environment that is made takes the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


async def used(completion: Any, state: Any, info: Any) -> float:
    assert state["answer"] == str(2 * info["k"] + 1)
    told = [m for m in completion if m.role == "tool"]
    return float(len(state["trajectory"]) == 2 and [m.content for m in told] == [state["answer"]])


def sums(**changes: Any) -> Any:
    rows = [{"question": f"{k} + {k + 1}?", "answer": str(2 * k + 1), "info": {"k": k}} for k in range(4)]
    given = {
        "dataset": datasets.Dataset.from_list(rows), "tools": [add], "max_turns": 3, "system_prompt": "Add.",
        "rubric": vf.Rubric(funcs=[exact, used], weights=[1.0, 0.5]),
    }  # fmt: skip
    return vf.ToolEnv(**{**given, **changes})


class Higher(vf.MultiTurnEnv):  # type: ignore[misc]
    """Guess a number: the environment answers to text, and ends when it is found."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = []
        return state

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        guess, goal = int(messages[-1].content), int(state["answer"])
        assert [m.role for m in messages[1:]] == ["assistant", "user"] * len(state["guesses"]) + ["assistant"]
        state["guesses"].append(guess)
        said = [
            {"role": "user", "content": "found" if guess == goal else "higher" if guess < goal else "lower"}
        ]
        if guess == goal:
            state["final_env_response"] = said
        return said


def quick(state: Any, completion: Any) -> float:
    assert [m.content for m in completion if m.role == "assistant"][: len(state["guesses"])] == [
        str(g) for g in state["guesses"]
    ]
    return 1 / len(state["guesses"]) if state["final_env_response"] else 0.0


def higher(**changes: Any) -> Any:
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "answer": "7"}]
    given = {"dataset": datasets.Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[quick])}
    return Higher(**{**given, **changes})


def box_of(env: Any, **rollout: Any) -> Toolbox:
    return Toolbox(small_config("m", rollout={"environment_workers": 0, **rollout}), [], factory_of(env))


def test_a_tool_environment_in_a_run(models: dict[str, Path], tmp_path: Path) -> None:
    env = sums()
    rows = rows_of(env)
    assert rows[1]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
    assert (rows[1]["answer"], rows[1]["info"], rows[1]["example_id"]) == ("3", {"k": 1}, 1)
    (function,) = [s["function"] for s in box_of(env).schemas]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a", "b"]
    assert function["parameters"]["properties"]["a"] == {"description": "The first.", "type": "integer"}
    rollout = {
        "max_completion_length": 300, "prompts_per_step": 1, "num_generations": 3, "environment_workers": 0,
    }  # fmt: skip
    config = config_for(
        models["qwen2_5_vl"],
        tmp_path / "run",
        rollout=rollout,
        run={"max_steps": 1},
        data={"text_only": True},
    )
    trainer: Any = GRPOTrainer(config, train=rows[1:2], rewards=[], environment_factory=factory_of(env))

    def script(seed: int, turn: int) -> str:
        if turn == 0 and seed % 3 < 2:
            return "I add. " + call("add", a=1, b=2)
        return "5" if turn == 0 or seed % 2 else "3"

    trainer.sampler.engine = ScriptedEngine(trainer.sampler.engine, script)
    trainer.train()
    trainer.close()
    seen = set()
    for line in rollouts_of(tmp_path / "run", 1):
        tools = [turn["text"] for turn in line["turns"] if turn["role"] == "tool"]
        assert line["reward"] == (line["completion"] == "3") + 0.5 * (tools == ["3"])
        seen.add(line["reward"])
    assert len(seen) > 1


def test_an_environment_that_answers_to_text() -> None:
    box = box_of(higher())
    assert [s["function"]["name"] for s in box.schemas] == ["send"]
    (row,) = rows_of(higher())
    sample = Sample("train:0", row.pop("prompt"), (), columns=row)
    one, other = box.episodes([box.prepare(sample)] * 2)
    assert [one.call("send", {"message": m}).text for m in ("3", "9", "7")] == ["higher", "lower", "found"]
    assert one.done and not other.done and other.call("send", {"message": "5"}).text == "higher"
    assert other.call("send", {"message": "x"}).fault == "raised"

    def turns(*said: str) -> list[Turn]:
        return [
            turn
            for text in said
            for turn in (Turn("assistant", call("send", message=text), 3), Turn("tool", "?", 1, name="send"))
        ]

    ended = [*turns("5"), Turn("assistant", "I give up", 3)]
    assert box.host.rewards([one, other], [turns("3", "9", "7"), ended]) == [pytest.approx(1 / 3), 0.0]
    box.close()


def test_a_reward_that_raises_stops_the_run() -> None:
    def broken(completion: Any) -> float:
        raise KeyError("no answer")

    box = box_of(higher(rubric=vf.Rubric(funcs=[broken])))
    (row,) = rows_of(higher())
    one = box.episode(Sample("train:0", row.pop("prompt"), (), columns=row))
    with pytest.raises(
        ToolError, match="train:0: get_reward of the environment raised KeyError: 'no answer'"
    ):
        box.host.rewards([one], [[]])
    box.close()


def test_an_environment_by_name_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_higher.py").write_text(
        "from environments_of_verifiers import higher\ndef load_environment():\n    return higher()\n"
    )
    (tmp_path / "environments_of_verifiers.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    rollout = {"environment": "verifiers:named-higher", "environment_workers": 1, "tool_timeout": 60}
    config = small_config("m", rollout=rollout)
    box = toolbox_of(config, None, None)
    assert box is not None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [name for name, _ in box.sources] == ["environment"]
    (row,) = rows_of("named-higher")
    one = box.episode(Sample("train:0", row.pop("prompt"), (), columns=row))
    assert one.call("send", {"message": "7"}).text == "found" and one.done
    box.close()


def test_images_go_both_ways() -> None:
    url = "data:image/png;base64,"
    out = io.BytesIO()
    picture(1, 40, 30).save(out, "PNG")
    url += base64.b64encode(out.getvalue()).decode()

    class Shows(Higher):
        async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
            assert messages[0].content[0].image_url.url.startswith("data:image/png;base64,")
            part = {"type": "image_url", "image_url": {"url": url}}
            return [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]

    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    rows = [{"prompt": [{"role": "user", "content": content}], "answer": "1"}]

    env = Shows(dataset=higher().dataset, rubric=vf.Rubric(funcs=[quick]))
    env.dataset = rows  # a datasets.Dataset would fill the parts up with empty fields
    (row,) = rows_of(env)
    assert row["images"] == [url] and row["prompt"][0]["content"][0] == {"type": "image"}
    sample = Sample("a", row["prompt"], (picture(1, 40, 30),), columns={"answer": "1"})
    box = box_of(env)
    seen = box.episode(sample).call("send", {"message": "1"})
    assert seen.text == "look" and seen.images[0].tobytes() == picture(1, 40, 30).tobytes()
    box.close()


def compares(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class Rewrites(Higher):
    async def get_prompt_messages(self, state: Any) -> Any:
        return state["prompt"]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: sums(rubric=vf.Rubric(funcs=[compares])), "ToolEnv has a reward that compares the completions of a"),
        (lambda: sums(rubric=vf.Rubric()), "ToolEnv has a rubric without a weighted function"),
        (lambda: vf.SingleTurnEnv(dataset=sums().dataset, rubric=sums().rubric), "SingleTurnEnv has a single turn"),
        (lambda: Rewrites(dataset=higher().dataset, rubric=vf.Rubric(funcs=[quick])),
         "Rewrites has its own get_prompt_messages, and a conversation here only grows"),
        (lambda: vf.EnvGroup(envs=[sums()], env_names=["a"]), "EnvGroup is no MultiTurnEnv"),
    ],
)  # fmt: skip
def test_what_has_no_place_here_is_refused(make: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        box_of(make())
    assert str(refused.value).startswith(f"rollout.environment: verifiers: {why}")


def test_names_that_lead_to_none() -> None:
    with pytest.raises(ConfigError, match="verifiers:no-such: cannot be loaded"):
        toolbox_of(small_config("m", rollout={"environment": "verifiers:no-such"}), None, None)
    row = {"prompt": [{"role": "user", "content": "1 + 2?"}], "images": [], "answer": "3"}
    with pytest.raises(ValueError, match="has a system prompt and the row's prompt has none"):
        VerifiersEnvironment(sums()).reset(**row)
