"""Results of a trainer: the folders model/ and adapter/, summary.json, the page, and a repository on the Hub."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mm_grpo.errors import ConfigError
from mm_grpo.files import refuse_existing
from mm_grpo.learner.shards import is_sharded
from mm_grpo.open_run import OpenRun
from mm_grpo.pages.report import Report
from mm_grpo.run.certificate import certificate
from mm_grpo.run.folder import Save
from mm_grpo.run.manifest import checkpoints_in
from mm_grpo.run.metrics import read_rows
from mm_grpo.run.summary import summary_of, warnings_of


class Exports:
    """Base class of `GRPOTrainer`: saves, shows and publishes the model of a run."""

    def __init__(self, parts: OpenRun) -> None:
        self.parts, self.config, self.ranks, self.folder = parts, parts.config, parts.ranks, parts.folder
        self.model, self.processor, self.learner = parts.model, parts.processor, parts.learner
        self.scorer, self.evaluations = parts.scorer, parts.evaluations
        self.callbacks, self.state = parts.callbacks, parts.state

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo.

        With `optim.zero_stage: 3` all processes call it, and the first writes.
        """
        self.learner.save(self._writes(path))

    def save_model(self, output_dir: str | Path) -> None:
        """`save`, under the name that it has in transformers' and TRL's trainers."""
        self.save(output_dir)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters of `model.lora` to `path`, in fp32, as `peft.PeftModel.from_pretrained` reads them."""
        if self.config.model.lora is None:
            raise ConfigError("model.lora = null: the run has no adapters to save; save the model")
        self.learner.save_adapter(self._writes(path))

    def show(self) -> Report:
        """Return the page of the run so far, which a notebook shows; report.html has more of it."""
        return Report([self.folder.paths])

    def push_to_hub(
        self, name: str, private: bool = True, *, adapter: bool = False, overwrite: bool = False
    ) -> str:
        """Send the model as it is now to the Hub's repository `name`; return the address of the commit. Collective.

        With `adapter` send the adapters of `model.lora` instead. They are written to a temporary folder first, loaded
        with plain transformers and compared, as `mm-grpo export` does, on prompts that the run has logged. The first
        process sends. Raises ConfigError without a token, offline, or when the two differ.
        """
        from mm_grpo.trained.hub import push_trained
        from mm_grpo.trained.model import Trained

        address = ""
        with self.ranks.fail_together("pushing to the Hub"):
            if is_sharded(self.model):
                raise ConfigError(
                    "optim.zero_stage = 3: no process holds the whole model to send; save it, and send the folder with "
                    "mm-grpo export --push"
                )
            if self.ranks.first:
                paths, rewards = self.folder.paths, [spec.name for spec in self.scorer.specs]
                rows = read_rows(paths.metrics)
                step = max((int(row["step"]) for row in rows), default=0)
                trained = Trained(self.model, self.processor, self.config, paths, step, rows, rewards)
                options = {"private": private, "adapter": adapter, "overwrite": overwrite}
                address = push_trained(name, trained, **options)
        return self.ranks.broadcast(address, "pushing to the Hub")

    def _finish(self, last_step: int, started: float, stop_reason: str) -> dict[str, Any]:
        """Save the model and write the summary of a run that ended after `last_step`; return the summary."""
        folder, saves = self.folder, self.config.run.save_model
        step, why = self.evaluations.kept_step(last_step, checkpoints_in(folder.paths.checkpoints))
        with self.ranks.fail_together("saving the model"):
            if saves and (self.ranks.first or is_sharded(self.model)):
                with self.state.checkpoints.weights_of(step) if step != last_step else nullcontext():
                    folders: dict[str, Save] = {"model": self.learner.save}
                    if self.config.model.lora is not None:
                        folders["adapter"] = self.learner.save_adapter
                    folder.replace_folders(folders, first=self.ranks.first)
            if saves and self.ranks.first:
                self.callbacks.call("on_save", trainer=self, step=step, path=folder.paths.model)
        seconds = time.perf_counter() - started
        summary = summary_of(self.evaluations, seconds, last_step, stop_reason or None)
        summary |= {"model": {"step": step, "why": why} if saves else None}
        summary["warned"] = warnings_of(folder.paths) if self.ranks.first else {}
        if self.ranks.first:
            folder.write_summary(summary)  # before the files are read, which may fail
            summary["certificate"] = certificate(folder.paths, summary)
            folder.write_summary(summary)
        return summary

    def _writes(self, path: str | Path) -> str | Path | None:
        """Return `path` if this process writes there; all do unless the weights are sharded.

        Raises ConfigError if it is `model.path`, or holds a config.json beside which no weights are: the user's own.
        """
        folder, base = Path(path), Path(self.config.model.path)
        if folder.exists() and base.exists() and folder.samefile(base):
            raise ConfigError(
                f"'{path}' is model.path, which the run began with; name another folder to save to"
            )
        if not any(folder.glob("*.safetensors")):
            refuse_existing([folder / "config.json"])
        return path if self.ranks.first or not is_sharded(self.model) else None
