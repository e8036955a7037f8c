"""Makes the small Qwen2.5-VL that the zoom recipe starts from.

    python examples/zoom/make_base.py --out examples/zoom/base     # 1 CPU core, about 12 minutes

The base must see, and must write answers and calls of the tool `zoom` in the right form, but must not know when and
where to look. It is trained on scenes of the patterns task's train split, at the size that `--max-pixels` leaves of
them, in four kinds of lessons:

(a) with the tool, a call with one of the nine cells' boxes, drawn at random, whichever cell is framed; the tool's
    answer, the cut at full size; and the pattern in that cut, which is right about the cut, not about the question;
(b) with the tool, an answer drawn at random, as often as (a);
(c) without the tool, an answer drawn at random;
(d) "Which cell is in the frame?" with its place in words, "top left", and in a short second stage, in place of that,
    "Where is the frame?" with its box in numbers: what to see in the whole picture.

That a question is answered by looking into the framed cell is never shown: finding it is what GRPO is for. What lands
in `--out` is an ordinary Hugging Face folder. The model itself is built as that of examples/shapes. The last lines
printed say how well the base sees, and how evenly it guesses and looks.
"""

from __future__ import annotations

import argparse
import math
import random
import runpy
import time
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from tokenizers import AddedToken
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2_5_VLProcessor as Processor
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from transformers.utils.chat_template_utils import get_json_schema

from mm_grpo.data.patterns import (
    COLUMNS,
    CUTS,
    PAPER,
    PATTERNS,
    QUESTION,
    ROWS,
    SIDE,
    Scene,
    bbox,
    place,
    render,
    scene,
)
from mm_grpo.environments.builtins import Zoom
from mm_grpo.processors.image_size import resize_to
from mm_grpo.processors.qwen_vl import fixed_size

SHAPES = runpy.run_path(str(Path(__file__).parents[1] / "shapes" / "make_base.py"))
SPECIAL, PATCH, MERGE = SHAPES["SPECIAL"], SHAPES["PATCH"], SHAPES["MERGE"]
SIZE = {"hidden": 128, "layers": 3, "vision_hidden": 96, "vision_layers": 3}
MIN_PIXELS, MAX_PIXELS = (PATCH * MERGE) ** 2, 84 * 84

OPENING, CLOSING = '<tool_call>\n{"name": "zoom", "arguments": {"bbox": [', "]}}\n</tool_call>"
# Tokens of the vocabulary that are text, as <tool_call> is in Qwen's own tokenizers: a call is 9 of them.
PIECES = (OPENING, CLOSING, ", ", *dict.fromkeys(str(at) for cut in CUTS for at in cut if at))
WHICH, WHERE = "Which cell is in the frame?", "Where is the frame?"
CHAT_TEMPLATE = (  # ChatML; tools by name and arguments, their answers as Qwen2.5's template shows them
    "{%- if tools %}{{ '<|im_start|>system\nTools:' }}{%- for tool in tools %}{{ ' ' + tool.function.name + '(' }}"
    "{{- tool.function.parameters.properties | join(', ') + ')' }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- set answer = message.role == 'tool' %}"
    "{{- '<|im_start|>' + ('user\n<tool_response>' if answer else message.role) + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '\n</tool_response>' if answer else '' }}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
BOX_SEED = 9  # added to the seed for the lessons of the second stage
Conversation = tuple[list[dict[str, Any]], bool, list[Image]]
"""Messages, whether the tool is there, and the images at the size that the model gets."""


def make_processor() -> Processor:
    """A byte-level BPE tokenizer of the task's words and the pieces of a call, and Qwen2.5-VL's image processing."""
    words = [*PATTERNS, *COLUMNS, *ROWS, "user", "assistant", "system", "zoom", "bbox", "image", "\n"]
    texts = [*words, *(f" {word}" for word in words), QUESTION, WHICH, "Tools: zoom(bbox, image)"]
    texts += ["<tool_response>\n", "\n</tool_response>"]
    blank = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer = blank.train_new_from_iterator(
        texts * 2, vocab_size=2048, new_special_tokens=SPECIAL[1:], show_progress=False
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in PIECES])
    picture: dict[str, Any] = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": 4 * MAX_PIXELS},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "image_mean": [level / 255 for level in PAPER],
        "image_std": [0.3] * 3,
    }
    return Processor(
        image_processor=Qwen2VLImageProcessor(**picture),
        video_processor=Qwen2VLVideoProcessor(**picture),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def call(cell: int) -> str:
    """The text of a call that looks at a cell."""
    return OPENING + numbers(cell) + CLOSING


def numbers(cell: int) -> str:
    return ", ".join(map(str, bbox(cell)))


def small(image: Image, max_pixels: int) -> Image:
    """An image as the model gets it."""
    limits = {"factor": PATCH * MERGE, "min_pixels": MIN_PIXELS, "max_pixels": max_pixels}
    return resize_to(image, fixed_size(image.height, image.width, **limits))


def asked(question: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def looked(shown: Scene, cell: int, max_pixels: int) -> Conversation:
    """The question, a look at a cell, and the pattern that is seen in it."""
    picture, zoom = render(shown), Zoom()
    zoom.reset([picture])
    images = [small(picture, max_pixels), small(zoom.zoom(bbox(cell)), max_pixels)]
    answer = {"role": "tool", "content": [{"type": "image"}]}
    return [asked(), said(call(cell)), answer, said(shown.cells[cell].pattern)], True, images


def lesson(index: int, seed: int, max_pixels: int, *, boxes: bool) -> Conversation:
    """One of the four kinds of lessons; `boxes` says in which stage."""
    rng = random.Random(f"zoom base/{seed}/{index}")
    shown = scene(split="train", index=index, seed=seed)
    kind = rng.random()
    if kind < 0.35:
        return looked(shown, rng.randrange(SIDE**2), max_pixels)
    images = [small(render(shown), max_pixels)]
    if kind < 0.8:
        return [asked(), said(rng.choice(PATTERNS))], kind < 0.7, images
    if boxes:
        return [asked(WHERE), said(numbers(shown.framed))], False, images
    return [asked(WHICH), said(place(shown.framed))], False, images


def encode(processor: Processor, conversations: list[Conversation]) -> dict[str, torch.Tensor]:
    """Model inputs for a batch, with `labels`: -100 outside what the assistant says and its end tokens."""
    schema = get_json_schema(Zoom().zoom)
    texts = [
        processor.apply_chat_template(messages, tools=[schema] if tool else None)
        for messages, tool, _ in conversations
    ]
    images = [image for _, _, own in conversations for image in own]
    batch = dict(
        processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    )
    head = processor.tokenizer("<|im_start|>assistant\n").input_ids
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        for at in range(len(ids)):
            if ids[at : at + len(head)] == head:
                start = at + len(head)
                end = ids.index(processor.tokenizer.eos_token_id, start) + 1
                batch["labels"][row, start:end] = batch["input_ids"][row, start:end]
    return batch


def train(
    model: Model,
    processor: Processor,
    *,
    steps: int,
    rate: float,
    seed: int,
    batch_size: int,
    max_pixels: int,
    boxes: bool,
) -> None:
    """Supervised steps of one stage in fp32: a short warm-up, then a cosine to a twentieth of the rate."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    warmup = min(100, max(1, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        ),
    )
    started = time.perf_counter()
    for step in range(steps):
        rows = range(step * batch_size, (step + 1) * batch_size)
        batch = encode(processor, [lesson(row, seed, max_pixels, boxes=boxes) for row in rows])
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    model.eval()


@torch.inference_mode()
def shares(
    model: Model, processor: Processor, conversations: list[Conversation]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the assistant's last turns, [rows], and whether greedy decoding writes it."""
    batch = encode(processor, conversations)
    labels = batch.pop("labels")
    for row in range(len(labels)):  # an earlier turn was said by somebody
        ends = (labels[row] == processor.tokenizer.eos_token_id).nonzero().flatten().tolist()
        if len(ends) > 1:
            labels[row, : ends[-2] + 1] = -100
    logprobs = model(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
    labels = labels[:, 1:]
    picked = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    greedy = ((logprobs.argmax(-1) == labels) | (labels < 0)).all(1)
    return (picked * (labels >= 0)).sum(1).exp(), greedy


def figures(model: Model, processor: Processor, *, rows: int, max_pixels: int) -> dict[str, float]:
    """What the base sees and does, on held-out scenes.

    `seen in a cut`, `seen in the whole`: the share of patterns in cuts, and of places of the frame, that greedy
    decoding names right. `calls`: the probability that a sampled first turn is one of the nine calls; `answers`: that
    it is one of the answers. `calls at the frame`, `answers that are right`: the share of those that are.
    """
    scenes = [
        scene(split="heldout", index=i, answer=PATTERNS[i % len(PATTERNS)], framed=i % SIDE**2)
        for i in range(rows)
    ]
    pictures = [small(render(shown), max_pixels) for shown in scenes]

    def turns(text: str, tool: bool) -> torch.Tensor:
        return shares(model, processor, [([asked(), said(text)], tool, [one]) for one in pictures])[0]

    at = torch.arange(rows)
    calls = torch.stack([turns(call(cell), True) for cell in range(SIDE**2)], 1)
    answers = torch.stack([turns(pattern, True) for pattern in PATTERNS], 1)
    framed, right = (
        torch.tensor(each)
        for each in ([s.framed for s in scenes], [PATTERNS.index(s.answer) for s in scenes])
    )
    wholes = [
        ([asked(WHERE), said(numbers(s.framed))], False, [one])
        for s, one in zip(scenes, pictures, strict=True)
    ]
    cuts = [looked(shown, number % SIDE**2, max_pixels) for number, shown in enumerate(scenes)]
    return {
        "seen in a cut": shares(model, processor, cuts)[1].float().mean().item(),
        "seen in the whole": shares(model, processor, wholes)[1].float().mean().item(),
        "calls": calls.sum(1).mean().item(),
        "answers": answers.sum(1).mean().item(),
        "calls at the frame": (calls[at, framed].sum() / calls.sum()).item(),
        "answers that are right": (answers[at, right].sum() / answers.sum()).item(),
        "answers without the tool": sum(turns(pattern, False) for pattern in PATTERNS).mean().item(),  # type: ignore[union-attr]
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Makes the small Qwen2.5-VL that the zoom recipe starts from."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=1600, help="supervised steps")
    parser.add_argument("--box-steps", type=int, default=300, help="those of the second stage")
    parser.add_argument("--batch", type=int, default=32, help="lessons per step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the lessons")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--max-pixels", type=int, default=MAX_PIXELS, help="data.max_pixels of the recipe")
    parser.add_argument("--check-rows", type=int, default=180, help="held-out rows for the closing figures")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; another number, other rounding"
    )
    for name, value in SIZE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    processor = make_processor()
    size = {name: getattr(args, name) for name in SIZE}
    model = SHAPES["make_model"](processor.tokenizer, args.seed, size)
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")
    shared = {"batch_size": args.batch, "max_pixels": args.max_pixels}
    rate, seed = args.learning_rate, args.seed
    train(model, processor, steps=args.steps, rate=rate, seed=seed, boxes=False, **shared)
    train(model, processor, steps=args.box_steps, rate=rate / 2, seed=seed + BOX_SEED, boxes=True, **shared)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    for name, value in figures(model, processor, rows=args.check_rows, max_pixels=args.max_pixels).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
