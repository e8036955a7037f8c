"""Four groups of one step, the log-probs of their completions by transformers' own forward, and segments of packs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from helpers import tiny
from helpers.configs import merged, small_config
from helpers.families import plain_inputs
from mm_grpo.config import GRPOConfig
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.optimizer import Optimizer
from mm_grpo.learner.pack import PADDING
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP as GROUP
from mm_grpo.learner.step_report import LearnerReport
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Completion, Group

ADVANTAGES = ((1.0, -0.5, -0.5), (0.0, 0.0, 0.0), (-1.2, 0.2, 1.0), (0.7, -0.7, 0.0))
LENGTHS = ((3, 6, 2), (4, 4, 4), (1, 8, 5), (2, 2, 7))
STEP = {
    "rollout": {"max_completion_length": 8, "temperature": 0.8},
    "optim": {"adam_epsilon": 1e-4, "max_grad_norm": 0.5},
    "run": {"max_steps": 10},
}
processor_at = lru_cache(load_processor)


def config_for(path: Any, **changes: Any) -> GRPOConfig:
    """For groups of at most eight tokens: optimizer steps that fp32 can compare."""
    return small_config(path, **merged(STEP, changes))


def load(path: Any, **options: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, **options).train()


def learner_of(path: Any, policy: Any = None, **changes: Any) -> Learner:
    """A learner of ten updates, of the model at `path` or of `policy`."""
    model = load(path) if policy is None else policy
    return Learner(model, load_processor(str(path)), config_for(path, **changes), 10)


def make_groups(processor: Processor, *, videos: bool = False) -> list[Group]:
    """Four groups: two images, no image, one image, the first row again with another image. With `videos` the third
    one has a video in the place of its image, and the last one after its first image."""
    samples = [
        tiny.sample("r:0", "what", (tiny.picture(1), tiny.picture(2, 56, 112))),
        tiny.sample("r:1", "just words"),
        tiny.sample("r:2", "what is that", (tiny.picture(3),)),
        tiny.sample("r:3", "what", (tiny.picture(4), tiny.picture(5, 56, 112))),
    ]
    if videos:
        samples[2] = tiny.sample("r:2", "what is that", (), (tiny.video(3, 4, 56, 56),))
        samples[3] = tiny.sample("r:3", "what", (tiny.picture(4),), (tiny.video(5, 6, 56, 28),))
    generator = torch.Generator().manual_seed(0)
    groups = []
    for slot, (sample, lengths, advantages) in enumerate(zip(samples, LENGTHS, ADVANTAGES, strict=True)):
        completions = []
        for g, n in enumerate(lengths):
            ids = tuple((torch.randint(10, 270, (n,), generator=generator)).tolist())
            reason = "length" if n == 8 else "stop"
            completions.append(Completion(ids, (-5.0,) * n, "", reason, seed=slot * 3 + g))  # type: ignore[arg-type]
        zeros = (0.0,) * len(lengths)
        groups.append(Group(slot, processor.prompt(sample), tuple(completions), zeros, advantages))
    return groups


def plain_logp(model: Any, config: GRPOConfig, group: Group, c: Completion) -> Tensor:
    """(log-probs, entropies) [2, T] by transformers' forward."""
    logp = distribution(model, config, group, c)
    entropy = -(logp.exp() * logp).sum(-1)  # of what is banned 0 times -1e9
    return torch.stack([logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0], entropy])


def distribution(model: Any, config: GRPOConfig, group: Group, c: Completion) -> Tensor:
    """Log-probs [T, V] of all tokens at each place of a completion, -1e9 of what is banned."""
    processor = processor_at(config.model.path)
    if group.prompt.engine_prompt.videos:
        inputs = plain_inputs(processor, group.prompt, c.token_ids)
    else:
        ids = torch.tensor([[*group.prompt.token_ids, *c.token_ids]])
        kinds = (ids == model.config.image_token_id).int()
        inputs = {"input_ids": ids, "mm_token_type_ids": kinds, **group.prompt.vision}
    out = model(**inputs, use_cache=False)
    logits = out.logits[0, len(group.prompt.token_ids) - 1 : -1] / config.rollout.temperature
    keep = torch.ones(logits.shape[1], dtype=torch.bool)
    keep[sorted(processor.media_token_ids)] = False
    return logits.float().masked_fill(~keep, -1e9).log_softmax(-1)


def update_of(learner: Learner, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """How far a step moves each parameter, and the step's metrics."""
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    metrics = learner.update(groups).metrics
    return {n: p.detach() - before[n] for n, p in learner.model.named_parameters()}, metrics


def segments_of(rows: Sequence[Sequence[Any]]) -> Tensor:
    """Segments [B, N] of rows given by the lengths of prompt and completions, or by a list of such lists."""
    several = [row if isinstance(row[0], list) else [row] for row in rows]
    known = [
        [g * GROUP + k for g, lengths in enumerate(row) for k, n in enumerate(lengths) for _ in range(n)]
        for row in several
    ]
    width = max(map(len, known))
    return torch.tensor([own + [PADDING] * (width - len(own)) for own in known])


def gradients_of(learner: Learner, groups: list[Group]) -> tuple[dict[str, Tensor], LearnerReport]:
    """The gradients of a step's first update in fp32, before they are clipped, and the step's report."""
    optimizer, found = learner.optimizer, dict[str, Tensor]()
    assert isinstance(optimizer, Optimizer)
    apply = optimizer.apply

    def noted(live: int) -> Any:
        if not found:
            pairs = zip(optimizer.named, optimizer.masters, strict=True)
            found.update((name, master.grad.clone()) for name, master in pairs if master.grad is not None)
        return apply(live)

    optimizer.apply = noted  # type: ignore[method-assign]
    return found, learner.update(groups)
