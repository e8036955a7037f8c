"""Measurements of media in a step: that they are read at all, and how much completions depend on them (sight).

`before_sleep` scores one completion with other pixels (health/checks.py); only a change of exactly 0 is a failure.
`before_update` runs a few groups with the media of another row, and with videos in another order (learner/sight.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean, stdev

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.health.checks import is_due, unread_images, with_other_pixels
from mm_grpo.health.guards import Guards
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.sight import GroupSight, measure
from mm_grpo.parity.gaps import gap_of
from mm_grpo.parity.sync import Canary
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.rollout_log import add_to_rollouts
from mm_grpo.types import Group

Metrics = dict[str, float]


class ImageMeasures:
    """Image measurements of one run. Every process calls them; metrics are complete on the first one."""

    def __init__(
        self, config: GRPOConfig, learner: Learner, guards: Guards, folder: RunFolder, ranks: Ranks
    ) -> None:
        self.every, self.max_tokens = config.run.sight_every, config.optim.max_tokens_per_pack
        self.learner, self.guards, self.folder, self.ranks = learner, guards, folder, ranks

    def before_sleep(self, step: int, canary: Canary | None) -> Metrics:
        """On some steps, measure how far other pixels move the learner's log-probs of the canary, in nats per token.

        Raises GuardStop if they do not move them at all.
        """
        prompt = with_other_pixels(canary.prompt) if canary is not None and is_due(step) else None
        if canary is None or prompt is None:
            return {}
        logprobs = self.learner.score(prompt, canary.token_ids[:1], as_sent=canary.as_sent)
        change = gap_of(canary.logprobs[:1], logprobs).mean
        self.guards.apply("unread_images", unread_images(change, prompt.uid), step)
        return {"images/logp_change": change} if math.isfinite(change) else {}

    def before_update(self, step: int, groups: Sequence[Group]) -> Metrics:
        """On the first step and every `run.sight_every`-th, measure sight of a few groups before their update.

        Collective. Metrics are those of `sight_metrics`, and `sight/reward`, the mean reward of all completions of rows
        with media; empty if no row has media. The rows of the step's rollout file get `sight` and `order`.
        """
        if not self.every or not (step == 1 or step % self.every == 0):
            return {}
        started = time.perf_counter()
        local_sights = measure(groups, self.learner, self.max_tokens, self.ranks)
        rewards = [r for g in groups if g.prompt.vision for r in g.rewards if r is not None]
        parts = self.ranks.gather((local_sights, sum(rewards), len(rewards)), "sight")
        metrics: Metrics = {}
        with self.ranks.fail_together("sight"):
            if parts is not None:
                sights = sorted((s for part, _, _ in parts for s in part), key=lambda sight: sight.slot)
                count = sum(count for _, _, count in parts)
                metrics = sight_metrics(sights)
                if metrics and count:
                    metrics["sight/reward"] = sum(total for _, total, _ in parts) / count
                with self.folder.writing("the rollouts"):
                    add_to_rollouts(self.folder.paths, step, log_columns(sights))
        return {**metrics, "time/sight": time.perf_counter() - started}


def sight_metrics(sights: Sequence[GroupSight]) -> Metrics:
    """Return the means over completions and tokens of some groups; empty if there are none.

    `sight/nats` is the mean of a completion, `sight/nats_per_token` of a token, and `sight/nats_stderr` the standard
    error of the first. Completions of a group share its row and the other media, so that is the error of the mean over
    groups; of a single group it is over its completions. Groups have the same number of completions. With
    `sight/order_nats` begin those of videos in another order.
    """
    others = [sight for sight in sights if sight.lender is not None]
    orders = [sight for sight in sights if sight.lender is None]
    return _means("sight/nats", others) | _means("sight/order_nats", orders)


def _means(name: str, sights: Sequence[GroupSight]) -> Metrics:
    nats = [value for sight in sights for value in sight.nats]
    tokens = sum(len(completion) for sight in sights for completion in sight.tokens)
    if not nats or not all(map(math.isfinite, nats)):
        return {}
    samples = [fmean(sight.nats) for sight in sights] if len(sights) > 1 else nats
    metrics = {name: sum(nats) / len(nats), f"{name}_per_token": sum(nats) / max(tokens, 1)}
    if len(samples) > 1:
        metrics[f"{name}_stderr"] = stdev(samples) / math.sqrt(len(samples))
    return metrics


def log_columns(sights: Sequence[GroupSight]) -> dict[tuple[int, int, int], dict[str, object]]:
    """Return each completion's entries for the rollout log, by (slot, attempt, generation)."""
    columns: dict[tuple[int, int, int], dict[str, object]] = {}
    for sight in sights:
        for generation, tokens in enumerate(sight.tokens):
            if all(map(math.isfinite, tokens)):
                entry = {
                    "nats": round(sum(tokens), 4),
                    "tokens": [round(value, 4) for value in tokens],
                    "pieces": list(sight.pieces[generation]),
                }
                key = (sight.slot, sight.attempt, generation)
                other = (
                    {"order": entry} if sight.lender is None else {"sight": entry | {"other": sight.lender}}
                )
                columns.setdefault(key, {}).update(other)
    return columns
