"""LoRA under vLLM: the engine gets exact merges of the kept base, and answers as the adapted learner does."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import tiny
import torch

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.policy import load_policy
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.build import build_engine
from mm_grpo.run.sync import VerifiedSync

LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}
IDS = tuple(range(20, 36))


def config_of(path: Any, folder: Path, dtype: str, lora: dict[str, Any] | None) -> GRPOConfig:
    return GRPOConfig.from_dict(
        {
            "model": {"path": str(path), "dtype": dtype, "lora": lora},
            "rollout": {
                "engine": "vllm",
                "vllm": {"max_model_len": 1024, "max_images": 2},
                "prompts_per_step": 2,
                "num_generations": 4,
                "max_completion_length": 6,
            },
            "optim": {"learning_rate": 1e-2},
            "run": {"dir": str(folder), "max_steps": 3},
        }
    )


def vowels(completion: str) -> float:
    return sum(c in "aeiou" for c in completion) + len(completion) / 100


def test_a_run_with_adapters_of_q_and_v_stays_in_step(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(models["qwen2_5_vl"], tmp_path / "run", "float32", LORA)
    GRPOTrainer(config, train=shapes_rows(split="train", size=4, image_size=56), rewards=[vowels]).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    whole = sum(p.numel() * 4 for p in load_policy(config.model).parameters())
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5
        assert row["sync/logp_gap"] <= 1e-5
        assert 0 < row["sync/bytes"] < whole / 4  # the adapted layers and their fused siblings, nothing else


def gap(learner: Learner, engine: Any, prompt: Any) -> float:
    """Mean |difference| of unmasked log-probs of one fixed completion with its image, in nats."""
    (ours,) = learner.score(prompt, [IDS])
    return fmean(abs(a - b) for a, b in zip(ours, engine.score(prompt, IDS), strict=True))


def test_a_hundred_syncs_in_bfloat16_do_not_drift(models: dict[str, Path], tmp_path: Path) -> None:
    path = models["qwen2_5_vl"]
    processor = load_processor(str(path))
    prompt = processor.prompt(tiny.sample("r", "what is it", (tiny.picture(1),)))
    plain = config_of(path, tmp_path, "bfloat16", None)
    unadapted = load_policy(plain.model)
    engine = build_engine(plain, unadapted, processor)
    first = Learner(unadapted, processor, plain, 10)
    VerifiedSync(engine, first, plain).start()
    allowed = gap(first, engine, prompt)

    config = config_of(path, tmp_path, "bfloat16", LORA)
    model = load_policy(config.model)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}
    learner = Learner(model, processor, config, 200)
    engine = build_engine(config, model, processor)  # a second trainer takes the running engine over
    sync = VerifiedSync(engine, learner, config)
    sync.start()
    torch.manual_seed(0)
    for version in range(1, 101):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B" in name:
                    parameter.add_(2e-2 * torch.randn_like(parameter))
        sync.send(version)
    assert all(torch.equal(base[n], p) for n, p in model.named_parameters() if n in base)
    moved = [
        abs(a - b)
        for a, b in zip(learner.score(prompt, [IDS])[0], first.score(prompt, [IDS])[0], strict=True)
    ]
    assert fmean(moved) > 10 * allowed  # the adapters act
    assert gap(learner, engine, prompt) <= 3 * allowed
