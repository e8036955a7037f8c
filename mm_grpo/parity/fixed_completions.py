"""Fixed completions that engine and learner score after every update, and two judgements on the scores.

The first scores are taken at the start of a run, before any update and before a checkpoint is loaded, when both sides
hold the weights on disk. Their difference is rounding, and it is the scale of all later limits. No later score changes
it, so an engine that is wrong from its first update cannot set its own scale.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.health.checks import LogprobGap, logp_gap
from mm_grpo.types import Prompt

MAX_COMPLETIONS, MAX_COMPLETION_TOKENS = 4, 64
MAX_TOKENS = 192
"""Tokens of all fixed completions together, at most: enough to average out rounding, and one short forward."""
TOKEN_ID_LIMIT = 256
"""Token ids are below this one; every vocabulary has them."""
MIN_ROUNDING = {"float32": 2e-6, "bfloat16": 1e-4}
"""Least rounding that is assumed, in nats per token, because two sides with the same kernels show none."""
START_GAP_FACTOR = 20.0
"""Largest mean gap, as a multiple of the gap at the start."""
ROUNDING_RANGE = (2.0, 6.0)
"""Least and largest rounding that is allowed for, in multiples of the start's: it grows as a policy gets sure."""
RECENT_VERSIONS = 8
"""Versions that the scores are compared over, to see an engine that stops following in the middle of a run."""
MIN_SHARE_ERROR = 0.02
"""Least error of the engine's move, as a share of the learner's, that counts as an error."""
MIN_STANDARD_ERRORS = 6.0
"""The same in standard errors: six are no accident, over all the updates of a long run."""
MIN_VISIBLE_MOVE = 1e-6
"""Least move of the learner's log-probs, in nats per token, that an engine has to show."""
MIN_CHANGED_SHARE = 0.5
"""Least share of the learner's log-probs that change in an update that an engine has to show. In bfloat16 a small
update changes the rounding of single tokens, and a sound engine may round to the same numbers."""
UNMOVED_UPDATES = {"float32": 1, "bfloat16": 8}
"""Updates in a row that an engine does not show at all, after which it has lost them."""


@dataclass(frozen=True)
class FixedCompletions:
    """Completions of one prompt, made of arbitrary tokens.

    A sure model's own answers have log-probs near 0, which hardly move; those of arbitrary tokens do.
    """

    prompt: Prompt
    token_ids: Sequence[Sequence[int]]

    @classmethod
    def draw(cls, prompt: Prompt, max_length: int, banned: Collection[int], seed: int) -> FixedCompletions:
        """Draw completions of at most `max_length` tokens, without the `banned` token ids."""
        length = min(max_length, MAX_COMPLETION_TOKENS)
        legal = [token for token in range(TOKEN_ID_LIMIT) if token not in banned]
        rng = random.Random(seed)
        number = min(MAX_COMPLETIONS, math.ceil(MAX_TOKENS / length))
        return cls(prompt, [tuple(rng.choices(legal, k=length)) for _ in range(number)])


@dataclass(frozen=True)
class Scores:
    """Log-probs [N] of the fixed completions' tokens by both sides under the same weights, in float64."""

    learner: Tensor
    engine: Tensor

    @property
    def difference(self) -> Tensor:
        """Engine minus learner [N], in nats."""
        return self.engine - self.learner

    @property
    def gap(self) -> LogprobGap:
        return LogprobGap.of(self.difference)


class ScoreHistory:
    """Scores of the learner and of each server by name ("" for a single engine), since the start of a run."""

    def __init__(self, dtype: str, start: Mapping[str, Scores]) -> None:
        floor = MIN_ROUNDING.get(dtype, MIN_ROUNDING["bfloat16"])
        self.start = start
        self.rounding = max(floor, *(_rms(scores.difference) for scores in start.values()))
        self.gap_limit = START_GAP_FACTOR * max(floor, *(scores.gap.mean for scores in start.values()))
        self._max_unmoved = UNMOVED_UPDATES.get(dtype, UNMOVED_UPDATES["bfloat16"])
        self._recent = {name: deque([scores], RECENT_VERSIONS + 1) for name, scores in start.items()}
        self._unmoved = dict.fromkeys(start, 0)

    def move(self, learner: Tensor) -> float:
        """Return how far the learner's log-probs are from the last ones of any server, in nats per token."""
        return max(float((learner - recent[-1].learner).abs().mean()) for recent in self._recent.values())

    def add(self, name: str, scores: Scores, tensors: int) -> None:
        """Add the scores of a server after an update of `tensors` changed tensors."""
        recent = self._recent.setdefault(name, deque([self._first(name)], RECENT_VERSIONS + 1))
        lost = tensors > 0 and unmoved(recent[-1], scores)
        self._unmoved[name] = self._unmoved.get(name, 0) + 1 if lost else 0
        recent.append(scores)

    def lost_updates(self, name: str, tensors: int, move: float) -> str | None:
        """First judgement: return a message, which stops the run, if a server did not load the last updates.

        Compares its newest scores with the ones before, to the last bit. In float32 one update that moves the learner
        and not the engine is enough. In bfloat16 a sound engine may round a small update away, so it takes several in a
        row (UNMOVED_UPDATES). `tensors` arrived, and moved the learner by `move` nats per token.
        """
        if self._unmoved[name] < self._max_unmoved:
            return None
        return (
            f"{tensors} tensors arrived, the updates moved the learner's log-probs of fixed completions by {move:.3g} "
            "per token, and the engine's are the same to the last bit: it has not loaded what it received, and samples "
            "from older weights. Check the engine's version and how it loads weights"
        )

    def wrong_scores(self, name: str, limit: float, uid: str) -> str | None:
        """Second judgement: return a message if a server scores with other weights than the learner, else None.

        Compares the two sides' newest log-probs, which may differ by `limit` nats per token, and then the moves of the
        two sides since the first, the oldest recent and the previous version (`not_followed`). Both limits come from
        the gap at the start. The guard `logp_gap` acts on the message, and by default stops the run.
        """
        recent = self._recent[name]
        message = logp_gap(recent[-1].gap, limit, f"fixed completions of {uid}")
        earlier = (self._first(name), recent[0], recent[-2])
        moves = (not_followed(scores, recent[-1], self.rounding) for scores in earlier)
        return message or next(filter(None, moves), None)

    def _first(self, name: str) -> Scores:
        # a server that came later has no scores of its own from the start
        return self.start.get(name, next(iter(self.start.values())))


def unmoved(before: Scores, now: Scores) -> bool:
    """Return True if the learner visibly moved and the engine's scores are the same to the last bit.

    >>> start, later = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -2.1])
    >>> unmoved(Scores(start, start), Scores(later, start)), unmoved(Scores(start, start), Scores(later, later))
    (True, False)
    """
    move = (now.learner - before.learner).abs()
    is_broad = float((move > 0).double().mean()) >= MIN_CHANGED_SHARE
    return is_broad and float(move.mean()) >= MIN_VISIBLE_MOVE and torch.equal(now.engine, before.engine)


def not_followed(before: Scores, now: Scores, rounding: float) -> str | None:
    """Return a message if the engine's log-probs moved in another way than the learner's since `before`, else None.

    The moves of all tokens are a vector for each side, and the engine's is projected on the learner's: 1 is sound, 0 an
    engine that kept its weights, 0.6 one that loaded a part of its layers, -1 a sign turned. The sum over many tokens
    shows what rounding hides in a single one, as in bfloat16. `rounding` is the root mean square of the two sides'
    difference at the start, in nats.
    """
    move = now.learner - before.learner
    error = now.difference - before.difference
    size = float(move.square().sum())
    if size == 0:
        return None
    share = float((error * move).sum()) / size
    noise = _rms(error - share * move)
    # the learner's own rounding is in its move as well, and alone it looks like an engine that did not follow
    low, high = (factor * rounding for factor in ROUNDING_RANGE)
    excess = abs(share) * size - len(move) * min(max(noise, low), high) ** 2
    if abs(share) < MIN_SHARE_ERROR or excess < MIN_STANDARD_ERRORS * max(noise, rounding) * math.sqrt(size):
        return None
    return (
        f"the updates moved the learner's log-probs of fixed completions by {float(move.abs().mean()):.3g} per token, "
        f"and the engine's moved {1 + share:.2f} times as far in that direction: it did not load all that it received, "
        "or not as it was sent, or it keeps image features, keys or values of older weights. Check its version and how "
        "it loads weights"
    )


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
