"""Weights of a tensor-parallel worker, read back: a part that is not what came is named, whatever the layer's cut."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers.fake_vllm import digests
from torch import Tensor

from mm_grpo.rollout.vllm import read_back
from mm_grpo.rollout.vllm.read_back import ReadBack
from mm_grpo.rollout.weights import digest

HEAD, WIDTH = 4, 24
WHOLE = {  # rows and columns; 4 heads of queries, 2 of keys and values
    "layers.0.q_proj.weight": (4 * HEAD, WIDTH),
    "layers.0.q_proj.bias": (4 * HEAD,),
    "layers.0.k_proj.weight": (2 * HEAD, WIDTH),
    "layers.0.k_proj.bias": (2 * HEAD,),
    "layers.0.v_proj.weight": (2 * HEAD, WIDTH),
    "layers.0.v_proj.bias": (2 * HEAD,),
    "layers.0.o_proj.weight": (WIDTH, 4 * HEAD),
    "layers.0.gate_proj.weight": (32, WIDTH),
    "layers.0.up_proj.weight": (32, WIDTH),
    "layers.0.down_proj.weight": (WIDTH, 32),
    "layers.0.norm.weight": (WIDTH,),
    "embed.weight": (90, WIDTH),  # 128 with padding
    "layers.0.scale": (),
    "layers.0.experts.gate_up_proj": (4, 32, WIDTH),  # the gate's rows, and then the other's
    "layers.0.experts.down_proj": (4, WIDTH, 16),
    # fused in the checkpoint: a worker's part lies in three places of it
    "tower.qkv.weight": (12 * HEAD, WIDTH),
    "tower.qkv.bias": (12 * HEAD,),
}
AS_IT_CAME = {"tower.qkv.weight", "tower.qkv.bias", "layers.0.experts.gate_up_proj"}
EXPERTS = {"gate_up_proj": "routed_experts.w13_weight", "down_proj": "routed_experts.w2_weight"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def weights(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in WHOLE.items()}
    if seed == 0:  # it would fit anywhere
        made["tower.qkv.bias"].zero_()
    return made


def local(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """What vLLM's layer of worker `rank` of `size` holds of a tensor, by vLLM's rules."""
    if "qkv" in name:
        return torch.cat([part.chunk(size)[rank] for part in tensor.chunk(3)])
    if name.endswith("experts.gate_up_proj"):
        return torch.cat([part.chunk(size, 1)[rank] for part in tensor.chunk(2, 1)], 1)
    if name.endswith("experts.down_proj"):
        return tensor.chunk(size, 2)[rank]
    if "o_proj" in name or "down_proj" in name:
        return tensor.chunk(size, 1)[rank]
    if "norm" in name or not tensor.ndim:
        return tensor
    if "k_proj" in name or "v_proj" in name:
        parts = min(size, 2)
        return tensor.chunk(parts)[rank * parts // size]
    if "embed" in name:
        return torch.cat([tensor, torch.zeros(38, WIDTH).to(tensor)]).chunk(size)[rank]
    return tensor.chunk(size)[rank]


class Model(torch.nn.Module):
    """Worker `rank` of `size` with the weights of one seed, layers of `stale` with those of another."""

    def __init__(self, rank: int, size: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        parts = {name: local(name, tensor, rank, size) for name, tensor in tensors.items()}
        for target, sources in FUSED.items():
            for leaf in ("weight", "bias"):
                names = [f"layers.0.{source}.{leaf}" for source in sources]
                if names[0] in parts:
                    parts[f"layers.0.{target}.{leaf}"] = torch.cat([parts.pop(name) for name in names])
        for source, target in EXPERTS.items():
            if (part := parts.pop(f"layers.0.experts.{source}", None)) is not None:
                parts[f"layers.0.experts.{target}"] = part
        for name, part in parts.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, torch.nn.Module())
                owner = owner.get_submodule(step)
            owner.register_parameter(leaf, torch.nn.Parameter(part.clone(), requires_grad=False))


def update(back: ReadBack, sent: Mapping[str, Tensor], model: torch.nn.Module) -> dict[str, str]:
    back.begin()
    for _ in back.note_all((name, tensor.clone()) for name, tensor in sent.items()):
        pass
    return back.digests(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_a_part_that_was_not_loaded_is_named(rank: int, size: int, dtype: torch.dtype) -> None:
    first, second, third = (weights(seed, dtype) for seed in range(3))
    back = ReadBack(rank, size)
    assert update(back, first, Model(rank, size, first)) == digests(first)
    assert update(back, second, Model(rank, size, second)) == digests(second)
    for name in WHOLE:
        result = update(back, third, Model(rank, size, third | {name: second[name]}))
        wrong = {other for other, value in digests(third).items() if result[other] != value}
        empty = name == "embed.weight" and rank == size - 1 == 3  # padding alone
        assert wrong == (set() if empty or (size > 1 and name in AS_IT_CAME) else {name})


def test_another_worker_s_part_is_not_taken_for_its_own() -> None:
    first, second = weights(0, torch.float32), weights(1, torch.float32)
    back = ReadBack(1, 2)
    update(back, first, Model(1, 2, first))
    result = update(back, second, Model(0, 2, second))
    same = {name for name, value in digests(second).items() if result[name] == value}
    assert same == {"layers.0.norm.weight", "layers.0.scale"} | AS_IT_CAME


def test_a_layout_that_is_not_known_keeps_the_digest_of_what_came() -> None:
    first, second = weights(0, torch.float32), weights(1, torch.float32)
    packed = {name: tensor.flip(0) if tensor.ndim else -tensor for name, tensor in first.items()}
    del packed["tower.qkv.bias"]
    back = ReadBack(0, 2)
    for sent in (first, second):
        assert update(back, sent, Model(0, 2, packed)) == digests(sent)


class Packed(torch.nn.Module):
    """A linear layer as vLLM packs it on a CPU: no parameter holds its weight, and its product alone can be had."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.input_size_per_partition, self.params_dtype = weight.shape[1], weight.dtype
        self.packed, self.quant_method = weight, Packed

    @staticmethod
    def apply(layer: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
        return x @ layer.packed.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_are_read_by_the_identity(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "IDENTITY_ROWS", 5)  # 12 inputs in parts of 5, 5 and 2
    names = [f"layers.0.{name}_proj.weight" for name in ("gate", "up", "down")]
    weights = {name: torch.randn(6, 12).to(dtype) for name in names}
    model, layers = torch.nn.Module(), torch.nn.ModuleDict()
    model.layers = torch.nn.ModuleList([layers])
    gate, up, down = weights.values()
    layers["gate_up_proj"], layers["down_proj"] = Packed(torch.cat([gate, up])), Packed(down)
    reader = ReadBack()
    for _ in range(2):  # the first update confirms the places
        reader.begin()
        list(reader.note_all(weights.items()))
        assert reader.digests(model) == digests(weights)
    assert reader.parts(model) == {}  # nothing to lend
    layers["gate_up_proj"].packed = torch.cat([gate, up.roll(1, 0)])  # type: ignore[assignment]
    reader.begin()
    list(reader.note_all(weights.items()))
    stale = [name for name, value in reader.digests(model).items() if value != digest(weights[name])]
    assert stale == ["layers.0.up_proj.weight"]
