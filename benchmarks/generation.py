"""Sampling alone: our embedded engine against transformers' `generate` as TRL calls it.

    OMP_NUM_THREADS=2 python benchmarks/generation.py [--json FILE] [--rounds 5] [--workloads "24M, 448 px"]

P prompts with an image each, G completions of exactly T tokens (see workloads.py): one call of the engine's `generate`,
and one of TRL's `_generate_single_turn` with the prompts tokenized and the images processed, which is what its trainer
calls for the same step. The prompts' ids are asserted equal on both sides, and the tokens are counted. Both in one
process with the same number of threads, in turn; medians after a warm round. --json adds a sitting to those that the
file has of equal versions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Machine, interleaved
from harness import arguments, by_workload, parse, positive, run, versions
from workloads import NEVER, WORKLOADS, Workload, parts, trl_trainer

from mm_grpo.rollout.engine import Sampling, requests_for
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.types import Sample


def ours(work: Workload) -> tuple[Any, list[tuple[int, ...]]]:
    """A call of the engine, and the ids of its prompts."""
    model, processor, rows = parts(work)
    processor.stop_token_ids = frozenset({NEVER})
    prompts = [
        processor.prompt(Sample(str(i), row["prompt"], tuple(row["images"])))
        for i, row in enumerate(rows[: work.prompts])
    ]
    engine = TransformersEngine(model, processor)
    seeds = [range(i * work.generations, (i + 1) * work.generations) for i in range(work.prompts)]
    requests = requests_for(prompts, seeds, Sampling(work.tokens))

    def generate() -> list[int]:
        return [len(done.token_ids) for done in engine.generate(requests)]

    return generate, [prompt.token_ids for prompt in prompts]


def trl(work: Workload, folder: Path) -> tuple[Any, list[tuple[int, ...]]]:
    """TRL's call for the same prompts, each G times, and their ids."""
    trainer = trl_trainer(work, 1, folder, [])
    messages = []
    for row in parts(work)[2][: work.prompts]:
        images = iter(row["images"])
        content = [
            {"type": "image", "image": next(images)} if part["type"] == "image" else part
            for part in row["prompt"][0]["content"]
        ]
        messages += [[{"role": "user", "content": content}]] * work.generations
    ids, images, fields = trainer._tokenize_prompts(messages)

    def generate() -> list[int]:
        return [len(one) for one in trainer._generate_single_turn(ids, images, fields, work.generations)[0]]

    return generate, [tuple(one) for one in ids[:: work.generations]]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One workload: both sides in turn."""
    work = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        our_call, our_ids = ours(work)
        trl_call, trl_ids = trl(work, Path(folder))
        assert our_ids == trl_ids, "the two sides have other prompts"
        expected = [work.tokens] * (work.prompts * work.generations)

        def counted(call: Any) -> None:
            found = call()
            assert found == expected, f"completions of {found} tokens, not of {work.tokens}"

        runs = {"ours": lambda: counted(our_call), "trl": lambda: counted(trl_call)}
        seconds = interleaved(runs, rounds, Machine(torch.device("cpu"), torch.float32))
    tokens = work.prompts * work.generations * work.tokens
    return {
        "workload": name, "P": work.prompts, "G": work.generations, "T": work.tokens, "side": work.side,
        "L": len(our_ids[0]), "tokens": tokens,
        "seconds_ours": seconds["ours"], "seconds_trl": seconds["trl"],
        "rate_ours": tokens / seconds["ours"], "rate_trl": tokens / seconds["trl"],
        "ratio": seconds["trl"] / seconds["ours"],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--rounds", type=positive, default=5, help="timed calls of each side")
    names = ["shapes", "24M, 448 px"]
    parser.add_argument("--workloads", nargs="+", default=names, choices=WORKLOADS)
    args = parse(parser, argv, "trl")

    def case(name: str) -> dict[str, Any]:
        return measure(name, args.rounds)

    run("generation", args.workloads, case, args, versions(None, "trl"), summary=by_workload)


if __name__ == "__main__":
    main()
