"""Export: write a temporary folder that transformers or peft loads, prove it, and only then give it its name.

`mm_grpo_export.json` in it is our mark: it holds the step, the settings that `mm-grpo ask` needs and the names of all
files. An existing folder is replaced only with `overwrite`, and if it has the mark and no other files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from mm_grpo.errors import ConfigError
from mm_grpo.files import atomic_folder, read_json
from mm_grpo.learner.lora import adapter_factors, has_adapters, merged_tensors, save_adapter
from mm_grpo.learner.transformers_patches import save_pretrained
from mm_grpo.trained.card import write_card
from mm_grpo.trained.model import Trained, load_trained
from mm_grpo.trained.proof import Proof, ProofPrompts, prompts_of_run, prove
from mm_grpo.trained.source import NO_RUN, WholeModel, find_model
from mm_grpo.version import __version__

MARK = "mm_grpo_export.json"
MAX_SHARD = "5GB"  # largest file of weights
SETTINGS = (
    "model.processor", "model.trust_remote_code", "data.system_prompt", "data.chat_template_kwargs",
    "data.min_pixels", "data.max_pixels", "data.video_fps", "data.video_max_frames", "data.video_max_pixels",
    "rollout.max_completion_length", "rollout.eval",
)  # fmt: skip
"""Fields of the run that decide how the model is asked. They are saved in the mark."""


def export_run(
    source: Path,
    out: Path,
    *,
    checkpoint: str | None = None,
    adapter: bool = False,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Proof:
    """Write a checkpoint of the run `source` to the folder `out`; return the proof that it is the trained model.

    Raises ConfigError, and leaves `out` as it was, if anything cannot be read, written or proved, and unless `trust`
    if the run's files ask to run code.
    """
    check_out(out, overwrite=overwrite)
    run_checkpoint = find_model(str(source), checkpoint, overrides, trust=trust)
    if isinstance(run_checkpoint, WholeModel):
        raise ConfigError(f"'{source}' is {NO_RUN}")
    if adapter and run_checkpoint.config.model.lora is None:
        raise ConfigError("--adapter: the run trained no adapters (model.lora is null); export its model")
    return write_export(load_trained(run_checkpoint), out, adapter=adapter, overwrite=overwrite)


def write_export(trained: Trained, out: Path, *, adapter: bool, overwrite: bool = False) -> Proof:
    """Write a trained model to `out` and prove it; takes memory for a second copy of the model."""
    check_out(out, overwrite=overwrite)
    prompts = prompts_of_run(trained.paths, trained.processor, trained.config)
    proofs: list[Proof] = []

    def write(folder: Path) -> None:
        write_model(trained, folder, adapter=adapter)
        proof = prove(folder, trained, prompts, _tensors(trained, adapter=adapter), adapter=adapter)
        write_card(folder, trained, adapter=adapter, proof=str(proof))
        _write_mark(folder, trained, prompts, proof, adapter=adapter)
        check_out(out, overwrite=overwrite)  # again: another process may have written there
        proofs.append(proof)

    try:
        atomic_folder(out, write)
    except OSError as error:
        raise ConfigError(
            f"'{out}' cannot be written ({error.strerror or error}); name another folder"
        ) from None
    return proofs[0]


def write_model(trained: Trained, folder: Path, *, adapter: bool) -> None:
    """Write the weights or the adapter, the configs, the processor and the chat template."""
    model, config = trained.model, trained.config
    if adapter:
        save_adapter(model, folder, config.model.path)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
    else:
        options = {"state_dict": dict(merged_tensors(model))} if has_adapters(model) else {}
        save_pretrained(model, folder, max_shard_size=MAX_SHARD, **options)
    trained.processor.save(folder)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if `out` exists and is no export that may be replaced."""
    if not os.path.lexists(out):
        return
    mark = read_export_mark(out)
    if mark is None:
        raise ConfigError(f"'{out}' exists and is no export of mm_grpo (it has no {MARK}); name a new folder")
    if not overwrite:
        raise ConfigError(f"'{out}' holds an export; name another folder, or replace it with --overwrite")
    files = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_symlink() or not p.is_dir())
    if foreign := [name for name in files if name not in mark["files"]]:
        raise ConfigError(f"--overwrite: '{out}' holds {foreign[0]}, which no export wrote; move it away")


def read_export_mark(folder: Path) -> dict[str, Any] | None:
    """Read mm_grpo_export.json of a folder; None if there is none. Raises ConfigError if it is damaged."""
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
    for name, tensor in adapter_factors(trained.model):  # renamed as peft names loaded tensors
        yield name.removesuffix(".weight") + ".default.weight", tensor


def _write_mark(
    folder: Path, trained: Trained, prompts: ProofPrompts, proof: Proof, *, adapter: bool
) -> None:
    values = trained.config.model_dump(mode="json")
    settings: dict[str, Any] = {}
    for path in SETTINGS:
        section, _, name = path.partition(".")
        settings.setdefault(section, {})[name] = values[section][name]
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    mark = {
        "mm_grpo": __version__, "kind": "adapter" if adapter else "merged", "step": trained.step,
        "gap": asdict(proof.gap), "limit": proof.limit, "prompts": [prompt.uid for prompt, _ in prompts],
        "settings": settings, "files": [*files, MARK],
    }  # fmt: skip
    (folder / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
