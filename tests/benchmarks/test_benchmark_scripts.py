"""Each benchmark from its command line to its JSON, on tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from mm_grpo import __version__

Result = Callable[..., dict[str, Any]]


@pytest.mark.long
def test_learner(result: Result) -> None:
    found = result("learner", "--size", "tiny", "--shapes", "2x4x56,3x2x0", "--rounds", "1")
    versions = found["versions"]
    assert versions["mm_grpo"] == __version__ and versions["trl"] == "1.16.0"
    assert {"python", "torch", "transformers", "cpus", "threads", "device", "dtype"} <= versions.keys()
    assert (versions["device"], versions["dtype"]) == ("cpu", "float32")
    (sitting,) = found["sittings"]
    assert sitting["allocator"] == "glibc"
    image, text = found["rows"]
    assert {k: image[k] for k in "GT"} == {"G": 2, "T": 4}
    assert {k: text[k] for k in "GT"} == {"G": 3, "T": 2}
    assert (image["kind"], text["kind"]) == ("image", "text")
    assert image["L"] - text["L"] == 2 * 2 + 2  # 56 pixels are 4 x 4 patches; two ids stand around them
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["seconds_trl"] / row["seconds_ours"], rel=1e-4)
        assert 0 < row["seconds_bound"] < row["seconds_ours"] < 30 and row["ratio_low"] == row["ratio_high"]
        assert row["seconds_bound"] == pytest.approx(row["flops"] / sitting["flops_per_second"], rel=1e-4)
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


TINY = "--size tiny --rounds 1"
SMOKE = {
    "overhead": "rollout.prompts_per_step=2 data.train.size=8 optim.warmup_steps=0 --steps 2 --warm 1",
    "scaling": f"{TINY} --sweeps completions --side 112",
    "step": "--workloads tiny --rounds 2 --warm 1",
    "hybrid": f"{TINY} --shapes 2x4x56",
    "turns": f"{TINY} --side 84 --sides 56 --generations 2 --tokens 3",
    "packs": f"{TINY} --prompts 6 --generations 2 --words 5 --tokens 4 --pack 200",
    "spread": f"{TINY} --generations 4 --side 56 --tokens 3 --packs 1,2",
    "images": "--prompts 4 --steps 1 --max-pixels 3136",
    "overlap": f"{TINY} --prompts 2 --generations 2 --tokens 8 --steps 1 --kinds async --seconds 0.01",
    "generation": "--workloads tiny --rounds 2",
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMOKE)
def test_a_script_ends_in_rows_whose_ratios_are_those_of_their_seconds(name: str, result: Result) -> None:
    rows = result(name, *SMOKE[name].split())["rows"]
    assert rows
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, int | float))
        if {"ratio", "seconds_trl", "seconds_ours"} <= row.keys():
            assert row["ratio"] == pytest.approx(row["seconds_trl"] / row["seconds_ours"], rel=1e-4)
        assert row.get("gradient_gap", 0.0) < 1e-4


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("learner", ["--device", "gpu"], "argument --device: 'gpu'"),
        ("learner", ["--shapes", "vqa,2x4"], "'2x4'"),
        ("learner", ["--rounds", "0"], "argument --rounds: '0'"),
        ("learner", ["--json", "/"], "argument --json: '/'"),
        ("overhead", ["--steps", "1", "optim.learning_rate=a"], "optim.learning_rate = 'a'"),
        ("readme", ["/nope"], "/nope"),
    ],
)
def test_a_mistake_is_one_line(
    name: str,
    arguments: list[str],
    words: str,
    script: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script(name).main(arguments)
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["learner", "memory", "step"])
def test_trl_is_asked_for_before_anything_is_measured(
    name: str,
    script: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = script(name)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(SystemExit, match="2"):
        module.main([])
    assert "needs the package trl, which is not installed; `make setup`" in capsys.readouterr().err
