"""`mm-grpo export` (write a checkpoint as a model) and `mm-grpo ask` (one question to a model)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.cli.configs import CheckpointName, Trust
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.errors import ConfigError
from mm_grpo.terminal import printable


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
