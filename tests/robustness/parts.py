"""What the table of cases is made of: rows, pictures, rewards, damages of runs, and faults of engines and machines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image

from mm_grpo.files import encoded_image
from robustness.runs import ROW

Damage = Callable[[Path], Any]
WEIGHTS = "model.safetensors"
SEGFAULT = "import ctypes\nctypes.string_at(0)"
ISOLATED: Mapping[str, Any] = {"isolated": True, "max_concurrency": 1}
MASK: Mapping[str, Any] = {"on_error": "mask"}

# rows and pictures


def row(**changes: Any) -> str:
    return json.dumps(ROW | changes)


def picture(mode: str) -> bytes:
    """A JPEG; the one in RGB is noise, so that half of it is no picture."""
    return encoded_image(
        Image.effect_noise((64, 64), 90) if mode == "RGB" else Image.new(mode, (64, 64)), "jpeg"
    )


# rewards


def body(text: str) -> str:
    """A reward of these lines; `SCORE` is what it would have answered without them."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    head = "import os, signal, sys, time\ndef f(completion):\n"
    return head + lines.replace("SCORE", "float(len(completion) % 3)")


def reward_file(**options: Any) -> Mapping[str, Any]:
    return {
        "rewards": [{"name": "r.py:f", **options}],
        "run": {"max_steps": 2, "save_model": False, "save_every": 0},
    }


def one_row_a_step(folder: Path) -> None:
    rows = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2, rows


# models


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def other_model(out: Path) -> None:
    """Let the link MODEL lead to the damaged copy at m/."""
    (out.parent / "MODEL").unlink()
    (out.parent / "MODEL").symlink_to("m")


def at_hub(hub: Any, offline: bool = False) -> Callable[[Path], AbstractContextManager[None]]:
    """A machine that has this hub, and none of its models in its cache."""

    @contextmanager
    def within(folder: Path) -> Iterator[None]:
        import huggingface_hub.constants as constants

        with hub() as url:
            settings = {
                "ENDPOINT": url,
                "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
                "HF_HUB_CACHE": str(folder / ".cache" / "hub"),
                "HF_HUB_OFFLINE": offline,
            }
            with patch.multiple(constants, **settings), patch.dict("os.environ", NO_PROXY="*"):
                yield

    return within


# runs


def checkpoint(name: str, damage: Damage, *, every: bool = False) -> Damage:
    """Damage this file of the newest checkpoint, or of every one."""
    return lambda out: [
        damage(kept / name) for kept in sorted((out / "checkpoints").glob("step-*"))[0 if every else -1 :]
    ]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def replaced(old: str, new: str) -> Damage:
    """Write `new` in place of `old`, which the file holds."""

    def damage(path: Path) -> None:
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new))

    return damage


def rename_newest(out: Path) -> None:
    (out / "checkpoints" / "step-000003").rename(out / "checkpoints" / "step-000009")


def changed_log(change: Callable[[list[str]], list[str]]) -> Damage:
    def damage(out: Path) -> None:
        log = out / "metrics.jsonl"
        log.write_text("".join(change(log.read_text().splitlines(keepends=True))))

    return damage


# engines and machines


def faulty_engine(fault: str) -> Callable[[Path], AbstractContextManager[Any]]:
    """An engine that has its own copy of the weights, and a fault."""

    def within(folder: Path) -> AbstractContextManager[Any]:
        from helpers.fake_engines import FakeRemoteEngine

        from mm_grpo import build

        def engine(config: Any, model: Any, processor: Any, ranks: Any) -> FakeRemoteEngine:
            return FakeRemoteEngine(model, processor, fault)

        return patch.dict(build.ENGINES, transformers=engine)

    return within


def engine_fails(folder: Path) -> AbstractContextManager[Any]:
    """An engine that raises in its third call, as one whose process has ended."""
    from mm_grpo.errors import EngineError
    from mm_grpo.rollout.transformers_engine import TransformersEngine

    real, calls = TransformersEngine.generate, count()

    def generate(self: Any, requests: Any) -> Any:
        if next(calls) == 2:
            raise EngineError("the engine's process has ended")
        return real(self, requests)

    return patch.object(TransformersEngine, "generate", generate)


def broken_learner(folder: Path) -> AbstractContextManager[Any]:
    from mm_grpo.learner.learner import Learner

    return patch.object(Learner, "update", lambda self, groups: 1 // 0)


def no_error(folder: Path) -> None:
    assert not (folder / "out" / "error.txt").exists()


def variables(**changes: str) -> Callable[[Path], AbstractContextManager[Any]]:
    """The variables of the second of two processes, but for `changes`."""
    second = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    return lambda folder: patch.dict(os.environ, second | changes)
