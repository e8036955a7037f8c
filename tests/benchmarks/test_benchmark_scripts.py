"""Each benchmark from its command line to its JSON, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.long
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


@pytest.mark.long
def test_compare(
    result: Result, script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = script("compare")
    small = [
        "rollout.prompts_per_step=2",
        "rollout.num_generations=2",
        "data.train.size=8",
        "data.eval.count.size=2",
    ]
    small += ["data.eval.colour_and_shape.size=4", "optim.warmup_steps=0"]
    one = compare.run(compare.HERE, 4, small)
    assert tuple(one) == compare.PARTS and 0 < one["first line"] < one["first step"]
    assert sum(one[phase] for phase in compare.PHASES) < one["step"] * 1.5 and 0 < one["evaluation"] < 10
    with pytest.raises(RuntimeError, match=r"ended with 2: error: optim\.no"):
        compare.run(compare.HERE, 4, ["optim.no=1"])

    def made_up(folder: Path, steps: int, overrides: list[str]) -> dict[str, float]:
        runs.append((folder, steps, overrides))
        return dict.fromkeys(compare.PARTS, {compare.HERE: 2.0, tmp_path: 3.0}[folder] + len(runs) // 2)

    runs: list[Any] = []
    (tmp_path / "mm_grpo/cli").mkdir(parents=True)
    (tmp_path / "mm_grpo/cli/__main__.py").touch()
    monkeypatch.setattr(compare, "run", made_up)
    rows = result("compare", str(tmp_path), "a.b=c", "--steps", "5", "--rounds", "3")["rows"]
    assert runs == [(compare.HERE, 5, ["a.b=c"]), (tmp_path, 5, ["a.b=c"])] * 4
    assert [row["part"] for row in rows] == list(compare.PARTS)
    assert {(row["seconds_this"], row["seconds_other"], row["ratio"]) for row in rows} == {(4.0, 6.0, 1.5)}


@pytest.mark.long
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


@pytest.mark.long
def test_hybrid(result: Result) -> None:
    (row,) = result("hybrid", "--size", "tiny", "--shapes", "2x4x56", "--rounds", "1")["rows"]
    assert {k: row[k] for k in ("G", "T", "kind")} == {"G": 2, "T": 4, "kind": "image"}
    assert row["gradient_gap"] < 1e-4
    for side in ("plain", "trl"):
        assert row[f"{side}_ratio"] == pytest.approx(row[f"seconds_{side}"] / row["seconds_ours"], rel=1e-4)


@pytest.mark.long
def test_turns(result: Result) -> None:
    small = ("--size", "tiny", "--side", "84", "--sides", "56", "--generations", "2", "--tokens", "3")
    (row,) = result("turns", *small, "--rounds", "1")["rows"]
    assert {k: row[k] for k in ("G", "T", "side", "shown")} == {"G": 2, "T": 3, "side": 84, "shown": 56}
    assert row["gradient_gap"] < 1e-4 and row["tail"] > 2 * 3 + 4  # 56 pixels are 2 x 2 tokens
    for side in ("batched", "alone"):
        for part in ("generate", "learner", "step"):
            expected = row[f"{part}_{side}"] / row[f"{part}_ours"]
            assert row[f"{part}_{side}_ratio"] == pytest.approx(expected, rel=1e-4)
    for side in ("ours", "batched", "alone"):
        assert 0 < row[f"generate_{side}"] + row[f"learner_{side}"] <= row[f"step_{side}"] * 1.0001


@pytest.mark.long
def test_packs(result: Result) -> None:
    small = ("--size", "tiny", "--prompts", "6", "--generations", "2", "--words", "5", "--tokens", "4")
    apart, packed = result("packs", *small, "--pack", "200", "--rounds", "1")["rows"]
    assert (apart["layout"], packed["layout"]) == ("apart", "packed") and apart["tokens"] == packed["tokens"]
    assert apart["fill"] < packed["fill"] == 1.0
    for row in (apart, packed):
        assert row["pack_fill"] == pytest.approx(row["tokens"] / 200 / row["packs"], rel=1e-4)
        assert 0 < row["seconds"] < 60


def test_spread(result: Result) -> None:
    small = ("--size", "tiny", "--generations", "4", "--side", "56", "--tokens", "3")
    one, two = result("spread", *small, "--packs", "1,2", "--rounds", "1")["rows"]
    assert (one["packs"], two["packs"], two["G"], two["T"]) == (1, 2, 4, 3)
    prompts = {
        (row["packs"], side): row[f"prompts_{side}"] for row in (one, two) for side in ("again", "once")
    }
    assert prompts == {(1, "again"): 1, (1, "once"): 1, (2, "again"): 2, (2, "once"): 1}
    assert (one["images_again"], two["images_again"], two["images_once"]) == (1, 2, 1)
    assert two["tokens_again"] - two["tokens_once"] == two["L"]
    for row in (one, two):
        assert 0 < row["seconds_again"] < 60 and 0 < row["seconds_once"] < 60


@pytest.mark.long
def test_images(result: Result) -> None:
    plain, ahead = result("images", "--prompts", "4", "--steps", "1", "--max-pixels", "3136")["rows"]
    assert (plain["workers"], ahead["workers"], plain["P"]) == (0, 2, 4)
    for row in (plain, ahead):
        assert 0 < row["wait"] < row["step"] < 30
        assert row["share"] == pytest.approx(row["wait"] / row["step"], rel=1e-3)


@pytest.mark.long
def test_overlap(result: Result) -> None:
    small = (
        "--size",
        "tiny",
        "--prompts",
        "2",
        "--generations",
        "2",
        "--tokens",
        "8",
        "--steps",
        "1",
        "--rounds",
        "1",
    )
    found = result("overlap", *small, "--kinds", "async", "--seconds", "0.01")
    assert found["versions"]["seconds"] == 0.01
    assert [(row["reward"], row["called"]) for row in found["rows"]] == [
        ("async", "after"),
        ("async", "meanwhile"),
    ]
    for row in found["rows"]:
        assert 0 < row["wait"] < row["step"] < 30 and 0 < row["sampling"] < row["step"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        (
            "learner",
            ["--device", "gpu"],
            "argument --device: 'gpu' cannot be used here (Expected one of cpu, cuda",
        ),
        (
            "learner",
            ["--device", "meta"],
            "it is neither a CPU nor a GPU of NVIDIA's); legal are cpu and, with a GPU",
        ),
        (
            "learner",
            ["--shapes", "vqa,2x4"],
            "'2x4' must be one of vqa, wide, long, text, or GxTxSIDE, such as 8x64",
        ),
        ("learner", ["--rounds", "0"], "argument --rounds: '0' must be an integer >= 1"),
        ("learner", ["--json", "/"], "argument --json: '/' is a folder; name a file"),
        (
            "learner",
            ["--json", "/proc/a/b"],
            "argument --json: '/proc/a/b' cannot be written (No such file or direct",
        ),
        ("memory", ["--vocabularies", "8,a"], "argument --vocabularies: 'a' must be an integer >= 1"),
        (
            "scaling",
            ["--sweeps", "prompts"],
            "'prompts' must be one of completions, completions_text, prompt, side,",
        ),
        (
            "overhead",
            ["--steps", "1", "optim.learning_rate=a"],
            "optim.learning_rate = 'a': must be a number >= 0",
        ),
        ("overhead", ["--config", "nope.yaml"], "nope.yaml: there is no such config file"),
        ("readme", ["/nope"], "/nope: there is no such folder of results; `make bench` writes"),
        ("plot", ["/nope.json"], "/nope.json: there is no such file; learner.py --json FILE writes one"),
    ],
)
def test_a_mistake_is_one_line(
    name: str,
    arguments: list[str],
    told: str,
    script: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        script(name).main(arguments)
    assert left.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script("memory").main(["--device", "cuda"])
    assert "argument --device: 'cuda' cannot be used here (" in capsys.readouterr().err.splitlines()[-1]


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


@pytest.mark.long
def test_generation(result: Result) -> None:
    (row,) = result("generation", "--workloads", "tiny", "--rounds", "2")["rows"]
    assert (row["P"], row["G"], row["T"], row["tokens"]) == (2, 4, 3, 24)
    assert row["ratio"] == pytest.approx(row["seconds_trl"] / row["seconds_ours"], rel=1e-4)
    assert row["rate_ours"] == pytest.approx(24 / row["seconds_ours"], rel=1e-4)
