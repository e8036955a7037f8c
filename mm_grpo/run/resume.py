"""State of a run over checkpoints: loaded when the run resumes, saved when a checkpoint is due.

The learner's state is in checkpoint.py. Beside it a checkpoint keeps, under `extra`, the tokens seen, the identity of
the run (same_run.py), its evaluations, the state of the rows' order, and the steps sampled ahead (inflight_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.order import PromptOrder
from mm_grpo.errors import ConfigError
from mm_grpo.learner.learner import Learner
from mm_grpo.rollout.collect import Rollout
from mm_grpo.run.checkpoint import Checkpoints
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.inflight_state import pack_ahead
from mm_grpo.run.manifest import Checkpoint
from mm_grpo.run.metrics import iter_metrics
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.same_run import check_rows, refuse_another_run


class RunState:
    """Checkpoints of a run, and what they keep beside the learner's state. Every process calls its methods."""

    def __init__(
        self,
        paths: RunPaths,
        learner: Learner,
        config: GRPOConfig,
        evaluations: Evaluations,
        sets: Mapping[str, Rows],
        order: PromptOrder,
        identity: Callable[[], dict[str, Any]],
        *,
        max_steps: int,
        save_every: int,
    ) -> None:
        self.checkpoints, self.paths, self.config = Checkpoints(paths, learner, config), paths, config
        self.evaluations, self.order, self.identity = evaluations, order, identity
        self.sets = sets
        self.max_steps, self.save_every, self.ranks = max_steps, save_every, learner.ranks
        self.step = 0
        """Step of the checkpoint that was loaded, 0 for none."""
        self.changed_rows: Sequence[int] = ()
        """Training rows that are not what they were at that step."""
        self.extra: Mapping[str, Any] = {}
        """Its `extra`."""
        self.log: bytes | None = None
        """Its copy of metrics.jsonl."""

    def load(self, resume: bool | Checkpoint) -> int:
        """Load the newest checkpoint, or the one that is passed; return its step, 0 when there is none.

        Raises ConfigError when it is another run's, or when the run took steps and saved no checkpoint.
        """
        if resume is False:
            return 0
        checkpoint = self.checkpoints.newest() if resume is True else resume
        if checkpoint is None:
            metrics = self.paths.metrics
            rows = sum(row["step"] > 0 for row in iter_metrics(metrics)) if metrics.exists() else 0
            if rows and not self.save_every:
                raise ConfigError(
                    f"run.dir = '{self.paths.root}' has {rows} finished steps and no checkpoint, because "
                    "run.save_every is 0; start again with run.overwrite=true, and set run.save_every"
                )
            return 0
        run, identity = self.config.run, self.identity()
        refuse_another_run(checkpoint, identity, self.max_steps, allow_changed_code=run.allow_changed_code)
        self.changed_rows = check_rows(
            checkpoint, identity["rows"], self.sets, self.order, allowed=run.allow_changed_rows
        )
        self.checkpoints.load(checkpoint)
        self.step, self.extra = checkpoint.step, checkpoint.extra
        self.log = checkpoint.log if resume is True else None
        return self.step

    def save(
        self, step: int, tokens_seen: int, finished: Callable[[], Mapping[int, Rollout]], *, due: bool
    ) -> Path | None:
        """Write the checkpoint of `step` when it is due, or the evaluation the best; return its path, or None.

        `finished` returns the steps that were sampled ahead and not learned from.
        """
        best = self.evaluations.best.step if self.evaluations.best else None
        if not self.save_every or not (due or best == step or step % self.save_every == 0):
            return None
        extra = {
            "tokens_seen": tokens_seen,
            **self.identity(),
            **self.evaluations.state(),
            **self.order.state(),
            **pack_ahead(finished(), self.ranks),
        }
        return self.checkpoints.save(step, extra, spared=best)
