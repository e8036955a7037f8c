"""A checkpoint of some processes is resumed by any other number, at any ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import resumes
import torch
import updates
from helpers import processes

from mm_grpo.distributed.ranks import Ranks


@pytest.mark.long
def test_the_second_step_does_not_depend_on_who_wrote_the_first(
    models: dict[str, Path], tmp_path: Path
) -> None:
    path = models["qwen2_5_vl"]
    (tmp_path / "alone").mkdir()  # as a run makes its folder before its first checkpoint
    want = resumes.two_steps(path, tmp_path / "alone", Ranks(), resumes.CASES["replicated"])
    codes = processes.launch(Path(resumes.__file__), 2, (path, tmp_path), tmp_path / "output")
    assert codes == [0, 0], processes.outputs(tmp_path / "output", 2)
    names = sorted(p.name for p in (tmp_path / "checkpoints" / "step-000001").iterdir())
    assert names == ["manifest.json", *(f"state-0000{r}-of-00002.safetensors" for r in (0, 1))]
    results = torch.load(tmp_path / "results-0.pt")
    results["two-to-one"] = resumes.second_step(path, tmp_path, Ranks(), resumes.CASES["replicated"])
    learner, _ = updates.build(path, resumes.CASES["replicated"], Ranks())
    start = updates.weights_of(learner)
    moved = {n: w - start[n] for n, w in want.items()}
    for name, weights in results.items():
        distance, where = updates.far({n: w - start[n] for n, w in weights.items()}, moved)
        assert distance <= 2e-5, (name, where, distance)  # two updates
    other = torch.load(tmp_path / "results-1.pt")
    for name, weights in other.items():
        assert all(torch.equal(weights[n], w) for n, w in results[name].items())
