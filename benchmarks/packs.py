"""One update over completions of ragged lengths: groups packed behind one another, against a row for each group.

    OMP_NUM_THREADS=2 python benchmarks/packs.py [--json FILE] [--rounds 3] [--prompts 64] [--generations 8]
    python benchmarks/packs.py --device cuda --dtype bfloat16 --size 3b --pack 16384 --prompts 256
    OMP_NUM_THREADS=2 python benchmarks/packs.py --credit pgpo --prompts 8 --side 448 --words 8 --tokens 64

Words of the prompts and tokens of the completions are log-normal with a sigma of 0.8; every prompt has an image of
`--side` pixels, another one each. `apart` gives each group a row and each pack rows of like length, padded to the
longest, as most trainers do; `packed` is the plan of the learner. Both make the same update, which is asserted. `fill`
is the share of a pack's places that hold a token, `pack fill` that of what the packs might hold. With --credit the
sides are `packed` and, with that rule of algorithm.credit, `credited`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from common import (
    BASE,
    SIZES,
    Machine,
    assert_moved_alike,
    interleaved,
    load_shapes_processor,
    make_completions,
    make_model,
    make_prompt,
)
from harness import arguments, machine_of, parse, positive, run, versions

from mm_grpo import GRPOConfig
from mm_grpo.learner import learner as learner_module
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.pack import Item, plan
from mm_grpo.types import Group

SIGMA = 0.8
FIRST_WORD = 300  # ids below are the tokenizer's own
RATE = 1e-5


def make_groups(processor: Any, words: int, args: argparse.Namespace) -> list[Group]:
    """Groups whose prompts have `--words` words at the median and whose completions `--tokens` tokens."""
    generator = torch.Generator().manual_seed(3)

    def lengths(median: int, count: int) -> list[int]:
        drawn = median * (torch.randn(count, generator=generator) * SIGMA).exp()
        return [int(n) for n in drawn.clamp(1, 16 * median)]

    groups = []
    for slot, text in enumerate(lengths(args.words, args.prompts)):
        answers = [
            torch.randint(FIRST_WORD, words, (count,), generator=generator).tolist()
            for count in lengths(args.tokens, args.generations)
        ]
        completions = make_completions(answers)
        advantages = tuple(1.0 if g % 2 else -1.0 for g in range(args.generations))
        groups.append(
            Group(
                slot,
                make_prompt(processor, args.side, words=text, seed=slot),
                completions,
                advantages,
                advantages,
            )
        )
    return groups


def apart(
    items: Sequence[Item], max_tokens: int, multiple: int = 1, **options: Any
) -> list[list[list[Item]]]:
    """Packs of one group a row: the rows by length, each pack filled before the next is begun."""
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    rows = [row for group in groups.values() for pack in plan(group, max_tokens, multiple) for row in pack]

    def length(row: Sequence[Item]) -> int:
        tokens = len(row[0].prompt.token_ids) + sum(item.run_length for item in row)
        return -(-tokens // multiple) * multiple

    packs: list[list[list[Item]]] = []
    for row in sorted(rows, key=length, reverse=True):
        if packs and (len(packs[-1]) + 1) * length(packs[-1][0]) <= max_tokens:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def measure(args: argparse.Namespace, machine: Machine) -> list[dict[str, Any]]:
    processor = load_shapes_processor()
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE)},
            "rollout": {
                "prompts_per_step": args.prompts,
                "num_generations": args.generations,
                "max_completion_length": 16 * args.tokens,
            },
            "optim": {
                "learning_rate": RATE, "lr_scheduler_type": "constant", "max_tokens_per_pack": args.pack,
                "adam_epsilon": 1e-4,  # else a gradient of nearly 0 moves its parameter by its sign
            },
        }
    )  # fmt: skip
    groups = make_groups(processor, SIZES[args.size][0]["vocab_size"], args)
    learners, found = {}, dict[str, dict[str, float]]()
    for name in ("packed", "credited") if args.credit else ("apart", "packed"):
        own = config.with_values({"algorithm.credit": args.credit}) if name == "credited" else config
        learners[name] = Learner(make_model(processor, args.size, machine), processor, own, 100)

    def update(name: str) -> None:
        learner_module.plan = apart if name == "apart" else plan
        try:
            found[name] = learners[name].update(groups).metrics
        finally:
            learner_module.plan = plan

    before = {n: p.detach().clone() for n, p in learners["packed"].model.named_parameters()}
    for name in learners:  # the warm round
        update(name)
    if machine.dtype == torch.float32 and not args.credit:
        assert_moved_alike(before, learners["packed"].model, learners["apart"].model)
    seconds = interleaved({name: partial(update, name) for name in learners}, args.rounds, machine, warm=0)
    names = {"packs": "packs", "fill": "fill", "pack_fill": "pack_fill", "tokens": "tokens"}
    return [
        {
            "layout": name, "size": args.size, "P": args.prompts, "G": args.generations, "pack": args.pack,
            "seconds": seconds[name], **{k: float(found[name][f"learner/{v}"]) for k, v in names.items()},
        }
        for name in learners
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="timed updates of each side, after a warm-up"
    )
    parser.add_argument("--prompts", type=positive, default=64, help="groups of the update")
    parser.add_argument(
        "--generations", type=positive, default=8, help="completions of each group, 2 or more"
    )
    parser.add_argument("--words", type=positive, default=60, help="median words of a prompt")
    parser.add_argument("--tokens", type=positive, default=40, help="median tokens of a completion")
    parser.add_argument("--pack", type=positive, default=4096, help="optim.max_tokens_per_pack")
    parser.add_argument("--side", type=positive, default=112, help="side of an image, in pixels")
    parser.add_argument("--credit", choices=("pgpo", "vppo"), help="time credit by sight in place of packing")
    parser.add_argument("--size", default="24m", choices=SIZES)
    args = parse(parser, argv)
    machine = machine_of(args)

    def case(_: None) -> list[dict[str, Any]]:
        return measure(args, machine)

    run("packs", [None], case, args, versions(machine))


if __name__ == "__main__":
    main()
