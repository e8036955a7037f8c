"""`mm-grpo eval CONFIG`: how well a model answers the evaluation sets of a config; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_grpo.cli.configs import Config, Overrides, Trust, Which, load_config
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
        str | None, typer.Option(help="A run, a checkpoint, an export or a model; without it CONFIG's.")
    ] = None,
    checkpoint: Which = None,
    trust_remote_code: Trust = False,
    blind: Annotated[
        str | None,
        typer.Option(metavar="shuffled|removed", help="Also with another row's images, or with none."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Completions of each row; from 2 on they are sampled, for pass@k."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
    by: Annotated[str | None, typer.Option(help="A column, by whose values results are split.")] = None,
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

    found = model_to_evaluate(loaded, model, checkpoint, trust=trust_remote_code)
    progress = Progress(0)
    results = evaluate_config(loaded, found, by=by, phase=print_phase, report=progress.evaluating)
    if not results.first:
        return
    show(results)
    if file is not None:
        file.write(json.dumps(as_dict(results), indent=2, ensure_ascii=False) + "\n")


def with_options(
    loaded: GRPOConfig, blind: str | None, samples: int | None, temperature: float | None
) -> GRPOConfig:
    """The config with what the options say in place of its fields. ConfigError where they contradict each other."""
    chosen = loaded.rollout.eval
    count = chosen.num_generations if samples is None else samples
    if temperature is None and samples is not None and samples > 1 and chosen.temperature == 0:
        temperature = loaded.rollout.temperature  # several greedy completions would be one, several times
    heat = chosen.temperature if temperature is None else temperature
    if count > 1 and heat == 0:
        raise ConfigError(
            f"{count} completions at temperature 0 are all the same; give --temperature 1, or --samples 1"
        )
    changes: dict[str, Any] = {"rollout.eval.num_generations": count, "rollout.eval.temperature": heat}
    if blind is not None:
        changes["run.eval_blind"] = blind
    return loaded.with_values(changes)
