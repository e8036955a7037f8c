"""Weight sync that is verified twice, after every update.

First the tensors: the digests that the engine reports are held against those of the learner's own, so
one that did not arrive is named whatever the learning rate. Then what the engine makes of them: it
re-scores a completion of this step with its images, and samples a few tokens anew, and both agree with
the learner's log-probs. The second catches what digests cannot see, such as a cache of image features
or of keys and values that belongs to older weights.

An engine that samples from the learner's own module has nothing to be sent, and is verified all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import GuardStop
from mm_grpo.health.logp_gap import limit_for, logp_gap
from mm_grpo.learner.learner import Learner
from mm_grpo.rollout.engine import Request, RolloutEngine, Sampling
from mm_grpo.rollout.seeds import eval_seeds
from mm_grpo.rollout.weight_sync import digest
from mm_grpo.run.parity import Gap, gap_of, require_answers
from mm_grpo.types import Group, Prompt

if TYPE_CHECKING:
    from torch import Tensor

WITNESS_TOKENS = 32
PROBE_TOKENS = 4
CLEAR = 10.0
"""An update is held to have moved a log-prob for certain when it did so by this many times the noise."""
NOISE = {"float32": 2e-6, "bfloat16": 5e-3}
"""Least rounding noise of a log-prob that is reckoned with, in nats."""


@dataclass(frozen=True)
class Witness:
    """A completion that is scored before and after an update. `logprobs` [T] are the learner's before it."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class SyncReport:
    """One update of the engine's weights: what was sent, and how far the engine is from the learner after it.

    `score` is the gap of the witness, `probe` that of tokens sampled anew, `moved` how far the update moved the
    learner's own log-probs of the witness, all in nats per token; None without a witness. `problem` is a
    message, or None.
    """

    version: int
    tensors: int
    bytes: int
    score: Gap | None = None
    probe: Gap | None = None
    moved: float | None = None
    problem: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        gap = {} if self.score is None else {"sync/logp_gap": self.score.mean}
        return {"sync/bytes": self.bytes, **gap}


class VerifiedSync:
    """Carries the learner's weights to one engine and checks that they arrived. `version` is the last sent."""

    def __init__(self, engine: RolloutEngine, learner: Learner, config: GRPOConfig) -> None:
        self.engine, self.learner = engine, learner
        self.version = 0
        self.limit = limit_for(config.run.max_logp_gap, str(learner.model.dtype))
        self.noise = NOISE.get(str(learner.model.dtype).removeprefix("torch."), NOISE["bfloat16"])
        self._seed = eval_seeds(config.run.seed, 0, 1)[0]
        self._probe = Sampling(
            min(PROBE_TOKENS, config.rollout.max_completion_length), config.rollout.temperature
        )
        self._shared = getattr(engine, "model", None) is learner.model
        self._held: dict[str, str] = {}

    def start(self) -> None:
        """Send everything, as version 0: the engine may hold a file's weights, or an earlier run's."""
        self.send(0)

    def send(self, version: int) -> tuple[int, int]:
        """Send the weights as number `version`; returns how many tensors and bytes arrived.

        Raises GuardStop, naming them, when tensors that changed did not arrive, or arrived changed.
        """
        tensors = self.learner.named_tensors()
        if self._shared:
            self.engine.update_weights(tensors, version)
            self.version = version
            return 0, 0
        manifest = _Manifest(tensors)
        received = self.engine.update_weights(manifest, version)
        for _ in manifest:  # what an engine did not ask for is due all the same
            pass
        message = undelivered(self._held, manifest.digests, received)
        if message is not None:
            raise GuardStop(f"weight sync to version {version}: {message}")
        self._held = manifest.digests
        self.version = version
        return len(received), sum(manifest.sizes.get(name, 0) for name in received)

    def witness(self, groups: Sequence[Group]) -> Witness | None:
        """The completion to be scored before and after the coming update: one with images where there are any.

        None when there are no groups.
        """
        if not groups:
            return None
        group = next((g for g in groups if g.prompt.engine_prompt.images), groups[0])
        ids = max((c.token_ids for c in group.completions), key=len)[:WITNESS_TOKENS]
        return Witness(group.prompt, ids, self.learner.score(group.prompt, [ids])[0])

    def update(self, version: int, witness: Witness | None, noise: float = 0.0) -> SyncReport:
        """Send the weights and check what the engine makes of them; without a witness, only send them.

        `noise` is the largest log-prob gap of this step's samples, from before the update. Raises GuardStop when
        tensors are missing or the engine samples under another version than it was sent.
        """
        report = SyncReport(version, *self.send(version))
        if witness is None:
            return report
        prompt = witness.prompt
        request = Request(prompt, self._seed, self._probe)
        sampled = self.engine.generate([request])
        require_answers([request], sampled, version)
        expected = self.learner.score(prompt, [sampled[0].token_ids], as_sampled=True)
        probe = gap_of([sampled[0].logprobs], expected)
        after = self.learner.score(prompt, [witness.token_ids])
        score = gap_of([self.engine.score(prompt, witness.token_ids)], after)
        moved = gap_of([witness.logprobs], after).mean
        noise = max(noise, self.noise)
        problem = not_followed(score, moved, noise, self.limit, f"a fixed completion of {prompt.uid}")
        problem = problem or not_followed(probe, moved, noise, self.limit, f"new samples for {prompt.uid}")
        if problem is not None:
            problem = f"after the weight sync to version {version}, {problem}"
        return replace(report, score=score, probe=probe, moved=moved, problem=problem)


def undelivered(held: Mapping[str, str], ours: Mapping[str, str], received: Mapping[str, str]) -> str | None:
    """What did not arrive, by digests: `held` is what the engine had, `ours` what the learner has now."""
    due = [name for name, value in ours.items() if held.get(name) != value]
    missing = [name for name in due if name not in received]
    changed = [name for name, value in received.items() if name in ours and ours[name] != value]
    if not missing and not changed:
        return None
    told = (
        (missing, f"of {len(due)} changed tensors never reached the engine"),
        (changed, "arrived altered"),
    )
    return (
        "; ".join(f"{len(names)} {what}: {_few(names)}" for names, what in told if names)
        + ". The engine would sample from other weights than the learner's; check its version and the transport "
        "of its weights"
    )


def not_followed(gap: Gap, moved: float, noise: float, limit: float, what: str) -> str | None:
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


class _Manifest:
    """Passes tensors on and notes the digest and size (bytes) of each; it can be iterated once."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.digests: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._rest = self._noted(tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._rest

    def _noted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.digests[name] = digest(tensor)
            self.sizes[name] = tensor.numel() * tensor.element_size()
            yield name, tensor


def _few(names: Sequence[str]) -> str:
    return ", ".join(f"'{n}'" for n in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
