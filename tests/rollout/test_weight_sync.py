"""What is sent to an engine: whole units, what changed, the tied head; and the proof of what arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.rollout.weight_sync import WeightSync, digest, unit_of

LAYER = "model.language_model.layers.0"
NAMES = [
    "model.visual.blocks.0.attn.qkv.weight",
    "model.visual.blocks.0.attn.qkv.bias",
    "model.visual.blocks.0.attn.proj.weight",
    "model.language_model.embed_tokens.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.self_attn.q_proj.bias",
    f"{LAYER}.self_attn.k_proj.weight",
    f"{LAYER}.self_attn.v_proj.weight",
    f"{LAYER}.self_attn.o_proj.weight",
    f"{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.mlp.up_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
    f"{LAYER}.input_layernorm.weight",
    "model.language_model.norm.weight",
]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(6, 4) for name in NAMES}


def send(sync: WeightSync, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[str]:
    """Transfer and settle as an honest engine does; the names that went."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    transfer = sync.transfer(pairs)
    received = {name: digest(tensor) for name, tensor in transfer}
    sync.settle(transfer, received)
    return list(received)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        (f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.self_attn"),
        (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp"),
        (f"{LAYER}.mlp.experts.12.up_proj.weight", f"{LAYER}.mlp"),
        (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp"),
        (f"{LAYER}.input_layernorm.weight", LAYER),
        ("model.visual.blocks.3.mlp.up_proj.bias", "model.visual.blocks.3.mlp"),
        ("model.visual.merger.mlp.2.weight", "model.visual.merger.mlp"),
        ("model.language_model.norm.weight", "model.language_model"),
        ("lm_head.weight", ""),
    ],
)
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_everything_goes_first_and_then_what_changed() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    assert send(sync, tensors) == [*NAMES, "lm_head.weight"]
    assert send(sync, tensors) == []
    tensors[f"{LAYER}.mlp.up_proj.weight"][0, 0] += 1e-7
    assert send(sync, tensors) == [f"{LAYER}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    sync.forget()  # sleep level 2
    assert sorted(send(sync, tensors)) == sorted([*NAMES, "lm_head.weight"])


def test_q_and_v_alone_take_k_and_o_and_the_biases_along() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    tensors[f"{LAYER}.self_attn.q_proj.weight"].mul_(2)
    tensors[f"{LAYER}.self_attn.v_proj.weight"].mul_(2)
    transfer = sync.transfer(tensors.items())
    sent = dict(transfer)
    assert set(sent) == {n for n in NAMES if ".self_attn." in n}
    assert transfer.bytes == 5 * 6 * 4 * 4
    assert transfer.skipped_bytes == (len(NAMES) + 1 - 5) * 6 * 4 * 4


def test_a_part_of_a_unit_is_never_sent() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    changed = {n: t for n, t in tensors.items() if "q_proj" in n or "v_proj" in n}
    assert send(sync, changed) == []  # nothing changed, so nothing is due
    changed[f"{LAYER}.self_attn.v_proj.weight"].mul_(2)
    with pytest.raises(
        GuardStop, match=rf"'{LAYER}.self_attn' changed and came without .*k_proj.weight', '.*o_proj"
    ):
        send(sync, changed)
    whole = {n: t for n, t in tensors.items() if ".self_attn." in n}
    assert list(send(sync, whole)) == list(whole)


def test_a_tied_head_follows_its_embedding() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    tensors["model.language_model.embed_tokens.weight"].mul_(2)
    assert set(send(sync, tensors)) == {
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    }
    both = {**tensors, "lm_head.weight": tensors["model.language_model.embed_tokens.weight"]}
    assert send(sync, both) == []  # the learner may name it too
    with pytest.raises(GuardStop, match="came without the input embedding"):
        send(sync, {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"] * 2})


def test_an_untied_head_must_come() -> None:
    with pytest.raises(GuardStop, match=r"no 'lm_head.weight', and .* not tied"):
        send(WeightSync(tied=False), weights())


def test_a_name_that_the_first_transfer_did_not_have() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    with pytest.raises(
        GuardStop, match=r"sent 'model.extra.new.weight', which its first transfer did not have"
    ):
        send(sync, {**tensors, "model.extra.new.weight": torch.zeros(1)})


def test_after_forgetting_a_part_is_not_enough() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    sync.forget()
    with pytest.raises(GuardStop, match=r"lost its weights and .* did not come"):
        send(sync, {n: t for n, t in tensors.items() if ".mlp." in n})


def test_what_arrives_is_compared() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    transfer = sync.transfer(tensors.items())
    received = {name: digest(tensor) for name, tensor in transfer}
    for fault, message in (
        (
            {n: d for n, d in received.items() if n != NAMES[0]},
            f"of 15 tensors 1 never arrived: '{NAMES[0]}'",
        ),
        ({**received, NAMES[1]: "0"}, f"1 arrived changed: '{NAMES[1]}'"),
        ({**received, "other": "0"}, "1 were never sent: 'other'"),
        ({}, "15 never arrived: .* and 12 more"),
    ):
        with pytest.raises(GuardStop, match=message):
            sync.settle(transfer, fault)
    assert send(sync, tensors) == [*NAMES, "lm_head.weight"]  # nothing of a failed transfer is believed


def test_a_transfer_that_failed_is_sent_again() -> None:
    sync, tensors = WeightSync(tied=True), weights()
    send(sync, tensors)
    tensors[f"{LAYER}.mlp.up_proj.weight"].mul_(2)
    transfer = sync.transfer(tensors.items())
    list(transfer)
    with pytest.raises(GuardStop):
        sync.settle(transfer, {})
    assert f"{LAYER}.mlp.up_proj.weight" in send(sync, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 5000, 300_000])
def test_a_digest_sees_every_place_shape_and_dtype(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    tensor = torch.randint(1, 100, (size,)).to(dtype)
    value = digest(tensor)
    assert value == digest(tensor.clone())
    assert len(value) == 64
    for place in {0, size // 2, size - 1} if size else ():
        other = tensor.clone()
        other[place] += 1
        assert digest(other) != value
    if size > 1:
        assert digest(tensor.roll(1)) != value or bool((tensor == tensor[0]).all())
        assert digest(tensor[None]) != value
    if dtype is torch.bfloat16 and size:
        assert digest(tensor.view(torch.float16)) != value


def test_a_digest_of_a_view_is_that_of_its_values() -> None:
    base = torch.randn(65, 513)
    assert digest(base.T) == digest(base.T.contiguous())
    odd = base.flatten()[1:]  # not aligned to 8 bytes
    assert digest(odd) == digest(odd.clone())
    columns = torch.randn(1024, 8)
    swapped = columns[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert digest(columns) != digest(swapped)
