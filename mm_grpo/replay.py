"""Replay: take a logged step of a run again, and find the first difference (`mm-grpo doctor RUN --replay STEP`).

The steps from the nearest checkpoint to the asked one are taken by the trainer itself, in a folder that is removed
afterwards. The rows of each step's rollout file are compared with the run's, stage by stage in the order of `STAGES`:
a prompt that differs also changes its tokens, so the first stage is the cause. Then the metrics of the update are
compared, and the weights if the run has a checkpoint of the asked step. Nothing is written to the run's folder.

With staleness k, a step is sampled under the weights of k + 1 steps before. A checkpoint that is nearer holds its
completions, and these would not be sampled again, so the replay begins k steps earlier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_json, temporary_folder
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.manifest import Checkpoint, checkpoints_in, inspect_checkpoint, read_checkpoint
from mm_grpo.run.metrics import read_rows
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.run.same_run import deciding_fields, differing_field
from mm_grpo.terminal import print_phase
from mm_grpo.trainer import GRPOTrainer

STAGES: Mapping[str, Sequence[str]] = {
    "prompt": ("uid", "images", "videos", "messages", "columns", "prompt_digest"),
    "seed": ("seed", "weight_versions"),
    "token": ("completion", "token_digest", "tokens", "finish_reason", "turn texts", "masked"),
    "reward": ("parts", "reward", "turn rewards"),
    "advantage": ("advantage", "turn advantages"),
}
"""Keys of a rollout's row (run/rollout_log.py) by the stage that makes them."""
Rows = Sequence[Mapping[str, Any]]
GRADIENT = ("learning_rate", "loss", "grad_norm", "learner/update_norm")
METRIC_LIMIT = 1e-4
"""Largest relative difference of a metric; of values below 0.01, the absolute one is below 1e-6."""
UPDATE_LIMIT, TENSOR_LIMIT = 1e-5, 1e-2
"""Largest differences of an update over its norm: of all tensors together, and of one tensor."""
# AdamW divides by the gradient's size, so a tensor whose gradient is rounding alone (a bias of keys) differs by more


@dataclass(frozen=True)
class Difference:
    """First difference between a run's log and its replay."""

    step: int
    stage: str
    """One of STAGES, or "gradient"."""
    place: str
    logged: Any
    replayed: Any

    def __str__(self) -> str:
        old, new = (
            json.dumps(v, ensure_ascii=False, default=str)[:120] for v in (self.logged, self.replayed)
        )
        return f"first difference: {self.stage}, step {self.step}, {self.place}: {old} in the log, {new} now"


@dataclass
class ReplayReport:
    """Result of a replay. `update_gap` is None if the run has no checkpoint of the asked step."""

    run: Path
    step: int
    start: int
    """Step of the checkpoint that the replay began from; 0 for the weights that the run began with."""
    completions: int = 0
    metric_gap: float | None = None
    """Largest relative difference of a metric in GRADIENT; None if none was logged."""
    update_gap: float | None = None
    """Difference of the weights' change since `start` over its norm, all trained tensors together."""
    tensor_gap: float = 0.0
    """The same of the tensor that differs most."""
    versions: list[str] = field(default_factory=list)
    """Packages whose version is another than the run's."""
    difference: Difference | None = None

    def lines(self) -> list[str]:
        """Return the report as text."""
        source = f"the checkpoint of step {self.start}" if self.start else "the first weights"
        count = f"{self.step - self.start} step(s), {self.completions} completions compared"
        metrics = (
            "not logged" if self.metric_gap is None else f"largest relative difference {self.metric_gap:.1e}"
        )
        weights = "not compared, the run has no checkpoint of that step"
        if self.update_gap is not None:
            gaps = f"{self.update_gap:.1e} of its norm, that of one tensor by at most {self.tensor_gap:.1e}"
            weights = f"their change differs by {gaps}"
        return [
            f"replay of step {self.step} of {self.run} from {source}: {count}",
            *(f"another version: {version}" for version in self.versions),
            f"metrics of the update: {metrics}",
            *[f"weights: {weights}"] * (self.difference is None or self.update_gap is not None),
            str(self.difference or "no difference"),
        ]


def replay(run: str | Path, step: int, config: GRPOConfig | None = None, **arguments: Any) -> ReplayReport:
    """Take the steps of `run` up to `step` again from the nearest checkpoint, and compare. Collective.

    `config` is the run's own, with other values of fields that change no result, such as addresses of servers.
    `arguments` are those of GRPOTrainer that the run was made with from Python (train, rewards, model, ...). Raises
    ConfigError if `run` is no run folder, has no log of the step or is of another config, GuardStop if a guard stops
    the replay.
    """
    paths = RunFolder.open(run).paths
    saved = GRPOConfig.from_yaml(paths.config)
    config = config or saved
    if differing := differing_field(deciding_fields(config), deciding_fields(saved)):
        name, value, old = differing
        raise ConfigError(
            f"{name} = {json.dumps(value)}: the run was made with {json.dumps(old)}; leave it as it was"
        )
    start = _start(paths, step, config.rollout.max_staleness)
    report = ReplayReport(paths.root, step, 0 if start is None else start.step)
    report.versions = _other_versions(paths)
    with temporary_folder("replay") as work:
        changes = {"dir": str(work / "run"), "trackers": [], "report": False, "save_model": False}
        allowed = {"allow_changed_rows": True, "allow_changed_code": True, "overwrite": False}
        run_fields = {f"run.{name}": value for name, value in {**changes, **allowed}.items()}
        trainer = _Replay(config.with_values(run_fields), **arguments)
        trainer.parts.resume = start or False
        trainer.logged, trainer.report = paths, report
        trainer.train()
    return report


class _Replay(GRPOTrainer):
    """Trainer that takes the steps up to `report.step` and compares each with those of `logged`."""

    logged: RunPaths
    report: ReplayReport

    def _train(self) -> dict[str, Any]:
        report = self.report
        with closing(self.parts):
            self._load_checkpoint()
            with self.ranks.fail_together("resuming"):
                ahead = self.parts.steps_ahead()
            self.pipeline.begin(self.resumed_at, ahead)
            before = self._masters()
            for step in range(self.resumed_at + 1, report.step + 1):
                self.parts.phase(f"taking step {step} again")
                metrics = self._step(step)
                with self.ranks.fail_together("comparing"):
                    if self.ranks.first:
                        report.difference = self._compare(step, metrics)
                report.difference = self.ranks.broadcast(report.difference, "comparing")
                if report.difference is not None:
                    break
            else:
                self._compare_weights(before)
            self.pipeline.drain()
        self.engine.close()
        return {}

    def _compare(self, step: int, metrics: Mapping[str, Any]) -> Difference | None:
        """Compare the logged rows and metrics of a step with those of the replay; count them in the report."""
        report, file = self.report, self.logged.rollout_file(step)
        try:
            logged = read_rollouts(self.logged, step) if file.exists() or step == report.step else None
            row = next((row for row in read_rows(self.logged.metrics) if row["step"] == step), {})
            new = read_rollouts(self.folder.paths, step)
            difference = None if logged is None else first_difference(logged, new)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{file}' or metrics.jsonl is not what a run writes ({error!r})") from None
        report.completions += len(logged or ())
        if difference is not None:
            return Difference(step, *difference)
        for name in GRADIENT if row else ():  # a run that was killed may have logged completions alone
            gap = relative_gap(row.get(name), metrics.get(name))
            report.metric_gap = max(report.metric_gap or 0.0, gap)
            if gap > METRIC_LIMIT:
                return Difference(step, "gradient", name, row.get(name), metrics.get(name))
        return None

    def _compare_weights(self, before: Mapping[str, Tensor]) -> None:
        """Compare the trained weights with the run's checkpoint of the asked step, if there is an intact one."""
        report, path = self.report, self.logged.checkpoints / f"step-{self.report.step:06d}"
        is_intact = self.ranks.first and path.is_dir() and inspect_checkpoint(path)[1] is None
        if not self.ranks.broadcast(is_intact, "looking for a checkpoint"):
            return
        now = self._masters()
        self.state.checkpoints.load(read_checkpoint(path))
        logged = self._masters()
        squares = {n: (_square(w - logged[n]), _square(logged[n] - before[n])) for n, w in now.items()}
        # a process has some tensors, or some rows of them
        parts = self.ranks.all_gather(squares, "comparing")
        sums = {
            name: [sum(part[name][i] for part in parts if name in part) for i in (0, 1)]
            for name in sorted({name for part in parts for name in part})
        }
        gaps = {name: _ratio(*pair) for name, pair in sums.items()}
        worst = max(gaps, key=gaps.__getitem__)
        report.tensor_gap = gaps[worst]
        report.update_gap = _ratio(*map(sum, zip(*sums.values(), strict=True)))
        if not (report.update_gap <= UPDATE_LIMIT and report.tensor_gap <= TENSOR_LIMIT):
            place = f"the change of the weights since step {report.start} ({worst})"
            gap = f"off by {report.update_gap:.1e} of its norm, in the tensor by {report.tensor_gap:.1e}"
            report.difference = Difference(report.step, "gradient", place, "its own", gap)

    def _masters(self) -> dict[str, Tensor]:
        """Return a copy of this process's share of the fp32 weights, by name; each weight is in one share."""
        fragments = (f for f in self.learner.optimizer.fragments() if self.ranks.first or not f.repeated)
        return {f.name: f.tensors["master"].detach().to("cpu", torch.float32, copy=True) for f in fragments}


def first_difference(logged: Rows, new: Rows) -> tuple[str, str, Any, Any] | None:
    """Return stage, place, logged and new value of the first difference between rows of a step; None without one."""
    places = (
        [((row["attempt"], row["slot"], row["generation"]), row) for row in rows] for rows in (logged, new)
    )
    old_rows, new_rows = ({place: _with_turns(row) for place, row in rows} for rows in places)
    for stage, keys in STAGES.items():
        for place in sorted({*old_rows, *new_rows}):
            old, row = old_rows.get(place), new_rows.get(place)
            where = f"attempt {place[0]}, slot {place[1]}, generation {place[2]}"
            if old is None or row is None:
                return stage, where, old and old["uid"], row and row["uid"]
            for key in (key for key in keys if key in old and key in row):  # conversations have more
                if difference := _differing(f"{where} ({row['uid']}), {key}", old[key], row[key]):
                    return stage, *difference
    return None


def _differing(place: str, old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """Return the place of the first difference within two JSON values, and the values there; None without one."""
    if isinstance(old, str) and isinstance(new, str) and old != new:
        pairs = enumerate(zip(old, new, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
        return f"{place}, character {at}", old[at:], new[at:]
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [(f"{place} {key!r}", old.get(key), new.get(key)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list):
        parts = [(f"{place} {i}", *values) for i, values in enumerate(zip_longest(old, new))]
    else:
        is_close = isinstance(old, float) and relative_gap(old, new) <= METRIC_LIMIT
        return None if is_close or old == new else (place, old, new)
    return next(filter(None, (_differing(*part) for part in parts)), None)


def relative_gap(logged: Any, new: Any) -> float:
    """Return how far two numbers differ: 0 if they are equal, infinity if one is none or not finite.

    >>> relative_gap(2.0, 1.0), relative_gap(None, 1.0), relative_gap(None, None)
    (0.5, inf, 0.0)
    """
    if logged == new or (logged != logged and new != new):
        return 0.0
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (logged, new)):
        return math.inf
    return float(abs(logged - new) / max(abs(logged), abs(new), 1e-2))


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _ratio(gap: float, update: float) -> float:
    """Return the norm of a difference over the norm of an update, from their squares."""
    return math.sqrt(gap / update) if update else math.inf if gap else 0.0


def _with_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the parts of its turns by the stage that makes them."""
    turns = row.get("turns", ())
    scored = {f"turn {key}s": [turn.get(key) for turn in turns] for key in ("reward", "advantage")}
    texts = [{k: v for k, v in turn.items() if k not in ("reward", "advantage")} for turn in turns]
    return {**row, "turn texts": texts, **scored}


def _start(paths: RunPaths, step: int, staleness: int) -> Checkpoint | None:
    """Return the newest intact checkpoint from which `step` can be sampled again; None to begin at step 0."""
    steps = logged_steps(paths)
    if step not in steps:
        known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise ConfigError(f"--replay {step}: '{paths.root}' has no rollouts of that step; {known}")
    for path in reversed([p for s, p in checkpoints_in(paths.checkpoints).items() if s < step - staleness]):
        manifest, fault = inspect_checkpoint(path)
        if fault is None:
            return Checkpoint(path, manifest)
        print_phase(f"{fault}; an older one is used")
    return None


def _other_versions(paths: RunPaths) -> list[str]:
    """Return packages whose version differs from that in the run's environment.json."""
    now = describe_environment()
    try:
        then = read_json(paths.environment, dict)
        pairs = {name: (then["packages"].get(name), version) for name, version in now["packages"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [f"not known, {paths.environment.name} is not what a run writes ({error!r})"]
    pairs |= {name: (then.get(name), now[name]) for name in ("mm_grpo", "python")}
    return [f"{name}: {old} then, {new} now" for name, (old, new) in pairs.items() if old != new]
