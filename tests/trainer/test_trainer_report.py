"""What a run shows while it goes on: its page, marks in its rollout log, and nothing of the libraries."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
from helpers import tiny
from helpers.configs import small_config
from helpers.small_runs import ROWS, config_for, vowels
from PIL import Image
from transformers.utils import logging as transformers_logging

from mm_grpo import GRPOTrainer
from mm_grpo.pages.page import GENERATOR
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.trained.export import export_run


def test_the_page_and_the_marks(models: dict[str, Path], tmp_path: Path) -> None:
    config = small_config(
        models["qwen2_5_vl"],
        tmp_path / "run",
        rollout={"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 3},
        run={"max_steps": 3, "save_every": 0, "save_model": False,
             "guards": {"no_update": "off", "zero_std": "off", "no_reward": "off"}},
    )  # fmt: skip
    pictures = [tiny.picture(i, 112, 56) for i in range(4)]
    rows = [{"prompt": "where?", "image": picture, "box": [28, 14, 84, 42]} for picture in pictures]
    rewards = ["iou", lambda completion: len(set(completion))]
    trainer = GRPOTrainer(config, train=rows, rewards=rewards)
    trainer.train()
    paths = trainer.folder.paths
    page = paths.report.read_text()
    assert '"steps":3' in page and GENERATOR.decode() in page
    assert logged_steps(paths) == [1, 2, 3]
    row = read_rollouts(paths, 3)[0]
    width, height = 112, 56
    (mark,) = row["gold"]
    assert mark["label"] == "iou" and (mark["image"], len(mark["points"])) == (0, 4)
    # the box is in the dataset's pixels, the mark in those that the model saw
    with Image.open(paths.images / row["images"][0]) as image:
        scale = image.width / width, image.height / height
    assert mark["points"][0] == [round(28 * scale[0], 2), round(14 * scale[1], 2)]
    assert json.dumps(mark) in paths.rollout_file(3).read_text()


BITSANDBYTES = logging.getLogger("bitsandbytes.backends.cpu.ops")


def test_libraries_print_nothing_and_the_callers_settings_stay(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From Python, whose process is the caller's: bars, peft's use of old names, what bitsandbytes logs when peft
    imports it."""
    inject, load = peft.inject_adapter_in_model, peft.PeftModel.from_pretrained

    def noisy(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            BITSANDBYTES.warning("Failed to load CPU gemm_4bit_forward")
            return original(*args, **options)

        return call

    def deprecated(*args: Any, **options: Any) -> Any:
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=1)
        return noisy(load)(*args, **options)

    def hook(bar: Any, arguments: Any, options: Any) -> Any:
        return bar(*arguments, **options)

    def settings() -> Any:
        bars = transformers_logging.is_progress_bar_enabled()
        return transformers_logging.get_verbosity(), bars, list(warnings.filters), BITSANDBYTES.level

    monkeypatch.setattr(peft, "inject_adapter_in_model", noisy(inject))
    monkeypatch.setattr(peft.PeftModel, "from_pretrained", deprecated)
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    warnings.simplefilter("error", FutureWarning)
    transformers_logging.set_tqdm_hook(hook)
    before = settings()
    try:
        run = {"max_steps": 1, "save_every": 1}
        config = config_for(models["qwen2_5_vl"], tmp_path / "run", run=run, model={"lora": {"rank": 2}})
        trainer = GRPOTrainer(config, train=ROWS, rewards=[vowels])
        trainer.train()
        trainer.save(tmp_path / "saved")
        export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    finally:
        after = transformers_logging.set_tqdm_hook(None)
    assert capsys.readouterr().err == "" and caplog.messages == []
    assert after is hook and settings() == before
    BITSANDBYTES.warning("of another's call")
    assert caplog.messages == ["of another's call"]
