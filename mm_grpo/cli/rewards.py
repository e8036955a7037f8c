"""`mm-grpo rewards`: what can score, how each one is used, and a score by hand.

    mm-grpo rewards                       every reward by name, with a line each
    mm-grpo rewards NAME                  one reward: its signature, its documentation
    mm-grpo rewards try NAME --completion TEXT [--column answer=3 ...] [--arg k=v ...]

NAME is whatever a config may name: a registered reward, path/to/file.py:function, package.module:function
or an entry point.
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
    """Commands, and the names of all rewards: `rewards iou` is `rewards show iou`."""

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
    completion: Annotated[str, typer.Option(help="What the model wrote.")],
    column: Annotated[
        list[str] | None, typer.Option(help="A column of the row: answer=3; JSON, or else text.")
    ] = None,
    arg: Annotated[list[str] | None, typer.Option(help="An argument of the reward: threshold=0.5.")] = None,
) -> None:
    """Score one completion by hand; prints the raw score."""
    from mm_grpo.rewards import Scorer
    from mm_grpo.types import Completion, Turn

    scorer = Scorer([{**pairs("--arg", arg or []), "name": name}])
    columns = pairs("--column", column or [], texts=texts_of(scorer.specs[0]))
    row = hand_made(columns)
    turns = (Turn("assistant", completion, 0),) if scorer.specs[0].options.per_turn else ()
    with closing(scorer):
        try:
            scorer.check(columns)
        except RewardError as error:
            raise RewardError(f"{error}. Here these are --column name=value and --arg name=value") from None
        answer = Completion((), (), completion, "stop", 0, turns=turns)
        ((score,),) = scorer.score([row], [answer], 1).parts.values()
    typer.echo("None: the reward does not apply to this row" if score is None else f"{score:.10g}")


def pairs(option: str, given: list[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """`key=value` texts as a mapping; a value is JSON where it can be read as that, else text.

    Under the keys of `texts` numbers, true and false stay texts too.

    >>> pairs("--column", ["answer=3", "box=[0, 0, 9, 9]", "label=red", "sign=30"], texts=["sign"])
    {'answer': 3, 'box': [0, 0, 9, 9], 'label': 'red', 'sign': '30'}
    """
    values: dict[str, Any] = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise RewardError(f"{option} {text!r}: write it as name=value, such as answer=3")
        values[key] = value
        with suppress(ValueError):
            found = json.loads(value)
            values[key] = value if key in texts and isinstance(found, int | float) else found
    return values


def texts_of(spec: RewardSpec) -> list[str]:
    """The parameters of a reward that are annotated as a str: `answer=3` means the text there, as in a row."""
    parameters = inspect.signature(spec.fn).parameters.items()
    return [name for name, p in parameters if p.annotation in (str, "str", str | None, "str | None")]


def hand_made(columns: dict[str, Any]) -> Prompt:
    """A prompt as rewards see one, without a model: the tensors are missing."""
    from mm_grpo.types import EnginePrompt, Prompt, Sample

    sample = Sample("by hand", [{"role": "user", "content": ""}], (), (), columns)
    tensors: Any = None
    return Prompt(sample, (), EnginePrompt((), ()), tensors, {})


def first_line(spec: RewardSpec) -> str:
    """The first sentence of a reward's documentation."""
    doc = inspect.getdoc(spec.fn) or "(no docstring)"
    return " ".join(doc.split("\n\n")[0].split())


def page(spec: RewardSpec) -> str:
    """What `mm-grpo rewards NAME` prints."""
    signature = re.sub(
        r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(spec.fn))
    )  # types are texts there
    head = f"{spec.name} ({spec.source}; called per {spec.kind}; weight: {spec.weight:g}): {signature}"
    return f"{head}\n\n{inspect.getdoc(spec.fn) or '(no docstring)'}"
