"""Each benchmark from its command line to its JSON, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mm_grpo import __version__

Result = Callable[..., dict[str, Any]]


def test_learner(result: Result) -> None:
    found = result("learner", "--size", "tiny", "--shapes", "2x4x56,3x2x0", "--rounds", "1")
    versions = found["versions"]
    assert versions["mm_grpo"] == __version__ and versions["trl"] == "1.16.0"
    assert {"python", "torch", "transformers", "cpus", "threads", "device", "dtype"} <= versions.keys()
    assert (versions["device"], versions["dtype"]) == ("cpu", "float32")
    image, text = found["rows"]
    assert {k: image[k] for k in "GT"} == {"G": 2, "T": 4}
    assert {k: text[k] for k in "GT"} == {"G": 3, "T": 2}
    assert image["L"] - text["L"] == 2 * 2 + 2  # 56 pixels are 4 x 4 patches; two ids stand around them
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["seconds_trl"] / row["seconds_ours"], rel=1e-4)
        assert 0 < row["seconds_bound"] < row["seconds_ours"] < 30
        assert row["seconds_bound"] == pytest.approx(row["flops"] / versions["flops_per_second"], rel=1e-4)
        assert row["gradient_gap"] < 1e-4


def test_memory(result: Result, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"difference": 1e-6, "ours": 3 << 20, "trl": 12 << 20}
    asked: list[tuple[Any, ...]] = []

    def measured(what: str, *sizes: Any) -> float:
        asked.append((what, *sizes[:3]))
        return figures[what]

    monkeypatch.setattr(script("memory"), "in_a_fresh_process", measured)
    found = result("memory", "--vocabularies", "1024,2048", "--tokens", "8", "--width", "16")
    assert asked == [(w, v, 8, 16) for v in (1024, 2048) for w in ("difference", "ours", "trl")]
    assert [row["V"] for row in found["rows"]] == [1024, 2048]
    row = found["rows"][0]
    assert (row["M"], row["D"], row["ratio"], row["gradient_gap"]) == (8, 16, 4.0, 1e-6)
    assert (row["bytes_logits"], row["bytes_head_and_gradient"]) == (4 * 8 * 1024, 2 * 4 * 16 * 1024)
    assert row["chunks_ours"] == pytest.approx((3 << 20) / row["chunk_bytes"], rel=1e-4)


def test_overhead(result: Result) -> None:
    small = ("rollout.prompts_per_step=2", "rollout.num_generations=4", "data.train.size=8")
    small += ("optim.warmup_steps=0",)
    found = result("overhead", *small, "--steps", "2", "--warm", "1")
    rows = {row["part"]: row for row in found["rows"]}
    assert found["versions"]["steps"] == 2
    assert rows["step_time"]["share"] == 1.0
    shares = [rows[part]["share"] for part in ("generate", "forward", "backward", "outside")]
    assert all(0 <= share < 1 for share in shares) and sum(shares) == pytest.approx(1.0, abs=0.15)
    assert rows["generate"]["seconds"] <= rows["time/rollout"]["seconds"]
    learning = sum(rows[part]["seconds"] for part in ("forward", "backward", "optimizer"))
    assert learning < rows["time/learner"]["seconds"] * 1.1


def test_scaling(result: Result) -> None:
    options = ("--size", "tiny", "--side", "112", "--rounds", "1")
    found = result("scaling", "--sweeps", "completions,completions_text,side,images", *options)
    rows = [row for row in found["rows"] if row["x"] is not None]
    for row in rows:
        assert row["tokens"] == row["L"] + row["G"] * row["T"]
        assert 0 < row["seconds"] < 30
    sweeps = {name: [r for r in rows if r["sweep"] == name] for name in ("completions", "side", "images")}
    assert [r["G"] for r in sweeps["completions"]] == [2, 4, 8, 16]
    assert [r["patches"] for r in sweeps["side"]] == [4, 16, 36, 64]
    assert [r["patches"] for r in sweeps["images"]] == [16, 32, 64]
    lines = {row["sweep"]: row for row in found["rows"] if row["x"] is None}
    line, length = lines["completions"], sweeps["completions"][0]["L"]
    assert line["token_share"] == pytest.approx(64 / (length + 64), rel=1e-4)
    assert (
        0 < line["flop_share"] < lines["completions_text"]["flop_share"] < 1
    )  # the image is the first's to pay
    assert line["first"] == pytest.approx(line["intercept"] + line["slope"], rel=1e-3)


@pytest.mark.long
def test_step(result: Result) -> None:
    (row,) = result("step", "--workloads", "tiny", "--rounds", "2", "--warm", "1")["rows"]
    assert {k: row[k] for k in "PGT"} == {"P": 2, "G": 4, "T": 3}
    for part in ("generate", "learner", "step"):
        assert row[f"{part}_ratio"] == pytest.approx(row[f"{part}_trl"] / row[f"{part}_ours"], rel=1e-4)
    for side in ("ours", "trl"):
        assert 0 < row[f"generate_{side}"] + row[f"learner_{side}"] < row[f"step_{side}"]
