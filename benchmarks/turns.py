"""A whole step of a run of two turns, generation and update, against a plain trainer that shares nothing.

    OMP_NUM_THREADS=2 python benchmarks/turns.py [--json FILE] [--rounds 3] [--sides 84,112,224,448]

G conversations about one picture: T tokens, a picture that a tool shows (another one in each conversation, as with
`zoom`), T tokens more. A Qwen2.5-VL of 24 M parameters in fp32 unless --size says otherwise. Before anything is timed
the gradients of both sides on the same conversations are asserted equal. Then the sides make whole steps in turn:

    ours     the turn loop over the embedded engine, then the learner's update in shared-prefix packs
    batched  transformers' `generate` on a batch of G for each turn, which prefills all that came before anew and
             encodes its images anew, then one forward and backward of G rows, clipping and AdamW
    alone    the same, but one conversation after the other

Tokens are forced: nothing ends a turn before T tokens, and every first turn calls the tool. All rows of the plain side
are of one length, so it pays for no padding.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from common import BASE, SIZES, Machine, interleaved, load_shapes_processor, make_model
from harness import arguments, parse, positive, positives, run, versions
from learner import gap
from PIL import Image
from torch import Tensor
from transformers import GenerationConfig
from workloads import NEVER, RATE

from mm_grpo import GRPOConfig
from mm_grpo.environments.toolbox import Toolbox
from mm_grpo.learner.learner import Learner
from mm_grpo.rollout.engine import Follows, Request, Sampling, requests_for
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.rollout.turns import TurnLoop
from mm_grpo.types import Completion, Group, Prompt, Sample

CPU = Machine(torch.device("cpu"), torch.float32)


@cache
def noise(side: int, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(
        torch.randint(0, 256, (side, side, 3), generator=generator).numpy().astype("uint8")
    )


class Calling:
    """An engine that samples `tokens` tokens, and says of a first turn that it calls the tool."""

    def __init__(self, engine: TransformersEngine, tokens: int, count: int) -> None:
        self.engine, self.tokens, self.count = engine, tokens, count
        self.processor: Any = engine.processor

    def stream(self) -> CallingStream:
        return CallingStream(self)


class CallingStream:
    def __init__(self, owner: Calling) -> None:
        self.owner, self.inner = owner, owner.engine.stream()
        self.calls: dict[int, bool] = {}

    @property
    def unfinished(self) -> int:
        return self.inner.unfinished

    def add_request(self, request: Request, follows: Follows | None = None) -> int:
        sampling = replace(request.sampling, max_tokens=self.owner.tokens)
        number = self.inner.add_request(replace(request, sampling=sampling), follows)
        self.calls[number] = follows is None
        return number

    def step(self) -> list[tuple[int, Completion]]:
        processor = self.owner.processor
        kept, processor.stop_token_ids = processor.stop_token_ids, frozenset({NEVER})
        try:
            done = self.inner.step()
        finally:  # the chat template's own end of a turn is looked for elsewhere
            processor.stop_token_ids = kept
        return [
            (
                number,
                replace(c, text=self._text(c.seed) if self.calls[number] else "done", finish_reason="stop"),
            )
            for number, c in done
        ]

    def _text(self, seed: int) -> str:
        call = {"name": "look", "arguments": {"number": seed % self.owner.count}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    def release(self, number: int) -> None:
        self.inner.release(number)

    def close(self) -> None:
        self.inner.close()

    def __enter__(self) -> CallingStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Work:
    """What both sides are asked: one prompt, G conversations of two turns, AdamW on all weights."""

    def __init__(self, size: str, count: int, tokens: int, side: int, shown: int) -> None:
        self.count, self.tokens, self.shown = count, tokens, shown
        self.processor = load_shapes_processor()
        self.model, self.their_model = (make_model(self.processor, size, CPU) for _ in range(2))
        parts = [{"type": "image"}, {"type": "text", "text": "What is written in the corner?"}]
        self.sample = Sample("row", [{"role": "user", "content": parts}], (noise(side, 0),))
        self.advantages = torch.linspace(-1, 1, count, dtype=torch.float64)
        self.config = GRPOConfig.from_dict(
            {
                "model": {"path": str(BASE), "device": "cpu"},
                "rollout": {
                    "prompts_per_step": 1, "num_generations": count, "max_turns": 2, "environment_workers": 0,
                    "max_completion_length": 4096,
                },
                "optim": {"learning_rate": RATE, "max_grad_norm": 1.0},
            }
        )  # fmt: skip

    def look(self, number: int) -> Image.Image:
        """Look closer.

        Args:
            number: Where.
        """
        return noise(self.shown, 1 + number)


class Ours:
    def __init__(self, work: Work) -> None:
        self.work, processor = work, work.processor
        calling: Any = Calling(TransformersEngine(work.model, processor), work.tokens, work.count)
        self.learner = Learner(work.model, processor, work.config, 1 << 20)
        toolbox = Toolbox(work.config, [work.look], None)
        self.plan = SeedPlan(0, 1, work.count, 1, 1 << 20, 2)
        self.loop = TurnLoop(work.config, processor, calling, toolbox, self.plan, lambda: 0)
        self.generate_seconds: list[float] = []
        self.step = 0

    def generate(self) -> Group:
        work = self.work
        self.step += 1
        prompt = work.processor.prompt(work.sample)
        requests = requests_for([prompt], [self.plan.group(self.step, 0)], Sampling(4096))
        done = tuple(self.loop.generate(requests))
        assert all(len(c.token_ids) == 2 * work.tokens and c.tail is not None for c in done)
        advantages = tuple(work.advantages.tolist())
        return Group(0, prompt, done, advantages, advantages)

    def __call__(self) -> None:
        start = time.perf_counter()
        group = self.generate()
        self.generate_seconds.append(time.perf_counter() - start)
        self.learner.update([group])


class Plain:
    """Each conversation by itself, or in batches of `batch`; nothing that was computed is used again."""

    def __init__(self, work: Work, batch: int) -> None:
        self.work, self.batch, self.model = work, batch, work.their_model
        self.generate_seconds: list[float] = []
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)
        self.how = GenerationConfig(
            max_new_tokens=work.tokens, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0,
            eos_token_id=None, suppress_tokens=sorted(work.processor.media_token_ids),
        )  # fmt: skip

    def inputs(
        self, rows: Sequence[Sequence[int]], images: Sequence[Sequence[Image.Image]]
    ) -> dict[str, Tensor]:
        """A batch by the model's own image processor, each picture of each row anew."""
        processor, ids = self.work.processor, torch.tensor([list(row) for row in rows])
        made = processor.hf.image_processor(images=[i for row in images for i in row], return_tensors="pt")
        kinds = (ids == processor.image_token_id).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **made}

    def generated(self) -> list[tuple[list[int], list[Image.Image], list[bool]]]:
        """Of each conversation all ids, its images, and which tokens after the prompt were sampled."""
        work, processor, found = self.work, self.work.processor, []
        for first in range(0, work.count, self.batch):
            numbers = range(first, min(first + self.batch, work.count))
            prompts = [processor.prompt(work.sample) for _ in numbers]
            rows = [list(prompt.token_ids) for prompt in prompts]
            length = len(rows[0])
            images = [list(prompt.engine_prompt.images) for prompt in prompts]
            rows = self._continued(rows, images)
            for row, own, number in zip(rows, images, numbers, strict=True):
                picture = processor.picture(work.look(number), row="row")
                observed = processor.observation([[picture.image]], work.sample)
                row += processor._spliced(observed, [picture.token_ids])
                own.append(picture.image)
            seen = len(rows[0]) - length - work.tokens
            rows = self._continued(rows, images)
            sampled = [True] * work.tokens + [False] * seen + [True] * work.tokens
            found += [(row, own, sampled) for row, own in zip(rows, images, strict=True)]
        return found

    def _continued(self, rows: list[list[int]], images: list[list[Image.Image]]) -> list[list[int]]:
        self.model.eval()
        with torch.no_grad():
            made = self.model.generate(**self.inputs(rows, images), generation_config=self.how)
        self.model.train()
        return made.tolist()

    def learn(self, conversations: Sequence[tuple[list[int], list[Image.Image], list[bool]]]) -> None:
        """Forward and backward of the loss of all, a mean over tokens."""
        work = self.work
        for first in range(0, work.count, self.batch):
            own = conversations[first : first + self.batch]
            run = len(own[0][2])
            inputs = self.inputs([ids for ids, _, _ in own], [images for _, images, _ in own])
            logits = self.model(**inputs, use_cache=False, logits_to_keep=run + 1).logits[:, :-1]
            logits[..., sorted(work.processor.media_token_ids)] = -1e9
            chosen = inputs["input_ids"][:, -run:, None]
            logp = logits.gather(-1, chosen)[..., 0] - logits.logsumexp(-1)
            mask = torch.tensor([sampled for _, _, sampled in own]).float()
            advantages = work.advantages[first : first + self.batch, None].float()
            terms = -(logp - logp.detach()).exp() * advantages * mask
            (terms.sum() / (work.count * 2 * work.tokens)).backward()

    def __call__(self) -> None:
        start = time.perf_counter()
        conversations = self.generated()
        self.generate_seconds.append(time.perf_counter() - start)
        self.learn(conversations)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()


def plainly(prompt: Prompt, done: Completion) -> tuple[list[int], list[Image.Image], list[bool]]:
    """One of our conversations as the plain side has them."""
    assert done.tail is not None
    images = [*prompt.engine_prompt.images, *(picture.image for picture in done.tail.pictures)]
    return [*prompt.token_ids, *done.tail.token_ids], images, list(done.tail.sampled)


def gradients_of(learner: Learner, group: Group) -> dict[str, Tensor]:
    """The gradients of our update of a group, which is not made."""
    optimizer, found = learner.optimizer, dict[str, Tensor]()

    def noted() -> float:
        found.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})
        learner.model.zero_grad()
        return 1.0

    kept, optimizer._clip_and_update = optimizer._clip_and_update, noted  # type: ignore[method-assign]
    learner.update([group])
    optimizer._clip_and_update = kept  # type: ignore[method-assign]
    return found


def measure(size: str, count: int, tokens: int, side: int, shown: int, rounds: int) -> dict[str, Any]:
    """One size of observations: gradients compared, then steps timed."""
    work = Work(size, count, tokens, side, shown)
    ours, batched, alone = Ours(work), Plain(work, count), Plain(work, 1)
    group = ours.generate()
    batched.learn([plainly(group.prompt, c) for c in group.completions])
    theirs = {n: p.grad.clone() for n, p in work.their_model.named_parameters() if p.grad is not None}
    work.their_model.zero_grad()
    found = gap(gradients_of(ours.learner, group), theirs, torch.float32)
    del theirs
    sides: dict[str, Ours | Plain] = {"ours": ours, "batched": batched, "alone": alone}
    seconds = interleaved(sides, rounds, CPU, warm=1)
    row: dict[str, Any] = {
        "size": size, "G": count, "T": tokens, "side": side, "shown": shown,
        "L": len(group.prompt.token_ids), "tail": group.completions[0].run_length, "gradient_gap": found,
    }  # fmt: skip
    for name, side_run in sides.items():
        row |= {
            f"step_{name}": seconds[name], f"generate_{name}": statistics.median(side_run.generate_seconds[1:])
        }  # fmt: skip
        row[f"learner_{name}"] = row[f"step_{name}"] - row[f"generate_{name}"]
    for part in ("step", "generate", "learner"):
        for name in ("batched", "alone"):
            row[f"{part}_{name}_ratio"] = row[f"{part}_{name}"] / row[f"{part}_ours"]
    return row


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="timed steps of each side, after a warm-up"
    )
    parser.add_argument(
        "--sides", type=positives, default=[84, 112, 224, 448], help="of the tool's pictures, in pixels"
    )
    parser.add_argument("--side", type=positive, default=448, help="of the prompt's picture, in pixels")
    parser.add_argument("--generations", type=positive, default=8, help="G")
    parser.add_argument("--tokens", type=positive, default=32, help="T, tokens of a turn")
    parser.add_argument("--size", default="24m", choices=SIZES)
    args = parse(parser, argv)

    def case(shown: int) -> dict[str, Any]:
        return measure(args.size, args.generations, args.tokens, args.side, shown, args.rounds)

    run("turns", args.sides, case, args, versions())


if __name__ == "__main__":
    main()
