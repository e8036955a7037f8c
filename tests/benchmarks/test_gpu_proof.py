"""The stages for a GPU: a dry run of them on a CPU, what a second call leaves out, and what becomes of faults."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import forkserver

Script = Callable[[str], Any]
KEYS = {"stage", "status", "reason", "dry", "versions", "seconds", "rows"}


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}


def fork(command: list[str], *, stderr: int, start_new_session: bool, **kwargs: Any) -> forkserver.Forked:
    """In place of subprocess.Popen: imports are most of a dry run."""
    assert start_new_session and stderr == subprocess.STDOUT
    return forkserver.start(command[1:], stderr=kwargs["stdout"], preload=forkserver.VLLM, **kwargs)


@pytest.mark.long
def test_every_stage_of_a_dry_run(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = script("gpu_proof")
    known = {name: getattr(subprocess, name) for name in ("STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(proof, "subprocess", SimpleNamespace(Popen=fork, **known))
    asked = ["--dry", "--folder", str(tmp_path)]
    # sleep level 2 is 1 where there is no GPU to give back, and of tests/gpu all are skipped
    stages = proof.NEEDS.keys() - {"vllm-sleep-2", "tests"}
    proof.main([*asked, "--stages", ",".join(s for s in proof.NEEDS if s in stages)])
    found = results_in(tmp_path)
    assert found.keys() == stages
    for result in found.values():
        assert result.keys() == KEYS and (result["status"], result["dry"]) == ("done", True), result
        assert result["seconds"] == pytest.approx(sum(r["case_seconds"] for r in result["rows"]), rel=1e-4)
    assert all(row["right"] and row["distance_flex"] < row["limit"] for row in found["attention"]["rows"])
    for model in ("learner-qwen2_5_vl-3b", "learner-qwen3_vl-4b"):
        lora, full = found[model]["rows"]
        assert (full["train"], full["checkpointing"], lora["train"]) == ("full", True, "lora")
        assert 0 < full["mfu"] < full["mfu_passes"] and full["update_norm"] > 0 < lora["update_norm"]
        assert lora["estimate_optimizer"] < full["estimate_optimizer"]
        assert full["P"] > lora["P"] == 2 and full["pack"] > 2 * full["L"]  # several groups in a pack
    assert all(row["kind"] == "image" and row["gradient_gap"] < 0.05 for row in found["trl"]["rows"])
    for name in ("run", "vllm-sleep-1"):
        (run,) = found[name]["rows"]
        assert run["samples_per_second"] == pytest.approx(8 / run["seconds_step"], rel=1e-4)
        assert run["weights_changed"] > 0.1 and run["update_norm_least"] > 0 and run["logp_gap_mean"] < 0.01
        assert name == "run" or (
            run["canary_moved"] > run["canary_gap_mean"] and run["canary_problems"] == []
        )

    # a second call runs nothing again; what is not installed is named, and the tables take what is there
    proof.start = lambda *args: pytest.fail("a stage was run again")
    proof.main([*asked, "--part", "2"])
    assert results_in(tmp_path) == found
    with tarfile.open(tmp_path / "part-2.tar.gz") as packed:
        # in a dry run the first stage has the log of all
        assert packed.getnames() == ["run.json", "trl.json"]
    capsys.readouterr()
    proof.main([*asked, "--fresh", "--stages", "trl,vllm-sleep-2", "--without", "vllm,trl"])
    assert "not installed: vllm" in capsys.readouterr().out
    for name, package in (("vllm-sleep-2", "vllm"), ("trl", "trl")):
        result = results_in(tmp_path)[name]
        assert result.keys() == KEYS and result["rows"] == []
        assert (result["status"], result["reason"]) == ("not run", f"not installed: {package}")
    page = (proof.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    filled = script("readme").written(page, tmp_path / "none", tmp_path)
    assert "| `trl` | not run | 0 | 0 | cpu |" in filled and "| qwen3_vl-4b | lora, G 8, 448 px, ch" in filled
    assert filled.count("Not measured yet.") == 1  # TRL's
    headline = filled.partition("<!-- gpu-headline -->")[2].partition("<!-- /gpu-headline -->")[0]
    assert "| TRL's time / ours, loss and backward |  |" in headline
    rate = found["run"]["rows"][0]["samples_per_second"]
    assert f"| samples per second and GPU, embedded engine | {rate:.2f} |" in headline


def test_faults_stay_in_their_cases(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, runs = script("gpu_proof"), script("gpu_runs")
    called: list[str] = []

    def case(name: str, fault: Exception | None = None) -> Callable[[Any], dict[str, Any]]:
        def run(setting: Any) -> dict[str, Any]:
            called.append(name)
            if fault is not None:
                raise fault
            return {"seconds": 1 / 3}

        return run

    cases = {
        "large": case("large", torch.OutOfMemoryError("1 TiB")),
        "wrong": case("wrong", ValueError("no")),
    }
    monkeypatch.setitem(runs.STAGES, "run", cases)
    settings = {"dry": True, "peak_tflops": 1.0, "without": [], "fresh": False, "minutes": 5}
    options = SimpleNamespace(folder=tmp_path, stages=["run"], **settings)
    proof.run_stage("run", options)
    found = results_in(tmp_path)["run"]
    assert (found["status"], found["reason"]) == ("failed", "wrong: ValueError: no")
    assert [row["fault"] for row in found["rows"]] == ["out of memory", "ValueError: no"]
    cases["wrong"] = case("mended")
    proof.run_stage("run", options)
    found = results_in(tmp_path)["run"]
    assert called == ["large", "wrong", "mended"] and found["status"] == "done"
    assert found["rows"][1] | {"case_seconds": 0} == {"case": "wrong", "seconds": 0.333333, "case_seconds": 0}
    # another torch is another measurement
    file = tmp_path / "run.json"
    file.write_text(json.dumps(found | {"versions": found["versions"] | {"torch": "1.0"}}))
    proof.run_stage("run", options)
    assert called[3:] == ["large", "mended"]


def test_the_models_are_those_that_were_published(script: Script) -> None:
    from mm_grpo.preflight.memory import ModelSizes

    models, common = script("gpu_models"), script("common")
    machine = common.Machine(torch.device("meta"), torch.bfloat16)
    counts = {}
    for name in models.SHAPES:
        config, processor = models.config_and_processor(name, models.Setting(machine, 1.0, "given", False))
        model = models.make_model(config, processor, machine)
        counts[name] = ModelSizes.of(model).weights
        if name == "qwen3_vl-4b":  # 64 x 64 patches of 16 pixels; all blocks see the whole image
            found = common.forward_flops(model, 10, 2, 3, [4096])
    assert counts == {"qwen2_5_vl-3b": 3_754_622_976, "qwen3_vl-4b": 4_437_815_808}
    # four projections of 32 heads of 128 and 8 of keys and values, three of 2560 x 9728, over 16 tokens
    layer = 2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728
    assert found["layers"] == 2 * 36 * layer * 16
    assert found["attention"] == 4 * 36 * (10 * 10 / 2 + 2 * 3 * (10 + 3 / 2)) * 4096
    assert found["head"] == 2 * 6 * 2560 * 151_936
    tower = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096) * 4096 * 2 + 24 * 4 * 4096**2 * 1024
    mergers = 4 * (4096 * 4096 + 4096 * 2560) * 2 * 4096 / 4
    assert found["tower"] == tower + mergers


def test_the_readme_lists_every_stage(script: Script) -> None:
    proof = script("gpu_proof")
    page = (proof.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = page.partition("\n## On a GPU\n")[2]
    stages = [(part, stage) for part, stages in proof.PARTS.items() for stage in stages]
    assert [stage for _, stage in stages] == [*proof.NEEDS]
    assert [stage for part, stage in stages if f"| {part} | `{stage}` |" not in section] == []
    readme = script("readme")
    for name in readme.GPU_TABLES:
        assert f"<!-- {name} -->\n" in section and f"<!-- /{name} -->" in section
