"""`mm-grpo eval CONFIG`: answer the evaluation sets of a config with a model; train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_grpo.cli.configs import CheckpointName, Config, Overrides, Trust, load_config
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, OutputFile
from mm_grpo.terminal import print_phase

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig


def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A run, a checkpoint, an export or a model. Default: CONFIG's.")
    ] = None,
    checkpoint: CheckpointName = None,
    trust_remote_code: Trust = False,
    blind: Annotated[
        str | None,
        typer.Option(
            metavar="shuffled|removed|frames|first_frame",
            help="Also with another row's images and videos, without any, with the frames of videos in another order, "
            "or with their first frame alone.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Completions of each row; from 2 on they are sampled, for pass@k."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    by: Annotated[str | None, typer.Option(help="Also show results for each value of this column.")] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="All results, as JSON.")
    ] = None,
) -> None:
    """Answer the evaluation sets of a config with a model, a checkpoint or a run; train nothing."""
    loaded = with_options(load_config(config, overrides or []), blind, samples, temperature)
    if model is None and (Path(config) / RUN_MARK).is_file():
        model = config
    file = None if as_json is None else OutputFile("--json", as_json)
    print_phase("importing torch and transformers")
    with heavy_imports():
        from mm_grpo.run.progress import Progress
        from mm_grpo.trained.evaluate import evaluate_config
        from mm_grpo.trained.source import model_to_evaluate
        from mm_grpo.trained.table import as_dict, show

    source = model_to_evaluate(loaded, model, checkpoint, trust=trust_remote_code)
    report = Progress(0).evaluating
    results = evaluate_config(loaded, source, by=by, phase=print_phase, report=report)
    if not results.first:
        return
    show(results)
    if file is not None:
        file.write(json.dumps(as_dict(results), indent=2, ensure_ascii=False) + "\n")


def with_options(
    loaded: GRPOConfig, blind: str | None, samples: int | None, temperature: float | None
) -> GRPOConfig:
    """Return the config with the options in place of its fields. Raises ConfigError if they contradict each other."""
    section = loaded.rollout.eval
    count = section.num_generations if samples is None else samples
    if temperature is None:
        # greedy completions of a row would all be equal
        sampled = samples is not None and samples > 1 and section.temperature == 0
        temperature = loaded.rollout.temperature if sampled else section.temperature
    if count > 1 and temperature == 0:
        raise ConfigError(
            f"{count} completions at temperature 0 are all the same; give --temperature 1, or --samples 1"
        )
    changes: dict[str, Any] = {"rollout.eval.num_generations": count, "rollout.eval.temperature": temperature}
    if blind is not None:
        changes["run.eval_blind"] = blind
    return loaded.with_values(changes)
