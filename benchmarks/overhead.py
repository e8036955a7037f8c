"""What a training step of ours costs besides sampling and learning.

    OMP_NUM_THREADS=2 python benchmarks/overhead.py [--json FILE] [--steps 30] [--config FILE] [key=value ...]

The shapes recipe as it stands, without its evaluations. In each step after the warm-up the engine's `generate`, the
learner's forward and backward and the optimizer's step are timed; `outside` is what is left of `step_time` without
the first three: the optimizer, reading rows, processing images, rewards, advantages, packing, guards, logging and
the verified weight sync. Beside it stand the trainer's own `time/*` metrics, which divide the same step another
way: `time/rollout` is generate and its checks; `time/learner` forward, backward, optimizer and packing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import BASE, Stopwatch
from harness import arguments, parse, positive, run, versions

from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.errors import UserError

RECIPE = BASE.parent / "config.yaml"
WORK = ("generate", "forward", "backward")


class Clock(Stopwatch):
    """A callback that keeps, for each step, the seconds of the wrapped calls and the trainer's own metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def attach(self, trainer: Any) -> None:
        """Time the four calls where a step samples and learns: the sync samples and scores too, to verify."""
        self.wrap(trainer.engine, "generate", "generate")
        self.wrap(trainer.learner.optimizer, "forward", "forward")
        self.wrap(trainer.learner.optimizer, "backward", "backward")
        self.wrap(trainer.learner.optimizer, "apply", "optimizer")
        self.silence(trainer.sync, "update")

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        own = {k: v for k, v in metrics.items() if k == "step_time" or k.startswith("time/")}
        self.steps.append(self.take() | own)


def steps_of(steps: int, recipe: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The records of `steps` steps of the recipe."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"run.dir={folder}/run", f"run.max_steps={steps}", "run.eval_every=0", "data.eval=null",
            "run.eval_blind=null", "run.save_model=false", "run.report=false",
        ]  # fmt: skip
        trainer = GRPOTrainer(GRPOConfig.from_yaml(recipe, [*overrides, *fixed]), callbacks=[clock])
        clock.attach(trainer)
        trainer.train()
    return clock.steps


def breakdown(steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Median seconds and share of the step, by part; "outside" is what no work accounts for, step by step."""
    for step in steps:
        step["outside"] = step["step_time"] - sum(step.get(name, 0.0) for name in WORK)
    names = ["step_time", *WORK, "outside", "optimizer"]
    names += sorted({name for step in steps for name in step if name.startswith("time/")})
    found = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    shares = {
        name: statistics.median(step.get(name, 0.0) / step["step_time"] for step in steps) for name in names
    }
    return [{"part": n, "seconds": found[n], "share": shares[n]} for n in names if n != "time/eval"]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--steps", type=positive, default=30, help="timed steps")
    parser.add_argument("--warm", type=int, default=5, help="steps before them")
    parser.add_argument("--config", type=Path, default=RECIPE, help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe to change")
    args = parse(parser, argv)

    def case(_: None) -> list[dict[str, Any]]:
        return breakdown(steps_of(args.warm + args.steps, args.config, args.overrides)[args.warm :])

    try:
        run("overhead", [None], case, args, versions() | {"steps": args.steps})
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
