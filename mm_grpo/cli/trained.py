"""Commands for a trained model: `mm-grpo eval` (the evaluation sets), `export` (a checkpoint as a model), `ask`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mm_grpo.cli.configs import CheckpointName, Config, Overrides, Trust, load_config
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.errors import ConfigError
from mm_grpo.files import RUN_MARK, OutputFile
from mm_grpo.terminal import print_phase, printable

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


def export(
    source: Annotated[
        Path, typer.Argument(help="A run's folder, or one of its checkpoints.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; must not exist.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="model.path=..., model.device=... or model.dtype=...", show_default=False),
    ] = None,
    checkpoint: CheckpointName = None,
    trust_remote_code: Trust = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters of model.lora for peft, not the merged model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="Push it to this private repository of the Hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a public repository.")] = False,
) -> None:
    """Write a checkpoint as a model for transformers, or an adapter for peft, and prove that it is the same."""
    if public and push is None:
        raise ConfigError("--public: needs --push; name a repository, or leave --public out")
    with heavy_imports():
        from mm_grpo.trained import hub
        from mm_grpo.trained.export import export_run

    name = hub.check_hub(push, overwrite=overwrite) if push is not None else None
    proof = export_run(
        source, out, checkpoint=checkpoint, adapter=adapter, overwrite=overwrite,
        overrides=overrides or [], trust=trust_remote_code,
    )  # fmt: skip
    typer.echo(printable(str(proof)))
    typer.echo(printable(f"done: {'adapter' if adapter else 'model'} in {out}"))
    if name is not None:
        typer.echo(printable(f"pushed: {hub.push(out, name, private=not public)}"))


def ask(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run, an export or a model.", show_default=False)
    ],
    question: Annotated[str, typer.Argument(help="The question.", show_default=False)],
    image: Annotated[
        list[str] | None, typer.Option(help="An image to put before the question; may be repeated.")
    ] = None,
    video: Annotated[
        list[str] | None, typer.Option(help="A video to put before the question; may be repeated.")
    ] = None,
    checkpoint: CheckpointName = None,
    trust_remote_code: Trust = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Softmax temperature; 0 is greedy.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sample.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the run's.")] = None,
) -> None:
    """Ask a trained model one question about images and videos; print the answer."""
    with heavy_imports():
        from mm_grpo.trained.ask import ask as ask_model
        from mm_grpo.trained.ask import load_answering

    model = load_answering(source, checkpoint=checkpoint, device=device, trust=trust_remote_code)
    for note in model.notes:
        print(printable(note), file=sys.stderr)
    answer = ask_model(
        model, question, image or [], video or [], temperature=temperature, max_tokens=max_tokens, seed=seed
    )
    typer.echo(printable(answer.text))
    if not answer.text.strip():
        print(f"the answer is empty: the model ended after {len(answer.token_ids)} tokens", file=sys.stderr)
    if answer.finish_reason == "length":
        print(f"cut after {len(answer.token_ids)} tokens (--max-tokens)", file=sys.stderr)
