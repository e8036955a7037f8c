"""Callbacks: what each event is given and when, how one ends a run, and which objects are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small_runs import HELDOUT, ROWS, config_for, rows_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.errors import ConfigError
from mm_grpo.run.callbacks import Callbacks


class Record:
    """Keeps the events of a run in order, and stops it at a step."""

    def __init__(self, stop_at: int = 0, event: str = "on_step_end") -> None:
        self.events: list[tuple[Any, ...]] = []
        self.stop_at, self.event = stop_at, event

    def note(self, event: str, trainer: Any, step: int, *what: Any) -> None:
        self.events.append((event, step, *what))
        if self.event == event and step == self.stop_at:
            trainer.stop("good enough")

    def on_train_begin(self, trainer: Any, step: int) -> None:
        self.note("on_train_begin", trainer, step)

    def on_rollouts(self, groups: Any, step: int, trainer: Any) -> None:
        self.note("on_rollouts", trainer, step, [len(group.completions) for group in groups])

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
        self.note("on_step_end", trainer, step, metrics["learner/updates"])

    def on_evaluate(self, evaluations: Any, trainer: Any, step: int) -> None:
        self.note("on_evaluate", trainer, step, evaluations["eval"].rows)

    def on_log(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
        written = rows_of(trainer.folder.paths.root)[-1]
        digests = {name for name in written if name.startswith("rollouts/")}
        assert written["step"] == step and written.keys() - digests == {"step", *metrics}
        self.note("on_log", trainer, step, "eval/eval/score" in metrics)

    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        assert path.is_dir() and any(path.iterdir())
        self.note("on_save", trainer, step, path.name)

    def on_train_end(self, step: int, summary: dict[str, Any], **others: Any) -> None:
        assert list(others) == ["trainer"]
        self.events.append(("on_train_end", step, summary["steps"]))


def trained(record: Any, model: Path, folder: Path, **changes: Any) -> GRPOTrainer:
    run = {"max_steps": 4, "save_every": 2, "report": False, "sight_every": 0, **changes}
    config = config_for(model, folder, run=run)
    made = GRPOTrainer(config, train=ROWS, eval=HELDOUT, rewards=[vowels], callbacks=[record])
    made.summary = made.train()  # type: ignore[attr-defined]
    return made


def test_events_have_their_step_and_a_callback_ends_a_run(models: dict[str, Path], tmp_path: Path) -> None:
    record = Record(stop_at=3)
    trained(record, models["qwen2_vl"], tmp_path / "r")
    steps = [
        [("on_rollouts", n, [3, 3, 3, 3]), ("on_step_end", n, 1), ("on_log", n, False)] for n in (1, 2, 3)
    ]
    assert record.events == [
        ("on_train_begin", 0),
        ("on_evaluate", 0, 3),
        ("on_log", 0, True),
        *steps[0],
        *steps[1],
        ("on_save", 2, "step-000002"),
        *steps[2][:2],
        ("on_evaluate", 3, 3),  # the weights that are saved are those that were evaluated
        ("on_log", 3, True),
        ("on_save", 3, "step-000003"),
        ("on_save", 3, "model"),
        ("on_train_end", 3, 3),
    ]
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (3, "good enough")
    rows = rows_of(tmp_path / "r")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert summary["score_after"] == rows[-1]["eval/eval/score"] and "eval/eval/score" not in rows[2]
    # it goes on from there, to the end
    run = {"max_steps": 4, "save_every": 2, "sight_every": 0}
    config = config_for(models["qwen2_vl"], tmp_path / "r", run=run)
    again = Record()
    done = GRPOTrainer(
        config, train=ROWS, eval=HELDOUT, rewards=[vowels], callbacks=[again], resume=True
    ).train()
    assert (done["steps"], done["stopped"]) == (4, None)
    assert again.events[0] == ("on_train_begin", 3)


def test_what_all_processes_call_together_is_refused_where_one_calls_it() -> None:
    made: Any = Callbacks([SimpleNamespace(on_save=lambda: made.refuse_collective("evaluate", 2))])
    made.refuse_collective("evaluate", 2)  # outside a callback
    with pytest.raises(ConfigError, match=r"on_save calls trainer.evaluate, which all 2 processes have to"):
        made.call("on_save")
    made.refuse_collective("evaluate", 2)
    alone: Any = Callbacks([SimpleNamespace(on_save=lambda: alone.refuse_collective("evaluate", 1))])
    alone.call("on_save")


def test_what_no_event_would_call_is_refused() -> None:
    class Misspelt:
        def on_step_end(self) -> None: ...

        def on_step_ends(self) -> None: ...

    wrong: list[tuple[Any, str]] = [
        ([object], "object is a class"),
        ([Misspelt()], "Misspelt.on_step_ends would never be called; did you mean 'on_step_end'"),
        ([SimpleNamespace(on_step_end=lambda trainer, logs: None)], "on_step_end asks for 'logs'"),
        ([3], "3 has none of the methods on_train_begin"),
        (Misspelt(), "must be a list of objects"),
    ]
    for callbacks, words in wrong:
        with pytest.raises(ConfigError, match=f"^callbacks.*{words}"):
            Callbacks(callbacks)


def test_arguments_with_defaults_and_rest_are_left_alone() -> None:
    found: list[Any] = []
    named = SimpleNamespace(on_step_end=lambda step, scale=2: found.append(step * scale))
    rest = SimpleNamespace(on_step_end=lambda *_, **values: found.append(sorted(values)))
    Callbacks([named, rest]).call("on_step_end", trainer=None, step=4, metrics={})
    assert found == [8, ["metrics", "step", "trainer"]]
    Callbacks([named], quiet=True).call("on_step_end", trainer=None, step=4, metrics={})
    assert len(found) == 2
