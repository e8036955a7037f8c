"""The client behind judge: tries, time-outs, keys and proxies, against a server with bad days."""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Any

import pytest
from helpers.chat_server import Answer, Server, ask, entry, says
from helpers.patience import PATIENCE
from reward_entries import fails

from mm_grpo.errors import RewardError
from mm_grpo.rewards import Scorer
from mm_grpo.rewards.resolve import resolve_entry

KEY = "sk-very-secret-0123456789"


def test_what_may_pass_is_tried_again(server: Server) -> None:
    turn, ended = iter(range(99)), threading.Event()

    def answer(_: Server, body: dict[str, Any]) -> Any:
        number = next(turn)
        if number == 1:
            ended.wait(PATIENCE)  # longer than the time-out of a request
        faults = None, says("Score: 1"), says("overloaded", 503), says("slow down", 429, Retry_After="0.01")
        faults = (*faults, (200, {}, "<html>not json</html>"))
        return faults[number] if number < len(faults) else says("Score: 6")

    server.answer = answer
    assert ask(server, request_timeout=0.5, attempts=20) == 0.6
    ended.set()
    assert len(server.requests) >= 6  # a machine that is busy may make more of them late


def test_nonsense_is_asked_again_and_is_never_a_score(server: Server, rows: Any) -> None:
    replies = iter(["I like cats.", "Score: 99", "Score: 4"])
    server.answer = lambda *_: says(next(replies))
    assert ask(server) == 0.4
    server.answer = lambda *_: says("What a lovely picture!")
    with fails("'m' gave no verdict from 0 to 10 in 3 replies"):
        ask(server, "a dog", attempts=3)
    masking = Scorer([entry(server, attempts=1, on_error="mask"), "exact_match"])

    def answer(_: Server, body: dict[str, Any]) -> Any:
        return says("Score: 4" if "a cat" in body["messages"][0]["content"][-1]["text"] else "?")

    server.answer = answer
    scores = masking.score(*rows(["a cat", "a dog"], answer=["a cat?", "dog"]), step=1)
    masking.close()
    assert scores.parts["judge"] == [0.4, None] and scores.totals == [1.4, None]


def test_a_mistake_in_the_settings_is_raised_at_once(server: Server) -> None:
    server.answer = lambda *_: says("no such model", 404)
    with fails(r"http://127.0.0.1:\d+/v1 answered with status 404: .*no such"):
        ask(server)
    assert len(server.requests) == 1
    with fails(r"gave no answer in 2 tries of 60 s; the last: ConnectError"):
        ask(server, url="http://127.0.0.1:9/v1", attempts=2)
    for name, value in (("url", ""), ("model", ""), ("attempts", 0), ("request_timeout", 0)):
        with pytest.raises(ValueError, match=f"{name}="):
            ask(server, **{name: value})
    assert len(server.requests) == 1


def everything(error: BaseException | None) -> str:
    """The message, its causes, and every local variable of every frame: more than any log holds."""
    text = ""
    while error is not None:
        text += "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        error = error.__cause__ or error.__context__
    return text


@pytest.mark.parametrize(
    "answer",
    [
        lambda *_: says(f"Incorrect API key provided: {KEY}", 401),
        lambda *_: (500, {}, f"{'x' * 190}{KEY}"),
        lambda *_: (200, {}, f"<html>{'x' * 190}{KEY}</html>"),
        lambda *_: says("Score: 10"),
    ],
)
def test_no_key_in_any_log_or_message(
    server: Server,
    rows: Any,
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    server.answer = answer
    caplog.set_level(logging.DEBUG)
    scorer, error = Scorer([entry(server, key_env="JUDGE_KEY", attempts=1)]), None
    try:
        scorer.score(*rows(["a cat"], answer=["cat"]), step=1)
    except RewardError as raised:
        error = raised
    scorer.close()
    assert server.keys == [f"Bearer {KEY}"] and (error is None) == ("Score" in str(answer()))
    assert KEY not in everything(error) and KEY[:12] not in str(error)
    assert KEY not in caplog.text and KEY not in repr(resolve_entry(entry(server, key_env="JUDGE_KEY")))


@pytest.mark.parametrize("value", [None, " ", "a\nb", "clé"])
def test_a_key_that_is_none(server: Server, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with fails("JUDGE_KEY") as raised:
        ask(server, key_env="JUDGE_KEY")
    assert value is None or not value.strip() or value not in str(raised.value)
    assert server.requests == []


def test_no_proxy_stands_between_us_and_this_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert ask(server) == 1.0
    with fails("gave no answer in 1 tries of 60 s; the last: ConnectError"):
        ask(server, url="http://judge.invalid/v1", attempts=1)  # elsewhere the proxy is asked


def test_what_the_environment_holds_for_openai_goes_to_no_other_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert ask(server) == 1.0
    assert KEY not in str(server.headers) and server.keys == [None]
