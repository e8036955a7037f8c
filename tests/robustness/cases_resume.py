"""`mm-grpo train --resume` of runs whose log, mark, config, rows or rewards are not those that the run began with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import robustness.run_case as by
from robustness.cases import Call, add, circle, cut, dangling, fifo
from robustness.whole_runs import LAST, RUN, resume, resumed, stopped, straight, write_config

LOG, MARK = "metrics.jsonl", "mm_grpo_run.json"
CUT_OR_PUT_BACK = "put back from the checkpoint of step 3"


def rows_of(out: Path) -> list[str]:
    return (out / LOG).read_text().splitlines(keepends=True)


def log(change: Callable[[list[str]], list[str]]) -> Callable[[Path], Any]:
    return lambda out: (out / LOG).write_text("".join(change(rows_of(out))))


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Something else in the place of a file or folder of the run."""

    def replace(out: Path) -> None:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return replace


LATER = json.dumps({"step": LAST + 1, "loss": 0.0}) + "\n"
for name, damage, words in [
    ("with a hole", log(lambda rows: rows[:1] + rows[2:]), (LOG, CUT_OR_PUT_BACK)),
    ("with junk between", log(lambda rows: [rows[0], "junk\n", *rows[1:]]), (LOG, CUT_OR_PUT_BACK)),
    ("with NUL bytes", log(lambda rows: [*rows[:-1], "\0" * 99 + "\n"]), (LOG, CUT_OR_PUT_BACK)),
    ("with a row twice", log(lambda rows: [*rows, rows[-1]]), ("after step 3 are cut",)),
    ("with rows in another order", log(lambda rows: rows[::-1]), (LOG, CUT_OR_PUT_BACK)),
    ("with half a line", log(lambda rows: [*rows[:-1], rows[-1][:40]]), (LOG, CUT_OR_PUT_BACK)),
    ("with half a line more", log(lambda rows: [*rows, rows[-1][:40]]), ("after step 3 are cut",)),
    ("with a step more", log(lambda rows: [*rows, LATER]), ("after step 3 are cut",)),
    ("that is empty", log(lambda rows: []), (LOG, CUT_OR_PUT_BACK)),
    ("that is gone", lambda out: (out / LOG).unlink(), (LOG, "is gone", CUT_OR_PUT_BACK)),
    ("that is noise", lambda out: (out / LOG).write_bytes(os.urandom(300)), (LOG, CUT_OR_PUT_BACK)),
]:
    add(f"resume: {LOG} {name}", resumed(damage), *words, code=0, heavy=True)
PLACES = {
    LOG: "a file",
    "config.yaml": "a file",
    "environment.json": "a file",
    "summary.json": "a file",
    "rollouts": "a folder",
    "model": "a folder",
}
for place, kind in PLACES.items():
    made: dict[str, Callable[[Path], Any]] = {
        "a FIFO": fifo,
        "a circle of links": circle,
        "a link to nothing": dangling,
    }
    made |= {"a folder": Path.mkdir} if kind == "a file" else {"a file": Path.touch}
    for name, make in made.items():
        add(f"resume: {name} in the place of {place}", resumed(instead(place, make)), place, heavy=True)
for name, make in {
    "cut": cut,
    "of noise": lambda path: path.write_bytes(b"\xff" * 99),
    "of another format": lambda path: path.write_text('{"format": 2, "run": "x", "wrote": []}'),
    "that says nothing": lambda path: path.write_text("{}"),
    "that is a list": lambda path: path.write_text("[]"),
    "that is a folder": lambda path: (path.unlink(), path.mkdir()),
    "that is a FIFO": lambda path: (path.unlink(), fifo(path)),
    "that is gone": Path.unlink,
}.items():
    add(f"resume: a mark {name}", resumed(lambda out, make=make: make(out / MARK)), MARK, heavy=True)
add("resume: a mark that is empty", resumed(lambda out: (out / MARK).write_text("")), code=0, heavy=True)
for name in ("config.yaml", "environment.json", "rollouts"):
    add(f"resume: without {name}", resumed(instead(name, lambda path: None)), code=0, heavy=True)

# another run


for override, words in {
    "run.seed=7": ["run.seed = 7", "was made with"],
    "rollout.num_generations=4": ["rollout.num_generations = 4", "was made with 3"],
    "rollout.prompts_per_step=3": ["rollout.prompts_per_step = 3", "was made with 2"],
    "rollout.temperature=0.5": ["rollout.temperature", "was made with"],
    "rollout.max_completion_length=7": ["rollout.max_completion_length", "was made with 6"],
    "optim.learning_rate=0.01": ["optim.learning_rate", "was made with 0.001"],
    "optim.updates_per_step=2": ["optim.updates_per_step", "was made with"],
    "algorithm.loss_type=grpo": ["algorithm.loss_type", "was made with"],
    "algorithm.beta=0.1": ["algorithm.beta", "was made with"],
    "model.lora={rank: 2}": ["model.lora", "was made with null"],
    "model.freeze_vision=true": ["model.freeze_vision", "was made with"],
    "data.train.seed=2": ["data.train", "was made with"],
    "data.train.size=9": ["data.train", "was made with"],
    "data.eval={task: shapes, split: heldout, size: 2}": ["data.eval", "was made with"],
    "data.shuffle=false": ["data.shuffle", "was made with"],
    "rewards=[{name: length, max_length: 5}]": ["rewards"],
    "rewards=[{name: length, max_length: 4, weight: 2}]": ["rewards"],
    "rewards=[{name: length, max_length: 4}, {name: json_valid}]": ["rewards"],
    "run.max_steps=2": ["run.max_steps = 2", "3 finished steps"],
    "run.dir=/dev/null/x": ["run.dir"],
    "run.dir=/proc/1/out": ["run.dir"],
}.items():
    add(f"resume: with {override}", resumed(lambda out: None, override), *words, heavy=True)
for override in (
    "run.max_steps=5",  # more than at first
    "run.max_steps=3",  # no step is left
    "optim.max_tokens_per_pack=600",
    "run.report=true",
    "run.save_every=2",
    "run.keep_checkpoints=1",
):
    same = override.startswith(("run.report", "run.save", "run.keep"))
    add(f"resume: with {override}", resumed(lambda out: None, override, same=same), code=0, heavy=True)


def another_model(folder: Path) -> Call:
    """The folder at model.path holds other weights."""
    shutil.copytree(os.path.realpath(folder / "MODEL"), folder / "m")
    (folder / "MODEL").unlink()
    (folder / "MODEL").symlink_to("m")
    with by.quiet():
        stopped(folder)
        config = json.loads((folder / "m" / "config.json").read_text())
        shutil.rmtree(folder / "m")
        from mm_grpo.testing.tiny_models import build

        build("qwen2_vl" if config["model_type"] == "qwen2_5_vl" else "qwen2_5_vl", folder / "m")
    return lambda: resume(folder, straight_run=None)


add("resume: with another model in its folder", another_model, "another model", heavy=True)


# rewards and rows in files

REWARD = "def f(completion):\n    return float(len(completion) % 3)\n"
OTHER = "def f(completion):\n    return float(len(completion) % 2)\n"


def with_reward(change: Callable[[Path], Any], *overrides: str) -> Callable[[Path], Call]:
    """The file of a reward changed between the end of the run and its resumption."""

    def make(folder: Path) -> Call:
        (folder / "r.py").write_text(REWARD)
        write_config(folder, rewards=["r.py:f"])
        with by.quiet():
            by.command("train", folder / "config.yaml", "run.max_steps=2")
        change(folder / "r.py")
        return lambda: by.command("train", folder / "config.yaml", "--resume", *overrides)

    return make


ALLOWED = "run.allow_changed_code=true"
for name, change, overrides, code, words in [
    ("as it was", lambda path: None, (), 0, ()),
    ("with other code", lambda path: path.write_text(OTHER), (), 2, ("rewards", "f changed")),
    ("with another helper", lambda path: path.write_text(REWARD + "X = 1\n"), (), 2, ("rewards", "f changed")),
    ("with other code, as allowed", lambda path: path.write_text(OTHER), (ALLOWED,), 0, ("allow_changed_code",)),
    ("that is gone", Path.unlink, (), 2, ("r.py",)),
    ("that is empty", lambda path: path.write_text(""), (), 2, ("r.py",)),
    ("with a syntax error", lambda path: path.write_text("def f(:"), (), 2, ("r.py",)),
    ("with another name", lambda path: path.write_text(REWARD.replace("f(", "g(")), (), 2, ("r.py",)),
]:  # fmt: skip
    add(f"resume: a reward {name}", with_reward(change, *overrides), *words, code=code, heavy=True)


def with_rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], Call]:
    """The file of the rows changed between the end of the run and its resumption."""

    def make(folder: Path) -> Call:
        rows = [json.dumps({"prompt": f"is it {n}?"}) + "\n" for n in range(8)]
        (folder / "rows.jsonl").write_text("".join(rows))
        values = {**RUN, "data": {"train": "rows.jsonl", "text_only": True}}
        model = os.path.realpath(folder / "MODEL")
        (folder / "config.yaml").write_text(json.dumps({**values, "model": {"path": model}}))
        with by.quiet():
            by.command("train", folder / "config.yaml", "run.max_steps=2")
        (folder / "rows.jsonl").write_text("".join(change(rows)))
        return lambda: by.command("train", folder / "config.yaml", "--resume")

    return make


for name, change, code, words in [
    ("as they were", lambda rows: rows, 0, ()),
    ("with one more", lambda rows: [*rows, rows[0]], 2, ("data.train", "8 then, 9 now")),
    ("with one less", lambda rows: rows[:-1], 2, ("data.train", "8 then, 7 now")),
    ("with another word", lambda rows: [rows[0].replace("is", "was"), *rows[1:]], 2, ("data.train", "other contents")),
    ("in another order", lambda rows: rows[::-1], 2, ("data.train", "other contents")),
    ("that are gone", lambda rows: [], 2, ("rows.jsonl",)),
]:  # fmt: skip
    add(f"resume: rows {name}", with_rows(change), *words, code=code, heavy=True)


# nothing to go on with


def nothing(prepare: Callable[[Path], Any], *arguments: str) -> Callable[[Path], Call]:
    def make(folder: Path) -> Call:
        config = write_config(folder)
        prepare(folder)
        return lambda: by.command("train", config, *(arguments or ("--resume",)))

    return make


def only(*names: str) -> Callable[[Path], Any]:
    """The stopped run without some of its files."""

    def prepare(folder: Path) -> None:
        with by.quiet():
            out = stopped(folder)
        for name in names:
            shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()

    return prepare


def ended(folder: Path) -> None:
    with by.quiet():
        shutil.copytree(straight(folder), folder / "out")


for name, prepare, code, words in [
    ("without a run", lambda folder: None, 0, ("step 4/4",)),
    ("of an empty folder", lambda folder: (folder / "out").mkdir(), 0, ("step 4/4",)),
    ("of a run that has ended", ended, 0, ("done: 4 steps",)),
    ("without checkpoints", only("checkpoints"), 0, ("starts again",)),
    ("without checkpoints and log", only("checkpoints", LOG), 0, ()),
    ("of a folder of the user's", lambda folder: _notes(folder / "out"), 2, ("model/", "somebody else")),
    ("of a file", lambda folder: (folder / "out").touch(), 2, ("run.dir",)),
    ("of a FIFO", lambda folder: fifo(folder / "out"), 2, ("run.dir",)),
    ("of a circle of links", lambda folder: circle(folder / "out"), 2, ("run.dir",)),
]:  # fmt: skip
    add(f"resume: {name}", nothing(prepare), *words, code=code, heavy=True)
for name, argument, words in [
    ("a path behind --resume", "out/checkpoints/step-000003", ["section.key=value"]),
    ("a path with =", "--resume=out/checkpoints/step-000003", ["--resume"]),
]:
    add(f"resume: {name}", nothing(only(), "--resume", argument), *words, heavy=True)
add(
    "resume: without checkpoints, for run.save_every is 0",
    resumed(lambda out: shutil.rmtree(out / "checkpoints"), "run.save_every=0"),
    "run.save_every is 0",
    heavy=True,
)


def _notes(out: Path) -> None:
    (out / "model").mkdir(parents=True)
    (out / "model" / "notes.txt").write_text("mine")
