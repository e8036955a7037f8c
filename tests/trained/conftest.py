"""Two finished runs of a tiny model, of adapters and of all weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny
from helpers.finished_runs import Finished, finished


@pytest.fixture(scope="package")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    made: dict[str, Finished] = {}

    def get(kind: str) -> Finished:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            # one with tied embeddings and one without
            path = models["qwen2_5_vl"]
            if kind != "lora":
                path = tiny.build("qwen2_5_vl", folder / "base", tie=False)
            lora = {"rank": 4, "alpha": 8.0} if kind == "lora" else None
            made[kind] = finished(path, folder / "run", model={"lora": lora})
        return made[kind]

    return get
