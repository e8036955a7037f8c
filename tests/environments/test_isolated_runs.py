"""Whole runs with tools in worker processes, and where tools run when the config does not say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import small_config
from helpers.scripted import ScriptedEngine, call
from helpers.sessions import died, workers
from helpers.small_runs import config_for, rollouts_of, rows_of
from helpers.tiny import sample
from tools_to_isolate import World, misbehave, nap

from mm_grpo import GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.environments.builtins import GridWorld
from mm_grpo.environments.host import Episode, LocalHost
from mm_grpo.environments.toolbox import Toolbox, toolbox_of
from mm_grpo.environments.workers import WorkerHost
from mm_grpo.errors import ConfigError, ToolError
from mm_grpo.user_code.workers import default_size

Make = Callable[..., Toolbox]


def begun(box: Toolbox, count: int = 1, **columns: Any) -> list[Episode]:
    """Conversations about one row, begun without a look at what they show first."""
    row = sample("train:0", **columns)
    return box.host.open([(row, box._row(row))] * count)


# whole runs ----------------------------------------------------------------------------------

ROWS = [
    {**row, "start": n} for n, row in enumerate(shapes_rows(split="train", size=6, seed=1, image_size=56))
]


def ids(completion: str, completion_ids: list[int]) -> float:
    return float(sum(completion_ids) % 7)


def run(path: Path, folder: Path, how: str, **rollout: Any) -> tuple[Any, list[int]]:
    """A run of two steps whose model counts in an environment, and in one of three conversations does `how`. The
    trainer, and the processes that its tools ran in."""
    values = {"max_completion_length": 200, "max_turns": 3, "environment_workers": 2, **rollout}
    config = config_for(path, folder, rollout=values, run={"max_steps": 2})
    trainer: Any = GRPOTrainer(config, train=ROWS, rewards=[ids], environment_factory=World)
    acts = ("count", how, "count")
    trainer.sampler.engine = ScriptedEngine(
        trainer.sampler.engine, lambda seed, turn: "done" if turn == 2 else call("act", how=acts[seed % 3])
    )
    seen: set[int] = set()
    host = trainer.toolbox.host
    if isinstance(host, WorkerHost):
        take = host._take
        host._take = lambda outcome: (seen.update(workers()), take(outcome))  # type: ignore[method-assign]
    try:
        trainer.train()
    except ToolError as error:
        assert died(seen)
        raise error
    return trainer, sorted(seen)


@pytest.mark.long
def test_a_run_is_the_same_in_and_out_of_the_process(models: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for count in (0, 2):
        folder = tmp_path / str(count)
        _, workers = run(models["qwen2_5_vl"], folder, "raise", environment_workers=count, tool_timeout=30)
        assert len(workers) == count and died(workers)
        metrics = [
            {k: v for k, v in row.items() if not k.startswith("time") and k != "step_time"}
            for row in rows_of(folder)
        ]
        runs.append((metrics, [rollouts_of(folder, step) for step in (1, 2)]))
    (inside, logged), (outside, logged_outside) = runs
    assert inside == outside and logged == logged_outside
    assert [row["tools/failures/raised"] for row in inside] == [8, 8] and inside[0]["tools/masked"] == 0


@pytest.mark.long
def test_a_run_goes_on_without_the_conversations_that_a_call_took(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rollout = {"tool_timeout": 1.0, "on_tool_error": "mask", "environment_workers": 3}
    trainer, workers = run(models["qwen2_5_vl"], tmp_path / "run", "hang", **rollout)
    assert len(workers) == 3 + 1 and died(workers)  # one took the place of the one that was killed first
    rows = rows_of(tmp_path / "run")
    for row, step in zip(rows, (1, 2), strict=True):
        logged = rollouts_of(tmp_path / "run", step)
        masked = [line for line in logged if line.get("masked")]
        assert len(masked) == row["tools/masked"] and len(masked) == 4 and len(logged) == 12
        assert all(line["reward"] is None and line["advantage"] == 0 for line in masked)
        assert all(line["reward"] is not None for line in logged if not line.get("masked"))
        own = [line for line in masked if line["masked"].startswith("act: error: act ")]
        others = [line for line in masked if "the conversation's environment is gone" in line["masked"]]
        assert (len(own), len(others)) == (1, 3)  # every third conversation was in that worker
    trainer.close()
    with pytest.raises(ToolError, match=r"train:\d+: act had not answered"):
        run(models["qwen2_5_vl"], tmp_path / "stops", "hang", **{**rollout, "on_tool_error": "stop"})


# where tools run -----------------------------------------------------------------------------


def test_tools_run_in_processes_where_others_can_import_them(make: Make) -> None:
    def closure(a: int) -> int:
        """Add.

        Args:
            a: What.
        """
        return a

    for tools, factory in (([nap], None), ((), World), ((), GridWorld)):
        box = make(tools, factory, environment_workers=None)
        assert isinstance(box.host, WorkerHost) and len(box.host.slots) == default_size()
    for tools, factory in (([closure], None), ([nap, closure], None), ((), lambda: World())):
        assert isinstance(make(tools, factory, environment_workers=None).host, LocalHost)
    with pytest.raises(ConfigError, match=r"environment_workers > 0: .*closure cannot be imported"):
        WorkerHost(small_config("m"), {"closure": closure}, {}, None, 1)


def test_a_reward_that_asks_for_the_environment_keeps_it_in_the_process(make: Make) -> None:
    box = make((), World, environment_workers=None)
    assert isinstance(box.place(["mine"]), LocalHost)
    (one,) = begun(box)
    assert isinstance(one.environment, World)
    box.place([], processes=2)
    with pytest.raises(ConfigError, match=r"reward 'mine' asks for the environment itself, .* several"):
        box.place(["mine"], processes=2)
    with pytest.raises(ConfigError, match=r"environment_workers = 2: reward 'mine' asks for the environment"):
        make((), World).place(["mine"])


def test_a_tool_that_a_worker_cannot_import(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'def twice(a: int) -> int:\n    """Double.\n\n    Args:\n        a: What.\n    """\n    return 2 * a\n'
    )
    values = {"tools": [f"{file}:twice"], "environment_workers": 1}
    box = toolbox_of(small_config("m", rollout=values), None, None)
    assert box is not None and begun(box)[0].call("twice", {"a": 4}).text == "8"
    box.close()
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ToolError, match=r"cannot import the tools of the run: .* has changed .*mine.py"):
        begun(box)[0].call("twice", {"a": 4})
    box.close()


def test_a_row_that_cannot_be_sent(make: Make) -> None:
    box = make((), World)
    with pytest.raises(ToolError, match=r"train:0: the column 'key' cannot be sent .*lambda"):
        begun(box, key=lambda: 1)


# in the trainer's process --------------------------------------------------------------------


def test_a_call_that_hangs_in_the_trainers_process_stops_the_run() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        return str(release.wait(600))

    box = Toolbox(small_config("m", rollout={"environment_workers": 0, "tool_timeout": 0.3}), [hang], None)
    (one,) = begun(box)
    with pytest.raises(ToolError, match=r"train:0: hang had not answered after rollout.tool_timeout = 0.3 s"):
        one.call("hang", {})
    assert one.call("hang", {}).fault == "died"  # what it held is not ours any more
    box.close()
    assert not release.is_set()  # nobody waited for it
    release.set()


@pytest.mark.parametrize(("how", "told"), [("exit", "os._exit(3)"), ("sys.exit", "0")])
def test_a_tool_does_not_end_the_trainers_process(how: str, told: str) -> None:
    box = Toolbox(small_config("m", rollout={"environment_workers": 0}), [misbehave], None)
    assert begun(box)[0].call("misbehave", {"how": how}).text == f"error: SystemExit: {told}"
    box.close()
