"""What a run imports: heavy packages only where they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import alone
from helpers.small_runs import config_for

HEAVY = (
    "accelerate", "datasets", "deepspeed", "jinja2", "numpy", "openai", "peft", "scipy", "sklearn",
    "tensorboard", "torch", "torchvision", "trackio", "transformers", "trl", "vllm", "wandb",
)  # fmt: skip
NEEDED = {"accelerate", "jinja2", "numpy", "torch", "torchvision", "transformers"}
"""What a run with the embedded engine cannot do without: transformers imports accelerate and torchvision."""

REPORT = """
import json, sys
arguments, heavy, code = map(json.loads, sys.argv[1:])
from mm_grpo.cli import main
sys.argv = ["mm-grpo", *arguments]
try:
    main()
except SystemExit as ended:
    assert (ended.code or 0) == code, ended.code
finally:
    print("\\nimported:", *sorted(set(heavy) & set(sys.modules)))
"""


def imported(*arguments: str, cwd: Path, code: int = 0) -> set[str]:
    """Which of HEAVY a process has imported that ran a command, which ended with `code`."""
    given = map(json.dumps, ([str(a) for a in arguments], HEAVY, code))
    program = [sys.executable, "-c", REPORT, *given]
    done = subprocess.run(program, cwd=cwd, text=True, capture_output=True, timeout=300, env=alone())
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.splitlines()[-1].removeprefix("imported:").split())


@pytest.mark.parametrize("command", [["rewards"], ["env"]])
def test_a_command_that_builds_no_model_imports_nothing_heavy(command: list[str], tmp_path: Path) -> None:
    assert imported(*command, cwd=tmp_path) == set()


@pytest.mark.slow
def test_a_run_imports_only_what_it_uses(models: dict[str, Path], tmp_path: Path) -> None:
    """Adapters, ZeRO, trackers, other engines and datasets of the library are not asked for, and nothing of them is
    imported, to the end: the model is saved, the page is written."""
    config = config_for(models["qwen2_5_vl"], tmp_path / "run", run={"max_steps": 1, "save_every": 1})
    values = config.model_dump(mode="json")
    values["data"]["train"] = {"task": "shapes", "split": "train", "size": 4, "image_size": 56}
    score = "sum(c in 'aeiou' for c in completion) + len(completion) / 100"
    code = f"def score(completion):\n    return {score}\n"
    (tmp_path / "score.py").write_text(code, encoding="utf-8")
    values["rewards"] = [f"{tmp_path}/score.py:score"]  # one that tells the answers of a random model apart
    (tmp_path / "config.yaml").write_text(json.dumps(values), encoding="utf-8")
    assert imported("train", "config.yaml", cwd=tmp_path) == NEEDED
    assert (tmp_path / "run/model/model.safetensors").is_file()
    assert (tmp_path / "run/report.html").is_file()
    assert imported("view", "run", cwd=tmp_path) == set()
    assert imported("train", "config.yaml", cwd=tmp_path, code=2) == set()  # a run is there
    new = ("train", "config.yaml", "run.dir=runs/{time}", "--resume")
    assert imported(*new, cwd=tmp_path, code=2) == set()


QUIET = """
import sys
from pathlib import Path
from mm_grpo import GRPOConfig, GRPOTrainer
from mm_grpo.trained.export import export_run
trainer = GRPOTrainer(GRPOConfig.from_yaml("shapes", sys.argv[1:]))
trainer.train()
trainer.save("saved")
export_run(Path("run"), Path("adapter"), adapter=True)
"""


@pytest.mark.slow
def test_a_run_from_python_has_nothing_on_stderr(tmp_path: Path) -> None:
    """With adapters, for which peft is imported, and by it what is installed beside it."""
    fields = [
        "run.dir=run", "run.max_steps=1", "run.save_every=1", "data.eval=null", "optim.warmup_steps=0",
        "rollout.prompts_per_step=4", "run.guards={zero_std: off}", "model.lora={rank: 2}",
        "optim.gradient_checkpointing=true",
    ]  # fmt: skip
    code = [sys.executable, "-c", QUIET, *fields]
    done = subprocess.run(code, cwd=tmp_path, text=True, capture_output=True, timeout=300, env=alone())
    assert (done.returncode, done.stderr) == (0, "")
