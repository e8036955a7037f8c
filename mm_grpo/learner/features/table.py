"""The table of loss features, and the features that a config asks for."""

from __future__ import annotations

from mm_grpo.config import AlgorithmConfig
from mm_grpo.errors import ConfigError
from mm_grpo.import_path import load_named
from mm_grpo.learner.features.base import LossFeature
from mm_grpo.learner.features.credit import Credit
from mm_grpo.learner.features.perception import Perception
from mm_grpo.learner.features.top_entropy import TopEntropy
from mm_grpo.learner.features.twin_view import TwinView

FEATURES: dict[str, type[LossFeature]] = {
    "top_entropy_quantile": TopEntropy,
    "credit": Credit,
    "perception_coef": Perception,
    "twin_view": TwinView,
}
"""The features in the order in which they act, each with the field of `algorithm` that turns it on."""


def feature_classes(algorithm: AlgorithmConfig) -> list[type[LossFeature]]:
    """Return the features whose field is not at its default, then the user's. Raise ConfigError for a wrong address."""
    fields = AlgorithmConfig.model_fields
    classes = [kind for name, kind in FEATURES.items() if getattr(algorithm, name) != fields[name].default]
    for address in algorithm.features:
        kind = load_named(address, "algorithm.features", ConfigError)
        if not (isinstance(kind, type) and issubclass(kind, LossFeature)):
            raise ConfigError(
                f"algorithm.features = {address!r}: must be a subclass of LossFeature of mm_grpo.learner.features.base"
            )
        classes.append(kind)
    return classes
