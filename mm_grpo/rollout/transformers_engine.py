"""The embedded engine: continuous batching over a transformers model.

By default the engine holds the learner's own module: there is no second copy of the weights and nothing to transfer.
Prompts are prefilled once for all their rows, by transformers' own attention; a step of the stream then runs one token
of every row (decode_cache.py). Rows that have ended leave the batch, and waiting rows join it. A row draws one uniform
number per token from its own `torch.Generator` and takes the token at which the cumulative probability passes it. So
its noise depends only on its seed, never on its batch mates.

A later request may continue a row that ended: only what was appended is run, behind the row's keys and values. If these
are not enough (layers of linear attention have no states of earlier tokens, images that look ahead are masked as a
whole), the whole prompt is run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mm_grpo.errors import GuardStop
from mm_grpo.rollout.decode_cache import CachedPrompt, DecodeCache, RowKeyValues, full_cache
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
"""Tokens of prompts that are run together, padding included; always at least one prompt."""


class TransformersEngine(RolloutEngine):
    """Samples from `model`, a transformers vision-language model, in this process.

    `model` may be the learner's: it is in evaluation mode while the engine works, and put back afterwards. `version`
    numbers its weights; `banned` ids are never drawn.
    """

    def __init__(self, model: Any, processor: Processor, *, max_rows: int = MAX_ROWS) -> None:
        self.model = model
        self.processor, self.family = processor, processor.family
        self.max_rows = max_rows
        self.version = 0
        self.banned = sorted(processor.media_token_ids)

    @property
    def sentence(self) -> str:
        """Recommend vLLM if it is installed on a machine with a GPU."""
        if self.model.device.type != "cuda" or find_spec("vllm") is None:
            return ""
        return "rollout.engine = transformers; vLLM, which is installed here, is faster: rollout.engine=vllm"

    def stream(self) -> TransformersStream:
        """Open a stream in which neighbours that share a prompt share its prefill."""
        return TransformersStream(self)

    def score(self, prompt: Prompt, token_ids: Sequence[int]) -> list[float]:
        with self.evaluating(), torch.no_grad():
            ids = torch.tensor([[*prompt.token_ids, *token_ids]])
            tail = prompt.next_position + torch.arange(len(token_ids)).expand(*self.family.position_axes, -1)
            positions = torch.cat([prompt.position_ids, tail], -1)[..., None, :]
            hidden = self.hidden_states(ids, positions, None, None, [prompt])
            logits = self.family.head(self.model)(hidden[0, len(prompt.token_ids) - 1 : -1]).float()
            chosen = torch.tensor(token_ids, device=logits.device)[:, None]
            return [float(x) for x in logits.log_softmax(-1).gather(1, chosen)[:, 0]]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Digest:
        """Copy tensors that are not already the model's own, and return the digests of the copies."""
        pairs = list(self.model.named_parameters(remove_duplicate=False))
        # a layer with adapters is the learner's module itself: it is sent their merged weight, which it must not get
        adapted = {name.replace(".base_layer.", ".") for name, _ in pairs if ".base_layer." in name}
        parameters = {name: parameter for name, parameter in pairs if ".base_layer." not in name}
        digests: dict[str, str] = {}
        with torch.no_grad():
            for name, tensor in tensors:
                if name in adapted:
                    continue
                if name not in parameters:
                    raise KeyError(f"weight sync sent '{name}', which the engine's model does not have")
                if parameters[name].data_ptr() != tensor.data_ptr():
                    parameters[name].copy_(tensor)
                    digests[name] = digest(parameters[name])
        self.version = version
        return digests

    def hidden_states(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, pictured: Sequence[Pictured]
    ) -> Tensor:
        """Return the last hidden states [B, N, D] of ids [B, N], with the images of `pictured` in their order."""
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
        """Keep the model in evaluation mode during the block."""
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)


@dataclass(eq=False)
class _EndedRow:
    """A row that ended and may be continued: its tokens with their keys and values."""

    token_ids: tuple[int, ...]
    prompt: CachedPrompt
    tail: RowKeyValues

    def starts(self, token_ids: tuple[int, ...]) -> bool:
        return token_ids[: len(self.token_ids)] == self.token_ids


@dataclass(eq=False)
class _Row:
    """A request that waits or is being answered."""

    number: int
    request: Request
    noise: list[float]
    keep: bool
    """Keep its keys and values when it ends."""
    origin: _EndedRow | None = None
    """The row that it continues."""
    pictures: Sequence[Pictured] = ()
    """Images that were appended to `origin`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersStream(RequestStream):
    """Stream over the model of `engine`, which is in evaluation mode until `close`.

    Rows of `add_request` are kept when they end, because other requests may follow them; rows of `add_group` are not.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.model, self.family = engine, engine.model, engine.family
        config = self.model.config.get_text_config()
        self.cache = DecodeCache(config)
        self.windows = bool(getattr(config, "sliding_window", None))
        linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
        self.keeps = not linear and not self.family.looks_ahead
        self.ended_rows: dict[int, _EndedRow] = {}
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
        origin = None if follows is None else self.ended_rows.get(follows.number)
        if follows is not None and origin is not None and origin.starts(request.prompt.token_ids):
            del self.ended_rows[follows.number]  # its prompt is released once the request has begun
            row.origin, row.pictures = origin, follows.pictures
        self.waiting.append(row)
        return number

    def step(self) -> list[tuple[int, Completion]]:
        with torch.no_grad():
            self._admit()
            if not self.rows:
                return []
            ends = self._draw()
            completions = [(self.rows[i].number, self._completion(self.rows[i])) for i in ends]
            for i in ends:
                if self.rows[i].keep:
                    self._keep(i)
            self.cache.remove(ends)
            self.rows = [row for i, row in enumerate(self.rows) if i not in ends]
            if self.rows:
                self._run()
            else:
                self.hidden = None
            return completions

    def release(self, number: int) -> None:
        ended_row = self.ended_rows.pop(number, None)
        if ended_row is not None:
            self.cache.release([ended_row.prompt])

    def close(self) -> None:
        self.waiting.clear()
        self.rows, self.ended_rows, self.hidden = [], {}, None
        self.cache = DecodeCache(self.cache.config)
        self._stack.close()

    def _admit(self) -> None:
        """Start waiting requests, in their order, while there is room. Only one kind of sampling runs at a time."""
        new_groups: list[list[_Row]] = []
        continued: list[tuple[_Row, _EndedRow]] = []
        room = self.engine.max_rows - len(self.rows)
        rule = _rule(self.rows[0].request) if self.rows else None
        while self.waiting:
            first = self.waiting[0]
            if rule is not None and _rule(first.request) != rule:
                break
            group = [first] if first.origin is not None else self._next_group()
            if room < len(group) and (self.rows or new_groups or continued):
                break
            for _ in group:
                self.waiting.popleft()
            room -= len(group)
            if first.origin is not None:
                continued.append((first, first.origin))
            else:
                new_groups.append(group)
            rule = _rule(first.request)
        if continued:
            self._continue(continued)
        for batch in _batches(new_groups):
            self._prefill(batch)

    def _next_group(self) -> list[_Row]:
        """Return the first waiting row and its neighbours with the same prompt and sampling."""
        _, rows = next(groupby(self.waiting, lambda row: (id(row.request.prompt), row.request.sampling)))
        return list(rows)

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

    def _continue(self, pairs: list[tuple[_Row, _EndedRow]]) -> None:
        """Run what was appended to ended rows, behind their keys and values."""
        longest = max(len(row.request.prompt.token_ids) for row, _ in pairs)
        # transformers counts sliding windows over the padding, and a batch of one has none
        size = 1 if self.windows else max(1, PREFILL_TOKENS // longest)
        for batch in (pairs[i : i + size] for i in range(0, len(pairs), size)):
            past: Any
            past, past_mask = self.cache.padded_cache([(origin.prompt, origin.tail) for _, origin in batch])
            new = [
                (prompt.token_ids[count:], prompt.position_ids[..., count:])
                for prompt, count in ((row.request.prompt, len(origin.token_ids)) for row, origin in batch)
            ]
            ids, positions, mask = _padded(new)
            pictures = [picture for row, _ in batch for picture in row.pictures]
            mask = torch.cat([past_mask, mask], 1)
            hidden = self.engine.hidden_states(ids, positions, mask, past, pictures)[:, -1]
            for b, (row, origin) in enumerate(batch):
                count = len(new[b][0])
                tail = [
                    (
                        torch.cat([k, layer.keys[b, :, -count:]], 1),
                        torch.cat([v, layer.values[b, :, -count:]], 1),
                    )
                    for (k, v), layer in zip(origin.tail, past.layers, strict=True)
                ]
                self.cache.add_row(origin.prompt, tail)
                self.rows.append(row)
                self.cache.release([origin.prompt])
            self._join(hidden)

    def _join(self, hidden: Tensor) -> None:
        self.hidden = hidden if self.hidden is None else torch.cat([self.hidden, hidden])

    def _draw(self) -> list[int]:
        """Draw a token of each row. Return the indices of rows that end with it, in order."""
        assert self.hidden is not None
        sampling = self.rows[0].request.sampling
        logits = self.family.head(self.model)(self.hidden)
        context = (
            [(*r.request.prompt.token_ids, *r.tokens) for r in self.rows] if sampling.truncated else None
        )
        noise = torch.tensor([r.noise[len(r.tokens)] for r in self.rows], dtype=torch.float64)
        chosen, logp = sample(logits, noise.to(logits.device), sampling, self.engine.banned, context)
        stops, ends = self.engine.processor.stop_token_ids, []
        tokens = zip(self.rows, chosen.tolist(), logp.tolist(), strict=True)
        for i, (row, token, logprob) in enumerate(tokens):
            if logprob != logprob:  # NaN
                raise GuardStop(
                    "the logits of the model are not finite, so nothing can be sampled: an update made its weights too "
                    "large, or they were not finite from the start; lower optim.learning_rate and start again, or "
                    "resume an earlier checkpoint"
                )
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in stops or len(row.tokens) == row.request.sampling.max_tokens:
                ends.append(i)
        return ends

    def _run(self) -> None:
        """Run the last token of each row."""
        device = self.model.device
        tokens = torch.tensor([[row.tokens[-1]] for row in self.rows], device=device)
        at = [[row.request.prompt.next_position + len(row.tokens) - 1] for row in self.rows]
        positions = torch.tensor(at, device=device).expand(*self.family.position_axes, -1, -1)
        with self.cache.decoding() as inputs:
            states = self.family.hidden_states(self.model, input_ids=tokens, position_ids=positions, **inputs)
        self.hidden = states[:, -1]

    def _keep(self, index: int) -> None:
        """Keep a row's keys and values for a request that continues it."""
        row, prompt = self.rows[index], self.cache.rows[index].prompt
        sequence = (*row.request.prompt.token_ids, *row.tokens[:-1])  # the last token was drawn but not run
        prompt.uses += 1
        self.ended_rows[row.number] = _EndedRow(sequence, prompt, self.cache.tail_of(index))

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
    """Batch prompts of similar length, so that little is padded, with at most PREFILL_TOKENS in a batch."""
    batches: list[list[list[_Row]]] = []
    lengths = [len(group[0].request.prompt.token_ids) for group in groups]
    for length, group in sorted(zip(lengths, groups, strict=True), key=itemgetter(0)):
        if batches and (len(batches[-1]) + 1) * length <= PREFILL_TOKENS:
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def _padded(parts: Sequence[tuple[Sequence[int], Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad sequences on the left. Return ids [B, N], positions [*A, B, N] and mask [B, N]."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad([torch.tensor(row_ids) for row_ids, _ in parts])
    mask = pad([torch.ones(len(row_ids), dtype=torch.long) for row_ids, _ in parts])
    positions = pad([row_positions.movedim(-1, 0) for _, row_positions in parts])
    return ids, positions.movedim((0, 1), (-2, -1)), mask
