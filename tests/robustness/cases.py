"""The table of hostile cases: what people and broken machines bring to `mm-grpo`, and what each ends in.

To add one: a line of a section, or a `Case`. Words are the key words that a message must hold: field or row, and file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from robustness import parts
from robustness.case import Case, cut, fifo
from robustness.hubs import refusing, silent
from robustness.parts import (
    ISOLATED,
    MASK,
    SEGFAULT,
    WEIGHTS,
    body,
    checkpoint,
    picture,
    replaced,
    row,
    variables,
)
from robustness.runs import REWARD, complete, whole

TRAIN, CHECK, RESUME = "train config.yaml", "check config.yaml", "train config.yaml --resume"
HALF = os.fsdecode(b"a\xed\xa0\x80")

_NINE = [", ".join([f"*a{i}"] * 9) for i in range(12)]
BOMB = f"rewards: [&a0 [x, x], {', '.join(f'&a{i} [{nine}]' for i, nine in enumerate(_NINE, 1))}]"
MERGED = f"model: [&a0 {{x: 1}}, {', '.join(f'&a{i} {{<<: [{nine}]}}' for i, nine in enumerate(_NINE, 1))}]"
"""Some 600 characters that stand for a billion."""

CONFIG: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("a key twice", "model: {path: m, path: n}", ("config.yaml", "path", "line 1")),
    ("nothing", "", ("model.path",)),
    ("an unknown field", "model: {path: m, lroa: {}}", ("model.lroa", "model.lora")),
    ("aliases of aliases", BOMB, ("config.yaml", "100,000", "aliases")),
    ("merged aliases of aliases", MERGED, ("config.yaml", "100,000", "aliases")),
    ("an alias of itself", "model: &a {path: m, lora: *a}", ("config.yaml", "aliases")),
    ("nested 10,000 deep", f"model: {'[' * 10_000}{']' * 10_000}", ("config.yaml", "not valid YAML")),
    ("nested 200 deep", f"model: {'[' * 200}{']' * 200}", ("config.yaml", "50 levels")),
    ("NaN as learning rate", "model: {path: m}\noptim: {learning_rate: .nan}", ("optim.learning_rate",)),
    ("one generation", "model: {path: m}\nrollout: {num_generations: 1}", ("num_generations",)),
    ("a field of TRL", "model: {path: m}\nrollout: {per_device_train_batch_size: 4}", ("rollout.prompts_per_step",)),
    ("half a character", 'model: {path: m}\ndata: {system_prompt: "a\\ud800"}', ("data.system_prompt", "ud800")),
    ("a number too long to write", f"model: {{path: m}}\nrun: {{max_steps: [0x{'f' * 5000}]}}", ("run.max_steps",)),
    ("no rows", "model: {path: m}\nrewards: [exact_match]", ("data.train",)),
]  # fmt: skip

SCRIPTS = {"s.py": "print(1)", "model.json": '{"dtype": "bfloat16"}'}
COMMANDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("a config that is not there", "check none.yaml", ("none.yaml",)),
    ("a recipe misspelt", "check shapse", ("shapse", "shapes")),
    ("an override without =", f"{CHECK} run.seed", ("'run.seed'", "section.field=value")),
    ("a section set to nothing", f"{CHECK} rollout=", ("'rollout='", "null")),
    ("spaces around =", f"{CHECK} run.seed = 1", ("'run.seed'", "spaces")),
    ("a dry run", f"{TRAIN} --dry-run", ("--dry-run", "mm-grpo check", "--smoke")),
    ("a script in Python", "convert s.py", ("s.py", ".yaml")),
    ("a file of no trainer", "convert model.json", ("model.json", "no config of TRL")),
    ("epochs", f"{CHECK} run.epochs=3", ("run.epochs", "run.max_steps")),
    ("a field as option", f"{TRAIN} --learning_rate 1", ("optim.learning_rate",)),
    ("an unknown layer", f"{CHECK} none.yaml", ("none.yaml",)),
    ("smoke and resume", f"{TRAIN} --smoke --resume", ("--smoke", "--resume")),
    ("half a character", f"{CHECK} 'model.lora.target_modules=[\"a\\udfff\"]'", ("target_modules", "udfff")),
    ("400 digits", f"{CHECK} run.max_steps={'9' * 400}", ("run.max_steps = 999",)),
    ("4400 digits", f"{CHECK} run.seed={'9' * 4400}", ("run.seed=999",)),
    ("a GPU without end", "estimate config.yaml --gpu inf", ("--gpu",)),
    (
        "servers of no run",
        "estimate config.yaml --share-gpus",
        ("--share-gpus", "rollout.engine=vllm_server"),
    ),
    ("a seed of 400 digits", f"ask MODEL what --seed {'9' * 400}", ("--seed",)),
    ("half a character asked", f"ask MODEL {HALF}", ("question", "udced")),
    ("no process", f"{TRAIN} --processes 0", ("--processes",)),
]

ROWS: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("nothing", "", ("rows.jsonl", "empty")),
    ("half a row", '{"prompt": "a"', ("rows.jsonl:1", "JSON")),
    ("no prompt", '{"image": "a.png"}', ("'prompt'",)),
    ("an empty prompt", row(prompt=" \n"), ("'prompt'", "empty")),
    ("a video", row(prompt=[{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]), ("rows.jsonl:1",
     "video")),
    ("half a character", '{"prompt": "a\\ud800", "image": "a.png", "answer": "a"}', ("rows.jsonl:1", "ud800")),
    ("text alone", '{"prompt": "?", "answer": "a"}', ("data.text_only",)),
    ("an unread picture", '{"prompt": "?", "picture": "a.png", "answer": "a"}', ("'picture'", "data.columns.images")),
    ("no gold answer", '{"prompt": "?", "image": "a.png"}', ("answer",)),
]  # fmt: skip

SOURCES: list[tuple[str, Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]] = [
    ("a path that is not there", {"train": "none.jsonl"}, {}, ("train: none.jsonl",)),
    ("an unknown task", {"train": {"task": "shapse"}}, {}, ("train: ", "'shapse'", "'shapes'")),
    ("a task with a wrong option", {"train": {"task": "shapes", "sise": 3}}, {}, ("train: ", "'sise'", "'size'")),
    ("a column that is not there", {"columns": {"images": "pics"}}, {}, ("data.columns.images", "'pics'")),
    ("a folder of images that is not there", {"image_dir": "none"}, {}, ("data.image_dir",)),
    ("a FIFO", {}, {"rows.jsonl": fifo}, ("rows.jsonl",)),
]  # fmt: skip

MEDIA: list[tuple[str, Any, tuple[str, ...]]] = [
    ("half a JPEG", picture("RGB")[:400], ("truncated",)),
    ("an HTML page", b"<!DOCTYPE html><html><body>404</body></html>", ("HTML",)),
    ("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\n", ("git lfs pull",)),
]
IMAGES: list[tuple[str, Any, tuple[str, ...]]] = [
    ("a URL", "https://example.org/a.png", ("nothing is fetched",)),
    ("a file that is not there", "no.png", ("no.png",)),
]

REWARD_FILES: list[tuple[str, str | bytes, tuple[str, ...]]] = [
    ("a syntax error", "def f(completion:\n", ("r.py:1",)),
    ("nothing in the file", "", ("r.py", "'f'")),
    ("a column that is not there", "def f(completion, gold): return 1.0", ("'f'", "'gold'")),
]
REWARDS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("an unknown name", ["exact_mtach"], ("rewards", "exact_match")),
    ("a file that is not there", ["no.py:f"], ("no.py",)),
    ("an argument that is not there", [{"name": "exact_match", "thresold": 1}], ("exact_match", "thresold")),
    ("none", [], ("rewards",)),
    ("the same twice", ["exact_match", "exact_match"], ("exact_match",)),
]

LATE = "timeout"
TRAINED: list[tuple[str, str, Mapping[str, Any], int, tuple[str, ...]]] = [
    ("an answer of NaN", body("return float('nan')"), {}, 2, ("'f'", "nan")),
    ("an exception, isolated", body("raise RuntimeError('boom')"), ISOLATED, 2, ("r.py", "boom")),
    ("an exception for some rows, masked",
     body("if len(completion) % 3 == 1: raise ValueError('boom')\nreturn SCORE"), MASK, 0, ("masked", "boom")),
    ("a sleep, isolated", body("time.sleep(60)"), {**ISOLATED, "timeout": 0.5}, 2, ("'f'", LATE)),
    ("a segmentation fault, isolated", body(SEGFAULT), ISOLATED, 2, ("'f'", "SIGSEGV")),
]  # fmt: skip

MODELS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("an empty folder", parts.remove_all, ("model.path", "config.json")),
    ("a model of text", lambda m: (m / "config.json").write_text('{"model_type": "llama"}'), ("llama",)),
    ("weights cut in half", lambda m: cut(m / WEIGHTS), ("model.path",)),
    ("weights that are a Git LFS pointer",
     lambda m: (m / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), ("model.path",)),
    ("no chat template", lambda m: (m / "chat_template.jinja").unlink(), ("chat",)),
]  # fmt: skip
HUBS: list[tuple[str, str, Any, tuple[str, ...]]] = [
    ("HF_HUB_OFFLINE", "org/name", parts.at_hub(silent, offline=True), ("model.path", "HF_HUB_OFFLINE")),
    ("a mistyped folder with a dot", "./MODLE", parts.at_hub(refusing), ("model.path", "MODEL")),
    ("a mistyped folder", "MODLE", parts.at_hub(refusing), ("model.path", "MODEL")),
]  # fmt: skip

STATE, MANIFEST, LOG = "state-00000-of-00001.safetensors", "manifest.json", "metrics.jsonl"
PASSED_OVER = ("step-000003", "resuming from step-000002")
PUT_BACK = (LOG, "put back from the checkpoint of step 3")
DAMAGED: list[tuple[str, Any, tuple[str, ...]]] = [
    (f"{STATE} cut in half", checkpoint(STATE, cut), PASSED_OVER),
    (f"{STATE} with a flipped bit", checkpoint(STATE, parts.flip), PASSED_OVER),
    (f"{MANIFEST} empty", checkpoint(MANIFEST, lambda path: path.write_bytes(b"")), PASSED_OVER),
    (f"{MANIFEST} with another number", checkpoint(MANIFEST, replaced('"updates": 3', '"updates": 1')), PASSED_OVER),
    ("a renamed one", parts.rename_newest, ("step-000009", "renamed")),
    ("the log with a hole", parts.changed_log(lambda rows: rows[:1] + rows[2:]), PUT_BACK),
    ("the log gone", lambda out: (out / LOG).unlink(), PUT_BACK),
    ("no config.yaml in the run folder", lambda out: (out / "config.yaml").unlink(), ()),
]  # fmt: skip
LOST: list[tuple[str, Any, tuple[str, ...]]] = [
    ("all states cut in half", checkpoint(STATE, cut, every=True), ("no checkpoint", "out/checkpoints")),
]
OTHER_RUNS: list[tuple[str, tuple[str, ...]]] = [
    ("run.seed=7", ("run.seed", "7")),
    ("'rewards=[{name: length, max_length: 5}]'", ("rewards",)),
]
SAME_RUNS = ("run.max_steps=5",)

RUN_FOLDERS: list[tuple[str, str, Mapping[str, Any], tuple[str, ...]]] = [
    ("a file", "f", {"f": "mine"}, ("run.dir",)),
    ("somebody else's", "mine", {"mine/model/notes.txt": "mine"}, ("run.dir",)),
    ("the folder of the config", ".", {}, ("run.dir", "config.yaml")),
]

EVAL = "'data.eval={task: shapes, split: heldout, size: 2}'"
TOOLS: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("a run that is not there", "export none model", "", ("none",)),
    ("a run without checkpoints", "export out model", "bare", ("out",)),
    ("a checkpoint that is not there", "export out model --checkpoint step-9", "ended", ("step-9",)),
    ("into a folder of the user's", "export out d", "ended", ("d",)),
    ("an adapter of a run without", "export out model --adapter", "ended", ("model.lora",)),
    ("no evaluation set", "eval config.yaml --model out", "ended", ("data.eval",)),
    ("a model that is not there", f"eval config.yaml --model none {EVAL}", "", ("none",)),
    ("greedy samples", "eval config.yaml --samples 2 --temperature 0", "", ("--temperature",)),
    ("a column that the rows lack", f"eval config.yaml --by answr {EVAL}", "", ("--by", "'answer'")),
    (
        "an unknown checkpoint",
        f"eval config.yaml --checkpoint first --model out {EVAL}",
        "ended",
        ("--checkpoint", "first"),
    ),
    ("a misspelt name", "rewards exact_mach", "", ("exact_mach", "exact_match")),
    ("no column", "rewards try exact_match --completion x", "", ("answer", "--column")),
    ("open to the network without a key", "serve config.yaml --host 0.0.0.0", "", ("0.0.0.0", "key")),
    ("servers of no model", "serve config.yaml model.path=none", "", ("model.path", "none")),
]


RANKS = [
    ("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("RANK", "x"), ("RANK", "2"), ("LOCAL_RANK", "-1"),
    ("MASTER_PORT", "y"), ("MASTER_PORT", "99999"),
]  # fmt: skip


def lay_tools(kind: str) -> Any:
    return (lambda out: shutil.rmtree(out / "checkpoints")) if kind == "bare" else lambda out: None


CASES: list[Case] = [
    *(Case(f"config: {name}", CHECK, words, config=text) for name, text, words in CONFIG),
    *(Case(f"command: {name}", command, words, files=SCRIPTS) for name, command, words in COMMANDS),
    *(Case(f"rows: {name}", CHECK, words, files={"rows.jsonl": text}) for name, text, words in ROWS),
    *(Case(f"rows: {name}", CHECK, words, config={"data": data}, files=files) for name, data, files, words in SOURCES),
    *(
        Case(f"media: {name}", CHECK, ("i.png", *words), files={"rows.jsonl": row(image="i.png"), "i.png": source})
        for name, source, words in MEDIA
    ),
    *(Case(f"media: {name}", CHECK, words, files={"rows.jsonl": row(image=image)}) for name, image, words in IMAGES),
    Case("media: CMYK", CHECK, code=0, files={"a.png": picture("CMYK")}),
    *(
        Case(f"rewards: {name}", CHECK, words, config={"rewards": ["r.py:f"]}, files={"r.py": text})
        for name, text, words in REWARD_FILES
    ),
    *(Case(f"rewards: {name}", CHECK, words, config={"rewards": rewards}) for name, rewards, words in REWARDS),
    *(
        Case(
            f"rewards: {name}", TRAIN, words, code, parts.reward_file(**options), {"r.py": text},
            after=parts.one_row_a_step if code == 0 else lambda folder: None,
        )
        for name, text, options, code, words in TRAINED
    ),
    *(
        Case(f"model: {name}", TRAIN, words, config={"model": {"path": "m"}}, model=damage)
        for name, damage, words in MODELS
    ),
    *(
        Case(f"model: {name}", TRAIN, words, config={"model": {"path": path}}, within=hub)
        for name, path, hub, words in HUBS
    ),
    *(
        Case(f"checkpoints: {name}", RESUME, words, 0, run="stopped", damage=damage, after=complete)
        for name, damage, words in DAMAGED
    ),
    *(Case(f"checkpoints: {name}", RESUME, words, run="stopped", damage=damage) for name, damage, words in LOST),
    *(Case(f"resume: {change}", f"{RESUME} {change}", words, run="stopped") for change, words in OTHER_RUNS),
    *(Case(f"resume: {change}", f"{RESUME} {change}", code=0, run="stopped", after=whole) for change in SAME_RUNS),
    Case("resume: without a run", RESUME, ("no checkpoint", "step 1", "step 4/4"), 0),
    Case("resume: of a run that has ended", RESUME, ("done: 4 steps",), 0, run="ended", after=complete),
    Case("run folder: that of a finished run", TRAIN, ("run.dir", "4 rows"), run="ended"),
    Case("resume: of a folder of the user's", RESUME, ("run.dir",), files={"out/model/notes.txt": "mine"}),
    Case("resume: another base of adapters", RESUME, ("step-000003", "not trained"), run="stopped",
        damage=parts.other_model, config={"model": {"lora": {"rank": 2}}}, model=lambda m: parts.flip(m / WEIGHTS)),
    *(
        Case(
            f"resume: a reward {name}", f"{RESUME} run.allow_changed_code=true" if "allowed" in name else RESUME,
            words, code, {"rewards": ["r.py:f"]}, {"r.py": text}, run="stopped",
        )
        for name, text, code, words in [
            ("with other code, as allowed", REWARD.replace("3", "2"), 0, ("allow_changed_code",)),
            ("with other code", REWARD.replace("3", "2"), 2, ("rewards", "f changed")),
        ]
    ),
    Case("engines: stale version", TRAIN, ("weight update",), 3, within=parts.faulty_engine("stale version")),
    Case("engines: one that ends", TRAIN, ("engine", "has ended"), 1, within=parts.engine_fails),
    *(
        Case(f"run folder: {name}", TRAIN, words, config={"run": {"dir": value}}, files=files)
        for name, value, files, words in RUN_FOLDERS
    ),
    *(
        Case(
            f"{command.split()[0]}: {name}", command, words, run=run and "ended", damage=lay_tools(run),
            files={"d/notes.txt": "mine"},
        )
        for name, command, run, words in TOOLS
    ),
    *(
        Case(f"machine: {name}={value}", TRAIN, (f"{name}={value}", "torchrun"), within=variables(**{name: value}))
        for name, value in RANKS
    ),
    Case("machine: a full disk behind stdout", CHECK, ("No space left",), 1, full_disk=True),
    Case("machine: a fault of ours", TRAIN, ("ZeroDivisionError", "error.txt"), 1, within=parts.broken_learner,
        after=lambda folder: (folder / "out" / "error.txt").read_text().index("Traceback")),
    Case("machine: the error of a run that goes on", RESUME, code=0, run="stopped",
        damage=lambda out: (out / "error.txt").write_text("Traceback"), after=parts.no_error),
]  # fmt: skip
