"""The small Qwen2.5-VL that a recipe for the CPU starts from: its parts, and the supervised steps that make it.

A recipe's make_base.py says what its base is shown; what all of them need is here: `make_tokenizer`, `make_processor`,
`make_model`, `encode` (conversations as model inputs with labels), `train` (supervised steps), `reply_shares` (how
likely replies are) and `base_arguments` (the options of the scripts). The result is an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers import Qwen2_5_VLForConditionalGeneration as Model
from transformers import Qwen2_5_VLProcessor as Processor

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
CHAT_TEMPLATE = (  # ChatML, as Qwen2.5-VL's, without its default system prompt
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
PATCH, MERGE = 14, 2
HEAD_DIM = 32  # of both towers; vLLM's CPU attention knows 32, 64, 80, ...
INIT = 0.1  # standard deviation of the first weights; the usual 0.02 suits wider models
MIN_PIXELS = (PATCH * MERGE) ** 2
Conversation = tuple[list[dict[str, Any]], list[Image], list[dict[str, Any]] | None]
"""Messages, the images at the size that the model gets, and the schemas of its tools."""


def make_tokenizer(texts: Iterable[str], pieces: Sequence[str] = ()) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer trained on these texts, with `pieces` as tokens of ordinary text besides."""
    blank = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer: Qwen2Tokenizer = blank.train_new_from_iterator(
        list(texts) * 2, vocab_size=2048, new_special_tokens=SPECIAL[1:], show_progress=False
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    return tokenizer


def make_processor(
    tokenizer: Qwen2Tokenizer,
    *,
    max_pixels: int,
    background: Sequence[int],
    chat_template: str = CHAT_TEMPLATE,
) -> Processor:
    """Qwen2.5-VL's processor. Pixels of the colour `background` (RGB, 0 to 255) become 0, which is learned sooner."""
    picture: dict[str, Any] = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": max_pixels},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "image_mean": [level / 255 for level in background],
        "image_std": [0.3] * 3,
    }
    return Processor(
        image_processor=Qwen2VLImageProcessor(**picture),
        video_processor=Qwen2VLVideoProcessor(**picture),
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


def make_model(tokenizer: Qwen2Tokenizer, seed: int, size: Mapping[str, int]) -> Model:
    """A Qwen2.5-VL at random; `size` has hidden, layers, vision_hidden and vision_layers."""
    ids: dict[str, Any] = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    heads = size["hidden"] // HEAD_DIM
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
            "hidden_size": size["hidden"],
            "intermediate_size": size["hidden"] * 3,
            "num_hidden_layers": size["layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 1024,
            "initializer_range": INIT,
            # Time, height, width: parts of HEAD_DIM / 2. The base is low because prompts are short.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": size["vision_layers"],
            "hidden_size": size["vision_hidden"],
            "out_hidden_size": size["hidden"],
            "intermediate_size": size["vision_hidden"] * 3,
            "num_heads": size["vision_hidden"] // HEAD_DIM,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "initializer_range": INIT,
            "window_size": 112,
            # Full attention everywhere: images up to 112 pixels are one window anyway.
            "fullatt_block_indexes": list(range(size["vision_layers"])),
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Model(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|endoftext|>"]
    )
    return model


def encode(processor: Processor, conversations: Sequence[Conversation]) -> dict[str, torch.Tensor]:
    """Return model inputs for a batch, with `labels`: -100 outside what the assistant writes and its end tokens."""
    texts = [processor.apply_chat_template(messages, tools=tools) for messages, _, tools in conversations]
    images = [image for _, pictures, _ in conversations for image in pictures]
    batch = dict(
        processor(text=texts, images=images or None, padding=True, padding_side="right", return_tensors="pt")
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
    model: Model, batch_at: Callable[[int], dict[str, torch.Tensor]], *, steps: int, rate: float
) -> None:
    """Train in fp32 on the batches of `batch_at(step)`: a short warm-up, then a cosine to `rate` / 20."""
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
        loss = model(**batch_at(step), use_cache=False).loss
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
def reply_shares(model: Model, batch: dict[str, torch.Tensor], eos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the last turns of a batch [rows], and if greedy decoding writes them."""
    labels = batch.pop("labels")
    for row in range(len(labels)):  # earlier turns are context
        ends = (labels[row] == eos).nonzero().flatten().tolist()
        if len(ends) > 1:
            labels[row, : ends[-2] + 1] = -100
    logprobs = model(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
    labels = labels[:, 1:]
    picked = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    greedy = ((logprobs.argmax(-1) == labels) | (labels < 0)).all(1)
    return (picked * (labels >= 0)).sum(1).exp(), greedy


def base_arguments(
    description: str, size: Mapping[str, int], *, steps: int, check_rows: int
) -> argparse.ArgumentParser:
    """Return a parser of the options of every make_base.py: output, steps, seed and the model's size."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=steps, help="supervised steps")
    parser.add_argument("--batch", type=int, default=32, help="lessons per step")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the lessons")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--check-rows", type=int, default=check_rows, help="held-out rows for the closing figures"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; another number, other rounding"
    )
    for name, value in size.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser
