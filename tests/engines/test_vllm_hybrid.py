"""Qwen3.5 in vLLM, which on a CPU runs its linear attention in bfloat16: both sides round, and gaps are small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import tiny
from test_vllm_parity import Both
from vllm_rig import Rig

from mm_grpo.errors import ConfigError
from mm_grpo.parity.gaps import check_start
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.rollout.vllm.launch import EngineSettings

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
    assert 0 < 2 * transfer.bytes < sum(t.nbytes for _, t in rig.tensors())
    assert rig.gap(prompts, before) > 2 * ROUNDING  # the change is one that shows
    assert rig.gap(prompts, rig.engine.generate(requests)) < ROUNDING


def test_updates_are_followed_and_checked(rig: Rig) -> None:
    both = Both(rig, limit=ROUNDING)
    check_start(both.engine, both.learner, both.config, both.prompt, SEEDS, 0)
    for version in (1, 2):
        report = both.step(version, rate=1e-2)
        assert report.problem is None and report.moved is not None and report.moved > 0
        assert report.score is not None and report.score.max < ROUNDING


def test_float32_is_refused_before_anything_is_loaded(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU vLLM runs it in float32 too")
    settings = EngineSettings(str(path), "float32", 512)
    with pytest.raises(ConfigError, match="linear attention of a qwen3_5_text in bfloat16 alone"):
        VLLMEngine(settings, load_processor(str(path)))
