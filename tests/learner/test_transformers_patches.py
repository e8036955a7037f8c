"""What the patches of transformers rely on: each test fails where transformers no longer is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.steps import load
from safetensors.torch import load_file
from torch import nn
from transformers import AttentionMaskInterface, LlamaConfig, LlamaModel, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mm_grpo.learner import transformers_patches as patches
from mm_grpo.learner.attention import prefix_attention

pytestmark = pytest.mark.lowest


@pytest.fixture
def calls() -> Any:
    """Keyword arguments of each call of the text layers' attention, in place of which sdpa runs."""
    seen: list[dict[str, Any]] = []

    def attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        seen.append(options | {"mask": mask})
        return sdpa_attention_forward(module, query, key, value, None, **options)

    config = LlamaConfig(num_hidden_layers=1)
    patches.use_prefix_attention(config, attention)
    yield seen
    patches.use_prefix_attention(config, prefix_attention)


@pytest.mark.parametrize("given", [True, False], ids=["unread", "none"])
def test_an_unread_mask_keeps_a_text_model_from_making_one(
    given: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of one axis that start anew at each completion, as in a shared-prefix row."""
    made: list[Any] = []
    mapping = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(mapping, patches.PREFIX_ATTENTION, lambda *a, **options: made.append(options))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=20, **sizes)
    model = LlamaModel(config)
    model.config._attn_implementation = patches.PREFIX_ATTENTION
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    mask = patches.unread_mask(torch.device("cpu")) if given else None
    ids = torch.zeros(1, 7, dtype=torch.long)
    model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    assert len(calls) == 1 and len(made) == (0 if given else 1)


def test_a_patch_product_is_the_convolution() -> None:
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False)
    ours = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=False)
    ours.load_state_dict(plain.state_dict())
    patches.use_patch_product(ours)
    for shape in ((5, 3, 2, 4, 4), (1, 3, 4, 8, 8)):  # cut out patches, and a picture that is yet to be cut
        pixels = torch.randn(shape)
        torch.testing.assert_close(ours(pixels), plain(pixels))
    assert type(ours) is patches.PatchProduct


@pytest.mark.parametrize("family", patches.TURNED_EXPERTS)
def test_experts_are_saved_as_published(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Fails where transformers writes the layout that it reads, or reads square experts right: needless then."""
    stored = load_file(models[family] / "model.safetensors")
    model = load(models[family])
    own = dict(model.named_parameters())
    experts = [name for name in own if ".experts." in name]
    turned = family == "qwen3_vl_moe"
    assert len(experts) == 6
    for name in experts:
        assert torch.equal(stored[name].transpose(1, 2) if turned else stored[name], own[name])
    patches.save_pretrained(model, tmp_path / "ours")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == stored.keys() and all(torch.equal(ours[n], t) for n, t in stored.items())
    if turned:
        model.save_pretrained(tmp_path / "theirs")
        theirs = load_file(tmp_path / "theirs" / "model.safetensors")
        assert all(torch.equal(theirs[name], own[name]) for name in experts)
        square = load(tiny.build(family, tmp_path / "square", expert_width=32)).state_dict()
        on_disk = load_file(tmp_path / "square" / "model.safetensors")
        name = next(name for name in experts if name.endswith("gate_up_proj"))
        assert torch.equal(square[name], on_disk[name]) and not torch.equal(on_disk[name], on_disk[name].mT)


def test_a_model_is_saved_without_accelerate(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(models["qwen2_vl"])
    asked: list[Any] = []
    # fails where save_pretrained no longer asks: then the patch is needless
    monkeypatch.setattr(modeling_utils, "unwrap_model", lambda model: asked.append(model) or model)
    model.save_pretrained(tmp_path / "plain", state_dict={})
    assert asked == [model]
    patches.save_pretrained(model, tmp_path / "patched", max_shard_size="5GB")
    assert asked == [model]
    again = type(model).from_pretrained(tmp_path / "patched")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
