"""One field: what it takes, and the one line that is raised about what it does not take."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError

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


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("run.seed", "abc", "run.seed = 'abc': must be an integer >= 0"),
        (
            "model.lora",
            16,
            "model.lora = 16: must be null or a mapping of rank, alpha, target_modules and vision",
        ),
        ("model.lora.rank", 0, "model.lora.rank = 0: must be an integer >= 1 and <= 16384"),
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
        (
            "run.headline",
            "iou",
            "run.headline = 'iou': must be a reward's name and its least mark, such as exact_match >= 1, or its name"
            " and mean, such as iou mean, or null",
        ),
        ("run.eval_blind", "mixed", "run.eval_blind = 'mixed': must be one of shuffled, removed or null"),
        ("rollout.eval.min_p", -0.1, "rollout.eval.min_p = -0.1: must be a number >= 0 and <= 1 or null"),
        ("algorithm.epsilon_high", -1, "algorithm.epsilon_high = -1: must be a number >= 0 or null"),
        ("algorithm.beta", None, "algorithm.beta = null: must be a number >= 0"),
        (
            "algorithm.loss_type",
            "drgrpo",
            "algorithm.loss_type = 'drgrpo': must be one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo,"
            " dppo_tv, dppo_kl, gmpo (the nearest is dr_grpo)",
        ),
        ("optim.adam_beta2", 1, "optim.adam_beta2 = 1: must be a number >= 0 and < 1"),
        ("optim.learning_rate", float("inf"), "optim.learning_rate = inf: must be a number >= 0 or null"),
        ("optim.learning_rate", "fast", "optim.learning_rate = 'fast': must be a number >= 0 or null"),
        ("optim.learning_rate", True, "optim.learning_rate = True: must be a number >= 0 or null"),
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
            " must be one of duplicate_completions, logp_gap, update_happens, no_update, zero_std, no_reward, zero_kl,"
            " masked_share, entropy_collapse, clipped_lengths, unread_images, sight_lost, tools_failing, tools_unused",
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
            "data.train = {'split': 'train'}: a mapping needs the key path, or the key task, such as {task: shapes,"
            " split: train, size: 2000}",
        ),
        (
            "data.train",
            3,
            "data.train = 3: must be a path, a list of paths, or a mapping with the key task, such as {task: shapes,"
            " split: train, size: 2000}",
        ),
        ("data.train", ["a.jsonl", 3], "data.train = ['a.jsonl', 3]: a list holds paths, and 3 is none"),
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
            "data.eval = {'test': 'a.jsonl', 'size': 20}: the set size is 20: must be a path, a"
            " list of paths, or a mapping with the"
            " key task, such as {task: shapes, split: train, size: 2000}",
        ),
        (
            "data.eval",
            {"a/b": "x"},
            "data.eval = {'a/b': 'x'}: the name of a set is letters, digits, '_', '-' and '.'; 'a/b' is not",
        ),
        ("rollout.engine", "hf", "rollout.engine = 'hf': must be one of transformers, vllm, vllm_server"),
        (
            "rollout.server.urls",
            ["localhost:8000"],
            "rollout.server.urls = ['localhost:8000']: holds 'localhost:8000', which must be an address such as"
            " http://127.0.0.1:8000 or unix:///run/vllm.sock",
        ),
        (
            "rollout.server.urls",
            ["http://a:1", "http://a:1/"],
            "rollout.server.urls = ['http://a:1', 'http://a:1/']: holds 'http://a:1' twice; name each server once",
        ),
        ("rollout.server.health_timeout", 0, "rollout.server.health_timeout = 0: must be a number > 0"),
        ("rollout.max_staleness", -1, "rollout.max_staleness = -1: must be an integer >= 0"),
        (
            "rollout.staleness_order",
            "eagerly",
            "rollout.staleness_order = 'eagerly': must be one of lockstep, eager (the nearest is eager)",
        ),
        (
            "rollout.vllm.tensor_parallel_size",
            2,
            "rollout.vllm.tensor_parallel_size: unknown key; each process has a vLLM of its own here, and one engine"
            " over several processes is not in this version yet; leave it out",
        ),
    ],
)
def test_a_wrong_value_gets_one_line(path: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict(nested(path, value))
    assert line in str(caught.value).splitlines()


@pytest.mark.parametrize("value", [1e308, 1e30, 5e-324, 10**400])
@pytest.mark.parametrize(
    "path", ["optim.learning_rate", "algorithm.beta", "rollout.temperature", "rollout.server.timeout"]
)
def test_a_number_that_overflows_is_refused(path: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"^{path} = .*: must be"):
        GRPOConfig.from_dict(nested(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rewards", [{"name": "iou", "weight": 10**400}]),
        ("rewards", [{"name": "iou", "weight": -1e300}]),
        ("data.train", [{"path": "a.jsonl", "weight": 10**400}]),
        ("data.train", [{"path": "a.jsonl", "weight": 1e300}]),
        ("run.headline", f"iou >= 1{'0' * 400}"),
        ("run.process_timeout", 1e10),
        ("rollout.vllm.timeout", "1e300"),
    ],
)
def test_a_weight_a_mark_and_a_time_out_that_overflow_are_refused(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=path):
        GRPOConfig.from_dict({"model": {"path": "m"}} | nested(path, value))


@pytest.mark.parametrize("generations", [1, 0, -3])
def test_fewer_than_two_generations(generations: int) -> None:
    assert message(rollout={"num_generations": generations}) == (
        "num_generations counts completions per prompt; GRPO compares them, so it needs at least 2"
        " (8 is common)"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.0), ("repetition_penalty", 1.1)]
)
def test_truncated_sampling_is_for_evaluation(name: str, value: float) -> None:
    assert message(rollout={name: value}) == (
        f"rollout.{name}: unknown key; truncated sampling and penalties are for evaluation; write"
        f" rollout.eval.{name} (completions would come from one distribution, and the learner's log-probs"
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


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        (
            "optim",
            {"zero_stage": 3},
            r"optim.zero_stage = 3: must be 0, 1 or 2; stage 3 shares out the weights",
        ),
        ("optim", {"zero_stage": 4}, r"optim.zero_stage = 4: must be 0, 1 or 2$"),
        ("optim", {"zero_stage": -1}, r"optim.zero_stage = -1: must be"),
        (
            "optim",
            {"zero_stage": 0, "offload_optimizer": True},
            r"optim.offload_optimizer = true: needs optim.zero_stage 1 or 2, and that is 0",
        ),
        ("run", {"save_every": -1}, r"run.save_every = -1: must be"),
        ("run", {"keep_checkpoints": 0}, r"run.keep_checkpoints = 0: must be"),
        ("run", {"process_timeout": 0}, r"run.process_timeout = 0.*: must be"),
    ],
)
def test_values_for_processes_and_checkpoints_are_refused(
    section: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        GRPOConfig.from_dict({"model": {"path": "m"}, section: fields})
