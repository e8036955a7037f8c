"""Estimate of one process's device memory while it learns and while it samples, from the sizes of its model.

In the formulas b is the bytes of a weight and n the count of trained weights. With gradient checkpointing each layer
keeps its input, and one layer at a time keeps all activations.

Not counted: the projector of the vision tower, prompts that are kept for several packs, dense masks of sliding
windows, buffers of attention kernels, and memory lost by the allocator. All layers are counted as Llama's.
Measured on a CPU, autograd keeps 2 to 10 % more than the estimate of activations, with checkpointing a quarter more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mm_grpo.config import GRPOConfig
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.learner.learner import Learner
from mm_grpo.learner.logprobs import chunk_bytes_of
from mm_grpo.learner.quantization import NF4_BYTES, numbers_of
from mm_grpo.learner.zero import BUCKET
from mm_grpo.rollout.token_sampling import LOGIT_BYTES, PART_BYTES
from mm_grpo.rollout.transformers_engine import MAX_ROWS, PREFILL_TOKENS
from mm_grpo.rollout.vllm.launch import can_free_cache_alone

GB = 10**9
CHUNK = 64  # tokens that a layer of linear attention takes at once
PROMPT = 1024  # tokens of a prompt of unlimited length with images of unknown size
TEXT = 256  # text tokens of a prompt of unlimited length
FORWARD = GB  # bytes of a forward pass of vLLM, without weights and cache, under the limits of launch.py
GRAPHS = 2 * GB  # bytes of vLLM's CUDA graphs; some versions keep them while they sleep
MAX_SCORED = 1024  # most tokens of a prompt whose log-probs vLLM computes at once
CONTEXT = GB // 2  # bytes of CUDA's context

EMBEDDED_CACHE = "cache of the embedded engine"
"""Key of the largest possible cache; a run's rows may be shorter."""

TOWER, LAYER = r".*\bvi(sual|sion)", r"(?!.*\bvi(sual|sion)).*\.layers\.{}\."
"""Patterns of the names of a vision tower's weights, and of a text layer's by its number."""

Bytes = dict[str, int]
"""Use of memory, in words -> bytes."""


@dataclass(frozen=True)
class VisionSizes:
    """Axes of a vision tower."""

    layers: int
    hidden: int
    inner: int
    patch: int  # side of a patch in pixels
    trained: bool = True

    @classmethod
    def of(cls, model: Any) -> VisionSizes | None:
        """Read a transformers model's sizes; None if its vision config names an axis otherwise."""
        vision = getattr(model.config, "vision_config", None)
        layers = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None)
        hidden = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
        inner = getattr(vision, "intermediate_size", None) or (hidden or 0) * getattr(vision, "mlp_ratio", 0)
        patch = getattr(vision, "patch_size", None)
        side = patch[0] if isinstance(patch, list | tuple) else patch
        if not (layers and hidden and inner and side):
            return None
        tower = [p for n, p in model.named_parameters() if re.search(r"\bvi(sual|sion)", n)]
        return cls(layers, hidden, int(inner), int(side), any(p.requires_grad for p in tower))


@dataclass(frozen=True)
class ModelSizes:
    """Counts of weights, and axes of the text layers."""

    weights: int
    trained: int
    numbers: int  # bytes of a weight
    layers: int
    hidden: int
    heads: int  # width of all heads
    inner: int  # width of the MLP; of experts, that of all MLPs with as many activations of a token
    vocabulary: int
    head_is_trained: bool = True
    reference: int = 0  # weights of a reference policy that is a model of its own
    linear_layers: int = 0  # layers of linear attention, counted in `layers` too
    linear_token: int = 0  # bytes that such a layer keeps of a token for its convolution and its rule
    keys: int = 0  # width of the keys of all heads, and of the values
    vision: VisionSizes | None = None
    trained_numbers: int = 0  # bytes of a trained weight, 4 for adapters; 0 is `numbers`
    adapters: int = 0  # weights of adapters, which an engine does not hold
    quantised: int = 0  # weights in four bits, counted in `weights` too
    experts: int = 0  # weights of all experts
    active: int = 0  # weights of the language model that run for a token, its experts among them
    layer: int = 0  # weights of the largest text layer
    tower: int = 0  # weights of the vision tower
    trained_tower: int = 0  # the trained ones of them

    @classmethod
    def of(cls, model: Any, reference: Any = None) -> ModelSizes:
        """Read a transformers model's sizes. Raises AttributeError if its text config names an axis otherwise."""
        text = model.config.get_text_config()
        params, head = list(model.parameters()), model.get_output_embeddings().weight
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        linear = list(getattr(text, "layer_types", None) or ()).count("linear_attention")
        named, embedding = list(model.named_parameters()), model.get_input_embeddings().weight

        def count(pattern: str, among: Iterable[tuple[str, Any]] = named) -> int:
            return sum(numbers_of(p) for n, p in among if re.match(pattern, n))

        experts, tower = count(r".*\.experts\."), count(TOWER)
        # an embedding is looked up
        active = count("") - tower - (0 if embedding is head else embedding.numel())
        if experts:
            active -= experts - experts * text.num_experts_per_tok // text.num_experts
        return cls(
            weights=count(""),
            trained=sum(p.numel() for p in params if p.requires_grad),
            numbers=head.element_size(),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads * width,
            inner=inner_width(text),
            vocabulary=len(head),
            head_is_trained=head.requires_grad,
            reference=0 if reference is None else sum(p.numel() for p in reference.parameters()),
            linear_layers=linear,
            linear_token=_linear_token(text, head.element_size()) if linear else 0,
            keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * width,
            vision=VisionSizes.of(model),
            trained_numbers=max((p.element_size() for p in params if p.requires_grad), default=0),
            adapters=count(r".*\.lora_"),
            quantised=sum(numbers_of(p) for p in params if hasattr(p, "quant_state")),
            experts=experts,
            active=active,
            layer=max(count(LAYER.format(number)) for number in range(text.num_hidden_layers)),
            tower=tower,
            trained_tower=count(TOWER, ((n, p) for n, p in named if p.requires_grad)),
        )

    @property
    def cache_token(self) -> int:
        """Bytes of a token in an engine's cache; layers of linear attention have none."""
        return 2 * self.numbers * self.keys * (self.layers - self.linear_layers)

    def sent(self, config: GRPOConfig) -> int:
        """Bytes of the weights that an engine gets; four-bit weights are sent dequantised, unless vLLM runs them."""
        quantised = self.quantised if config.rollout.vllm.in_four_bits else 0
        return self.numbers * (self.weights - self.adapters - quantised)


def learner_memory(
    model: ModelSizes,
    *,
    tokens: int,
    checkpointing: bool,
    zero_stage: int = 0,
    offload: bool = False,
    processes: int = 1,
    gpu: bool = True,
    pixels: int = 0,
) -> Bytes:
    """Estimate the learner's memory in one of `processes` for packs of `tokens` tokens and `pixels` of images.

    `zero_stage` 0 is the whole state in each process, which one process without offload has at any stage. At stage 3
    the tower alone is whole, and a layer is gathered while the one before it runs.
    """
    b, n, full = model.numbers, model.trained, model.layers - model.linear_layers
    frozen, reference = model.weights - n - model.quantised, model.reference
    trained_bytes = model.trained_numbers or b
    shards, gathered = processes if zero_stage in (1, 2) else 1, 0
    if zero_stage == 3:
        towers = model.trained_tower, model.tower - model.trained_tower, model.tower if reference else 0
        pairs = zip((n, frozen, reference), towers, strict=True)
        n, frozen, reference = (whole + (count - whole) // processes for count, whole in pairs)
        # two layers and the head, and the gradients of a layer before and after their conversion to fp32
        gathered = b * (2 * model.layer + model.vocabulary * model.hidden)
        gathered += 0 if model.adapters else (b + 4) * model.layer
    # fp32 sums, which stage 2 shards; stage 1 in bfloat16 also holds gradients that are not added yet
    gradients = 4 * n // (shards if zero_stage == 2 else 1)
    if zero_stage == 1 and trained_bytes == 2:
        gradients += 2 * n
    if zero_stage == 2:  # and its bucket, two if communication overlaps
        gradients = (0 if offload else gradients) + 4 * min(BUCKET, n) * (2 if gpu else 1)
    # fp32 copies of the weights, which DeepSpeed always keeps
    masters = 4 * n if trained_bytes == 2 or zero_stage in (1, 2) else 0
    without_heads = _token_of_layer(b, model.hidden, 0, model.inner)
    layer = tokens * (without_heads + 5 * b * model.heads)
    linear = tokens * (without_heads + model.linear_token)
    activations = full * layer + model.linear_layers * linear
    if checkpointing:
        largest = max(layer if full else 0, linear if model.linear_layers else 0)
        activations = model.layers * tokens * b * model.hidden + largest
    head = model.vocabulary * b * model.hidden if model.head_is_trained else 0
    return {
        "weights": b * frozen + round(NF4_BYTES * model.quantised) + trained_bytes * n,
        "gathered layers": gathered,
        "reference": b * reference,
        "gradients": gradients,
        "optimizer": 0 if offload else (8 * n + masters) // shards,  # with AdamW's two means
        "activations": activations,
        # last states and their fp32 gradients, the gradient of the head, and a tile (learner/logprobs.py)
        "log-probs": tokens * (4 + b) * model.hidden + head + chunk_bytes_of(gpu=gpu),
        "vision tower": _vision(model.vision, b, pixels, checkpointing) if model.vision is not None else 0,
        # one layer at a time; this is the largest
        "dequantised layer": b * model.hidden * model.inner if model.quantised else 0,
    }


@dataclass(frozen=True)
class Largest:
    """Largest image that `data.max_pixels` allows, and largest video; 0 tokens if the processor cannot tell."""

    pixels: int
    tokens: int
    video_tokens: int = 0

    @property
    def video_pixels(self) -> int:
        """Pixels of an image of as many tokens as a video: a tower takes two frames of Qwen-VL as one."""
        return self.pixels * self.video_tokens // max(self.tokens, 1)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a config's longest prompt, sequence and pack in one of `processes`.

    A prompt of unlimited length is counted as TEXT, one image or `rollout.vllm.max_images`, and
    `rollout.vllm.max_videos`, if that is set.
    """

    prompt: int
    sequence: int
    pack: int
    prompts: int
    """Prompts of a pack."""
    pixels: int
    """Pixels of the media of a prompt."""
    packs: int
    """Packs of a step."""

    @classmethod
    def of(cls, config: GRPOConfig, largest: Largest, processes: int) -> Lengths:
        rollout = config.rollout
        images, videos = rollout.vllm.max_images or 1, rollout.vllm.max_videos or 0
        pixels = images * largest.pixels + videos * largest.video_pixels
        media_tokens = images * largest.tokens + videos * largest.video_tokens
        guess = media_tokens + TEXT if largest.tokens else PROMPT
        prompt = config.data.max_prompt_length or guess
        group = prompt + rollout.num_generations * rollout.max_completion_length
        updates = config.optim.updates_per_step
        prompts = -(-rollout.prompts_per_step // (updates * processes))
        pack = min(config.optim.max_tokens_per_pack, prompts * group)
        packs = updates * config.algorithm.num_iterations * -(-prompts * group // pack)
        return cls(prompt, prompt + rollout.max_completion_length, pack, -(-pack // group), pixels, packs)


@dataclass(frozen=True)
class Servers:
    """vLLM servers on GPUs of the learner's kind, each on `tensor_parallel` of them."""

    tensor_parallel: int = 1
    share_gpus: bool = False
    """True if they lie on the learner's GPUs, and sleep while it works."""


@dataclass(frozen=True)
class Phases:
    """Memory of one process while it learns and while it samples."""

    learner: Bytes
    rollout: Bytes
    cache: int  # tokens of the engine's cache
    fault: str = ""  # why vLLM would not start
    server: Bytes = field(default_factory=dict)  # of a server's GPU

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(sum(part.values()) for part in (self.learner, self.rollout, self.server))

    def sentence(self, available: int) -> str:
        """Describe both phases in one sentence; `available` is the device's memory."""
        phases = [
            f"while it {verb} {' + '.join(f'{name} {in_gb(size)}' for name, size in parts.items() if size)} = "
            f"{in_gb(sum(parts.values()))}"
            for verb, parts in (("learns", self.learner), ("samples", self.rollout))
        ]
        return f"memory of one process, estimated: {'; '.join(phases)}; of {in_gb(available)}"


def memory_of_run(
    sizes: ModelSizes,
    largest: Largest,
    config: GRPOConfig,
    device: int,
    *,
    processes: int,
    servers: Servers | None = None,
    checkpointing: bool | None = None,
    gpu: bool = True,
) -> Phases:
    """Estimate the memory of one process of a run, and of a server, on a device of `device` bytes.

    `checkpointing` None means `optim.gradient_checkpointing`, and True if that is not set either.
    """
    rollout, optim, lengths = config.rollout, config.optim, Lengths.of(config, largest, processes)
    unsharded = processes == 1 and not optim.offload_optimizer
    learner = learner_memory(
        sizes,
        tokens=lengths.pack,
        checkpointing=optim.gradient_checkpointing is not False if checkpointing is None else checkpointing,
        zero_stage=0 if unsharded else optim.zero_stage,
        offload=optim.offload_optimizer,
        processes=processes,
        gpu=gpu,
        pixels=lengths.pixels * lengths.prompts,
    )
    learner["CUDA's context"] = CONTEXT if gpu else 0
    if config.algorithm.twin_view is not None and not gpu:  # a run on a GPU keeps them in the host's memory
        prompts = -(-rollout.prompts_per_step // (optim.updates_per_step * processes))
        completion_tokens = prompts * rollout.num_generations * rollout.max_completion_length
        learner["twin views' states"] = completion_tokens * sizes.numbers * sizes.hidden
    sampling = {name: learner[name] for name in ("weights", "reference", "optimizer", "CUDA's context")}
    cache, fault, server = 0, "", Bytes()
    engine = ENGINE_FACTS[rollout.engine]
    if engine.colocated:
        servers = Servers(share_gpus=True)
    if gpu and not engine.embedded and servers is not None:
        share = round(device * rollout.vllm.gpu_memory_utilization)
        is_base_shared = engine.colocated and shares_base(sizes, config)
        if is_base_shared:
            for phase in (learner, sampling):
                phase["weights"] -= sizes.numbers * (sizes.weights - sizes.trained - sizes.quantised)
        sleeps, weights = rollout.vllm.sleep_level > 0, sizes.sent(config) // servers.tensor_parallel
        eager = rollout.vllm.in_four_bits or rollout.vllm.engine_kwargs.get("enforce_eager", False)
        graphs = 0 if eager else GRAPHS
        # logits of the canary in fp32, and their softmax
        scores = 2 * 4 * sizes.vocabulary * min(MAX_SCORED, lengths.sequence)
        idle = {"vLLM's CUDA graphs": graphs, "vLLM's CUDA context": CONTEXT if engine.remote else 0}
        awake = {"vLLM": share, **idle, "vLLM's scores of a prompt": scores}
        if servers.share_gpus:
            learner |= {"vLLM": (weights if is_base_shared else 0) if sleeps else share, **idle}
            sampling |= awake
        else:
            server = awake
        cache_token = sizes.cache_token // servers.tensor_parallel
        cache = max(0, share - weights - FORWARD) // cache_token
        if cache < lengths.sequence:
            required = in_gb(weights + FORWARD + cache_token * lengths.sequence)
            fault = f"vLLM's share of {in_gb(share)} has no room for weights and one sequence ({required})"
    elif not engine.remote:
        prompts = -(-rollout.prompts_per_step // processes)
        rows = min(MAX_ROWS, prompts * rollout.num_generations)
        prompts = min(prompts, -(-rows // rollout.num_generations))
        cache = prompts * lengths.prompt + rows * rollout.max_completion_length
        sampling[EMBEDDED_CACHE] = cache * sizes.cache_token
        sampling["forwards of the embedded engine"] = _embedded(sizes, lengths, prompts, rows)
    return Phases(learner, sampling, cache, fault, server)


def moved_bytes(
    sizes: ModelSizes, config: GRPOConfig, lengths: Lengths, processes: int, servers: Servers | None
) -> Bytes:
    """Estimate the bytes of a step of full packs that reach a process from the others, and an engine."""
    n, stage, engine = sizes.trained, config.optim.zero_stage, ENGINE_FACTS[config.rollout.engine]
    updates = config.optim.updates_per_step * config.algorithm.num_iterations
    whole = n if stage == 0 else sizes.trained_tower if stage == 3 else 0
    gathered = (sizes.trained_numbers or sizes.numbers) * (n - whole) * updates
    if stage == 3:
        # forward, backward, and passes for old log-probs and a reference
        passes = 2 + (updates > 1) + (config.algorithm.beta > 0)
        gathered = sizes.numbers * (sizes.weights - sizes.tower) * passes * lengths.packs
    gradients = 4 * (n - whole) * (lengths.packs if stage > 1 else updates) + 2 * 4 * whole * updates
    held = shares_base(sizes, config) if engine.colocated else servers is None or not servers.share_gpus
    held = held or config.rollout.vllm.sleep_level < 2
    return {
        "gathered weights": gathered * (processes - 1) // processes,
        "gradients": gradients * (processes - 1) // processes,
        "sync": 0 if engine.embedded else sizes.numbers * n if held else sizes.sent(config),
    }


def _embedded(sizes: ModelSizes, lengths: Lengths, prompts: int, rows: int) -> int:
    """Return the largest forward: a layer or the tower for a batch of prompts, or sampling a token for each row."""
    batch = max(1, min(prompts, PREFILL_TOKENS // lengths.prompt))
    b, pixels = sizes.numbers, lengths.pixels * batch
    # gate, up and their product, or the tensors of attention
    layer = batch * lengths.prompt * b * max(3 * sizes.inner + sizes.hidden, 5 * sizes.heads)
    tower = _vision(replace(sizes.vision, trained=False), b, pixels, False) if sizes.vision is not None else 0
    logits = rows * sizes.vocabulary
    return max(layer, tower, b * logits + min(LOGIT_BYTES * logits, PART_BYTES))


def shares_base(sizes: ModelSizes, config: GRPOConfig) -> bool:
    """Return True if learner and vLLM share one copy of the base weights (`rollout/vllm/engine.py`).

    True is assumed for families for which vLLM has no LoRA layers, too.
    """
    vllm = config.rollout.vllm
    runs_quantised = not sizes.quantised or vllm.in_four_bits
    runs_adapters = sizes.adapters > 0 and runs_quantised and vllm.engine_kwargs.get("enable_lora", True)
    # some versions of vLLM can share the base only if they never sleep
    return bool(runs_adapters and (vllm.sleep_level == 0 or can_free_cache_alone()))


def run_sentence(learner: Learner) -> str:
    """Return one line about the memory of this process; "" if the model's config names its axes unlike Llama's."""
    model, reference = learner.model, learner.reference.model if learner.reference is not None else None
    try:
        sizes = ModelSizes.of(model, reference if reference is not model else None)
    except (AttributeError, TypeError):
        return ""
    available = device_memory(model.device)
    memory = memory_of_run(
        sizes, largest_of(learner.processor, learner.config), learner.config, available, processes=learner.ranks.world,
        checkpointing=learner.checkpointing, gpu=model.device.type == "cuda",
    )  # fmt: skip
    warning = "; more than there is: `mm-grpo estimate` says what helps" if memory.peak > available else ""
    return f"memory: {in_gb(memory.peak)} of {in_gb(available)} a process, estimated{warning}"


def largest_of(processor: Any, config: GRPOConfig) -> Largest:
    """Return the largest image and video that a processor makes tokens of."""
    tokens = getattr(processor, "max_image_tokens", lambda: 0)()
    video_tokens = getattr(processor, "max_video_tokens", lambda frames: 0)(config.data.video_max_frames)
    return Largest(processor.max_pixels, tokens, video_tokens)


def device_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory, or of this machine's for any other device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _token_of_layer(b: int, hidden: int, heads: int, inner: int) -> int:
    """Return the bytes of a token in a layer of full attention."""
    norms = 2 * (4 + 2 * b) * hidden  # two RMS norms: fp32 input, normed twice
    attention = 5 * b * heads  # queries, keys, values; the output twice
    return norms + attention + 4 * b * inner  # gate, up, its activation, their product


def inner_width(text: Any) -> int:
    """Return the width of the MLP, or of an MLP that keeps as much of a token as its experts do together."""
    if (width := getattr(text, "moe_intermediate_size", None)) is None:
        return int(text.intermediate_size)
    # for each expert a token's state is copied, and then put out: as much as half of its width in an MLP
    routed = text.num_experts_per_tok * (width + text.hidden_size // 2)
    return int(routed + (getattr(text, "shared_expert_intermediate_size", None) or 0))


def _linear_token(text: Any, b: int) -> int:
    """Return the bytes of a token in the gated delta rule of a layer, as transformers runs it in torch."""
    keys, values, heads = text.linear_key_head_dim, text.linear_value_head_dim, text.linear_num_value_heads
    channels = 2 * text.linear_num_key_heads * keys + heads * values
    convolution = 4 * b * channels  # before, padded, after, activated
    # in fp32: keys and values with their decays, and the matrices of a chunk
    return int(convolution + 4 * heads * (8 * keys + 5 * values + 5 * CHUNK))


def _vision(tower: VisionSizes, b: int, pixels: int, checkpointing: bool) -> int:
    patches = -(-pixels // tower.patch**2)
    layer = patches * _token_of_layer(b, tower.hidden, tower.hidden, tower.inner)
    if not tower.trained:
        return layer
    inputs = tower.layers * patches * b * tower.hidden
    return inputs + layer if checkpointing else tower.layers * layer


def in_gb(count: int) -> str:
    """
    >>> in_gb(23_456_789), in_gb(7_510_000_000)
    ('0.023 GB', '7.5 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 10**8 else f"{count / 1e9:.2g} GB"
