"""Configs in the shape in which each trainer publishes its VLM example: values, arithmetic, and `check --smoke`."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.migrate.convert import convert, to_yaml
from mm_grpo.migrate.files import read_foreign

TRL_SCRIPT = """accelerate launch --config_file zero2.yaml --num_processes 4 \\
    scripts/vlm.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name owner/figures \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 8 --learning_rate 1e-5 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" --use_vllm --max_completion_length 256 \\
    --reward_funcs accuracy_reward think_format_reward --num_train_epochs 1
"""
TRL_RECIPE = """
model_name_or_path: Qwen/Qwen2-VL-2B-Instruct
dataset_name: owner/figures
dataset_prompt_column: question
system_prompt: "Answer # with one number."
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
num_generations: 16
steps_per_generation: 8
gradient_checkpointing_kwargs: {use_reentrant: false}
reward_funcs: [accuracy]
max_steps: -1
num_train_epochs: 1
"""
SWIFT = """
SYSTEM='Think first: it costs $5.'
export MAX_PIXELS=262144
CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 \\
swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct --tuner_type full \\
    --dataset 'owner/figures#1000' --system "$SYSTEM" \\
    --use_vllm true --vllm_mode colocate --num_generations 4 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 3 --max_completion_length 256 \\
    --reward_funcs accuracy format soft_overlong --reward_weights 1 0.1 0.5 --soft_cache_length 64 --max_steps 30 --warmup_ratio 0.1
"""  # noqa: E501
VERL = """
set -x
ENGINE=${1:-vllm}
prompts=64
FILES="$HOME/data/figures"
ARGS=(
    algorithm.adv_estimator=grpo  # no critic
    data.train_files=$FILES/train.parquet
    data.train_batch_size=$prompts data.max_prompt_length=1024 data.max_response_length=$((1024 * 2))
    data.filter_overlong_prompts=True data.truncation='error' data.image_key=images
)
if [ "$ENGINE" = vllm ]; then export VLLM_USE_V1=1; fi
python3 -m verl.trainer.main_ppo "${ARGS[@]}" \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$((prompts / 4)) \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.rollout.n=5 \\
    custom_reward_function.path=score.py custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_epochs=15 \\
    trainer.default_local_dir='runs/${trainer.project_name}' trainer.project_name=figures trainer.save_freq=-1 "$@"
"""
EASYR1 = """
data: {train_files: owner/figures@train, prompt_key: question, rollout_batch_size: 32, seed: 3, max_response_length: 64}
algorithm: {use_kl_loss: false, kl_coef: 0.02, online_filtering: true}
worker:
  actor:
    global_batch_size: 8
    model: {model_path: Qwen/Qwen2.5-VL-3B-Instruct, freeze_vision_tower: true, lora: {rank: 16, target_modules: "q_proj, v_proj"}}
    optim: {lr: 1.0e-6, lr_warmup_steps: 3, betas: [0.9, 0.95]}
  rollout: {n: 4, top_p: 1.0, limit_images: 2, val_override_config: {temperature: 0.5, n: 2}}
  reward: {reward_function: ./score.py:score}
trainer: {max_steps: 20, total_epochs: 4, logger: [console, swanlab], val_freq: 5}
"""  # noqa: E501

PUBLISHED: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    # 4 x 2 x 4 processes = 32 completions are 4 groups of 8; the 2 accumulated batches make one update
    "trl.sh": (TRL_SCRIPT, "4 prompts x 8 generations = 32 completions a step -> 1 update (4 prompts each)", {
        "model.lora.target_modules": ["q_proj", "v_proj"], "rollout.engine": "vllm", "rewards": ["math", "format"],
        "algorithm.importance_sampling_mode": "sequence_mask", "optim.lr_scheduler_type": "linear",
    }, {"config_file"}),
    # 16 x 8 = 128 completions are 8 groups of 16; of 8 batches 4 make an update
    "trl.yaml": (TRL_RECIPE, "8 prompts x 16 generations = 128 completions a step -> 2 updates (4 prompts each)", {
        "data.columns": {"prompt": "question"}, "data.system_prompt": "Answer # with one number.",
        "algorithm.importance_sampling_mode": "auto",
    }, {"gradient_checkpointing_kwargs.use_reentrant"}),
    # 4 x 3 x 2 processes = 24 completions are 6 groups of 4
    "swift.sh": (SWIFT, "6 prompts x 4 generations = 24 completions a step -> 1 update (6 prompts each)", {
        "data.system_prompt": "Think first: it costs $5.", "data.max_pixels": 262144, "data.train": "owner/figures",
        "algorithm.loss_type": "grpo", "algorithm.beta": 0.04, "model.freeze_vision": True, "model.lora": None,
        "algorithm.importance_sampling_mode": "none", "optim.learning_rate": 1e-5, "optim.weight_decay": 0.1,
        "rollout.temperature": 0.9, "optim.warmup_steps": 3, "run.max_steps": 30,
        "rewards": [{"name": "math", "weight": 1.0}, {"name": "format", "weight": 0.1},
                    {"name": "soft_overlong", "max_length": 256, "buffer": 64, "weight": 0.5}],
    }, {"dataset"}),
    "verl.sh": (VERL, "64 prompts x 5 generations = 320 completions a step -> 4 updates (16 prompts each)", {
        "data.train": str(Path.home() / "data/figures/train.parquet"), "data.on_overlong": "drop",
        "rollout.max_completion_length": 2048, "algorithm.beta": 0.01, "algorithm.kl_estimator": "k3",
        "algorithm.kl_in_reward": False, "algorithm.loss_type": "grpo", "algorithm.delta": 3.0,
        "rewards": ["score.py:score"],
        "optim.weight_decay": 0.01, "run.trackers": ["wandb"], "run.dir": "runs/figures", "run.save_every": 0,
    }, {"trainer.n_gpus_per_node", "trainer.total_epochs", "trainer.project_name"}),
    "easy.yaml": (EASYR1, "32 prompts x 4 generations = 128 completions a step -> 4 updates (8 prompts each)", {
        "data.train": "owner/figures:train", "data.columns": {"prompt": "question"}, "run.seed": 3, "run.max_steps": 20,
        "algorithm.beta": 0.02, "algorithm.kl_in_reward": True, "algorithm.kl_estimator": "k1",
        "algorithm.epsilon_high": 0.3, "algorithm.delta": 3.0, "rollout.max_attempts": 20, "data.max_pixels": 4194304,
        "rollout.engine": "vllm", "data.on_overlong": "drop", "optim.warmup_steps": 12, "optim.adam_beta2": 0.95,
        "rollout.vllm.max_images": 2, "rollout.eval.num_generations": 2, "optim.weight_decay": 0.01,
        "model.lora.target_modules": ["q_proj", "v_proj"], "rewards": ["./score.py:score"], "run.eval_every": 5,
    }, {"trainer.logger"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_converted_and_checked(
    name: str, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, sentence, expected, omitted = PUBLISHED[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    converted = convert(read_foreign(name))
    assert set(converted.omitted) == omitted
    (tmp_path / "ours.yaml").write_text(to_yaml(converted))
    config = GRPOConfig.from_yaml("ours.yaml")
    assert config.batch_sentence() == sentence
    assert {path: attrgetter(path)(config) for path in expected} == expected
    score = "def score(completion, answer):\n    return float(answer in completion)\n"
    (tmp_path / "score.py").write_text(score)
    (tmp_path / "fixture").mkdir()
    tiny.picture(1).save(tmp_path / "fixture" / "1.png")
    prompt = "question" if "columns" in str(expected) else "prompt"
    row = {prompt: "How many?", "image": "1.png", "answer": "1"}
    (tmp_path / "fixture" / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    checked = command("check", "ours.yaml", "--smoke", *(() if config.rewards else ("rewards=[math]",)))
    assert checked.code == 0, checked.err


ACTOR = "actor_rollout_ref.actor"
GRPO: dict[str, Any] = {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 8}
MODE = "importance_sampling_mode"
FILTER = "algorithm.filter_groups"
MEGATRON: dict[str, Any] = {"rlhf_type": "grpo", "global_batch_size": 64, "nproc_per_node": 8}
R1V: dict[str, Any] = {
    "open_r1": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_processes": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.beta", 0.1),
        ({"algorithm.use_kl_in_reward": True, f"{ACTOR}.kl_loss_coef": 9}, "algorithm.kl_estimator", "k1"),
        ({f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_coef": 9}, "algorithm.beta", 0),
        ({f"{ACTOR}.clip_ratio": 0.3}, "algorithm.epsilon", 0.3),
        ({f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio": 0.3}, "algorithm.epsilon", 0.1),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "algorithm.importance_sampling_level", "sequence"),
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "algorithm.delta", None),
        ({"worker.actor.loss_type": "cispo", "worker.actor.clip_ratio_high": 4}, "algorithm.epsilon_high", 5),
        ({"worker.actor.loss_type": "sapo", "worker.actor.loss_avg_mode": "seq"}, "algorithm.loss_type", "sapo"),
        ({"algorithm.disable_kl": True, "data.rollout_batch_size": 8}, "algorithm.beta", 0),
        ({f"{FILTER}.enable": True, f"{FILTER}.max_num_gen_batches": 10}, "rollout.max_attempts", 10),
        ({f"{FILTER}.enable": True}, "rollout.max_attempts", 20),
        ({"algorithm.rollout_correction.rollout_is": "token"}, "algorithm.importance_sampling_mode", "token_truncate"),
        ({"actor_rollout_ref.rollout.name": "sglang"}, "rollout.engine", "vllm"),
        ({"actor_rollout_ref.model.lora_rank": 32}, "model.lora.alpha", 16),
        ({"critic.model.enable_gradient_checkpointing": False}, "optim.gradient_checkpointing", None),
        ({"rlhf_type": "grpo", "dynamic_sample": True}, "rollout.max_attempts", 4),
        ({"rlhf_type": "grpo", "columns": {"problem": "query"}}, "data.columns", {"prompt": "problem"}),
        ({"rlhf_type": "grpo", "dataset": ["a.jsonl#5", "hf::o/n:sub", "o/n:default"]}, "data.train",
         ["a.jsonl", "o/n:sub:train", "o/n"]),
        ({"rlhf_type": "grpo", "dataset": "folder/a@b"}, "data.train", "folder/a@b"),
        ({"data.train_files": "owner/set@b"}, "data.train", "owner/set:b"),
        ({"rlhf_type": "grpo", "deepspeed": "zero3"}, "optim.zero_stage", 3),
        ({"deepspeed": "zero2_offload"}, "optim.offload_optimizer", True),
        ({"deepspeed": "configs/ds_zero3.json"}, "optim.zero_stage", 3),
        ({f"{ACTOR}.ppo_mini_batch_size": "${data.train_batch_size}"}, "optim.updates_per_step", 1),
        ({"data_file_paths": "a.jsonl:b.jsonl", "image_folders": "i:i", "dataset_name": "no"}, "data.image_dir", "i"),
        ({"data_file_paths": "a.jsonl:b.jsonl", "image_folders": "i:i"}, "data.train", ["a.jsonl", "b.jsonl"]),
        ({"data_file_paths": "a.jsonl:b.jsonl", "image_folders": "i:j", "dataset_name": "no"}, "data.train",
         [{"path": "a.jsonl", "image_dir": "i"}, {"path": "b.jsonl", "image_dir": "j"}]),
        ({"reward_funcs": ["accuracy"], "task_type": "rec", "is_reward_customized_from_vlm_module": True}, "rewards",
         ["iou"]),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, f"algorithm.{MODE}", "auto"),
        ({**MEGATRON, "steps_per_generation": 2}, "rollout.prompts_per_step", 16),  # 64 x 2 completions in groups of 8
        ({**MEGATRON, "steps_per_generation": 2}, "optim.updates_per_step", 2),
        ({**R1V, "use_vllm": False}, "rollout.prompts_per_step", 8),  # 1 x 2 x 4 prompts
        ({**R1V, "use_vllm": False, "max_steps": 9}, "run.max_steps", 9),
        ({**R1V, "use_vllm": True}, "rollout.prompts_per_step", 1),  # 1 x 2 x 4 completions
        ({**R1V, "data_file_paths": "a.jsonl"}, "rollout.prompts_per_step", 1),
        (R1V, "algorithm.beta", 0.04),
        ({"rlhf_type": "grpo", "use_vllm": True, "vllm_server_host": "h"}, "rollout.engine", "vllm_server"),
        ({"use_vllm": True, "vllm_server_host": "h", "vllm_mode": "colocate"}, "rollout.engine", "vllm"),
        ({"trainer.total_training_steps": 100, "actor_rollout_ref.actor.optim.total_training_steps": -1,
          f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}, "optim.warmup_steps", 10),
        ({"env.max_steps": 15, "actor_rollout_ref.model.path": "m"}, "run.max_steps", None),
        ({"worker.actor.use_kl_loss": True, "worker.actor.kl_loss_coef": 0.2}, "algorithm.beta", 0.2),
        ({"reward_funcs": "accuracy", "reward_weights": 2.0}, "rewards", [{"name": "math", "weight": 2.0}]),
        ({"lr_scheduler_type": "constant_with_warmup"}, "optim.lr_scheduler_type", "constant"),
    ],
)  # fmt: skip
def test_keys_of_other_trainers(
    keys: dict[str, Any], path: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a@b").touch()
    batch = {"actor_rollout_ref.rollout.n": 2, **GRPO, "algorithm.adv_estimator": "grpo"}
    is_verl = "actor_rollout_ref" in str(keys) or "filter_groups" in str(keys)
    converted = convert(keys | (batch if is_verl else {}))
    assert attrgetter(path)(GRPOConfig.from_dict(converted.values)) == value


@pytest.mark.parametrize(
    ("name", "text", "sign"),
    [
        ("a.yaml", "{model_name_or_path: m, stage: sft, dataset_dir: data}", "LLaMA-Factory"),
        ("a.yaml", "{grpo: {num_prompts_per_step: 2}, policy: {model_name: m}}", "NeMo-RL"),
        ("a.yaml", "{buffer: {batch_size: 2}, explorer: {}}", "Trinity-RFT"),
        ("a.yml", "{base_model: m, sequence_len: 9}", "Axolotl"),
        ("a.yaml", "{model: {path: m}, data: {train: a.jsonl}, rewards: [math]}", "mm_grpo itself"),
        ("a.yaml", "{model_name_or_path: m, loss_type: sigmoid}", "another stage"),
        ("a.yaml", "{pretrain: m, actor_train: {}, actor_infer: {}}", "ROLL"),
        ("a.yaml", "{runner: {max_epochs: 2}, data: {rollout_batch_size: 8}}", "RLinf"),
        ("a.yaml", "{checkpointer: {_component_: a}, output_dir: o}", "torchtune"),
        ("a.json", '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}', "DeepSpeed"),
        (
            "a.sh",
            "A=(--hf-checkpoint m --actor-num-nodes 1)\nray job submit -- python3 t.py ${A[@]}",
            "slime",
        ),
        ("a.sh", "uv run -m skyrl_train.entrypoints.main_base trainer.train_batch_size=8", "SkyRL"),
        ("a.sh", "python m.py -- python open_instruct/grpo_fast.py --beta 0", "open-instruct"),
        ("a.sh", "python3 -m verl.trainer.main_generation data.path=a", "main_generation"),
        ("a.sh", "llamafactory-cli train a.yaml", "LLaMA-Factory"),
        ("a.sh", "swift infer --model m --dataset a", "holds no key"),
        ("a.ipynb", "{}", "cannot be read"),
        ("a.sh", "swift sft --model m --dataset grpo.jsonl", "sft"),
        ("a.sh", "torchrun --nproc_per_node 2 -m verl.trainer.sft_trainer data.train_files=a", "sft_trainer"),
        ("a.sh", "swift rlhf --rlhf_type dpo --model m", "dpo"),
        ("a.py", "print('GRPOConfig')", "holds no key"),
    ],
)
def test_files_of_other_programs_are_refused(name: str, text: str, sign: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name}: .*{sign}"):
        read_foreign(tmp_path / name)
    (tmp_path / "ours.sh").write_text("swift rlhf --rlhf_type grpo --dataset sft/dpo.jsonl --model m/sft")
    assert read_foreign(tmp_path / "ours.sh")["model"] == "m/sft"


def test_a_script_in_python_gives_its_literals(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "LR, N = 1e-5, 2\nNAME = 'Qwen/Q'\nsteps = 1\nsteps = 2\n"
        "args = trl.GRPOConfig(learning_rate=1e-5, num_generations=4, per_device_train_batch_size=8, max_steps=steps)\n"
        "GRPOTrainer(model=NAME, args=args, peft_config=LoraConfig(r=4, target_modules=['q_proj']))\n"
    )
    converted = convert(read_foreign(tmp_path / "a.py"))
    lora = {"rank": 4, "alpha": 32, "target_modules": ["q_proj"]}
    assert converted.values["model"] == {"path": "Qwen/Q", "lora": lora}
    assert converted.values["rollout"] == {"prompts_per_step": 2, "num_generations": 4}
    assert list(converted.omitted) == ["max_steps"]
    (tmp_path / "a.py").write_text(
        "LR = 1e-6\nfor LR in (1e-5, 1e-4):\n    args = GRPOConfig(learning_rate=LR, **more)\nargs.loss_type = 'grpo'\n"
        "model, tokenizer = FastVisionModel.from_pretrained(model_name='o/n', load_in_4bit=True, fast_inference=True)\n"
        "Fast.get_peft_model(model, r=4, lora_alpha=4)\nGRPOTrainer(model, [score], args)\nA.from_pretrained('p')"
    )
    converted = convert(read_foreign(tmp_path / "a.py"))
    assert converted.values["model"] == {"path": "o/n", "lora": {"rank": 4, "alpha": 4}}
    assert [converted.values[s][n] for s, n in (("algorithm", "loss_type"), ("rollout", "engine"))] == [
        "grpo",
        "vllm",
    ]
    assert set(converted.omitted) == {"learning_rate", "**more", "load_in_4bit"}


@pytest.mark.parametrize(
    ("launch", "devices", "prompts"),
    [
        ("torchrun --nproc_per_node=2 --nnodes 2 a.py", None, 4),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch a.py", None, 2),
        ("CUDA_VISIBLE_DEVICES=0,1 swift rlhf --rlhf_type grpo", None, 1),
        ("NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo", 3, 3),
        ("torchrun --nproc_per_node=$N a.py", None, 1),
        ("env A=1 nohup python -m torch.distributed.run --nproc_per_node 2 a.py", None, 2),
        ("srun -N 2 bash -c 'torchrun --nproc_per_node 4 a.py --model m --per_device_train_batch_size 8'; a", None, 4),
        ("CMD='torchrun --nproc_per_node 4 a.py --per_device_train_batch_size 8'\necho $CMD --b 1\neval $CMD", None, 4),
        ("deepspeed --include localhost:0,1,2,3 a.py", None, 4),
        ("torchrun --nproc_per_node 2 src/open_r1/grpo.py --num_generations 16", None, 16),
        ("swift sft --model a --dataset a --lora_rank 8\nNPROC_PER_NODE=2 swift rlhf --rlhf_type grpo", None, 2),
    ],
)  # fmt: skip
def test_processes(launch: str, devices: int | None, prompts: int, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(f"{launch} --per_device_train_batch_size 8 --model m")
    converted = convert(read_foreign(tmp_path / "a.sh"), devices=devices)
    assert converted.values["rollout"]["prompts_per_step"] == prompts
