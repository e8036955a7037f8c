"""What to say about a key, or a value, that mm_grpo does not have: the names of TRL, ms-swift, verl and EasyR1.

`unknown_key` answers with one line: the name this project gives to another trainer's key; the full path
of a right name in the wrong place; a note for what is not in this version; or the nearest known name.
Nothing here knows the config classes: the caller passes the known paths.

To add one more foreign key, add a line to `ADVICE` (a name, or the end of a dotted path, in lower case)
or to `PREFIXES`; a foreign value of a field goes into `VALUES`. A test checks that every dotted path
that an advice names exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_grpo.errors import nearest

_BATCH = "write rollout.prompts_per_step x rollout.num_generations; accumulation is derived"
_ONE_BATCH = f"{_BATCH} (optim.updates_per_step = prompts a step / prompts an update)"
_PACK = "memory is bounded by optim.max_tokens_per_pack; accumulation is derived"
_LATER = "not in this version of mm_grpo yet; leave it out"
_VLLM = "write it into rollout.vllm.engine_kwargs, beside rollout.engine: vllm"
_SERVED = "write rollout.engine: vllm_server, and the servers of `mm-grpo serve` into rollout.server.urls"
_LORA = "write model.lora: {rank: 16, alpha: 32, target_modules: [...]} (null trains every weight)"
_ZERO = (
    "write optim.zero_stage (0, 1 or 2) and optim.offload_optimizer; the rest of DeepSpeed's config is ours"
)
_FSDP = "FSDP is not in this version of mm_grpo; write optim.zero_stage (0, 1 or 2)"
_SAVE = "write run.save_every (steps; 0 is no checkpoint)"
_KEEP = "write run.keep_checkpoints (the newest that are kept)"
_COLUMNS = "map it in data.columns (our name: the dataset's column)"
_HUB = "write data.train: owner/name:config:split"
_MIXTURE = "write data.train: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]"
_DTYPE = "write model.dtype: auto, float32 or bfloat16"
_EPOCHS = "write run.max_steps (steps, not epochs; null is one pass over the data)"
_KL = "write algorithm.beta (the weight of the KL term; 0 is no KL term and no reference model)"
_KL_IN_REWARD = "write algorithm.kl_in_reward (and algorithm.beta, the weight of the KL)"
_KL_KIND = "write algorithm.kl_estimator: k1 (verl's kl), k2 (mse) or k3 (low_var_kl)"
_RESUME = "it is an option of the command: mm-grpo train CONFIG --resume (in Python GRPOTrainer(config, resume=True))"
_SAMPLING = (
    "truncated sampling and penalties are for evaluation; write rollout.eval.{} (completions would come from one"
    " distribution, and the learner's log-probs from another)"
)
_WORLD = "no setting depends on the number of processes; leave it out"

ADVICE: Mapping[str, str] = {
    # ours, where only one value could be meant
    **{name: _SAMPLING.format(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    # TRL and ms-swift: batch
    "per_device_train_batch_size": f"{_BATCH} (prompts_per_step = per-device batch x devices x"
    " steps_per_generation / num_generations)",
    "per_device_eval_batch_size": "evaluation sizes its own batches; leave it out",
    "gradient_accumulation_steps": "accumulation is derived from rollout.prompts_per_step,"
    " optim.updates_per_step and optim.max_tokens_per_pack; leave it out",
    "steps_per_generation": "write optim.updates_per_step (= steps_per_generation /"
    " gradient_accumulation_steps)",
    "generation_batch_size": "write rollout.prompts_per_step (= generation_batch_size / num_generations)",
    "num_generations_eval": "write rollout.eval.num_generations",
    # TRL and ms-swift: the run
    "output_dir": "write run.dir",
    "logging_dir": "write run.dir",
    "overwrite_output_dir": "write run.overwrite",
    "num_train_epochs": _EPOCHS,
    "eval_steps": "write run.eval_every (steps)",
    "eval_strategy": "write run.eval_every (steps; 0 is before and after the run only)",
    "report_to": "write run.trackers (a list)",
    "logging_steps": "every step is logged; leave it out",
    "log_completions": "write run.log_rollouts_every (steps)",
    "data_seed": "write run.seed (one seed orders the data and seeds the sampling)",
    "save_steps": _SAVE,
    "save_strategy": _SAVE,
    "save_total_limit": _KEEP,
    "resume_from_checkpoint": _RESUME,
    # TRL and ms-swift: model
    "model_name_or_path": "write model.path",
    "teacher_model_name_or_path": "write algorithm.reference_path, with algorithm.beta > 0",
    "ref_model": "write algorithm.reference_path, with algorithm.beta > 0",
    "model_id_or_path": "write model.path",
    "model_type": "the model's family is read from its own config; leave it out (model.path names the model)",
    "torch_dtype": _DTYPE,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "attn_impl": "write model.attn",
    "attn_implementation": "write model.attn",
    "freeze_vit": "write model.freeze_vision",
    "freeze_vision_tower": "write model.freeze_vision",
    "use_peft": _LORA,
    "train_type": _LORA,
    "tuner_type": _LORA,
    "lora": _LORA,
    "deepspeed": _ZERO,
    # TRL and ms-swift: data
    "dataset": "write data.train",
    "dataset_name": "write data.train",
    "train_dataset": "write data.train",
    "dataset_config": _HUB,
    "dataset_train_split": _HUB,
    "dataset_test_split": "write data.eval: owner/name:config:split",
    "val_dataset": "write data.eval",
    "eval_dataset": "write data.eval",
    "data.task": "a source is one mapping: write data.train: {task: ...}",
    "shuffle_dataset": "write data.shuffle",
    "dataset_shuffle": "write data.shuffle",
    "train_dataloader_shuffle": "write data.shuffle",
    "dataloader_num_workers": "write data.num_workers (threads)",
    "dataloader_prefetch_factor": "write data.prefetch_bytes; images of the next step are made ahead",
    "remove_unused_columns": "every column reaches the rewards; leave it out",
    "max_prompt_length": "write data.max_prompt_length (expanded tokens; a longer prompt is never cut)",
    "max_length": "write data.max_prompt_length and rollout.max_completion_length",
    "truncation_strategy": "write data.on_overlong (a longer prompt is never cut)",
    "system": "write data.system_prompt",
    "enable_thinking": "write data.chat_template_kwargs: {enable_thinking: ...}",
    "apply_chat_template_kwargs": "write data.chat_template_kwargs",
    "interleave_prob": _MIXTURE,
    "dataset_mixer": _MIXTURE,
    "datasets": _MIXTURE,
    "image_folder": "write data.image_dir",
    "source.split": "write it into the path: folder:split, or owner/name:config:split of the hub",
    "source.name": "write it into the path: owner/name:config:split of the hub",
    "source.probability": "write weight (shares are weights over their sum)",
    "source.answer": "write columns: {answer: ...}",
    "max_new_tokens": "write rollout.max_completion_length",
    "response_length": "write rollout.max_completion_length",
    # TRL and ms-swift: rewards and algorithm
    "reward_funcs": "write rewards (a list of names or mappings)",
    "reward_weights": "give each entry of rewards its own weight: rewards: [{name: ..., weight: 1.0}]",
    "external_plugins": "write the file into rewards: rewards: [path/to/file.py:function]",
    "reward_function": "write rewards: [path/to/file.py:function]",
    "custom_reward_function.path": "write rewards: [path/to/file.py:function]",
    "custom_reward_function.name": "write rewards: [path/to/file.py:function]",
    **dict.fromkeys(
        ("use_kl_prcp", "kl_prcp_coef"), "write algorithm.perception_coef (0 is no perception term)"
    ),
    **dict.fromkeys(
        ("aug_entropy_loss_coef", "ori_entropy_loss_coef"),
        "write algorithm.perception_entropy_coef (of both entropies)",
    ),
    "black_prob": "write algorithm.perception_mask_ratio",
    "use_liger_kernel": _LATER,
    "use_liger_loss": _LATER,
    "normalize_advantages": "write algorithm.scale_rewards: batch, or"
    " algorithm.advantage_estimator: reinforce_plus_plus_baseline",
    "dynamic_sample": "write rollout.dynamic_sampling (and rollout.max_attempts)",
    "max_resample_times": "write rollout.max_attempts (= max_resample_times + 1: the first attempt counts)",
    "use_vllm": "write rollout.engine: vllm",
    "vllm_mode": "write rollout.engine: vllm (colocate) or vllm_server (server)",
    "vllm_gpu_memory_utilization": "write rollout.vllm.gpu_memory_utilization",
    **dict.fromkeys(
        ("tensor_parallel_size", "vllm_tensor_parallel_size", "tensor_model_parallel_size"),
        "each process has a vLLM of its own here, and one engine over several processes is not in this version yet;"
        " leave it out",
    ),
    "vllm_max_model_length": "write rollout.vllm.max_model_len",
    "vllm_max_model_len": "write rollout.vllm.max_model_len",
    "vllm_enable_sleep_mode": "write rollout.vllm.sleep_level (0, 1 or 2)",
    "vllm_limit_mm_per_prompt": "write rollout.vllm.max_images",
    "vllm_importance_sampling_correction": "write algorithm.importance_sampling_mode (none is no correction)",
    "vllm_importance_sampling_mode": "write algorithm.importance_sampling_mode",
    "vllm_importance_sampling_cap": "write algorithm.importance_sampling_clip_max",
    "vllm_importance_sampling_clip_max": "write algorithm.importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "write algorithm.importance_sampling_clip_min",
    "vllm_group_port": "ports are chosen by the transfer (rollout.server.transfer)",
    "vllm_structured_outputs_regex": _LATER,
    "enforce_eager": _VLLM,
    "enable_chunked_prefill": _VLLM,
    "max_num_batched_tokens": _VLLM,
    "warmup_ratio": "write optim.warmup_steps (= warmup_ratio x run.max_steps)",
    "lr_warmup_ratio": "write optim.warmup_steps (= lr_warmup_ratio x run.max_steps)",
    "lr_warmup_steps": "write optim.warmup_steps",
    "adam_beta": "write optim.adam_beta1 and optim.adam_beta2",
    # verl and EasyR1
    "train_files": "write data.train",
    "val_files": "write data.eval",
    "train_batch_size": "write rollout.prompts_per_step",
    "rollout_batch_size": "write rollout.prompts_per_step",
    "mini_rollout_batch_size": "write rollout.prompts_per_step",
    "gen_batch_size": "write rollout.prompts_per_step",
    "max_response_length": "write rollout.max_completion_length",
    "filter_overlong_prompts": "write data.on_overlong: drop",
    "data.truncation": "write data.on_overlong (a longer prompt is never cut)",
    "prompt_key": _COLUMNS,
    "answer_key": _COLUMNS,
    "image_key": _COLUMNS,
    "images_key": _COLUMNS,
    "model.model_path": "write model.path",
    "model_path": "write model.path",
    "model_dtype": _DTYPE,
    "enable_gradient_checkpointing": "write optim.gradient_checkpointing",
    "optim.lr": "write optim.learning_rate",
    "lr": "write optim.learning_rate",
    "optim.betas": "write optim.adam_beta1 and optim.adam_beta2",
    "optim.eps": "write optim.adam_epsilon",
    "lr_scheduler": "write optim.lr_scheduler_type",
    "grad_clip": "write optim.max_grad_norm",
    "ppo_mini_batch_size": _ONE_BATCH,
    "actor.global_batch_size": _ONE_BATCH,
    "ppo_micro_batch_size": _PACK,
    "ppo_micro_batch_size_per_gpu": _PACK,
    "log_prob_micro_batch_size_per_gpu": _PACK,
    "micro_batch_size_per_device_for_update": _PACK,
    "micro_batch_size_per_device_for_experience": _PACK,
    "ppo_max_token_len_per_gpu": "write optim.max_tokens_per_pack",
    "ppo_epochs": "write algorithm.num_iterations",
    "clip_ratio": "write algorithm.epsilon",
    "clip_ratio_low": "write algorithm.epsilon",
    "clip_ratio_high": "write algorithm.epsilon_high",
    "clip_ratio_c": "write algorithm.delta",
    "clip_ratio_dual": "write algorithm.delta",
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "use_kl_loss": _KL,
    "use_kl_in_reward": _KL_IN_REWARD,
    "kl_penalty": _KL_KIND,
    "kl_loss_type": _KL_KIND,
    "disable_kl": _KL,
    "entropy_coeff": "write algorithm.entropy_coef",
    "loss_agg_mode": "write algorithm.loss_type",
    "norm_adv_by_std_in_grpo": "write algorithm.scale_rewards (group or none)",
    "adv_estimator": "write algorithm.advantage_estimator (grpo, rloo, reinforce_plus_plus_baseline or maxrl)",
    "filter_groups.enable": "write rollout.dynamic_sampling",
    "filter_groups.max_num_gen_batches": "write rollout.max_attempts",
    "online_filtering": "write rollout.dynamic_sampling (and rollout.max_attempts)",
    "rollout.n": "write rollout.num_generations",
    "n_samples_per_prompt": "write rollout.num_generations",
    "val_kwargs.n": "write rollout.eval.num_generations",
    "val_override_config.n": "write rollout.eval.num_generations",
    "total_epochs": _EPOCHS,
    "total_training_steps": "write run.max_steps",
    "test_freq": "write run.eval_every (steps)",
    "val_freq": "write run.eval_every (steps)",
    "save_freq": _SAVE,
    "save_limit": _KEEP,
    "resume_mode": _RESUME,
    "resume_from_path": _RESUME,
    "default_local_dir": "write run.dir",
    "save_checkpoint_path": "write run.dir",
    "experiment_name": "write run.dir",
    "trainer.logger": "write run.trackers (a list)",
    "nnodes": _WORLD,
    "n_gpus_per_node": _WORLD,
}

PREFIXES: Mapping[str, str] = {
    "vllm_server_": _SERVED,
    "vllm_": _VLLM,
    "sglang_": "SGLang is not in mm_grpo; write rollout.engine: transformers, vllm or vllm_server",
    "lora_": _LORA,
    "fsdp": _FSDP,
    "deepspeed_": _ZERO,
    "zero_": _ZERO,
    "video_": "videos are not in this version of mm_grpo yet; leave it out",
    "fps": "videos are not in this version of mm_grpo yet; leave it out",
    "save_": _LATER,
}

NO_ZERO_3 = (
    "stage 3 shares out the weights themselves, and a rollout engine in the trainer's processes needs them whole at"
    " every step. Where memory is short, set optim.offload_optimizer=true, optim.gradient_checkpointing=true or a"
    " lower optim.max_tokens_per_pack"
)

VALUES: Mapping[str, Mapping[str, str]] = {
    "optim.zero_stage": {"3": NO_ZERO_3},
    "model.attn": {
        **dict.fromkeys(
            (
                "flash_attention_2",
                "flash_attention_3",
                "flash_attn",
                "flash_attn_2",
                "kernels-community/flash-attn2",
            ),
            "write auto, which is flex_attention on a GPU in bfloat16: completions share their prompt, and a flash"
            " kernel has no mask for that",
        ),
    },
    "algorithm.importance_sampling_level": {
        "gspo": "write sequence, which is GSPO, with algorithm.loss_type: grpo"
    },
    "algorithm.scale_rewards": {"gdpo": "write algorithm.multi_objective_aggregation: normalize_then_sum"},
    "algorithm.loss_type": {
        "geo_mean": "write gmpo",
        "gspo": "write grpo, with algorithm.importance_sampling_level: sequence",
        "vanilla": "write grpo or dapo",
        "dppo": "write dppo_tv or dppo_kl",
    },
    "algorithm.advantage_estimator": {
        "group_norm": "write grpo",
        "gdpo": "write algorithm.multi_objective_aggregation: normalize_then_sum",
        "dr_grpo": "write grpo, with algorithm.scale_rewards: none",
        "leave_one_out": "write rloo",
        "reinforce_baseline": "write reinforce_plus_plus_baseline",
        "reinforce_plus_plus": "write reinforce_plus_plus_baseline, which subtracts the group's mean (ms-swift's"
        " reinforce_plus_plus; verl's, without that mean, is not in mm_grpo)",
        "gae": "gae needs a value model, and mm_grpo has none",
        "gspo": "write grpo, with algorithm.loss_type: grpo and algorithm.importance_sampling_level: sequence",
    },
}
"""Values of other trainers, in lower case, by the field that refuses them."""

# Sections of other trainers whose sampling settings are ours for evaluation.
_EVALUATION = ("eval", "validation", "val_kwargs", "val_override_config")


def unknown_key(path: str, value: object, known: Sequence[str]) -> list[str]:
    """The lines that explain why `path` is no key: one, or one for each leaf of a foreign section.

    `known` are the dotted paths of every field in the tree, in order.
    """
    if isinstance(value, Mapping) and value and not _is_known(path, known):
        return [line for key, inner in value.items() for line in unknown_key(f"{path}.{key}", inner, known)]
    advice = _advice(path, known)
    field = advice.removeprefix("write ")
    note = VALUES.get(field, {}).get(str(value).casefold())  # the value has another name here as well
    return [f"{path}: unknown key; {advice}{f'; {value} there: {note}' if note else ''}"]


def explains(name: str, known: Sequence[str]) -> bool:
    """Whether a name, or the end of a dotted one, is another trainer's with an advice of its own, or one of ours."""
    leaf = _fold(name).rpartition(".")[2]
    return _is_known(name, known) or any(leaf.startswith(prefix) for prefix in PREFIXES)


def _advice(path: str, known: Sequence[str]) -> str:
    parts = _fold(path).split(".")
    leaf = parts[-1]
    if path in known:  # a dotted name written as one key
        section, _, name = path.rpartition(".")
        return f"nest it in its section: {section}: {{{name}: ...}}"
    for start in range(len(parts)):
        advice = ADVICE.get(".".join(parts[start:]))
        if advice is not None:
            return advice
    homes = [home for home in known if home.rpartition(".")[2] == leaf]
    if homes:
        if len(homes) > 1 and any(part in _EVALUATION for part in parts):
            homes.reverse()
        return f"write {' or '.join(homes)}"
    for prefix, advice in PREFIXES.items():
        if leaf.startswith(prefix):
            return advice
    return _nearest_advice(path, known)


def _nearest_advice(path: str, known: Sequence[str]) -> str:
    section, _, leaf = path.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = list(dict.fromkeys(p[len(prefix) :].split(".")[0] for p in known if p.startswith(prefix)))
    found = nearest(leaf, siblings)
    if found is not None:
        return f"the nearest is {prefix}{found}"
    leaves = {p.rpartition(".")[2]: p for p in reversed(known)}
    found = nearest(leaf, leaves)
    if found is not None:
        return f"the nearest is {leaves[found]}"
    if section and siblings:
        return f"{section} has {', '.join(siblings)}"
    return f"the sections are {', '.join(dict.fromkeys(p.split('.')[0] for p in known))}"


def _is_known(path: str, known: Sequence[str]) -> bool:
    """Whether the key itself can be explained, so that its contents need not be."""
    parts = _fold(path).split(".")
    return (
        path in known
        or any(".".join(parts[start:]) in ADVICE for start in range(len(parts)))
        or any(home.rpartition(".")[2] == parts[-1] for home in known)
    )


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")
