"""Loss and backward of one group on a Qwen3.5, whose text layers are mostly of linear attention: three ways.

    OMP_NUM_THREADS=2 python benchmarks/hybrid.py [--json FILE] [--rounds 5] [--shapes vqa,wide,text]

`ours` runs the prompt once and starts each completion from the recurrent state after it; `plain` is the same loss on a
batch of G whole rows by transformers' own forward; TRL is its trainer's `_compute_loss` on the same batch. A model of
22 M parameters in fp32 with random weights, no checkpointing. The gradients of the three are first asserted equal; then
they run in turn, warm, and medians are compared.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from common import Machine, interleaved, load_shapes_processor, make_prompt
from harness import arguments, machine_of, parse, positive, run, versions
from learner import FIRST_WORD, SHAPES, TRL, Ours, gap, gradients
from learner import shapes as read_shapes
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from mm_grpo.learner.loss import LossInputs, PackTokens, pack_loss
from mm_grpo.learner.step_report import LossStatistics
from mm_grpo.types import Prompt

TEXT: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 48, "linear_value_head_dim": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True, "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 6, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 384, "num_position_embeddings": 1024,
}  # fmt: skip
DECAY = (0.02, 0.5)
"""Rates at which heads forget. As transformers draws them (up to 16) most forget within a token, and the gradients of
their rates are rounding on every side."""
TINY = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}


def make_hybrid(processor: Any, size: str, machine: Machine) -> Any:
    """A Qwen3.5 with random weights and the special tokens of the shapes recipe's tokenizer."""
    ids = processor.config
    text = TEXT | (TINY if size == "tiny" else {})
    vision = VISION | ({"depth": 2} if size == "tiny" else {})
    config = Qwen3_5Config(
        text_config=text | {
            "bos_token_id": 0, "eos_token_id": ids.text_config.eos_token_id, "pad_token_id": 0,
        },
        vision_config=vision,
        image_token_id=ids.image_token_id, video_token_id=ids.video_token_id,
        vision_start_token_id=ids.vision_start_token_id, vision_end_token_id=ids.vision_end_token_id,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration._from_config(config, dtype=machine.dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            with torch.no_grad():
                parameter.uniform_(*DECAY).log_()
    return model.to(machine.device).train()


class Plain:
    """The loss of `Ours` on a batch of G whole rows."""

    def __init__(self, model: Any, ours: Ours, prompt: Prompt, answers: Tensor) -> None:
        self.model, self.ours = model, ours
        ids = torch.cat([torch.tensor([prompt.token_ids] * len(answers)), answers], 1)
        self.inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
        self.inputs |= {k: torch.cat([v] * len(answers)) for k, v in prompt.vision.items()}
        self.inputs = {k: v.to(model.device) for k, v in self.inputs.items()}
        self.answers, self.start = answers.to(model.device), len(prompt.token_ids)

    def __call__(self) -> None:
        hidden = self.model.model(**self.inputs, use_cache=False).last_hidden_state[:, self.start - 1 : -1]
        logp_all = self.model.lm_head(hidden).log_softmax(-1)
        logp = logp_all.gather(2, self.answers[..., None])[..., 0].flatten()
        entropy = -(logp_all.exp() * logp_all).sum(-1).flatten().detach()
        old = logp.detach()
        index = self.ours.pack.completion_index
        tokens = PackTokens(index, logp, entropy, old, old, None)
        inputs: LossInputs = self.ours.inputs
        pack_loss(self.ours.config, inputs, tokens, LossStatistics()).backward()


def measure(
    name: str, rounds: int, size: str, machine: Machine, shape: tuple[int, int, int]
) -> dict[str, Any]:
    count, tokens, side = shape
    processor = load_shapes_processor()
    prompt = make_prompt(processor, side)
    generator = torch.Generator().manual_seed(2)
    answers = torch.randint(FIRST_WORD, TEXT["vocab_size"], (count, tokens), generator=generator)
    advantages = torch.randn(count, generator=generator)
    models = [make_hybrid(processor, size, machine) for _ in range(3)]
    ours = Ours(models[0], processor, prompt, answers, advantages)
    plain = Plain(models[1], ours, prompt, answers)

    def forget() -> None:
        for model in models:
            model.zero_grad(set_to_none=True)

    with tempfile.TemporaryDirectory() as folder:
        theirs = TRL(models[2], processor, prompt, answers, advantages, folder)
        found = gradients(models[0], ours)
        gaps = [
            gap(found, gradients(m, run), machine.dtype)
            for m, run in zip(models[1:], (plain, theirs), strict=True)
        ]
        seconds = interleaved(
            {"ours": ours, "plain": plain, "trl": theirs}, rounds, machine, warm=0, before=forget
        )
    return {
        "shape": name, "size": size, "G": count, "T": tokens, "L": len(prompt.token_ids),
        "kind": "image" if side else "text",
        **{f"seconds_{side_}": value for side_, value in seconds.items()},
        "plain_ratio": seconds["plain"] / seconds["ours"], "trl_ratio": seconds["trl"] / seconds["ours"],
        "gradient_gap": max(gaps),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="timed runs of each side")
    parser.add_argument(
        "--shapes", type=read_shapes, default="vqa,wide,text", help=f"of {', '.join(SHAPES)}, or GxTxSIDE"
    )
    parser.add_argument("--size", default="22m", choices=("tiny", "22m"))
    args = parse(parser, argv, "trl")
    machine = machine_of(args)

    def case(name: str) -> dict[str, Any]:
        return measure(name, args.rounds, args.size, machine, args.shapes[name])

    run("hybrid", args.shapes, case, args, versions(machine, "trl"))


if __name__ == "__main__":
    main()
