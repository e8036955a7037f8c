"""The tree: its defaults and help, what each field refuses, assignments, and the checks between fields."""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from mm_grpo.config import (
    DataConfig,
    EvalSampling,
    GRPOConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    check_seed_plan,
)
from mm_grpo.config_section import leaves
from mm_grpo.errors import ConfigError, UserError

MODEL = {"path": "a/model"}


def config(**sections: Any) -> GRPOConfig:
    return GRPOConfig.from_dict({"model": MODEL, **sections})


def message(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b", with a model beside it."""
    tree: dict[str, Any] = functools.reduce(lambda inner, key: {key: inner}, reversed(path.split(".")), value)
    return {"model": MODEL, **tree}


# Defaults and help


def test_the_defaults_that_trl_users_know() -> None:
    made = config()
    assert (made.rollout.num_generations, made.rollout.prompts_per_step) == (8, 8)
    assert (made.rollout.max_completion_length, made.rollout.temperature) == (512, 1.0)
    assert (made.algorithm.loss_type, made.algorithm.beta, made.algorithm.epsilon) == ("dapo", 0.0, 0.2)
    assert (made.algorithm.epsilon_high, made.algorithm.scale_rewards) == (None, "group")
    assert (made.optim.learning_rate, made.optim.max_grad_norm) == (1e-6, 1.0)
    assert (made.run.dir, made.run.seed, made.run.max_steps) == ("runs/mm_grpo", 42, None)
    assert (made.data.max_image_bytes, made.data.max_image_pixels) == (52428800, 89478485)
    assert (made.rollout.eval.temperature, made.rollout.eval.num_generations) == (0.0, 1)
    assert (made.rewards, made.run.guards, made.run.trackers) == ([], {}, [])


def test_two_configs_share_nothing() -> None:
    one, two = config(), config()
    one.optim.learning_rate = 1.0
    one.run.guards["update_happens"] = "off"
    assert (two.optim.learning_rate, two.run.guards) == (1e-6, {})


def test_every_default_is_legal() -> None:
    config().check()


def test_help_names_path_type_default_and_description() -> None:
    by_path = {entry.path: entry for entry in GRPOConfig.field_help()}
    assert by_path["rollout.num_generations"] == (
        "rollout.num_generations",
        "an integer >= 2",
        "8",
        "G: completions per prompt, >= 2. Default: 8.",
    )
    assert by_path["model.path"][1:3] == ("a path", "required")
    assert by_path["optim.adam_beta1"].type == "a number >= 0 and < 1"
    assert by_path["run.max_steps"][1:3] == ("an integer >= 1 or null", "null")
    assert (
        by_path["algorithm.loss_type"].type == "one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"
    )
    assert by_path["data.shuffle"][1:3] == ("true or false", "true")
    assert by_path["run.trackers"][1:3] == ("a list of tensorboard, wandb, trackio", "[]")
    assert by_path["data.columns"].type == "a mapping of names to text"
    assert by_path["rollout.eval.top_p"].default == "1.0"
    assert by_path["model.lora"].default == "null"
    assert by_path["model.lora.rank"][1:3] == ("an integer >= 1", "16")
    assert len(by_path) == len(list(leaves(GRPOConfig))) > 50


def test_every_description_gives_range_and_default() -> None:
    for path, field in leaves(GRPOConfig):
        text = field.description or ""
        entry = next(entry for entry in GRPOConfig.field_help() if entry.path == path)
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


# One field


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("run.seed", "abc", "run.seed = 'abc': must be an integer >= 0"),
        ("model.lora", 16, "model.lora = 16: must be null or a mapping of rank, alpha and target_modules"),
        ("model.lora.rank", 0, "model.lora.rank = 0: must be an integer >= 1"),
        ("model.lora.alpha", "x", "model.lora.alpha = 'x': must be a number > 0"),
        (
            "model.lora.target_modules",
            "q_proj",
            "model.lora.target_modules = 'q_proj': must be a list of text",
        ),
        *(
            (
                "model.lora.target_modules",
                value,
                f"model.lora.target_modules = {value}: must be the last parts of layers' names, such as"
                " [q_proj, v_proj]; at least one",
            )
            for value in ([], ["("], ["all-linear"])
        ),
        ("run.seed", -1, "run.seed = -1: must be an integer >= 0"),
        ("run.seed", True, "run.seed = True: must be an integer >= 0"),
        ("run.seed", 1.0, "run.seed = 1.0: must be an integer >= 0"),
        ("run.max_steps", 0, "run.max_steps = 0: must be an integer >= 1 or null"),
        ("run.dir", "", "run.dir = '': must be a path"),
        ("run.report", "yes", "run.report = 'yes': must be true or false"),
        ("run.report", 1, "run.report = 1: must be true or false"),
        ("model.path", 3, "model.path = 3: must be a path"),
        ("model.device", "gpu", "model.device = 'gpu': must be auto, cpu, cuda or cuda:N"),
        (
            "model.dtype",
            "bf16",
            "model.dtype = 'bf16': must be one of auto, float32, bfloat16 (the nearest is bfloat16)",
        ),
        ("model.attn", "flash", "model.attn = 'flash': must be one of auto, sdpa, eager, flex_attention"),
        ("rollout.num_generations", "8", "rollout.num_generations = '8': must be an integer >= 2"),
        ("rollout.temperature", 0, "rollout.temperature = 0: must be a number > 0"),
        ("rollout.max_attempts", 0, "rollout.max_attempts = 0: must be an integer >= 1"),
        ("rollout.eval.top_p", 1.5, "rollout.eval.top_p = 1.5: must be a number > 0 and <= 1"),
        ("rollout.eval.min_p", -0.1, "rollout.eval.min_p = -0.1: must be a number >= 0 and <= 1 or null"),
        ("algorithm.epsilon_high", -1, "algorithm.epsilon_high = -1: must be a number >= 0 or null"),
        ("algorithm.beta", None, "algorithm.beta = null: must be a number >= 0"),
        (
            "algorithm.loss_type",
            "drgrpo",
            "algorithm.loss_type = 'drgrpo': must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo"
            " (the nearest is dr_grpo)",
        ),
        ("optim.adam_beta2", 1, "optim.adam_beta2 = 1: must be a number >= 0 and < 1"),
        ("optim.learning_rate", float("inf"), "optim.learning_rate = inf: must be a number >= 0"),
        ("optim.learning_rate", "fast", "optim.learning_rate = 'fast': must be a number >= 0"),
        ("optim.learning_rate", True, "optim.learning_rate = True: must be a number >= 0"),
        ("data.columns", {"image": 3}, "data.columns.image = 3: must be text"),
        ("data.columns", "image", "data.columns = 'image': must be a mapping of names to text"),
        (
            "run.trackers",
            ["wandbb"],
            "run.trackers[0] = 'wandbb': must be one of tensorboard, wandb, trackio (the nearest is wandb)",
        ),
        ("run.trackers", "wandb", "run.trackers = 'wandb': must be a list of tensorboard, wandb, trackio"),
        (
            "run.guards",
            {"update_happens": "quiet"},
            "run.guards.update_happens = 'quiet': must be one of stop, warn, off",
        ),
        (
            "run.guards",
            {"duplicate_completion": "off"},
            "run.guards.duplicate_completion: unknown name; the nearest is duplicate_completions;"
            " must be one of duplicate_completions, logp_gap, update_happens",
        ),
        ("rewards", "iou", "rewards = 'iou': must be a list of names or mappings with a name, such as [iou]"),
        (
            "rewards",
            [{"nam": "iou"}],
            "rewards[0] = {'nam': 'iou'}: a mapping needs the key name, such as {name: iou, weight: 1.0}",
        ),
        (
            "rewards",
            ["iou", 3],
            "rewards[1] = 3: must be the name of a reward, or a mapping such as {name: iou, weight: 1.0}",
        ),
        (
            "rewards",
            [{"name": "iou", "weight": "big"}],
            "rewards[0] = {'name': 'iou', 'weight': 'big'}: weight is 'big'; it must be a finite number",
        ),
        (
            "rewards",
            [{"name": "iou", "part": {1}}],
            "rewards[0] = {'name': 'iou', 'part': {1}}: holds {1}, which a config file cannot hold",
        ),
        (
            "rewards",
            [len],
            "rewards[0] = <built-in function len>: a Python function goes to GRPOTrainer(config,"
            " rewards=[...]),"
            " not into the config",
        ),
        (
            "data.train",
            {"split": "train"},
            "data.train = {'split': 'train'}: a mapping needs the key task, such as {task: shapes,"
            " split: train, size: 2000}",
        ),
        (
            "data.train",
            3,
            "data.train = 3: must be a path, or a mapping with the key task, such as {task: shapes,"
            " split: train, size: 2000}",
        ),
        (
            "data.train",
            {"task": None},
            "data.train = {'task': None}: task is null; it must be the name of a task, such as shapes",
        ),
        (
            "data.train",
            {"task": "shapes", "kinds": {"a": 1}},
            "data.train = {'task': 'shapes', 'kinds': {'a': 1}}: kinds is {'a': 1}; a task is set"
            " by single values"
            " and lists of them",
        ),
        ("data.eval", {}, "data.eval = {}: names no set; write null for no evaluation"),
        (
            "data.eval",
            {"test": "a.jsonl", "size": 20},
            "data.eval = {'test': 'a.jsonl', 'size': 20}: the set size is 20: must be a path, or a"
            " mapping with the"
            " key task, such as {task: shapes, split: train, size: 2000}",
        ),
        (
            "data.eval",
            {"a/b": "x"},
            "data.eval = {'a/b': 'x'}: the name of a set is letters, digits, '_', '-' and '.'; 'a/b' is not",
        ),
        (
            "rollout.engine",
            "vllm_server",
            "rollout.engine = 'vllm_server': served vLLM is not in this version of mm_grpo yet;"
            " must be one of transformers, vllm",
        ),
        ("rollout.engine", "hf", "rollout.engine = 'hf': must be one of transformers, vllm"),
        (
            "rollout.max_staleness",
            2,
            "rollout.max_staleness = 2: must be 0; generation does not run ahead of the weights in"
            " this version of"
            " mm_grpo",
        ),
    ],
)
def test_a_bad_value_is_told_in_one_line(path: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict(nested(path, value))
    assert told in str(caught.value).splitlines()


@pytest.mark.parametrize("generations", [1, 0, -3])
def test_fewer_than_two_generations(generations: int) -> None:
    assert message(rollout={"num_generations": generations}) == (
        "num_generations counts completions per prompt; GRPO compares them, so it needs at least 2"
        " (8 is common)"
    )


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [("top_p", 0.9, "1.0"), ("top_k", 20, "0"), ("min_p", 0.0, "null"), ("repetition_penalty", 1.1, "1.0")],
)
def test_truncated_sampling_is_for_evaluation(name: str, value: float, neutral: str) -> None:
    assert message(rollout={name: value}) == (
        f"rollout.{name} = {value}: truncated sampling and penalties are for evaluation; leave this"
        f" at {neutral}"
        f" and set rollout.eval.{name} (completions would come from one distribution, and the"
        f" learner's log-probs"
        " from another)"
    )
    assert getattr(config(rollout={"eval": {name: value}}).rollout.eval, name) == value


@pytest.mark.parametrize(
    ("given", "kept"), [(True, "group"), (False, "none"), ("batch", "batch"), ("none", "none")]
)
def test_scale_rewards_takes_the_booleans_of_trl(given: object, kept: str) -> None:
    assert config(algorithm={"scale_rewards": given}).algorithm.scale_rewards == kept


def test_a_number_that_pyyaml_left_as_a_text() -> None:
    made = config(optim={"learning_rate": "1e-6"}, algorithm={"epsilon_high": "2.8e-1"})
    assert (made.optim.learning_rate, made.algorithm.epsilon_high) == (1e-6, 0.28)


def test_a_guard_that_pyyaml_read_as_false() -> None:
    assert config(run={"guards": {"update_happens": False}}).run.guards == {"update_happens": "off"}


def test_paths_may_be_path_objects() -> None:
    made = config(run={"dir": Path("runs") / "one"}, data={"train": Path("rows.jsonl")})
    assert (made.run.dir, made.data.train) == ("runs/one", "rows.jsonl")


def test_sources() -> None:
    task = {"task": "shapes", "split": "train", "size": 2000, "kinds": ("colour", "shape")}
    made = config(data={"train": task, "eval": {"test": task, "other": "rows.jsonl"}})
    kept = {"task": "shapes", "split": "train", "size": 2000, "kinds": ["colour", "shape"]}
    assert made.data.train == kept
    assert list(made.data.eval_sets().items()) == [("test", kept), ("other", "rows.jsonl")]
    assert config(data={"eval": task}).data.eval_sets() == {"eval": kept}
    assert config(data={"eval": "rows.jsonl"}).data.eval_sets() == {"eval": "rows.jsonl"}
    assert config().data.eval_sets() == {}


def test_rewards_keep_their_order_and_arguments() -> None:
    entries = ["exact_match", {"name": "own.py:score", "weight": 2, "threshold": 0.5}]
    kept = ["exact_match", {"name": "own.py:score", "weight": 2.0, "threshold": 0.5}]
    assert config(rewards=entries).rewards == kept


# The tree as a whole


@pytest.mark.parametrize("values", [{}, {"model": None}, {"model": {}}])
def test_a_missing_model(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict(values)
    told = "model.path is missing: Model folder or hub name, such as Qwen/Qwen2.5-VL-3B-Instruct."
    assert str(caught.value) == told


def test_a_section_that_is_a_value() -> None:
    assert message(model="a/model") == (
        "model = 'a/model': must be a section; its keys are model.path, model.dtype, model.attn,"
        " model.lora, model.freeze_vision, model.device"
    )


def test_an_empty_section_has_its_defaults() -> None:
    assert config(optim=None, rollout={"eval": None}) == config()


def test_all_mistakes_are_told_at_once_one_line_each() -> None:
    told = message(
        rollout={"num_generations": 1, "temperature": -1},
        optim={"learning_rate": -1},
        run={"seed": "abc", "zeed": 1},
        learning_rate=1e-5,
    )
    assert told.splitlines() == [
        "num_generations counts completions per prompt; GRPO compares them, so it needs at least 2"
        " (8 is common)",
        "rollout.temperature = -1: must be a number > 0",
        "optim.learning_rate = -1: must be a number >= 0",
        "run.seed = 'abc': must be an integer >= 0",
        "run.zeed: unknown key; the nearest is run.seed",
        "learning_rate: unknown key; write optim.learning_rate",
    ]


def test_the_python_constructors_raise_the_same() -> None:
    assert issubclass(ConfigError, UserError)
    with pytest.raises(ConfigError, match=r"^optim\.learning_rate = -1: must be a number >= 0$"):
        OptimConfig(learning_rate=-1)
    with pytest.raises(ConfigError, match=r"^rollout\.eval\.top_p = 2: must be a number > 0 and <= 1$"):
        EvalSampling(top_p=2)
    with pytest.raises(ConfigError, match=r"^optim\.lr: unknown key; write optim\.learning_rate$"):
        OptimConfig(lr=1e-5)
    with pytest.raises(ConfigError, match=r"^run\.seed = 'x': must be an integer >= 0$"):
        GRPOConfig(model={"path": "m"}, run={"seed": "x"})
    with pytest.raises(ConfigError, match=r"^the config = \[1\]: must be a mapping of sections$"):
        GRPOConfig.from_dict([1])
    made = GRPOConfig(model=ModelConfig(path="m"), rollout=RolloutConfig(num_generations=4))
    assert (made.model.path, made.rollout.num_generations) == ("m", 4)


def test_a_key_that_is_no_text() -> None:
    assert message(optim={1: 2}).startswith("optim.1: unknown key; ")


def test_from_dict_leaves_its_argument_alone() -> None:
    rows = {"task": "shapes", "kinds": ["colour"]}
    values = {"model": dict(MODEL), "data": {"train": rows}}
    made = GRPOConfig.from_dict(values)
    assert isinstance(made.data.train, dict)
    made.data.train["kinds"].append("shape")
    assert values == {"model": MODEL, "data": {"train": {"task": "shapes", "kinds": ["colour"]}}}


# Assignment


def test_an_assignment_is_checked_and_a_bad_one_changes_nothing() -> None:
    made = config()
    made.optim.learning_rate = 1e-5
    assert made.optim.learning_rate == 1e-5
    with pytest.raises(ConfigError, match=r"^optim\.learning_rate = -1: must be a number >= 0$"):
        made.optim.learning_rate = -1
    with pytest.raises(ConfigError, match=r"^optim\.learning_rte: unknown key; .* optim\.learning_rate$"):
        made.optim.learning_rte = 1
    made.data.min_pixels = 5
    with pytest.raises(ConfigError, match=r"^data\.min_pixels = 5: must be <= data\.max_pixels, which is 3$"):
        made.data.max_pixels = 3
    with pytest.raises(ConfigError, match=r"^rewards = 3: must be a list"):
        made.rewards = 3
    assert (made.optim.learning_rate, made.data.max_pixels, made.rewards) == (1e-5, None, [])


def test_check_finds_what_assignments_cannot_see() -> None:
    made = config()
    made.optim.updates_per_step = 9
    with pytest.raises(
        ConfigError, match=r"^optim\.updates_per_step = 9: must be <= rollout\.prompts_per_step"
    ):
        made.check()
    made.optim.updates_per_step = 8
    made.run.guards["nonsense"] = "off"
    with pytest.raises(ConfigError, match=r"^run\.guards\.nonsense: unknown name"):
        made.check()


# Checks between fields


def test_pixel_limits_are_ordered() -> None:
    assert DataConfig(min_pixels=3, max_pixels=3).max_pixels == 3
    assert message(data={"min_pixels": 4, "max_pixels": 3}) == (
        "data.min_pixels = 4: must be <= data.max_pixels, which is 3"
    )


def test_every_update_has_a_prompt() -> None:
    assert config(rollout={"prompts_per_step": 4}, optim={"updates_per_step": 4}).optim.updates_per_step == 4
    assert message(rollout={"prompts_per_step": 4}, optim={"updates_per_step": 5}) == (
        "optim.updates_per_step = 5: must be <= rollout.prompts_per_step, which is 4; every update"
        " needs a prompt"
    )


def test_warm_up_ends_within_the_run() -> None:
    # 10 steps x 2 updates x 3 iterations = 60 updates
    sections = {"algorithm": {"num_iterations": 3}, "run": {"max_steps": 10}}
    assert config(optim={"warmup_steps": 60, "updates_per_step": 2}, **sections).optim.warmup_steps == 60
    assert message(optim={"warmup_steps": 61, "updates_per_step": 2}, **sections) == (
        "optim.warmup_steps = 61: must be <= the updates of the run, which are 60 (run.max_steps 10 x"
        " optim.updates_per_step 2 x algorithm.num_iterations 3)"
    )
    assert config(optim={"warmup_steps": 61}).optim.warmup_steps == 61  # the length is not known yet


def test_evaluation_during_the_run_needs_rows() -> None:
    told = "run.eval_every = 5: needs rows to evaluate on; set data.eval, or 0 here"
    assert message(data={"train": "rows.jsonl"}, run={"eval_every": 5}) == told
    assert config(data={"train": "a", "eval": "b"}, run={"eval_every": 5}).run.eval_every == 5
    from_python = config(run={"eval_every": 5})  # both may come with GRPOTrainer(train=..., eval=...)
    from_python.require_eval(given=True)
    with pytest.raises(ConfigError) as caught:
        from_python.require_eval()
    assert str(caught.value) == told


def test_rewards_are_needed_unless_given() -> None:
    config().require_rewards(given=True)
    config(rewards=["iou"]).require_rewards()
    with pytest.raises(
        ConfigError, match=r"^rewards = \[\]: must name at least one reward, such as rewards: \[iou\]"
    ):
        config().require_rewards()


def test_the_seeds_suffice() -> None:
    # G = 7: M = 153391689 x 7 = 1073741823 seeds; a step uses 1 x 3 x 7 = 21, so 51130563 steps use all.
    check_seed_plan(51130563, 1, 3, 7)
    with pytest.raises(ConfigError) as caught:
        check_seed_plan(51130564, 1, 3, 7)
    told = (
        "run.max_steps = 51130564: 51130564 steps x 1 attempts x 3 prompts x 7 generations need"
        " 1073741844 seeds,"
        " and there are 1073741823; lower run.max_steps, rollout.max_attempts, rollout.prompts_per_step or"
        " rollout.num_generations"
    )
    assert str(caught.value) == told
    rollout = {"prompts_per_step": 3, "num_generations": 7}
    assert message(rollout=rollout, run={"max_steps": 51130564}) == told
    assert config(rollout=rollout, run={"max_steps": 51130563}).run.max_steps == 51130563
    # 2 x 8 x 8 = 128 seeds a step, 2^30 / 128 = 8388608 steps
    check_seed_plan(8388608, 2, 8, 8)
    with pytest.raises(ConfigError, match="need 1073741952 seeds, and there are 1073741824"):
        check_seed_plan(8388609, 2, 8, 8)


def test_a_single_step_may_be_too_large() -> None:
    assert "need 1073741832 seeds" in message(rollout={"prompts_per_step": 134217729, "num_generations": 8})


# The sentence


@pytest.mark.parametrize(
    ("sections", "arguments", "sentence"),
    [
        (
            {"rollout": {"prompts_per_step": 16}, "optim": {"max_tokens_per_pack": 4096}},
            {},
            "16 prompts x 8 generations = 128 completions a step -> packs of at most 4,096 tokens"
            " on 1 process ->"
            " 1 update (16 prompts each)",
        ),
        (
            {"rollout": {"prompts_per_step": 512}, "optim": {"updates_per_step": 4}},
            {"processes": 8, "packs": 1},
            "512 prompts x 8 generations = 4,096 completions a step -> 1 pack of at most 16,384 tokens on"
            " 8 processes -> 4 updates (128 prompts each)",
        ),
        (
            {
                "rollout": {"prompts_per_step": 10, "num_generations": 4},
                "optim": {"updates_per_step": 4},
                "algorithm": {"num_iterations": 2},
            },
            {"packs": 5},
            "10 prompts x 4 generations = 40 completions a step -> 5 packs of at most 16,384 tokens"
            " on 1 process ->"
            " 8 updates (2 or 3 prompts each, 2 iterations)",
        ),
        (
            {"rollout": {"prompts_per_step": 1, "num_generations": 2}},
            {},
            "1 prompt x 2 generations = 2 completions a step -> packs of at most 16,384 tokens on 1"
            " process ->"
            " 1 update (1 prompt each)",
        ),
    ],
)
def test_the_arithmetic_of_a_step(sections: dict[str, Any], arguments: dict[str, int], sentence: str) -> None:
    assert config(**sections).batch_sentence(**arguments) == sentence


# Import


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import mm_grpo.config;"
        " heavy = {'torch', 'transformers', 'datasets', 'numpy', 'vllm'} & set(sys.modules);"
        " print(time.process_time() - start, *heavy)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def once() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    runs = [once() for _ in range(3)]
    assert functools.reduce(operator.add, [run[1:] for run in runs]) == []
    # 0.15 s alone; the best of three, and room for a slow machine that is busy with other tests.
    assert min(float(run[0]) for run in runs) < 1.0
