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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import chdir, closing
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.config.yaml_file import read_yaml
from mm_grpo.errors import ConfigError
from mm_grpo.files import TEMPORARY, read_json, temporary_folder
from mm_grpo.run.environment import describe_environment
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.manifest import Checkpoint, checkpoints_in, inspect_checkpoint, read_checkpoint
from mm_grpo.run.metrics import read_rows
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.run.same_run import deciding_fields, refuse_other_fields
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
        values = (self.logged, self.replayed)
        old, new = (json.dumps(value, ensure_ascii=False, default=str)[:120] for value in values)
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
        gap = "not compared"
        if self.metric_gap is not None:
            gap = f"largest relative difference {self.metric_gap:.1e}"
        lines = [f"replay of step {self.step} of {self.run} from {source}: {count}"]
        lines += [f"another version: {version}" for version in self.versions]
        lines += [f"metrics of the update: {gap}"]
        if self.update_gap is not None:
            gaps = f"{self.update_gap:.1e} of its norm, that of one tensor by at most {self.tensor_gap:.1e}"
            lines += [f"weights: their change differs by {gaps}"]
        elif self.difference is None:
            lines += ["weights: not compared, the run has no checkpoint of that step"]
        return [*lines, str(self.difference or "no difference")]


def replay(run: str | Path, step: int, config: GRPOConfig | None = None, **arguments: Any) -> ReplayReport:
    """Take the steps of `run` up to `step` again from the nearest checkpoint, and compare. Collective.

    `config` is the run's own, with other values of fields that change no result, such as addresses of servers.
    `arguments` are those of GRPOTrainer that the run was made with from Python (train, rewards, model, ...). Raises
    ConfigError if `run` is no run folder, has no log of the step or is of another config, GuardStop if a guard stops
    the replay. Relative paths, also of `arguments`, start from the folder in which the run was started (`_start_of`).
    """
    paths = RunFolder.open(Path(run).absolute()).paths
    saved = GRPOConfig.from_dict(read_yaml(paths.config))  # without keys, which `deciding_fields` leaves out
    if f"{TEMPORARY}smoke" in saved.model.path:
        raise ConfigError(f"--replay {step}: '{run}' is of --smoke, whose model is gone; replay another run")
    config = config or GRPOConfig.from_yaml(paths.config)
    fields = deciding_fields(config), deciding_fields(saved)
    refuse_other_fields(*fields, "the run was made with", "leave it as it was")
    for url in config.rollout.server.urls:  # `--serve` ends its servers, and a replay would wait for them
        if url.startswith("unix://") and not Path(url.removeprefix("unix://")).exists():
            raise ConfigError(
                f"rollout.server.urls = [{url}]: it has ended; name one of `mm-grpo serve {run}`"
            )
    start = _nearest_checkpoint(paths, step, config.rollout.max_staleness)
    report = ReplayReport(Path(run), step, 0 if start is None else start.step)
    report.versions = _other_versions(paths)
    with temporary_folder("replay") as work, chdir(_start_of(paths.root, Path(saved.run.dir))):
        changes = {"dir": str(work / "run"), "trackers": [], "report": False, "save_model": False}
        allowed = {"allow_changed_rows": True, "allow_changed_code": True, "overwrite": False}
        run_fields = {f"run.{name}": value for name, value in {**changes, **allowed}.items()}
        trainer = _Replay(config.with_values(run_fields), **arguments)
        trainer.parts.resume = start or False
        trainer.logged, trainer.report = paths, report
        trainer.logged_rows = {row.get("step"): row for row in read_rows(paths.metrics)}
        trainer.train()
    return report


class _Replay(GRPOTrainer):
    """Trainer that takes the steps up to `report.step` and compares each with those of `logged`."""

    logged: RunPaths
    logged_rows: Mapping[Any, Mapping[str, Any]]
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
            row = self.logged_rows.get(step, {})
            new = read_rollouts(self.folder.paths, step)
            difference = None if logged is None else first_difference(step, logged, new)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{file}' or metrics.jsonl is not what a run writes ({error!r})") from None
        report.completions += len(logged or ())
        if difference is not None:
            return difference
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
        new = self._masters()
        self.state.checkpoints.load(read_checkpoint(path))
        logged = self._masters()
        squares = [(n, _square(w - logged[n]), _square(logged[n] - before[n])) for n, w in new.items()]
        gaps, updates = defaultdict[str, float](float), defaultdict[str, float](float)
        # a process has some tensors, or some rows of them: its squares are a part of each sum
        for name, gap, update in chain(*self.ranks.all_gather(squares, "comparing")):
            gaps[name] += gap
            updates[name] += update
        ratios = {name: _ratio(gaps[name], updates[name]) for name in sorted(gaps)}
        worst = max(ratios, key=ratios.__getitem__)
        report.tensor_gap = ratios[worst]
        report.update_gap = _ratio(sum(gaps.values()), sum(updates.values()))
        # `not <=`: a NaN is a difference too
        if not (report.update_gap <= UPDATE_LIMIT and report.tensor_gap <= TENSOR_LIMIT):
            place = f"the change of the weights since step {report.start} ({worst})"
            gap_text = f"off by {report.update_gap:.1e} of its norm, in the tensor by {report.tensor_gap:.1e}"
            report.difference = Difference(report.step, "gradient", place, "its own", gap_text)

    def _masters(self) -> dict[str, Tensor]:
        """Return a copy of this process's share of the fp32 weights, by name; each weight is in one share."""
        fragments = (f for f in self.learner.optimizer.fragments() if self.ranks.first or not f.repeated)
        return {f.name: f.tensors["master"].detach().to("cpu", torch.float32, copy=True) for f in fragments}


def first_difference(step: int, logged: Rows, new: Rows) -> Difference | None:
    """Return the first difference between the logged and the new rows of a step; None without one."""
    old_rows, new_rows = _by_place(logged), _by_place(new)
    for stage, keys in STAGES.items():
        for place in sorted({*old_rows, *new_rows}):
            old, row = old_rows.get(place), new_rows.get(place)
            label = "attempt {}, slot {}, generation {}".format(*place)
            if old is None or row is None:
                return Difference(step, stage, label, old and old["uid"], row and row["uid"])
            for key in (key for key in keys if key in old and key in row):  # only conversations have turns
                if difference := _differing(f"{label} ({row['uid']}), {key}", old[key], row[key]):
                    return Difference(step, stage, *difference)
    return None


def _by_place(rows: Rows) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return rows by attempt, slot and generation, each with the parts of its turns by the stage that makes them."""
    by_place = {}
    for row in rows:
        turns, scores = row.get("turns", ()), ("reward", "advantage")
        parts = {f"turn {key}s": [turn.get(key) for turn in turns] for key in scores}
        parts["turn texts"] = [{k: v for k, v in turn.items() if k not in scores} for turn in turns]
        by_place[row["attempt"], row["slot"], row["generation"]] = {**row, **parts}
    return by_place


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


def _start_of(root: Path, run_dir: Path) -> Path:
    """Return the folder in which the run in `root` was started, by its relative run.dir; the current one if unknown."""
    depth = len(run_dir.parts)
    if not run_dir.is_absolute() and root.parts[-depth:] == run_dir.parts:
        return root.parents[depth - 1]
    print_phase(
        "relative paths start here; if the config has some, go to the folder in which the run was started"
    )
    return Path()


def _nearest_checkpoint(paths: RunPaths, step: int, staleness: int) -> Checkpoint | None:
    """Return the newest intact checkpoint from which `step` can be sampled again; None to begin at step 0."""
    steps = logged_steps(paths)
    if step not in steps:
        legal = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise ConfigError(f"--replay {step}: '{paths.root}' has no rollouts of that step; {legal}")
    checkpoints = checkpoints_in(paths.checkpoints)
    # a checkpoint of the last `staleness` steps holds completions of the step, which would not be sampled again
    for path in [checkpoints[s] for s in reversed(checkpoints) if s < step - staleness]:
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
