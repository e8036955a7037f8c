"""Copies of a GPU's tensors in page-locked memory of the host."""

from __future__ import annotations

import torch

from mm_grpo.learner.snapshot import Snapshot


def test_copies_stay_when_the_tensors_change() -> None:
    tensors = {"a": torch.arange(1000.0, device="cuda"), "b": torch.rand(37, device="cuda")}
    want = {name: tensor.cpu() for name, tensor in tensors.items()}
    snapshot = Snapshot()
    found = snapshot.copies(tensors)
    for tensor in tensors.values():
        tensor.add_(1.0)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert all(copy.is_pinned() for copy in found.values())
    place = found["a"].data_ptr()
    found = snapshot.copies(tensors)
    assert found["a"].data_ptr() == place  # the memory of the first
    assert all(torch.equal(found[name], tensor + 1.0) for name, tensor in want.items())
    snapshot.clear()
