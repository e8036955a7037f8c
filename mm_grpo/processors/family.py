"""`Family`: how the models of a vision-language family are built.

The learner and the embedded engine know no layout of a model. They ask the processor's family for vision tower,
language model and head, features of images and axes of position ids. The defaults are the habits of transformers'
models since version 5: `model.model` holds the tower and `language_model`, its forward calls its `get_image_features`,
and vision tensors have one entry per image along the first axis. A family overrides what is different.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.errors import ConfigError
from mm_grpo.types import Pictured


@dataclass(frozen=True)
class VisionFeatures:
    """Output of a vision tower."""

    images: tuple[Tensor, ...]
    """Features [tokens, D] of each image; in `TiledFamily` [tiles, tokens of a tile, D]."""
    levels: tuple[tuple[Tensor, ...], ...] = ()
    """The same for each deepstack level."""
    whole_levels: bool = False
    """True if the model reads a level as one tensor of all images (transformers before 5.19)."""

    def split(self, counts: Sequence[int]) -> Iterator[VisionFeatures]:
        """Yield the features of the first `counts[0]` images, of the next `counts[1]`, and so on."""
        start = 0
        for count in counts:
            part = slice(start, start + count)
            levels = tuple(level[part] for level in self.levels)
            yield VisionFeatures(self.images[part], levels, self.whole_levels)
            start += count

    @staticmethod
    def join(parts: Sequence[VisionFeatures]) -> VisionFeatures:
        """Join the features of the images of all `parts`, in order."""
        images = tuple(t for part in parts for t in part.images)
        levels = zip(*(part.levels for part in parts), strict=True)
        joined = tuple(tuple(t for tensors in level for t in tensors) for level in levels)
        return VisionFeatures(images, joined, parts[0].whole_levels)


_NEUTRAL = {
    "final_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "attention_dropout": 0.0,
}
"""Fields of text configs that change log-probs in ways the learner does not follow, with their neutral values."""


@cache
def _takes_cache(backbone: type[nn.Module]) -> bool:
    """Return True if a model's forward names its key-value cache `cache`. Called at every token."""
    return "cache" in inspect.signature(backbone.forward).parameters


class Family(ABC):
    """Layout of one family's models. `model` is always the whole transformers model, `vision` vision tensors.

    The learner relies on this for every family: the logits of a state are `hidden @ head.weight.T`; every text layer
    attends to all tokens before or to a window of them, or is of linear attention; and the positions of a completion
    count on from the largest position of the prompt. `check` refuses a model with another config. Models of families
    with the layout `unshared` (`Processor.layout`) make their masks themselves.
    """

    position_axes: tuple[int, ...] = ()
    """Axes of position ids before rows and tokens: (3,) for M-RoPE, () if tokens are counted."""
    layer_types: frozenset[str] = frozenset({"full_attention"})
    """Kinds of text layers that its models may have, as `layer_types` of a text config. The learner refuses
    `linear_attention` that it cannot start from a state (learner/linear_attention.py), and masks `sliding_attention` by
    the config's `sliding_window`."""
    video_token_id: int | None = None
    """Id of the tokens of videos; None if it is the config's `video_token_id`, or if there are no videos."""
    looks_ahead: bool = False
    """True when an image's tokens see later tokens of it; refused with vLLM on a CPU, which does not follow that."""

    def tower(self, model: Any) -> nn.Module:
        """Return the modules that make features from pixels, projectors included; several as a `ModuleList`."""
        return nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    @abstractmethod
    def blank(self, model: Any) -> dict[str, Tensor]:
        """Return vision tensors of the smallest blank image that the tower takes; packs without an image use it."""

    def check(self, model: Any) -> None:
        """Raise ConfigError for a model that the learner would run wrongly, as far as its config says."""
        text = model.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ())
        if not kinds and getattr(text, "sliding_window", None):
            kinds = {"sliding_attention"}
        kinds -= self.layer_types
        faults = [f"its layers have {', '.join(sorted(kinds))}"] if kinds else []
        if getattr(self.head(model), "bias", None) is not None:
            faults.append("its head has a bias")
        for name, neutral in _NEUTRAL.items():
            value = getattr(text, name, None)
            if value is not None and value != neutral:
                faults.append(f"its {name} is {value}")
        dropping = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
        faults += [f"{name} is dropout" for name in dropping[:1]]
        if faults:
            raise ConfigError(
                f"model.path: a {text.model_type} cannot be trained exactly: {'; '.join(faults)}; the learner computes "
                "hidden @ head.weight.T over attention to all tokens before, without dropout"
            )

    def backbone(self, model: Any) -> Any:
        """Return the model below its head: it takes token ids and vision tensors, and has `get_image_features`."""
        return model.model

    def language_model(self, model: Any) -> nn.Module:
        """Return the text layers with their embedding: adapters go there."""
        layers: nn.Module = self.backbone(model).language_model
        return layers

    def head(self, model: Any) -> Any:
        """Return the output layer, with its `weight` [V, D]."""
        return model.get_output_embeddings()

    def routers(self, model: Any) -> list[nn.Module]:
        """Return the routers of a mixture of experts; [] for a dense model."""
        return [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]

    def hidden_states(self, model: Any, **inputs: Any) -> Tensor:
        """Return the last hidden states [B, N, D]; `inputs` have their names in transformers 5.10."""
        backbone = self.backbone(model)
        if "pixel_values" in inputs:
            # features of videos are given in the place of images, with those, in the order of their tokens
            ids, video = inputs["input_ids"], getattr(model.config, "video_token_id", self.video_token_id)
            if video is not None:
                inputs["input_ids"] = ids.masked_fill(ids == video, model.config.image_token_id)
        if "past_key_values" in inputs and _takes_cache(backbone.__class__):
            # transformers 5.24 warns of the old name, and 5.40 no longer has it
            inputs["cache"] = inputs.pop("past_key_values")
        states: Tensor = backbone(**inputs).last_hidden_state
        return states

    def image_blocks(self, model: Any, input_ids: Tensor) -> Tensor:
        """Return for ids [B, N] the number of each token's image in its row, -1 for text. Called if `looks_ahead`."""
        raise NotImplementedError

    def vision(self, prompts: Sequence[Pictured]) -> dict[str, Tensor]:
        """Join the vision tensors of all images of `prompts`, in order; empty when there are none."""
        keys = sorted({key for prompt in prompts for key in prompt.vision})
        return {key: torch.cat([p.vision[key] for p in prompts if key in p.vision]) for key in keys}

    def count(self, vision: Mapping[str, Tensor]) -> int:
        """Count the images of vision tensors."""
        return len(next(iter(vision.values()))) if vision else 0

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> VisionFeatures:
        """Run the tower over images, with gradients if it is trained."""
        output = self.backbone(model).get_image_features(**vision, return_dict=True)
        images = tuple(output.pooler_output)
        levels = tuple(getattr(output, "deepstack_features", None) or ())
        whole_levels = any(isinstance(level, Tensor) for level in levels)
        lengths = [len(image) for image in images]
        parts = (level.split(lengths) if whole_levels else level for level in levels)
        return VisionFeatures(images, tuple(map(tuple, parts)), whole_levels)

    def output(self, features: VisionFeatures) -> Any:
        """Return `features` in the form of the model's `get_image_features`."""
        levels = [torch.cat(level) if features.whole_levels else level for level in features.levels]
        return SimpleNamespace(pooler_output=features.images, deepstack_features=levels)

    def tower_is_frozen(self, model: Any) -> bool:
        """Return True if the tower is frozen: an image's features are then the same in all passes of a step."""
        return not any(p.requires_grad for p in self.tower(model).parameters())


class TiledFamily(Family):
    """A family whose images are cut into tiles of one size, which all become equally many tokens.

    The vision tensors are `pixel_values` [tiles, channels, height, width] of all images, and `tiles` [images], their
    counts. The features of an image are [tiles, tokens of a tile, D].
    """

    @abstractmethod
    def tile(self, model: Any) -> tuple[int, int, int]:
        """Return channels, height and width of a tile."""

    def blank(self, model: Any) -> dict[str, Tensor]:
        # not zeros: some models drop a tile of zeros, as padding
        return {"pixel_values": torch.ones(1, *self.tile(model)), "tiles": torch.ones(1, dtype=torch.long)}

    def count(self, vision: Mapping[str, Tensor]) -> int:
        return len(vision["tiles"]) if vision else 0

    def pixels(self, pixel_values: Tensor) -> Tensor:
        """Return tiles in the shape that the model takes."""
        return pixel_values

    def hidden_states(self, model: Any, *, tiles: Tensor | None = None, **inputs: Any) -> Tensor:
        if "pixel_values" in inputs:
            inputs["pixel_values"] = self.pixels(inputs["pixel_values"])
        return super().hidden_states(model, **inputs)

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> VisionFeatures:
        pixels = self.pixels(vision["pixel_values"])
        output = self.backbone(model).get_image_features(pixels, return_dict=True)
        return VisionFeatures(output.pooler_output.split(vision["tiles"].tolist()))

    def output(self, features: VisionFeatures) -> Any:
        return SimpleNamespace(pooler_output=torch.cat(features.images))
