"""The keys of other trainers that `convert` takes over as they are, and those that have no counterpart here.

Keys that need arithmetic, or that depend on others, are in convert. A key that is in none of these tables is
answered by other_trainers. To add one: DIRECT where key and meaning are one to one, else NO_COUNTERPART.
"""

from __future__ import annotations

from collections.abc import Mapping

_SAME = {
    "optim": (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
        "gradient_checkpointing",
    ),
    "rollout": ("num_generations", "max_completion_length", "temperature"),
    "algorithm": (
        "advantage_estimator", "multi_objective_aggregation", "loss_type", "importance_sampling_level", "beta",
        "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos",
        "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "kl_in_reward", "sync_ref_model",
        "ref_model_mixup_alpha",
        "off_policy_mask_threshold", "scale_rewards", "num_iterations", "mask_truncated_completions", "entropy_coef",
        "top_entropy_quantile",
    ),
    "data": ("chat_template_kwargs", "max_prompt_length", "min_pixels", "max_pixels", "columns"),
    "model": ("trust_remote_code",),
    "run": ("seed",),
}  # fmt: skip

DIRECT: Mapping[str, str] = {
    **{name: f"{section}.{name}" for section, names in _SAME.items() for name in names},
    # TRL
    "model_name_or_path": "model.path",
    "attn_implementation": "model.attn",
    "output_dir": "run.dir",
    "overwrite_output_dir": "run.overwrite",
    "save_total_limit": "run.keep_checkpoints",
    "shuffle_dataset": "data.shuffle",
    "dataloader_num_workers": "data.num_workers",
    "num_generations_eval": "rollout.eval.num_generations",
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "vllm_max_model_length": "rollout.vllm.max_model_len",
    "vllm_importance_sampling_clip_max": "algorithm.importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "algorithm.importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "algorithm.importance_sampling_clip_min",
    # ms-swift
    "model": "model.path",
    "model_id_or_path": "model.path",
    "attn_impl": "model.attn",
    "freeze_vit": "model.freeze_vision",
    "freeze_vision_tower": "model.freeze_vision",
    "dataset": "data.train",
    "val_dataset": "data.eval",
    "dataset_shuffle": "data.shuffle",
    "system": "data.system_prompt",
    "vllm_max_model_len": "rollout.vllm.max_model_len",
    "dynamic_sample": "rollout.dynamic_sampling",
    # verl and EasyR1, by the end of the dotted path
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.rollout_batch_size": "rollout.prompts_per_step",
    "data.max_response_length": "rollout.max_completion_length",
    "data.image_dir": "data.image_dir",
    "data.seed": "run.seed",
    "data.shuffle": "data.shuffle",
    "data.system_prompt": "data.system_prompt",
    "actor_rollout_ref.model.path": "model.path",
    "actor.model.model_path": "model.path",
    "actor.model.freeze_vision_tower": "model.freeze_vision",
    "enable_gradient_checkpointing": "optim.gradient_checkpointing",
    "actor.optim.lr": "optim.learning_rate",
    "actor.optim.weight_decay": "optim.weight_decay",
    "optim.lr_warmup_steps": "optim.warmup_steps",
    "actor.grad_clip": "optim.max_grad_norm",
    "actor.max_grad_norm": "optim.max_grad_norm",
    "actor.ppo_epochs": "algorithm.num_iterations",
    "actor.clip_ratio": "algorithm.epsilon",
    "actor.clip_ratio_low": "algorithm.epsilon",
    "actor.clip_ratio_high": "algorithm.epsilon_high",
    "actor.clip_ratio_c": "algorithm.delta",
    "actor.clip_ratio_dual": "algorithm.delta",
    "actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.rollout.n": "rollout.num_generations",
    "worker.rollout.n": "rollout.num_generations",
    "rollout.temperature": "rollout.temperature",
    "rollout.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "val_kwargs.temperature": "rollout.eval.temperature",
    "val_kwargs.top_p": "rollout.eval.top_p",
    "val_kwargs.n": "rollout.eval.num_generations",
    "val_override_config.temperature": "rollout.eval.temperature",
    "val_override_config.top_p": "rollout.eval.top_p",
    "val_override_config.n": "rollout.eval.num_generations",
    "trainer.total_training_steps": "run.max_steps",
    "trainer.max_steps": "run.max_steps",
    "trainer.test_freq": "run.eval_every",
    "trainer.val_freq": "run.eval_every",
    "trainer.save_freq": "run.save_every",
    "trainer.save_limit": "run.keep_checkpoints",
    "trainer.default_local_dir": "run.dir",
    "trainer.save_checkpoint_path": "run.dir",
}
"""Our field for a key, or for the end of a dotted path, where the value means the same."""

_HUB = "mm_grpo uploads nothing; upload the run folder's model/ when the run has ended"
_LOGS = "the log has every step, in metrics.jsonl and on the terminal"
_LAUNCH = "processes are those of --processes, torchrun or accelerate launch; no setting depends on them"
_LOADER = "rows are read by threads of their own (data.num_workers)"
_DISTRIBUTED = "several processes train under ZeRO; set optim.zero_stage and optim.offload_optimizer"
_EVALUATION = "evaluation sizes its own batches, and runs before, after and every run.eval_every steps"
_MOE = "mixture-of-experts models are not trained by mm_grpo"
_QUANTIZED = "weights are not quantized in mm_grpo"
_LORA_KIND = "model.lora has rank, alpha, target_modules and vision alone"
_COMPILE = "the model is not compiled in mm_grpo"
_MEMORY = "memory is bounded by optim.max_tokens_per_pack"
_OPTIMIZER = "the optimizer is AdamW in fp32"
_LABELS = "a setting for training on labels; GRPO has none"
_ENTROPY = "the entropy bonus has a constant weight, algorithm.entropy_coef"
_ENGINE = "the rollout engines are transformers, vllm and vllm_server, without this option"
_NUMBERS = "weights are in model.dtype, the optimizer in fp32"
_CHECKPOINT = "a checkpoint holds all that a run needs to go on, bit for bit"
_TASK = "the command says what is done: mm-grpo train, eval or check"

NO_COUNTERPART: Mapping[str, str] = {
    **dict.fromkeys(
        ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
         "hub_revision", "log_completions_hub_repo", "trackio_space_id", "trackio_bucket_id",
         "trackio_static_space_id"),
        _HUB,
    ),
    **dict.fromkeys(
        ("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
         "log_level", "log_level_replica", "disable_tqdm", "run_name", "project", "include_num_input_tokens_seen",
         "num_completions_to_print", "log_unique_prompts", "log_multimodal", "log_completions", "logging_dir"),
        _LOGS,
    ),
    **dict.fromkeys(
        ("dataloader_drop_last", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
         "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns",
         "train_sampling_strategy",
         "length_column_name", "ignore_data_skip", "dataset_num_proc"),
        _LOADER,
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config", "ds3_gather_for_generation",
         "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
         "ddp_timeout", "average_tokens_across_devices"),
        _DISTRIBUTED,
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
         "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "eval_delay", "eval_on_start",
         "bf16_full_eval", "fp16_full_eval"),
        _EVALUATION,
    ),
    **dict.fromkeys(("router_aux_loss_coef",), _MOE),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        _QUANTIZED,
    ),
    **dict.fromkeys(
        ("lora_dropout", "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora"),
        _LORA_KIND,
    ),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILE),
    **dict.fromkeys(
        ("torch_empty_cache_steps", "auto_find_batch_size", "gradient_checkpointing_kwargs", "use_cache",
         "pad_to_multiple_of", "skip_memory_metrics", "use_liger_kernel", "liger_kernel_config", "use_liger_loss"),
        _MEMORY,
    ),
    **dict.fromkeys(("optim", "optim_args", "optim_target_modules", "lr_scheduler_kwargs"), _OPTIMIZER),
    **dict.fromkeys(("label_smoothing_factor", "label_names", "neftune_noise_alpha"), _LABELS),
    **dict.fromkeys(
        ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        _ENTROPY,
    ),
    **dict.fromkeys(
        ("generation_kwargs", "cache_implementation", "vllm_model_impl", "use_transformers_continuous_batching",
         "transformers_continuous_batching_config", "use_transformers_paged"),
        _ENGINE,
    ),
    **dict.fromkeys(("tf32", "cast_lm_head_to_fp32", "fp16", "model_init_kwargs"), _NUMBERS),
    **dict.fromkeys(
        ("save_only_model", "save_on_each_node", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint",
         "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        _CHECKPOINT + "; the best evaluation's is kept (run.headline says what is best)",
    ),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "rlhf_type", "debug"), _TASK),
    **dict.fromkeys(("local_rank", "use_cpu"), f"{_LAUNCH} (model.device: cpu trains on the CPU)"),
    "full_determinism": "a run with the same seed is the same run",
    "disable_dropout": "dropout is always off",
    "use_bias_correction_kl": "the KL term has its own gradient (docs/algorithms.md), without this correction",
    "data_seed": "one seed, run.seed, orders the data and seeds the sampling",
    "model_revision": "download that revision, and name its folder in model.path",
    "dataset_streaming": "rows are read from memory-mapped files; nothing is streamed",
    "ignore_bias_buffers": "a workaround for DDP; not needed",
    "reward_model_name_or_path": "write rewards: [{name: reward_model, model: ...}]",
}  # fmt: skip
"""Why a key of TRL, of transformers' TrainingArguments or of ms-swift is left out."""

IGNORED_AT: Mapping[str, tuple[object, ...]] = {
    "top_p": (1.0, 1), "top_k": (0, None, -1), "min_p": (None, 0.0), "repetition_penalty": (1.0, 1),
    "vllm_tensor_parallel_size": (1,), "resume_from_checkpoint": (None, False), "use_peft": (False,),
    "deepspeed": (None,), "fsdp": (None, "", []), "load_in_4bit": (False,), "load_in_8bit": (False,),
    "push_to_hub": (False,), "use_liger_kernel": (False,), "lora_dropout": (0, 0.0), "torch_compile": (False,),
}  # fmt: skip
"""Values at which a key asks for nothing that differs here."""
