"""Table of keys of TRL, ms-swift, verl and EasyR1 that mm_grpo does not have.

A row has our field, if the value means the same, and advice. `unknown_key` gives the advice, or the full path of a
right name in the wrong place, or the nearest name; `convert` uses the field. Nothing here knows the config classes: the
caller passes their paths.

The table has the keys that scripts for vision-language models use. To add one: its name, or the end of a dotted path,
in lower case, behind our field in FIELDS, or behind the advice in REASONS, which wins over the field's. The last name
of a field of ours, and a key with one of PREFIXES, need no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from mm_grpo.errors import nearest

Value = TypeVar("Value")

FIELDS: Mapping[str, str] = {
    "model.path": "model_name_or_path model actor_rollout_ref.model.path actor.model.model_path",
    "model.trust_remote_code": "trust_remote_code",
    "model.dtype": "dtype torch_dtype",
    "model.attn": "attn_implementation attn_impl",
    "model.freeze_vision": "freeze_vit freeze_vision_tower freeze_vision_modules",
    "data.train": "dataset train_files dataset_name train_dataset",
    "data.eval": "val_dataset val_files",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.image_dir": "data.image_dir image_root",
    "data.shuffle": "shuffle_dataset dataset_shuffle train_dataloader_shuffle data.shuffle",
    "data.system_prompt": "system data.system_prompt",
    "data.min_pixels": "min_pixels",
    "data.max_pixels": "max_pixels",
    "data.video_fps": "video_fps fps",
    "data.video_max_frames": "video_max_frames fps_max_frames",
    "data.video_max_pixels": "video_max_pixels",
    "data.max_prompt_length": "max_prompt_length max_length",
    "rollout.prompts_per_step": "data.train_batch_size data.rollout_batch_size",
    "rollout.num_generations": "num_generations rollout.n",
    "rollout.temperature": "temperature",
    "rollout.max_completion_length": "max_completion_length data.max_response_length",
    "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "rollout.vllm.max_model_len": "vllm_max_model_length vllm_max_model_len rollout.max_model_len",
    "rollout.vllm.max_images": "limit_images vllm_limit_mm_per_prompt.image",
    "rollout.vllm.max_videos": "vllm_limit_mm_per_prompt.video",
    "rollout.eval.num_generations": "num_generations_eval val_kwargs.n val_override_config.n",
    "rollout.eval.temperature": "val_kwargs.temperature val_override_config.temperature",
    "rollout.eval.top_p": "val_kwargs.top_p val_override_config.top_p",
    "rollout.eval.top_k": "val_kwargs.top_k val_override_config.top_k",
    "algorithm.advantage_estimator": "adv_estimator",
    "algorithm.importance_sampling_mode": "rollout_importance_sampling_mode",
    "algorithm.importance_sampling_clip_max": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap"
    " rollout_importance_sampling_threshold rollout_correction.rollout_is_threshold",
    "algorithm.off_policy_mask_threshold": "off_policy_sequence_mask_delta",
    "algorithm.mask_truncated_completions": "overlong_filter",
    "algorithm.sapo_temperature_pos": "tau_pos tau_positive",
    "algorithm.sapo_temperature_neg": "tau_neg tau_negative",
    "algorithm.epsilon": "epsilon clip_ratio clip_ratio_low",
    "algorithm.epsilon_high": "epsilon_high clip_ratio_high",
    "algorithm.delta": "delta clip_ratio_c clip_ratio_dual",
    "algorithm.entropy_coef": "entropy_coef entropy_coeff",
    "algorithm.num_iterations": "num_iterations actor.ppo_epochs",
    "optim.weight_decay": "weight_decay",
    "optim.learning_rate": "learning_rate optim.lr lr",
    "optim.max_grad_norm": "max_grad_norm actor.grad_clip actor.optim.clip_grad",
    "optim.lr_scheduler_type": "actor.optim.lr_scheduler_type actor.optim.warmup_style",
    "optim.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "run.dir": "output_dir default_local_dir save_checkpoint_path",
    "run.overwrite": "overwrite_output_dir",
    "run.max_steps": "trainer.total_training_steps trainer.max_steps max_steps",
    "run.eval_every": "test_freq val_freq eval_steps",
    "run.save_every": "save_freq save_steps",
    "run.keep_checkpoints": "save_total_limit save_limit max_actor_ckpt_to_keep",
    "run.seed": "data.seed",
}
"""Our field, and the keys whose value means the same."""

_SAMPLING = "truncated sampling and penalties are for evaluation; write rollout.eval.{}"
_LORA = "write model.lora: {rank: 16, alpha: 32, target_modules: [...]} (null trains every weight)"
_ZERO = "write optim.zero_stage (3 is FSDP) and optim.offload_optimizer; there is no config of DeepSpeed"
_QUANTIZED = "write model.quantization: nf4, beside model.lora: {rank: 16} (4 bits; there is no other kind)"
_PROCESSES = (
    "no setting depends on the number of processes; leave it out (mm-grpo train CONFIG --processes N)"
)
_VLLM = "write it into rollout.vllm.engine_kwargs, beside rollout.engine: vllm"
_FRAMES = (
    "frames of a video are set by data.video_fps, data.video_max_frames and data.video_max_pixels; a row may hold its "
    "fps or nframes"
)
NO_SETTING = "mm_grpo has no such setting; leave it out (`mm-grpo config` shows every field)"

REASONS: Mapping[str, str] = {
    # batches and steps
    **{_SAMPLING.format(name): name for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    "write rollout.prompts_per_step (= per-device batch x devices x steps_per_generation / num_generations)":
        "per_device_train_batch_size generation_batch_size",
    "accumulation is derived from optim.updates_per_step and optim.max_tokens_per_pack; leave it out":
        "gradient_accumulation_steps",
    "write optim.updates_per_step (= steps_per_generation / gradient_accumulation_steps)": "steps_per_generation",
    "write rollout.prompts_per_step": "train_batch_size rollout_batch_size",
    "write rollout.prompts_per_step and optim.updates_per_step (= prompts a step / prompts an update)":
        "ppo_mini_batch_size actor.global_batch_size",
    "write run.max_steps (steps, not epochs; null is one pass over the data)": 
        "num_train_epochs total_epochs epochs num_epochs max_epochs train_iters",
    "a file is one run: convert that command from a file of its own": "another_command",
    # the run
    "write run.eval_every (steps; 0 is before and after the run only)": "eval_steps eval_strategy test_freq val_freq",
    "write run.trackers (a list)": "report_to trainer.logger",
    "write run.save_every (steps; 0 is no checkpoint)": "save_steps save_strategy save_freq",
    "it is the first argument of the command: mm-grpo train CONFIG": "config",
    "there is one seed of data and samples: write run.seed": "data_seed rollout.seed data_loader_seed",
    "evaluations are made before and after the run, and at run.eval_every":
        "val_before_train val_only eval_on_start eval_delay do_eval do_train",
    "it is mm-grpo check CONFIG, or mm-grpo train CONFIG --smoke": "dry_run",
    "it is an option of the command: mm-grpo train CONFIG --resume": "resume_from_checkpoint resume_mode",
    _PROCESSES:
        "nnodes n_gpus_per_node nproc_per_node num_processes num_machines num_gpus multi_gpu mixed_precision",
    NO_SETTING:
        "gradient_checkpointing_kwargs use_liger_kernel run_name experiment_name project_name disable_dropout tf32"
        " optim use_cache generation_kwargs rlhf_type model_init_kwargs lr_scheduler_kwargs remove_unused_columns"
        " sync_ref_model ref_model_mixup_alpha ref_model_sync_steps device template",
    "the saved model is that of the best run.headline: write run.keep: best":
        "load_best_model_at_end metric_for_best_model greater_is_better",
    "merge the adapter into a model first, and write its folder into model.path":
        "adapters ref_adapters resume_only_model lora_adapter_path lora.adapter_path",
    # the model and the optimizer
    "write model.path": "model.model_path model_path",
    "write algorithm.reference_path, with algorithm.beta > 0": "ref_model",
    "write model.dtype: auto, float32 or bfloat16": "dtype torch_dtype bf16 fp16",
    _LORA: "use_peft train_type tuner_type",
    "model.lora has rank, alpha, target_modules and vision alone": 
        "lora_dropout lora.dropout lora_modules_to_save modules_to_save use_rslora use_dora target_regex",
    _ZERO: "deepspeed config_file use_deepspeed offload_params param_offload optimizer_offload",
    "the optimizer is AdamW with optim.adam_beta1, optim.adam_beta2 and optim.adam_epsilon":
        "optim.strategy optim.optimizer optimizer_impl",
    "the learning rate ends at 0 (linear, cosine) or stays: write optim.lr_scheduler_type": "min_lr_ratio num_cycles",
    "the newest version of the hub is read: download another one, and write its folder": "model_revision use_hf",
    "the processor is that of model.path": "tokenizer_path tokenizer hf_config_path custom_chat_template",
    "write optim.warmup_steps (= the share x run.max_steps)": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    # the data
    "write its text into data.system_prompt": "system",
    "write it into the path: folder:split, or owner/name:config:split of the hub":
        "dataset_config dataset_train_split dataset_test_split source.split source.name",
    "write data.eval: other rows, or another split": "split_dataset_ratio val_split_ratio test_split_size eval_dataset",
    "write the first rows that are wanted into a file of their own": "train_max_samples val_max_samples",
    "write its text into data.prompt_template, with {prompt} in the place of {{ content }}": "format_prompt",
    "a step samples rollout.prompts_per_step prompts an attempt": "gen_batch_size mini_rollout_batch_size",
    "rewards get every column of a row": "reward_fn_key",
    "write model.lora.target_modules, and model.lora.vision": "exclude_modules freeze_aligner freeze_llm",
    "write data.max_prompt_length (expanded tokens; a longer prompt is never cut)": "max_prompt_length",
    "write data.max_prompt_length and rollout.max_completion_length": "max_length",
    "write data.on_overlong (a longer prompt is never cut)":
        "truncation_strategy data.truncation filter_overlong_prompts",
    "map it in data.columns (our name: the dataset's column)":
        "prompt_key answer_key image_key images_key video_key videos_key dataset_prompt_column",
    _FRAMES: "nframes num_frames max_num_frames",
    "write rollout.max_completion_length": "max_new_tokens response_length max_response_length",
    # rewards and the algorithm
    "write rewards (a list of names or mappings)": "reward_funcs",
    "give each entry of rewards its own weight: rewards: [{name: ..., weight: 1.0}]": "reward_weights",
    "write rewards: [path/to/file.py:function]":
        "external_plugins reward_function custom_reward_function.path custom_reward_function.name",
    "a reward is called with the completions of a step if it asks for lists (docs/rewards.md)":
        "reward_type reward_manager reward.num_cpus reward.num_workers skip_special_tokens",
    "write algorithm.scale_rewards (group or none)": "norm_adv_by_std_in_grpo",
    "write algorithm.advantage_estimator (grpo, rloo, reinforce_plus_plus_baseline or maxrl)": "adv_estimator",
    "write algorithm.loss_type": "loss_agg_mode loss_avg_mode loss_mode",
    **{f"write algorithm.credit.{name.partition('_')[2]}, with rule {name[:4]}": name
       for name in ("pgpo_tau", "pgpo_beta", "vppo_top_share", "vppo_beta_min")},
    "write algorithm.beta (the weight of the KL term; 0 is no KL term and no reference model)":
        "kl_coef kl_loss_coef use_kl_loss disable_kl use_kl_in_reward",
    "groups of equal rewards are replaced, and no others": "filter_key filter_low filter_high",
    "write algorithm.kl_estimator: k1 (verl's kl), k2 (mse) or k3 (low_var_kl)": "kl_penalty kl_loss_type",
    "write rollout.max_attempts (above 1 groups of equal rewards are replaced)":
        "dynamic_sample online_filtering filter_groups.enable filter_groups.max_num_gen_batches max_try_make_batch",
    "write rollout.max_attempts (= max_resample_times + 1: the first attempt counts)": "max_resample_times",
    # the engine
    "write rollout.num_generations (GRPO compares completions: 2 or more)": "rollout.n num_generations",
    "write rollout.engine: vllm (colocate) or vllm_server (server)": "use_vllm vllm_mode rollout.name",
    "write rollout.vllm.sleep_level (0, 1 or 2)": "vllm_enable_sleep_mode",
    "write algorithm.importance_sampling_mode (none is no correction)":
        "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is",
    _VLLM: "enforce_eager enable_chunked_prefill max_num_batched_tokens max_num_seqs enable_prefix_caching ignore_eos",
    "evaluation samples by rollout.eval.temperature (0 is greedy)": "do_sample",
    "write rollout.tools or rollout.environment, and rollout.max_turns": "multi_turn_scheduler use_gym_env gym_env",
    "write data.max_pixels (= tokens x the square of the patch that makes one)": "image_max_token_num",
    "write data.video_max_pixels (= tokens x the square of the patch that makes one)": "video_max_token_num",
}  # fmt: skip
"""Advice, and the keys that get it."""

_PROFILE = "what a step costs is in its metrics and in report.html; there is no profiler"
PARTS: Mapping[str, str] = {
    "critic": "advantages are those of groups, without a value model",
    "reward_model": "write rewards: [{name: reward_model, model: ...}]; an overlong_buffer is soft_overlong",
    "ref": "the reference model is laid out as the policy; write algorithm.reference_path for another one",
    **dict.fromkeys(("fsdp", "fsdp_config", "offload", "megatron"), _ZERO),
    **dict.fromkeys(("profiler", "global_profiler", "npu_profile", "prometheus", "trace"), _PROFILE),
    **dict.fromkeys(
        ("checkpoint", "checkpoint_engine", "transfer_queue", "ray_kwargs", "agent", "v1", "qat", "mtp", "skip",
         "pf_ppo", "disaggregation", "tiled_mlp", "fused_kernel_options", "gradient_checkpointing_kwargs"), NO_SETTING),
    **dict.fromkeys(("reward_kwargs", "reward_function_kwargs"),
                    "give the entry of rewards its arguments: rewards: [{name: file.py:function, option: value}]"),
    **dict.fromkeys(("sandbox_fusion", "reward_manager", "custom_cls"), "write rewards: [path/to/file.py:function]"),
    "multi_turn": "write rollout.tools or rollout.environment, and rollout.max_turns",
    "env": "write rollout.environment, rollout.max_turns and rollout.num_generations (verl-agent's env.rollout.n)",
    "dataset_mixture": "write data.train: [{path: ..., weight: ...}]",
    "distillation": "write algorithm.reference_path: the teacher, with algorithm.beta > 0",
    "engine_kwargs": _VLLM,
}  # fmt: skip
"""Advice by a section of another trainer, which goes before that of its keys."""

PROGRAMS: Mapping[str, str] = {
    "LLaMA-Factory": "llamafactory-cli stage finetuning_type dataset_dir cutoff_len",
    "NeMo-RL": "policy loss_fn nemo_rl", "Trinity-RFT": "trinity buffer explorer synchronizer",
    "Axolotl": "axolotl base_model sequence_len", "AReaL": "areal gconfig allocation_mode",
    "slime": "hf_checkpoint prompt_data", "ROLL": "actor_train actor_infer", "RLinf": "runner component_placement",
    "SkyRL": "skyrl_train generator", "open-instruct": "open_instruct num_samples_per_prompt_rollout",
    "torchtune": "tune checkpointer", "DeepSpeed": "zero_optimization", "OpenRLHF": "openrlhf pretrain actor_num_nodes",
    "mm_grpo itself": "data.train rollout.prompts_per_step rollout.num_generations run.dir",
    "another stage than GRPO": "sft dpo kto pt sft_trainer fsdp_sft_trainer sft_vlm dpo_vlm max_seq_length"
    " main_generation main_eval assistant_only_loss completion_only_loss loss_type=sigmoid"
    + "".join(f" rlhf_type={name}" for name in ["dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "gkd"]),
}  # fmt: skip
"""Programs whose files are refused, and keys or words of the command line that only they have."""

PREFIXES: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "deepspeed_", "zero_"), _ZERO),
    **dict.fromkeys(("video_", "fps"), _FRAMES),
    **dict.fromkeys(("push_to_hub", "hub_"), "upload the run folder's model/ later (mm-grpo export --push)"),
    **dict.fromkeys(("save_", "log_", "logging_", "eval_", "ddp_", "torch_compile"), NO_SETTING),
    **dict.fromkeys(("reward_model", "soft_", "repetition_"), "write rewards: [{name: ..., option: value}]"),
    **dict.fromkeys(
        ("tensor_parallel", "tensor_model_parallel", "vllm_tensor"), "each process has its own vLLM; leave it out"),
    "vllm_server_": "write rollout.engine: vllm_server, and the servers of `mm-grpo serve` into rollout.server.urls",
    "vllm_": _VLLM,
    "lora_": _LORA,
    "dataloader_": "images are made ahead by two threads of each process",
    **dict.fromkeys(("bnb_", "load_in_", "quant_", "qlora", "hqq_"), _QUANTIZED),
    **dict.fromkeys(("main_process_", "master_", "rdzv_", "machine_", "node_"), _PROCESSES),
    **dict.fromkeys(
        ("ppo_micro_", "log_prob_micro_", "micro_batch_size"), "memory is bounded by optim.max_tokens_per_pack"),
    "kl_": "the weight of the KL term stays: write algorithm.beta",
}  # fmt: skip
"""Advice by the beginning of keys."""


FIELD_OF = {name: path for path, names in FIELDS.items() for name in names.split()}
ADVICE = {name: f"write {path}" for name, path in FIELD_OF.items()} | {
    name: advice for advice, names in REASONS.items() for name in names.split()
}


def field_of(key: str, known: Sequence[str]) -> str | None:
    """Return the path of our field whose value means the same as another trainer's key, else None."""
    homes = () if by_end(key, ADVICE, None) else (path for path in known if path.rpartition(".")[2] == key)
    ours = by_end(key, FIELD_OF, min(homes, key=lambda path: path.count("."), default=None))
    return None if section_advice(key) else ours


def section_advice(path: str) -> str | None:
    """Return the advice on the first section of a key's path that PARTS has, else None."""
    return next((PARTS[part] for part in _fold(path).split(".") if part in PARTS), None)


def by_end(path: str, table: Mapping[str, Value], default: Value) -> Value:
    """Return the value of the longest end of a key's path that a table has, else the default."""
    parts = _fold(path).split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((table[end] for end in ends if end in table), default)


REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "reasoning_accuracy_reward"), "math"),
    **dict.fromkeys(("format", "think_format_reward"), "format"),
    **dict.fromkeys(("repetition", "repetition_penalty", "repetition_penalty_reward"), "repetition_penalty"),
    **dict.fromkeys(("soft_overlong", "get_soft_overlong_punishment"), "soft_overlong"),
}
"""Rewards of other trainers, and ours of the same purpose."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "model.attn": dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "flash_attn", "kernels-community/flash-attn2"),
        "write auto, which is flex_attention on a GPU in bfloat16: completions share their prompt, and a flash kernel"
        " has no mask for that",
    ),
    "model.dtype": {"bf16": "write bfloat16", "fp32": "write float32"},
    "algorithm.loss_type": {
        "gspo": "write grpo, with algorithm.importance_sampling_level: sequence",
        "ppo": "write grpo, which clips as PPO does; advantages are those of groups, without a value model",
    },
    "algorithm.advantage_estimator": {"gae": "gae needs a value model, and mm_grpo has none"},
}
"""Values of other trainers, in lower case, by the field that refuses them."""


def unknown_key(path: str, value: object, known: Sequence[str]) -> list[str]:
    """Return the lines that explain why `path` is no key: one, or one for each leaf of a foreign section.

    `known` are the dotted paths of all fields of the config, in order.
    """
    advice = advice_on(path, known)
    is_section = path.rpartition(".")[2] in {field.partition(".")[0] for field in known}
    if isinstance(value, Mapping) and value and (is_section or advice is None):
        return [line for key, inner in value.items() for line in unknown_key(f"{path}.{key}", inner, known)]
    return [f"{path}: unknown key; {advice or _nearest_advice(path, known)}"]


def advice_on(path: str, known: Sequence[str]) -> str | None:
    """Return advice about another trainer's key, or one of ours in the wrong place; None for any other key."""
    leaf = _fold(path).rpartition(".")[2]
    if path in known:  # a dotted name written as one key
        section, _, name = path.rpartition(".")
        return f"nest it in its section: {section}: {{{name}: ...}}"
    if advice := section_advice(path) or by_end(path, ADVICE, None):
        return advice
    if homes := [home for home in known if home.rpartition(".")[2] == leaf]:
        return f"write {' or '.join(homes)}"
    return next((advice for prefix, advice in PREFIXES.items() if leaf.startswith(prefix)), None)


def _nearest_advice(path: str, known: Sequence[str]) -> str:
    section, _, leaf = path.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = list(dict.fromkeys(p[len(prefix) :].split(".")[0] for p in known if p.startswith(prefix)))
    leaves = {p.rpartition(".")[2]: p for p in reversed(known)}
    for paths in ({name: f"{prefix}{name}" for name in siblings}, leaves):
        if (name := nearest(leaf, paths)) is not None:
            return f"the nearest is {paths[name]}"
    if section and siblings:
        return f"{section} has {', '.join(siblings)}"
    return f"the sections are {', '.join(dict.fromkeys(p.split('.')[0] for p in known))}"


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")
