"""Every command of every page is run, or parsed for a reason that stands here: a new one does either or fails."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from helpers.documents import ROOT, commands, inline_commands, read, write_readme_files

from mm_grpo.cli.configs import load_config
from mm_grpo.cli.help import EXAMPLES
from mm_grpo.cli.main import app

PARSED = {  # commands that are not run -> why
    r"train .*--processes|--serve |--ray |mm-grpo serve|vllm_server": "several GPUs, processes or servers",
    r"torchrun|accelerate|sbatch|vllm serve": "several processes, by another program",
    r"engine=vllm|vllm\.yaml": "vLLM, which tests/engines starts",
    r"(check|train) (chartqa|cl\w+|docvqa|geometry3k|mixture|multi_image|refcoco\w+)": "test_recipes.py runs them",
    r"^make |make_base\.py|mutations\.py|-m pytest": "minutes; test_newcomer.py runs `make demo`",
    r"prepare\.py|pip download": "a network; test_recipes.py and test_easy_vqa.py have rows in its place",
    r"pip install|-m venv|/activate|unzip|export [A-Z]": "a machine that changes",
    r"benchmarks/": "a GPU",
    r"digits": "scikit-learn, an extra",
}
FEW = """
optim: {warmup_steps: 0}
rollout: {prompts_per_step: 4, num_generations: 4}
run: {max_steps: 2, save_every: 1, eval_every: 1, eval_blind: null, overwrite: true, guards: {no_update: warn}}
"""
SHAPES = "data.train.size=40 data.eval.colour_and_shape.size=6 data.eval.count.size=4"
SHORTER = {  # what becomes of a command that is run: the reader's own names, and sizes
    r"(?<![/\w])(CONFIG|(my_)?config\.yaml)(?= |$)": "mine.yaml",
    r"--(steps|replay) \d+": r"--\1 2",
    r"\bstep-0*[1-9]\d+|(?<=--checkpoint )best": "step-000002",  # no step of so short a run is surely the best
    r"train (shapes|video_qa|zoom)": r"\g<0> my_layer.yaml",
    r"(eval (examples/)?|train )shapes\S*( my_layer.yaml)?": rf"\g<0> {SHAPES}",
    r"(eval|train) video_qa( my_layer.yaml)?": r"\g<0> data.train.size=40 data.eval.clips.size=6",
    r"train zoom my_layer.yaml": r"\g<0> data.train.size=40 data.eval=null",
    r"train easy_vqa": r"\g<0> run.max_steps=1 run.guards.no_update=warn",
    r"(train|warm) .*": r"\g<0> run.overwrite=true",
    r"export .*": r"\g<0> --overwrite",
}
BLOCKS = [*commands()]
SMOKE = (
    "README.md:42",
    "mm-grpo train readme.yaml --smoke rollout.engine=transformers",
)  # as its comment says
RUN = [SMOKE] + [(where, line) for where, line in BLOCKS if not any(re.search(one, line) for one in PARSED)]
NOT_RUN = [one for one in BLOCKS if one not in RUN]
NAMED = [*inline_commands(), *((f"{name} --help", line) for name in EXAMPLES for line in EXAMPLES[name])]


def test_each_reason_is_of_a_command_that_is_there() -> None:
    assert [one for one in PARSED if not any(re.search(one, line) for _, line in NOT_RUN)] == []
    assert len(RUN) > 30 and len(NAMED) > 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's files with a config of small sizes, and other files that pages name."""
    folder = tmp_path_factory.mktemp("pages")
    config = write_readme_files(folder)
    shutil.copy(folder / "mine.yaml", folder / "readme.yaml")
    config["model"] = {"path": "tiny", "lora": {"rank": 2}}
    config["data"]["eval"] = "rows.jsonl"
    config["rollout"] = {"max_completion_length": 6, "prompts_per_step": 2, "num_generations": 4}
    config["rewards"].append({"name": "length", "max_length": 4})  # the one that a random model earns
    config["run"] |= {"max_steps": 2, "save_every": 1, "eval_every": 1}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    (folder / "my_layer.yaml").write_text(FEW)
    shutil.copy(folder / "images/0.png", folder / "a.png")
    (folder / "examples").symlink_to(ROOT / "examples")
    rows = Path(shutil.copytree(ROOT / "examples/easy_vqa/fixture", folder / "data/easy_vqa"))
    shutil.copy(rows / "train.jsonl", rows / "heldout.jsonl")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, models: dict[str, Path]) -> Path:
    """The same, with the model and finished runs."""
    from mm_grpo import GRPOTrainer

    (folder / "tiny").symlink_to(models["qwen2_5_vl"])
    for run, config, *changes in (
        ("demo", "shapes", f"{folder}/my_layer.yaml", *SHAPES.split()),
        ("mine", folder / "mine.yaml"),
    ):
        GRPOTrainer(load_config(str(config), [*map(str, changes), f"run.dir={folder}/runs/{run}"])).train()
    for run in ("one", "two"):
        shutil.copytree(folder / "runs/demo", folder / "runs" / run)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("where", "line"), RUN)
def test_a_command_runs(
    where: str, line: str, runs: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    monkeypatch.chdir(runs)
    for pattern, shorter in SHORTER.items():
        line = re.sub(pattern, shorter, line)
    ended = command(*shlex.split(line)[1:])
    assert ended.code == 0 and ended.out, f"{line}\n{ended.out}{ended.err}"


def parse(words: list[str], complete: bool) -> None:
    """Raise what mm-grpo says about options and fields; of a command within a text parts may be missing."""
    from typer.main import get_command

    words = [
        re.sub(r"^(CONFIG|config\.yaml)$", "mine.yaml", re.sub("^(N|STEP)$", "2", word)) for word in words
    ]
    program: Any = get_command(app)
    context = program.make_context("mm-grpo", words)
    try:
        while hasattr(program, "resolve_command") and words:
            inner, program, words = program.resolve_command(context, words)
            context = program.make_context(inner, words, parent=context)
    except typer.BadParameter.__base__ as error:  # type: ignore[misc]
        assert not complete and type(error).__name__ in ("MissingParameter", "BadOptionUsage"), error
    config, changes = context.params.get("config"), context.params.get("overrides") or []
    if config is not None and not {config, *changes} & {"RECIPE", "LAYER", "RUN"}:
        load_config(config, changes)


@pytest.mark.parametrize(("where", "line"), NOT_RUN + NAMED)
def test_a_command_that_is_not_run_is_legal(
    where: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line.partition(" > ")[0])
    if words[0] == "mm-grpo" or "mm_grpo.cli" in words:
        start = words.index("mm_grpo.cli" if "mm_grpo.cli" in words else "mm-grpo")
        parse(words[start + 1 :], complete=(where, line) in NOT_RUN)
    elif words[0] == "python" and words[1].endswith(".py"):
        monkeypatch.setattr(sys, "argv", [words[1], "--help"])
        monkeypatch.syspath_prepend(ROOT / Path(words[1]).parent)
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        assert {one for one in words if one.startswith("--")} <= {
            *re.findall(r"--[\w-]+", capsys.readouterr().out)
        }
    elif words[0] == "make":
        assert re.search(rf"(?m)^{words[1]}:", read("Makefile"))
    elif words[0] == "pip":
        extras = re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", line)))
        assert {*extras} <= {*tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]}
    files = [word for word in words if re.fullmatch(r"(examples|requirements|tests)/\S+\.\w+", word)]
    assert [file for file in files if not (ROOT / file).exists()] == []
