"""`--smoke`: turn a config that needs a GPU and a download into one that runs on any CPU in seconds.

The model becomes a tiny random one of the same family (testing/tiny_models.py), rows come from `fixture/` next to
the config, and the run makes two small steps with the embedded engine, unless another one in this process was set by
hand or by a layer. Everything else stays: the row mapping, the rewards, the loss, adapters. A smoke run shows that a
config works from end to end; its scores and token counts mean nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from mm_grpo.config import GRPOConfig
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.config.source_entries import map_source
from mm_grpo.config.values import GuardName
from mm_grpo.data.base import Rows
from mm_grpo.data.sources import load_eval, load_train
from mm_grpo.testing.tiny_models import build, family_of

FIXTURE = Path("fixture") / "train.jsonl"
"""A few rows in the form that the recipe trains on, next to its config."""
STEPS, PROMPTS, GENERATIONS, TOKENS = 2, 2, 4, 16
MAX_ROWS = 16  # most rows of a training set
CONTEXT = 32768  # tokens of a prompt: the tiny tokenizer makes one of nearly every byte


def smoke_config(
    config: GRPOConfig, work: Path, run_dir: str, *, folder: Path, fixed: Collection[str] = ()
) -> GRPOConfig:
    """Return the smoke version of a config; its tiny model in `work` is needed as long as the run in `run_dir`.

    `folder` is the config's, with `fixture/` in it if there is one. `fixed` are paths of fields that were set by hand
    or by a layer: `data.train` and `rollout.engine` then stay. Raises ConfigError if `model.path` tells no family.
    """
    values = config.model_dump()
    model, data, rollout = values["model"], values["data"], values["rollout"]
    algorithm, optim, run = values["algorithm"], values["optim"], values["run"]
    family = family_of(config.model.path)
    tiny = build(family, work / "model", context=CONTEXT)
    model.update(path=str(tiny), device="cpu", dtype="float32")
    if algorithm["reference_path"] is not None:
        algorithm["reference_path"] = str(build(family, work / "reference", context=CONTEXT, seed=1))

    fixture = folder / FIXTURE
    if "data.train" not in fixed:
        if fixture.is_file():
            data.update(train=str(fixture), eval=str(fixture), image_dir=None)
        elif fixture.parent.is_dir():  # a mixture's, with a folder for each of its files
            data["train"] = _use_fixture(data["train"], fixture.parent)
            data.update(eval=_use_fixture(data["eval"], fixture.parent), image_dir=None)
    data.update(train=_shorten(data["train"]), eval=_shorten(data["eval"]))
    data["max_prompt_length"] = None  # it counts the tokens of the real tokenizer
    data["chat_template_kwargs"] = {}  # they are read by the real chat template

    tokens = min(TOKENS, rollout["max_completion_length"])
    rollout.update(prompts_per_step=PROMPTS, num_generations=GENERATIONS)
    # servers hold the real model
    if "rollout.engine" not in fixed or ENGINE_FACTS[config.rollout.engine].remote:
        rollout["engine"] = "transformers"
    optim["zero_stage"] = min(2, optim["zero_stage"])  # of one process
    rollout["vllm"]["max_model_len"] = None  # it counts the tokens of the real tokenizer
    rollout["max_completion_length"] = tokens
    rollout["eval"]["max_completion_length"] = None
    optim["updates_per_step"] = min(PROMPTS, optim["updates_per_step"])
    optim["warmup_steps"] = 0
    optim["max_tokens_per_pack"] = max(2 * CONTEXT, optim["max_tokens_per_pack"])
    # A random model is hardly ever right. Groups of equal rewards skip the learner unless there is an entropy bonus.
    algorithm["entropy_coef"] = max(0.01, algorithm["entropy_coef"])
    run.update(dir=run_dir, max_steps=STEPS, eval_every=0, trackers=[])
    run["eval_blind"] = None  # the first few rows may be questions about one image
    run["expected_curve"] = None  # it is of the real model
    run["guards"] = dict.fromkeys(get_args(GuardName), "warn")
    return GRPOConfig.from_dict(values)


def smoke_sets(config: GRPOConfig) -> tuple[Rows, dict[str, Rows]]:
    """Return the first rows of the training set and of each evaluation set."""
    evaluations = {name: dataset.head(PROMPTS) for name, dataset in load_eval(config).items()}
    return load_train(config).head(MAX_ROWS), evaluations


def _use_fixture(source: Any, fixture: Path) -> Any:
    """Replace a source's files by the fixture's: data/charts/eval.jsonl by fixture/charts/train.jsonl."""

    def replace(path: Any) -> Any:
        file = fixture / Path(path).parent.name / FIXTURE.name if isinstance(path, str) else fixture
        return str(file) if file.is_file() else path

    return map_source(source, replace)


def _shorten(source: Any) -> Any:
    """Limit the rows that tasks make, also in a mixture or an evaluation set."""

    def limit(task: Any) -> Any:
        is_sized = isinstance(task, dict) and isinstance(task.get("size"), int)
        return {**task, "size": min(MAX_ROWS, task["size"])} if is_sized else task

    return map_source(source, limit)
