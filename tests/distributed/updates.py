"""One learner step of a named case, in this process of however many there are.

Run as a script it takes the cases of a JSON file one after the other and writes what came of each to
FOLDER/CASE-RANK.pt: the change of every weight, the metrics, the records, the order of the gradients.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import tiny
from helpers.configs import merged, small_config
from transformers import AutoModelForImageTextToText

from mm_grpo.config import GRPOConfig, LoRAConfig, ModelConfig
from mm_grpo.distributed import ranks as distributed
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.learner import optimizer, zero
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.lora import add_adapters
from mm_grpo.learner.model import load_model
from mm_grpo.learner.shards import gathered
from mm_grpo.processors.base import Processor, load_processor
from mm_grpo.types import Completion, Group, Turn

# What the rows of a set look at, by slot: t is text alone, i an image, m two images, v a video, b an image and a video.
SETS: dict[str, str] = {
    "flat": "iiii",  # 4 groups of 4 completions of equal length: 1 pack of 16 or 16 packs of 1
    "even": "mtii",
    "uneven": "mtiti",  # 5 groups: with 2 processes 3 and 2, with 4 one of them has 2
    "apart": "itit",  # with 2 processes all images on one and all text on the other
    "videos": "btvi",  # with 2 processes all videos on one
    "text": "t",
    "few": "i",  # one group: with 2 processes one of them has nothing
    "hole": "m-ti",  # a dropped row leaves slot 1 empty
}
GENERATIONS = 4


def make_groups(processor: Processor, rows: str, advantages: str, scale: float) -> list[Group]:
    """The groups of a set; `advantages` is all, first (one completion alone), odd (slots 1, 3, ...) or none. `scale`
    makes SGD's update large beside the rounding of the weights that it is added to; AdamW's is large anyway, and its
    elements would only become signs."""
    images = {
        "i": (tiny.picture(3),),
        "m": (tiny.picture(1), tiny.picture(2, 56, 112)),
        "b": (tiny.picture(4),),
    }
    videos = {"v": (tiny.video(5, 6, 56, 56),), "b": (tiny.video(6, 4, 84, 56),)}
    generator = torch.Generator().manual_seed(7)
    groups = []
    for slot, kind in enumerate(rows):
        lengths = torch.randint(1, 9, (GENERATIONS,), generator=generator).tolist()
        if rows == SETS["flat"]:
            lengths = [8] * GENERATIONS
        drawn = [torch.randint(10, 270, (n,), generator=generator).tolist() for n in lengths]
        tokens = [tuple(t if t not in processor.media_token_ids else 100 for t in ids) for ids in drawn]
        spread = (torch.rand(GENERATIONS, generator=generator, dtype=torch.float64) * 2 - 1).tolist()
        live = {
            "all": [True] * GENERATIONS,
            "first": [slot == 0 and g == 0 for g in range(GENERATIONS)],
            "odd": [slot % 2 == 1] * GENERATIONS,
            "none": [False] * GENERATIONS,
        }[advantages]
        if kind == "-":
            continue
        media = images.get(kind, ()), videos.get(kind, ())
        sample = tiny.sample(f"r:{slot}", "what is it"[: 4 + slot], *media, box=[4, 4, 60, 40])
        ends = ["length" if len(ids) == 8 else "stop" for ids in tokens]
        completions = tuple(
            Completion(ids, (-5.0,) * len(ids), "", end, slot * GENERATIONS + g)
            for g, (ids, end) in enumerate(zip(tokens, ends, strict=True))
        )
        weights = tuple(scale * a if on else 0.0 for a, on in zip(spread, live, strict=True))
        groups.append(Group(slot, processor.prompt(sample), completions, (0.0,) * GENERATIONS, weights))
    return groups


def in_turns(group: Group) -> Group:
    """The group with completions of two turns, where they have tokens for it, of advantages that differ in sign."""
    done, advantages = [], []
    for completion, advantage in zip(group.completions, group.advantages, strict=True):
        first = len(completion.token_ids) // 2
        lengths = [first, len(completion.token_ids) - first] if first else [len(completion.token_ids)]
        turns = tuple(Turn("assistant", "", n, seed=i) for i, n in enumerate(lengths))
        done.append(replace(completion, turns=turns))
        advantages.append(tuple(advantage * (-2) ** t for t in range(len(turns))))
    return replace(group, completions=tuple(done), turn_advantages=tuple(advantages))


def config_of(path: Path, case: Mapping[str, Any]) -> GRPOConfig:
    """`optimizer` is sgd (at rate 1) or adamw; `config` are sections laid over what is here."""
    prompts = len(SETS[case.get("set", "even")].ljust(4))
    rate = 1.0 if case.get("optimizer") == "sgd" else 0.1
    values = {
        "rollout": {"prompts_per_step": prompts, "num_generations": GENERATIONS, "max_completion_length": 8},
        "optim": {"learning_rate": rate, "adam_epsilon": 1e-4, "max_grad_norm": 0.0},
        "run": {"max_steps": 10},
    }
    return small_config(path, **merged(values, case.get("config", {})))


@functools.cache
def loaded(path: Path, dtype: torch.dtype) -> tuple[Any, Processor]:
    """The model, which is to be copied, and its processor."""
    return AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).train(), load_processor(str(path))


def build(path: Path, case: Mapping[str, Any], ranks: Ranks) -> tuple[Learner, list[Group]]:
    """The learner of a case, and the groups that are this process's."""
    kept, processor = loaded(path, getattr(torch, case.get("dtype", "float32")))
    model = copy.deepcopy(kept)
    if case.get("sharp"):  # answers that depend on the view of their image
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(3 if "self_attn" in name and weight.dim() > 1 else 1)
    if "trains" in case:
        for name, weight in model.named_parameters():
            weight.requires_grad_(re.search(case["trains"], name) is not None)
    if "lora" in case:  # other random numbers on every process: the first one's count
        torch.manual_seed(ranks.rank)
        lora = LoRAConfig(rank=case["lora"], vision=case.get("vision", False))
        if case.get("quantization"):
            options = {"quantization": "nf4", "device": "cpu", "dtype": "float32"}
            model = load_model(ModelConfig(path=str(path), lora=lora, **options), processor.family)
        else:
            add_adapters(model, lora, processor.family)
    scale = 500.0 if case.get("optimizer") == "sgd" else 1.0
    groups = make_groups(processor, SETS[case.get("set", "even")], case.get("advantages", "all"), scale)
    if case.get("turns"):
        groups = [in_turns(group) for group in groups]
    config = config_of(path, case)
    if (packs := case.get("packs")) != "one":  # "many" are as small as they can be
        tokens = (max(len(g.prompt.token_ids) for g in groups) + 8) * (1 if packs == "many" else 2)
        # a pack holds each row with the masked images too, and longer ones of another view
        terms = config.algorithm
        tokens *= 2 if terms.perception_coef or terms.twin_view else 1
        config = config.with_values({"optim.max_tokens_per_pack": tokens})
    adamw = optimizer.adamw
    if case.get("optimizer") == "sgd":
        optimizer.adamw = lambda params, *_, **__: torch.optim.SGD(params, lr=1.0)
    zero.BUCKET = 30_000  # less than the model, more and less than its tensors
    try:
        learner = Learner(model, processor, config, 10, ranks)
    finally:
        optimizer.adamw = adamw
    return learner, [g for g in groups if g.slot % ranks.world == ranks.rank]


def run(path: Path, case: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The step of a case: `update` by parameter, `metrics`, `records`, `order` of gradients by backward, and whether
    the optimizer `reads_order`."""
    learner, groups = build(path, case, ranks)
    before = weights_of(learner)
    order: list[list[str]] = []
    for name, parameter in learner.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order[-1].append(name))
    learner.optimizer.backward = _noted(learner.optimizer, order, case.get("fault"))  # type: ignore[method-assign]
    report = learner.update(groups)
    update = {name: weight - before[name] for name, weight in weights_of(learner).items()}
    close(learner)
    return {
        "update": update,
        "metrics": report.metrics,
        "records": [r.__dict__ for r in report.updates],
        "order": order,
        "reads_order": learner.optimizer.reads_order,
    }


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: gathered(p.detach()).float().clone() for n, p in learner.model.named_parameters()}


def close(learner: Learner) -> None:
    if isinstance(learner.optimizer, zero.ZeroOptimizer):
        learner.optimizer.engine.destroy()


def _noted(kept: Any, order: list[list[str]], fault: str | None) -> Any:
    """The optimizer's `backward`, which notes each call; `fault` is a way to get the boundary wrong."""
    backward = kept.backward
    if fault == "unset":  # DeepSpeed's accumulation at 1 and a loop that never sets the boundary
        kept.engine.set_gradient_accumulation_boundary = lambda _: None

    def noted(loss: Any, *, last: bool) -> None:
        order.append([])
        backward(loss, last=last and fault != "never")

    return noted


def far(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest distance of two updates, per tensor and relative to what is wanted, and whose it is."""
    return max((float((got[n] - w).norm() / w.norm().clamp(min=1e-30)), n) for n, w in want.items())


def main(path: str, cases: str, folder: str) -> None:
    ranks = distributed.start("cpu", deadline=60.0)
    listed: Sequence[Mapping[str, Any]] = json.loads(Path(cases).read_text())
    for case in listed:
        result = run(Path(case.get("model", path)), case, ranks)
        torch.save(result, Path(folder) / f"{case['name']}-{ranks.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
