"""The embedded engine: a short decode loop over a transformers model.

Each prompt is prefilled once and its cache repeated for its generations; the rows of many prompts
then decode together. A row draws one uniform number per token from its own `torch.Generator` and
takes the token where the cumulative probability passes it, so its noise depends on its seed alone,
never on its batch mates. By default the engine holds the learner's own module: there is no second
copy of the weights and nothing to transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import logits_process as lp

from mm_grpo.errors import GuardStop
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, FinishReason, Prompt

if TYPE_CHECKING:
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Digest, Request, Sampling

MAX_ROWS = 512
"""Rows decoded together. More rows cost memory for their caches, fewer cost speed."""


class TransformersEngine:
    """Samples from `model`, a transformers vision-language model, in this process.

    `model` may be the learner's: it is put in evaluation mode while the engine works and back after.
    """

    def __init__(self, model: Any, processor: Processor, *, max_rows: int = MAX_ROWS) -> None:
        self.model = model
        self.processor, self.family = processor, processor.family
        self.max_rows = max_rows
        self.version = 0
        self._banned = sorted(processor.media_token_ids)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order; neighbours that share a prompt share its prefill."""
        groups = [list(g) for _, g in groupby(requests, key=lambda r: (id(r.prompt), r.sampling))]
        completions: list[Completion] = []
        with self._inference():
            for block in _blocks(groups, self.max_rows):
                completions += self._decode(block)
        return completions

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of `token_ids` after `prompt`: no media mask, temperature 1."""
        with self._inference():
            ids = torch.tensor([[*prompt.token_ids, *token_ids]], device=self.model.device)
            tail = prompt.next_position + torch.arange(len(token_ids)).expand(*self.family.position_axes, -1)
            positions = torch.cat([prompt.position_ids, tail], -1)[..., None, :].to(self.model.device)
            hidden = self._hidden_states(ids, positions, None, None, [prompt])
            logits = self.family.head(self.model)(hidden[0, len(prompt.token_ids) - 1 : -1]).float()
            chosen = torch.tensor(token_ids, device=logits.device)[:, None]
            return [float(x) for x in logits.log_softmax(-1).gather(1, chosen)[:, 0]]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Copy tensors that are not already the model's own; the digests name those copied.

        A layer that holds adapters of its own is the learner's module itself: what is sent for it is their
        merged weight, and nothing is copied.
        """
        named = list(self.model.named_parameters(remove_duplicate=False))
        adapted = {name.replace(".base_layer.", ".") for name, _ in named if ".base_layer." in name}
        own = {name: tensor for name, tensor in named if ".base_layer." not in name}
        digests: dict[str, str] = {}
        with torch.no_grad():
            for name, tensor in tensors:
                if name in adapted:
                    continue
                if name not in own:
                    raise KeyError(f"weight sync sent '{name}', which the engine's model does not have")
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
                    digests[name] = digest(own[name])
        self.version = version
        return digests

    holds_weights = True

    def sleep(self) -> None:
        """Nothing to free: the model belongs to the caller, and caches end with each call of `generate`."""

    def wake(self) -> None:
        """Nothing was freed."""

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""

    # one block of groups ---------------------------------------------------------------------

    def _decode(self, groups: list[list[Request]]) -> list[Completion]:
        """Prefill the prompts of `groups` together, then decode all their rows together."""
        rows = [request for group in groups for request in group]
        sampling = rows[0].sampling
        prompts = [group[0].prompt for group in groups]
        repeats = torch.tensor([len(group) for group in groups])
        device = self.model.device

        cache: Any = DynamicCache(config=self.model.config.get_text_config())
        hidden, mask = self._prefill(prompts, cache)
        # the one selection of rows that layers of linear attention have too
        cache.reorder_cache(torch.repeat_interleave(repeats).to(device))
        hidden = hidden.repeat_interleave(repeats.to(device), 0)
        mask = mask.repeat_interleave(repeats.to(device), 0)
        starts = torch.tensor([p.next_position for p in prompts], device=device)
        starts = starts.repeat_interleave(repeats.to(device))

        limits = torch.tensor([r.sampling.max_tokens for r in rows], device=device)
        longest = int(limits.max())
        uniforms = torch.stack([_uniforms(r.seed, longest) for r in rows]).to(device)
        tokens = torch.zeros(len(rows), 0, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(rows), 0, device=device)
        output: list[tuple[Tensor, Tensor]] = [(tokens, logprobs)] * len(rows)
        alive = torch.arange(len(rows), device=device)
        stops = torch.tensor(sorted(self.processor.stop_token_ids), device=device)

        for step in range(longest):
            logits = self.family.head(self.model)(hidden).float()
            context = [rows[i].prompt.token_ids for i in alive.tolist()] if sampling.truncated else None
            chosen, chosen_logp = _sample(
                logits, uniforms[alive, step], sampling, self._banned, context, tokens
            )
            if bool(chosen_logp.isnan().any()):
                raise GuardStop(
                    "the logits of the model are not finite, so nothing can be sampled: an update made its weights too "
                    "large, or they were not finite from the start; lower optim.learning_rate and start again, or "
                    "resume an earlier checkpoint"
                )
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            logprobs = torch.cat([logprobs, chosen_logp[:, None]], 1)
            ended = torch.isin(chosen, stops) | (limits[alive] == step + 1)
            for i in ended.nonzero()[:, 0].tolist():
                output[int(alive[i])] = (tokens[i], logprobs[i])
            if bool(ended.all()):
                break
            if bool(ended.any()):  # finished rows leave, so the rest decode faster
                keep = (~ended).nonzero()[:, 0]
                cache.reorder_cache(keep)
                alive, tokens, logprobs = alive[keep], tokens[keep], logprobs[keep]
                mask, starts, chosen = mask[keep], starts[keep], chosen[keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            positions = (starts + step)[:, None].expand(*self.family.position_axes, -1, -1)
            hidden = self._hidden_states(chosen[:, None], positions, mask, cache, [])[:, -1]

        return [self._completion(r, *out) for r, out in zip(rows, output, strict=True)]

    def _prefill(self, prompts: list[Prompt], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Last hidden states [P, D] and left-padded masks [P, L] of `prompts`; fills `cache`."""
        device, longest = self.model.device, max(len(p.token_ids) for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        positions = torch.zeros(*self.family.position_axes, len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            n = len(prompt.token_ids)
            ids[i, longest - n :] = torch.tensor(prompt.token_ids)
            mask[i, longest - n :] = 1
            positions[..., i, longest - n :] = prompt.position_ids
        ids, mask, positions = ids.to(device), mask.to(device), positions.to(device)
        return self._hidden_states(ids, positions, mask, cache, prompts)[:, -1], mask

    def _hidden_states(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, prompts: Sequence[Prompt]
    ) -> Tensor:
        """The last hidden states [B, N, D], with the images of `prompts` (none while decoding)."""
        vision = {key: x.to(self.model.device) for key, x in self.family.vision(prompts).items()}
        return self.family.hidden_states(
            self.model,
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
            **vision,
        )

    def _completion(self, request: Request, tokens: Tensor, logprobs: Tensor) -> Completion:
        ids = tuple(tokens.tolist())
        reason: FinishReason = "stop" if ids and ids[-1] in self.processor.stop_token_ids else "length"
        return Completion(
            token_ids=ids,
            logprobs=tuple(logprobs.tolist()),
            text=self.processor.decode(ids),
            finish_reason=reason,
            seed=request.seed,
            weight_versions=((0, self.version),),
        )

    @contextmanager
    def _inference(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)


def _blocks(groups: list[list[Request]], max_rows: int) -> Iterator[list[list[Request]]]:
    """Consecutive groups with equal sampling but for the number of tokens, at most `max_rows` rows together (one group
    at least)."""
    block: list[list[Request]] = []
    rows = 0
    for group in groups:
        full = rows + len(group) > max_rows
        if block and (full or _rule(group[0]) != _rule(block[0][0])):
            yield block
            block, rows = [], 0
        block.append(group)
        rows += len(group)
    if block:
        yield block


def _rule(request: Request) -> Sampling:
    """How a request's tokens are drawn, whatever their number."""
    return replace(request.sampling, max_tokens=0)


def _uniforms(seed: int, count: int) -> Tensor:
    """The row's noise [T]: one number in [0, 1) per token, fixed by `seed`, drawn on the CPU; a longer row begins as a
    shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _sample(
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    banned: list[int],
    context: list[tuple[int, ...]] | None,
    tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Tokens [R] and their log-probabilities [R] under the distribution that they were drawn from."""
    logits[:, banned] = -torch.inf
    if context is not None:
        logits = _truncate(logits, sampling, context, tokens)
    if sampling.temperature == 0:
        logp = logits.log_softmax(-1)
        chosen = logp.argmax(-1)
    else:
        logp = (logits / sampling.temperature).log_softmax(-1)
        cumulative = logp.double().exp().cumsum(-1)
        # scaled by the last sum, which rounding leaves a hair off 1; the first entry above u wins
        target = (uniforms * cumulative[:, -1])[:, None]
        # past the end where logits are NaN, which the caller sees by their log-probs
        chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return chosen, logp.gather(1, chosen[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling, context: list[tuple[int, ...]], tokens: Tensor) -> Tensor:
    """Penalty and truncation of evaluation sampling [R, V], by transformers' own processors."""
    if sampling.repetition_penalty != 1.0:
        penalty = lp.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        for i, prompt in enumerate(context):
            seen = torch.cat([torch.tensor(prompt, device=tokens.device), tokens[i]])[None]
            logits[i : i + 1] = penalty(seen, logits[i : i + 1])
    if sampling.temperature == 0:
        return logits
    warpers: list[Any] = []
    if sampling.top_k > 0:
        warpers.append(lp.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(lp.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(lp.MinPLogitsWarper(sampling.min_p))
    scaled = logits / sampling.temperature
    for warper in warpers:
        scaled = warper(tokens, scaled)
    return scaled * sampling.temperature
