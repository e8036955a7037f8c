"""A pass over the packs of a plan, which share features of images and states of prompts.

The pass lays out its packs one at a time and counts what was run. With gradients a prompt that was run apart has a
backward of its own, after the last pack that goes on from it. Without gradients there are the log-probs of completions
(`score`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.minibatch import ByCompletion, split_by_completion
from mm_grpo.learner.pack import Item, Pack, by_group, dummy_pack, layout, spread_prompts
from mm_grpo.learner.prompt_states import PromptEnd, PromptStates
from mm_grpo.learner.shards import missing_forwards
from mm_grpo.learner.step_report import PackStatistics
from mm_grpo.processors.base import Processor
from mm_grpo.types import Prompt


class ForwardPass:
    """Context in which `module` runs the packs of a plan, each once and in order; `work` counts them."""

    def __init__(
        self,
        module: PackForward,
        planned: Sequence[Sequence[Sequence[Item]]],
        media_token_ids: frozenset[int],
        work: PackStatistics,
    ) -> None:
        self.module, self.planned, self.work = module, planned, work
        self.media_token_ids = media_token_ids
        # by id, because two prompts with equal tokens may have different images
        self._apart = {id(p): p for p in spread_prompts(planned)} if module.masks.apart else {}
        self._prompts = PromptStates(map(self._prefixes, planned))

    @property
    def backwards(self) -> int:
        """Count of backward passes: of the packs, and of prompts that are run apart."""
        return len(self.planned) + len(self._apart)

    def packs(self) -> Iterator[Pack]:
        """Lay out the packs one by one."""
        for rows in self.planned:
            pack = layout(rows, self.media_token_ids, self.module.masks.multiple, self._apart)
            self.work.add(pack, rows)
            yield pack

    def even_packs(self) -> Iterator[Pack]:
        """Lay out the packs of a pass without gradients, and dummies if other processes have more (see `shards.py`)."""
        missing = missing_forwards(self.module.model, len(self.planned))
        yield from self.packs()
        yield from repeat(self.dummy(), missing)

    def dummy(self) -> Pack:
        """Return a pack of text for a process that has none left; its completion is -1."""
        token = next(i for i in count() if i not in self.media_token_ids)
        return dummy_pack(token, self.module.family.position_axes)

    def ended(self, pack: Pack) -> list[PromptEnd]:
        """Return the prompts whose last pack this was, to be run and taken backward before the next pack."""
        return self._prompts.ended(p for row in pack.prefixes for p in row)

    def __enter__(self) -> ForwardPass:
        self.module.begin_pass(self._prompts)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.work.images += self.module.end_pass()
        for prompt in self._prompts.ran:
            self.work.add_prompt(prompt, self.module.masks.multiple)

    def _prefixes(self, rows: Sequence[Sequence[Item]]) -> list[Prompt]:
        prompts = (group[0].prompt for row in rows for group in by_group(row))
        return [prompt for prompt in prompts if id(prompt) in self._apart]


def score(
    model: Any,
    processor: Processor,
    config: GRPOConfig,
    prompt: Prompt,
    completions: Sequence[Sequence[int]],
    *,
    as_sampled: bool = False,
) -> list[list[float]]:
    """Return log-probabilities [T] of each completion of `prompt`, as the learner computes them.

    Over the whole vocabulary at temperature 1; with `as_sampled`, over the distribution that training samples from
    (media tokens masked, at the training temperature).
    """
    module = PackForward(model, processor, config, as_sampled=as_sampled)
    items = [Item(i, 0, prompt, tuple(ids)) for i, ids in enumerate(completions)]
    packs = module.masks.plan(items, config.optim.max_tokens_per_pack)
    with ForwardPass(module, packs, processor.media_token_ids, PackStatistics()) as forward_pass:
        logprobs = logprobs_and_entropies(module, forward_pass.even_packs())[0]
    return [logprobs[i].tolist() for i in range(len(items))]


def states_on_host(module: PackForward, packs: Iterable[Pack]) -> ByCompletion:
    """Return the states [T, D] that predict each completion's tokens, without gradients, in the host's memory."""
    states: ByCompletion = {}
    with torch.no_grad():
        for pack in packs:
            states |= split_by_completion(module.states(pack).cpu(), pack.completion_index.tolist())
    return states


def logprobs_and_entropies(module: PackForward, packs: Iterable[Pack]) -> tuple[ByCompletion, ByCompletion]:
    """Return log-probabilities [T] and entropies [T] of each completion of some packs, without gradients."""
    logps: ByCompletion = {}
    entropies: ByCompletion = {}
    with torch.no_grad():
        for pack in packs:
            order, result = pack.completion_index.tolist(), module(pack)
            logps |= split_by_completion(result.logp, order)
            entropies |= split_by_completion(result.entropy, order)
    return logps, entropies
