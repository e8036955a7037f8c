"""The README as a newcomer follows it, from the clone to an export, with rows and a reward of one's own.

Its commands as they stand, and those of all pages, are run by house/test_commands.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import forkserver, processes
from helpers.demo import check_the_demo, copy_sources
from helpers.documents import COLOURS, QUESTION, draw_circles, write_readme_files

ROOT = Path(__file__).parents[2]
RUN = {  # what is run, in the order in which one can run it, and what its output holds
    "mm-grpo check own.yaml": "\nok",
    "mm-grpo estimate own.yaml --gpu 80": "fits",
    "mm-grpo train own.yaml layer.yaml run.max_steps=16": "next: mm-grpo eval own.yaml --model runs/mine",
    "mm-grpo train own.yaml --resume": "done: 20 steps",
    "mm-grpo eval own.yaml --model runs/mine": "accuracy (right >= 1)",
    "mm-grpo view runs/mine runs/demo": "page: ",
    "mm-grpo export runs/mine adapter --adapter --checkpoint best": "done: adapter in adapter",
    "mm-grpo export runs/mine merged --checkpoint best": "by plain transformers: the largest difference",
    f"mm-grpo ask adapter '{QUESTION}' --image heldout/2.png": "blue",
}


def clone(folder: Path) -> Path:
    """What a clone of the working tree would hold, with a .venv whose programs are this environment's."""
    copy_sources(folder)
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


def write_own_files(folder: Path) -> None:
    """The README's files, and a config made from its config: other rows, reward, model and engine."""
    config = write_readme_files(folder)
    own = 'def right(completion: str, answer: str) -> float:\n    """1 for the answer and nothing else."""\n'
    (folder / "own_rewards.py").write_text(f"{own}    return float(completion.strip() == answer)\n")
    for name, seed, count in (("train", 1, 160), ("heldout", 2, 50)):
        rows = draw_circles(folder / name, seed, count)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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

    for number, (command, words) in enumerate(RUN.items()):
        said = finished(str(number), "-m", "mm_grpo.cli", *shlex.split(command)[1:])
        assert words in said, f"{command}\n{said}"

    check_the_demo(folder / "runs/demo", demo)
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
    said = finished("vllm", "-c", BY_VLLM, *asked, preload=forkserver.VLLM)
    assert re.findall(r"^answer: (.*)$", said, re.MULTILINE) == [*COLOURS], said
