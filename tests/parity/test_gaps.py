"""Parity of engine and learner, and the verified sync: hand-worked numbers, and every fault caught."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.configs import small_config
from helpers.fake_engines import FakeRemoteEngine

from mm_grpo.build import build_engine
from mm_grpo.errors import DataError, GuardStop
from mm_grpo.health.checks import LogprobGap
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.model import load_model
from mm_grpo.parity import fixed_completions
from mm_grpo.parity.gaps import check_start, compare, first_with_media, gap_of, past_limit
from mm_grpo.parity.sync import SyncReport, VerifiedSync, stale_samples
from mm_grpo.processors.base import load_processor
from mm_grpo.rollout.engine import Request, Sampling, requests_for, require_answers
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Completion, EnginePrompt, Group, Prompt

SEEDS = range(40, 44)


class Both:
    """Learner and engine of a tiny model, prompts with an image and without, and one group."""

    def __init__(
        self, path: Any, fault: str | None = "", dtype: torch.dtype = torch.float32, **rollout: Any
    ) -> None:
        section = {"num_generations": 4, "max_completion_length": 12, **rollout}
        self.config = small_config(path, model={"dtype": str(dtype).removeprefix("torch.")}, rollout=section)
        self.processor = load_processor(str(path))
        model = load_model(self.config.model, self.processor.family)
        self.learner = Learner(model, self.processor, self.config, 10)
        self.engine: TransformersEngine = (
            TransformersEngine(self.learner.model, self.processor)
            if fault is None
            else FakeRemoteEngine(self.learner.model, self.processor, fault)
        )
        self.sync = VerifiedSync(self.engine, self.learner, self.config)
        self.sync.start()
        self.pictured = self.processor.prompt(tiny.sample("r:0", "what is it", (tiny.picture(1),)))
        self.plain = self.processor.prompt(tiny.sample("r:1", "say something"))
        self.sync.calibrate(self.pictured)

    def requests(self, prompt: Prompt) -> list[Request]:
        rollout = self.config.rollout
        return requests_for([prompt], [SEEDS], Sampling(rollout.max_completion_length, rollout.temperature))

    def group(self, prompt: Prompt) -> Group:
        done = tuple(self.engine.generate(self.requests(prompt)))
        return Group(0, prompt, done, (1.0, 0.0, 1.0, 0.0), (1.0, -1.0, 1.0, -1.0))

    def step(self, version: int = 1, rate: float = 1e-3) -> SyncReport:
        """One learner step and its sync, as the trainer makes them."""
        optimizer = self.learner.optimizer
        optimizer.config = optimizer.config.with_values({"learning_rate": rate})
        groups = [self.group(self.plain), replace(self.group(self.pictured), slot=1)]
        canary = self.sync.canary(groups)
        assert canary is not None and canary.prompt is self.pictured
        report = self.learner.update(groups)
        noise = report.metrics["sampling/sampling_logp_difference/max"]
        return self.sync.update(version, canary, noise=noise)


def made(tokens: Sequence[int], seed: int, version: int = 0) -> Completion:
    return Completion(tuple(tokens), (-1.0,) * len(tokens), "x", "stop", seed, ((0, version),))


# numbers -------------------------------------------------------------------------------------


def test_the_gap_by_hand() -> None:
    gap = gap_of([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    assert (gap.mean, gap.max, gap.tokens) == (0.5, 1.0, 3)
    broken = gap_of([[-1.0, math.nan]], [[-1.0, -1.0]])
    assert math.isnan(broken.mean) and math.isnan(broken.max) and broken.tokens == 2
    with pytest.raises(ValueError):
        gap_of([[-1.0]], [[-1.0, -2.0]])


def test_the_learner_scores_as_the_engine_does(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_5_vl"], temperature=0.7)
    for prompt in (both.pictured, both.plain):
        done = both.engine.generate(both.requests(prompt))
        ids = [c.token_ids for c in done]
        ours, sampled = both.learner.score(prompt, ids), both.learner.score(prompt, ids, as_sampled=True)
        for c, plain, masked in zip(done, ours, sampled, strict=True):
            assert plain == pytest.approx(both.engine.score(prompt, c.token_ids), abs=1e-5)
            assert masked == pytest.approx(c.logprobs, abs=1e-5)
        # the two distributions are told apart: media tokens hold some of the probability
        assert gap_of(ours, sampled).mean > 1e-3
        parity = compare(both.engine, both.learner, prompt, done)
        assert parity.score.max < 1e-5 and parity.sampled.max < 1e-5
        assert parity.score.tokens == sum(map(len, ids)) and parity.media == len(prompt.engine_prompt.media)
        assert (parity.completions, parity.seeds) == (4, tuple(SEEDS))
        assert parity.distinct == len(set(ids)) and past_limit(parity, 1e-4) == []


def test_answers_are_held_against_requests(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_vl"])
    requests = both.requests(both.plain)[:2]
    sound = [made([5, 6], 40, 3), made([5], 41, 3)]
    require_answers(requests, sound, 3)
    mixed = replace(made([5, 6], 41, 3), weight_versions=((0, 3), (1, 4)))
    cases = [
        (sound[:1], 3, "answered 2 requests with 1 completions"),
        ([sound[0], made([5], 40, 3)], 3, "r:1: seed 41 was asked for, .* used 40"),
        ([sound[0], made([], 41, 3)], 3, "r:1: seed 41 came back with 0 tokens and 0 log-probs"),
        ([sound[0], made([5] * (requests[1].sampling.max_tokens + 1), 41, 3)], 3, "r:1: seed 41 "),
        ([sound[0], replace(sound[1], logprobs=())], 3, "r:1: seed 41 came back with 1 tokens and 0 log-"),
        (sound, 4, "r:1: seed 40 was sampled under weight version 3, and the learner is at version 4"),
        ([sound[0], mixed], 3, "r:1: seed 41 .* under weight version 3 and 4"),
    ]
    for completions, version, words in cases:
        with pytest.raises(GuardStop, match=words):
            require_answers(requests, completions, version)


def test_the_first_prompt_with_an_image_or_a_video_is_chosen(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_vl"])
    places = [(1, 0, both.plain), (1, 1, both.pictured), (1, 2, both.plain)]
    assert first_with_media(places) == places[1]
    assert first_with_media(places[2:]) == places[2]
    filmed = replace(both.plain, engine_prompt=EnginePrompt((), (tiny.video(1),)))
    assert first_with_media([*places[2:], (2, 0, filmed)])[2] is filmed
    with pytest.raises(DataError, match=r"data.train: no row is left, .* data.on_overlong"):
        first_with_media([])


def test_new_samples_of_older_weights_show_against_the_noise() -> None:
    def message(mean: float, move: float, noise: float = 1e-6) -> str | None:
        return stale_samples(LogprobGap(mean, mean, 8), move, noise, 1e-3, "new samples for r:0")

    assert message(1e-6, 1e-4) is None  # followed
    # still the old weights, though far below the limit
    assert "moved the learner's log-probs by 0.0001 per token" in str(message(1e-4, 1e-4))
    assert message(5e-6, 5e-6) is None  # such a move cannot be told from noise
    assert message(3e-5, 5e-5, noise=1e-5) is None
    assert "the limit is 0.001" in str(message(2e-3, 0.0))
    assert message(math.nan, 0.0) is not None


# a sound engine ------------------------------------------------------------------------------


def test_a_sound_engine_passes_and_sends_every_tensor(models: dict[str, Path]) -> None:
    both = Both(models["qwen3_vl"])
    names = dict(both.learner.named_tensors())
    first = both.step(1)
    assert first.problem is None and first.move is not None and first.move > 1e-3
    assert first.score is not None and first.score.max < 1e-5
    assert first.probe is not None and first.probe.max < 1e-5
    assert first.tensors == len(names)
    assert first.bytes == sum(4 * t.numel() for t in names.values()) == first.metrics["sync/bytes"]
    assert first.metrics["sync/logp_gap"] == first.score.mean
    assert both.step(2).problem is None and both.sync.version == 2


def test_what_both_sides_round_differently_is_no_stale_engine(models: dict[str, Path]) -> None:
    """Rare tokens have large log-probs, and in bfloat16 a large rounding, which no sampled token shows."""
    moved = Both(models["qwen2_vl"]).step(1).move
    assert moved is not None and moved > 1e-3
    both = Both(models["qwen2_vl"])
    both.sync.limit, score = 1.0, both.engine.score
    rounding = [0.8 * moved * (-1) ** place for place in range(64)]
    both.engine.score = lambda p, ids: [x + r for x, r in zip(score(p, ids), rounding, strict=False)]  # type: ignore[method-assign]
    both.sync.calibrate(both.pictured)
    report = both.step(1)
    assert report.score is not None and report.score.mean > moved / 2
    assert report.problem is None


def test_an_engine_over_the_learners_module_is_sent_nothing_and_verified(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_5_vl"], fault=None)
    report = both.step(1)
    assert report.problem is None and (report.tensors, report.bytes) == (0, 0)
    assert report.score is not None and report.score.max < 1e-5
    built = build_engine(both.config, both.learner.model, both.processor)
    assert isinstance(built, TransformersEngine) and built.model is both.learner.model


# sabotage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "rate", "words"),
    [
        (
            "one tensor lost",
            1e-7,
            r"of \d+ tensors 1 never arrived: 'model.language_model.layers.1.mlp.up_proj.weight'",
        ),
        ("no load", 1e-6, "weight sync to version 1: .* the engine's are the same to the last bit"),
    ],
)
def test_weights_that_do_not_arrive_stop_the_run(
    fault: str, rate: float, words: str, models: dict[str, Path]
) -> None:
    both = Both(models["qwen2_5_vl"], fault)
    with pytest.raises(GuardStop, match=words):
        both.step(1, rate=rate)


def test_lost_updates_count_in_a_row(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where an update that moves the learner is not always seen at once."""
    monkeypatch.setitem(fixed_completions.UNMOVED_UPDATES, "bfloat16", 2)
    both = Both(models["qwen2_vl"], dtype=torch.bfloat16)
    for version, fault in enumerate(("no load", "", "no load"), 1):
        both.engine.fault = fault  # type: ignore[attr-defined]
        both.step(version)
    with pytest.raises(GuardStop, match="it has not loaded what it received"):
        both.step(4)


@pytest.mark.parametrize("version", [1, 3])
def test_the_gap_at_the_start_bounds_later_ones(
    version: int, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of updates bound nothing: an engine that is wrong from the first one would set its own scale."""
    both = Both(models["qwen2_vl"])
    score = both.engine.score
    for step in range(1, version + 1):
        off = 3e-4 if step == version else 0.0  # in nats; 1e-3 is the limit of sound engines at the start
        monkeypatch.setattr(both.engine, "score", lambda *given, off=off: [x + off for x in score(*given)])
        assert (both.step(step).problem is not None) == (step == version)


def test_moves_since_a_version_count_as_the_farthest_update(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_vl"])
    both.sync._stale = True
    for version in (1, 2, 3):
        both.step(version, rate=(1e-6, 1e-3, 1e-5)[version - 1])
    farthest = both.sync.moved_since(2)
    assert both.sync.moved_since(3) == 0 < 1e-4 < farthest
    assert (both.sync.moved_since(1), both.sync.moved_since(0)) == (2 * farthest, 3 * farthest)
    assert both.sync.moved_since(-1) == math.inf  # an update that was not measured


def test_a_cache_of_older_weights_shows_in_the_log_probs(models: dict[str, Path]) -> None:
    problem = Both(models["qwen2_5_vl"], "old cache").step(1, rate=1e-6).problem
    for words in ("after the weight sync to version 1", "older weights", "new samples for r:0"):
        assert words in str(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_to_another_prompt_show_before_they_are_learned(
    dtype: torch.dtype, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the step's own answers are older than the learner, and may be far from it."""
    both = Both(models["qwen2_5_vl"], dtype=dtype, max_staleness=1)
    assert both.step(1).problem is None
    generate = both.engine.generate

    def swapped(requests: Sequence[Request]) -> list[Completion]:
        done = generate(requests)
        if len({id(r.prompt) for r in requests}) < 2:
            return done
        return [replace(c, seed=r.seed) for c, r in zip(reversed(done), requests, strict=True)]

    monkeypatch.setattr(both.engine, "generate", swapped)
    problem = both.step(2, rate=1e-6).problem
    assert problem is not None and "new samples for r:0, r:1" in problem


def test_a_wrong_image_is_caught_before_the_first_step(models: dict[str, Path]) -> None:
    both = Both(models["qwen2_5_vl"], "wrong image")
    with pytest.raises(GuardStop, match=r"guard logp_gap: before the first step.*of r:0.*another image"):
        check_start(both.engine, both.learner, both.config, both.pictured, SEEDS, 0)
    check_start(both.engine, both.learner, both.config, both.plain, SEEDS, 0)
    both.config = both.config.with_values({"run.guards": {"logp_gap": "off"}})
    assert check_start(both.engine, both.learner, both.config, both.pictured, SEEDS, 0).score.mean > 1e-2
