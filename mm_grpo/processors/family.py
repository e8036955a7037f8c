"""`Family`: how the models of a vision-language family are built, for what runs, trains or adapts one.

The learner and the embedded engine know no layout of a model. They ask the family of the processor for the vision
tower, the language model and the head, for the features of images and for the axes of position ids. The defaults are
the habits of transformers' models since version 5: `model.model` holds the tower and `language_model`, its
`get_image_features` is what its forward calls, and vision tensors have one entry per image along the first axis.
A family overrides what is otherwise.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mm_grpo.errors import ConfigError
from mm_grpo.types import Pictured


@dataclass(frozen=True)
class VisionFeatures:
    """Output of a vision tower: `images` are the features [tokens, D] of each (in `TiledFamily` those of its
    tiles), `levels` the same for each deepstack level.

    `whole_levels` says that the model reads a level as one tensor, of all images (transformers before 5.19).
    """

    images: tuple[Tensor, ...]
    levels: tuple[tuple[Tensor, ...], ...] = ()
    whole_levels: bool = False

    def split(self, counts: Sequence[int]) -> Iterator[VisionFeatures]:
        """The features of the first `counts[0]` images, of the next `counts[1]`, and so on."""
        start = 0
        for count in counts:
            own = slice(start, start + count)
            yield VisionFeatures(self.images[own], tuple(x[own] for x in self.levels), self.whole_levels)
            start += count

    @staticmethod
    def join(parts: Sequence[VisionFeatures]) -> VisionFeatures:
        """The features of the images of all `parts`, in order."""
        images = tuple(t for part in parts for t in part.images)
        levels = zip(*(part.levels for part in parts), strict=True)
        joined = tuple(tuple(t for own in level for t in own) for level in levels)
        return VisionFeatures(images, joined, parts[0].whole_levels)

    def tensors(self) -> list[Tensor]:
        """All of them, the levels last."""
        return [*self.images, *(t for level in self.levels for t in level)]


_NEUTRAL = {
    "final_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "attention_dropout": 0.0,
}
"""Fields of text configs that change log-probs in ways the learner does not follow, and the value that changes none."""


class Family(ABC):
    """The layout of one family's models. `model` is always the whole transformers model, `vision` vision tensors.

    What holds for every family, and is not asked: the logits of a state are `hidden @ head.weight.T`; every text layer
    attends to all tokens before or to a window of them, or is of linear attention; and the tokens of a completion have
    the positions that follow the largest one of the prompt, one by one. `check` refuses a model where its config says
    otherwise. Where a family is laid out unshared (`Processor.layout`), its models make their masks themselves.
    """

    position_axes: tuple[int, ...] = ()
    """The axes of position ids before those of rows and tokens: (3,) for M-RoPE, () where tokens are counted."""
    layer_types: frozenset[str] = frozenset({"full_attention"})
    """Kinds of text layers that its models may have, as `layer_types` of a text config names them. The learner refuses
    those of `linear_attention` that it cannot start from a state (learner/linear_attention.py), and masks those of
    `sliding_attention` by the config's `sliding_window`."""
    looks_ahead: bool = False
    """True when an image's tokens see those that follow in it; vLLM on a CPU does not follow that, and is refused."""

    def tower(self, model: Any) -> nn.Module:
        """Everything that makes features from pixels, projectors included; several modules as a `ModuleList`."""
        return nn.ModuleList([model.model.vision_tower, model.model.multi_modal_projector])

    @abstractmethod
    def blank(self, model: Any) -> dict[str, Tensor]:
        """The vision tensors of the smallest blank image that the tower takes, for packs without an image."""

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
        """The model below its head: it takes token ids and vision tensors, and has `get_image_features`."""
        return model.model

    def language_model(self, model: Any) -> nn.Module:
        """The text layers with their embedding: where adapters are put."""
        layers: nn.Module = self.backbone(model).language_model
        return layers

    def head(self, model: Any) -> Any:
        """The output layer, with its `weight` [V, D]."""
        return model.get_output_embeddings()

    def hidden_states(self, model: Any, **inputs: Any) -> Tensor:
        """The last hidden states [B, N, D]; `inputs` are those of transformers' models, by their names in 5.10."""
        backbone = self.backbone(model)
        if "past_key_values" in inputs and "cache" in inspect.signature(backbone.forward).parameters:
            inputs["cache"] = inputs.pop(
                "past_key_values"
            )  # 5.24 warns of the old name, and 5.40 has it no more
        states: Tensor = backbone(**inputs).last_hidden_state
        return states

    def image_blocks(self, model: Any, input_ids: Tensor) -> Tensor:
        """Of ids [B, N] the number of each one's image in its row [B, N], -1 for text. Asked where `looks_ahead`."""
        raise NotImplementedError

    def vision(self, prompts: Sequence[Pictured]) -> dict[str, Tensor]:
        """The vision tensors of all images of `prompts`, in order; empty when there are none."""
        keys = sorted({key for prompt in prompts for key in prompt.vision})
        return {key: torch.cat([p.vision[key] for p in prompts if key in p.vision]) for key in keys}

    def count(self, vision: Mapping[str, Tensor]) -> int:
        """Count the images of vision tensors."""
        return len(next(iter(vision.values()))) if vision else 0

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> VisionFeatures:
        """Run the tower over some images; with gradients where it is trained."""
        made = self.backbone(model).get_image_features(**vision, return_dict=True)
        images = tuple(made.pooler_output)
        levels = tuple(getattr(made, "deepstack_features", None) or ())
        whole = any(isinstance(level, Tensor) for level in levels)
        lengths = [len(t) for t in images]
        return VisionFeatures(images, tuple(tuple(x.split(lengths) if whole else x) for x in levels), whole)

    def output(self, features: VisionFeatures) -> Any:
        """`features` as the model's `get_image_features` returns them."""
        levels = [torch.cat(level) if features.whole_levels else level for level in features.levels]
        return SimpleNamespace(pooler_output=features.images, deepstack_features=levels)

    def tower_is_frozen(self, model: Any) -> bool:
        """True when nothing trains the tower: an image's features are then the same in all passes of a step."""
        return not any(p.requires_grad for p in self.tower(model).parameters())


class TiledFamily(Family):
    """A family whose images are cut into tiles of one size, each of which becomes as many tokens as any other.

    The vision tensors are `pixel_values` [tiles, channels, height, width] of all images, and `tiles` [images], how many
    each has. The features of an image are [tiles, tokens of a tile, D].
    """

    @abstractmethod
    def tile(self, model: Any) -> tuple[int, int, int]:
        """Channels, height and width of a tile."""

    def blank(self, model: Any) -> dict[str, Tensor]:
        """One tile of ones: some models drop tiles of zeros, as padding."""
        return {"pixel_values": torch.ones(1, *self.tile(model)), "tiles": torch.ones(1, dtype=torch.long)}

    def count(self, vision: Mapping[str, Tensor]) -> int:
        return len(vision["tiles"]) if vision else 0

    def pixels(self, pixel_values: Tensor) -> Tensor:
        """Tiles in the shape that the model takes them."""
        return pixel_values

    def hidden_states(self, model: Any, *, tiles: Tensor | None = None, **inputs: Any) -> Tensor:
        if "pixel_values" in inputs:
            inputs["pixel_values"] = self.pixels(inputs["pixel_values"])
        return super().hidden_states(model, **inputs)

    def features(self, model: Any, vision: Mapping[str, Tensor]) -> VisionFeatures:
        pixels = self.pixels(vision["pixel_values"])
        made = self.backbone(model).get_image_features(pixels, return_dict=True)
        return VisionFeatures(made.pooler_output.split(vision["tiles"].tolist()))

    def output(self, features: VisionFeatures) -> Any:
        return SimpleNamespace(pooler_output=torch.cat(features.images))
