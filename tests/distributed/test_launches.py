"""torchrun and `accelerate launch` start the run that one process makes; what contradicts it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import several
import yaml
from folders import assert_the_same_run, write_config
from launches import ACCELERATE, TORCHRUN, TRAIN, finished

STEPS = 2
RUN: dict[str, Any] = {"max_steps": STEPS, "eval_every": 0, "report": False}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    config = write_config(models["qwen2_5_vl"], folder, run={**RUN, "dir": str(folder)})
    code, said = finished([TORCHRUN[0], *TRAIN, config], folder.with_suffix(".txt"))
    assert code == 0, said
    return folder


def accelerate_file(folder: Path, **fields: Any) -> Path:
    """A config of accelerate as `accelerate config` writes it, for two processes."""
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "main_process_port": several.free_port(),
        "use_cpu": False,
        **fields,
    }
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def deepspeed(folder: Path, **section: Any) -> Path:
    known = {"zero_stage": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    return accelerate_file(folder, distributed_type="DEEPSPEED", deepspeed_config={**known, **section})


def command_of(launcher: str, folder: Path) -> list[object]:
    if launcher == "torchrun":
        return [*TORCHRUN, "--standalone", "--nproc-per-node", 2]
    file = deepspeed(folder) if launcher == "accelerate-deepspeed" else accelerate_file(folder)
    return [*ACCELERATE, "--config_file", file]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "accelerate-deepspeed"])
def test_a_launcher_makes_the_run_of_one_process(
    launcher: str, alone: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = write_config(models["qwen2_5_vl"], folder, run={**RUN, "dir": str(folder)})
    code, said = finished([*command_of(launcher, tmp_path), *TRAIN, config], tmp_path / "said.txt")
    assert code == 0, said
    assert "tokens on 2 processes" in said and said.count("done: 2 steps") == 1
    assert_the_same_run(folder, alone, STEPS)


@pytest.mark.long
def test_what_accelerate_was_told_is_refused_once(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(models["qwen2_5_vl"], folder, run={**RUN, "dir": str(folder)})
    file = deepspeed(tmp_path, zero_stage=3, gradient_accumulation_steps=4)
    code, said = finished([*ACCELERATE, "--config_file", file, *TRAIN, config], tmp_path / "said.txt")
    assert code != 0 and not folder.exists()
    assert said.count("accelerate's zero_stage = 3: stage 3 shares out the weights themselves") == 1, said
    assert said.count("accelerate's gradient_accumulation_steps = 4: must be 1") == 1, said


@pytest.mark.long
def test_accelerate_starts_one_process_on_a_cpu_and_that_is_told(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = write_config(models["qwen2_5_vl"], folder, run={**RUN, "dir": str(folder)})
    launch = [*ACCELERATE, "--cpu", "--num_processes", 2]
    code, said = finished([*launch, *TRAIN, config], tmp_path / "said.txt")
    assert code != 0 and not folder.exists()
    assert said.count("error: `accelerate launch` was asked for several processes and has not") == 1, said
