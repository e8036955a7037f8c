"""The canary: fixed completions that engine and learner score after every update, and what the scores say.

The first scores are taken at the start of a run, before any update and before a checkpoint is loaded, when both sides
hold the weights on disk. How far the two sides differ then is rounding, and it gives the scale of all that follows. No
later score changes that scale, so an engine that is wrong from its first update cannot set it.

Three judgements: `unmoved` (the engine's scores are those of before, to the last bit), `gap_limit` (the two sides
differ by more than rounding can explain) and `not_followed`. For the last one the moves of all tokens since an earlier
version are a vector for each side. The engine's vector is projected on the learner's: 1 is sound, 0 an engine that kept
its weights, 0.6 one that loaded a part of its layers, -1 a sign turned. The sum over many tokens shows what rounding
hides in each of them, as in bfloat16.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mm_grpo.types import Prompt

COMPLETIONS = 4
"""Fixed completions at most."""
TOKENS = 192
"""Tokens of the fixed completions together, at most."""
LONGEST = 64
"""Tokens of one of them, at most."""
ID_LIMIT = 256
"""Their token ids are below this one; every vocabulary has them."""
GAP_FACTOR = 20.0
"""Times the gap at the start that a later one may have."""
LEAST_ROUNDING = {"float32": 2e-6, "bfloat16": 1e-4}
"""Least rounding that is assumed, in nats per token, because two sides with the same kernels show none."""
RECENT = 8
"""Versions that are kept, to see an engine that stops following in the middle of a run."""
LEAST_SHARE = 0.02
"""Least share of the learner's move by which the engine's has to differ."""
CERTAINTY = 6.0
"""Least difference, in standard errors."""
ROUNDING_RANGE = (2.0, 6.0)
"""Least and most rounding that is allowed for, as multiples of that at the start: it grows as a policy gets sure."""
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
    def draw(cls, prompt: Prompt, longest: int, banned: Collection[int], seed: int) -> FixedCompletions:
        """Draw completions of at most `longest` tokens, without those that are `banned`."""
        length = min(longest, LONGEST)
        legal = [token for token in range(ID_LIMIT) if token not in banned]
        rng = random.Random(seed)
        number = min(COMPLETIONS, math.ceil(TOKENS / length))
        return cls(prompt, [tuple(rng.choices(legal, k=length)) for _ in range(number)])


@dataclass(frozen=True)
class Scores:
    """Log-probs [N] of the fixed completions' tokens by both sides under the same weights, in float64."""

    learner: Tensor
    engine: Tensor

    @property
    def gap(self) -> Tensor:
        """Differences of the two sides [N], in nats."""
        return (self.engine - self.learner).abs()


class ScoreHistory:
    """The scores of the learner and of one engine, or of its servers by name, since the start of a run."""

    def __init__(self, dtype: str, start: Mapping[str, Scores]) -> None:
        floor = LEAST_ROUNDING.get(dtype, LEAST_ROUNDING["bfloat16"])
        self.start = start
        self.rounding = max(floor, *(_rms(scores.gap) for scores in start.values()))
        self.gap_limit = GAP_FACTOR * max(floor, *(float(scores.gap.mean()) for scores in start.values()))
        self._unmoved_updates = UNMOVED_UPDATES.get(dtype, UNMOVED_UPDATES["bfloat16"])
        self._recent = {name: deque([scores], RECENT) for name, scores in start.items()}
        self._unmoved = dict.fromkeys(start, 0)

    def moved(self, learner: Tensor) -> float:
        """Return how far the learner's log-probs are from the last ones of any server, in nats per token."""
        return max(float((learner - recent[-1].learner).abs().mean()) for recent in self._recent.values())

    def add(self, name: str, now: Scores, tensors: int) -> tuple[bool, str | None]:
        """Add the scores of a server after an update of `tensors` changed tensors.

        Return whether it lost the updates since it last moved, and a message if it followed the learner in part.
        """
        first = self.start.get(name, next(iter(self.start.values())))  # a server that came later
        recent = self._recent.setdefault(name, deque([first], RECENT))
        lost = tensors > 0 and unmoved(recent[-1], now)
        self._unmoved[name] = self._unmoved.get(name, 0) + 1 if lost else 0
        earlier = {id(scores): scores for scores in (first, recent[0], recent[-1])}.values()
        messages = [not_followed(scores, now, self.rounding) for scores in earlier]
        recent.append(now)
        return self._unmoved[name] >= self._unmoved_updates, next(filter(None, messages), None)


def unmoved(before: Scores, now: Scores) -> bool:
    """Return True if the learner visibly moved and the engine's scores are the same to the last bit.

    >>> still, other = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -2.1])
    >>> unmoved(Scores(still, still), Scores(other, still)), unmoved(Scores(still, still), Scores(other, other))
    (True, False)
    """
    moves = (now.learner - before.learner).abs()
    visible = (
        float(moves.mean()) >= MIN_VISIBLE_MOVE and float((moves > 0).double().mean()) >= MIN_CHANGED_SHARE
    )
    return visible and torch.equal(now.engine, before.engine)


def not_followed(before: Scores, now: Scores, rounding: float) -> str | None:
    """Return a message if the engine's log-probs moved in another way than the learner's since `before`, else None.

    `rounding` is the root mean square of the two sides' difference at the start, in nats.
    """
    move = now.learner - before.learner
    difference = (now.engine - now.learner) - (before.engine - before.learner)
    size = float(move.square().sum())
    if size == 0:
        return None
    share = float((difference * move).sum()) / size
    rest = _rms(difference - share * move)
    # the learner's own rounding is in its move as well, and alone it looks like an engine that did not follow
    least, most = (factor * rounding for factor in ROUNDING_RANGE)
    excess = abs(share) * size - len(move) * min(max(rest, least), most) ** 2
    if abs(share) < LEAST_SHARE or excess < CERTAINTY * max(rest, rounding) * math.sqrt(size):
        return None
    return (
        f"the updates moved the learner's log-probs of fixed completions by {float(move.abs().mean()):.3g} per token, "
        f"and the engine's moved {1 + share:.2f} times as far in that direction: it did not load all that it received, "
        "or not as it was sent, or it keeps image features, keys or values of older weights. Check its version and how "
        "it loads weights"
    )


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
