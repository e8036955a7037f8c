"""Weight sync that is verified three times, after every update.

First the tensors: the engine's digests of what its own layers hold where it can read them back, else of what it
received, are held against the learner's (rollout/weights.py), so one that did not arrive is named whatever the
learning rate. Then a completion of this step with its images (the canary) is scored by both sides before and
after: where the learner's log-probs moved and the engine's are the same to the last bit, the engine did not load
what it received. In bfloat16 that has to happen several times in a row, and the size of a move would not show it, for
an update moves log-probs by less than the two sides differ by rounding. Last, the engine's scores and a few tokens
sampled anew agree with the learner, which catches caches of image features or of keys and values that belong to older
weights. The learner scores with what it sent: with adapters that is their merge, rounded as the engine has it, and how
far that is from the policy shows in what is sampled next.

An engine that samples from the learner's own module is sent nothing, and what it samples next is held against the
learner in the next step. There the last check is made at the first step and at every 50th, those at which the trainer
also measures whether images are read. Of an engine over several servers (`replicas`)
each one has to pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import GuardStop
from mm_grpo.health.checks import is_due, limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.parity.gaps import Gap, gap_of, on_each
from mm_grpo.rollout.background import Background
from mm_grpo.rollout.engine import Request, RolloutEngine, Sampling, require_answers
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.rollout.weights import WeightLedger
from mm_grpo.types import Group, Prompt

CANARY_TOKENS = 32
PROBE_TOKENS = 4
PROBES = 8
"""Completions that are sampled anew after an update where the step's own are older than the learner."""
FILLING = 256
"""Ids below this one fill a canary up; every vocabulary has them."""
CLEAR = 10.0
"""An update is held to have moved a log-prob for certain when it did so by this many times the noise."""
SOUND = 20.0
"""Times the largest gap of the first sound updates of this run that a later one may show."""
SETTLED = 3
"""Sound updates that say so, the first ones: a gap that grows slowly has to reach the bound."""
OTHERS = 8
"""Completions of a group that say how far an update moves the learner."""
RECENT = 8
"""Updates whose moves tell how far an older one may have moved what it did not score."""
VISIBLE = 1e-6
"""Least move of the learner's log-probs, in nats per token, that an engine has to show as well."""
MOST = 0.5
"""Least share of the learner's log-probs that change, by which an engine has to show an update as well."""
UNMOVED = {"float32": 1}
"""Updates in a row after which an engine that did not move at all has lost them, UNMOVED_ROUNDED in other formats: at
small rates, as in a warm-up, a few weights round to other numbers, and a sound engine's sums may be the same."""
UNMOVED_ROUNDED = 8
NOISE = {"float32": 2e-6, "bfloat16": 5e-3}
"""Least rounding noise of a log-prob that is reckoned with, in nats."""

Scores = Mapping[str, Sequence[float]]
"""Log-probs [T] of the engine, of each of its servers by name."""


@dataclass(frozen=True)
class Canary:
    """A completion that both sides score before and after an update; log-probs [T] are those before it.

    It goes on with arbitrary tokens after its end, for short answers of a sure model have log-probs near 0, which
    hardly move. `scoring` has the engine's, of each of its servers by name ("" where it has none), empty where nothing
    is sent; they are awaited, for an engine that works beside the learner may have a whole step's prompts before it.
    Where older samples are learned from, the learner scores `others` of the group too, which say how far it moves.
    `as_sent` says whether its log-probs are those of merged adapters.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    logprobs: Sequence[float]
    scoring: Future[Mapping[str, Sequence[float]]]
    as_sent: bool = True
    others: Sequence[Sequence[int]] = ()
    others_logprobs: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class SyncReport:
    """One update of the engine's weights: what was sent, and how far the engine is from the learner after it.

    `merge_lost` is the share of the adapters' movement that their merge lost to rounding, None without adapters;
    `score` is the gap of the canary, `probe` that of tokens sampled anew, `moved` how far the update moved the
    learner's own log-probs of the canary, all in nats per token; None without a canary. Of several servers they are
    those of the worst. `problem` is a message, or None.
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
        self._unmoved: dict[str, int] = {}  # by server: updates in a row that its scores did not show
        self._moves: dict[int, float] = {}
        self.limit = limit_for(str(learner.model.dtype))
        self.noise = NOISE.get(str(learner.model.dtype).removeprefix("torch."), NOISE["bfloat16"])
        self._sound, self._largest = 0, 0.0  # updates that passed, and the largest gap of their canaries
        self._stale = config.rollout.max_staleness > 0
        self._most_unmoved = UNMOVED.get(str(learner.model.dtype).removeprefix("torch."), UNMOVED_ROUNDED)
        self._seeds = eval_seeds(config.run.seed, 0, PROBES if config.rollout.max_staleness else 1)
        self._longest = config.rollout.max_completion_length
        self._probe = Sampling(min(PROBE_TOKENS, self._longest), config.rollout.temperature)
        banned = learner.processor.media_token_ids | learner.processor.stop_token_ids
        legal = [token for token in range(FILLING) if token not in banned]
        self._filling = tuple(random.Random(config.run.seed).choices(legal, k=CANARY_TOKENS))
        self._shared = getattr(engine, "model", None) is learner.model
        learner.factored = engine.adapter_layers(learner.adapted_layers)
        self._ledger = ledger or WeightLedger()
        self._background = Background(1, "mm_grpo canary")

    def start(self) -> None:
        """Send everything that the ledger has not, as version 0: the engine may hold a file's weights, or an earlier
        run's."""
        self.send(0, frozen=True)

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
        """A completion, scored by both sides before the coming update: one with images where there are any.

        None when there are no groups, and where the coming update needs no check. The engine has to be awake.
        """
        if not groups or (self._shared and not is_due(self.version + 1)):
            return None
        pictured = [g for g in groups if g.prompt.engine_prompt.images] or groups
        # what is learned from most moves most, and shows best what an engine did not take
        group = pictured[0] if self._shared else max(pictured, key=lambda g: max(map(abs, g.advantages)))
        sampled = max((c.token_ids for c in group.completions), key=len)
        if self._shared:  # there is no update that it could have lost
            ids = sampled[:CANARY_TOKENS]
            return Canary(group.prompt, ids, self._score(group.prompt, [ids])[0], _done({}), as_sent=False)
        ids = (*sampled, *self._filling)[: min(CANARY_TOKENS, max(len(sampled), self._longest))]
        scoring = self._beside(
            lambda: dict(on_each(self.engine, lambda engine: engine.score(group.prompt, ids)))
        )
        others = [c.token_ids for c in group.completions[:OTHERS]] if self._stale else []
        logprobs, *rest = self._score(group.prompt, [ids, *others])
        return Canary(group.prompt, ids, logprobs, scoring, others=others, others_logprobs=rest)

    def update(self, version: int, canary: Canary | None, noise: float = 0.0) -> SyncReport:
        """`send` the weights and see what the engine makes of them; without a canary, send them.

        `noise` is the largest log-prob gap of this step's samples, from before the update. Raises GuardStop when
        the engine did not load the weights, or samples under another version than it was sent.
        """
        scored_before = {} if canary is None else canary.scoring.result()
        report = SyncReport(version, *self.send(version), self.learner.merge_lost())
        if canary is None:
            return report
        prompt = canary.prompt
        after, *others = self._score(prompt, [canary.token_ids, *canary.others])
        moved = gap_of([canary.logprobs], [after]).mean
        self._moves[version] = gap_of([canary.logprobs, *canary.others_logprobs], [after, *others]).max
        requests = [Request(prompt, seed, self._probe) for seed in self._seeds]
        scores: list[Gap] = []
        probes: list[Gap] = []
        problem = None
        noise = max(noise, self.noise)
        limit = self._limit()
        for name, (engine_after, sampled) in on_each(
            self.engine, lambda engine: (engine.score(prompt, canary.token_ids), engine.generate(requests))
        ):
            where = f" on {name}" if name else ""
            message, rounding = None, noise
            if before := scored_before.get(name):
                # what both sides rounded differently before, of the same tokens, they do after
                rounding = max(noise, gap_of([before], [canary.logprobs]).mean)
                learned = share_changed(canary.logprobs, after)
                message = lost_update(before, engine_after, moved, learned, report.tensors, prompt.uid)
            self._unmoved[name] = 0 if message is None else self._unmoved.get(name, 0) + 1
            if message is not None and self._unmoved[name] >= self._most_unmoved:
                raise GuardStop(f"weight sync to version {version}{where}: {message}")
            require_answers(requests, sampled, version)
            expected = self.learner.score(
                prompt, [c.token_ids for c in sampled], as_sampled=True, as_sent=not self._shared
            )
            own_probe, own_score = (
                gap_of([c.logprobs for c in sampled], expected),
                gap_of([engine_after], [after]),
            )
            probes.append(own_probe)
            scores.append(own_score)
            found = stale_engine(own_score, moved, rounding, limit, f"a fixed completion of {prompt.uid}")
            found = found or stale_engine(
                own_probe, moved, rounding, self.limit, f"new samples for {prompt.uid}"
            )
            if found is not None:
                problem = problem or f"after the weight sync to version {version}{where}, {found}"
        score, probe = (max(gaps, key=lambda gap: gap.mean) for gaps in (scores, probes))
        if problem is None and self._sound < SETTLED:
            self._sound, self._largest = self._sound + 1, max(self._largest, score.mean)
        return replace(report, score=score, probe=probe, moved=moved, problem=problem)

    def _score(self, prompt: Prompt, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """The learner's log-probs [T] of completions, of the weights that the engine is sent."""
        return self.learner.score(prompt, completions, as_sent=not self._shared)

    def _limit(self) -> float:
        """The largest gap of the canary: after some sound updates a multiple of theirs, where that is less.

        Part of the layers may keep old weights where they cannot be read back, and be far below `limit` still.
        """
        settled = self._sound >= SETTLED
        return min(self.limit, SOUND * max(self._largest, self.noise)) if settled else self.limit

    def moved_since(self, version: int) -> float:
        """Nats that updates after weights number `version` may have moved a token, infinity where that is not known.

        Each counts as much as the farthest of the last RECENT did, at the token that moved most of those scored around
        it: an update moves some completions far and others hardly.
        """
        if version >= self.version:
            return 0.0
        if any(v not in self._moves for v in range(version + 1, self.version + 1)):
            return math.inf
        first = min(version + 1, self.version + 1 - RECENT)
        farthest = max(self._moves.get(v, 0.0) for v in range(first, self.version + 1))
        return (self.version - version) * farthest

    def close(self) -> None:
        """End the thread that scores beside the learner."""
        self._background.close()

    def _beside(self, score: Callable[[], Scores]) -> Future[Scores]:
        """The result of a call, later where the engine works beside the learner."""
        return self._background.submit(score) if self.engine.remote else _done(score())


def share_changed(before: Sequence[float], after: Sequence[float]) -> float:
    """Share of log-probs that are not the same to the last bit."""
    return sum(a != b for a, b in zip(before, after, strict=True)) / max(len(before), 1)


def _done(scores: Scores) -> Future[Scores]:
    future: Future[Scores] = Future()
    future.set_result(scores)
    return future


def lost_update(
    before: Sequence[float], after: Sequence[float], moved: float, learned: float, tensors: int, uid: str
) -> str | None:
    """A message when `tensors` that changed were sent and `moved` the learner, and the engine answers as before.

    `before` and `after` are the engine's log-probs [T] of a completion of `uid`, `moved` is the mean move of the
    learner's, in nats, and `learned` the share of them that changed. Below VISIBLE, and where few changed (in bfloat16
    a small update flips the rounding of single tokens), a sound engine may round to the same numbers.
    """
    if not tensors or moved < VISIBLE or learned < MOST or list(after) != list(before):
        return None
    return (
        f"{tensors} tensors arrived, the update moved the learner's log-probs of a completion of {uid} "
        f"by {moved:.3g} per token, and the engine's are the same to the last bit: it has not loaded what it received, "
        "and samples from older weights. Check the engine's version and how it loads weights"
    )


def stale_engine(gap: Gap, moved: float, noise: float, limit: float, what: str) -> str | None:
    """A message when the engine's log-probs are not those of the updated learner, else None.

    Past `limit` they are not. Below it they may still be the old ones, when the update was small: where it
    `moved` the learner clearly beyond the noise, an engine that is half as far off has not followed.
    """
    message = logp_gap(gap.mean, gap.max, limit, what)
    if message is None and moved >= CLEAR * noise and gap.mean > moved / 2:
        message = (
            f"the update moved the learner's log-probs by {moved:.3g} per token, and the engine's of {what} are "
            f"{gap.mean:.3g} away from them: it still answers with older weights, or with image features or keys and "
            "values that it kept from them. Check that the engine's caches are reset after an update"
        )
    return message
