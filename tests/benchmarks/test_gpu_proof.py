"""The stages for a GPU: their models and their places in the README; `make gpu-proof DRY=1` runs them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Script = Callable[[str], Any]


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
