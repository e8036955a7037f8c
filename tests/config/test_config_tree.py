"""The tree as a whole: defaults and help, changed copies, checks between sections, and the import."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from mm_grpo.config import EvalSampling, GRPOConfig, OptimConfig
from mm_grpo.config.section import leaves
from mm_grpo.errors import ConfigError

MODEL = {"path": "a/model"}


def config(**sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": MODEL, **sections})


def test_help_names_path_type_default_and_description() -> None:
    by_path = {entry.path: entry for entry in GRPOConfig.field_help()}
    text = "G: completions per prompt, >= 2. Default: 8."
    path = "rollout.num_generations"
    assert by_path[path] == (path, "an integer >= 2", "8", text, True)
    assert by_path["model.path"][1:3] == ("a path", "required")
    assert by_path["optim.adam_beta1"].type == "a number >= 0 and < 1"
    assert by_path["run.max_steps"][1:3] == ("an integer >= 1 or null", "null")
    assert by_path["algorithm.loss_type"].type.startswith("one of grpo, bnpo, dr_grpo, dapo, ")
    assert by_path["rollout.eval.top_p"].default == "1.0"
    assert by_path["model.lora"].default == "null"
    assert by_path["model.lora.rank"][1:3] == ("an integer >= 1 and <= 16384", "16")
    assert len(by_path) == len(list(leaves(GRPOConfig))) > 50


def test_every_description_gives_range_and_default() -> None:
    for entry, (path, field) in zip(GRPOConfig.field_help(), leaves(GRPOConfig), strict=True):
        text = entry.description
        end = "Required." if field.is_required() else f"Default: {entry.default}."
        assert text.endswith(f". {end}"), (path, text)
        for bound in field.metadata:
            for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
                if hasattr(bound, name):
                    assert f"{sign} {getattr(bound, name)}" in text, (path, text)
        for choice in choices(field.annotation):
            assert str(choice) in text, (path, choice)


def choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for inner in get_args(annotation) if get_args(inner) for choice in choices(inner)]


def test_a_section_of_comments_changes_nothing_and_one_set_to_nothing_is_refused(tmp_path: Path) -> None:
    base, layer = tmp_path / "base.yaml", tmp_path / "layer.yaml"
    base.write_text("model: {path: m}\nrollout: {num_generations: 2, eval: {top_k: 3}}\noptim:\n  # none\n")
    layer.write_text("rollout:\n  # eval\nrun:\n")
    want = config(model={"path": "m"}, rollout={"num_generations": 2, "eval": {"top_k": 3}})
    assert GRPOConfig.from_yaml(base, layers=[layer]) == want
    for override in ("rollout=", "rollout=null", "rollout.eval=null", "rollout.num_generations="):
        with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
            GRPOConfig.from_yaml(base, [override])


def test_all_errors_are_raised_at_once_one_line_each() -> None:
    rollout, run = {"num_generations": 1, "temperature": -1}, {"seed": "abc", "zeed": 1}
    with pytest.raises(ConfigError) as caught:
        config(rollout=rollout, optim={"learning_rate": -1}, run=run, learning_rate=1e-5)
    assert [re.split(r":? ", line)[0] for line in str(caught.value).splitlines()] == [
        "rollout.num_generations", "rollout.temperature", "optim.learning_rate", "run.seed", "run.zeed",
        "learning_rate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: EvalSampling(top_p=2), r"rollout\.eval\.top_p = 2"),
        (lambda: GRPOConfig(model={"path": "m"}, run={"seed": "x"}), r"run\.seed = 'x'"),
        (lambda: GRPOConfig.from_dict([1]), r"the config = \[1\]"),
    ],
)
def test_the_python_constructors_raise_the_same(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        make()


def test_a_changed_copy_is_checked_and_the_first_one_stays() -> None:
    original = config(data={"min_pixels": 5})
    changed = original.with_values({"optim.learning_rate": 1e-5, "model.lora.rank": 4, "rewards": ["iou"]})
    assert (changed.optim.learning_rate, changed.rewards) == (1e-5, ["iou"])
    assert changed.model.lora is not None and changed.model.lora.rank == 4
    assert original == config(data={"min_pixels": 5})
    assert original.optim.with_values({"learning_rate": 2.0}) == OptimConfig(learning_rate=2.0)
    for path, value, named in (
        ("optim.learning_rate", -1, "optim.learning_rate = -1"),
        ("optim.learning_rte", 1, "optim.learning_rte: .*optim.learning_rate"),
        ("data.max_pixels", 3, "data.min_pixels = 5: .*data.max_pixels"),
        ("rewards", 3, "rewards = 3"),
        ("run.seed.x", 3, "run.seed.x: "),
        ("optim.updates_per_step", 33, "optim.updates_per_step = 33: .*rollout.prompts_per_step"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}"):
            original.with_values({path: value})


def test_the_arithmetic_of_a_step() -> None:
    large = config(rollout={"prompts_per_step": 512}, optim={"updates_per_step": 4})
    assert large.batch_sentence(processes=8) == (
        "512 prompts x 8 generations = 4,096 completions a step on 8 processes -> 4 updates (128 prompts each)"
    )
    rollout = {"prompts_per_step": 10, "num_generations": 4}
    uneven = config(rollout=rollout, optim={"updates_per_step": 4}, algorithm={"num_iterations": 2})
    assert "a step -> 8 updates (2 or 3 prompts each, 2 iterations)" in uneven.batch_sentence()
