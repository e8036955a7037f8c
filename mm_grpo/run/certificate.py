"""Certificate of a run: facts with their numbers, counted from the files of its folder and put into words.

A run that resumes cuts the rows after its checkpoint, so a step that is taken again counts once. FAILED is the first
fact if a law is broken, or a file is not what the run wrote. To add a fact about metrics: a row in FACTS.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.config.yaml_file import read_yaml
from mm_grpo.data.fingerprint import digest_of
from mm_grpo.errors import shorten
from mm_grpo.files import read_json
from mm_grpo.rollout.seeds import SeedPlan
from mm_grpo.run.manifest import LOG, Checkpoint, checkpoints_in, inspect_checkpoint
from mm_grpo.run.metrics import read_rows, read_summary
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.rollout_log import read_rollouts, rollout_digests
from mm_grpo.run.same_run import deciding_fields
from mm_grpo.run.summary import summary_lines
from mm_grpo.terminal import printable

UNMEASURED, NAMES = "not measured", 17
FACTS = {
    "starts": "<start/step:len>, after steps <start/step:all>; of <start/processes:all> processes",
    "rows changed": "<start/rows_changed:sum> between the starts",
    "warmed base": "<start/warmed:sum> of <start/warmed:len> starts",
    "steps": "<step:len>; missing in metrics.jsonl: <run/missing:all>",
    "rollout log": "missing: <log/missing:all>; not whole: <log/damaged:all>; read: <log/step:len> steps",
    "rollout digests": "intact: <log/intact:sum> files; not recorded: <log/unrecorded:sum>; changed: <log/changed:all>",
    "samples": "<log/answers:sum> answers, <log/seeds:sum> turns, <log/tokens:sum> tokens; <log/age:max> updates old",
    "seeds": "<log/seeds:sum> recomputed, <log/distinct:sum> distinct; <log/wrong:sum> answers against the seed law",
    "prompt ids": "<log/ids:sum> compared, of <log/id_answers:sum> answers",
    "gap at starts": "<start/gap_tokens:sum> tokens; mean <start/gap_mean:max>, most <start/gap_max:max> nats",
    "gap of samples": "<GAP/tokens:sum> of <log/tokens:sum> tokens, <GAP/tokens:len> steps; mean <GAP/mean:mean>, "
    "most <GAP/max:max> nats",
    "gap after syncs": "<sync/logp_gap:len> syncs; mean <sync/logp_gap:mean>, most <sync/logp_gap:max> nats",
    "weights sent": "<sync/tensors:sum> tensors compared by digest, <sync/tensors:len> syncs, <sync/bytes:sum> bytes",
    "updates": "<learner/updates:sum> made, <run/checked:sum> checked, <learner/overflows:sum> left out; least move "
    "<learner/update_norm:min>",
    "images": "<prompts/images:sum> shown, <prompts/images_decoded:sum> decoded, <learner/images_encoded:sum> encoded",
    "video frames": "<prompts/frames_decoded:sum> decoded",
    "other pixels": "<images/logp_change:len> steps; log-probs moved by <images/logp_change:min> nats or more",
    "sight": "<sight/nats:len> steps; <sight/nats:first> nats at first, <sight/nats:last> at last",
    "prompts dropped": "<prompts/dropped:sum>",
}
"""Fact -> text with <metric:how>, a name of HOW. GAP is sampling/sampling_logp_difference."""
HOW: Mapping[str, Callable[[Any], Any]] = {
    "sum": sum, "len": len, "max": max, "min": min, "mean": fmean, "first": itemgetter(0), "last": itemgetter(-1),
}  # fmt: skip


def certificate(paths: RunPaths, summary: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return fact -> text of a run, finished or not; `summary` is by default summary.json.

    Raises UserError if config.yaml or metrics.jsonl cannot be read.
    """
    config, summary = GRPOConfig.from_dict(read_yaml(paths.config)), summary or read_summary(paths) or {}
    environment = read_json(paths.environment, dict) if paths.environment.is_file() else {}
    all_rows = read_rows(paths.metrics)
    rows = [row for row in all_rows if row["step"] > 0]
    starts = ({f"start/{k}": v for k, v in start.items()} for start in environment.get("starts", ()))
    values = defaultdict[str, list[Any]](list)
    # callbacks may log any name, also one of the counts below
    metrics = ({k: v for k, v in row.items() if not k.startswith(("start/", "log/", "run/"))} for row in rows)
    for counts in chain(metrics, starts, _log_counts(paths, config, rows), _file_counts(paths, all_rows)):
        for name, value in counts.items():
            values[name] += value if isinstance(value, list) else [value] * (value is not None)
    steps, guards = values["step"], config.run.guards
    values["run/missing"] = [*{*range(1, max(steps, default=0))}.difference(steps)]
    values["run/checked"] = values["learner/updates"] * (guards.get("update_happens") != "off")

    def number(match: re.Match[str]) -> str:
        """Return the text of one <metric:how>."""
        name, how = match[1].replace("GAP", "sampling/sampling_logp_difference"), match[2]
        if how == "all" or not values[name]:
            listed = shorten(", ".join(map(str, sorted({*values[name]}))), 40) or "none"
            return listed if how == "all" else UNMEASURED
        value = HOW[how](values[name])
        return f"{value:,.0f}" if value % 1 == 0 else f"{value:.3g}"

    texts = {fact: re.sub(r"<([^:>]+):(\w+)>", number, text) for fact, text in FACTS.items()}
    digests, faults = _digests(paths, config)
    changed = values["log/changed"]
    broken = {
        f"changed after their step: {shorten(', '.join(changed), 200)}": bool(changed),
        "metrics.jsonl has a step twice": len({*steps}) < len(steps),
        f"{sum(values['log/wrong'])} answers have seeds against the seed law": any(values["log/wrong"]),
        "seeds repeat": sum(values["log/distinct"]) < sum(values["log/seeds"]),
        f"rollouts of {len(values['log/damaged'])} steps are not whole": any(values["log/damaged"]),
        "weights are older than allowed": max(values["log/age"], default=0) > config.rollout.max_staleness,
    }
    faults += [fault for fault, is_broken in broken.items() if is_broken]
    fired = Counter(f"{event['name']} {event['action']}" for event in read_rows(paths.events))
    actions = {f"({name} was set: {action})": "" for name, action in guards.items()}
    results = summary_lines({**summary, "warned": {}, "model": None}) if "headline" in summary else []
    engine, versions = config.rollout.engine, {name: environment.get(name) for name in ("mm_grpo", "python")}
    # a resumed run has the summary of its earlier end until it ends again
    has_ended = steps and summary.get("steps") == max(steps)
    return {
        "FAILED" if faults else "failed": "; ".join(faults) or "nothing",
        "state": summary.get("stopped") or "finished" if has_ended else "not finished",
        "engine": f"{engine}, in the learner's weights" if ENGINE_FACTS[engine].embedded else engine,
        **{fact: UNMEASURED if text.startswith(UNMEASURED) else text for fact, text in texts.items()},
        "guards fired": _pairs({**fired, **actions}) or "none",
        "evaluations": "; ".join(results) or UNMEASURED,
        "blind control": config.run.eval_blind or UNMEASURED,
        **digests,
        "versions": _pairs({**versions, **environment.get("packages", {})}) or UNMEASURED,
    }


def certificate_lines(paths: RunPaths) -> list[str]:
    """Return the certificate of a run as lines of at most 80 columns. Raises UserError as `certificate` does."""
    facts = {"run certificate": paths.root.resolve().name, **certificate(paths)}
    wrap = textwrap.TextWrapper(80, subsequent_indent=" " * NAMES, break_on_hyphens=False).wrap
    texts = [printable(f"{fact:{NAMES}}{text}", lines=False) for fact, text in facts.items()]
    return [line for text in texts for line in wrap(text)]


def _log_counts(paths: RunPaths, config: GRPOConfig, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield counts of the samples that were logged in the step of each row. Their seeds are computed again."""
    rollout, last = config.rollout, max((row["step"] for row in rows), default=1)
    max_turns = rollout.max_turns if any("turns/max" in row for row in rows) else 1
    shape = rollout.prompts_per_step, rollout.num_generations, rollout.max_attempts
    plan = SeedPlan(config.run.seed, *shape, last, max_turns)
    for row in rows:
        step, prompts = row["step"], plan.prompts - row.get("prompts/dropped", 0)
        try:
            samples = read_rollouts(paths, step)
            count = sum(sample["attempt"] == 0 for sample in samples)
            if len(samples) % plan.generations or count < prompts * plan.generations:
                raise ValueError("samples are missing")
            wrong, seeds = 0, list[int]()
            for sample in samples:
                seed = plan.group(step, sample["slot"], sample["attempt"])[sample["generation"]]
                turns = [turn["seed"] for turn in sample.get("turns", ()) if turn["role"] == "assistant"]
                turn_seeds = [plan.of_turn(seed, turn) for turn in range(len(turns))]
                wrong += sample["seed"] != seed or turns != turn_seeds
                seeds += turns or [sample["seed"]]
            ages = [step - 1 - version for sample in samples for _, version in sample["weight_versions"]]
            ids = [sample["ids_compared"] for sample in samples if "ids_compared" in sample]
            # step by step: a seed that obeys the law is no other step's
            yield {"log/seeds": len(seeds), "log/distinct": len({*seeds}), "log/wrong": wrong}
            yield {"log/answers": len(samples), "log/tokens": sum(sample["tokens"] for sample in samples)}
            yield {"log/ids": sum(ids) or None, "log/id_answers": len(ids) or None}
            yield {"log/step": step, "log/age": max(ages, default=0)}
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield {"log/missing" if isinstance(error, FileNotFoundError) else "log/damaged": step}


def _file_counts(paths: RunPaths, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield counts of each rollout file by its digest in the rows; `changed` is a file that differs."""
    for row in rows:
        for name, digest in rollout_digests(paths, row["step"]).items():
            old, file = row.get(name), f"{name}-{row['step']:06d}.jsonl"
            yield {"log/intact": old == digest, "log/unrecorded": old is None}
            yield {"log/changed": None if old in (digest, None) else file}


def _digests(paths: RunPaths, config: GRPOConfig) -> tuple[dict[str, str], list[str]]:
    """Return digests of config, rows and newest checkpoint, and a fault for each file that is not the checkpoint's."""
    fields, checkpoints = deciding_fields(config), [*checkpoints_in(paths.checkpoints).values()]
    digests = {"digest of config": digest_of(fields).hex(), "digest of rows": UNMEASURED}
    if not checkpoints:
        return digests, []
    path = checkpoints[-1]
    manifest, fault = inspect_checkpoint(path, lambda files: [f for f in files if f["name"] == LOG])
    if fault:
        return digests, [fault]
    log, sets = Checkpoint(path, manifest).log or b"", manifest["extra"]["rows"]
    metrics = paths.metrics.read_bytes() if paths.metrics.is_file() else b""
    changed = {"config.yaml": manifest["config"] != fields, "metrics.jsonl": not metrics.startswith(log)}
    left_out = sum(len(s["left_out"]) for rows in sets.values() for s in rows.get("sources", [rows]))
    numbers = _pairs({**{name: rows["rows"] for name, rows in sets.items()}, "left out": left_out})
    digests["digest of rows"] = f"{digest_of(sets).hex()} ({numbers})"
    digests["checkpoint"] = f"{path.name}, digest of its files {digest_of(manifest['files']).hex()}"
    return digests, [f"{file} is not that of {path.name}" for file, differs in changed.items() if differs]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}".strip() for name, value in values.items() if value is not None)
