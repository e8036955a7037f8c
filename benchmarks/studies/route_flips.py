"""Experts that a token gets in the learner and not in the engine, in bfloat16, and what that does to log-probs.

    python benchmarks/studies/route_flips.py OUT [--seeds 3] [--experts 64] [--chosen 8]

Tiny random models with an image; each completion is sampled alone, so that the routers of both sides see its tokens in
one order. A token-layer is flipped if its set of experts differs between the engine's prefill and decoding and the
learner's pack. results/families.md has what was seen.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig
from mm_grpo.data import load
from mm_grpo.data.shapes import shapes_rows
from mm_grpo.learner.forward_pass import score
from mm_grpo.processors.base import load_processor, mm_processor_kwargs
from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.testing.tiny_models import build

PROMPTS, TOKENS = 16, 48
Routes = list[list[Tensor]]
"""Experts [tokens, chosen] of each call, by layer."""


def hook_learner(model: Any, routes: Routes) -> list[Any]:
    """Note the experts of the routers of a transformers model."""
    routers = [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]
    routes += [[] for _ in routers]
    return [
        r.register_forward_hook(lambda _, i, out, at=at: routes[at].append(out[2]))
        for at, r in enumerate(routers)
    ]


def hook_vllm(model: Any, routes: Routes) -> None:
    """Note the experts of the routers of a vLLM model, for good."""
    runners = [
        part for part in model.modules() if hasattr(part, "router") and hasattr(part, "routed_experts")
    ]
    for at, runner in enumerate(runners):
        routes.append([])

        def select(*args: Any, first: Any = runner.router.select_experts, at: int = at, **kwargs: Any) -> Any:
            weights, ids = first(*args, **kwargs)
            routes[at].append(ids.clone())
            return weights, ids

        runner.router.select_experts = select


def experts_of(routes: Routes, start: int, count: int) -> Tensor:
    """Return the sorted experts [layers, count, chosen] of tokens from `start`, and forget them."""
    joined = [torch.cat(calls).long().sort(-1).values[start : start + count] for calls in routes]
    for calls in routes:
        calls.clear()
    return torch.stack(joined)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    for name, default in (("seeds", 3), ("experts", 64), ("chosen", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for family in ("qwen3_vl_moe", "qwen3_5_moe"):
        for kind in ("transformers", "vllm"):
            found = [compare(family, kind, seed, options) for seed in range(options.seeds)]
            flipped, hit, gap = (torch.cat([f[i].flatten() for f in found]) for i in range(3))
            quiet, loud = gap[~hit], gap[hit]
            print(
                f"| `{family}` | {kind} | {flipped.float().mean():.2%} | {hit.float().mean():.1%} | {gap.mean():.1e} | "
                f"{gap.max():.1e} | {quiet.mean():.1e} | {loud.mean():.1e} |  ({len(gap)} tokens)",
                flush=True,
            )


def compare(family: str, kind: str, seed: int, options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return flips [layers, tokens], tokens with a flip [tokens], and gaps of log-probs in nats [tokens]."""
    widths = {"experts": options.experts, "chosen": options.chosen, "linear_width": 128}
    path = build(family, options.out / f"{family}-{seed}", seed=seed, **widths)
    processor, config = load_processor(str(path)), GRPOConfig.from_dict({"model": {"path": str(path)}})
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).eval()
    rows = load(list(shapes_rows(split="train", size=PROMPTS, seed=seed, image_size=56)), config.data)
    sampled: Routes = []
    learned: Routes = []
    if kind == "vllm":
        from mm_grpo.rollout.vllm.engine import VLLMEngine
        from mm_grpo.rollout.vllm.launch import EngineSettings

        settings = EngineSettings(
            str(path), "bfloat16", 512, tuple(mm_processor_kwargs(processor).items()),
            engine_kwargs=(("enable_prefix_caching", False),),
        )  # fmt: skip
        engine: Any = VLLMEngine(settings, processor)
        engine._handle.llm.apply_model(lambda served: hook_vllm(served, sampled))
    else:
        engine = TransformersEngine(model, processor)
    flips, gaps = [], []
    for number in range(PROMPTS):
        prompt = processor.prompt(rows.sample(number))
        with hooked(model, sampled) if kind == "transformers" else nullcontext():
            (done,) = engine.generate(requests_for([prompt], [range(number, number + 1)], Sampling(TOKENS)))
        start, count = len(prompt.token_ids) - 1, len(done.token_ids)
        theirs = experts_of(sampled, start, count)
        with hooked(model, learned):
            (ours,) = score(model, processor, config, prompt, [done.token_ids], as_sampled=True)
        flips.append((experts_of(learned, start, count) != theirs).any(-1))
        gaps.append((torch.tensor(ours) - torch.tensor(done.logprobs)).abs())
    flipped = torch.cat(flips, 1)
    return flipped, flipped.any(0), torch.cat(gaps)


@contextmanager
def hooked(model: Any, routes: Routes) -> Iterator[None]:
    routes.clear()
    hooks = hook_learner(model, routes)
    yield
    for hook in hooks:
        hook.remove()


if __name__ == "__main__":
    main()
