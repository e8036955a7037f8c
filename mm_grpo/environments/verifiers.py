"""Environments of the package `verifiers` (0.2 and 0.3; later ones have no `MultiTurnEnv`): their tools and rubrics.

`rollout.environment: verifiers:NAME`, or `factory_of(vf.load_environment(NAME))` in Python; `rows_of` gives the rows of
their dataset. A `ToolEnv` has its own tools. Another `MultiTurnEnv` answers to what the model writes: the model sends
it through the tool `send`. The reward is what the rubric's weighted functions say; one that raises stops the run, where
verifiers itself would count 0.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import io
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from mm_grpo.environments.own_tools import OwnTools, Tool
from mm_grpo.errors import ConfigError
from mm_grpo.processors.tool_calls import tool_calls

SEND = {
    "type": "object",
    "properties": {"message": {"type": "string", "description": "What to say."}},
    "required": ["message"],
}
CALL = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)


class VerifiersEnvironment(OwnTools):
    """One conversation with an environment of verifiers, `env`, which all conversations of a process share.

    ConfigError for what has no place here: another kind than MultiTurnEnv, prompts of its own for later turns, rewards
    that compare a group, tools that differ by row, and a rubric without a weighted function.
    """

    def __init__(self, env: Any) -> None:
        self.env, self.done = env, False
        self._vf = _library()
        _check(env, self._vf)
        self._calls_tools = isinstance(env, self._vf.ToolEnv)
        self._runner: asyncio.Runner | None = None
        self._state: Any = None
        self._before: list[Any] = []
        self._cleaned = True

    def tools(self) -> Mapping[str, Tool]:
        """The environment's own tools, or `send` where it answers to text."""
        if not self._calls_tools:
            return {"send": Tool("send", "Say something to the environment.", SEND, self._send)}
        return {
            one.name: Tool(one.name, one.description, one.parameters, self._caller(one.name))
            for one in self.env.tool_defs or ()
        }

    def reset(self, **row: Any) -> None:
        """Begin with a row of the environment's dataset; nothing is shown besides its prompt."""
        self.close()
        prompt = _their_messages(row.pop("prompt"), row.pop("images", ()))
        if self.env.system_prompt and prompt[0]["role"] != "system":
            raise ValueError(
                "the environment has a system prompt and the row's prompt has none; take the rows of its dataset "
                "(mm_grpo.environments.verifiers.rows_of)"
            )
        if isinstance(row.get("info"), Mapping) and row["info"].get("tool_defs"):
            raise ValueError("the row has tools of its own (info.tool_defs); tools are those of all rows")
        given = {"example_id": 0, "answer": "", **row, "prompt": prompt}
        self._runner, self.done = asyncio.Runner(), False
        self._state = self._run(self.env.init_state(given, _no_client(), "policy", {}))
        before = list(self._state["prompt"])
        self._cleaned, self._before = False, []
        self._state = self._run(self.env.setup_state(self._state)) or self._state
        if list(self._state["prompt"]) != before:
            raise ValueError("setup_state changes the prompt, which has to be the row's")

    def get_reward(self, turns: Sequence[Mapping[str, Any]]) -> float:
        """The rubric's weighted sum over a finished conversation."""
        self._state["trajectory"] = []
        before = list(self._state["prompt"])
        for messages in self._by_turn(turns):
            self._add_step(before, messages[:1])
            before += messages
        tail = before[len(self._state["prompt"]) :]
        self._clean()
        self._state["completion"] = tail
        reward: float = self._run(self._score())
        return reward

    def close(self) -> None:
        """Let the environment clean up what the conversation holds."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with runner:
                if not self._cleaned:
                    self._cleaned = True
                    runner.run(self.env.cleanup(self._state))

    def _caller(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            return self._answer(self._said("", [(name, arguments)]))

        return call

    def _send(self, message: str) -> Any:
        return self._answer(self._said(message, []))

    def _answer(self, said: Any) -> list[Any]:
        """What the environment answers to a message of the model; each call of a tool is a turn of it."""
        if self.done:
            raise ValueError("the episode is over")
        state = self._state
        before = self._before or list(state["prompt"])
        self._add_step(before, [said])
        messages = [*before, said]
        if self._run(self.env.is_completed(state)):
            self.done = True
            return [{"type": "text", "text": "the episode is over"}]
        try:
            found = self._run(self.env.env_response(messages, state))
        except self._vf.Error as error:
            state["error"], self.done = error, True
            raise
        answers = _normalized(state.get("final_env_response") or found)
        self.done = state.get("final_env_response") is not None
        self._before = [*messages, *answers]
        return [part for message in answers for part in _our_parts(message.content)]

    def _add_step(self, before: Sequence[Any], messages: Sequence[Any]) -> None:
        step = {
            "prompt": list(before), "completion": list(messages), "response": None, "tokens": None, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": self._state["trajectory_id"], "extras": {},
        }  # fmt: skip
        self._run(self.env.add_trajectory_step(self._state, step))

    def _said(self, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
        types = importlib.import_module("verifiers.types")
        made = [
            types.ToolCall(id=f"call_{n}", name=name, arguments=json.dumps(dict(arguments)))
            for n, (name, arguments) in enumerate(calls)
        ]
        return types.AssistantMessage(content=content, tool_calls=made or None)

    def _by_turn(self, turns: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """The messages of a conversation: for each turn of the model its own, and the answers to it."""
        types = importlib.import_module("verifiers.types")
        found: list[list[Any]] = []
        for turn in turns:
            if turn["role"] == "assistant":
                calls = [(c.name, c.arguments) for c in tool_calls(turn["text"]) if c.problem is None]
                text = CALL.sub("", turn["text"]).strip() if calls else turn["text"]
                if not self._calls_tools and calls:
                    text, calls = "\n".join(str(a.get("message", "")) for _, a in calls), []
                found.append([self._said(text, calls)])
                continue
            content: Any = turn["text"]
            if turn["images"]:
                urls = [
                    {"type": "image_url", "image_url": {"url": _data_url(image)}} for image in turn["images"]
                ]
                content = [*urls, {"type": "text", "text": turn["text"]}]
            if self._calls_tools:
                found[-1].append(
                    types.ToolMessage(tool_call_id=f"call_{len(found[-1]) - 1}", content=content)
                )
            else:
                found[-1].append(types.UserMessage(content=content))
        return found

    async def _score(self) -> float:
        """The sum that `Rubric.score_rollout` makes, without its 0 for a function that raises."""
        total = 0.0
        for rubric in _rubrics(self.env.rubric):
            objects = rubric.score_objects(self._state)
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                if not weight:  # a metric
                    continue
                taken = inspect.signature(function).parameters
                every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
                found = function(**{k: v for k, v in objects.items() if every or k in taken})
                total += weight * float(await found if inspect.isawaitable(found) else found)
        return total

    def _clean(self) -> None:
        if not self._cleaned:
            self._cleaned = True
            self._run(self.env.cleanup(self._state))

    def _run(self, work: Any) -> Any:
        assert self._runner is not None
        return self._runner.run(work)


def named(name: str) -> VerifiersEnvironment:
    """The environment of `rollout.environment: verifiers:NAME`."""
    return VerifiersEnvironment(_loaded(name))


def source(name: str) -> Callable[..., Any]:
    """The function that makes the environment, in whose file its code is."""
    found: Callable[..., Any] = importlib.import_module(_module(name)).load_environment
    return found


def factory_of(env: Any) -> Callable[[], VerifiersEnvironment]:
    """What `environment_factory` of GRPOTrainer takes, for an environment that was loaded; it runs in this process."""

    def verifiers_environment() -> VerifiersEnvironment:
        return VerifiersEnvironment(env)

    return verifiers_environment


def rows_of(env: Any, split: str = "train") -> list[dict[str, Any]]:
    """The rows of an environment's dataset, or of its eval dataset (`split` "eval"): prompt, answer, info and all other
    columns, with the images of the prompt beside it. `env` may be a name."""
    if split not in ("train", "eval"):
        raise ConfigError(f"rows_of: split = {split!r}; it must be 'train' or 'eval'")
    env = _loaded(env) if isinstance(env, str) else env
    dataset = env.get_dataset() if split == "train" else env.get_eval_dataset()
    return [_row(dict(row)) for row in dataset]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the handlers of Ctrl-C and of SIGTERM, which an environment takes when it is made."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@cache
def _loaded(name: str) -> Any:
    vf = _library()
    with _own_signals():
        try:
            return vf.load_environment(name)
        except Exception as error:
            raise ConfigError(
                f"verifiers:{name}: cannot be loaded ({type(error).__name__}: {error}); install its package, or put "
                f"the folder of {_module(name)}.py on PYTHONPATH"
            ) from error


def _library() -> Any:
    try:
        vf: Any = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(
            "verifiers is not installed; install it with: pip install 'verifiers>=0.2,<0.4'"
        ) from error
    if not hasattr(vf, "MultiTurnEnv"):
        version = getattr(vf, "__version__", "?")
        raise ConfigError(
            f"verifiers {version} has no MultiTurnEnv; install another with: pip install 'verifiers>=0.2,<0.4'"
        )
    return vf


def _module(name: str) -> str:
    return name.replace("-", "_").split("/")[-1]


def _check(env: Any, vf: Any) -> None:
    kind = type(env)
    why = None
    if not isinstance(env, vf.MultiTurnEnv):
        why = "is no MultiTurnEnv; only those and ToolEnv have turns (of an EnvGroup give each by a name)"
    elif isinstance(env, vf.SingleTurnEnv):
        why = "has a single turn; train without rollout.environment, with its rubric's functions as rewards"
    elif changed := [n for n in OWN_TURNS if getattr(kind, n) is not getattr(vf.MultiTurnEnv, n)]:
        why = f"has its own {', '.join(changed)}, and a conversation here only grows"
    elif env.rubric.has_group_rewards:
        why = (
            "has a reward that compares the completions of a group; write that one as a reward of the config"
        )
    elif not any(weight for rubric in _rubrics(env.rubric) for weight in rubric.weights):
        why = "has a rubric without a weighted function, so no conversation would have a reward"
    if why is not None:
        raise ConfigError(f"verifiers: {kind.__name__} {why}")


OWN_TURNS = ("get_prompt_messages", "render_completion", "add_model_response", "get_model_response")


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric, or those of a group of them."""
    if hasattr(rubric, "rubrics"):
        return [inner for one in rubric.rubrics for inner in _rubrics(one)]
    return [rubric]


@cache
def _no_client() -> Any:
    """A client that refuses to be asked: here the policy answers, not a server."""
    client: Any = importlib.import_module("verifiers.clients").Client

    def refuse(*given: Any, **more: Any) -> Any:
        raise RuntimeError("an environment that asks the model itself cannot be trained with here")

    made = type("NoClient", (client,), dict.fromkeys(client.__abstractmethods__, refuse))
    return object.__new__(made)


def _normalized(messages: Any) -> list[Any]:
    normalize = importlib.import_module("verifiers.utils.message_utils").maybe_normalize_messages
    found: list[Any] = normalize(messages, field_name="env_response")
    return found


def _our_parts(content: Any) -> list[Any]:
    """The content of a message of verifiers as a tool returns it."""
    if isinstance(content, str) or content is None:
        return [{"type": "text", "text": content or ""}]
    return [_our_part(part if isinstance(part, Mapping) else part.model_dump()) for part in content]


def _our_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    url = (part.get("image_url") or {}).get("url", "") if part.get("type") == "image_url" else ""
    if not url.startswith("data:"):
        raise ValueError(f"a message holds a part {str(dict(part))[:100]}; only text and data URLs are shown")
    return {"type": "image", "image": url}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    images: list[str] = []
    prompt = []
    for message in row["prompt"]:
        content = message["content"]
        if not isinstance(content, str):
            content = [_our_part(part) for part in content]
            images += [part["image"] for part in content if part["type"] == "image"]
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        prompt.append({"role": message["role"], "content": content})
    return {**row, "prompt": prompt, **({"images": images} if images else {})}


def _their_messages(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with their images as verifiers has them."""
    following = iter(images)
    found = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": _data_url(next(following))}}
                if part["type"] == "image"
                else {"type": "text", "text": part["text"]}
                for part in content
            ]
            if all(part["type"] == "text" for part in content):
                content = "".join(part["text"] for part in content)
        found.append({"role": message["role"], "content": content})
    return found


def _data_url(image: Any) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
