"""From a checkpoint to a model (`mm-grpo export`), and one question to it (`mm-grpo ask`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mm_grpo.cli.configs import Trust, Which
from mm_grpo.cli.imports import heavy_imports
from mm_grpo.errors import ConfigError
from mm_grpo.terminal import printable


def export(
    source: Annotated[
        Path, typer.Argument(help="A run's folder, or one of its checkpoints.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write, not there yet.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="model.path=..., model.device=... or model.dtype=...", show_default=False),
    ] = None,
    checkpoint: Which = None,
    trust_remote_code: Trust = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters of model.lora for peft, not the merged model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="Send it to this repository of the Hub, private.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a public repository.")] = False,
) -> None:
    """Write a checkpoint as a model that transformers loads, or an adapter for peft, and prove that it is the same."""
    if public and push is None:
        raise ConfigError("--public: says how a repository is made; name it with --push, or leave it out")
    with heavy_imports():
        from mm_grpo.trained.export import export_run
        from mm_grpo.trained.hub import check_hub
        from mm_grpo.trained.hub import push as send

    name = check_hub(push, overwrite=overwrite) if push is not None else None
    proof = export_run(
        source,
        out,
        which=checkpoint,
        adapter=adapter,
        overwrite=overwrite,
        overrides=overrides or [],
        trust=trust_remote_code,
    )
    typer.echo(printable(str(proof)))
    typer.echo(printable(f"done: {'adapter' if adapter else 'model'} in {out}"))
    if name is not None:
        typer.echo(printable(f"pushed: {send(out, name, private=not public)}"))


def ask(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run, an export or a model.", show_default=False)
    ],
    question: Annotated[str, typer.Argument(help="What is asked.", show_default=False)],
    image: Annotated[
        list[str] | None, typer.Option(help="An image, which stands before the question; may be repeated.")
    ] = None,
    checkpoint: Which = None,
    trust_remote_code: Trust = False,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Softmax temperature; 0 is greedy.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sample.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the run's.")] = None,
) -> None:
    """Ask a trained model one question about images; prints the answer."""
    with heavy_imports():
        from mm_grpo.trained.ask import ask as answer
        from mm_grpo.trained.ask import load_answering

    loaded = load_answering(source, which=checkpoint, device=device, trust=trust_remote_code)
    for note in loaded.notes:
        print(printable(note), file=sys.stderr)
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    found = answer(loaded, question, image or [], **sampling)
    typer.echo(printable(found.text))
    if not found.text.strip():
        print(f"the answer is empty: the model ended after {len(found.token_ids)} tokens", file=sys.stderr)
    if found.finish_reason == "length":
        print(f"cut after {len(found.token_ids)} tokens (--max-tokens)", file=sys.stderr)
