"""Configs of other trainers as ours: values, arithmetic of batches and steps, and a reason for what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.convert import NO_MODEL, convert, to_yaml
from mm_grpo.migrate.files import read_foreign

TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Q", "dtype": "bfloat16", "attn_implementation": "flash_attention_2",
    "use_peft": True, "lora_r": 64, "lora_alpha": 128, "lora_target_modules": ["q_proj"], "lora_dropout": 0.05,
    "dataset_name": "owner/set", "dataset_config": "main", "eval_strategy": "steps", "eval_steps": 80,
    "reward_funcs": ["accuracy_reward", "my.rewards.brief"], "reward_weights": [1.0, 0.5], "output_dir": "runs/vlm",
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
    "num_generations": 8, "num_iterations": 2, "learning_rate": 1e-5, "max_steps": 400, "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine", "save_steps": 100, "logging_steps": 1, "report_to": ["wandb"],
    "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5,
    "top_p": 1.0, "loss_type": "grpo", "beta": 0.001,
}  # fmt: skip


def test_a_script_of_trl() -> None:
    converted = convert(TRL, devices=2)
    # 8 x 4 x 2 = 64 completions a step are 8 groups; 4 micro-steps by 2 make 2 updates, twice over: 4 a step
    assert converted.values == {
        "model": {"path": "Qwen/Q", "dtype": "bfloat16",
                  "lora": {"rank": 64, "alpha": 128, "target_modules": ["q_proj"]}},
        "data": {"train": "owner/set:main:train", "eval": "owner/set:main:test"},
        "rollout": {"prompts_per_step": 8, "num_generations": 8, "engine": "vllm",
                    "vllm": {"gpu_memory_utilization": 0.5}},
        "rewards": [{"name": "math", "weight": 1.0}, {"name": "my.rewards:brief", "weight": 0.5}],
        "algorithm": {"num_iterations": 2, "importance_sampling_mode": "sequence_mask", "loss_type": "grpo",
                      "beta": 0.001},
        "optim": {"updates_per_step": 2, "learning_rate": 1e-5, "warmup_steps": 40, "lr_scheduler_type": "cosine"},
        "run": {"dir": "runs/vlm", "eval_every": 20, "max_steps": 100, "save_every": 25, "trackers": ["wandb"]},
    }  # fmt: skip
    assert set(converted.omitted) == {"attn_implementation", "lora_dropout", "logging_steps"}
    assert "write auto" in converted.omitted["attn_implementation"]


def test_what_is_written_reads_back_and_holds_the_reasons(tmp_path: Path) -> None:
    converted = convert(TRL, devices=2)
    path, text = tmp_path / "config.yaml", to_yaml(converted)
    path.write_text(text)
    assert GRPOConfig.from_yaml(path) == GRPOConfig.from_dict(converted.values)
    assert text.startswith("model:\n  path: Qwen/Q\n")
    assert "\n# Not taken over:\n" in text
    assert "\n#   lora_dropout = 0.05: model.lora has rank, alpha, " in text


def test_foreign_keys_and_values_are_no_lines_and_no_secrets_of_ours() -> None:
    theirs = {
        "model_name_or_path": "q", "per_device_train_batch_size": 8,
        "x\nrun:\n  dir: /theirs\n#": 1, "y\u2028model": "a\nb", "z": {"\rk\x85": "\n- c"},
        "report_to": ["wandb", "a\nrewards: [theirs]"], "reward_funcs": ["b\nrewards: [theirs]"],
        "hub_token": "abc-def", "wandb_api_key": "abc-def", "vllm_server_base_url": "http://u:abc-def@h/?abc-def",
    }  # fmt: skip
    text = to_yaml(convert(theirs))
    kept = ("model_name_or_path", "per_device_train_batch_size")
    expected = convert({key: theirs[key] for key in kept}).values
    assert YAML(typ="safe").load(text) == expected | {"run": {"trackers": ["wandb"]}}
    assert "abc-def" not in text and "hub_token" in text and "theirs" in text


def test_what_trl_does_by_default_is_written_out() -> None:
    converted = convert({"learning_rate": 1e-6})
    assert converted.values == {
        "optim": {"learning_rate": 1e-6, "updates_per_step": 1, "lr_scheduler_type": "linear"},
        "rollout": {"prompts_per_step": 1},
        "model": {"path": NO_MODEL},
    }
    assert {note.partition(":")[0] for note in converted.notes} == {
        "rollout.prompts_per_step", "optim.updates_per_step", "optim.lr_scheduler_type", "run.max_steps", "model.path",
        "rewards",
    }  # fmt: skip


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("keys", "omitted", "why"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size", "1/2 groups of 8"),
        ({"num_train_epochs": 3}, "num_train_epochs", "run.max_steps"),
        ({"warmup_ratio": 0.1}, "warmup_ratio", "optim.warmup_steps"),
        ({"warmup_ratio": [1]}, "warmup_ratio", "no value"),
        ({"dtype": "float16"}, "dtype", "model.dtype"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, "warmup_steps", "no warm-up"),
        ({"reward_funcs": ["accuracy"], "reward_weights": [1, 2]}, "reward_weights", "weight"),
        ({"reward_funcs": "$FUN", "reward_weights": [1, 2]}, "reward_weights", "$FUN"),
        ({"dataset_name": "rec.yaml"}, "dataset_name", "data.train"),
        ({"data.train_files": "a", "config_name": "b"}, "config_name", "missing"),
        ({"custom_reward_function.reward_kwargs.alpha": 1, "data.n": 1}, "custom_reward_function.reward_kwargs.alpha",
         "option: value"),
        ({"env.seed": 0, "data.n": 1}, "env.seed", "rollout.environment"),
        ({"dataset_mixture.datasets": [{"id": "a"}]}, "dataset_mixture.datasets", "data.train"),
        ({"top_p": 0.9}, "top_p", "rollout.eval.top_p"),
        ({"reward_funcs": ["orm"]}, "reward_funcs", "orm"),
        ({"system": "prompt.txt"}, "system", "data.system_prompt"),
        ({"some_key": 1}, "some_key", "mm-grpo config"),
        ({"num_generations": 1}, "num_generations", "rollout.num_generations"),
        ({"output_dir": "$WORK/out"}, "output_dir", "$WORK"),
        ({"rlhf_type": "grpo", "dataset": "o/n#5"}, "dataset", "5"),
        ({"rlhf_type": "grpo", "eval_dataset": "gsm8k"}, "eval_dataset", "data.eval"),
        ({"actor_rollout_ref.model.path": "m"}, "algorithm.adv_estimator", "gae"),
        ({"actor_rollout_ref.model.path": "m"}, "actor_rollout_ref.rollout.n", "rollout.num_generations"),
        ({"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 3}, f"{ACTOR}.ppo_mini_batch_size", "8"),
        ({f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward", "beta"),
        ({f"{ACTOR}.loss_agg_mode": "x"}, f"{ACTOR}.loss_agg_mode", "algorithm.loss_type"),
    ],
)  # fmt: skip
def test_what_is_left_out_has_a_reason(keys: dict[str, Any], omitted: str, why: str) -> None:
    converted = convert(keys)
    assert why in converted.omitted[omitted] and "None" not in to_yaml(converted)
    assert "$" not in str(converted.values)


def test_a_value_that_does_not_go_together_with_the_others_is_left_out() -> None:
    converted = convert({"dataset_name": "a.jsonl", "delta": 1.1})
    assert converted.omitted["delta"].startswith("algorithm.delta = 1.1: ")
    assert "algorithm" not in converted.values and converted.values["data"] == {"train": "a.jsonl"}


def test_a_config_of_ms_swift() -> None:
    swift = {
        "rlhf_type": "grpo", "model": "Qwen/Q", "train_type": "lora", "lora_rank": 8, "lora_alpha": 32,
        "target_modules": "all-linear", "dataset": ["a.jsonl"], "torch_dtype": "bfloat16", "freeze_vit": True,
        "per_device_train_batch_size": 8, "reward_funcs": ["format"], "max_steps": 10,
    }  # fmt: skip
    converted = convert(swift)
    lora = {"rank": 8, "alpha": 32, "target_modules": "all-linear"}
    schedule = {"updates_per_step": 1, "lr_scheduler_type": "cosine"}
    assert converted.values["optim"] == {**schedule, "weight_decay": 0.1, "adam_beta2": 0.95}
    # nothing is accumulated: the 8 completions of a batch are a group
    assert converted.values["rollout"] == {"prompts_per_step": 1, "temperature": 0.9}
    algorithm = {"beta": 0.04, "loss_type": "grpo", "importance_sampling_mode": "none"}
    assert converted.values["algorithm"] == algorithm
    model = {"path": "Qwen/Q", "lora": lora, "dtype": "bfloat16", "freeze_vision": True}
    assert converted.values["model"] == model and converted.values["run"] == {"max_steps": 10}
    assert converted.values["data"] == {"train": ["a.jsonl"]} and converted.values["rewards"] == ["format"]
    assert converted.omitted == {}
    full = convert({"rlhf_type": "grpo", "tuner_type": "full"}).values
    assert "lora" not in full["model"] and full["optim"]["learning_rate"] == 1e-5


def test_a_config_of_verl() -> None:
    lengths = {"max_prompt_length": 99, "max_response_length": 256}
    verl = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": "t.parquet", "train_batch_size": 16, **lengths},
        "actor_rollout_ref": {
            "model": {"path": "Qwen/Q", "enable_gradient_checkpointing": True},
            "actor": {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 8, "clip_ratio_high": 0.28},
            "rollout": {"n": 5, "val_kwargs": {"n": 4, "temperature": 1.0}},
        },
        "critic": {"model": {"path": "Qwen/C"}},
        "trainer": {"save_freq": 20, "total_epochs": 15},
    }
    converted = convert(verl)
    rollout = {"prompts_per_step": 16, "max_completion_length": 256, "num_generations": 5, "engine": "vllm"}
    assert converted.values["rollout"] == {**rollout, "eval": {"num_generations": 4, "temperature": 1.0}}
    assert converted.values["model"] == {"path": "Qwen/Q"}
    optim = {"gradient_checkpointing": True, "learning_rate": 1e-6, "updates_per_step": 2}
    assert converted.values["optim"] == {**optim, "weight_decay": 0.01}
    algorithm = {"advantage_estimator": "grpo", "epsilon_high": 0.28}
    assert converted.values["algorithm"] == {**algorithm, "delta": 3.0}
    assert converted.values["data"] == {"train": "t.parquet", "max_prompt_length": 99}
    assert converted.values["run"] == {"save_every": 20}
    assert list(converted.omitted) == ["critic.model.path", "trainer.total_epochs"]
    assert converted.omitted["trainer.total_epochs"].endswith("15 x rows / 16")


def test_a_shell_script_is_read_as_its_options(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "# the run\nexport A=1\naccelerate launch -m trl grpo \\\n  --model_name_or_path Qwen/Q \\\n"
        "  --learning-rate 1e-5 --use_vllm --num_generations=4 \\\n  --reward_funcs a.b c.d # two\n"
    )
    assert read_foreign(script) == {
        "model_name_or_path": "Qwen/Q", "learning_rate": 1e-5, "use_vllm": True, "num_generations": 4,
        "reward_funcs": ["a.b", "c.d"],
    }  # fmt: skip
    variables = "A=1 MAX_PIXELS=1003520 NPROC_PER_NODE=2"
    script.write_text(f"{variables} python -m swift +data.shuffle=true --rlhf_type grpo")
    assert read_foreign(script) == {
        "max_pixels": 1003520, "nproc_per_node": 2, "rlhf_type": "grpo", "data.shuffle": True,
    }  # fmt: skip
    assert convert(read_foreign(script)).values["data"] == {"max_pixels": 1003520, "shuffle": True}
    script.write_text(
        "FPS=1 FPS_MAX_FRAMES=16 VIDEO_MAX_PIXELS=50176 NFRAMES=8 VIDEO_TOTAL_PIXELS=9 VIDEO_MAX_TOKEN_NUM=128 "
        """swift rlhf --rlhf_type grpo --model_kwargs '{"fps_min_frames": 4}' --columns '{"clip": "video"}'"""
    )
    converted = convert(read_foreign(script))
    limits = {"video_fps": 1, "video_max_frames": 16, "video_max_pixels": 50176}
    assert converted.values["data"] == {**limits, "columns": {"videos": "clip"}}
    omitted = {"nframes", "video_total_pixels", "video_max_token_num", "model_kwargs.fps_min_frames"}
    assert converted.omitted.keys() - {"per_device_train_batch_size"} == omitted
    assert all("data.video_max_pixels" in converted.omitted[key] for key in omitted)
    easy = {"data.rollout_batch_size": 4, "data.video_fps": 1.0, "data.video_key": "clips", "data.nframes": 8}
    converted = convert(easy)
    assert converted.values["data"]["video_fps"] == 1.0 and "data.nframes" in converted.omitted
    assert converted.values["data"]["columns"] == {"videos": "clips"}
    easy["data.video_key"] = "videos"
    assert "columns" not in convert(easy).values["data"]
    script.write_text("echo nothing\n")
    for name in ("train.sh", "no.sh"):
        with pytest.raises(ConfigError, match=f"{name}: "):
            read_foreign(tmp_path / name)
