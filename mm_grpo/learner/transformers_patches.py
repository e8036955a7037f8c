"""All patches of transformers' models, and all that the learner assumes about their insides.

Each function says why it is needed and what would make it needless. tests/learner/test_transformers_patches.py fails
when transformers differs from what they assume.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.masking_utils import sdpa_mask
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from mm_grpo.files import atomic_write
from mm_grpo.terminal import quiet_libraries

PREFIX_ATTENTION = "mm_grpo_prefix"
VARLEN_ATTENTION = "mm_grpo_varlen_flash"
"""With "flash" in it: that is how the towers choose between one call with the cuts and one call per image."""
DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Classes of layers of gated delta rule that are built as linear_attention.py assumes."""
LAYER = re.compile(r"layers\.\d+\.")
"""The number of a layer in a parameter's name."""
TURNED_EXPERTS = {"qwen3_vl_moe": True, "qwen3_5_moe": False}
"""Families with experts in one tensor, which is [E, out, in] in memory; True if published files have [E, in, out]."""
Rule = Callable[..., tuple[Tensor, Tensor]]
"""Query, key and value [b, S, H, d], `g`, `beta` [b, S, H] and `initial_state` to outputs and the state after them."""


def use_prefix_attention(config: Any, attention: Callable[..., Any]) -> None:
    """Patch text layers of this text config to call `attention` in place of sdpa.

    Why: the mask of a pack costs N^2 as a tensor, and layers take nothing else. The layers read the name of
    their attention from the config in each call, and hand it the keyword arguments of the forward pass. The name is
    set in the private `_attn_implementation`: `set_attn_implementation` reads a model's source to decide whether it
    may. Under the same name transformers makes the masks of passes that have no pack (the embedded engine), as for
    sdpa.
    Needless when: transformers takes a mask that it does not write out, in sdpa and with gradients.
    """
    AttentionInterface.register(PREFIX_ATTENTION, attention)
    AttentionMaskInterface.register(PREFIX_ATTENTION, sdpa_mask)
    config._attn_implementation = PREFIX_ATTENTION


def unread_mask(device: torch.device) -> Tensor:
    """Return an attention mask that no layer reads, for models in which `prefix_attention` gets its layout.

    Why: a text model without a mask makes one, of N^2. If positions start again in a row, as at each completion, it
    takes the row for several sequences. A mask of four axes is passed on as it is.
    Needless when: transformers makes no mask for an attention that has no mask function, and takes one when given.
    """
    return torch.empty(0, 0, 0, 0, dtype=torch.bool, device=device)


def use_shared_state(model: Any, forward: Callable[..., Tensor]) -> list[Any]:
    """Patch layers of gated delta rule to call `forward(layer, hidden states, shared_state)`; return these layers.

    Why: transformers' forward takes one sequence for each row, from its start or from a cache,
    whose states it overwrites in place, which has no gradients. Layers get the keyword arguments of the model's
    forward, through gradient checkpointing too. Without a `shared_state` (the embedded engine) they are unchanged.
    Needless when: transformers takes an initial state and convolution inputs for a forward with gradients.
    """
    layers = [part for part in model.modules() if type(part).__name__ in DELTA_NETS]
    for layer in layers:
        layer.forward = partial(_forward_of_delta_net, layer, forward)
    return layers


def _forward_of_delta_net(
    layer: Any,
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    shared_state: Any = None,
    **kwargs: Any,
) -> Tensor:
    if shared_state is not None:
        return forward(layer, hidden_states, shared_state)
    result: Tensor = type(layer).forward(layer, hidden_states, **kwargs)
    return result


def torch_rule(layer: Any) -> Rule:
    """Return the gated delta rule in chunks as the file of the layer's class has it in torch, without kernels.

    Why: kernels are compared with it, and it runs if there are none. On a GPU the name in that file can stand for a
    kernel that transformers found installed.
    """
    rule: Rule = inspect.unwrap(vars(sys.modules[type(layer).__module__])["torch_chunk_gated_delta_rule"])
    return rule


def fla_rule() -> Rule | None:
    """Return the gated delta rule of flash-linear-attention; None if it is not installed or does not import here."""
    try:
        kernels = importlib.import_module("fla.ops.gated_delta_rule")
    except Exception:  # without a GPU its import raises errors of many kinds, and torch is there
        return None
    rule: Rule = kernels.chunk_gated_delta_rule
    return rule


def use_varlen_attention(tower: nn.Module, attention: Callable[..., Any]) -> None:
    """Patch the layers of a vision tower to hand `attention` the whole sequence with its cuts, in place of sdpa.

    Why: without flash-attn the towers of Qwen-VL call sdpa once for every image or window, thousands of times for a
    few large images, and read the lengths from the device in each layer.
    Needless when: transformers batches these calls itself, or has varlen attention for sdpa.
    """
    AttentionInterface.register(VARLEN_ATTENTION, attention)
    for part in tower.modules():
        config: Any = getattr(part, "config", None)
        takes_cuts = "cu_seqlens" in inspect.signature(part.forward).parameters
        if getattr(config, "_attn_implementation", None) == "sdpa" and takes_cuts:
            config._attn_implementation = VARLEN_ATTENTION


class PatchProduct(nn.Conv3d):
    """A convolution over patches of the size of its kernel, [S, C, t, h, w] -> [S, D, 1, 1, 1], as one product."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        product = torch.nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[:, :, None, None, None]


def use_patch_product(tower: nn.Module) -> None:
    """Make convolutions over patches that are cut out already matrix products. In place.

    Why: as a convolution over a batch of S patches it is several times slower, forward and backward. The class is
    changed, not the module, so that parameters keep their names and hooks stay.
    Needless when: transformers' patch embedding is a linear layer (it is for some families already).
    """
    for part in tower.modules():
        if type(part) is nn.Conv3d and part.groups == 1 and part.padding == (0, 0, 0):
            part.__class__ = PatchProduct


def save_pretrained(model: Any, path: str | Path, **options: Any) -> None:
    """Call `model.save_pretrained` of a model that nothing wraps, without the search for wrappers.

    Why: transformers has accelerate unwrap a model that it saves, and accelerate imports an installed DeepSpeed to
    compare classes: half a second, in runs that have no use for it.
    Needless when: accelerate looks for DeepSpeed's engine among the modules that are imported.

    Experts are written as in the published files of their family.
    Why: transformers 5.19 turns experts when it loads [E, in, out], by their shape, but saves [E, out, in], which vLLM
    cannot load; experts of Qwen3.5 it saves one by one.
    Needless when: transformers writes the layout that it has read.
    """
    if (turns := TURNED_EXPERTS.get(model.config.model_type)) is not None:
        tensors = options["state_dict"] if "state_dict" in options else model.state_dict()
        state = {n: t.transpose(1, 2) if turns and ".experts." in n else t for n, t in tensors.items()}
        options |= {"state_dict": state, "save_original_format": False}
    with quiet_libraries(), patch.object(modeling_utils, "unwrap_model", lambda wrapped: wrapped):
        model.save_pretrained(str(path), **options)
    copy_mode(path, "config.json")


def save_in_parts(model: Any, path: str | Path | None, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a model as `save_pretrained` does, a file for each text layer. `tensors` are its weights by name.

    Without a `path` the tensors are only taken, because their making is collective.
    Why: transformers takes all weights at once, and a sharded model is gathered one layer at a time.
    Needless when: transformers saves from an iterator.
    """
    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}  # tied ones once
    folder, weight_map, size, parts = Path(path or ""), dict[str, int](), 0, 0
    try:
        for _, pairs in groupby(tensors, lambda pair: LAYER.findall(pair[0])) if path is not None else ():
            part = {name: tensor for name, tensor in pairs if name in names}
            save_pretrained(model, folder, state_dict=part)
            parts += 1
            with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt") as file:
                weight_map |= dict.fromkeys(file.keys(), parts)
            size += sum(t.numel() * t.element_size() for t in part.values())
            part.clear()  # before the next layer is gathered
            (folder / SAFE_WEIGHTS_NAME).rename(folder / f"part-{parts}.safetensors")
    finally:  # after an error here the other processes still wait for this one's part
        for _ in tensors:
            pass
    files = {n: f"model-{n:05d}-of-{parts:05d}.safetensors" for n in range(1, parts + 1)}
    for number, name in files.items():
        (folder / f"part-{number}.safetensors").rename(folder / name)
    if path is not None:
        index = {"metadata": {"total_size": size}, "weight_map": {n: files[i] for n, i in weight_map.items()}}
        atomic_write(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2))


def copy_mode(path: str | Path, of: str) -> None:
    """Give the weights in a folder the mode of the file `of` in it.

    Why: safetensors writes through a temporary file that its owner alone may read.
    Needless when: safetensors keeps to the umask.
    """
    for file in Path(path).glob("*.safetensors"):
        shutil.copymode(Path(path) / of, file)


@contextmanager
def features_for_pixels(backbone: Any, make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Make `backbone` use `make()` in place of its tower's features in the block; yield the pixels to give it.

    Why: features are made once for several passes or packs. A function of the object hides the method that a model's
    forward asks for them. `make` is called after the embedding, as the tower would be, and may run the tower itself:
    gradients are ready in the reverse order (see forward.py).
    Needless when: a model's forward takes a function for its features. The argument `mm_encoder_outputs` (since 5.19)
    takes features alone, made before the embedding.
    """

    def get_image_features(*pixels: Any, **options: Any) -> Any:
        del backbone.get_image_features
        return make()

    backbone.get_image_features = get_image_features
    try:
        yield {"pixel_values": torch.empty(0)}  # the forward asks for pixels, and reads none
    finally:
        vars(backbone).pop("get_image_features", None)
