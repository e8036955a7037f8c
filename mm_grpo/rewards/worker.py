"""Worker process of an isolated reward: imports the function by its address, and makes its calls.

Answers are JSON, so that neither a reward's result nor its exception reaches pickle.
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
    """Function that a worker imports."""

    address: str
    made_with: Mapping[str, Any]
    """Constructor's arguments, if it is a class."""
    digest: str | None
    """SHA-256 of the file as the trainer imported it."""
    kind: Literal["completion", "batch"]
    per_turn: bool = False


class RewardWorker:
    """Handler of a pickled call (see `isolation._pickled`), which returns the JSON of its result."""

    def __init__(self, source: RewardSource) -> None:
        self.source = source
        self.fn = resolve_entry({"name": source.address, **source.made_with}).fn
        self.loop: Any = None
        require_unchanged(source.address, source.digest)

    def __call__(self, body: bytes) -> bytes:
        try:
            rows, logs, packed = pickle.loads(body)
            arguments = own_copy(pickle.loads(packed))  # rows of one group share their columns
        except Exception as error:
            answer: Mapping[str, Any] = {"unreadable": f"{type(error).__name__}: {error}"}
        else:
            answer = self.answer(rows, logs, arguments)
        try:
            return json.dumps(answer, default=_plain).encode()
        except BaseException as error:  # only logged values can fail
            message = f"{type(error).__name__}: {error}, in what it gave to log_extra or log_metric"
            return json.dumps({"raised": [message, None, None, ""]}).encode()

    def answer(self, rows: int, logs: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function. Return `scores` and `logged`, or what it `raised`, or why the answer is `refused`."""
        fn, kind = self.fn, self.source.kind
        logged: list[tuple[str, str, Any]] = []
        try:
            answer = fn(**arguments, **_loggers(kind, logs, logged))
            if inspect.isawaitable(answer) and is_async(fn):
                answer = self.wait(answer)
        except BaseException as error:  # whatever it is, only this call has failed
            text = exception_text(error, fn, __file__)
            return {"raised": [text.message, text.file, text.line, text.trace[-LONGEST_TRACE:]]}
        try:
            return {"scores": check_answer(answer, kind, rows, self.source.per_turn), "logged": logged}
        except ValueError as error:
            return {"refused": str(error)}

    def wait(self, answer: Any) -> Any:
        """Return the result of a coroutine."""
        import asyncio

        if self.loop is None:  # one for the worker's life: clients that rewards keep belong to it
            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(answer)


def _plain(value: Any) -> Any:
    """Convert a fault, or a logged value that JSON does not know."""
    if isinstance(value, Fault):
        return {"reason": value.reason}
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return repr(value)


def _loggers(kind: str, names: Sequence[str], logged: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return `log_extra` and `log_metric`, which record their arguments; the trainer checks and stores them."""
    loggers = {
        "log_extra": lambda column, value: logged.append(
            ("extra", str(column), list(value) if kind == "batch" else [value])
        ),
        "log_metric": lambda name, value: logged.append(("metric", str(name), value)),
    }
    return {name: loggers[name] for name in names}
