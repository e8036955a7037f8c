"""`mm-grpo view RUN [RUN ...]`: write the page of a run, or one page with the curves of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mm_grpo.errors import ConfigError, GuardStop
from mm_grpo.files import OutputFile


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders (run.dir).", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: report.html, view.html for several."),
    ] = None,
    certificate: Annotated[bool, typer.Option("--certificate", help="Print it; make no page.")] = False,
) -> None:
    """Write the page of a run, finished or not, and print its path; for several runs, one page with all curves.

    With --certificate print what each run's files prove, as text for an appendix; exit code 3 if one FAILED.
    """
    from mm_grpo.pages.page import GENERATOR
    from mm_grpo.pages.report import Report
    from mm_grpo.run.folder import RunFolder
    from mm_grpo.run.lock import read_mark

    folders = [RunFolder.open(run).paths for run in runs]
    roots = [paths.root.resolve() for paths in folders]
    if duplicate := next((run for i, run in enumerate(roots) if run in roots[:i]), None):
        raise ConfigError(f"view: '{duplicate}' is named twice; name each run once")
    if certificate:
        from mm_grpo.run.certificate import certificate_lines  # it loads torch

        if output is not None:
            raise ConfigError("--output: is for the page; a certificate is printed")
        try:
            texts = ["\n".join(certificate_lines(paths)) for paths in folders]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"view: a file of the run is not what a run writes ({error!r})") from error
        typer.echo("\n\n".join(texts))
        if any("\nFAILED" in text for text in texts):
            raise GuardStop("view: the certificate FAILED: files of the run break a law, or were changed")
        return
    path = output or (folders[0].report if len(folders) == 1 else Path("view.html"))
    is_report = output is None and len(folders) == 1 and path.name in read_mark(folders[0].root).wrote
    page = OutputFile("--output", path, mark=b"" if is_report else GENERATOR)
    try:
        html = Report(folders).html()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"view: '{page.named}' cannot be made ({type(error).__name__}: {error})") from error
    page.write(html)
    typer.echo(f"page: {page.path.resolve()} ({len(html.encode()) / 1e6:.1f} MB)")
