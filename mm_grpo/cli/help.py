"""Help of the commands: examples, groups, `--version`, and advice on an option that is a config field.

`CommandGroup` is the class of the application. A new command needs a line in EXAMPLES and GROUPS; a test checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from mm_grpo.errors import ConfigError
from mm_grpo.version import __version__

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "train": (
        "mm-grpo train shapes run.dir=runs/first",
        "mm-grpo train config.yaml --smoke",
        "mm-grpo train config.yaml --processes 8 --resume",
        "mm-grpo train config.yaml --ray auto --processes 16 --serve 2 --retries 3",
    ),
    "warm": (
        "mm-grpo warm config.yaml --answer answer",
        "mm-grpo warm config.yaml optim.learning_rate=1e-5 --answer answers --lists first --steps 200",
    ),
    "serve": (
        "mm-grpo serve config.yaml --servers 2",
        "mm-grpo serve config.yaml --host 10.0.0.7 --port 9000 --tensor-parallel 2",
    ),
    "check": ("mm-grpo check config.yaml", "mm-grpo check config.yaml --page rows.html --rows 200"),
    "doctor": ("mm-grpo doctor config.yaml", "mm-grpo doctor config.yaml rollout.engine=vllm"),
    "eval": (
        "mm-grpo eval config.yaml --model runs/first",
        "mm-grpo eval config.yaml --model runs/first --blind shuffled --by kind",
        "mm-grpo eval config.yaml --model runs/first --samples 8 --json all.json",
    ),
    "estimate": ("mm-grpo estimate config.yaml", "mm-grpo estimate geometry3k lora.yaml --gpu 24"),
    "view": ("mm-grpo view runs/first runs/second -o both.html", "mm-grpo view runs/first --certificate"),
    "export": (
        "mm-grpo export runs/first model",
        "mm-grpo export runs/first adapter --adapter --checkpoint best",
    ),
    "ask": ('mm-grpo ask runs/first "What is shown?" --image picture.png',),
    "recipes": ("mm-grpo recipes", "mm-grpo recipes shapes", "mm-grpo recipes shapes --copy mine"),
    "init": ("mm-grpo init mine", "mm-grpo init mine --from pictures"),
    "config": ("mm-grpo config", "mm-grpo config rollout.vllm", "mm-grpo config learning_rate"),
    "rewards": ("mm-grpo rewards", "mm-grpo rewards iou", "mm-grpo rewards my_rewards.py:short"),
    "rewards show": ("mm-grpo rewards iou",),
    "rewards try": ("mm-grpo rewards try exact_match --completion red --column answer=red",),
    "env": ("mm-grpo env > environment.json",),
    "convert": ("mm-grpo convert trl.yaml", "mm-grpo convert trl.yaml --devices 8 --output config.yaml"),
}
"""Words that call a command -> examples."""

GROUPS: Mapping[str, str] = {
    "Begin": "init recipes convert",
    "Before a run": "check estimate doctor",
    "Run": "warm train serve view",
    "The trained model": "eval ask export",
    "Look up": "config rewards env",
}
"""Title -> commands, in the help of the application."""

# Some versions of typer vendor click, so click's error class is reached through a name that typer exports.
_UsageError: Any = typer.BadParameter.__base__


class CommandGroup(TyperGroup):
    """Group of commands with examples in their help; it answers `--learning_rate` with `optim.learning_rate=...`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            add_examples(command, cmd_name)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write every command with its whole first sentence, in groups."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(limit=1000)) for name in names.split()]
                )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            advice = field_advice(getattr(error, "option_name", None))
            if advice is None:
                raise
        raise ConfigError(advice)


def add_examples(command: Any, name: str) -> None:
    """Put the examples of a command and of its subcommands below their help."""
    lines = EXAMPLES.get(name)
    if lines and not command.epilog:
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
    for subname, subcommand in getattr(command, "commands", {}).items():
        add_examples(subcommand, f"{name} {subname}")


def field_advice(option: str | None) -> str | None:
    """Return advice on an unknown option that is the name of a field, ours or another trainer's; None for others."""
    if option is None or not option.startswith("--"):
        return None
    from mm_grpo.config.grpo_config import GRPOConfig
    from mm_grpo.config.section import leaves
    from mm_grpo.migrate.keys import advice_on

    paths = [path for path, _ in leaves(GRPOConfig)]
    name = option.removeprefix("--").replace("-", "_")
    matches = [path for path in paths if name in (path, path.rpartition(".")[2])]
    advice = " or ".join(f"{path}=VALUE" for path in matches) or advice_on(name, paths)
    if advice is None:
        return None
    how = "" if advice.startswith("it is ") else "a field is set as section.field=VALUE, without dashes: "
    return f"no such option: {option}; {how}{advice}"


def show_version(value: bool) -> None:
    """Print the version and exit, if `value`."""
    if value:
        typer.echo(f"mm_grpo {__version__}")
        raise typer.Exit
