"""The command line: thin commands over the Python API.

    mm-grpo train CONFIG [a.b=value ...]     run a config or a shipped recipe
    mm-grpo check CONFIG [a.b=value ...]     load every row and reward, train nothing
    mm-grpo recipes                          what ships in examples/
    mm-grpo rewards [NAME]                   what can score, and how

Exit codes: 0 done; 2 the config, the data or the command is wrong (one message); 3 a guard stopped the
run; 1 anything else. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mm_grpo.errors import ConfigError, GuardStop, UserError

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

app = typer.Typer(
    help="Fine-tune vision-language models with GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Config = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change: section.field=value.", show_default=False)
]


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train a model by a config or a recipe; fields can be changed with a.b=value."""
    loaded = load_config(config, overrides or [])
    from transformers.utils import logging as transformers_logging

    from mm_grpo.trainer import GRPOTrainer

    transformers_logging.disable_progress_bar()  # theirs would break ours
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    summary = GRPOTrainer(loaded).train()
    typer.echo(f"done: {summary['steps']} steps in {summary['seconds']:.0f} s, results in {loaded.run.dir}")
    for name, result in summary["eval"].items():
        typer.echo(
            f"  {name}: accuracy {result['before']:.3f} -> {result['after']:.3f} ({result['rows']} rows)"
        )


@app.command()
def check(config: Config, overrides: Overrides = None) -> None:
    """Load every row, make every prompt and look at every reward of a config; train nothing."""
    loaded = load_config(config, overrides or [])
    from mm_grpo.run.checking import check_config

    if not check_config(loaded):
        raise typer.Exit(2)


@app.command()
def recipes() -> None:
    """List the shipped recipes: name, and the first comment of its config."""
    for name, path in find_recipes().items():
        lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        typer.echo(f"{name:<16} {lines[0] if lines else ''}\n{'':<16} {path}")


@app.command()
def rewards(name: Annotated[str | None, typer.Argument(help="Show this reward.")] = None) -> None:
    """List the rewards by name, or show one's documentation."""
    import inspect

    import mm_grpo.rewards as registry

    if name is not None:
        typer.echo(inspect.getdoc(registry.get(name).fn) or f"{name} has no docstring")
        return
    for known in registry.names():
        doc = inspect.getdoc(registry.get(known).fn) or ""
        typer.echo(f"{known:<16} {doc.splitlines()[0] if doc else ''}")


def load_config(config: str, overrides: list[str]) -> GRPOConfig:
    """The config at a path, or that of a recipe by name, with overrides applied."""
    from mm_grpo.config import GRPOConfig

    path = Path(config)
    if not path.exists() and path.suffix == "":
        known = find_recipes()
        if config not in known:
            raise ConfigError(
                f"'{config}' is neither a file nor a recipe; recipes are {', '.join(known) or 'none'}; "
                "give the path of a YAML file or one of these names"
            )
        path = known[config]
    return GRPOConfig.from_yaml(path, overrides)


def find_recipes() -> dict[str, Path]:
    """The shipped recipes by name: in the wheel beside this file, in a checkout in examples/."""
    here = Path(__file__).resolve().parent
    for folder in (here / "examples", here.parent / "examples"):
        if folder.is_dir():
            return {path.parent.name: path for path in sorted(folder.glob("*/config.yaml"))}
    return {}


def main() -> None:
    """Entry point: runs a command and turns errors into one message and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except UserError as error:
        _leave(f"error: {error}", 2)
    except GuardStop as stop:
        _leave(f"stopped: {stop}", 3)
    except KeyboardInterrupt:
        _leave("interrupted", 130)


def _leave(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
