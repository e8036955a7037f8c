"""The reference policy that moves towards the policy during a run, as in TR-DPO (arXiv:2404.09656), soft update.

A bfloat16 weight cannot take small moves: what is less than half of its spacing, one part in 256, is lost, move
after move. So a reference in bfloat16 keeps fp32 master weights, which take the moves, and the weights that
the model runs with are these, rounded. The masters lie in the host's memory, 4 bytes for each weight in each
process, for they are needed once in `algorithm.ref_model_sync_steps` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class MovingReference:
    """The weights of the reference model `model`. `masters` are they in fp32, by name; fp32 weights are their own."""

    def __init__(self, model: Any) -> None:
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}
        self.masters = {
            name: weight if weight.dtype == torch.float32 else weight.float().cpu()
            for name, weight in self.weights.items()
        }

    def move(self, policy: Mapping[str, Tensor], share: float) -> None:
        """Take `share` of the policy's weights and the rest of the present ones, in place."""
        for name, weight in self.weights.items():
            present, goal = self.masters[name].to(weight.device), policy[name].detach().float()
            self._put(name, torch.lerp(present, goal, share))

    def load(self, masters: Mapping[str, Tensor]) -> None:
        """Take up fp32 weights, flat or not, as a checkpoint holds them."""
        for name, weight in self.weights.items():
            self._put(name, masters[name].view_as(weight))

    def _put(self, name: str, master: Tensor) -> None:
        self.masters[name].copy_(master)
        self.weights[name].copy_(master)
