"""`bnpo`: mean over the active tokens of the batch.

Departure from TRL: there the batch is one process's micro-batch, so the update depends on how it is
split. Here packs and processes are memory and speed knobs, the batch is the whole update, and the
weights are those of `dapo`.
"""

from __future__ import annotations

from mm_grpo.algorithm.losses.dapo import weights as weights
