"""Prompts and completions for reward tests, and a registry that each test leaves as it found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers.chat_server import Server
from helpers.sessions import died, workers
from PIL import Image

from mm_grpo import background
from mm_grpo.rewards import Scorer, registry
from mm_grpo.types import Completion, EnginePrompt, Prompt, Sample

Rows = tuple[list[Prompt], list[Completion]]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in registry.BUILTINS:
        registry.get(name)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "GRACE", 10.0)  # an event loop that gets no core is not blocked


@pytest.fixture
def rows() -> Callable[..., Rows]:
    """`rows(texts, box=[...])`: one prompt and completion per text, with these columns. The uids are
    row:0, row:1, ...; a column given as a single tuple or list holds one value per row."""

    def make(texts: Sequence[str], *, absent: Sequence[int] = (), **columns: Sequence[Any]) -> Rows:
        prompts, completions = [], []
        for i, text in enumerate(texts):
            image = Image.new("RGB", (4 + i, 4))
            content = [{"type": "image"}, {"type": "text", "text": f"question {i}"}]
            own = {} if i in absent else {name: values[i] for name, values in columns.items()}
            sample = Sample(f"row:{i}", [{"role": "user", "content": content}], (image,), (), own)
            prompts.append(Prompt(sample, (1, 2), EnginePrompt((1,), (image.resize((2, 2)),)), None, {}))  # type: ignore[arg-type]
            completions.append(Completion(tuple(range(len(text))), (0.0,) * len(text), text, "stop", i))
        return prompts, completions

    return make


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """Scorers of these entries, with two workers, of which none is left at the end."""
    made: list[Scorer] = []

    def make(*entries: Any, **settings: Any) -> Scorer:
        made.append(Scorer(entries, **{"workers": 2, **settings}))
        return made[-1]

    yield make
    started = workers()
    for one in made:
        one.close()
    assert died(started)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()
