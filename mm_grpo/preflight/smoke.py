"""`--smoke`: a config that runs on any CPU in seconds, made from one that wants a GPU and a download.

The model becomes a tiny random one of the same family (testing/tiny_models.py), the rows those of `fixture/`
beside the config, the run two small steps with the embedded engine, or with the one that was asked for by
hand or by a layer. Everything else stays: the row mapping, the rewards, the loss, adapters. Such a run shows
that a config works from end to end; what it learns, and its token counts, mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, get_args

from mm_grpo.config import GRPOConfig
from mm_grpo.config.values import GuardName, is_source
from mm_grpo.data.base import Rows
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.testing.tiny_models import build, family_of

FIXTURE = Path("fixture") / "train.jsonl"
"""A few rows in the form that the recipe trains on, beside its config."""
STEPS, PROMPTS, GENERATIONS, TOKENS = 2, 2, 4, 16
ROWS = 16
"""Most rows of a set that a smoke run holds."""
CONTEXT = 32768
"""Tokens of a prompt: the tiny tokenizer makes one of nearly every byte."""


def smoke_config(
    config: GRPOConfig, work: Path, run_dir: str, *, beside: Path, kept: Collection[str] = ()
) -> GRPOConfig:
    """The smoke version of a config, whose tiny model is in `work`, needed as long as the run in `run_dir`.

    `fixture/` may lie `beside` the config. `kept` are paths of fields that were set by hand or by a layer: `data.train`
    and `rollout.engine` then stay. Raises ConfigError where the family cannot be read from `model.path`.
    """
    values = config.model_dump()
    model, data, rollout = values["model"], values["data"], values["rollout"]
    algorithm, optim, run = values["algorithm"], values["optim"], values["run"]
    family = family_of(config.model.path)
    tiny = build(family, work / "model", context=CONTEXT)
    model.update(path=str(tiny), device="cpu", dtype="float32")
    if algorithm["reference_path"] is not None:
        algorithm["reference_path"] = str(build(family, work / "reference", context=CONTEXT, seed=1))

    if "data.train" not in kept:
        if (beside / FIXTURE).is_file():
            data.update(train=str(beside / FIXTURE), eval=str(beside / FIXTURE), image_dir=None)
        elif (beside / FIXTURE).parent.is_dir():  # a mixture's, with a folder for each of its files
            data["train"] = _stand_in(data["train"], (beside / FIXTURE).parent)
            data.update(eval=_stand_in(data["eval"], (beside / FIXTURE).parent), image_dir=None)
    data.update(train=_short(data["train"]), eval=_short(data["eval"]))
    data["max_prompt_length"] = None  # it counts the tokens of the real tokenizer
    data["chat_template_kwargs"] = {}  # they are read by the real chat template

    tokens = min(TOKENS, rollout["max_completion_length"])
    rollout.update(prompts_per_step=PROMPTS, num_generations=GENERATIONS)
    if "rollout.engine" not in kept:
        rollout["engine"] = "transformers"
    rollout["vllm"]["max_model_len"] = None  # it counts the tokens of the real tokenizer
    rollout["max_completion_length"] = tokens
    rollout["eval"]["max_completion_length"] = None
    optim["updates_per_step"] = min(PROMPTS, optim["updates_per_step"])
    optim["warmup_steps"] = 0
    optim["max_tokens_per_pack"] = max(2 * CONTEXT, optim["max_tokens_per_pack"])
    # Noise is hardly ever right, and groups of equal rewards leave before the learner, unless there is an
    # entropy bonus to compute.
    algorithm["entropy_coef"] = max(0.01, algorithm["entropy_coef"])
    run.update(dir=run_dir, max_steps=STEPS, eval_every=0, trackers=[])
    run["eval_blind"] = None  # the first few rows may be questions about one image
    run["expected_curve"] = None  # it is of the real model
    run["guards"] = dict.fromkeys(get_args(GuardName), "warn")
    return GRPOConfig.from_dict(values)


def smoke_sets(config: GRPOConfig) -> tuple[Rows, dict[str, Rows]]:
    """The first rows of the training set and of each evaluation set."""
    evaluations = {name: dataset.head(PROMPTS) for name, dataset in load_eval(config).items()}
    return load_train(config).head(ROWS), evaluations


def _stand_in(source: Any, fixture: Path) -> Any:
    """A source with the fixture's files in place of its own: for data/charts/eval.jsonl fixture/charts/train.jsonl."""

    def found(path: Any) -> Any:
        file = fixture / Path(path).parent.name / FIXTURE.name if isinstance(path, str) else fixture
        return str(file) if file.is_file() else path

    return _each(source, found)


def _short(source: Any) -> Any:
    """A task that makes few rows, also in a mixture or an evaluation set; anything else as it is."""

    def few(task: Any) -> Any:
        is_sized = isinstance(task, dict) and isinstance(task.get("size"), int)
        return {**task, "size": min(ROWS, task["size"])} if is_sized else task

    return _each(source, few)


def _each(source: Any, change: Callable[[Any], Any]) -> Any:
    """A source, a mixture or sets by name, with every path and task in it changed."""
    if isinstance(source, list):
        return [_each(each, change) for each in source]
    if isinstance(source, dict) and "path" in source:
        return {**source, "path": _each(source["path"], change)}
    if isinstance(source, dict) and not is_source(source):
        return {name: _each(each, change) for name, each in source.items()}
    return change(source)
