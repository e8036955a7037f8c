"""run.trackers: real event files for tensorboard, the calls that wandb and trackio get, tables, what is missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import tiny
from helpers.runs import group
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.run.trackers import Trackers, rollout_table
from mm_grpo.types import EnginePrompt

pytestmark = pytest.mark.lowest


def config(folder: Path, **run: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": "base"}, "run": {"dir": str(folder), **run}})


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Trackers(["tensorboard"]).open(config(tmp_path)) as trackers:
        trackers.on_rollouts(1, [group(0, (0.0, 1.0))])
        trackers.on_log(1, {"reward": 0.25, "kl": None, "note": "text"})
        trackers.on_log(2, {"reward": 0.5, "rewards/iou/mean": 1})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward", "rewards/iou/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert b"path: base" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


class Recorder(SimpleNamespace):
    """Stands in for wandb and trackio: `init` gives a run, and every call is noted. `Table` and `Image` take what
    both packages' (wandb 0.31, trackio 0.43) take under these names."""

    def __init__(self, fails: dict[str, type[BaseException]] | None = None) -> None:
        super().__init__(calls=[], fails=fails or {})

    def note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.fails:
            raise self.fails[call[0]]("no route")

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        assert all(len(row) == len(columns) for row in data)
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Image(self, value: Image.Image, caption: str | None = None) -> tuple[str, Any]:
        assert isinstance(value, Image.Image) and value.mode == "RGB"
        return "image", value.size

    def init(self, **arguments: Any) -> Recorder:
        self.note("init", arguments)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.note("log", step, values)

    def finish(self) -> None:
        self.note("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_the_config_the_numbers_and_tables_at_their_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package, folder = Recorder(), tmp_path / "shapes"
    monkeypatch.setitem(sys.modules, name, package)  # type: ignore[arg-type]
    monkeypatch.setattr("mm_grpo.run.trackers.REPORT_EVERY", 2)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    trackers = Trackers([name])
    with pytest.raises(RuntimeError, match="boom"), trackers.open(config(folder)):
        for step in (1, 2, 3):
            trackers.on_rollouts(step, [group(0, (0.0, 1.0), parts={"iou": [0.0, None]})])
            trackers.on_log(step, {"reward": 0.5, "note": "text"})
        raise RuntimeError("boom")  # a run that fails closes them too
    trackers.on_log(4, {"reward": 1.0})  # closed: nothing is sent any more
    (kind, started), *later, end = package.calls
    assert (kind, end) == ("init", ("finish",))
    assert (started["project"], started["name"]) == ("mm_grpo", "shapes")
    assert started["config"]["model"]["path"] == "base"
    assert started.get("dir") == (str(folder) if name == "wandb" else None)
    assert [(step, *values) for _, step, values in later] == [
        (1, "rollouts"), (1, "reward"), (2, "rollouts"), (2, "reward"), (3, "reward"),
    ]  # fmt: skip
    first, second = later[0][2]["rollouts"]
    assert (first["row"], first["reward"], second["reward"]) == ("rows:0red", 0.0, 1.0)
    assert (first["rewards/iou"], second["rewards/iou"]) == (0.0, None)
    assert first["image"] == ("image", group(0, (0.0,)).prompt.engine_prompt.images[0].size)
    assert caplog.records == []


@pytest.mark.parametrize(("call", "sent"), [("init", 0), ("log", 1), ("finish", 3)])
def test_a_failing_tracker_is_one_warning_and_the_others_go_on(
    call: str, sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Recorder({call: ConnectionError}), Recorder()
    monkeypatch.setitem(sys.modules, "wandb", broken)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "trackio", sound)  # type: ignore[arg-type]
    with Trackers(["wandb", "trackio"]).open(config(tmp_path)) as trackers:
        trackers.on_rollouts(1, [group(0, (0.0, 1.0))])
        trackers.on_log(1, {"reward": 0.25})
        trackers.on_log(2, {"reward": 0.5})
    (record,) = caplog.records
    assert "run.trackers: wandb" in record.getMessage() and "ConnectionError: no route" in record.getMessage()
    assert sum(made[0] == "log" for made in broken.calls) == sent
    assert [made[0] for made in sound.calls] == ["init", "log", "log", "log", "finish"]


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"^run.trackers = 'tensorboard': .*mm_grpo\[tensorboard\]"):
        Trackers(["tensorboard"])


def test_a_table_has_the_groups_whose_rewards_differ_most_and_their_pictures() -> None:
    groups = [group(slot, (0.0, slot / 10, slot / 10)) for slot in (5, 0, 3, 1, 4, 2)]
    rows = rollout_table(7, groups)
    assert [row["row"] for row in rows] == [f"rows:{slot}red" for slot in (2, 3, 4, 5) for _ in range(3)]
    assert [row["reward"] for row in rows[:3]] == [0.0, 0.2, 0.2] and {row["step"] for row in rows} == {7}
    first = groups[-1]
    assert (rows[0]["prompt"], rows[0]["answer"]) == ("[image] What colour? red", "red")
    assert rows[0]["completion"] == first.completions[0].text
    assert rows[2]["advantage"] == first.advantages[2]
    assert rows[0]["image"].size == first.prompt.engine_prompt.images[0].size
    filmed = replace(first.prompt, engine_prompt=EnginePrompt((1,), (tiny.video(1, width=512, height=64),)))
    (row,) = rollout_table(7, [replace(group(0, (1.0,)), prompt=filmed)])
    frame = filmed.engine_prompt.videos[0].frames[0]
    frame.thumbnail((256, 256))
    assert row["image"].tobytes() == frame.tobytes()
    assert len(rollout_table(1, [group(0, tuple(map(float, range(20))))])) == 8  # of 20
