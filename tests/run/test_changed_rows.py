"""Rows of a resumed run against the checkpoint's: changed in their places, or in another order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.sources import load
from mm_grpo.errors import ConfigError
from mm_grpo.run.manifest import FORMAT, MANIFEST, Checkpoint, manifest_text
from mm_grpo.run.same_run import check_rows, left_out_before

Row = dict[str, Any]
STEP = 2
"""Step of the checkpoint: with two slots and no shuffling rows 0 to 3 are drawn by then."""


def rows_of(count: int = 8, **answers: str) -> list[Row]:
    return [{"prompt": f"q{n}", "answer": answers.get(f"row{n}", "a")} for n in range(count)]


def read(source: Any) -> Rows:
    return load(source, GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"text_only": True}}).data)


def check(then: Any, now: Any, field: str = "train", *, allowed: bool = True) -> Sequence[int]:
    old, new = (source if hasattr(source, "fingerprint") else read(source) for source in (then, now))
    checkpoint = Checkpoint(Path("c"), {"step": STEP, "extra": {"rows": {field: old.fingerprint()}}})
    order = new.order(2, seed=0, shuffle=False)
    return check_rows(checkpoint, {field: new.fingerprint()}, {field: new}, order, allowed=allowed)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"row1": "b"}, "1 of 8 changed, the first train row 1; drawn in steps 1 to 2: 1"),
        ({"row6": "b"}, "1 of 8 changed, the first train row 6; drawn in steps 1 to 2: 0"),
        (
            {f"row{n}": "b" for n in (3, 4, 7)},
            "3 of 8 changed, the first train row 3; drawn in steps 1 to 2: 1",
        ),
    ],
)
def test_rows_changed_in_their_places_are_taken_if_that_is_allowed(
    answers: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert check(rows_of(), rows_of(), allowed=False) == ()
    with pytest.raises(ConfigError, match=rf"^data\.train: .*{message}.*run\.allow_changed_rows=true"):
        check(rows_of(), rows_of(**answers), allowed=False)
    with caplog.at_level(logging.WARNING, "mm_grpo"):
        assert check(rows_of(), rows_of(**answers)) == [int(name.removeprefix("row")) for name in answers]
        assert message in caplog.text
        assert check(rows_of(), rows_of(**answers), "eval.b") == ()
        assert "data.eval.b" in caplog.text and "not compare" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rows: [*rows, {"prompt": "new", "answer": "a"}], id="added"),
        pytest.param(lambda rows: rows[:-1], id="removed"),
        pytest.param(lambda rows: [*rows[1:], {"prompt": "new", "answer": "a"}], id="shifted"),
        pytest.param(lambda rows: rows[::-1], id="reversed"),
        pytest.param(lambda rows: [rows[1], rows[0], *rows[2:]], id="exchanged"),
        pytest.param(lambda rows: read(rows).without([2]), id="left out"),
        pytest.param(lambda rows: Mixture([{"path": rows[:4]}, {"path": rows[4:]}]), id="a mixture"),
    ],
)
def test_another_order_is_refused_even_if_changes_are_allowed(change: Callable[[list[Row]], Any]) -> None:
    with pytest.raises(ConfigError, match=r"^data\.train: .*order|^data\.train: .*in their places"):
        check(rows_of(), change(rows_of()))


def test_rows_of_a_mixture_are_numbered_through() -> None:
    def mixture(second: list[Row], weight: float = 1.0) -> Mixture:
        return Mixture([{"path": rows_of(3)}, {"path": second, "weight": weight}])

    assert check(mixture(rows_of(5)), mixture(rows_of(5, row2="b"))) == [5]
    with pytest.raises(ConfigError, match=r"data\.train"):
        check(mixture(rows_of(5)), mixture(rows_of(5), 2.0))


def test_rows_that_were_read_from_memory_may_all_have_changed() -> None:
    """Of other sources fewer rows have digests, at other places."""
    rows = read(rows_of())
    old = rows.fingerprint()
    shorter = {"train": old | {"digests": old["digests"][:12]}}
    checkpoint = Checkpoint(Path("c"), {"step": 1, "extra": {"rows": shorter}})
    now = {"train": old}, {"train": rows}, rows.order(2, 0, False)
    assert check_rows(checkpoint, *now, allowed=True) == [*range(8)]
    with pytest.raises(ConfigError, match="8 of 8"):
        check_rows(checkpoint, *now, allowed=False)


def test_rows_left_out_are_those_of_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    def write(step: int, rows: dict[str, Any]) -> Path:
        file = tmp_path / f"step-{step:06d}" / MANIFEST
        file.parent.mkdir()
        manifest = {"format": FORMAT, "step": step, "files": [], "log": None, "extra": {"rows": rows}}
        file.write_text(manifest_text(manifest))
        return file

    assert left_out_before(tmp_path) is None
    held = read(rows_of(4)).without([1, 3]).fingerprint()
    mixed = read(Mixture([{"path": rows_of(2)}, {"path": rows_of(3)}])).without([4]).fingerprint()
    write(2, {"train": mixed, "eval.b": held | {"name": "b"}})
    write(3, {"train": held}).write_text("{")
    names = [source["name"] for source in mixed["sources"]]
    assert left_out_before(tmp_path) == {names[0]: [], names[1]: [2], "b": [1, 3]}
