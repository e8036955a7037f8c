"""Object collectives of several processes, and the error of one when another fails or is late."""

from __future__ import annotations

import ast
from pathlib import Path

import collectives
import pytest
from helpers import processes

from mm_grpo.distributed.ranks import world_size
from mm_grpo.errors import ConfigError

LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "9"}


def test_the_variables_of_a_launcher_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert world_size() == 4
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=4 .* RANK, MASTER_PORT "):
        world_size()


@pytest.mark.slow
def test_collectives_of_two_processes(tmp_path: Path) -> None:
    codes = processes.launch(Path(collectives.__file__), 2, [tmp_path], tmp_path / "output", deadline=200)
    assert codes == [0, 0], processes.outputs(tmp_path / "output", 2)
    first, second = (ast.literal_eval((tmp_path / f"results-{rank}.txt").read_text()) for rank in (0, 1))
    assert first[:6] == [
        ["a", "b"], [0, 1], {"both": 3.0, "only-0": 2.0, "only-1": 2.0}, 11, [["s0", "s2"], ["", ""]],
        [[[3.0, 3.0], [3.0, 3.0]], 6.0],
    ]  # fmt: skip
    assert second[:6] == [first[0], None, first[2], 11, [["s1"], ["0 to 1", "1 to 1"]], first[5]]
    assert first[6:8] == second[6:8] == ["DataError: row 7 is bad", "GuardStop: guard x: stop"]
    lost = "RankLost: process 1 failed in 'rewards': ZeroDivisionError: division by zero"
    assert (first[8], second[8]) == (lost, "ZeroDivisionError: division by zero")
    message = ": a subclass of one of ours"
    assert (first[9], second[9]) == (f"ConfigError{message}", f"Special{message}")
    message, waited = first[10]
    assert message.startswith("process 0 of 2 lost another one while exchanging 'lengths'")
    assert "longer than 1 s (run.process_timeout)" in message and 0.9 < waited < 60
