"""Products of few rows on a CPU: weights in the layout of oneDNN while an engine decodes.

torch's linear layers in float32 go to the BLAS that it was built with, which for a few rows and weights that lie
in rows can be far from what the machine does (MKL on processors of AMD: 2 to 4 times slower than oneDNN with
weights that are packed once). Each layer computes the same sums, in another order. Where torch has no oneDNN, on a
GPU and in other precisions nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST = 1 << 14
"""Numbers in a weight that is worth packing: a smaller one is in the processor's cache anyway."""
LIMIT = 4 << 30
"""Bytes that the packed copies may take; of a larger model nothing is packed."""


@contextmanager
def packed(*modules: nn.Module) -> Iterator[None]:
    """Run the linear layers in `modules` on packed copies of their weights, which must not change meanwhile.

    The copies take as much memory as the weights, LIMIT at most.
    """
    layers = {
        layer
        for module in modules
        for layer in module.modules()
        if type(layer) is nn.Linear and "forward" not in vars(layer) and _is_worth_it(layer.weight)
    }
    if sum(layer.weight.numel() * layer.weight.element_size() for layer in layers) > LIMIT:
        layers = set()
    try:
        for layer in layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
            layer.forward = partial(_linear, weight, layer.bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _is_worth_it(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= SMALLEST
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    result: Any = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result  # type: ignore[no-any-return]
