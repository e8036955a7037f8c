"""The sections of the config and their fields, in the order of the file.

`setting(default, what, note)` writes each field's description, which is its help text: what it is,
its range, a note, its default. To add a field, add it here; a check of fields of one section is a
validator here, a check of two sections, or one that fields may fail while they are set one after
another, a function in `config.CHECKS`.

The section `algorithm` is in `config_algorithm.py`.

P is `rollout.prompts_per_step`, G `rollout.num_generations`, A `rollout.max_attempts`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from mm_grpo.config_load import shown
from mm_grpo.config_section import Legal, Section, line, mistake, setting
from mm_grpo.config_values import (
    Device,
    EvalSource,
    GuardAction,
    GuardName,
    Number,
    PathText,
    Source,
)

FEW_GENERATIONS = (
    "num_generations counts completions per prompt; GRPO compares them, so it needs at least 2 (8 is common)"
)
NO_ZERO_3 = (
    "stage 3 shares out the weights themselves, and a rollout engine in the trainer's processes needs them whole at"
    " every step. Where memory is short, set optim.offload_optimizer=true, optim.gradient_checkpointing=true or a"
    " lower optim.max_tokens_per_pack"
)


class LoRAConfig(Section):
    """Low-rank adapters in place of training every weight (`model.lora: {rank: 16}`)."""

    where: ClassVar[str] = "model.lora"

    rank: int = setting(16, "Rank of the factors", ge=1)
    alpha: Number = setting(32.0, "Scale of the factors' product, times 1 / rank", gt=0)
    target_modules: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Layers of the language model that get adapters, by the last part of their names",
    )

    @field_validator("target_modules")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        if not value or not all(re.fullmatch(r"[\w.]+", name) for name in value):
            raise mistake("must be the last parts of layers' names, such as [q_proj, v_proj]; at least one")
        return value


class ModelConfig(Section):
    """The policy, and how it is held."""

    where: ClassVar[str] = "model"

    path: PathText = setting(..., "Model folder or hub name, such as Qwen/Qwen2.5-VL-3B-Instruct")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Number format of the weights: float32 or bfloat16",
        "auto is bfloat16 on a GPU, float32 on a CPU",
    )
    attn: Literal["auto", "sdpa", "eager", "flex_attention"] = setting(
        "auto",
        "Attention of the learner: sdpa, eager or flex_attention",
        "auto is flex_attention on a GPU in bfloat16 where it proves right, else sdpa",
    )
    lora: Annotated[LoRAConfig | None, Legal("null or a mapping of rank, alpha and target_modules")] = (
        setting(None, "Train low-rank adapters and freeze every weight", "null trains the weights themselves")
    )
    freeze_vision: bool = setting(False, "Leave the weights of the vision tower as they are")
    device: Device = setting(
        "auto", "Where the model is held: cpu, cuda or cuda:N", "auto is a GPU if there is one, else cpu"
    )


class DataConfig(Section):
    """The rows, and the limits on their images and prompts."""

    where: ClassVar[str] = "data"

    train: Source | None = setting(
        None,
        "Training rows: a path to .jsonl, .json, .parquet or a saved dataset, or a mapping such as"
        " {task: shapes, split: train, size: 2000}",
        "null when the rows are passed in Python",
    )
    eval: EvalSource | None = setting(
        None,
        "Evaluation rows: as data.train, or a mapping of set names to such sources, the headline first",
        "null when there are none, or they are passed in Python",
    )
    columns: dict[str, str] = setting(dict, "The dataset's name for each of our columns, as {ours: theirs}")
    image_dir: PathText | None = setting(
        None, "Folder that relative image paths start from", "null is the dataset file's own folder"
    )
    min_pixels: int | None = setting(
        None, "Fewest pixels of an image after resizing", "null is the model processor's own limit", ge=1
    )
    max_pixels: int | None = setting(
        None, "Most pixels of an image after resizing", "null is the model processor's own limit", ge=1
    )
    max_image_bytes: int = setting(50 * 1024 * 1024, "Largest encoded image that is opened, in bytes", ge=1)
    max_image_pixels: int = setting(
        178956970 // 2, "Largest image that is decoded, in pixels before resizing", ge=1
    )
    max_prompt_length: int | None = setting(
        None,
        "Longest prompt, in tokens with its images expanded",
        "null is the model's own limit; a prompt is never cut",
        ge=1,
    )
    on_overlong: Literal["stop", "drop"] = setting(
        "stop",
        "What a prompt that is too long does",
        "stop ends the run, drop leaves the row out and counts it",
    )
    shuffle: bool = setting(True, "Put the rows of each pass over the data in a seeded random order")
    system_prompt: str | None = setting(
        None, "System message put before rows that have none", "null is no such message"
    )
    gold_template: Annotated[str | None, Legal("text that holds {gold}, or null")] = setting(
        None,
        "How a right answer is written, for `mm-grpo check`: {gold} in it stands for the text of the answer's column",
        "null is that text alone",
    )

    @field_validator("gold_template")
    @classmethod
    def _has_gold(cls, value: str | None) -> str | None:
        if value is not None and "{gold}" not in value:
            raise mistake("must hold {gold}, where the right answer goes, as in <answer>{gold}</answer>")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise line(
                f"data.min_pixels = {self.min_pixels}: must be <= data.max_pixels, which is {self.max_pixels}"
            )
        return self

    def eval_sets(self) -> dict[str, str | dict[str, Any]]:
        """The evaluation sources by set name, headline first; a single source is the set `eval`."""
        if self.eval is None:
            return {}
        if isinstance(self.eval, str) or "task" in self.eval:
            return {"eval": self.eval}
        return dict(self.eval)


class EvalSampling(Section):
    """How completions are drawn in evaluation. Truncated sampling is legal here."""

    where: ClassVar[str] = "rollout.eval"

    temperature: Number = setting(0.0, "Softmax temperature", "0 is greedy", ge=0)
    top_p: Number = setting(1.0, "Probability mass that is kept", "1 keeps all", gt=0, le=1)
    top_k: int = setting(0, "Likeliest tokens that are kept", "0 keeps all", ge=0)
    min_p: Number | None = setting(
        None, "Least probability, as a share of the likeliest token's", "null keeps all", ge=0, le=1
    )
    repetition_penalty: Number = setting(1.0, "Penalty on tokens that were seen before", "1 is none", gt=0)
    max_completion_length: int | None = setting(
        None, "Longest completion, in tokens", "null is rollout.max_completion_length", ge=1
    )
    num_generations: int = setting(1, "Completions per evaluation prompt", ge=1)


class VLLMConfig(Section):
    """The vLLM engine in the trainer's process (`rollout.engine: vllm`)."""

    where: ClassVar[str] = "rollout.vllm"

    max_model_len: int | None = setting(
        None,
        "Longest prompt and completion together, in tokens",
        "null is the longest prompt + completion",
        ge=2,
    )
    max_images: int = setting(1, "Most images in one prompt", ge=1)
    gpu_memory_utilization: Number = setting(0.3, "Share of a GPU's memory that vLLM may hold", gt=0, le=1)
    tensor_parallel_size: int = setting(1, "Processes that one engine is spread over", ge=1)
    sleep_level: Literal[0, 1, 2] = setting(
        0, "What a GPU engine frees while the learner works: 0 nothing, 1 its caches, 2 its weights too"
    )
    engine_kwargs: dict[str, Any] = setting(dict, "Further arguments of vllm.LLM, as {name: value}")


class RolloutConfig(Section):
    """How many completions a step samples, and how."""

    where: ClassVar[str] = "rollout"

    engine: Literal["transformers", "vllm"] = setting(
        "transformers", "Rollout engine: transformers (embedded) or vllm (in the trainer's process)"
    )
    prompts_per_step: int = setting(8, "P: prompts in a step, over all processes", ge=1)
    num_generations: int = setting(8, "G: completions per prompt", ge=2)
    max_completion_length: int = setting(512, "Longest completion, in tokens", ge=1)
    temperature: Number = setting(
        1.0, "Softmax temperature of training", "the learner uses the same one", gt=0
    )
    top_p: Annotated[Number, Legal("1.0 in training")] = setting(
        1.0, "Nucleus sampling", "for evaluation only: set rollout.eval.top_p"
    )
    top_k: Annotated[int, Legal("0 in training")] = setting(
        0, "Top-k sampling", "for evaluation only: set rollout.eval.top_k"
    )
    min_p: Annotated[Number | None, Legal("null in training")] = setting(
        None, "Min-p sampling", "for evaluation only: set rollout.eval.min_p"
    )
    repetition_penalty: Annotated[Number, Legal("1.0 in training")] = setting(
        1.0, "Penalty on tokens seen before", "for evaluation only: set rollout.eval.repetition_penalty"
    )
    dynamic_sampling: bool = setting(
        False,
        "Replace groups whose rewards are all equal by groups of other rows (DAPO)",
        "needs rollout.max_attempts >= 2",
    )
    max_attempts: int = setting(
        1,
        "A: times that a step may sample, the first included, each with seeds of its own",
        "above 1 with rollout.dynamic_sampling only",
        ge=1,
    )
    max_staleness: Annotated[int, Legal("0 in this version")] = setting(
        0, "Updates that generation may run ahead of the weights", "0 is synchronous", ge=0
    )
    vllm: VLLMConfig = setting(VLLMConfig, "The vLLM engine")
    eval: EvalSampling = setting(EvalSampling, "Sampling of evaluation")

    @field_validator("engine", mode="before")
    @classmethod
    def _not_served(cls, value: Any) -> Any:
        if value == "vllm_server":
            raise mistake(
                "served vLLM is not in this version of mm_grpo yet; must be one of transformers, vllm"
            )
        return value

    @field_validator("num_generations", mode="before")
    @classmethod
    def _comparable(cls, value: Any) -> Any:
        if type(value) is int and value < 2:
            raise line(FEW_GENERATIONS)
        return value

    @field_validator("top_p", "top_k", "min_p", "repetition_penalty")
    @classmethod
    def _one_distribution(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        neutral = cls.model_fields[name].default
        if value != neutral:
            raise mistake(
                "truncated sampling and penalties are for evaluation; leave this at"
                f" {shown(neutral)} and set rollout.eval.{name} (completions would come from one"
                " distribution, and the learner's log-probs from another)"
            )
        return value

    @field_validator("max_staleness")
    @classmethod
    def _synchronous(cls, value: int) -> int:
        if value > 0:
            raise mistake(
                "must be 0; generation does not run ahead of the weights in this version of mm_grpo"
            )
        return value


class OptimConfig(Section):
    """The optimizer (AdamW), and how the completions of a step are laid out for it."""

    where: ClassVar[str] = "optim"

    learning_rate: Number = setting(1e-6, "Peak learning rate", ge=0)
    weight_decay: Number = setting(0.0, "Decoupled weight decay", ge=0)
    adam_beta1: Number = setting(0.9, "Decay of Adam's running mean", ge=0, lt=1)
    adam_beta2: Number = setting(0.999, "Decay of Adam's running mean square", ge=0, lt=1)
    adam_epsilon: Number = setting(1e-8, "Added to Adam's denominator", gt=0)
    max_grad_norm: Number = setting(
        1.0, "Longest gradient, as the 2-norm over all weights", "0 is no clipping", ge=0
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant", "Learning rate after warm-up: constant, linear or cosine", "the last two end at 0"
    )
    warmup_steps: int = setting(
        0, "Optimizer updates over which the learning rate rises from 0 to its peak", ge=0
    )
    updates_per_step: int = setting(
        1, "Optimizer updates that share out the prompts of a step", "at most rollout.prompts_per_step", ge=1
    )
    max_tokens_per_pack: int = setting(
        16384, "Tokens in one forward and backward pass", "bounds the memory; changes no update", ge=1
    )
    gradient_checkpointing: bool = setting(False, "Compute activations twice, to hold fewer of them")
    zero_stage: Annotated[int, Legal("0, 1 or 2")] = setting(
        2,
        "What several processes share out (DeepSpeed ZeRO)",
        "0 is nothing, 1 the optimizer's state, 2 the gradients too; changes no update",
        ge=0,
    )
    offload_optimizer: bool = setting(
        False, "Keep fp32 weights and the optimizer's state in the host's memory", "needs zero_stage 1 or 2"
    )

    @field_validator("zero_stage")
    @classmethod
    def _weights_stay_whole(cls, value: int) -> int:
        if value == 3:
            raise mistake(f"must be 0, 1 or 2; {NO_ZERO_3}")
        if value > 3:
            raise mistake("must be 0, 1 or 2")
        return value

    @model_validator(mode="after")
    def _offloads_what_is_shared(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise line("optim.offload_optimizer = true: needs optim.zero_stage 1 or 2, and that is 0")
        return self


class RunConfig(Section):
    """The run folder, the length of the run, and what watches it."""

    where: ClassVar[str] = "run"

    dir: PathText = setting("runs/mm_grpo", "Folder of the run")
    seed: int = setting(42, "Seed of the order of the data and of every sample", ge=0)
    max_steps: int | None = setting(None, "Steps of the run", "null is one pass over the data", ge=1)
    eval_every: int = setting(0, "Steps from one evaluation to the next", "0 is before and after only", ge=0)
    log_rollouts_every: int = setting(
        1, "Steps from one whose completions are written down to the next", ge=1
    )
    report: bool = setting(True, "Write report.html")
    save_model: bool = setting(True, "Save the trained model at the end")
    save_every: int = setting(
        0,
        "Steps from one checkpoint to the next",
        "0 is none; a killed run redoes at most so many steps",
        ge=0,
    )
    keep_checkpoints: int = setting(
        2,
        "Newest checkpoints that are kept",
        "that of the step with the best headline accuracy, if there is one, stays besides",
        ge=1,
    )
    process_timeout: Number = setting(
        1800.0, "Seconds that a process waits for the others before the run stops", gt=0
    )
    overwrite: bool = setting(False, "Replace what the run folder already holds")
    guards: Annotated[
        dict[GuardName, GuardAction],
        Legal("a mapping of duplicate_completions, logp_gap and update_happens to stop, warn or off"),
    ] = setting(
        dict,
        "What duplicate_completions, logp_gap and update_happens do when they fire: stop, warn or off",
        "a guard that is not named keeps its own choice",
    )
    parity_check: bool = setting(
        True, "Compare engine and learner on one prompt before the first step", "ids, log-probs and seeds"
    )
    max_logp_gap: Number | None = setting(
        None,
        "Largest mean gap between the engine's and the learner's log-probs, in nats per token",
        "null is 1e-3 for float32 weights and 0.1 for bfloat16 ones",
        gt=0,
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = setting(
        list, "Where the metrics go besides metrics.jsonl: tensorboard, wandb, trackio"
    )
