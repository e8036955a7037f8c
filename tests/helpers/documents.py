"""The pages of the repository: their blocks, their commands, and files as the README has a reader write them."""

from __future__ import annotations

import json
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted((ROOT / "benchmarks").glob("**/*.md")),
]
PROGRAMS = (
    r"mm-grpo|make|pip|uv|python3?|torchrun|accelerate|ray|vllm|git|unzip|sbatch|sky|docker|podman|export|\."
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\S*/)?((?:{PROGRAMS})(?: .*|$))")
INLINE = re.compile(r"(?<!`)`(?:[A-Z_]+=\S+ )*((?:mm-grpo|make|pip install) [^-`][^`]*)`(?!`)")
QUESTION = "What colour is the circle?"
COLOURS = {
    "red": (222, 38, 44),
    "green": (32, 150, 66),
    "blue": (48, 84, 214),
    "yellow": (236, 204, 30),
    "purple": (146, 54, 182),
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks in this language, without their indentation."""
    found = re.findall(rf"^([ ]*)```{language}\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def commands() -> Iterator[tuple[str, str]]:
    """(page:line, command) of every line that begins with a program, in blocks that are indented or fenced without a
    language; variables before it and its folder are left out."""
    for page in PAGES:
        language = None
        for number, line in enumerate(page.read_text(encoding="utf-8").replace("\\\n", "").splitlines(), 1):
            if line.lstrip().startswith("```"):
                language = line.strip()[3:] if language is None else None
            elif language == "" or (language is None and line.startswith("    ")):
                parts = line.strip().removeprefix("$ ").partition(" #")[0].split(" && ")
                for match in filter(None, map(COMMAND.fullmatch, map(str.strip, parts))):
                    yield f"{page.relative_to(ROOT)}:{number}", match[1]


def inline_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of code within the text."""
    for page in PAGES:
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"))
        yield from ((str(page.relative_to(ROOT)), " ".join(one.split())) for one in INLINE.findall(text))


def write_readme_files(folder: Path) -> dict[str, Any]:
    """Write the README's rows, picture, reward and config; return the config's values."""
    readme = read("README.md")
    (row,), (config,), (reward, *_) = (blocks(readme, kind) for kind in ("json", "yaml", "python"))
    columns = json.loads(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps({**columns, "answer": a}) + "\n" for a in "123"))
    (folder / "my_rewards.py").write_text(reward)
    (folder / "mine.yaml").write_text(config)
    (folder / "images").mkdir()
    Image.new("RGB", (112, 84), "white").save(folder / columns["image"])
    return dict(yaml.safe_load(config))


def draw_circles(folder: Path, seed: int, count: int) -> list[dict[str, str]]:
    """Rows with a picture each of one circle, and the pictures in a new folder."""
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
