"""The table of families in vLLM: the ids it runs, and its log-probs against transformers' own processor and forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.families import TABLE, plain_logprobs, prompts_by_row, prompts_of
from helpers.steps import load
from vllm_rig import Rig

from mm_grpo.errors import ConfigError
from mm_grpo.processors.base import load_processor, mm_processor_kwargs
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.types import Prompt

pytestmark = pytest.mark.long
LIMITS = {"float32": 1e-5, "bfloat16": 0.06}
"""Nats of any token: rounding, and in bfloat16 a few times what it makes of these models."""
RUN = [family for family, row in TABLE.items() if row.vllm]


@pytest.fixture(params=RUN)
def rig(request: pytest.FixtureRequest, rigs: Callable[[str], Rig]) -> Rig:
    found = rigs(request.param)
    found.reset()
    return found


def largest_gap(rig: Rig, prompts: list[Prompt]) -> float:
    """Of the log-probs of any token of four completions of each prompt; the engine compares ids itself."""
    seeds = [range(10 * i, 10 * i + 4) for i in range(len(prompts))]
    done = rig.engine.generate(requests_for(prompts, seeds, Sampling(10)))
    assert len({c.token_ids for c in done}) > len(prompts)
    gaps = []
    with torch.no_grad():
        for number, completion in enumerate(done):
            plain, _ = plain_logprobs(rig.model, rig.processor, prompts[number // 4], completion.token_ids)
            gaps.append(float((plain - torch.tensor(completion.logprobs)).abs().max()))
    return max(gaps)


def test_every_weight_arrives_in_an_update(rig: Rig) -> None:
    prompts = prompts_of("mixed", rig.processor)
    if rig.processor.family.__class__.__name__ != "SmolVLMFamily":  # which follows no limits of one image
        prompts += prompts_by_row(rig.processor)
    if rig.processor.video_token_id is not None:
        prompts += prompts_of("mixed videos", rig.processor)
    before = largest_gap(rig, prompts)
    rig.change("", scale=1.02)
    transfer = rig.send(1)
    assert transfer.digests.keys() == dict(rig.tensors()).keys()
    assert max(before, largest_gap(rig, prompts)) <= LIMITS[rig.settings.dtype]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM runs both")
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_5", "linear attention of a qwen3_5_text in bfloat16 alone"),
        ("qwen3_5_moe", "linear attention of a qwen3_5_moe_text in bfloat16 alone"),
        ("gemma3", r"on a CPU vLLM lets no token of an image see .* rollout\.engine=transformers"),
    ],
)
def test_families_beyond_a_cpus_vllm_are_refused(family: str, words: str, models: dict[str, Path]) -> None:
    path = str(models[family])
    with pytest.raises(ConfigError, match=words):
        VLLMEngine(EngineSettings(path, "float32", 512), load_processor(path))


def test_limits_on_images_reach_vllm(models: dict[str, Path]) -> None:
    """Four tiles at most, where the model's own limit is larger: ids are compared by the engine."""
    small, own = (load_processor(str(models["internvl"]), max_pixels=limit) for limit in (4 * 56**2, None))
    limits = tuple(mm_processor_kwargs(small).items())
    settings = EngineSettings(str(models["internvl"]), "float32", 1024, limits, max_images=3)
    engine = VLLMEngine(settings, small)
    (prompt,), (whole,) = (prompts_of("three images", p) for p in (small, own))
    assert len(prompt.token_ids) < len(whole.token_ids)
    weights = load(models["internvl"]).named_parameters(remove_duplicate=False)
    # a running engine is taken over
    WeightLedger().send(engine, ((name, p.detach()) for name, p in weights), 0)
    done = engine.generate(requests_for([prompt], [range(4)], Sampling(4)))
    assert len({c.token_ids for c in done}) > 1
