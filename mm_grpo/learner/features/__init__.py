"""Loss features: what may be added to the updates of a run. The learner calls their hooks and knows none by name.

- `base.py`: `LossFeature`, whose hooks stand in the order of a step.
- `top_entropy.py`: only the tokens of the highest entropy enter the loss (`algorithm.top_entropy_quantile`).
- `credit.py`: advantages of tokens weighed by how much a token depends on its image (`algorithm.credit`).
- `perception.py`: PAPO's term, with masked images (`algorithm.perception_coef`).
- `twin_view.py`: the same weights with a better view of the image as a teacher (`algorithm.twin_view`).

To add one, write a file with a subclass and a line in `FEATURES`. A user's own needs no change here: it is named in
`algorithm.features`.
"""

from __future__ import annotations

from mm_grpo.config import AlgorithmConfig
from mm_grpo.errors import ConfigError
from mm_grpo.import_path import load_named
from mm_grpo.learner.features.base import FeaturePack, LossFeature
from mm_grpo.learner.features.credit import Credit
from mm_grpo.learner.features.perception import Perception
from mm_grpo.learner.features.top_entropy import TopEntropy
from mm_grpo.learner.features.twin_view import TwinView

__all__ = ["FEATURES", "FeaturePack", "LossFeature", "feature_classes"]

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
                f"algorithm.features = {address!r}: must be a subclass of mm_grpo.learner.features.LossFeature"
            )
        classes.append(kind)
    return classes
