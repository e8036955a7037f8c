"""Qwen3.5 in vLLM, which on a CPU runs its linear attention in bfloat16: both sides round, and gaps are small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny
from transformers import AutoModelForImageTextToText
from vllm_rig import Rig

from mm_grpo import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.gaps import check_start
from mm_grpo.parity.sync import SyncReport, VerifiedSync
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings
from mm_grpo.types import Group

pytestmark = pytest.mark.long
ROUNDING = 0.06
"""Nats: a few times what the rounding of bfloat16 makes of any token's log-prob in this model."""
SEEDS = range(40, 44)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("qwen3_5", tmp_path_factory.mktemp("vllm") / "qwen3_5", linear_width=128)


@pytest.fixture(scope="module")
def built(path: Path) -> Rig:
    return Rig(path, dtype="bfloat16")


@pytest.fixture
def rig(built: Rig) -> Rig:
    built.reset()
    return built


def test_ids_are_equal_and_log_probs_too_but_for_rounding(rig: Rig) -> None:
    prompts = rig.prompts()
    done = rig.engine.generate(
        requests_for(prompts, [range(10 * i, 10 * i + 4) for i in range(3)], Sampling(12))
    )
    assert len({c.token_ids for c in done}) == len(done)
    assert rig.gap(prompts, done) < ROUNDING
    for prompt, completion in zip(prompts, done[::4], strict=True):
        expected = rig.expected(prompt, completion.token_ids, mask=False)
        assert rig.engine.score(prompt, completion.token_ids) == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize(
    "parts",
    [("linear_attn.A_log", "linear_attn.dt_bias"), ("linear_attn.in_proj_b",), ("linear_attn.conv1d",)],
)
def test_a_part_of_a_linear_layer_arrives(parts: tuple[str, ...], rig: Rig) -> None:
    prompts = rig.prompts()
    requests = requests_for(prompts, [SEEDS] * 3, Sampling(12))
    before = rig.engine.generate(requests)
    scale = 0.3 if "A_log" in parts[0] else 6.0
    rig.change(*parts, scale=scale)
    transfer = rig.send(1)
    assert 0 < transfer.bytes < transfer.skipped_bytes
    assert rig.gap(prompts, before) > 2 * ROUNDING  # the change is one that shows
    assert rig.gap(prompts, rig.engine.generate(requests)) < ROUNDING


def test_updates_are_followed_and_checked(rig: Rig, path: Path) -> None:
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(path), "dtype": "bfloat16"},
            "data": {"train": {"task": "shapes", "split": "train", "size": 6, "seed": 1, "image_size": 84}},
            "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 10},
            "optim": {"learning_rate": 1e-2},
        }
    )
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).train()
    learner = Learner(model, rig.processor, config, 10)
    engine = VLLMEngine(rig.settings, rig.processor)
    sync = VerifiedSync(engine, learner, config)
    sync.start()
    prompt = rig.prompt("r:0", tiny.picture(1))
    check_start(engine, learner, config, prompt, SEEDS, 0)

    def step(version: int) -> SyncReport:
        done = tuple(engine.generate(requests_for([prompt], [SEEDS], Sampling(10))))
        group = Group(0, prompt, done, (1.0, 0.0, 1.0, 0.0), (1.0, -1.0, 1.0, -1.0))
        canary = sync.canary([group])
        report = learner.update([group])
        assert report.max_gap < ROUNDING
        return sync.update(version, canary, noise=report.max_gap)

    for version in (1, 2):
        report = step(version)
        assert report.problem is None and report.moved is not None and report.moved > 0
        assert report.score is not None and report.score.max < ROUNDING


def test_float32_is_refused_before_anything_is_loaded(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU vLLM runs it in float32 too")
    settings = EngineSettings(str(path), "float32", 512)
    with pytest.raises(ConfigError, match="linear attention of a qwen3_5_text in bfloat16 alone"):
        VLLMEngine(settings, load_processor(str(path)))
