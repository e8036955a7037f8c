"""Prompts → requests → stream → groups → scores: what training and evaluation share.

Collector (collect.py) and evaluation (evaluate.py) bring their own prompts, seeds and sampling, and call

    sample    completions of each prompt, as groups
    gather    the groups of all processes, on the first one
    score     the same groups with their rewards

The engine hands each completion back when it is done (`RequestStream`), and rewards that can begin with it do
(rewards/streaming_rewards.py). Without such rewards, and with several processes, whole batches are sampled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from mm_grpo.rollout.engine import answer_all, requests_for, require_answers
from mm_grpo.rollout.scored_groups import with_scores
from mm_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    from mm_grpo.distributed.ranks import Ranks
    from mm_grpo.rewards.scorer import Scorer
    from mm_grpo.rewards.streaming_rewards import StreamedCalls
    from mm_grpo.rollout.engine import Request, Sampling
    from mm_grpo.rollout.prompts import PromptBuilder, StepPrompts
    from mm_grpo.rollout.turns import Sampler


@dataclass(frozen=True)
class RolloutRunner:
    """Prompt builder, sampler, scorer and ranks that answer rows and score the answers.

    Every process makes the same calls in the same order. `score` is no collective and runs on the first process; its
    caller puts it, with what follows from the scores, into one `ranks.fail_together`.
    """

    prompt_builder: PromptBuilder
    sampler: Sampler
    """The engine, or a loop of turns over it."""
    scorer: Scorer
    ranks: Ranks

    def sample(
        self,
        prompts: StepPrompts,
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        step: int,
        label: str,
        *,
        attempt: int = 0,
        version: int | None = None,
    ) -> tuple[list[Group], StreamedCalls | None]:
        """Sample G completions of each of P prompts, each from its own seed of `seeds` [P][G]. Collective.

        Returns the groups, and the reward calls that began meanwhile, which `score` takes. Raises GuardStop when the
        engine used another seed, or weights of another number than `version`.
        """
        streamed_calls = self.begin_scoring(prompts.prompts, sum(map(len, seeds)), step)
        with self.ranks.fail_together(label):
            requests = requests_for(prompts.prompts, seeds, sampling)
            try:
                completions = self._answer(requests, streamed_calls)
                if version is not None:
                    require_answers(requests, completions, version)
            except BaseException:
                # else the scorer would take the next batch for a second one at the same time
                if streamed_calls is not None:
                    streamed_calls.abandon()
                raise
        flat = iter(completions)
        groups = [
            Group(slot, prompt, tuple(islice(flat, len(group_seeds))), attempt=attempt)
            for slot, prompt, group_seeds in zip(prompts.slots, prompts.prompts, seeds, strict=True)
        ]
        return groups, streamed_calls

    def begin_scoring(self, prompts: Sequence[Prompt], count: int, step: int) -> StreamedCalls | None:
        """Prepare to score `count` completions one by one. None if no reward can, and with several processes."""
        # the first process scores, and has the completions of the others only at the end
        if self.ranks.world > 1:
            return None
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.sample.columns)
        return self.scorer.begin(count, columns, step)

    def gather(self, groups: Sequence[Group], label: str) -> list[Group] | None:
        """Return the groups of all processes by slot on the first process, None on the others. Collective."""
        # tensors are large and live objects cannot be sent; with several processes no reward looks at them
        if self.ranks.world > 1:
            groups = [group.without_local_state() for group in groups]
        shards = self.ranks.gather(groups, label)
        if shards is None:
            return None
        return sorted((group for shard in shards for group in shard), key=lambda group: group.slot)

    def score(
        self, groups: Sequence[Group], step: int, streamed_calls: StreamedCalls | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with their rewards, and the rewards' metrics. `streamed_calls` are not made again."""
        prompts = [group.prompt for group in groups for _ in group.completions]
        completions = [completion for group in groups for completion in group.completions]
        scores = self.scorer.score(prompts, completions, step, streamed_calls)
        return with_scores(groups, scores), scores.metrics

    def _answer(self, requests: Sequence[Request], streamed_calls: StreamedCalls | None) -> list[Completion]:
        """Return one completion per request, in order, each handed to `streamed_calls` when it is done."""
        if streamed_calls is None:
            return self.sampler.generate(requests) if requests else []
        add = streamed_calls.add
        with self.sampler.stream() as stream:
            return answer_all(
                stream, requests, lambda at, completion: add(at, requests[at].prompt, completion)
            )
