"""What the patches of transformers rely on: each test fails where transformers no longer is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.families import TABLE
from helpers.steps import load
from torch import nn
from transformers import (
    AttentionMaskInterface,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaModel,
    modeling_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mm_grpo.learner import transformers_patches as patches
from mm_grpo.learner.attention import prefix_attention
from mm_grpo.processors.base import load_processor


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


@pytest.mark.slow
@pytest.mark.parametrize("family", TABLE)
def test_text_layers_hand_on_what_the_forward_is_given(
    family: str, models: dict[str, Path], calls: list[dict[str, Any]]
) -> None:
    processor, model = load_processor(str(models[family])), load(models[family])
    model.config.get_text_config()._attn_implementation = patches.PREFIX_ATTENTION
    prompt = processor.prompt(tiny.sample("r", images=(tiny.picture(1),)))
    mask = patches.unread_mask(torch.device("cpu"))
    processor.family.hidden_states(
        model,
        input_ids=torch.tensor([prompt.token_ids]),
        position_ids=prompt.position_ids[..., None, :],
        attention_mask=mask,
        prefix="a layout",
        **prompt.vision,
    )
    assert [call["prefix"] for call in calls] == ["a layout"] * (1 if family == tiny.HYBRID else 3)
    assert all(call["mask"] is mask for call in calls)


@pytest.mark.parametrize("given", [True, False], ids=["unread", "none"])
def test_an_unread_mask_keeps_a_text_model_from_making_one(
    given: bool, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions of one axis that start anew at each completion, as in a shared-prefix row."""
    made: list[Any] = []
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping,
        patches.PREFIX_ATTENTION,
        lambda *a, **options: made.append(options),
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=20, **sizes)
    model = LlamaModel(config)
    model.config._attn_implementation = patches.PREFIX_ATTENTION
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    mask = patches.unread_mask(torch.device("cpu")) if given else None
    model(
        input_ids=torch.zeros(1, 7, dtype=torch.long),
        position_ids=positions,
        attention_mask=mask,
        use_cache=False,
    )
    assert len(calls) == 1 and len(made) == (0 if given else 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_linear_attention_are_handed_what_the_forward_is_given(
    checkpointing: bool, models: dict[str, Path]
) -> None:
    processor, model = load_processor(str(models[tiny.HYBRID])), load(models[tiny.HYBRID])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[Any] = []

    def forward(layer: Any, hidden: Any, shared_state: Any) -> Any:
        seen.append((layer, shared_state))
        return hidden

    layers = patches.use_shared_state(model, forward)
    assert layers == [model.model.language_model.layers[i].linear_attn for i in (0, 2)]
    prompt = processor.prompt(tiny.sample("r"))
    inputs = {"input_ids": torch.tensor([prompt.token_ids]), "position_ids": prompt.position_ids[:, None]}
    processor.family.hidden_states(model, **inputs, shared_state="a state")
    assert seen == [(layer, "a state") for layer in layers]
    with torch.no_grad():  # without one they are transformers' own
        ours = processor.family.hidden_states(model, **inputs)
        assert torch.equal(ours, processor.family.hidden_states(load(models[tiny.HYBRID]), **inputs))
    assert len(seen) == 2


def test_layers_of_linear_attention_are_built_as_they_are_run(models: dict[str, Path]) -> None:
    """What their own forward reads, by the names of weights; test_linear_attention.py compares what they compute."""
    layer = load(models[tiny.HYBRID]).model.language_model.layers[0].linear_attn
    assert type(layer).__name__ in patches.DELTA_NETS
    projections = [f"in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")]
    named = {*projections, "A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight"}
    assert {name for name, _ in layer.named_parameters()} == named
    convolution = layer.conv1d
    assert convolution.kernel_size == (layer.conv_kernel_size,) == (4,) and convolution.bias is None
    assert convolution.groups == convolution.out_channels == 2 * layer.key_dim + layer.value_dim
    assert (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim) == (1, 2, 16, 16)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, tiny.HYBRID])
def test_towers_attend_over_cuts_and_embed_patches_by_one_convolution(
    family: str, models: dict[str, Path]
) -> None:
    tower = load(models[family]).model.visual
    names = [name for name, _ in tower.named_parameters()]
    layers = [part for part in tower.modules() if type(part).__name__.endswith("Attention")]
    assert len(layers) == 2 and all(patches.takes_cuts(layer) for layer in layers)
    convolutions = [part for part in tower.modules() if isinstance(part, nn.Conv3d)]
    patches.use_varlen_attention(tower, lambda *a, **options: None)
    patches.use_patch_product(tower)
    assert [type(part) for part in convolutions] == [patches.PatchProduct]
    assert all(layer.config._attn_implementation == patches.VARLEN_ATTENTION for layer in layers)
    assert [name for name, _ in tower.named_parameters()] == names


def test_a_tower_of_one_image_at_a_time_is_left_alone() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    tower = CLIPVisionModel._from_config(CLIPVisionConfig(image_size=28, patch_size=14, **sizes))
    types = [type(part) for part in tower.modules()]
    patches.use_varlen_attention(tower, lambda *a, **options: None)
    patches.use_patch_product(tower)
    assert tower.config._attn_implementation == "sdpa"
    assert [type(part) for part in tower.modules()] == types


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


@pytest.mark.parametrize("family", TABLE)
def test_a_model_takes_features_for_whatever_pixels_it_is_given(family: str, models: dict[str, Path]) -> None:
    processor, model = load_processor(str(models[family])), load(models[family])
    layout = processor.family
    prompts = [
        processor.prompt(tiny.sample("r", images=(tiny.picture(i), tiny.picture(i + 5)))) for i in (1, 2)
    ]
    backbone = layout.backbone(model)

    def run(**vision: Any) -> Any:
        positions = prompts[0].position_ids[..., None, :]
        ids = torch.tensor([prompts[0].token_ids])
        return layout.hidden_states(model, input_ids=ids, position_ids=positions, **vision)

    with torch.no_grad():
        one, other = (run(**prompt.vision) for prompt in prompts)
        features = layout.features(model, prompts[1].vision)
        assert len(features.images) == layout.count(prompts[1].vision) == 2
        with patches.features_for_pixels(backbone, lambda: layout.output(features)) as pixels:
            given = run(**pixels)
        after = run(**prompts[0].vision)
    torch.testing.assert_close(given, other)
    assert float((other - one).abs().max()) > 1e-3
    assert torch.equal(after, one) and "get_image_features" not in vars(backbone)


def test_a_model_is_saved_without_asking_accelerate_what_wraps_it(
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
