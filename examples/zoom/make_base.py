"""Makes the small Qwen2.5-VL that the zoom recipe starts from.

    python examples/zoom/make_base.py --out examples/zoom/base     # 1 CPU core, about 12 minutes

The base must see, and must write answers and calls of the tool `zoom` in the right form, but must not know when to
look, and at which cell. It is trained on scenes of the patterns task's train split, at the size that `--max-pixels`
leaves of them, in four kinds of lessons:

(a) with the tool, a call with one of the nine cells' boxes, drawn at random, whichever cell is framed; the tool's
    answer, the cut at full size; and the pattern in that cut, which is right about the cut, not about the question;
(b) with the tool, an answer drawn at random, as often as (a);
(c) without the tool, an answer drawn at random;
(d) "Which cell is in the frame?" with its place in words, "top left", and in a short second stage, in place of that,
    "Where is the frame?" with its box in numbers: what to see in the whole picture.

The lessons never show that a look into the framed cell answers the question: GRPO has to find it. `--out` becomes an
ordinary Hugging Face folder. The last lines printed say how well the base sees, and how evenly it guesses and looks.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2_5_VLProcessor as Processor
from transformers.utils.chat_template_utils import get_json_schema

from mm_grpo.environments.builtins import Zoom
from mm_grpo.processors.image_size import resize_to
from mm_grpo.processors.qwen_vl import fixed_size

sys.path += [str(Path(__file__).parents[n]) for n in (0, 1)]  # the folders of the task and of small_bases.py
import small_bases
from patterns import (
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
from small_bases import MERGE, MIN_PIXELS, PATCH, base_arguments, make_model, make_tokenizer

SIZE = {"hidden": 128, "layers": 3, "vision_hidden": 96, "vision_layers": 3}
MAX_PIXELS = 84 * 84

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
    """Make a byte-level BPE tokenizer of the task's words and the pieces of a call, and an image processor."""
    words = [*PATTERNS, *COLUMNS, *ROWS, "user", "assistant", "system", "zoom", "bbox", "image", "\n"]
    texts = [*words, *(f" {word}" for word in words), QUESTION, WHICH, "Tools: zoom(bbox, image)"]
    texts += ["<tool_response>\n", "\n</tool_response>"]
    return small_bases.make_processor(
        make_tokenizer(texts, PIECES),
        max_pixels=4 * MAX_PIXELS,
        background=PAPER,
        chat_template=CHAT_TEMPLATE,
    )


def call(cell: int) -> str:
    """Return the text of a call that looks at a cell."""
    return OPENING + numbers(cell) + CLOSING


def numbers(cell: int) -> str:
    return ", ".join(map(str, bbox(cell)))


def small(image: Image, max_pixels: int) -> Image:
    """Return an image at the size that the model gets."""
    limits = {"factor": PATCH * MERGE, "min_pixels": MIN_PIXELS, "max_pixels": max_pixels}
    return resize_to(image, fixed_size(image.height, image.width, **limits))


def user_turn(question: str = QUESTION) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}


def assistant_turn(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def look(picture_scene: Scene, cell: int, max_pixels: int) -> Conversation:
    """Return the question, a look at a cell, and the pattern in it."""
    picture, zoom = render(picture_scene), Zoom()
    zoom.reset([picture])
    images = [small(picture, max_pixels), small(zoom.zoom(bbox(cell)), max_pixels)]
    answer = {"role": "tool", "content": [{"type": "image"}]}
    return (
        [user_turn(), assistant_turn(call(cell)), answer, assistant_turn(picture_scene.cells[cell].pattern)],
        True,
        images,
    )


def lesson(index: int, seed: int, max_pixels: int, *, boxes: bool) -> Conversation:
    """Draw a lesson of one of the four kinds; `boxes` is True in the second stage."""
    rng = random.Random(f"zoom base/{seed}/{index}")
    picture_scene = scene(split="train", index=index, seed=seed)
    kind = rng.random()
    if kind < 0.35:
        return look(picture_scene, rng.randrange(SIDE**2), max_pixels)
    images = [small(render(picture_scene), max_pixels)]
    if kind < 0.8:
        return [user_turn(), assistant_turn(rng.choice(PATTERNS))], kind < 0.7, images
    if boxes:
        return [user_turn(WHERE), assistant_turn(numbers(picture_scene.framed))], False, images
    return [user_turn(WHICH), assistant_turn(place(picture_scene.framed))], False, images


def encode(processor: Processor, conversations: list[Conversation]) -> dict[str, torch.Tensor]:
    """Return model inputs for a batch, with `labels`: -100 outside the assistant's turns and their end tokens."""
    schema = get_json_schema(Zoom().zoom)
    return small_bases.encode(
        processor,
        [(messages, images, [schema] if tool else None) for messages, tool, images in conversations],
    )


def shares(
    model: Model, processor: Processor, conversations: list[Conversation]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the assistant's last turns [rows], and if greedy decoding writes them."""
    return small_bases.reply_shares(model, encode(processor, conversations), processor.tokenizer.eos_token_id)


def figures(model: Model, processor: Processor, *, rows: int, max_pixels: int) -> dict[str, float]:
    """Measure how well the base sees and how evenly it acts, on held-out scenes.

    `seen in a cut`, `seen in the whole`: the share of patterns in cuts, and of places of the frame, that greedy
    decoding names right. `calls`: the probability that a sampled first turn is one of the nine calls; `answers`: that
    it is one of the answers. `calls at the frame`, `answers that are right`: the right share of these.
    """
    scenes = [
        scene(split="heldout", index=i, answer=PATTERNS[i % len(PATTERNS)], framed=i % SIDE**2)
        for i in range(rows)
    ]
    pictures = [small(render(picture_scene), max_pixels) for picture_scene in scenes]

    def turns(text: str, tool: bool) -> torch.Tensor:
        messages = [user_turn(), assistant_turn(text)]
        return shares(model, processor, [(messages, tool, [picture]) for picture in pictures])[0]

    at = torch.arange(rows)
    calls = torch.stack([turns(call(cell), True) for cell in range(SIDE**2)], 1)
    answers = torch.stack([turns(pattern, True) for pattern in PATTERNS], 1)
    framed, right = (
        torch.tensor(indices)
        for indices in ([s.framed for s in scenes], [PATTERNS.index(s.answer) for s in scenes])
    )
    wholes = [
        ([user_turn(WHERE), assistant_turn(numbers(s.framed))], False, [picture])
        for s, picture in zip(scenes, pictures, strict=True)
    ]
    cuts = [look(picture_scene, i % SIDE**2, max_pixels) for i, picture_scene in enumerate(scenes)]
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
    text = "Makes the small Qwen2.5-VL that the zoom recipe starts from."
    parser = base_arguments(text, SIZE, steps=1600, check_rows=180)
    parser.add_argument("--box-steps", type=int, default=300, help="supervised steps of the second stage")
    parser.add_argument("--max-pixels", type=int, default=MAX_PIXELS, help="data.max_pixels of the recipe")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    processor = make_processor()
    model = make_model(processor.tokenizer, args.seed, {name: getattr(args, name) for name in SIZE})
    print(f"{model.num_parameters() / 1e6:.2f} million parameters, {len(processor.tokenizer)} tokens")
    for boxes, steps, rate, seed in (
        (False, args.steps, args.learning_rate, args.seed),
        (True, args.box_steps, args.learning_rate / 2, args.seed + BOX_SEED),
    ):

        def batch_at(step: int, boxes: bool = boxes, seed: int = seed) -> dict[str, torch.Tensor]:
            rows = range(step * args.batch, (step + 1) * args.batch)
            return encode(processor, [lesson(row, seed, args.max_pixels, boxes=boxes) for row in rows])

        small_bases.train(model, batch_at, steps=steps, rate=rate)
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    for name, value in figures(model, processor, rows=args.check_rows, max_pixels=args.max_pixels).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    main()
