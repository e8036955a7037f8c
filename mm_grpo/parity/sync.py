"""Weight sync that is verified three times, after every update.

First the tensors: digests of what the engine's layers hold, or of what it received if it cannot read them back, are
compared with the learner's (rollout/weights.py). Then fixed completions (fixed_completions.py), which both sides score:
they show updates that were not loaded, or in part. Last, a few tokens sampled again show caches of image features,
keys or values that belong to older weights, and answers to another prompt.

An engine that samples from the learner's own module is sent nothing. There the last two checks are made at the first
step and at every 50th.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import GuardStop
from mm_grpo.health.checks import LogprobGap, is_due, limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.shards import is_sharded
from mm_grpo.parity.fixed_completions import FixedCompletions, ScoreHistory, Scores
from mm_grpo.parity.gaps import gap_of, on_each
from mm_grpo.rollout.engine import Replica, Request, RolloutEngine, Sampling, require_answers
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.types import Completion, Group, Prompt

CANARY_TOKENS = 32
"""Tokens of the canary's first completion, at most."""
CANARY_COMPLETIONS = 8
"""Completions of the canary's group that say how far an update moves the learner, at most."""
PROBE_TOKENS = 4
"""Tokens of a completion that is sampled again after an update, at most: each costs a forward of the engine."""
STALE_PROBES = 8
"""Completions that are sampled again if a step's own may be older than the learner; otherwise it is one."""
RECENT_UPDATES = 8
"""Last updates, of which the farthest says how far an older one may have moved what it did not score."""
CERTAIN_MOVE_FACTOR = 10.0
"""An update certainly moved the log-probs if it did so by this many times the rounding."""
SAMPLED_ROUNDING = {"float32": 2e-6, "bfloat16": 5e-3}
"""Least rounding that is assumed of the few tokens sampled again, in nats per token."""


@dataclass(frozen=True)
class Canary:
    """Completions of a group of the step, which measure the coming update and whether media are read."""

    prompt: Prompt
    prompts: Sequence[Prompt]
    """Prompts that the engine answers again after the update: this one, and another if the step has one."""
    token_ids: Sequence[Sequence[int]]
    """The first goes on with arbitrary tokens if it is short, because a sure model's short answers hardly move."""
    logprobs: Sequence[Sequence[float]]
    """The learner's log-probs [T] of each before the update; empty if the update is not measured."""
    as_sent: bool = True
    """True if the log-probs are those of the weights that the engine is sent, merged and rounded."""


@dataclass(frozen=True)
class SyncReport:
    """Update of the engine's weights: the tensors sent, and the distance of the engine from the learner after it.

    Gaps and moves are in nats per token, and None if nothing was scored. Of several servers they are the worst.
    """

    version: int
    tensors: int
    bytes: int
    merge_lost: float | None = None
    """Share of the movement that merging lost to rounding; None if nothing is merged."""
    score: LogprobGap | None = None
    """Gap of the fixed completions."""
    probe: LogprobGap | None = None
    """Gap of the tokens sampled again."""
    move: float | None = None
    """How far the update moved the learner's own log-probs of the fixed completions."""
    problem: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        gap = {} if self.score is None else {"sync/logp_gap": self.score.mean}
        merge = {} if self.merge_lost is None else {"lora/merge_lost": self.merge_lost}
        return {"sync/tensors": self.tensors, "sync/bytes": self.bytes, **merge, **gap}


class VerifiedSync:
    """Carrier of the learner's weights to one engine. `version` is the number of the last weights sent."""

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
        self._seeds = eval_seeds(config.run.seed, 0, STALE_PROBES if self._stale else 1)
        self._max_length = config.rollout.max_completion_length
        self._probe = Sampling(min(PROBE_TOKENS, self._max_length), config.rollout.temperature)
        self._shared = getattr(engine, "model", None) is learner.model
        # before the first weights are sent: the engine takes these layers as factors, all others merged
        factors = engine.adapter_layers(learner.adapted_layers)
        learner.use_factors(factors)
        engine.use_adapters(factors)
        learner.base_replaced |= is_sharded(learner.model) and engine.base_replaced
        self._ledger = ledger or WeightLedger()

    def start(self) -> None:
        """Send every tensor as version 0: the engine may hold a file's weights, or an earlier run's."""
        self.send(0, frozen=True)

    def calibrate(self, prompt: Prompt) -> None:
        """Score fixed completions of `prompt` on both sides. Call it before the first update or checkpoint."""
        processor = self.learner.processor
        banned = processor.media_token_ids | processor.stop_token_ids
        self._fixed = FixedCompletions.draw(prompt, self._max_length, banned, self._seed)
        learner = self._learner_scores()
        engines = on_each(self.engine, self._engine_scores)
        self._history = ScoreHistory(self._dtype, {name: Scores(learner, engine) for name, engine in engines})

    def send(self, version: int, *, frozen: bool = False) -> tuple[int, int]:
        """Send the weights as number `version`; return how many tensors and bytes arrived.

        Looks at frozen tensors if the engine has none, or with `frozen`. Raises GuardStop, naming them, if tensors that
        changed did not arrive, or arrived changed.
        """
        if self._shared:
            self.engine.update_weights((), version)
            self.version = version
            return 0, 0
        frozen = frozen or self._ledger.empty or not self.engine.holds_weights
        transfer = self._ledger.send(self.engine, self.learner.named_tensors(frozen=frozen), version)
        # not before: caches would take the memory that the weights pass through
        self.engine.wake()
        self.version = version
        return len(transfer.digests), transfer.bytes

    def canary(self, groups: Sequence[Group]) -> Canary | None:
        """Choose a group, one with media if there are any, and score what the coming update is measured by.

        Return None if there are no groups, or if the coming update is not checked.
        """
        due = is_due(self.version + 1)
        if self._shared and not due:
            return None
        choice = self._choose(groups) if groups else None
        if is_sharded(self.learner.model):  # all processes score it together
            choice = self.learner.ranks.broadcast(choice, "the canary")
        if choice is None:
            return None
        group, prompts = choice
        longest = max((c.token_ids for c in group.completions), key=len)
        filling = () if self._shared or self._fixed is None else self._fixed.token_ids[0]
        ids = (*longest, *filling)[: min(CANARY_TOKENS, max(len(longest), self._max_length))]
        completions = group.completions[:CANARY_COMPLETIONS] if self._stale else ()
        token_ids = [ids, *(c.token_ids for c in completions)]
        logprobs = self._score(group.prompt, token_ids) if due or self._stale else []
        return Canary(group.prompt, prompts, token_ids, logprobs, as_sent=not self._shared)

    def _choose(self, groups: Sequence[Group]) -> tuple[Group, list[Prompt]]:
        """Return the group of the canary, and its prompt with another one if the step has one."""
        with_media = [g for g in groups if g.prompt.engine_prompt.media] or groups
        # what is learned from most moves most
        group = with_media[0] if self._shared else max(with_media, key=lambda g: max(map(abs, g.advantages)))
        # two prompts, because an engine may give one prompt's answers to another
        other_prompts = [g.prompt for g in groups if g.prompt is not group.prompt]
        return group, [group.prompt, *other_prompts[:1]]

    def update(self, version: int, canary: Canary | None, noise: float = 0.0) -> SyncReport:
        """`send` the weights and check what each server of the engine makes of them, by three judgements.

        `noise` is the largest log-prob gap of this step's samples, from before the update. Raises GuardStop if an
        engine did not load the weights, or samples under another version than it was sent.
        """
        report = SyncReport(version, *self.send(version), self.learner.merge_lost())
        if canary is not None and self._stale:
            after = self._score(canary.prompt, canary.token_ids)
            self._moves[version] = gap_of(canary.logprobs, after).max
        if self._fixed is None or self._history is None or (self._shared and not is_due(version)):
            return report
        learner, limit = self._learner_scores(), min(self.limit, self._history.gap_limit)
        move = self._history.move(learner)  # before these scores are added
        prompts = [self._fixed.prompt] if canary is None else canary.prompts[: len(self._seeds)]
        requests = [
            Request(prompts[i * len(prompts) // len(self._seeds)], seed, self._probe)
            for i, seed in enumerate(self._seeds)
        ]
        tokens = f"new samples for {', '.join(prompt.uid for prompt in prompts)}"
        answers = on_each(
            self.engine, lambda engine: (self._engine_scores(engine), engine.generate(requests))
        )
        scores, probes, problems = list[LogprobGap](), list[LogprobGap](), list[str]()
        for name, (engine, samples) in answers:
            sync = f"weight sync to version {version}" + (f" on {name}" if name else "")
            pair = Scores(learner, engine)
            self._history.add(name, pair, report.tensors)
            if (message := self._history.lost_updates(name, report.tensors, move)) is not None:
                raise GuardStop(f"{sync}: {message}")
            require_answers(requests, samples, version)
            probe = gap_of([c.logprobs for c in samples], self._expected(requests, samples))
            # a sure policy's samples show hardly any rounding, so the fixed completions' limit says nothing of them
            message = self._history.wrong_scores(name, limit, self._fixed.prompt.uid) or stale_samples(
                probe, move, max(noise, self._rounding), self.limit, tokens
            )
            problems += [] if message is None else [f"after the {sync}, {message}"]
            scores.append(pair.gap)
            probes.append(probe)
        score, probe = (max(gaps, key=lambda gap: gap.mean) for gaps in (scores, probes))
        return replace(report, score=score, probe=probe, move=move, problem=next(iter(problems), None))

    def _score(self, prompt: Prompt, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the learner's log-probs [T] of completions, under the weights that the engine is sent.

        Merged ones are rounded as the engine has them; how far that is from the policy shows in what is sampled.
        """
        return self.learner.score(prompt, completions, as_sent=not self._shared)

    def _learner_scores(self) -> Tensor:
        """Return the learner's log-probs [N] of the fixed completions."""
        assert self._fixed is not None
        return _joined(self._score(self._fixed.prompt, self._fixed.token_ids))

    def _engine_scores(self, engine: RolloutEngine | Replica) -> Tensor:
        """Return the log-probs [N] of the fixed completions by an engine or one of its servers."""
        assert self._fixed is not None
        return _joined([engine.score(self._fixed.prompt, ids) for ids in self._fixed.token_ids])

    def _expected(self, requests: Sequence[Request], samples: Sequence[Completion]) -> list[list[float]]:
        """Return the learner's log-probs [T] of tokens sampled again. Requests of a prompt follow each other."""
        logprobs = []
        for _, pairs in groupby(zip(requests, samples, strict=True), key=lambda pair: id(pair[0].prompt)):
            answered, completions = zip(*pairs, strict=True)
            ids = [c.token_ids for c in completions]
            logprobs += self.learner.score(answered[0].prompt, ids, as_sampled=True, as_sent=not self._shared)
        return logprobs

    def moved_since(self, version: int) -> float:
        """Return how many nats updates after weights number `version` may have moved a token; infinity if unknown."""
        if version >= self.version:
            return 0.0
        if any(v not in self._moves for v in range(version + 1, self.version + 1)):
            return math.inf
        # each counts as the farthest of the last ones, because an update moves some completions far and others hardly
        first = min(version + 1, self.version + 1 - RECENT_UPDATES)
        farthest = max(self._moves.get(v, 0.0) for v in range(first, self.version + 1))
        return (self.version - version) * farthest


def stale_samples(gap: LogprobGap, move: float, rounding: float, limit: float, tokens: str) -> str | None:
    """Third judgement: return a message if tokens sampled again are not the updated learner's, else None.

    Compares the engine's log-probs while sampling with the learner's. Past `limit` nats (LIMITS of the number format)
    they are wrong. After a small update older weights are below it: if the learner's `move` is clearly beyond the
    rounding, an engine that is half as far off has not followed. The guard `logp_gap` acts on the message, and by
    default stops the run.
    """
    message = logp_gap(gap, limit, tokens)
    if message is None and move >= CERTAIN_MOVE_FACTOR * rounding and gap.mean > move / 2:
        message = (
            f"the update moved the learner's log-probs by {move:.3g} per token, and the engine's of {tokens} are "
            f"{gap.mean:.3g} away from them: it still answers with older weights, or with image features or keys and "
            "values that it kept from them. Check that the engine's caches are reset after an update"
        )
    return message


def _joined(logprobs: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for completion in logprobs for value in completion], dtype=torch.float64)
