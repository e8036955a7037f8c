"""Estimate of a run's device memory, from the sizes of its model, printed at the start.

Bytes of one process while the learner works, with b bytes to a number of the weights, N weights of which n are trained,
and w processes:

    weights         N b (adapters 4 bytes each), and as much again for a reference policy that is a model of its own
    gradients       4 n as fp32 sums; stage 2 shards them, 4 n / w, beside a bucket of up to 200 million (times 2 where
                    it overlaps: on a GPU). Stage 1 in bfloat16 holds 2 n besides, until they are added to the sums
    optimizer       8 n for AdamW's two means, and 4 n for fp32 masters where weights are bfloat16 or DeepSpeed
                    keeps them; both / w at stages 1 and 2; with offload they and the sums are in the host's memory
    activations     of one pack of T tokens; each layer keeps for backward, for each token,
                        2 (4 D + 2 b D)   two RMS norms: fp32 input, normed twice
                        5 b H             queries, keys and values for each of the heads, attention's output twice
                        4 b I             gate, up, its activation and their product
                    with D the hidden size, H heads times their width and I the inner size. A layer of linear attention
                    keeps, in place of 5 b H, as transformers' rule in torch runs it,
                        4 b C             the C channels of its convolution: before, padded, after, activated
                        4 h (8 k + 5 v + 5 c)  fp32, h heads of keys of width k and values of width v, in chunks
                                          of c = 64 tokens: both with their decays, and the chunk's matrices
                    With gradient checkpointing
                    each layer keeps its input, b D, and one layer at a time has all of it
    log-probs       T (4 + b) D for states and their fp32 gradients, V b D for the gradient of the head where it
                    is trained, and a tile (learner/logprobs.py)
    masks           where layers have sliding windows or images look ahead (Gemma 3), one dense mask of T^2 bytes for
                    each kind of layer, and b T^2 that attention makes of it for a layer: for every layer, or with
                    checkpointing for one
    vision          the pixels and the tower's activations over the patches of the images in one pack, each of
                    `data.max_pixels`, one (or `rollout.vllm.max_images`) to a prompt: as those of the text, with the
                    tower's own axes; of a frozen tower those of one layer
    kept prompt     where a group is larger than a pack, of its prompt of P tokens 2 (b + 4) K P in each layer that is
                    not linear: keys and values, each K wide, and the fp32 sums of their gradients. Checkpointing does
                    not make that less (learner/prompt_states.py). Its activations and its images' are counted above:
                    a pack's tokens are the prompt's and those of its completions
    vLLM            the share of the device that `rollout.vllm.gpu_memory_utilization` gives it, where it runs in
                    this process and does not sleep

Left out: what a tower's projector keeps, the states after a kept prompt in layers of linear attention, buffers of
attention kernels, the allocator's own losses, CUDA's context (about 0.5 GB), the embedded engine's cache
(preflight/estimate.py has it), and the copy of the state that checkpoints are written from, which
lies in the host's memory. Layers are taken for those of a Llama: dense, gated, with RMS norms. Against what autograd
keeps on a CPU the activations are 2 to 10 % too small, and a quarter with checkpointing; those of one Qwen3.5, whose
attention has norms and a gate besides, were an eighth too small.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.learner.logprobs import CHUNK_BYTES
from mm_grpo.learner.zero import BUCKET

CHUNK = 64
"""Tokens that a layer of linear attention takes at once."""
PROMPT = 1024
"""Tokens of a prompt whose length nothing bounds."""


@dataclass(frozen=True)
class VisionSizes:
    """The axes of a vision tower; `patch` is the side of a patch in pixels, `depth` how many numbers stand for one."""

    layers: int
    hidden: int
    inner: int
    patch: int
    depth: int = 3
    trained: bool = True

    @classmethod
    def of(cls, model: Any) -> VisionSizes | None:
        """Read a transformers model's sizes; None where its vision config names an axis otherwise."""
        vision = getattr(model.config, "vision_config", None)
        layers = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None)
        hidden = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
        inner = getattr(vision, "intermediate_size", None) or (hidden or 0) * getattr(vision, "mlp_ratio", 0)
        patch = getattr(vision, "patch_size", None)
        side = patch[0] if isinstance(patch, list | tuple) else patch
        if not (layers and hidden and inner and side):
            return None
        channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
        depth = channels * getattr(vision, "temporal_patch_size", 1)
        tower = [p for n, p in model.named_parameters() if re.search(r"\bvi(sual|sion)", n)]
        return cls(layers, hidden, int(inner), int(side), depth, any(p.requires_grad for p in tower))

    def patches(self, pixels: int) -> int:
        """Number of patches of images of so many pixels."""
        return -(-pixels // self.patch**2)


@dataclass(frozen=True)
class ModelSizes:
    """Counts of weights, `numbers` bytes each, and the axes of the text layers. `heads` is that of all heads, and
    `reference` counts the weights of a reference policy that is a model of its own."""

    weights: int
    trained: int
    numbers: int
    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    head_is_trained: bool = True
    reference: int = 0
    linear_layers: int = 0
    """Number of `layers` of linear attention."""
    linear_token: int = 0
    """Bytes that each of these keeps of a token for its convolution and its rule."""
    mask_kinds: int = 0
    """Kinds of layers that are given a dense mask, 0 where attention needs none."""
    keys: int = 0
    """Width of the keys of all heads, which is that of the values too."""
    vision: VisionSizes | None = None
    trained_numbers: int = 0
    """Bytes of a number of the trained weights, where these are adapters in fp32; 0 is `numbers`."""
    adapters: int = 0
    """Number of weights of adapters, which an engine gets merged."""

    @classmethod
    def of(cls, model: Any, reference: Any = None) -> ModelSizes:
        """Read a transformers model's sizes. Raises AttributeError where its text config names an axis otherwise."""
        text = model.config.get_text_config()
        params, head = list(model.parameters()), model.get_output_embeddings().weight
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        linear = list(getattr(text, "layer_types", None) or ()).count("linear_attention")
        return cls(
            weights=sum(p.numel() for p in params),
            trained=sum(p.numel() for p in params if p.requires_grad),
            numbers=head.element_size(),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads * width,
            inner=text.intermediate_size,
            vocabulary=len(head),
            head_is_trained=head.requires_grad,
            reference=0 if reference is None else sum(p.numel() for p in reference.parameters()),
            linear_layers=linear,
            linear_token=_linear_token(text, head.element_size()) if linear else 0,
            mask_kinds=_mask_kinds(text),
            keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * width,
            vision=VisionSizes.of(model),
            trained_numbers=max((p.element_size() for p in params if p.requires_grad), default=0),
            adapters=sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n),
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process on its device while the learner works."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    log_probs: int
    vllm: int
    vision: int = 0
    masks: int = 0
    kept_prompt: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


def memory_estimate(
    model: ModelSizes,
    *,
    tokens: int,
    checkpointing: bool,
    zero_stage: int = 0,
    offload: bool = False,
    processes: int = 1,
    gpu: bool = True,
    vllm: int = 0,
    pixels: int = 0,
    kept: int = 0,
) -> MemoryEstimate:
    """Estimate what one of `processes` holds for packs of `tokens` tokens and `pixels` of images; see the module.

    `vllm` bytes are the engine's, `kept` the tokens of prompts that are kept for several packs.

    `zero_stage` 0 is the whole state in each process, which one process without offload has at any stage.
    """
    b, n = model.numbers, model.trained
    own = model.trained_numbers or b
    parts = processes if zero_stage else 1
    gradients = 4 * n // (parts if zero_stage == 2 else 1) + (2 * n if zero_stage == 1 and own == 2 else 0)
    if zero_stage == 2:
        gradients = (0 if offload else gradients) + 4 * min(BUCKET, n) * (2 if gpu else 1)
    masters = 4 * n if own == 2 or zero_stage else 0
    around = 2 * (4 + 2 * b) * model.hidden + 4 * b * model.inner
    layer, linear = (tokens * (around + more) for more in (5 * b * model.heads, model.linear_token))
    full = model.layers - model.linear_layers
    largest = max(layer if full else 0, linear if model.linear_layers else 0)
    inputs = tokens * b * model.hidden
    head = model.vocabulary * b * model.hidden if model.head_is_trained else 0
    return MemoryEstimate(
        weights=b * (model.weights - n) + own * n,
        reference=b * model.reference,
        gradients=gradients,
        optimizer=0 if offload else (8 * n + masters) // parts,
        activations=model.layers * inputs + largest
        if checkpointing
        else full * layer + model.linear_layers * linear,
        log_probs=tokens * (4 + b) * model.hidden + head + CHUNK_BYTES,
        vllm=vllm,
        vision=_vision(model.vision, b, pixels, checkpointing) if model.vision is not None else 0,
        masks=tokens**2 * (model.mask_kinds + b * (1 if checkpointing else full)) if model.mask_kinds else 0,
        kept_prompt=2 * (b + 4) * model.keys * full * kept,
    )


def memory_of_run(
    model: Any,
    config: GRPOConfig,
    processes: int,
    checkpointing: bool,
    reference: Any = None,
    *,
    image_pixels: int = 0,
) -> MemoryEstimate | None:
    """The estimate of a run, whose `reference` policy may be a model of its own; images have at most `image_pixels`.

    None for a model whose config does not name the axes as Llama's does."""
    engine = config.rollout
    gpu = model.device.type == "cuda"
    inside = gpu and engine.engine == "vllm" and engine.vllm.sleep_level == 0
    try:
        sizes = ModelSizes.of(model, reference)
    except (AttributeError, TypeError):
        return None
    vllm = round(device_memory(model.device) * engine.vllm.gpu_memory_utilization) if inside else 0
    return memory_of_config(
        sizes, config, processes, checkpointing, gpu=gpu, vllm=vllm, image_pixels=image_pixels
    )


def memory_of_config(
    sizes: ModelSizes,
    config: GRPOConfig,
    processes: int,
    checkpointing: bool,
    *,
    gpu: bool = True,
    vllm: int = 0,
    image_pixels: int = 0,
) -> MemoryEstimate:
    """The estimate of a config's largest pack, of a model of these sizes; `vllm` are the bytes of its share."""
    optim = config.optim
    alone = processes == 1 and not optim.offload_optimizer
    return memory_estimate(
        sizes,
        tokens=largest_pack(config, processes),
        checkpointing=checkpointing,
        zero_stage=0 if alone else optim.zero_stage,
        offload=optim.offload_optimizer,
        processes=processes,
        gpu=gpu,
        vllm=vllm,
        pixels=image_pixels * images_in_pack(config, processes),
        kept=kept_tokens(config),
    )


def largest_pack(config: GRPOConfig, processes: int) -> int:
    """Tokens of the largest pack: `optim.max_tokens_per_pack`, or fewer where an update has no more for a process.

    Prompts count for `data.max_prompt_length` tokens, 1,024 where it is null.
    """
    rollout, optim = config.rollout, config.optim
    prompts = -(-rollout.prompts_per_step // (optim.updates_per_step * processes))
    return min(optim.max_tokens_per_pack, prompts * _group_tokens(config))


def images_in_pack(config: GRPOConfig, processes: int) -> int:
    """Images of the largest pack, where completions are as long as they may be; `rollout.vllm.max_images` to a prompt,
    one where it is null.
    """
    of_pack = -(-largest_pack(config, processes) // _group_tokens(config))
    return of_pack * (config.rollout.vllm.max_images or 1)


def kept_tokens(config: GRPOConfig) -> int:
    """Tokens of prompts that are kept for several packs: one prompt where the largest group is larger than a pack, with
    the masked one of the perception term; 0 where it fits."""
    copies = 2 if config.algorithm.perception_coef > 0 else 1
    spread = copies * _group_tokens(config) > config.optim.max_tokens_per_pack
    return copies * (config.data.max_prompt_length or PROMPT) if spread else 0


def _group_tokens(config: GRPOConfig) -> int:
    """Tokens of the largest group; its prompt counts for 1,024 where `data.max_prompt_length` is null."""
    completions = config.rollout.num_generations * config.rollout.max_completion_length
    return (config.data.max_prompt_length or PROMPT) + completions


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_sentence(estimate: MemoryEstimate, available: int, *, tokens: int, checkpointing: bool) -> str:
    """One line: the parts, their sum and what the device has; and where it is too little, what helps.

    >>> parts = MemoryEstimate(8 * 10**9, 0, 16 * 10**9, 0, 10**9, 10**8, 0)
    >>> memory_sentence(parts, 80 * 10**9, tokens=4096, checkpointing=True)[:63]
    'memory of one process, estimated: weights 8.0 GB + gradients 16'
    """
    how = "with" if checkpointing else "without"
    names = {
        "activations": f"activations of a pack of {tokens} tokens {how} gradient checkpointing",
        "log_probs": "log-probs",
        "vllm": "vLLM",
        "vision": "vision tower",
        "masks": "attention masks",
        "kept_prompt": "kept prompt",
    }
    sizes = {f.name: getattr(estimate, f.name) for f in fields(estimate)}
    parts = [f"{names.get(name, name)} {_size(size)}" for name, size in sizes.items() if size]
    line = f"memory of one process, estimated: {' + '.join(parts)} = {_size(estimate.total)} of {_size(available)}"
    if estimate.total <= available:
        return line
    remedies = [
        "a smaller optim.max_tokens_per_pack",
        "optim.offload_optimizer=true",
        "more processes",
        "model.lora",
    ]
    if not checkpointing:
        remedies.insert(0, "optim.gradient_checkpointing=true")
    return f"{line}: more than there is. What helps: {', '.join(remedies)}"


def _linear_token(text: Any, numbers: int) -> int:
    """Bytes of a token in a layer of gated delta rule, by its text config and the bytes of a number."""
    keys, values, heads = text.linear_key_head_dim, text.linear_value_head_dim, text.linear_num_value_heads
    channels = 2 * text.linear_num_key_heads * keys + heads * values
    chunks: int = 4 * numbers * channels + 4 * heads * (8 * keys + 5 * values + 5 * CHUNK)
    return chunks


def _mask_kinds(text: Any) -> int:
    """Kinds of layers that get a dense mask each: all kinds, where any has a window (see attention.Masks)."""
    kinds = set(getattr(text, "layer_types", None) or ())
    windowed = "sliding_attention" in kinds or (not kinds and getattr(text, "sliding_window", None))
    return max(1, len(kinds)) if windowed else 0


def _vision(tower: VisionSizes, b: int, pixels: int, checkpointing: bool) -> int:
    patches = tower.patches(pixels)
    layer = patches * (2 * (4 + 2 * b) * tower.hidden + 5 * b * tower.hidden + 4 * b * tower.inner)
    if not tower.trained:
        return layer
    inputs = patches * b * tower.depth * tower.patch**2
    if checkpointing:
        return inputs + tower.layers * patches * b * tower.hidden + layer
    return inputs + tower.layers * layer


def _size(count: int) -> str:
    """
    >>> _size(23_456_789), _size(7_510_000_000)
    ('0.023 GB', '7.5 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e9:.2g} GB"
