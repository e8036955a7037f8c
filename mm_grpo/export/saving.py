"""What a trainer saves: `GRPOTrainer.save_model`, `save_adapter` and `push_to_hub`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_grpo.config import GRPOConfig
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.errors import ConfigError
from mm_grpo.files import temporary_folder
from mm_grpo.learner.learner import Learner
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.metrics import read_metrics


class Saving:
    """The saving half of a trainer, whose parts it reads."""

    config: GRPOConfig
    learner: Learner
    model: Any
    processor: Processor
    folder: RunFolder
    ranks: Ranks
    scorer: Scorer

    def save(self, path: str | Path) -> None:
        """Write weights, config, processor and chat template to `path`, loadable without mm_grpo."""
        self.learner.save(path)

    def save_model(self, output_dir: str | Path) -> None:
        """`save`, under the name that it has in transformers' and TRL's trainers."""
        self.save(output_dir)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters of `model.lora` to `path`, in fp32, as `peft.PeftModel.from_pretrained` reads them."""
        if self.config.model.lora is None:
            raise ConfigError("model.lora = null: the run has no adapters to save; save the model")
        self.learner.save_adapter(path)

    def save_in_run(self) -> None:
        """Write `model/` into the run's folder, and with `model.lora` `adapter/`."""
        self.folder.replace_folder("model", self.save)
        if self.config.model.lora is not None:
            self.folder.replace_folder("adapter", self.save_adapter)

    def push_to_hub(
        self, name: str, private: bool = True, *, adapter: bool = False, overwrite: bool = False
    ) -> str:
        """Send the model as it is now to the Hub's repository `name`; returns the address of the commit.

        With `adapter` the adapters of `model.lora` in its place. It is written to a temporary folder first, loaded with
        plain transformers and compared, as `mm-grpo export` does, on prompts that the run has logged. Every process
        calls it, and the first one sends. Raises ConfigError without a token, offline, or when the two differ.
        """
        address = ""
        with self.ranks.fail_together("pushing to the Hub"):
            if self.ranks.first:
                address = self._push(name, private, adapter, overwrite)
        return self.ranks.broadcast(address, "pushing to the Hub")

    def _push(self, name: str, private: bool, adapter: bool, overwrite: bool) -> str:
        from mm_grpo.export.card import History
        from mm_grpo.export.hub import check_hub, push
        from mm_grpo.export.write import write_export
        from mm_grpo.trained.model import Trained

        if adapter and self.config.model.lora is None:
            raise ConfigError("adapter=True: the run trained no adapters (model.lora is null)")
        full = check_hub(name, overwrite=overwrite)
        paths = self.folder.paths
        rows = read_metrics(paths.metrics) if paths.metrics.is_file() else []
        step = max((int(row["step"]) for row in rows), default=0)
        before: dict[str, Mapping[str, Any]] = {}
        for key, value in (rows[0] if rows and rows[0]["step"] == 0 else {}).items():
            _, _, rest = key.partition("eval/")
            found, _, what = rest.rpartition("/")
            if what in ("accuracy", "reward") and "/task/" not in rest and found:
                before[found] = {**before.get(found, {}), what: value}
        names = [spec.name for spec in self.scorer.specs]
        with temporary_folder("push") as folder:
            trained = Trained(self.model, self.processor, self.config, paths, step)
            write_export(trained, History(rows, before, names), folder / "export", adapter=adapter)
            return push(folder / "export", full, private=private)
