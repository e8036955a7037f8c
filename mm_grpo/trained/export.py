"""An export: a folder that transformers loads, or peft, written beside, proved, and only then given its name.

`mm_grpo_export.json` in it is our mark: what it was made from, the settings that `mm-grpo ask` needs, and the names
of all files. An existing folder is never touched, unless it carries the mark, holds nothing else, and `overwrite` is
asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.files import read_json
from mm_grpo.learner.lora import adapter_factors, has_adapters, merged_tensors, save_adapter
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.trained.card import History, write_card
from mm_grpo.trained.model import Trained, load_trained
from mm_grpo.trained.prompts import prompts_of_run
from mm_grpo.trained.proof import Expected, Proof, expected_of, prove
from mm_grpo.trained.source import find_checkpoint
from mm_grpo.version import __version__

MARK = "mm_grpo_export.json"
SHARD = "5GB"
"""Largest file of weights."""
SETTINGS = (
    "model.processor", "model.trust_remote_code", "data.system_prompt", "data.chat_template_kwargs",
    "data.min_pixels", "data.max_pixels", "rollout.max_completion_length", "rollout.eval",
)  # fmt: skip
"""Fields of the run that decide how the model is asked; they stand in the mark."""


def export_run(
    source: Path,
    out: Path,
    *,
    which: str | None = None,
    adapter: bool = False,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Proof:
    """Write a checkpoint of the run `source` to the folder `out`; the proof that it is the trained model.

    Raises ConfigError, and leaves `out` as it was, for whatever cannot be read, written or proved, and for code that
    the run's files ask to run, unless `trust`.
    """
    check_out(out, overwrite=overwrite)
    found = find_checkpoint(source, which, overrides, trust=trust)
    if adapter and found.config.model.lora is None:
        raise ConfigError("--adapter: the run trained no adapters (model.lora is null); export its model")
    trained = load_trained(found)
    rows = [json.loads(line) for line in (found.checkpoint.log or b"").splitlines()]
    rewards = [str(reward["name"]) for reward in found.checkpoint.extra["rewards"]]
    history = History([row for row in rows if row["step"] <= found.step], rewards)
    return write_export(trained, history, out, adapter=adapter, overwrite=overwrite)


def write_export(
    trained: Trained, history: History, out: Path, *, adapter: bool, overwrite: bool = False
) -> Proof:
    """Write a trained model to `out` and prove it; takes memory for a second copy of the model."""
    check_out(out, overwrite=overwrite)
    tmp = out.with_name(f".{out.name}.{os.getpid()}.export")
    try:
        tmp.mkdir(parents=True)
        asked = prompts_of_run(trained.paths, trained.processor, trained.config)
        config, step = trained.config, trained.step
        expected = expected_of(trained, asked, _tensors(trained, adapter=adapter))
        write_model(trained, tmp, adapter=adapter)
        proof = prove(tmp, config, expected, adapter=adapter)
        write_card(tmp, config, history, step=step, adapter=adapter, proof=str(proof))
        _mark(tmp, config, step, proof, expected, adapter=adapter)
        _rename(tmp, out, overwrite=overwrite)
    except OSError as error:
        raise ConfigError(
            f"'{out}' cannot be written ({error.strerror or error}); name another folder"
        ) from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return proof


def write_model(trained: Trained, folder: Path, *, adapter: bool) -> None:
    """Weights or adapter, configs, processor and chat template."""
    model, config = trained.model, trained.config
    if adapter:
        save_adapter(model, folder, config.model.path)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
    else:
        own = {"state_dict": dict(merged_tensors(model))} if has_adapters(model) else {}
        save_pretrained(model, folder, max_shard_size=SHARD, **own)
    trained.processor.save(folder)


def check_out(out: Path, *, overwrite: bool) -> None:
    """ConfigError when `out` may not be written: it exists, and is no earlier export that may be replaced."""
    if not os.path.lexists(out):
        return
    mark = read_export_mark(out)
    if mark is None:
        raise ConfigError(f"'{out}' exists and is no export of mm_grpo (it has no {MARK}); name a new folder")
    if not overwrite:
        raise ConfigError(f"'{out}' holds an export; name another folder, or replace it with --overwrite")
    other = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_symlink() or not p.is_dir())
    if added := [name for name in other if name not in mark["files"]]:
        raise ConfigError(f"--overwrite: '{out}' holds {added[0]}, which no export wrote; move it away")


def read_export_mark(folder: Path) -> dict[str, Any] | None:
    """What mm_grpo_export.json of a folder holds; None where there is none. ConfigError for one that is damaged."""
    file = folder / MARK
    if folder.is_symlink() or not file.is_file() or file.is_symlink():
        return None
    try:
        mark = read_json(file, dict)
        return {**mark, "files": list(mark["files"]), "settings": dict(mark["settings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"'{file}' is damaged ({error}); export the model again") from None


def _tensors(trained: Trained, *, adapter: bool) -> Iterator[tuple[str, Tensor]]:
    if not adapter:
        yield from merged_tensors(trained.model)
        return
    for name, tensor in adapter_factors(trained.model):  # as peft names them once they are loaded
        yield name.removesuffix(".weight") + ".default.weight", tensor


def _mark(
    folder: Path, config: GRPOConfig, step: int, proof: Proof, expected: Expected, *, adapter: bool
) -> None:
    dumped = config.model_dump(mode="json")
    settings: dict[str, Any] = {}
    for path in SETTINGS:
        section, _, name = path.partition(".")
        settings.setdefault(section, {})[name] = dumped[section][name]
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    mark = {
        "mm_grpo": __version__, "kind": "adapter" if adapter else "merged", "step": step,
        "gap": asdict(proof.gap), "limit": proof.limit, "prompts": [prompt.uid for prompt, _ in expected.asked],
        "settings": settings, "files": [*files, MARK],
    }  # fmt: skip
    (folder / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")


def _rename(tmp: Path, out: Path, *, overwrite: bool) -> None:
    """Give `tmp` its name. What came there in the meantime is not touched."""
    check_out(out, overwrite=overwrite)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(tmp, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
