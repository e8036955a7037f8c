"""What is sent to an engine: whole units, what changed; and the proof of what arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_grpo.errors import GuardStop
from mm_grpo.rollout import weights as weights_module
from mm_grpo.rollout.weights import WeightLedger, digest, digests, unit_of

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
    "lm_head.weight",
]


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(6, 4) for name in NAMES}


class Receiver:
    """An engine that digests what it takes, and says that it has what `fault` makes of that."""

    holds_weights = True

    def __init__(self, fault: Callable[[dict[str, str]], dict[str, str]] = dict) -> None:
        self.fault = fault

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, str]:
        return self.fault({name: weights_module.digest(tensor) for name, tensor in tensors})


def send(ledger: WeightLedger, tensors: Mapping[str, Tensor], engine: Any = None) -> list[str]:
    """Transfer to an honest engine, or to another one; the names that went."""
    return list(ledger.send(engine or Receiver(), tensors.items(), 0).digests)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        (f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.self_attn"),
        (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp"),
        (f"{LAYER}.mlp.experts.12.up_proj.weight", f"{LAYER}.mlp"),
        (f"{LAYER}.input_layernorm.weight", LAYER),
        ("model.language_model.norm.weight", "model.language_model"),
        ("lm_head.weight", ""),
    ],
)
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_everything_goes_first_and_then_what_changed() -> None:
    ledger, tensors = WeightLedger(), weights()
    assert send(ledger, tensors) == NAMES
    assert send(ledger, tensors) == []
    tensors[f"{LAYER}.mlp.up_proj.weight"][0, 0] += 1e-7
    assert send(ledger, tensors) == [f"{LAYER}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    ledger.forget()  # sleep level 2
    assert sorted(send(ledger, tensors)) == sorted(NAMES)


def test_a_layer_is_digested_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each one waits for all that was begun before."""

    class Believes(Receiver):
        def update_weights(self, tensors: Any, version: int) -> Any:
            dict(tensors)
            return tensors.digests

    ledger, tensors = WeightLedger(), weights()
    read: list[int] = []
    cpu = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: read.append(len(tensor)) or cpu(tensor))
    runs = [len(list(names)) for _, names in groupby(NAMES, key=unit_of)]
    for transfers in (len(runs), len(set(map(unit_of, NAMES)))):
        read.clear()
        send(ledger, tensors, Believes())
        assert len(read) == transfers and sum(read) == 6 * 4 * 4 * len(NAMES)


def test_a_part_of_a_unit_is_never_sent() -> None:
    ledger, tensors = WeightLedger(), weights()
    send(ledger, tensors)
    changed = {n: t for n, t in tensors.items() if "q_proj" in n or "v_proj" in n}
    assert send(ledger, changed) == []  # nothing changed, so nothing is due
    changed[f"{LAYER}.self_attn.v_proj.weight"].mul_(2)
    with pytest.raises(GuardStop, match=rf"'{LAYER}.self_attn' changed and came without .*k_proj.weight'"):
        send(ledger, changed)
    whole = {n: t for n, t in tensors.items() if ".self_attn." in n}
    assert list(send(ledger, whole)) == list(whole)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda d: {n: x for n, x in d.items() if n != NAMES[0]},
            f"of 15 tensors 1 never arrived: '{NAMES[0]}'",
        ),
        (lambda d: {**d, NAMES[1]: "0"}, f"1 arrived changed: '{NAMES[1]}'"),
        (lambda d: {**d, "other": "0"}, "1 were never sent: 'other'"),
        (lambda d: {}, "15 never arrived: .* and 12 more"),
    ],
)
def test_what_arrives_is_compared(fault: Any, message: str) -> None:
    ledger, tensors = WeightLedger(), weights()
    with pytest.raises(GuardStop, match=message):
        send(ledger, tensors, Receiver(fault))
    assert send(ledger, tensors) == NAMES  # nothing of a failed transfer is believed


def test_a_tensor_is_hashed_once_by_the_learner_and_once_as_received(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: Counter[int] = Counter()
    monkeypatch.setattr(weights_module, "digests", lambda ts: (hashed.update(map(id, ts)), digests(ts))[1])
    engine: Any = Receiver()
    ledger, tensors = WeightLedger(), weights()
    sent = ledger.send(engine, tensors.items(), 0)
    assert set(hashed) == {id(t) for t in tensors.values()} and set(hashed.values()) == {2}
    assert (len(sent.digests), sent.bytes) == (len(NAMES), len(NAMES) * 6 * 4 * 4)
    hashed.clear()
    assert ledger.send(engine, tensors.items(), 1).bytes == 0
    assert set(hashed.values()) == {1} and len(hashed) == len(NAMES)


def test_an_engine_that_lost_its_weights_or_takes_none_gets_all_of_them() -> None:
    engine: Any = Receiver()
    ledger, tensors = WeightLedger(), weights()
    ledger.send(engine, tensors.items(), 0)
    engine.holds_weights = False
    assert sorted(ledger.send(engine, tensors.items(), 1).digests) == sorted(NAMES)
    engine.holds_weights, engine.fault = True, lambda digests: {}
    tensors["lm_head.weight"].mul_(2)
    with pytest.raises(GuardStop, match=r"of 1 tensors 1 never arrived: 'lm_head.weight'"):
        ledger.send(engine, tensors.items(), 2)
    engine.fault = dict
    assert sorted(ledger.send(engine, tensors.items(), 3).digests) == sorted(NAMES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [1, 4096, 300_000])
def test_a_digest_sees_every_place_shape_and_dtype(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    tensor = torch.randint(1, 100, (size,)).to(dtype)
    value = digest(tensor)
    assert value == digest(tensor.clone())
    assert len(value) == 32
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[place] += 1
        assert digest(other) != value
    if size > 1:
        assert digest(tensor.roll(1)) != value or bool((tensor == tensor[0]).all())
        assert digest(tensor[None]) != value
    if dtype is torch.bfloat16:
        assert digest(tensor.view(torch.float16)) != value


def test_a_digest_is_the_same_however_much_is_folded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3000, 519)
    value = digest(tensor)
    for rows in (1, 300, weights_module._ROWS):  # the last is a GPU's number
        monkeypatch.setattr(weights_module, "_CPU_ROWS", rows)
        assert digest(tensor) == value


def test_a_digest_of_a_view_is_that_of_its_values() -> None:
    base = torch.randn(65, 513)
    assert digest(base.T) == digest(base.T.contiguous())
    odd = base.flatten()[1:]  # not aligned to 8 bytes
    assert digest(odd) == digest(odd.clone())
    columns = torch.randn(1024, 8)
    swapped = columns[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert digest(columns) != digest(swapped)
