"""The embedded engine: continuous batching over a transformers model.

By default the engine holds the learner's own module: there is no second copy of the weights and nothing to transfer.
Prompts are prefilled once for all their rows, by transformers' own attention; a step of the stream then runs one token
of every row (decode_cache.py). Rows that have ended leave the batch, those that wait join it. A row draws one uniform
number per token from its own `torch.Generator` and takes the token where the cumulative probability passes it, so its
noise depends on its seed alone, never on its batch mates.

A row that ended may be kept and gone on from: what was appended to it is run behind the keys and values that are there.
Where those are not enough (layers of linear attention have no states of earlier tokens, images that look ahead are
masked as a whole) the whole prompt is run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.rollout.decode_cache import DecodeCache, Prefix, Tail, full_cache
from mm_grpo.rollout.engine import RequestStream, RolloutEngine
from mm_grpo.rollout.token_sampling import sample, uniforms
from mm_grpo.rollout.weights import digest
from mm_grpo.types import Completion, FinishReason, Pictured

if TYPE_CHECKING:
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.engine import Digest, Follows, Request, Sampling
    from mm_grpo.types import Prompt

MAX_ROWS = 512
"""Rows decoded together. More rows cost memory for their caches, fewer cost speed."""
PREFILL_TOKENS = 1 << 14
"""Tokens of prompts, padding included, that are run together; one prompt at least."""


class TransformersEngine(RolloutEngine):
    """Samples from `model`, a transformers vision-language model, in this process.

    `model` may be the learner's: it is put in evaluation mode while the engine works and back after. `version` is that
    of its weights; `banned` ids are never drawn.
    """

    def __init__(self, model: Any, processor: Processor, *, max_rows: int = MAX_ROWS) -> None:
        self.model = model
        self.processor, self.family = processor, processor.family
        self.max_rows = max_rows
        self.version = 0
        self.banned = sorted(processor.media_token_ids)

    @property
    def sentence(self) -> str:
        """On a GPU with vLLM, what that would bring."""
        if self.model.device.type != "cuda" or find_spec("vllm") is None:
            return ""
        return "rollout.engine = transformers; vLLM, which is installed here, is faster: rollout.engine=vllm"

    def stream(self) -> TransformersStream:
        """Open a stream in which neighbours that share a prompt share its prefill."""
        return TransformersStream(self)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities [T] of `token_ids` after `prompt`: no media mask, temperature 1."""
        with self.evaluating(), torch.no_grad():
            ids = torch.tensor([[*prompt.token_ids, *token_ids]])
            tail = prompt.next_position + torch.arange(len(token_ids)).expand(*self.family.position_axes, -1)
            positions = torch.cat([prompt.position_ids, tail], -1)[..., None, :]
            hidden = self.hidden_states(ids, positions, None, None, [prompt])
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

    def hidden_states(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, pictured: Sequence[Pictured]
    ) -> Tensor:
        """The last hidden states [B, N, D] of ids [B, N], with the images of `pictured` in their order."""
        device = self.model.device
        vision = {key: x.to(device) for key, x in self.family.vision(pictured).items()}
        return self.family.hidden_states(
            self.model,
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=None if mask is None else mask.to(device),
            past_key_values=cache,
            use_cache=cache is not None,
            **vision,
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, and back as it was."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)


@dataclass(eq=False)
class _Kept:
    """A row that ended: the tokens whose keys and values are kept, and where they are."""

    token_ids: tuple[int, ...]
    prefix: Prefix
    tail: Tail

    def begins(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids[: len(self.token_ids)] == self.token_ids


@dataclass(eq=False)
class _Row:
    """A request, which waits or is being answered. It may go on from a row that was kept, to which text and `pictures`
    were appended."""

    number: int
    request: Request
    noise: list[float]
    keep: bool
    kept: _Kept | None = None
    pictures: Sequence[Pictured] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersStream(RequestStream):
    """Stream over the model of `engine`, which is in evaluation mode until `close`.

    Rows of `add_request` are kept when they end, for requests that follow them; rows of `add_group` are not.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.model, self.family = engine, engine.model, engine.family
        config = self.model.config.get_text_config()
        self.cache = DecodeCache(config)
        self.windows = bool(getattr(config, "sliding_window", None))
        linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
        self.keeps = not linear and not self.family.looks_ahead
        self.kept: dict[int, _Kept] = {}
        self.rows: list[_Row] = []
        self.waiting: deque[_Row] = deque()
        self.hidden: Tensor | None = None
        self._count = 0
        self._stack = ExitStack()
        self._stack.enter_context(engine.evaluating())

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.rows)

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        return self._add(request, follows, keep=self.keeps)

    def add_group(self, requests: Sequence[Request]) -> list[int]:
        return [self._add(request, None, keep=False) for request in requests]

    def _add(self, request: Request, follows: Follows | None, *, keep: bool) -> int:
        number, self._count = self._count, self._count + 1
        row = _Row(number, request, uniforms(request.seed, request.sampling.max_tokens).tolist(), keep)
        kept = None if follows is None else self.kept.get(follows.number)
        if follows is not None and kept is not None and kept.begins(request.prompt.token_ids):
            del self.kept[follows.number]  # its prompt is held until the request has begun
            row.kept, row.pictures = kept, follows.pictures
        self.waiting.append(row)
        return number

    def step(self) -> list[tuple[int, Completion]]:
        with torch.no_grad():
            self._admit()
            if not self.rows:
                return []
            ended = self._draw()
            finished = [(self.rows[i].number, self._completion(self.rows[i])) for i in ended]
            for i in ended:
                if self.rows[i].keep:
                    self._keep(i)
            self.cache.remove(ended)
            self.rows = [row for i, row in enumerate(self.rows) if i not in ended]
            if self.rows:
                self._run()
            else:
                self.hidden = None
            return finished

    def release(self, number: int) -> None:
        kept = self.kept.pop(number, None)
        if kept is not None:
            self.cache.release([kept.prefix])

    def close(self) -> None:
        self.waiting.clear()
        self.rows, self.kept, self.hidden = [], {}, None
        self.cache = DecodeCache(self.cache.config)
        self._stack.close()

    # rows that join --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests, in their order, while there is room; one kind of sampling at a time."""
        fresh: list[list[_Row]] = []
        going_on: list[tuple[_Row, _Kept]] = []
        room = self.engine.max_rows - len(self.rows)
        rule = _rule(self.rows[0].request) if self.rows else None
        while self.waiting:
            first = self.waiting[0]
            if rule is not None and _rule(first.request) != rule:
                break
            group = [first] if first.kept is not None else self._next_group()
            if room < len(group) and (self.rows or fresh or going_on):
                break
            for _ in group:
                self.waiting.popleft()
            room -= len(group)
            if first.kept is not None:
                going_on.append((first, first.kept))
            else:
                fresh.append(group)
            rule = _rule(first.request)
        if going_on:
            self._go_on(going_on)
        for batch in _batches(fresh):
            self._prefill(batch)

    def _next_group(self) -> list[_Row]:
        """The neighbours at the head of those that wait that share a prompt and a way to sample."""
        first = self.waiting[0].request

        def shares(row: _Row) -> bool:
            return row.request.prompt is first.prompt and row.request.sampling == first.sampling

        return list(takewhile(shares, self.waiting))

    def _prefill(self, groups: list[list[_Row]]) -> None:
        """Run the prompts of `groups` together, and append their rows."""
        prompts = [group[0].request.prompt for group in groups]
        lengths, counts = [len(p.token_ids) for p in prompts], [len(group) for group in groups]
        cache = full_cache(self.cache.config)
        ids, positions, mask = _padded([(p.token_ids, p.position_ids) for p in prompts])
        hidden = self.engine.hidden_states(ids, positions, mask, cache, prompts)[:, -1]
        self.cache.add_prompts(cache, lengths, counts)
        self._join(hidden.repeat_interleave(torch.tensor(counts, device=hidden.device), 0))
        for group in groups:
            self.rows += group

    def _go_on(self, asked: list[tuple[_Row, _Kept]]) -> None:
        """Run what was appended to rows that ended, behind their keys and values."""
        # windows are counted over the padding, which there is none of in a batch of one
        longest = max(len(one.request.prompt.token_ids) for one, _ in asked)
        most = 1 if self.windows else max(1, PREFILL_TOKENS // longest)
        for batch in (asked[i : i + most] for i in range(0, len(asked), most)):
            past: Any
            past, past_mask = self.cache.joined([(kept.prefix, kept.tail) for _, kept in batch])
            new = [
                (prompt.token_ids[count:], prompt.position_ids[..., count:])
                for prompt, count in ((one.request.prompt, len(kept.token_ids)) for one, kept in batch)
            ]
            ids, positions, mask = _padded(new)
            pictures = [picture for one, _ in batch for picture in one.pictures]
            mask = torch.cat([past_mask, mask], 1)
            hidden = self.engine.hidden_states(ids, positions, mask, past, pictures)[:, -1]
            for b, (one, kept) in enumerate(batch):
                count = len(new[b][0])
                pairs = zip(kept.tail, past.layers, strict=True)
                tail = [
                    (torch.cat([k, own.keys[b, :, -count:]], 1), torch.cat([v, own.values[b, :, -count:]], 1))
                    for (k, v), own in pairs
                ]
                self.cache.add_row(kept.prefix, tail)
                self.rows.append(one)
                self.cache.release([kept.prefix])
            self._join(hidden)

    def _join(self, hidden: Tensor) -> None:
        self.hidden = hidden if self.hidden is None else torch.cat([self.hidden, hidden])

    # a step ----------------------------------------------------------------------------------

    def _draw(self) -> list[int]:
        """Draw a token of each row; returns the numbers of those that have ended, in order."""
        assert self.hidden is not None
        sampling = self.rows[0].request.sampling
        logits = self.family.head(self.model)(self.hidden)
        context = (
            [(*r.request.prompt.token_ids, *r.tokens) for r in self.rows] if sampling.truncated else None
        )
        noise = torch.tensor([r.noise[len(r.tokens)] for r in self.rows], dtype=torch.float64)
        chosen, logp = sample(logits, noise.to(logits.device), sampling, self.engine.banned, context)
        stops, ended = self.engine.processor.stop_token_ids, []
        drawn = zip(self.rows, chosen.tolist(), logp.tolist(), strict=True)
        for i, (row, token, logprob) in enumerate(drawn):
            if logprob != logprob:
                raise GuardStop(
                    "the logits of the model are not finite, so nothing can be sampled: an update made its weights too "
                    "large, or they were not finite from the start; lower optim.learning_rate and start again, or "
                    "resume an earlier checkpoint"
                )
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in stops or len(row.tokens) == row.request.sampling.max_tokens:
                ended.append(i)
        return ended

    def _run(self) -> None:
        """Run the last token of each row."""
        device = self.model.device
        tokens = torch.tensor([[row.tokens[-1]] for row in self.rows], device=device)
        at = [[row.request.prompt.next_position + len(row.tokens) - 1] for row in self.rows]
        positions = torch.tensor(at, device=device).expand(*self.family.position_axes, -1, -1)
        with self.cache.decoding() as inputs:
            states = self.family.hidden_states(self.model, input_ids=tokens, position_ids=positions, **inputs)
        self.hidden = states[:, -1]

    def _keep(self, number: int) -> None:
        """Keep a row's keys and values."""
        row, cached = self.rows[number], self.cache.rows[number]
        sequence = (*row.request.prompt.token_ids, *row.tokens[:-1])  # the last token was drawn, and not run
        cached.prefix.uses += 1
        self.kept[row.number] = _Kept(sequence, cached.prefix, self.cache.tail_of(number))

    def _completion(self, row: _Row) -> Completion:
        stopped = row.tokens[-1] in self.engine.processor.stop_token_ids
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(
            token_ids=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            text=self.engine.processor.decode(row.tokens),
            finish_reason=reason,
            seed=row.request.seed,
            weight_versions=((0, self.engine.version),),
        )


def _rule(request: Request) -> Sampling:
    """Return a request's sampling without its length."""
    return replace(request.sampling, max_tokens=0)


def _batches(groups: Sequence[list[_Row]]) -> list[list[list[_Row]]]:
    """Groups of prompts of like length, so that little is padded, at most PREFILL_TOKENS together."""
    batches: list[list[list[_Row]]] = []
    lengths = [len(group[0].request.prompt.token_ids) for group in groups]
    for length, group in sorted(zip(lengths, groups, strict=True), key=itemgetter(0)):
        if batches and (len(batches[-1]) + 1) * length <= PREFILL_TOKENS:
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def _padded(parts: Sequence[tuple[Sequence[int], Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, N], positions [*A, B, N] and mask [B, N] of sequences, padded on the left."""
    longest, first = max(len(ids) for ids, _ in parts), parts[0][1]
    ids = torch.zeros(len(parts), longest, dtype=torch.long)
    mask = torch.zeros(len(parts), longest, dtype=torch.long)
    positions = torch.zeros(*first.shape[:-1], len(parts), longest, dtype=torch.long)
    for i, (own, at) in enumerate(parts):
        start = longest - len(own)
        ids[i, start:] = torch.tensor(own)
        mask[i, start:] = 1
        positions[..., i, start:] = at
    return ids, positions, mask
