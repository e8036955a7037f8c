"""Settings for every test, set before anything is imported."""

import functools
import gc
import os
import signal
import sys

# Tests start processes; without bytecode each would spend 20 to 40 s compiling its imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models are slower on many threads than on one, far slower when the cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import sessions, workers
from hypothesis import settings

# A background job of a shell, or one of nohup, ignores these, and so would what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Collection imports torch and more: a million objects that stay, and that each pass of the collector would visit.
gc.disable()
# Tests take the same examples each time; `make test-random` looks for new ones.
# A slow machine is no failure: the whole test has a deadline.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("random", max_examples=2000, deadline=None)
settings.load_profile("random" if os.environ.get("RANDOM_EXAMPLES") else "same")


def pytest_collection_finish() -> None:
    if transformers := sys.modules.get("transformers"):
        # it formats each config that it reads for a log line: half the time in which a tiny run is built
        transformers.PretrainedConfig.__repr__ = object.__repr__
    if typer := sys.modules.get("typer.main"):
        typer.get_command = functools.cache(
            typer.get_command
        )  # all options of all commands anew, for each one
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist
        workers.sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.scheduler(config, log)


@pytest.fixture(scope="module", autouse=True)
def no_workers_left() -> Iterator[None]:
    """A file of tests ends the workers of rewards and tools that it starts: each holds up to half a GB."""
    yield
    if left := sessions.workers():
        gc.collect()  # ends those of objects that nobody holds any more
        ended = sessions.died(left)
        for worker in () if ended else left:
            os.kill(worker, signal.SIGKILL)
        assert ended


@pytest.fixture
def own_rewards() -> Iterator[None]:
    """Take back the rewards that a test registers, but for built-in ones: their modules register them once."""
    from mm_grpo.rewards import registry

    before = {*registry._REGISTRY}
    yield
    for name in {*registry._REGISTRY} - before - {*registry.BUILTINS}:
        del registry._REGISTRY[name]


class Models(dict[str, Path]):
    """Folders by family; one that is not among tiny.FAMILIES is built when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, family: str) -> Path:
        from helpers import tiny

        self[family] = tiny.build(family, self.root / family)
        return self[family]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model folder per family, built once for the whole run. Tests never write into them."""
    from helpers import tiny

    built = Models(tmp_path_factory.mktemp("models"))
    for family in tiny.FAMILIES:
        built[family]
    return built


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """One command in this process, as the console script runs it."""
    from mm_grpo import cli

    def call(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["mm-grpo", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        got = capsys.readouterr()
        return Result(code, got.out, got.err)

    return call
