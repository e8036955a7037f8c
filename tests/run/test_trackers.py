"""run.trackers: real event files for tensorboard, the calls that wandb and trackio get, what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.run.trackers import Trackers


def config(folder: Path) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": {"path": "base"}, "run": {"dir": str(folder)}})


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    with Trackers.prepare(["tensorboard"]).open(config(tmp_path)) as trackers:
        trackers.log(1, {"reward": 0.25, "kl": None, "note": "text"})
        trackers.log(2, {"reward": 0.5, "rewards/iou/mean": 1})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward", "rewards/iou/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("rewards/iou/mean")] == [(2, 1.0)]
    (text,) = events.Tensors("config/text_summary")
    assert b"path: base" in text.tensor_proto.string_val[0]


class Recorder(SimpleNamespace):
    """Stands in for wandb and trackio: `init` gives a run, and every call is noted."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def init(self, **arguments: Any) -> Recorder:
        self.calls.append(("init", arguments))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_the_config_and_the_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Recorder()
    monkeypatch.setitem(sys.modules, name, package)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    folder = tmp_path / "shapes"
    with Trackers.prepare([name]).open(config(folder)) as trackers:
        trackers.log(3, {"reward": 0.25, "note": "text"})
    (kind, started), *later = package.calls
    assert kind == "init"
    assert (started["project"], started["name"]) == ("mm_grpo", "shapes")
    assert started["config"]["model"]["path"] == "base"
    assert started.get("dir") == (str(folder) if name == "wandb" else None)
    assert later == [("log", 3, {"reward": 0.25}), ("finish",)]


def test_a_failing_run_still_closes_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", package)  # type: ignore[arg-type]
    trackers = Trackers.prepare(["trackio"])
    with pytest.raises(RuntimeError, match="boom"), trackers.open(config(tmp_path)):
        raise RuntimeError("boom")
    assert package.calls[-1] == ("finish",)
    trackers.log(1, {"reward": 1.0})
    assert package.calls[-1] == ("finish",)  # closed: nothing is sent any more


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_names_the_extra(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        Trackers.prepare([name])
    assert str(caught.value).startswith(f"run.trackers = '{name}': the package is not installed (")
    assert str(caught.value).endswith(
        f"); install it with: pip install 'mm_grpo[{name}]', or remove '{name}' from run.trackers"
    )


def test_an_unknown_tracker_names_the_legal_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        Trackers.prepare(["mlflow"])
    assert str(caught.value) == "run.trackers = 'mlflow': unknown; legal are tensorboard, wandb, trackio"


def test_no_trackers_is_fine(tmp_path: Path) -> None:
    with Trackers.prepare([]).open(config(tmp_path)) as trackers:
        trackers.log(1, {"reward": 1.0})
    assert list(tmp_path.iterdir()) == []
