"""Control characters and markup in data never reach the terminal: messages, progress, tables, warnings."""

from __future__ import annotations

import io
import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mm_grpo.run.progress import Progress
from mm_grpo.terminal import JOINERS, REDACTED, PrintableFilter, print_traceback, printable, redact

HOSTILE = "\x1b[31mred\x07\x9b2J\u202edetsrever\u2066\u2028next\r[bold]b[/bold]\ud800\x00"
SHOWN = r"\x1b[31mred\x07\x9b2J\u202edetsrever\u2066\u2028next\r[bold]b[/bold]\ud800\x00"


def hidden(text: str) -> list[str]:
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [c for c in text if unicodedata.category(c) in hidden and c not in "\n\t" + JOINERS]


def test_control_characters_become_escapes() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a\tb\nc") == "a\tb\nc" and printable("a\tb\nc", lines=False) == r"a\tb\nc"


@given(st.text(alphabet=st.characters(categories=("Cc", "Cf", "Cs", "Zl", "Zp", "L", "P"))))
def test_no_hidden_character_is_left(text: str) -> None:
    assert hidden(printable(text)) == []
    printable(text).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:p@ss@host:1/v1?key=abc#x", "https://R@host:1/v1?R#x"),
        ("openenv:ws://tok@host/a, 'http://h/?sig=1'", "openenv:ws://R@host/a, 'http://h/?R'"),
        (
            "{'hub_token': 'abc', \"OPENAI_API_KEY\": \"abc\"}",
            "{'hub_token': 'R', \"OPENAI_API_KEY\": \"R\"}",
        ),
        ("password=abc db.passwd: abc", "password=R db.passwd: R"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer R"),
        ("hf_abcdefghijklmnopqrst (sk-abcdefghijklmnopqrst)", "R (R)"),
        ("the key of mine is wrong", "the R of R is wrong"),
        (
            "max_tokens=5 key_env: MINE special_tokens=as_text",
            "max_tokens=5 key_env: MINE special_tokens=as_text",
        ),
        ("http://host:8000/v1 unix:///run/a.sock me@host, see a?b=c", None),
    ],
)
def test_keys_are_redacted(text: str, shown: str | None) -> None:
    secrets = ("key", "mine", None) if "mine" in text else ()
    found = redact(text, *secrets)
    assert found == (text if shown is None else shown.replace("R", REDACTED) if "R" in shown else shown)
    assert redact(found, *secrets) == found


def test_of_a_mapping_keys_are_redacted_and_prompts_kept() -> None:
    prompt = "Look at http://host/?page=1 well"
    given = {"api_key": "abc", "auth_token": None, "args": ({"url": "http://h/?a"}, prompt), "n": 1.5}
    arguments = [{"url": f"http://h/?{REDACTED}"}, prompt]
    shown = {"api_key": REDACTED, "auth_token": None, "args": arguments, "n": 1.5}
    assert redact(given) == redact(shown) == shown


def test_a_closed_terminal_does_not_end_the_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with Progress(2, headline="x", console=Console(file=Closed())) as progress:
        progress.on_log(1, {"reward": 0.5})


def test_warnings_are_printable(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("mm_grpo").warning("guard: row %s", HOSTILE)
    assert caplog.messages == [f"guard: row {SHOWN}"]
    assert any(isinstance(f, PrintableFilter) for f in logging.getLogger("mm_grpo").filters)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        print_traceback(type(error), error, error.__traceback__)
    err = capsys.readouterr().err
    assert f"ValueError: {SHOWN}\n" in err and hidden(err) == []
