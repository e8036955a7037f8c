"""What runs in the worker processes of isolated rewards: a function imported by its address, and its calls.

What goes out is a text, the JSON of an answer. So nothing that a reward makes, neither its result nor its exception,
reaches pickle.
"""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mm_grpo.rewards.call import exception_text
from mm_grpo.rewards.resolve import resolve_entry
from mm_grpo.rewards.scores import Fault, check_answer
from mm_grpo.rewards.spec import is_async
from mm_grpo.user_code.kept_state import own_copy
from mm_grpo.user_code.worker import require_unchanged

LONGEST_TRACE = 20_000
"""Characters kept of an exception's traceback."""


@dataclass(frozen=True)
class RewardSource:
    """The function that a worker imports. `made_with` are the arguments of a class; `digest` is the SHA-256 of the file
    as the trainer imported it; `kind` and `per_turn` are the reward's."""

    address: str
    made_with: Mapping[str, Any]
    digest: str | None
    kind: Literal["completion", "batch"]
    per_turn: bool = False


class RewardWorker:
    """The function of this process: from a pickled call, how many completions it scores, which of `log_extra` and
    `log_metric` it takes and its arguments, to the JSON of what became of it."""

    def __init__(self, source: RewardSource) -> None:
        self.source = source
        self.fn = resolve_entry({"name": source.address, **source.made_with}).fn
        self.loop: Any = None
        require_unchanged(source.address, source.digest)

    def __call__(self, body: bytes) -> bytes:
        try:
            rows, logs, sent = pickle.loads(body)
            arguments = own_copy(pickle.loads(sent))  # rows of one group share their columns
        except Exception as error:
            answer: Mapping[str, Any] = {"unreadable": f"{type(error).__name__}: {error}"}
        else:
            answer = self.answer(rows, logs, arguments)
        try:
            return json.dumps(answer, default=_plain).encode()
        except BaseException as error:  # only what a function logged can be so
            what = f"{type(error).__name__}: {error}, in what it gave to log_extra or log_metric"
            return json.dumps({"raised": [what, None, None, ""]}).encode()

    def answer(self, rows: int, logs: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function: `scores` and what it `logged`, or what it `raised`, or why its answer is `refused`."""
        fn, kind = self.fn, self.source.kind
        logged: list[tuple[str, str, Any]] = []
        try:
            answer = fn(**arguments, **_loggers(kind, logs, logged))
            if inspect.isawaitable(answer) and is_async(fn):
                answer = self.awaited(answer)
        except BaseException as error:  # whatever it is, only this call has failed
            text = exception_text(error, fn, __file__)
            return {"raised": [text.message, text.file, text.line, text.trace[-LONGEST_TRACE:]]}
        try:
            return {"scores": check_answer(answer, kind, rows, self.source.per_turn), "logged": logged}
        except ValueError as error:
            return {"refused": str(error)}

    def awaited(self, answer: Any) -> Any:
        """The result of a coroutine."""
        import asyncio

        if self.loop is None:  # one for the worker's life: clients that rewards keep belong to it
            self.loop = asyncio.new_event_loop()

        async def waiting() -> Any:
            return await answer

        return self.loop.run_until_complete(waiting())


def _plain(value: Any) -> Any:
    """Convert a fault, or a logged value that JSON does not know."""
    if isinstance(value, Fault):
        return {"reason": value.reason}
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


def _loggers(kind: str, names: Sequence[str], logged: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """`log_extra` and `log_metric`, which only note what they get; the trainer checks and keeps it."""
    every = {
        "log_extra": lambda column, value: logged.append(
            ("extra", str(column), list(value) if kind == "batch" else [value])
        ),
        "log_metric": lambda name, value: logged.append(("metric", str(name), value)),
    }
    return {name: every[name] for name in names}
