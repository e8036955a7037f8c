"""Weight sync that is verified three times, after every update.

First the tensors: the engine's digests of what its own layers hold if it can read them back, else of what it received,
are compared with the learner's (rollout/weights.py). A tensor that did not arrive is named whatever the learning rate.
Then fixed completions (parity/canary.py), which both sides score after every update. If the learner's log-probs moved
and the engine's are the same to the last bit, the engine did not load what it received. If they moved in another way
than the learner's, it loaded a part. Last, the log-probs of a few tokens sampled anew agree with the learner's. This
catches caches of image features or of keys and values that belong to older weights, and answers to another prompt.

The learner scores with what it sent: adapters that are merged are rounded as the engine has them. How far that is from
the policy shows in what is sampled next.

An engine that samples from the learner's own module is sent nothing, and what it samples next is compared with the
learner in the next step. There the last two checks are made at the first step and at every 50th, when the trainer also
measures whether images are read. Of an engine over several servers (`replicas`) each one has to pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import GuardStop
from mm_grpo.health.checks import is_due, limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.canary import FixedCompletions, ScoreHistory, Scores
from mm_grpo.parity.gaps import Gap, gap_of, on_each
from mm_grpo.rollout.engine import Replica, Request, RolloutEngine, Sampling, require_answers
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.types import Completion, Group, Prompt

CANARY_TOKENS = 32
PROBE_TOKENS = 4
PROBES = 8
"""Completions that are sampled anew after an update if the step's own are older than the learner, of two prompts,
because an engine may give one prompt's answers to another."""
OTHERS = 8
"""Completions of a group that say how far an update moves the learner."""
RECENT_UPDATES = 8
"""Updates whose moves tell how far an older one may have moved what it did not score."""
CERTAIN_MOVE_FACTOR = 10.0
"""An update certainly moved the log-probs if it did so by this many times the rounding."""
SAMPLED_ROUNDING = {"float32": 2e-6, "bfloat16": 5e-3}
"""Least rounding that is assumed of the few tokens sampled anew, in nats per token."""


@dataclass(frozen=True)
class Canary:
    """Completions of a group of the step, and the learner's log-probs [T] of them before the update.

    The first goes on with arbitrary tokens if it is short, because short answers of a sure model hardly move. `prompts`
    are those that the engine answers anew after the update. `as_sent` is True if the log-probs are those of merged
    adapters.
    """

    prompt: Prompt
    prompts: Sequence[Prompt]
    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    as_sent: bool = True


@dataclass(frozen=True)
class SyncReport:
    """One update of the engine's weights: what was sent, and how far the engine is from the learner after it.

    `merge_lost` is the share of the adapters' movement that their merge lost to rounding, None without adapters;
    `score` is the gap of the fixed completions, `probe` that of tokens sampled anew, `moved` how far the update moved
    the learner's own log-probs of the fixed completions, all in nats per token; None if they were not scored. Of
    several servers they are those of the worst. `problem` is a message, or None.
    """

    version: int
    tensors: int
    bytes: int
    merge_lost: float | None = None
    score: Gap | None = None
    probe: Gap | None = None
    moved: float | None = None
    problem: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        gap = {} if self.score is None else {"sync/logp_gap": self.score.mean}
        lost = {} if self.merge_lost is None else {"lora/merge_lost": self.merge_lost}
        return {"sync/bytes": self.bytes, **lost, **gap}


class VerifiedSync:
    """Carries the learner's weights to one engine and checks that they arrived. `version` is the last sent, `ledger`
    knows what the engine holds already."""

    def __init__(
        self, engine: RolloutEngine, learner: Learner, config: GRPOConfig, ledger: WeightLedger | None = None
    ) -> None:
        self.engine, self.learner = engine, learner
        self.version = 0
        self._dtype = str(learner.model.dtype).removeprefix("torch.")
        self.limit = limit_for(self._dtype)
        self._rounding = SAMPLED_ROUNDING.get(self._dtype, SAMPLED_ROUNDING["bfloat16"])
        self._fixed: FixedCompletions | None = None
        self._history: ScoreHistory | None = None
        self._moves: dict[int, float] = {}
        self._stale, self._seed = config.rollout.max_staleness > 0, config.run.seed
        self._seeds = eval_seeds(config.run.seed, 0, PROBES if self._stale else 1)
        self._longest = config.rollout.max_completion_length
        self._probe = Sampling(min(PROBE_TOKENS, self._longest), config.rollout.temperature)
        self._shared = getattr(engine, "model", None) is learner.model
        factors = engine.adapter_layers(learner.adapted_layers)
        learner.use_factors(factors)
        engine.use_adapters(factors)
        self._ledger = ledger or WeightLedger()

    def start(self) -> None:
        """Send everything that the ledger has not, as version 0: the engine may hold a file's weights, or an earlier
        run's."""
        self.send(0, frozen=True)

    def calibrate(self, prompt: Prompt) -> None:
        """Score fixed completions of `prompt` on both sides, which hold the weights that the run starts from.

        Call it before the first update and before a checkpoint is loaded: no update has to be trusted for the scale
        that it gives.
        """
        processor = self.learner.processor
        banned = processor.media_token_ids | processor.stop_token_ids
        self._fixed = FixedCompletions.draw(prompt, self._longest, banned, self._seed)
        learner = self._learner_scores()
        engines = on_each(self.engine, self._engine_scores)
        self._history = ScoreHistory(self._dtype, {name: Scores(learner, engine) for name, engine in engines})

    def send(self, version: int, *, frozen: bool = False) -> tuple[int, int]:
        """Send the weights as number `version`; returns how many tensors and bytes arrived.

        Those that do not learn are looked at where the engine has none, or with `frozen`. Raises GuardStop, naming
        them, when tensors that changed did not arrive, or arrived changed.
        """
        if self._shared:
            self.engine.update_weights((), version)
            self.version = version
            return 0, 0
        whole = frozen or self._ledger.empty or not self.engine.holds_weights
        tensors = self.learner.named_tensors(frozen=whole)
        sent = self._ledger.send(self.engine, tensors, version)
        self.engine.wake()  # not before: caches would take the memory that the weights pass through
        self.version = version
        return len(sent.digests), sent.bytes

    def canary(self, groups: Sequence[Group]) -> Canary | None:
        """Choose a group, one with images if there are any, and score what the coming update is measured by.

        Return None if there are no groups, or if the coming update is not checked.
        """
        due = is_due(self.version + 1)
        if not groups or (self._shared and not due):
            return None
        pictured = [g for g in groups if g.prompt.engine_prompt.images] or groups
        # what is learned from most moves most
        group = pictured[0] if self._shared else max(pictured, key=lambda g: max(map(abs, g.advantages)))
        others = [g.prompt for g in groups if g.prompt is not group.prompt]
        sampled = max((c.token_ids for c in group.completions), key=len)
        filling = () if self._shared or self._fixed is None else self._fixed.token_ids[0]
        ids = (*sampled, *filling)[: min(CANARY_TOKENS, max(len(sampled), self._longest))]
        token_ids = [ids, *(c.token_ids for c in group.completions[:OTHERS])] if self._stale else [ids]
        logprobs = self._score(group.prompt, token_ids) if due or self._stale else []
        return Canary(
            group.prompt, [group.prompt, *others[:1]], token_ids, logprobs, as_sent=not self._shared
        )

    def update(self, version: int, canary: Canary | None, noise: float = 0.0) -> SyncReport:
        """`send` the weights and check what the engine makes of them.

        `noise` is the largest log-prob gap of this step's samples, from before the update. Raises GuardStop when the
        engine did not load the weights, or samples under another version than it was sent.
        """
        report = SyncReport(version, *self.send(version), self.learner.merge_lost())
        if canary is not None and self._stale:
            after = self._score(canary.prompt, canary.token_ids)
            self._moves[version] = gap_of(canary.logprobs, after).max
        if self._fixed is None or self._history is None or (self._shared and not is_due(version)):
            return report
        # of sampled tokens a sure policy shows hardly any rounding, so the start says nothing of theirs
        learner, limit = self._learner_scores(), min(self.limit, self._history.gap_limit)
        moved = self._history.moved(learner)
        prompts = (self._fixed.prompt,) if canary is None else canary.prompts[: len(self._seeds)]
        requests = [
            Request(prompts[i * len(prompts) // len(self._seeds)], seed, self._probe)
            for i, seed in enumerate(self._seeds)
        ]
        answers = f"new samples for {', '.join(prompt.uid for prompt in prompts)}"
        scores: list[Gap] = []
        probes: list[Gap] = []
        problem = None
        for name, (engine, sampled) in on_each(
            self.engine, lambda engine: (self._engine_scores(engine), engine.generate(requests))
        ):
            where = f" on {name}" if name else ""
            now = Scores(learner, engine)
            lost, message = self._history.add(name, now, report.tensors)
            if lost:
                raise GuardStop(
                    f"weight sync to version {version}{where}: {report.tensors} tensors arrived, the updates moved the "
                    f"learner's log-probs of fixed completions by {moved:.3g} per token, and the engine's are the same "
                    "to the last bit: it has not loaded what it received, and samples from older weights. Check the "
                    "engine's version and how it loads weights"
                )
            require_answers(requests, sampled, version)
            score = Gap(float(now.gap.mean()), float(now.gap.max()), len(now.gap))
            probe = gap_of([c.logprobs for c in sampled], self._expected(prompts, requests, sampled))
            message = (
                logp_gap(score.mean, score.max, limit, f"fixed completions of {self._fixed.prompt.uid}")
                or message
                or stale_samples(probe, moved, max(noise, self._rounding), self.limit, answers)
            )
            if message is not None:
                problem = problem or f"after the weight sync to version {version}{where}, {message}"
            scores.append(score)
            probes.append(probe)
        score, probe = (max(gaps, key=lambda gap: gap.mean) for gaps in (scores, probes))
        return replace(report, score=score, probe=probe, moved=moved, problem=problem)

    def _score(self, prompt: Prompt, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """The learner's log-probs [T] of completions, of the weights that the engine is sent."""
        return self.learner.score(prompt, completions, as_sent=not self._shared)

    def _learner_scores(self) -> Tensor:
        """The learner's log-probs [N] of the fixed completions."""
        assert self._fixed is not None
        logprobs = self._score(self._fixed.prompt, self._fixed.token_ids)
        return torch.tensor([value for row in logprobs for value in row], dtype=torch.float64)

    def _engine_scores(self, engine: RolloutEngine | Replica) -> Tensor:
        """The log-probs [N] of the fixed completions by an engine or one of its servers."""
        assert self._fixed is not None
        logprobs = [engine.score(self._fixed.prompt, ids) for ids in self._fixed.token_ids]
        return torch.tensor([value for row in logprobs for value in row], dtype=torch.float64)

    def _expected(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], sampled: Sequence[Completion]
    ) -> list[list[float]]:
        """The learner's log-probs [T] of tokens sampled anew, in the order of the requests."""
        expected = []
        for prompt in prompts:
            ids = [c.token_ids for r, c in zip(requests, sampled, strict=True) if r.prompt is prompt]
            expected += self.learner.score(prompt, ids, as_sampled=True, as_sent=not self._shared)
        return expected

    def moved_since(self, version: int) -> float:
        """Nats that updates after weights number `version` may have moved a token, infinity where that is not known.

        Each counts as much as the farthest of the last RECENT_UPDATES did, at the token that moved most of those scored
        around it, because an update moves some completions far and others hardly.
        """
        if version >= self.version:
            return 0.0
        if any(v not in self._moves for v in range(version + 1, self.version + 1)):
            return math.inf
        first = min(version + 1, self.version + 1 - RECENT_UPDATES)
        farthest = max(self._moves.get(v, 0.0) for v in range(first, self.version + 1))
        return (self.version - version) * farthest


def stale_samples(gap: Gap, moved: float, rounding: float, limit: float, what: str) -> str | None:
    """Return a message if tokens sampled anew do not have the updated learner's log-probs, else None.

    Past `limit` (nats) they do not. Below it they may still be those of older weights, if the update was small: if it
    `moved` the learner clearly beyond the rounding, an engine that is half as far off has not followed.
    """
    message = logp_gap(gap.mean, gap.max, limit, what)
    if message is None and moved >= CERTAIN_MOVE_FACTOR * rounding and gap.mean > moved / 2:
        message = (
            f"the update moved the learner's log-probs by {moved:.3g} per token, and the engine's of {what} are "
            f"{gap.mean:.3g} away from them: it still answers with older weights, or with image features or keys and "
            "values that it kept from them. Check that the engine's caches are reset after an update"
        )
    return message
