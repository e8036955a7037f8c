"""One update of a group that fits 1, 2, 4, ... packs: its prompt run once for all of them, against once in each.

    OMP_NUM_THREADS=2 python benchmarks/spread.py [--json FILE] [--rounds 3] [--packs 1,2,4,8] [--frozen]
    python benchmarks/spread.py --device cuda --dtype bfloat16 --size 3b --side 1024 --tokens 512

`once` is what the learner does: the prompt's keys and values are kept for the packs, and one backward takes their
gradients through the prompt and its images. `again` puts the prompt and its images into each pack. Both make the
same update, which is asserted in float32. Counted are prompts and images that were run in the update.
"""

from __future__ import annotations

import argparse
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
from harness import arguments, machine_of, parse, positive, positives, run, versions

from mm_grpo import GRPOConfig
from mm_grpo.learner.learner import Learner
from mm_grpo.types import Group

FIRST_WORD = 300  # ids below are the tokenizer's own
SIDES = ("again", "once")


def make_group(processor: Any, words: int, args: argparse.Namespace) -> Group:
    generator = torch.Generator().manual_seed(3)
    shape = (args.generations, args.tokens)
    answers = torch.randint(FIRST_WORD, words, shape, generator=generator).tolist()
    completions = make_completions(answers)
    advantages = tuple(1.0 if g % 2 else -1.0 for g in range(args.generations))
    prompt = make_prompt(processor, args.side, words=args.words)
    return Group(0, prompt, completions, advantages, advantages)


def measure(packs: int, args: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """Updates of both kinds, with as many completions in a pack as make so many of it."""
    processor = load_shapes_processor(max(448, args.side) ** 2)
    group = make_group(processor, SIZES[args.size][0]["vocab_size"], args)
    length = len(group.prompt.token_ids)
    config = GRPOConfig.from_dict(
        {
            "model": {"path": str(BASE)},
            "rollout": {
                "prompts_per_step": 1, "num_generations": args.generations, "max_completion_length": args.tokens
            },
            "optim": {
                "learning_rate": 1e-5, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4,
                "max_tokens_per_pack": length + -(-args.generations // packs) * args.tokens,
            },
        }
    )  # fmt: skip
    learners, found = {}, dict[str, dict[str, float]]()
    for name in SIDES:
        model = make_model(processor, args.size, machine)
        processor.family.tower(model).requires_grad_(not args.frozen)
        learners[name] = Learner(model, processor, config, 100)
        learners[name].module.masks.apart = name == "once"

    def update(name: str) -> None:
        found[name] = learners[name].update([group]).metrics

    before = {n: p.detach().clone() for n, p in learners["once"].model.named_parameters()}
    for name in SIDES:  # the warm round
        update(name)
    if machine.dtype == torch.float32:
        assert_moved_alike(before, learners["once"].model, learners["again"].model)
    seconds = interleaved({name: partial(update, name) for name in SIDES}, args.rounds, machine, warm=0)
    counts = {
        f"{what}_{name}": found[name][f"learner/{metric}"]
        for what, metric in (("prompts", "prompts_run"), ("images", "images_encoded"), ("tokens", "tokens"))
        for name in SIDES
    }
    return {
        "packs": int(found["once"]["learner/packs"]), "size": args.size, "G": args.generations, "T": args.tokens,
        "L": length, "frozen": args.frozen, **{f"seconds_{name}": seconds[name] for name in SIDES}, **counts,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="timed updates of each side, after a warm-up"
    )
    parser.add_argument("--packs", type=positives, default="1,2,4,8", help="over how many packs")
    parser.add_argument(
        "--generations", type=positive, default=16, help="completions of the group, 2 or more"
    )
    parser.add_argument("--tokens", type=positive, default=64, help="tokens of a completion")
    parser.add_argument("--side", type=positive, default=448, help="pixels of the image's side")
    parser.add_argument("--words", type=positive, default=1, help="words of the prompt beside the question")
    parser.add_argument("--frozen", action="store_true", help="freeze the vision tower")
    parser.add_argument("--size", default="24m", choices=SIZES)
    args = parse(parser, argv)
    machine = machine_of(args)

    def case(packs: int) -> dict[str, Any]:
        return measure(packs, args, machine)

    run("spread", args.packs, case, args, versions(machine))


if __name__ == "__main__":
    main()
