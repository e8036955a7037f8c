"""One table of keys that mm_grpo does not have: those of TRL, ms-swift, verl and EasyR1.

A row is our field, where the value means the same, or what is said about the key. `unknown_key` answers with it, or
with the full path of a right name in the wrong place, or with the nearest known name; `convert` takes the value over.
Nothing here knows the config classes: the caller passes the known paths.

To add a key: its name, or the end of a dotted path, in lower case, behind our field in FIELDS (or SAME), else behind
the words in REASONS; a key in both is taken over, and the words are what is said. A key that begins as one of PREFIXES
needs no row. A foreign value of a field goes into VALUES, a reward's name into REWARDS. A test checks that every path
that a row names exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mm_grpo.errors import nearest

SAME = (
    "model.trust_remote_code data.columns data.min_pixels data.max_pixels data.max_prompt_length "
    "data.chat_template_kwargs rollout.temperature algorithm.advantage_estimator "
    "algorithm.multi_objective_aggregation algorithm.loss_type algorithm.importance_sampling_level algorithm.beta "
    "algorithm.kl_in_reward "
    "algorithm.off_policy_mask_threshold algorithm.scale_rewards algorithm.mask_truncated_completions "
    "algorithm.top_entropy_quantile algorithm.loss_options.sapo_temperature_pos "
    "algorithm.loss_options.sapo_temperature_neg algorithm.loss_options.vespo_k_pos "
    "algorithm.loss_options.vespo_lambda_pos algorithm.loss_options.vespo_k_neg "
    "algorithm.loss_options.vespo_lambda_neg optim.weight_decay optim.adam_beta1 optim.adam_beta2 "
    "optim.adam_epsilon run.seed"
)
"""Our fields whose last name is theirs."""

FIELDS: Mapping[str, str] = {
    **{path: path.rpartition(".")[2] for path in SAME.split()},
    "model.path": "model_name_or_path model_id_or_path model actor_rollout_ref.model.path actor.model.model_path",
    "model.attn": "attn_implementation attn_impl",
    "model.freeze_vision": "freeze_vit freeze_vision_tower",
    "data.train": "dataset data.train_files",
    "data.eval": "val_dataset data.val_files",
    "data.image_dir": "data.image_dir",
    "data.shuffle": "shuffle_dataset dataset_shuffle data.shuffle",
    "data.system_prompt": "system data.system_prompt",
    "rollout.prompts_per_step": "data.train_batch_size data.rollout_batch_size",
    "rollout.num_generations": "num_generations actor_rollout_ref.rollout.n worker.rollout.n",
    "rollout.max_completion_length": "max_completion_length data.max_response_length",
    "rollout.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "rollout.vllm.max_model_len": "vllm_max_model_length vllm_max_model_len",
    "rollout.eval.num_generations": "num_generations_eval val_kwargs.n val_override_config.n",
    "rollout.eval.temperature": "val_kwargs.temperature val_override_config.temperature",
    "rollout.eval.top_p": "val_kwargs.top_p val_override_config.top_p",
    "algorithm.epsilon": "epsilon clip_ratio clip_ratio_low",
    "algorithm.epsilon_high": "epsilon_high clip_ratio_high",
    "algorithm.delta": "delta clip_ratio_c clip_ratio_dual",
    "algorithm.entropy_coef": "entropy_coef entropy_coeff",
    "algorithm.num_iterations": "num_iterations actor.ppo_epochs",
    "algorithm.importance_sampling_clip_max": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "algorithm.importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
    "optim.learning_rate": "learning_rate actor.optim.lr",
    "optim.max_grad_norm": "max_grad_norm actor.grad_clip",
    "optim.warmup_steps": "optim.lr_warmup_steps",
    "optim.gradient_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "run.dir": "output_dir default_local_dir save_checkpoint_path",
    "run.overwrite": "overwrite_output_dir",
    "run.max_steps": "trainer.total_training_steps trainer.max_steps",
    "run.eval_every": "test_freq val_freq",
    "run.save_every": "save_freq",
    "run.keep_checkpoints": "save_total_limit save_limit",
}  # fmt: skip
"""Our field, and the keys whose value means the same."""

_SAMPLING = (
    "truncated sampling and penalties are for evaluation; write rollout.eval.{} (completions would come from one"
    " distribution, and the learner's log-probs from another)"
)
_SERVED = "write rollout.engine: vllm_server, and the servers of `mm-grpo serve` into rollout.server.urls"
_VLLM = "write it into rollout.vllm.engine_kwargs, beside rollout.engine: vllm"
_LORA = "write model.lora: {rank: 16, alpha: 32, target_modules: [...]} (null trains every weight)"
_ZERO = "write optim.zero_stage (0, 1 or 2) and optim.offload_optimizer; there is no FSDP, and no config of DeepSpeed"
_HUB = (
    "mm_grpo uploads nothing; upload the run folder's model/ when the run has ended (mm-grpo export --push)"
)
_IMAGES = "images are made ahead by two threads of each process"
_QUANTIZED = "write model.quantization: nf4, beside model.lora: {rank: 16} (4 bits; there is no other kind)"
_VIDEO = "videos are not in this version of mm_grpo yet; leave it out"
_NONE = "mm_grpo has no such setting; leave it out"

REASONS: Mapping[str, str] = {
    # batches and steps
    **{_SAMPLING.format(name): name for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    "write rollout.prompts_per_step (= per-device batch x devices x steps_per_generation / num_generations)":
        "per_device_train_batch_size generation_batch_size",
    "accumulation is derived from rollout.prompts_per_step, optim.updates_per_step and optim.max_tokens_per_pack; leave"
    " it out": "gradient_accumulation_steps",
    "write optim.updates_per_step (= steps_per_generation / gradient_accumulation_steps)": "steps_per_generation",
    "write rollout.prompts_per_step": "train_batch_size rollout_batch_size mini_rollout_batch_size gen_batch_size",
    "write rollout.prompts_per_step and optim.updates_per_step (= prompts a step / prompts an update)":
        "ppo_mini_batch_size actor.global_batch_size",
    "memory is bounded by optim.max_tokens_per_pack; accumulation is derived":
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu auto_find_batch_size"
        " micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience",
    "write optim.max_tokens_per_pack": "ppo_max_token_len_per_gpu",
    "write run.max_steps (steps, not epochs; null is one pass over the data)": "num_train_epochs total_epochs",
    "write run.max_steps": "total_training_steps",
    # the run
    "write run.dir": "experiment_name",
    "write run.eval_every (steps; 0 is before and after the run only)": "eval_steps eval_strategy test_freq val_freq",
    "write run.trackers (a list)": "report_to trainer.logger",
    "write run.save_every (steps; 0 is no checkpoint)": "save_steps save_strategy save_freq",
    "write run.keep_checkpoints (the newest that are kept)": "save_total_limit save_limit",
    "the best evaluation's checkpoint is kept (run.headline says what is best)":
        "load_best_model_at_end metric_for_best_model greater_is_better",
    "it is an option of the command: mm-grpo train CONFIG --resume (in Python GRPOTrainer(config, resume=True))":
        "resume_from_checkpoint resume_mode resume_from_path",
    "no setting depends on the number of processes; leave it out (mm-grpo train CONFIG --processes N)":
        "nnodes n_gpus_per_node nproc_per_node local_rank average_tokens_across_devices",
    "it is the first argument of the command: mm-grpo train CONFIG": "config config_file",
    "one seed, run.seed, orders the data and seeds the sampling": "data_seed full_determinism",
    "the command says what is done: mm-grpo train, eval or check": "do_train do_eval do_predict rlhf_type debug",
    "write model.device": "use_cpu",
    _HUB: "log_completions_hub_repo",
    _NONE:
        "torch_empty_cache_steps gradient_checkpointing_kwargs use_cache pad_to_multiple_of skip_memory_metrics"
        " use_liger_kernel liger_kernel_config use_liger_loss disable_tqdm run_name project num_completions_to_print"
        " include_num_input_tokens_seen parallelism_config accelerator_config ds3_gather_for_generation"
        " per_device_eval_batch_size prediction_loss_only include_for_metrics batch_eval_metrics bf16_full_eval"
        " fp16_full_eval enable_jit_checkpoint restore_callback_states_from_checkpoint tf32 cast_lm_head_to_fp32"
        " model_init_kwargs optim optim_args optim_target_modules lr_scheduler_kwargs disable_dropout"
        " label_smoothing_factor label_names neftune_noise_alpha ignore_bias_buffers router_aux_loss_coef"
        " generation_kwargs cache_implementation use_transformers_continuous_batching use_transformers_paged"
        " transformers_continuous_batching_config use_bias_correction_kl use_adaptive_entropy entropy_coef_min"
        " entropy_coef_max entropy_coef_delta entropy_target sync_ref_model ref_model_mixup_alpha"
        " ref_model_sync_steps",
    # the model and the optimizer
    "write model.path": "model.model_path model_path",
    "write algorithm.reference_path, with algorithm.beta > 0": "teacher_model_name_or_path ref_model",
    "the model's family is read from its own config; leave it out (model.path names the model)": "model_type",
    "write model.dtype: auto, float32 or bfloat16": "torch_dtype bf16 fp16 model_dtype",
    _LORA: "use_peft train_type tuner_type lora",
    "model.lora has rank, alpha, target_modules and vision alone":
        "lora_dropout lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora",
    _ZERO: "deepspeed",
    "download that revision, and name its folder in model.path": "model_revision",
    _QUANTIZED: "load_in_8bit load_in_4bit use_bnb_nested_quant quantization_config quant_bits quant_method qlora",
    "write optim.warmup_steps (= the share x run.max_steps)": "warmup_ratio lr_warmup_ratio",
    "write optim.warmup_steps": "lr_warmup_steps",
    "write optim.adam_beta1 and optim.adam_beta2": "adam_beta optim.betas",
    "write optim.adam_epsilon": "optim.eps",
    "write optim.learning_rate": "optim.lr lr",
    "write optim.lr_scheduler_type": "lr_scheduler",
    "write optim.max_grad_norm": "grad_clip",
    # the data
    "write data.train": "dataset_name train_dataset train_files",
    "write data.eval": "eval_dataset val_files",
    "write it into the path: folder:split, or owner/name:config:split of the hub":
        "dataset_config dataset_train_split dataset_test_split source.split source.name",
    "write data.train: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]":
        "interleave_prob dataset_mixer datasets",
    "a source is one mapping: write data.train: {task: ...}": "data.task",
    "write weight (shares are weights over their sum)": "source.probability",
    "write columns: {answer: ...}": "source.answer",
    "write data.shuffle": "train_dataloader_shuffle",
    _IMAGES:
        "num_workers train_sampling_strategy length_column_name ignore_data_skip dataset_num_proc dataset_streaming",
    "every column reaches the rewards; leave it out": "remove_unused_columns",
    "write data.max_prompt_length (expanded tokens; a longer prompt is never cut)": "max_prompt_length",
    "write data.max_prompt_length and rollout.max_completion_length": "max_length",
    "write data.on_overlong (a longer prompt is never cut)":
        "truncation_strategy data.truncation filter_overlong_prompts",
    "write data.chat_template_kwargs: {enable_thinking: ...}": "enable_thinking apply_chat_template_kwargs",
    "write data.image_dir": "image_folder",
    "write data.max_pixels (tokens x 784 in Qwen2.5-VL, x 1,024 in Qwen3-VL)": "image_max_token_num",
    "map it in data.columns (our name: the dataset's column)": "prompt_key answer_key image_key images_key",
    "write rollout.max_completion_length": "max_new_tokens response_length max_response_length",
    # rewards and the algorithm
    "write rewards (a list of names or mappings)": "reward_funcs",
    "give each entry of rewards its own weight: rewards: [{name: ..., weight: 1.0}]": "reward_weights",
    "write rewards: [path/to/file.py:function]":
        "external_plugins reward_function custom_reward_function.path custom_reward_function.name",
    "write rewards: [{name: reward_model, model: ...}]": "reward_model_name_or_path",
    "write algorithm.perception_coef (0 is no perception term)": "use_kl_prcp kl_prcp_coef",
    "write algorithm.loss_options: {perception_entropy_coef: ...} (of both entropies)":
        "perception_entropy_coef aug_entropy_loss_coef ori_entropy_loss_coef",
    "write algorithm.loss_options: {perception_mask_ratio: ...}": "black_prob perception_mask_ratio",
    "write algorithm.scale_rewards: batch, or algorithm.advantage_estimator: reinforce_plus_plus_baseline":
        "normalize_advantages",
    "write algorithm.scale_rewards (group or none)": "norm_adv_by_std_in_grpo",
    "write algorithm.advantage_estimator (grpo, rloo, reinforce_plus_plus_baseline or maxrl)": "adv_estimator",
    "write algorithm.loss_type": "loss_agg_mode",
    "write algorithm.num_iterations": "ppo_epochs",
    "write algorithm.beta (the weight of the KL term; 0 is no KL term and no reference model)":
        "kl_coef kl_loss_coef use_kl_loss disable_kl",
    "write algorithm.kl_in_reward (and algorithm.beta, the weight of the KL)": "use_kl_in_reward",
    "write algorithm.kl_estimator: k1 (verl's kl), k2 (mse) or k3 (low_var_kl)": "kl_penalty kl_loss_type",
    "write rollout.max_attempts (above 1 groups of equal rewards are replaced)":
        "dynamic_sample online_filtering filter_groups.enable dynamic_sampling filter_groups.max_num_gen_batches",
    "write rollout.max_turns (= max_tool_calling_iterations + 1)": "max_tool_calling_iterations",
    "write rollout.max_attempts (= max_resample_times + 1: the first attempt counts)": "max_resample_times",
    # the engine
    "write rollout.num_generations": "rollout.n n_samples_per_prompt",
    "write rollout.engine: vllm (colocate) or vllm_server (server)": "use_vllm vllm_mode",
    "each process has a vLLM of its own here, and one engine over several processes is not in this version yet; leave"
    " it out": "tensor_parallel_size vllm_tensor_parallel_size tensor_model_parallel_size",
    "write rollout.vllm.sleep_level (0, 1 or 2)": "vllm_enable_sleep_mode",
    "write rollout.vllm.max_images": "vllm_limit_mm_per_prompt",
    "write algorithm.importance_sampling_mode (none is no correction)":
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "ports are chosen by the transfer (rollout.server.transfer)": "vllm_group_port",
    _VLLM: "enforce_eager enable_chunked_prefill max_num_batched_tokens",
}  # fmt: skip
"""What is said, and the keys about which."""

PREFIXES: Mapping[str, str] = {
    **dict.fromkeys(("fsdp", "deepspeed_", "zero_", "ddp_"), _ZERO),
    **dict.fromkeys(("video_", "fps"), _VIDEO),
    **dict.fromkeys(("push_to_hub", "hub_", "trackio_"), _HUB),
    **dict.fromkeys(
        ("save_", "log_", "logging_", "eval_", "torch_compile", "vllm_structured_", "vllm_model_"), _NONE
    ),
    "vllm_server_": _SERVED,
    "vllm_": _VLLM,
    "sglang_": "SGLang is not in mm_grpo; write rollout.engine: transformers, vllm or vllm_server",
    "lora_": _LORA,
    "dataloader_": _IMAGES,
    "bnb_": _QUANTIZED,
}
"""What is said about keys that begin so."""


@dataclass(frozen=True)
class Row:
    """A foreign key: our field, where its value means the same, and what is said about it."""

    path: str | None
    advice: str


def _rows() -> dict[str, Row]:
    rows = {name: Row(path, f"write {path}") for path, names in FIELDS.items() for name in names.split()}
    for advice, names in REASONS.items():
        for name in names.split():
            rows[name] = Row(rows[name].path if name in rows else None, advice)
    return rows


ROWS: Mapping[str, Row] = _rows()


def row_of(path: str) -> Row | None:
    """The row of a key: that of the longest end of its path that has one."""
    parts = _fold(path).split(".")
    return next((ROWS[end] for start in range(len(parts)) if (end := ".".join(parts[start:])) in ROWS), None)


NO_ZERO_3 = (
    "stage 3 shares out the weights themselves, and a rollout engine in the trainer's processes needs them whole at"
    " every step. Where memory is short, set optim.offload_optimizer=true, optim.gradient_checkpointing=true or a"
    " lower optim.max_tokens_per_pack"
)

REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("accuracy", "accuracy_reward", "reasoning_accuracy_reward"), "math"),
    **dict.fromkeys(("format", "think_format_reward"), "format"),
    "repetition": "repetition_penalty",
    "get_soft_overlong_punishment": "soft_overlong",
}
"""Rewards of other trainers, and ours of the same purpose."""

_FLASH = "flash_attention_2 flash_attention_3 flash_attn flash_attn_2 kernels-community/flash-attn2"
VALUES: Mapping[str, Mapping[str, str]] = {
    "model.lora.target_modules": {
        "all-linear": "leave it out: the default names the linear layers of the language model (vision: true adds the"
        " tower's)"
    },
    "run.trackers": dict.fromkeys(
        ("swanlab", "mlflow", "comet_ml", "clearml", "all"), "no other tracker is known to mm_grpo"
    ),
    "optim.zero_stage": {"3": NO_ZERO_3},
    "model.attn": dict.fromkeys(
        _FLASH.split(),
        "write auto, which is flex_attention on a GPU in bfloat16: completions share their prompt, and a flash kernel"
        " has no mask for that",
    ),
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


def unknown_key(path: str, value: object, known: Sequence[str]) -> list[str]:
    """The lines that explain why `path` is no key: one, or one for each leaf of a foreign section.

    `known` are the dotted paths of every field in the tree, in order.
    """
    advice = advice_on(path, known)
    is_section = path.rpartition(".")[2] in {each.partition(".")[0] for each in known}
    if isinstance(value, Mapping) and value and (is_section or advice is None):
        return [line for key, inner in value.items() for line in unknown_key(f"{path}.{key}", inner, known)]
    row = row_of(path)
    field = (row and row.path) or ""
    note = VALUES.get(field, {}).get(str(value).casefold())  # the value has another name here as well
    said = advice or _nearest_advice(path, known)
    return [f"{path}: unknown key; {said}{f'; {value} there: {note}' if note else ''}"]


def advice_on(path: str, known: Sequence[str]) -> str | None:
    """What is said about a key of another trainer's, or one of ours in the wrong place; None about any other."""
    leaf = _fold(path).rpartition(".")[2]
    if path in known:  # a dotted name written as one key
        section, _, name = path.rpartition(".")
        return f"nest it in its section: {section}: {{{name}: ...}}"
    if (row := row_of(path)) is not None:
        return row.advice
    if homes := [home for home in known if home.rpartition(".")[2] == leaf]:
        return f"write {' or '.join(homes)}"
    return next((advice for prefix, advice in PREFIXES.items() if leaf.startswith(prefix)), None)


def _nearest_advice(path: str, known: Sequence[str]) -> str:
    section, _, leaf = path.rpartition(".")
    prefix = f"{section}." if section else ""
    siblings = list(dict.fromkeys(p[len(prefix) :].split(".")[0] for p in known if p.startswith(prefix)))
    leaves = {p.rpartition(".")[2]: p for p in reversed(known)}
    for paths in ({each: f"{prefix}{each}" for each in siblings}, leaves):
        if (found := nearest(leaf, paths)) is not None:
            return f"the nearest is {paths[found]}"
    if section and siblings:
        return f"{section} has {', '.join(siblings)}"
    return f"the sections are {', '.join(dict.fromkeys(p.split('.')[0] for p in known))}"


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")
