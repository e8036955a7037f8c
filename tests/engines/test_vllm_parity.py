"""The run's own checks over the real vLLM: sound as it is, and each safety that is taken away shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers import tiny
from helpers.configs import small_config

from mm_grpo import GRPOConfig
from mm_grpo.errors import EngineError, GuardStop
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.gaps import check_start
from mm_grpo.parity.sync import SyncReport, VerifiedSync
from mm_grpo.rollout.engine import Request, Sampling, requests_for
from mm_grpo.rollout.vllm import internals
from mm_grpo.rollout.vllm.engine import VLLMEngine
from mm_grpo.types import Group

SEEDS = range(40, 44)
LONG = (
    "tell me at length what there is to be seen in this picture, and where, and how it came to be there. " * 2
)


def config_of(rig: Any, **rollout: Any) -> GRPOConfig:
    return small_config(
        rig.settings.model,
        model={"dtype": rig.settings.dtype},
        data={"train": {"task": "shapes", "split": "train", "size": 6, "seed": 1, "image_size": 84}},
        rollout={"num_generations": 4, "max_completion_length": 10, **rollout},
    )


class Both:
    """A learner over the rig's model and an engine of the given class, in step."""

    def __init__(self, rig: Any, kind: type[VLLMEngine] = VLLMEngine, limit: float = 1e-5) -> None:
        self.config, self.limit = config_of(rig), limit
        rig.model.train().requires_grad_(True)
        self.learner = Learner(rig.model, rig.processor, self.config, 10)
        self.engine = kind(rig.settings, rig.processor)
        self.sync = VerifiedSync(self.engine, self.learner, self.config)
        self.sync.start()
        # longer than one block of the prefix cache on a CPU, 128 tokens
        self.prompt = rig.prompt("r:0", tiny.picture(1), text=LONG)
        self.sync.calibrate(self.prompt)

    def step(self, version: int = 1, rate: float = 1e-3) -> SyncReport:
        optimizer = self.learner.optimizer
        optimizer.config = optimizer.config.with_values({"learning_rate": rate})
        done = tuple(self.engine.generate(requests_for([self.prompt], [SEEDS], Sampling(10))))
        group = Group(0, self.prompt, done, (1.0, 0.0, 1.0, 0.0), (1.0, -1.0, 1.0, -1.0))
        canary = self.sync.canary([group])
        report = self.learner.update([group])
        assert report.metrics["sampling/sampling_logp_difference/max"] < self.limit
        noise = report.metrics["sampling/sampling_logp_difference/max"]
        return self.sync.update(version, canary, noise=noise)


def test_a_sound_engine_follows_every_update(one: Any) -> None:
    both = Both(one)
    assert len(both.prompt.token_ids) > 140
    check_start(both.engine, both.learner, both.config, both.prompt, SEEDS, 0)
    for version, rate in ((1, 1e-3), (2, 1e-6), (3, 1e-4)):
        report = both.step(version, rate)
        assert report.problem is None and report.bytes > 0
        assert report.score is not None and report.score.max < 1e-5
        assert report.probe is not None and report.probe.max < 1e-5


def keep(_: Any) -> None:
    """Stand in for the reset of a cache."""


class OtherImage(VLLMEngine):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        sampled = self.requests.sampled

        def flipped(group: Sequence[Request]) -> Any:
            sent = sampled(group)
            return replace(sent, media=tuple(image.transpose(1) for image in sent.media))

        self.requests.sampled = flipped  # type: ignore[method-assign]


@pytest.mark.field_bug("old-caches")
def test_a_prefix_cache_that_is_kept_shows(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "reset_prefix_cache", keep)
    problem = Both(one).step(1).problem
    assert problem is not None and "new samples for r:0" in problem


@pytest.mark.field_bug("old-caches")
def test_an_encoder_cache_that_is_kept_shows(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # reload clears the worker's half of the cache alone, and vLLM trips over the other half
    monkeypatch.setattr(internals, "reset_encoder_cache", keep)
    both = Both(one)
    with pytest.raises(EngineError, match=r"vLLM failed .*\(r:0\): .*Encoder cache miss"):
        both.step(1)
    both.engine._handle.llm.llm_engine.reset_encoder_cache()


@pytest.mark.field_bug("blind-rollout")
def test_another_image_stops_before_the_first_step(one: Any) -> None:
    both = Both(one, OtherImage)
    with pytest.raises(GuardStop, match=r"before the first step, .*the tokens that it sampled for r:0"):
        check_start(both.engine, both.learner, both.config, both.prompt, SEEDS, 0)
