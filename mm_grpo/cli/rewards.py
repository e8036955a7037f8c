"""`mm-grpo rewards`: list rewards, show one, score a completion by hand.

A reward is named as in a config: a registered one, path/to/file.py:function, package.module:function or an entry point.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mm_grpo.errors import RewardError
from mm_grpo.terminal import printable

if TYPE_CHECKING:
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Prompt


class _RewardGroup(TyperGroup):
    """Group of commands in which a reward's name is a command: `rewards iou` is `rewards show iou`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_RewardGroup,
    add_completion=False,
    rich_markup_mode=None,
    subcommand_metavar="[NAME | try NAME [OPTIONS]]",
)


@app.callback(invoke_without_command=True)
def rewards(context: typer.Context) -> None:
    """List the rewards; with NAME show one; with `try NAME` score a completion by hand."""
    if context.invoked_subcommand is not None:
        return
    import mm_grpo.rewards as registry

    width = max(len(name) for name in registry.names())
    for name in registry.names():
        typer.echo(printable(f"{name:<{width}}  {first_line(registry.get(name))}"))
    for name in registry.entry_point_names():
        typer.echo(printable(f"{name:<{width}}  (entry point of an installed package)"))


Name = Annotated[str, typer.Argument(help="A reward, as a config names it.", show_default=False)]


@app.command()
def show(name: Name) -> None:
    """Show one reward: its signature and its documentation."""
    from mm_grpo.rewards import resolve_entry

    typer.echo(printable(page(resolve_entry(name))))


@app.command("try")
def try_reward(
    name: Name,
    completion: Annotated[str, typer.Option(help="The model's text.")],
    column: Annotated[
        list[str] | None, typer.Option(help="A column of the row: answer=3; the value is JSON or text.")
    ] = None,
    arg: Annotated[list[str] | None, typer.Option(help="An argument of the reward: threshold=0.5.")] = None,
) -> None:
    """Score one completion by hand; print the raw score."""
    from mm_grpo.rewards import Scorer
    from mm_grpo.types import Completion, Turn

    scorer = Scorer([{**pairs("--arg", arg or []), "name": name}])
    columns = pairs("--column", column or [], texts=text_parameters(scorer.specs[0]))
    row = prompt_by_hand(columns)
    turns = (Turn("assistant", completion, 0),) if scorer.specs[0].options.per_turn else ()
    with closing(scorer):
        try:
            scorer.check(columns)
        except RewardError as error:
            raise RewardError(f"{error}. Here these are --column name=value and --arg name=value") from None
        answer = Completion((), (), completion, "stop", 0, turns=turns)
        ((score,),) = scorer.score([row], [answer], 1).parts.values()
    typer.echo("None: the reward does not apply to this row" if score is None else f"{score:.10g}")


def pairs(option: str, arguments: list[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """Parse `key=value` arguments; a value is JSON if it parses, else text.

    Numbers, true and false stay texts under the keys of `texts`.

    >>> pairs("--column", ["answer=3", "box=[0, 0, 9, 9]", "label=red", "sign=30"], texts=["sign"])
    {'answer': 3, 'box': [0, 0, 9, 9], 'label': 'red', 'sign': '30'}
    """
    values: dict[str, Any] = {}
    for text in arguments:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise RewardError(f"{option} {text!r}: write it as name=value, such as answer=3")
        values[key] = value
        with suppress(ValueError):
            parsed = json.loads(value)
            values[key] = value if key in texts and isinstance(parsed, int | float) else parsed
    return values


def text_parameters(spec: RewardSpec) -> list[str]:
    """Return the parameters of a reward that are annotated as str; `answer=3` means the text "3" there."""
    parameters = inspect.signature(spec.fn).parameters.items()
    return [name for name, p in parameters if p.annotation in (str, "str", str | None, "str | None")]


def prompt_by_hand(columns: dict[str, Any]) -> Prompt:
    """Return a prompt with what rewards read, without tensors."""
    from mm_grpo.types import EnginePrompt, Prompt, Sample

    sample = Sample("by hand", [{"role": "user", "content": ""}], (), (), columns)
    tensors: Any = None
    return Prompt(sample, (), EnginePrompt((), ()), tensors, {})


def first_line(spec: RewardSpec) -> str:
    """Return the first paragraph of a reward's documentation, on one line."""
    doc = inspect.getdoc(spec.fn) or "(no docstring)"
    return " ".join(doc.split("\n\n")[0].split())


def page(spec: RewardSpec) -> str:
    """Return the text of `mm-grpo rewards NAME`."""
    # annotations are strings, because of `from __future__ import annotations`
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(spec.fn)))
    head = f"{spec.name} ({spec.source}; called per {spec.kind}; weight: {spec.weight:g}): {signature}"
    return f"{head}\n\n{inspect.getdoc(spec.fn) or '(no docstring)'}"
