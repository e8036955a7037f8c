"""The command line: thin commands over the Python API.

    mm-grpo train CONFIG [a.b=value ...]     run a config or a shipped recipe (--processes N: cli_launch.py)
    mm-grpo check CONFIG [a.b=value ...]     load every row, try every reward, train nothing
    mm-grpo doctor CONFIG [a.b=value ...]    compare engine and learner on the config's first prompts
    mm-grpo recipes                          what ships in examples/
    mm-grpo rewards [NAME | try NAME ...]    what can score, and how (cli_rewards.py)

Exit codes: 0 done; 2 the config, the data or the command is wrong (one message); 3 a guard stopped the
run; 1 anything else. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from mm_grpo.cli_launch import check_processes, launch, launched_here
from mm_grpo.cli_rewards import app as rewards_app
from mm_grpo.errors import ConfigError, EngineError, GuardStop, UserError

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig

app = typer.Typer(
    help="Fine-tune vision-language models with GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(rewards_app, name="rewards")
Config = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped recipe.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Fields to change: section.field=value.", show_default=False)
]


Smoke = Annotated[
    bool, typer.Option("--smoke", help="A tiny random model and the fixture's rows, on the CPU, in seconds.")
]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in run.dir, if there is one.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", help="Processes of this machine that train together.")
    ] = None,
) -> None:
    """Train a model by a config or a recipe; fields can be changed with a.b=value."""
    loaded = load_config(config, overrides or [])
    if processes is not None:
        check_processes(processes, loaded, smoke=smoke)
        if processes > 1:
            raise typer.Exit(launch(processes, ["train", config, *(overrides or []), *["--resume"] * resume]))
    from transformers.utils import logging as transformers_logging

    from mm_grpo.trainer import GRPOTrainer

    transformers_logging.disable_progress_bar()  # theirs would break ours
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if smoke:
        from mm_grpo.run.smoke import smoke_sets

        with tempfile.TemporaryDirectory(prefix="mm_grpo_") as work:
            given = any(override.startswith("run.dir=") for override in overrides or [])
            run_dir = loaded.run.dir if given else tempfile.mkdtemp(prefix="mm_grpo_smoke_")
            loaded = to_smoke(loaded, config, overrides or [], Path(work), run_dir)
            rows, evaluations = smoke_sets(loaded)
            summary = GRPOTrainer(loaded, train=rows, eval=evaluations or None).train()
    else:
        trainer = GRPOTrainer(loaded, resume=resume)
        summary = trainer.train()
        if not trainer.ranks.first:
            return
    typer.echo(f"done: {summary['steps']} steps in {summary['seconds']:.0f} s, results in {loaded.run.dir}")
    for name, result in summary["eval"].items():
        typer.echo(
            f"  {name}: accuracy {result['before']:.3f} -> {result['after']:.3f} ({result['rows']} rows)"
        )


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    smoke: Smoke = False,
    call_judges: Annotated[
        bool, typer.Option("--call-judges", help="Also call rewards that may use a network.")
    ] = False,
    rows: Annotated[int | None, typer.Option(min=1, help="Look at this many rows of each set.")] = None,
) -> None:
    """Load every row, make every prompt and try every reward on right and wrong answers; train nothing."""
    loaded = load_config(config, overrides or [])
    from mm_grpo.run.checking import check_config

    with tempfile.TemporaryDirectory(prefix="mm_grpo_") as work:
        if smoke:
            loaded = to_smoke(loaded, config, overrides or [], Path(work), loaded.run.dir)
        passed = check_config(loaded, call_judges=call_judges, rows=rows)
    if not passed:
        raise typer.Exit(2)


@app.command()
def doctor(
    config: Config,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to compare on.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare engine and learner of a config on its first prompts, before and after a weight update."""
    from mm_grpo.run.quiet import stdout_to_stderr

    loaded = load_config(config, overrides or [])
    with stdout_to_stderr() if as_json else nullcontext():
        from transformers.utils import logging as transformers_logging

        from mm_grpo.run.doctor import examine
        from mm_grpo.run.doctor_table import show

        transformers_logging.disable_progress_bar()
        report = examine(loaded, prompts)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), allow_nan=False))
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(3)


@app.command()
def recipes() -> None:
    """List the shipped recipes: name, and the first comment of its config."""
    for name, path in find_recipes().items():
        lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
        typer.echo(f"{name:<16} {lines[0] if lines else ''}\n{'':<16} {path}")


def to_smoke(loaded: GRPOConfig, config: str, overrides: list[str], work: Path, run_dir: str) -> GRPOConfig:
    """The smoke version of a config, with a line that says what it stands for."""
    from transformers.utils import logging as transformers_logging

    from mm_grpo.run.smoke import smoke_config

    transformers_logging.disable_progress_bar()
    kept = {override.partition("=")[0] for override in overrides}
    made = smoke_config(loaded, work, run_dir, beside=find_config(config).parent, kept=kept)
    rows = made.data.train if isinstance(made.data.train, str) else "the same task"
    typer.echo(
        f"smoke: a tiny random model in place of {loaded.model.path}, rows of {rows}, on the CPU; this shows "
        "that the config works, not that it learns"
    )
    return made


def load_config(config: str, overrides: list[str]) -> GRPOConfig:
    """The config at a path, or that of a recipe by name, with overrides applied."""
    from mm_grpo.config import GRPOConfig

    return GRPOConfig.from_yaml(find_config(config), overrides)


def find_config(config: str) -> Path:
    """The file of a config, or of a recipe by name."""
    path = Path(config)
    if path.exists() or path.suffix != "":
        return path
    known = find_recipes()
    if config not in known:
        raise ConfigError(
            f"'{config}' is neither a file nor a recipe; recipes are {', '.join(known) or 'none'}; "
            "give the path of a YAML file or one of these names"
        )
    return known[config]


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
    except EngineError as error:
        _leave(f"the rollout engine failed: {error}", 1)
    except KeyboardInterrupt:
        if launched_here():  # whoever started this process says it
            sys.exit(130)
        _leave("interrupted", 130)
    except RuntimeError as error:
        parting = _parting()
        lost = parting and parting.lost_another(error)
        if not lost:
            raise
        _leave(f"error: {lost}", 1, echo=True)


def _leave(message: str, code: int, echo: bool = False) -> None:
    parting = _parting()
    if parting is None or parting.has_to_say(message, echo=echo):
        print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def _parting() -> ModuleType | None:
    """learner/parting.py; None when there can be no other process, for what starts them was not even imported."""
    if "mm_grpo.learner.distributed" not in sys.modules:
        return None
    from mm_grpo.learner import parting

    return parting


if __name__ == "__main__":
    main()
