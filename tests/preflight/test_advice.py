"""What a message advises works: it is applied as written, until `check` says ok, in at most three rounds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import tiny
from helpers.configs import Values, merged

BASE = str(Path(__file__).parents[2] / "examples" / "shapes" / "base")
SECTION = "(?:model|data|rollout|algorithm|optim|run)"
Row = dict[str, Any]


def rows(*absent: str, count: int = 4, **columns: Any) -> list[Row]:
    """Rows; a column that is a function gets the row's number. `absent` columns are left out."""
    whole = {
        "prompt": "What is it, {}?".format,
        "image": "images/{}.png".format,
        "answer": "red{}".format,
        **columns,
    }
    return [
        {name: value(n) if callable(value) else value for name, value in whole.items() if name not in absent}
        for n in range(count)
    ]


def said(content: str, role: str = "user") -> Row:
    return {"role": role, "content": content}


def talk(n: int) -> list[Row]:
    return [said(f"What is it, {n}?"), said(f"red{n}", "assistant")]


FAULTY: dict[str, tuple[list[Row], Values]] = {
    "a prompt of another name": (rows("prompt", question="What?"), {}),
    "a prompt that nobody could guess": (rows("prompt", textfield="What is it?"), {}),
    "images of another name": (rows("image", photo="images/{}.png".format), {}),
    "a tag beside an unread column": (
        rows("image", prompt="<image> What?", photo="images/{}.png".format),
        {},
    ),
    "a placeholder beside an unread column": (
        rows("image", prompt="<|image_1|> What?", photo="images/1.png"),
        {},
    ),
    "images in another folder": (rows(image="{}.png".format), {}),
    "no images": (rows("image"), {}),
    "two prompts": (rows(problem="What?"), {}),
    "two answers": (rows("prompt", messages=talk, answer="blue{}".format), {}),
    "a prompt that ends with the answer": (rows("answer", prompt=talk), {}),
    "a long prompt": (rows(prompt=lambda n: "word " * (3000 if n == 1 else 1)), {}),
    "a picture that is not there": (rows(count=12, image=lambda n: f"images/{n or 99}.png"), {}),
    "boxes of shares": (rows(box=lambda n: [0.1 * n, 0.2, 0.5, 0.6]), {"rewards": ["iou"]}),
    "an answer of another name": (rows("answer", label="red{}".format), {}),
    "a misspelt column": (rows(), {"data": {"columns": {"answer": "answr"}}}),
    "a misspelt name of ours": (rows("prompt", question="?"), {"data": {"columns": {"promt": "question"}}}),
    "an evaluation set of other names": (rows(), {"data": {"eval": "eval.jsonl"}}),
    "a misspelt model": (rows(), {"model": {"path": "./bse"}}),
    "a misspelt file": (rows(), {"data": {"train": "row.jsonl"}}),
    "a misspelt key": (rows(), {"rollout": {"num_generation": 4}}),
    "a misspelt section": (rows(), {"roloout": {"temperature": 0.9}}),
    "a key without its section": (rows(), {"learning_rate": 1e-5, "beta": 0.01}),
    "TRL's keys": (
        rows(),
        {"output_dir": "out", "run": {"report_to": ["tensorboard"]}, "epsilon_high": 0.28},
    ),
    "TRL's engine": (rows(), {"use_vllm": True}),
    "TRL's dtype": (rows(), {"bf16": True}),
    "epochs": (rows(), {"run": {"epochs": 3}}),
    "PPO": (rows(), {"algorithm": {"loss_type": "ppo"}}),
    "a layer that is not there": (rows(), {"model": {"lora": {"target_modules": ["qproj"]}}}),
    "another tracker": (rows(), {"run": {"trackers": ["tensorbord"]}}),
    "a tracker that is not there": (rows(), {"run": {"trackers": ["swanlab"]}}),
    "another engine": (rows(), {"rollout": {"engine": "vlm"}}),
    "another attention": (rows(), {"model": {"attn": "flash_attention_2"}}),
    "a misspelt reward": (rows(), {"rewards": ["exact_mach"]}),
    "TRL's reward": (rows(answer=str), {"rewards": ["accuracy_reward"]}),
    "a misspelt option": (rows(), {"rewards": [{"name": "exact_match", "ignorecase": False}]}),
    "a template without text": (
        rows(),
        {"rewards": ["exact_match", {"name": "format", "template": "<a></a>"}]},
    ),
    "a gold template without gold": (rows(), {"data": {"gold_template": "{answer}"}}),
    "four bits without adapters": (rows(), {"model": {"quantization": "nf4"}}),
}


def put(config: Values, key: str, value: Any) -> None:
    *sections, field = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[field] = value


def taken(config: Values, key: str) -> Any:
    *sections, field = key.split(".")
    parents = [config]
    for section in sections:
        parents.append(parents[-1][section])
    value = parents[-1].pop(field)
    for parent, section in zip(parents[-2::-1], reversed(sections), strict=True):
        if not parent[section]:
            del parent[section]
    return value


def renamed(config: Values, wrong: str, right: str) -> Values:
    text = yaml.safe_dump(config, sort_keys=False)
    assert wrong in text, f"{wrong!r} is not in the config"
    return dict(yaml.safe_load(text.replace(wrong, right)))


def of_source(config: Values, match: re.Match[str]) -> Values:
    """Give the source whose row the message names (or its set) columns of its own."""
    name = "eval" if "eval" in match.string.split(" no column")[0] else "train"
    columns = {match["our"]: match["their"]}
    put(config, f"data.{name}", {"path": config["data"][name], "columns": columns})
    return config


def did_you_mean(config: Values, match: re.Match[str]) -> Values:
    """Rename what is nearest to the suggestion among the quoted names before it."""
    names = re.findall(r"'([^' ]+)'", match.string[: match.start()])
    wrong = max(names, key=lambda name: SequenceMatcher(None, name, match["right"]).ratio())
    return renamed(config, wrong, match["right"])


def moved(config: Values, match: re.Match[str]) -> Values:
    value = taken(config, match["key"])
    put(config, match["to"], yaml.safe_load(match["value"]) if match["value"] else value)
    return config


def mapped(config: Values, match: re.Match[str]) -> Values:
    """Map the argument to the only column that is nothing else."""
    section = config["data"]["eval"] if match.string.startswith("error: eval") else config["data"]
    columns = section.setdefault("columns", {})
    (columns[match["our"]],) = {*match["columns"].split(", ")} - {"prompt", "image", *columns.values()}
    return config


def set_to(config: Values, match: re.Match[str]) -> Values:
    put(config, match["key"], yaml.safe_load(match["value"]))
    return config


def option(config: Values, match: re.Match[str]) -> Values:
    config["rewards"] = [{"name": config["rewards"][0], match["key"]: match["value"]}]
    return config


ADVICE: dict[str, Callable[[Values, re.Match[str]], Values]] = {
    rf"(?P<key>{SECTION}(?:\.\w+)+)=(?P<value>(?!COLUMN|\.\.\.)[\w./-]+)": set_to,
    r"\{path: \.\.\., columns: \{(?P<our>\w+): (?P<their>\w+)\}\}": of_source,
    r"(?P<key>[\w.]+): unknown key; (?:write|the nearest is) (?P<to>[\w.]+)(?:: (?P<value>\w+))?": moved,
    r"did you mean '(?P<right>[^']+)'": did_you_mean,
    r"unknown reward '(?P<wrong>\w+)'; the nearest here is (?P<right>\w+)": lambda config, match: renamed(
        config, match["wrong"], match["right"]
    ),
    rf"(?P<key>{SECTION}\.[\w.]+) = '[^']*': must be one of [^;]*(?:; write|nearest is) (?P<value>\w+)": set_to,
    rf"(?P<key>{SECTION}\.[\w.]+)\[0\] = '[^']*': must be a list of (?:.*the nearest is )?(?P<value>\w+)": (
        lambda config, match: set_to(config, match) and renamed(config, match["value"], f"[{match['value']}]")
    ),
    rf"needs (?P<key>{SECTION}\.\w+)(?P<value>)": lambda config, match: (
        put(config, match["key"], {}) or config
    ),
    r"set (?P<key>gold_space): (?P<value>\w+)": option,
    r"columns: (?P<columns>[\w, ]+)\. Map one in .*\(\{(?P<our>\w+): its_name\}\)": mapped,
    r"the template '(?P<wrong>[^']+)'.* an example is '(?P<right>[^']+)'": lambda config, match: renamed(
        config, match["wrong"], match["right"]
    ),
    r"data\.gold_template = '(?P<wrong>[^']+)'.* as in (?P<right>\S+)": lambda config, match: renamed(
        config, match["wrong"], match["right"]
    ),
    r"is named (?P<wrong>\w+); they are named (?P<right>\w+)": lambda config, match: renamed(
        config, match["wrong"], match["right"]
    ),
    r"(?P<our>data\.columns\.messages) to this column's name": lambda config, match: (
        put(config, match["our"], "prompt") or config
    ),
    r"holds: '(?P<right>[^']+)'": lambda config, match: renamed(config, "row.jsonl", match["right"]),
}
"""By pattern of an advice, how it is followed. The one that stands first in the message is."""


def followed(message: str, config: Values) -> Values:
    matches = [
        (match, follow) for pattern, follow in ADVICE.items() if (match := re.search(pattern, message))
    ]
    assert matches, f"no advice: {message}"
    match, follow = min(matches, key=lambda pair: pair[0].start())
    return follow(config, match)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Row], Values], Values]:
    """Write rows, their pictures and a model into the working folder; return a config with changes."""
    (tmp_path / "images").mkdir()
    for n in range(12):
        tiny.picture(n, 56, 56).save(tmp_path / "images" / f"{n}.png")
    (tmp_path / "base").symlink_to(BASE)
    monkeypatch.chdir(tmp_path)

    def config_of(written: list[Row], changes: Values) -> Values:
        lines = {"rows": written, "eval": rows("prompt", "answer", query="Who?", label="blue{}".format)}
        for file, held in lines.items():
            Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
        config: Values = {
            "model": {"path": BASE},
            "data": {"train": "rows.jsonl"},
            "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 32},
            "rewards": ["exact_match"],
            "run": {"dir": "runs/x", "max_steps": 1, "save_every": 0},
        }
        return merged(config, changes)

    return config_of


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_what_a_message_advises_works(name: str, write: Any, command: Any) -> None:
    config, messages = write(*FAULTY[name]), list[str]()
    for _ in range(4):
        Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        result = command("check", "config.yaml")
        text = re.sub(r"\s+", " ", result.err or result.out)
        if result.code == 0 and "warning:" not in text:
            break
        messages.append(message_of(result))
        config = followed(messages[-1], config)
    assert result.code == 0 and 1 <= len(messages) <= 3, messages


def test_a_former_run_is_replaced_as_advised(write: Any, command: Any) -> None:
    config = write(
        rows(),
        {
            "rewards": ["length"],
            "run": {"save_model": False, "report": False, "guards": {"no_update": "off"}},
        },
    )
    config["rewards"] = [{"name": "length", "max_length": 9}]
    for code in (0, 2, 0):
        Path("config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        result = command("train", "config.yaml")
        assert result.code == code, result
        config = followed(result.err, config) if code else config
    assert config["run"]["overwrite"] is True


def message_of(result: Any) -> str:
    """Return the error, else the last warning or problem of a report."""
    if result.err.strip():
        return str(re.sub(r"\s+", " ", result.err))
    lines = [line for line in result.out.splitlines() if line and line[0] not in "┏┡│└┃"]
    return next((line for line in lines if "warning:" in line), None) or lines[-2]
