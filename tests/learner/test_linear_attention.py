"""Layers with a recurrent state: a completion that starts from its prompt's is the sequence of both, run plainly."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.passes import forward_of
from helpers.steps import config_for, load, make_groups, plain_logp, segments_of
from torch import Tensor
from torch.nn.functional import normalize

from mm_grpo.errors import ConfigError
from mm_grpo.learner import linear_attention
from mm_grpo.learner.attention import Masks
from mm_grpo.learner.completion_batch import completion_batch
from mm_grpo.learner.flex import warn_once
from mm_grpo.learner.linear_attention import SharedState, prepare_linear_layers, shared_state_forward
from mm_grpo.learner.minibatch import make_items
from mm_grpo.learner.pack import SEGMENTS_PER_GROUP as GROUP
from mm_grpo.learner.pack import by_group, layout, plan
from mm_grpo.learner.transformers_patches import DELTA_NETS, torch_rule
from mm_grpo.processors.base import load_processor

ROWS: dict[str, Any] = {
    "uneven": [[20, 9, 3, 12, 1]],
    "shorter than the convolution": [[1, 4, 70], [2, 1], [3, 2, 2]],
    "longer than a chunk": [[130, 66, 70], [70, 65, 130]],
    "two tokens": [[1, 1]],
    "groups": [[[20, 9, 3], [2, 70, 1], [130, 4, 66]], [[5, 2, 2]]],  # several batches
}


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The rule as the paper writes it, a token at a time and in the inputs' precision.

    S <- exp(g) S; S <- S + k (beta (v - S k))^T; o = S q / sqrt(d), with q and k of length 1.
    """
    query, key = (normalize(x, dim=-1, eps=1e-12) for x in (query, key))
    state = value.new_zeros(len(key), *key.shape[2:], value.shape[-1])
    state = state if initial_state is None else initial_state
    outs = []
    for t in range(key.shape[1]):
        state = state * g[:, t].to(state).exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        written = beta[:, t, :, None] * (value[:, t] - held)
        state = state + key[:, t, :, :, None] * written[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / query.shape[-1] ** 0.5)
    return torch.stack(outs, 1), state


@pytest.fixture
def layer(models: dict[str, Path]) -> Any:
    return load(models[tiny.HYBRID]).model.language_model.layers[0].linear_attn


def in_float64(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model in float64 and with the rule above, where rounding is nothing and the layout is all that can differ."""
    for layer in model.modules():
        if type(layer).__name__ in DELTA_NETS:
            module = sys.modules[type(layer).__module__]
            monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", one_by_one)
            layer.chunk_gated_delta_rule = one_by_one  # where older transformers have it
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # norms and decays are float32 in any precision
    return model.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.field_bug("leaked-state")
def test_a_pack_equals_its_sequences(rows: str, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float64(layer, monkeypatch)
    segments = segments_of(ROWS[rows])
    torch.manual_seed(0)
    hidden = torch.randn(*segments.shape, layer.hidden_size, dtype=torch.float64)
    weight = torch.randn_like(hidden) * (segments >= 0)[:, :, None]

    batch = completion_batch(segments)
    assert (len(batch.prompts) > 1) == (rows == "groups")
    leaf = hidden.clone().requires_grad_()
    ours = shared_state_forward(layer, leaf, SharedState(batch, one_by_one)) * (segments >= 0)[:, :, None]
    found = torch.autograd.grad((ours * weight).sum(), [leaf, *layer.parameters()])

    theirs = torch.zeros_like(hidden)
    other = hidden.clone().requires_grad_()
    several = [row if isinstance(row[0], list) else [row] for row in ROWS[rows]]
    numbered = ((b, g * GROUP, own) for b, row in enumerate(several) for g, own in enumerate(row))
    for b, group, lengths in numbered:
        for k in range(1, len(lengths)):
            places = ((segments[b] == group) | (segments[b] == group + k)).nonzero()[:, 0]
            out = layer(other[b, places][None])[0]
            own = slice(0 if k == 1 else lengths[0], None)  # the prompt's own outputs once
            theirs = theirs.index_put((torch.tensor(b), places[own]), out[own])
    wanted = torch.autograd.grad((theirs * weight).sum(), [other, *layer.parameters()])
    assert float(theirs.detach().abs().max()) > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for name, mine, his in zip(("hidden", *dict(layer.named_parameters())), found, wanted, strict=True):
        assert float((mine - his).norm()) <= 1e-11 * float(his.norm()) and his.norm() > 0, name


def gaps(model: Any, reference: Any, path: Path, **changes: Any) -> tuple[float, float]:
    """(log-probs, gradients) of packs of four groups against the plain forward of `reference`: largest differences.
    That of a gradient is a share of its norm; parameters without a gradient on one side have none on the other."""
    processor, config = load_processor(str(path)), config_for(path, **changes)
    groups = make_groups(processor)
    items = make_items(groups, config.algorithm)
    pairs = [(g, c) for g in groups for c in g.completions]
    expected = [plain_logp(reference, config, g, c)[0] for g, c in pairs]
    weights = [torch.linspace(0.5, 2, len(e)) for e in expected]
    torch.cat([w * e for w, e in zip(weights, expected, strict=True)]).sum().backward()
    module = forward_of(model, processor, config.rollout.temperature)
    packs = plan(items, max_tokens=170)
    assert len(packs) > 1 and any(len(by_group(row)) > 1 for rows in packs for row in rows)
    most = 0.0
    for rows in packs:
        logp = module(layout(rows, processor.media_token_ids)).logp
        own = [i.index for row in rows for i in row]
        most = max(most, float((logp - torch.cat([expected[i] for i in own])).detach().abs().max()))
        (torch.cat([weights[i] for i in own]) * logp).sum().backward()
    theirs = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert theirs.keys() == ours.keys()
    shares = [float((ours[n] - g).float().norm() / g.float().norm()) for n, g in theirs.items() if g.any()]
    return most, max(shares)


def test_a_copy_of_the_model_runs_its_own_layers(models: dict[str, Path]) -> None:
    """A reference policy is a copy of a model that may have been prepared before."""
    path = models[tiny.HYBRID]
    model = load(path)
    prepare_linear_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "linear_attn" in name:
                parameter.mul_(1.5)
    plain = load(path)
    plain.load_state_dict(other.state_dict())
    assert max(gaps(other, plain, path)) <= 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_layers_of_another_kind_are_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(models[tiny.HYBRID])
    monkeypatch.setattr("mm_grpo.learner.transformers_patches.DELTA_NETS", ("GatedDeltaNet",))
    with pytest.raises(ConfigError, match="of its 2 layers of linear attention 0 are gated delta nets"):
        Masks(model)


def test_the_kernel_is_taken_on_a_gpu_in_bfloat16(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No GPU here: the device is said to be one."""
    model = load(models[tiny.HYBRID])
    plain = torch_rule(model.model.language_model.layers[0].linear_attn)
    monkeypatch.setattr(linear_attention, "fla_rule", lambda: one_by_one)
    assert prepare_linear_layers(model) is plain  # on a CPU
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert prepare_linear_layers(model) is plain  # in float32
    monkeypatch.setattr(type(model), "dtype", torch.bfloat16)
    assert prepare_linear_layers(model) is one_by_one
    monkeypatch.setattr(linear_attention, "fla_rule", lambda: None)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mm_grpo"):
        assert prepare_linear_layers(model) is plain
    assert "mm_grpo[flash-linear-attention]" in caplog.text


def test_bfloat16_differs_by_its_rounding_alone(models: dict[str, Path]) -> None:
    """From float32 packs in bfloat16 are hardly farther than the plain forward in bfloat16 is."""
    path = models[tiny.HYBRID]
    processor, config = load_processor(str(path)), config_for(path)
    exact, plain = (
        [plain_logp(m, config, g, c)[0].detach() for g in make_groups(processor) for c in g.completions]
        for m in (load(path), load(path).bfloat16())
    )
    rounding = max(float((a - b).abs().max()) for a, b in zip(exact, plain, strict=True))
    found, gradient = gaps(load(path).bfloat16(), load(path), path)
    assert 0 < found <= 1.5 * rounding < 0.1 and gradient < 0.2
