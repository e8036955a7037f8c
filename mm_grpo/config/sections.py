"""Every section of the config and every field, in the order of the file.

A field's docstring is its help text: what it is, with unit and range, a note, its default (docs/config.md is made from
it). To add a field, add it here. A check of fields of one section is a validator here, one of several sections is in
`grpo_config`.

P is `rollout.prompts_per_step`, G `rollout.num_generations`, A `rollout.max_attempts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mm_grpo.config.messages import Accepts, CheckError, FieldError
from mm_grpo.config.section import Essential, RelativeToFile, Section
from mm_grpo.config.source_entries import Source, Sources
from mm_grpo.config.values import (
    Device,
    GuardAction,
    GuardName,
    HeadlineText,
    Number,
    PathText,
    PromptText,
    ScaleRewards,
    Template,
    is_source,
    plain_mapping,
)
from mm_grpo.errors import ConfigError


class LoRAConfig(Section):
    """Low-rank adapters in place of training every weight (`model.lora: {rank: 16}`)."""

    where: ClassVar[str] = "model.lora"
    rank: int = Field(default=16, ge=1, le=16384)
    """Rank of the factors, >= 1 and <= 16384. Default: 16."""
    alpha: Number = Field(default=32.0, gt=0)
    """Scale of the factors' product, times 1 / rank, > 0. Default: 32.0."""
    target_modules: list[str] | Literal["all-linear"] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Layers of the language model that get adapters, by the last part of their names; all-linear is every linear one.
    Default: ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']."""
    vision: bool = False
    """Put adapters on every linear layer of the vision tower and its projector too; needs model.freeze_vision = false.
    Default: false."""


class ModelConfig(Section):
    """The policy, and how it is held."""

    where: ClassVar[str] = "model"
    path: Annotated[PathText, RelativeToFile(), Essential()]
    """Model folder or hub name, such as Qwen/Qwen2.5-VL-3B-Instruct. Required."""
    processor: Annotated[PathText | None, RelativeToFile()] = None
    """A processor of your own for a model family that does not ship: path/to/file.py:Class; null is the shipped one of
    the model's family. Default: null."""
    trust_remote_code: bool = False
    """Run the code that a model brings along (auto_map in its config); false runs none. Default: false."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights: float32 or bfloat16; auto is bfloat16 on a GPU that computes in it, else float32.
    Default: auto."""
    attn: Literal["auto", "sdpa", "flex_attention"] = "auto"
    """Attention of the learner: sdpa or flex_attention; auto is flex_attention on a GPU in bfloat16 if it proves
    right, else sdpa. Default: auto."""
    lora: Annotated[
        LoRAConfig | None, Accepts("null or a mapping of rank, alpha, target_modules and vision"), Essential()
    ] = None
    """Train low-rank adapters (fp32) and freeze every weight; null trains the weights themselves. The saved model
    has the sum, rounded to model.dtype (the metric lora/merge_lost); adapter/ has them whole. Default: null."""
    quantization: Literal["nf4"] | None = None
    """Hold the frozen weights of the language model's linear layers in four bits: nf4 (QLoRA, with double quantisation;
    needs model.lora and the extra qlora); engines and saved models get them dequantised. Default: null."""
    freeze_vision: Annotated[bool, Essential()] = False
    """Leave the weights of the vision tower as they are. Default: false."""
    freeze_router: bool = False
    """Leave the routers of a mixture of experts as they are, which is calmer: a step that moves them may change which
    experts a token gets; false trains them with the other weights. With model.lora they are frozen. Default: false."""
    device: Device = "auto"
    """Where the model is held: cpu or cuda; auto is a GPU if there is one, else cpu. cuda:N has to be the process's own
    GPU; another one is chosen with CUDA_VISIBLE_DEVICES. Default: auto."""


class DataConfig(Section):
    """The rows, and the limits on their images and prompts."""

    where: ClassVar[str] = "data"
    train: Annotated[Source | None, RelativeToFile(), Essential()] = None
    """Training rows: a .jsonl, .json, .csv, .parquet or .arrow file, a folder of them, a saved dataset, a glob, a list
    of these or owner/name[[:config]:split] of the hub (docs/data.md); a mapping such as {task: shapes, split: train,
    size: 2000}; or a mixture, a list of entries such as {path: rows.jsonl, weight: 3, task: count}; null when the rows
    are passed in Python. Default: null."""
    eval: Annotated[Sources | None, RelativeToFile(), Essential()] = None
    """Evaluation rows: as data.train, but without weights, or a mapping of set names to such sources, the headline
    first; null when there are none, or they are passed in Python. Default: null."""
    columns: Annotated[dict[str, str], Essential()] = Field(default_factory=dict)
    """The dataset's name for each of our columns, as {ours: theirs}; dots reach into mappings, as in {answer:
    reward_model.ground_truth}. Default: {}."""
    prompt_template: Template | None = None
    """Prompt made of columns, as in Where is the {category}?, in place of the row's own, which {prompt} is; names in
    braces are columns, dots reach into mappings and lists; {{ is a brace; null is the row's own. Default: null."""
    text_only: bool = False
    """Use rows without images and videos; false refuses a set without any, and such media in columns that are not read,
    and warns of single rows. Default: false."""
    image_dir: Annotated[PathText | None, RelativeToFile(), Essential()] = None
    """Folder that relative paths of images and videos start from; null is the dataset file's own. Default: null."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Fewest pixels of an image after resizing, >= 1; null is the model processor's own limit. Default: null."""
    max_pixels: Annotated[int | None, Essential()] = Field(default=None, ge=1)
    """Most pixels of an image after resizing, >= 1; null is the model processor's own limit, and no more than makes
    1,280 tokens (1,003,520 pixels in Qwen2.5-VL). Default: null."""
    video_fps: Number = Field(default=2.0, gt=0)
    """Frames per second that are shown of a video, > 0, if its row does not say another number. Default: 2.0."""
    video_max_frames: int = Field(default=32, ge=2)
    """Most frames of a video, >= 2; of a longer one as many, evenly spaced. Default: 32."""
    video_max_pixels: int | None = Field(default=None, ge=1)
    """Most pixels of a video's frame after resizing, >= 1; null is the model processor's own limit, and no more than
    makes 256 tokens of two frames (200,704 pixels in Qwen2.5-VL). Default: null."""
    max_prompt_length: Annotated[int | None, Essential()] = Field(default=None, ge=1)
    """Longest prompt, in tokens with its images expanded, >= 1; never cut; null is the model's limit. Default: null."""
    on_overlong: Annotated[Literal["stop", "drop"], Essential()] = "stop"
    """What a prompt that is too long does; stop ends the run, drop leaves the row out and counts it, also if prompt
    and longest completion may not fit optim.max_tokens_per_pack. Default: stop."""
    on_bad_media: Literal["stop", "drop"] = "stop"
    """What a row with an image or video that cannot be read does; stop ends the run, which looks at all files before
    its first step, drop leaves the row out and counts it, of each source a tenth at most. Default: stop."""
    shuffle: bool = True
    """Put the rows of each pass over the data in a seeded random order. Default: true."""
    pass_rate: Number | None = Field(default=None, gt=0, le=1)
    """Draw rows by their pass rates from the second pass on, most often near one half (docs/data.md): weight of the
    newest group in the running estimate, > 0 and <= 1, such as 0.5; null draws each once a pass. Default: null."""
    system_prompt: Annotated[PromptText | None, Essential()] = None
    """System message put before rows that have none; null is no such message. Default: null."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(plain_mapping)] = Field(
        default_factory=dict
    )
    """Arguments of the model's chat template, as {enable_thinking: false}, for every prompt of training and evaluation;
    one that the template does not read is refused. Default: {}."""
    gold_template: Annotated[str | None, Accepts("text that holds {gold}, or null")] = None
    """How a right answer is written, for `mm-grpo check`: {gold} in it stands for the text of the answer's column; null
    is that text alone. Default: null."""

    @field_validator("gold_template")
    @classmethod
    def _has_gold(cls, value: str | None) -> str | None:
        if value is not None and "{gold}" not in value:
            raise FieldError("must hold {gold}, where the right answer goes, as in <answer>{gold}</answer>")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise CheckError(
                f"data.min_pixels = {self.min_pixels}: must be <= data.max_pixels, which is {self.max_pixels}"
            )
        return self

    def eval_sets(self) -> dict[str, str | list[Any] | dict[str, Any]]:
        """The evaluation sources by set name, headline first; a single source is the set `eval`."""
        if isinstance(self.eval, dict) and not is_source(self.eval):
            return dict(self.eval)
        return {} if self.eval is None else {"eval": self.eval}


class EvalSampling(Section):
    """Sampling options of evaluation. Truncated sampling is legal here."""

    where: ClassVar[str] = "rollout.eval"
    temperature: Number = Field(default=0.0, ge=0)
    """Softmax temperature, >= 0; 0 is greedy. Default: 0.0."""
    top_p: Number = Field(default=1.0, gt=0, le=1)
    """Probability mass that is kept, > 0 and <= 1; 1 keeps all. Default: 1.0."""
    top_k: int = Field(default=0, ge=0)
    """Likeliest tokens that are kept, >= 0; 0 keeps all. Default: 0."""
    min_p: Number | None = Field(default=None, ge=0, le=1)
    """Least probability, as a share of the likeliest token's, >= 0 and <= 1; null keeps all. Default: null."""
    repetition_penalty: Number = Field(default=1.0, gt=0)
    """Penalty on tokens that were seen before, > 0; 1 is none. Default: 1.0."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens, >= 1; null is rollout.max_completion_length. Default: null."""
    num_generations: int = Field(default=1, ge=1)
    """Completions per evaluation prompt, >= 1. Default: 1."""


class VLLMConfig(Section):
    """vLLM, in the trainer's process (`rollout.engine: vllm`) and in servers of `mm-grpo serve`."""

    where: ClassVar[str] = "rollout.vllm"
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens, >= 2; null is what the rows need. Default: null."""
    max_images: int | None = Field(default=None, ge=1)
    """Most images in one prompt, >= 1; null is what the rows have. Default: null."""
    max_videos: int | None = Field(default=None, ge=0)
    """Most videos in one prompt, >= 0; null is what the rows have: set it if tools alone show videos. Default: null."""
    gpu_memory_utilization: Annotated[Number, Essential()] = Field(default=0.3, gt=0, le=1)
    """Share of a GPU's memory that vLLM may hold, > 0 and <= 1. Default: 0.3."""
    sleep_level: Annotated[Literal[0, 1, 2], Essential()] = 2
    """What a GPU engine frees while the learner works: 0 nothing; 1 its caches are dropped, and its weights wait in the
    host's memory; 2 its weights are dropped too, and sent again. Default: 2."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vllm.LLM, as {name: value}; quantization: nf4, beside model.quantization: nf4, runs the
    learner's own weights in four bits. Default: {}."""

    @property
    def in_four_bits(self) -> bool:
        """True when vLLM runs the learner's weights in four bits."""
        return bool(self.engine_kwargs.get("quantization") == "nf4")


class ServerConfig(Section):
    """vLLM servers (`rollout.engine: vllm_server`)."""

    where: ClassVar[str] = "rollout.server"
    urls: Annotated[list[str], Accepts("a list of urls, such as [http://127.0.0.1:8000]")] = Field(
        default_factory=list
    )
    """The servers (docs/served.md), as http://host:port, https://... or unix:///path/of/socket; [] where
    `mm-grpo train --serve` starts them. Default: []."""
    transfer: Literal["auto", "file", "gloo", "nccl"] = "auto"
    """How weights get to the servers: file (a folder that both sides see), gloo (over the network, through the hosts'
    memory), nccl (from GPU to GPU) or auto, which is nccl for a learner on a GPU without rollout.server.folder and
    share_gpus, else file. Default: auto."""
    folder: Annotated[PathText | None, RelativeToFile()] = None
    """Folder for transfer: file, which the servers have to see under the same path; null is a temporary one of this
    machine. Default: null."""
    timeout: Number = Field(default=600.0, gt=0)
    """Seconds without one answer after which a server that has requests counts as hung; its requests go to another one,
    > 0; the longest completions have to be done in it. A call of a weight update has as long and at most 300 s, a
    question about its state a third and at most 30 s. Default: 600.0."""
    wait_timeout: Number = Field(default=300.0, gt=0)
    """Seconds to wait for a server when none answers, > 0; then the run ends. Default: 300.0."""
    share_gpus: bool = False
    """Have the servers on the learner's GPUs, asleep while it works as rollout.vllm.sleep_level says; with model.lora
    their weights always wait in the host's memory (docs/served.md). Default: false."""

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            if not re.match(r"(https?|unix)://.", url):
                raise FieldError(f"holds {url!r}, which is no http://127.0.0.1:8000 or unix:///run/vllm.sock")
            if "@" in url and not url.startswith("unix://"):
                raise FieldError("holds a url with a password in it; set MM_GRPO_SERVER_KEY instead")
        return [url.rstrip("/") for url in value]


class RolloutConfig(Section):
    """Number of completions of a step, and how they are sampled."""

    where: ClassVar[str] = "rollout"
    engine: Annotated[Literal["transformers", "vllm", "vllm_server"], Essential()] = "transformers"
    """Rollout engine: transformers (embedded), vllm (in the trainer's process) or vllm_server (servers of
    rollout.server, docs/served.md). Default: transformers."""
    prompts_per_step: Annotated[int, Essential()] = Field(default=32, ge=1)
    """P: prompts in a step, over all processes, >= 1. Default: 32."""
    num_generations: Annotated[int, Essential()] = Field(default=8, ge=2)
    """G: completions per prompt, >= 2. Default: 8."""
    max_completion_length: Annotated[int, Essential()] = Field(default=512, ge=1)
    """Longest completion, in tokens, >= 1. Default: 512."""
    temperature: Number = Field(default=1.0, gt=0)
    """Softmax temperature of training, > 0; the learner uses the same one. Default: 1.0."""
    max_staleness: int = Field(default=0, ge=0)
    """k: updates that a completion may be behind the learner, >= 0; above 0 steps are sampled while it works
    (docs/served.md), by an engine that holds its own weights. Default: 0."""
    max_attempts: int = Field(default=1, ge=1)
    """A: times that a step may sample, the first included, >= 1; above 1 groups of equal rewards are replaced by other
    rows (dynamic sampling, DAPO). Default: 1."""
    tools: Annotated[list[str], Accepts("list of path/to/file.py:function or package.module:function")] = (
        Field(default_factory=list)
    )
    """Functions that the model may call (docs/turns.md), as path/to/file.py:function; [] is none. Default: []."""
    environment: str | None = None
    """Class whose methods the model may call (docs/turns.md): zoom, openenv:URL or path/to/file.py:Class; null is none.
    Default: null."""
    max_turns: int = Field(default=8, ge=2)
    """Most turns of the model in a conversation with tools, >= 2. Default: 8."""
    max_images_per_episode: int = Field(default=8, ge=0)
    """Most images and videos that tools may show in one conversation, >= 0; a further one is refused. A video counts
    as one, whatever its frames. Default: 8."""
    synchronous_turns: bool = False
    """Begin a turn when all conversations have ended the one before (docs/turns.md). Default: false."""
    on_tool_error: Literal["reply", "mask", "stop"] = "reply"
    """What an exception out of a tool does; reply tells the model, mask keeps the conversation out of the loss, stop
    ends the run. A call that is late ends the run with stop and in the trainer's process, else it masks. Default:
    reply."""
    tool_timeout: Number = Field(default=30.0, gt=0)
    """Seconds that one call of a tool, reset, get_reward or close may take, > 0. Default: 30.0."""
    environment_workers: int | None = Field(default=None, ge=0)
    """Processes that tools and environments run in, >= 0; 0 is the trainer's own, in which nothing can end a call that
    hangs; null is the cores that a process may use, and 0 if only the trainer's process has the tools (lambdas,
    notebooks) or a reward asks for the environment itself. Default: null."""
    vllm: VLLMConfig = VLLMConfig()
    """The vLLM engine."""
    server: ServerConfig = ServerConfig()
    """vLLM servers."""
    eval: EvalSampling = EvalSampling()
    """Sampling of evaluation."""

    @field_validator("num_generations", mode="before")
    @classmethod
    def _comparable(cls, value: Any) -> Any:
        if type(value) is int and value < 2:
            raise CheckError(
                f"rollout.num_generations = {value}: must be at least 2, because GRPO compares the completions of a "
                "prompt (8 is common)"
            )
        return value


class PgpoConfig(Section):
    """The rule pgpo of credit by sight (`algorithm.credit: {rule: pgpo, tau: 0.4}`)."""

    where: ClassVar[str] = "algorithm.credit"
    rule: Literal["pgpo"]
    tau: Number = Field(default=0.4, gt=0, le=1)
    """Threshold τ of pgpo, > 0 and <= 1. Default: 0.4."""
    beta: Number = Field(default=2.0, ge=0)
    """Slope β of pgpo above it, >= 0. Default: 2.0."""


class VppoConfig(Section):
    """The rule vppo of credit by sight (`algorithm.credit: {rule: vppo, top_share: 0.4}`)."""

    where: ClassVar[str] = "algorithm.credit"
    rule: Literal["vppo"]
    top_share: Number = Field(default=0.4, gt=0, le=1)
    """Share of tokens that vppo weighs, > 0 and <= 1. Default: 0.4."""
    beta_min: Number = Field(default=0.9, ge=0, le=1)
    """Least weight β_min of vppo, >= 0 and <= 1. Default: 0.9."""


def _credit(value: Any) -> Any:
    """The section of a rule, from the rule's name alone or from a mapping with `rule`."""
    values = {"rule": value} if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        return values
    rules: dict[Any, type[Section]] = {"pgpo": PgpoConfig, "vppo": VppoConfig}
    if (section := rules.get(str(values.get("rule")))) is None:
        raise ValueError
    if {*values} - {*section.model_fields}:
        raise FieldError(f"must have no keys but {', '.join(section.model_fields)}")
    try:
        return section.model_validate(values)
    except ConfigError as error:  # pydantic would name the section's class in the place of the field
        raise CheckError(str(error)) from None


class TwinViewConfig(Section):
    """A better view of the image as a teacher (`algorithm.twin_view: {view: high_resolution, max_pixels: 1003520}`)."""

    where: ClassVar[str] = "algorithm.twin_view"
    view: Literal["high_resolution", "crop"] = "high_resolution"
    """What the teacher sees: high_resolution or crop. Default: high_resolution."""
    coef: Number = Field(default=0.1, gt=0)
    """Weight of the KL, > 0. Default: 0.1."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Most pixels of an image in high_resolution, >= 1; null as in data.max_pixels. Default: null."""

    @model_validator(mode="after")
    def _limit_of_this_view(self) -> Self:
        if self.view == "crop" and self.max_pixels is not None:
            raise CheckError(
                f"algorithm.twin_view.max_pixels = {self.max_pixels}: is for view = high_resolution; leave it out"
            )
        return self


CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class AlgorithmConfig(Section):
    """Advantages and loss."""

    where: ClassVar[str] = "algorithm"
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "maxrl"] = "grpo"
    """What rewards are compared with, and scaled by (docs/algorithms.md); grpo, rloo, reinforce_plus_plus_baseline or
    maxrl. Default: grpo."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards become one advantage; sum_then_normalize compares their weighted sums, normalize_then_sum
    compares each reward by itself (GDPO). Default: sum_then_normalize."""
    turn_gamma: Number | None = Field(default=None, ge=0, le=1)
    """Discount, a turn, of later rewards in the advantages of the turns of a conversation, >= 0 and <= 1; null gives a
    conversation one advantage (docs/turns.md). Default: null."""
    loss_type: Annotated[
        Literal[
            "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "dppo_tv", "dppo_kl", "gmpo"
        ],
        Essential(),
    ] = "dapo"
    """What a token contributes to the loss, and how tokens are averaged (docs/algorithms.md); grpo, bnpo, dr_grpo,
    dapo, cispo, sapo, luspo, vespo, dppo_tv, dppo_kl or gmpo. Default: dapo."""
    sapo_temperature_pos: Number = Field(default=1.0, gt=0)
    """Steepness of sapo's bound for a positive advantage, > 0. Default: 1.0."""
    sapo_temperature_neg: Number = Field(default=1.05, gt=0)
    """Steepness for other advantages, > 0. Default: 1.05."""
    vespo_k_pos: Number = Field(default=2.0, ge=0)
    """Exponent k of vespo for a positive advantage, >= 0. Default: 2.0."""
    vespo_lambda_pos: Number = Field(default=3.0, ge=0)
    """Rate lambda of vespo for a positive advantage, >= 0. Default: 3.0."""
    vespo_k_neg: Number = Field(default=3.0, ge=0)
    """Exponent k for other advantages, >= 0. Default: 3.0."""
    vespo_lambda_neg: Number = Field(default=2.0, ge=0)
    """Rate lambda for other advantages, >= 0. Default: 2.0."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whose probability ratio weighs a token: token (its own) or sequence (its completion's, GSPO). Default: token."""
    beta: Annotated[Number, Essential()] = Field(default=0.0, ge=0)
    """Weight of the KL term, >= 0; 0 is none, and no reference model. Default: 0.0."""
    epsilon: Number = Field(default=0.2, ge=0)
    """Lower clip: the probability ratio counts from 1 - epsilon, >= 0; in gmpo from exp(-epsilon), in dppo_tv and
    dppo_kl the bound of what they bound (docs/algorithms.md). Default: 0.2."""
    epsilon_high: Number | None = Field(default=None, ge=0)
    """Upper clip: the probability ratio counts up to 1 + epsilon_high, >= 0, in gmpo up to exp(epsilon_high); null is
    epsilon. Default: null."""
    delta: Number | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with a negative advantage, > 1, > 1 + epsilon_high; null is none. Default: null."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL term is estimated from a sample: k1, k2 or k3; k1 needs algorithm.kl_in_reward. Default: k3."""
    kl_in_reward: bool = False
    """Take beta times the KL of a completion, the sum over its tokens, off its reward before advantages; false adds the
    KL to the loss. Default: false."""
    reference_path: Annotated[PathText | None, RelativeToFile()] = None
    """Folder or hub name of the reference model, a teacher say, of the policy's type and with its tokens; needs
    beta > 0; null is the model as it was at the start. Default: null."""
    importance_sampling_mode: Literal["auto", "none", CorrectionMode] = "auto"
    """How tokens are weighed by learner over engine probability; none, token_truncate, token_mask, sequence_truncate or
    sequence_mask; auto is token_truncate for a mixture of experts, or if rollout.max_staleness is above 0, else none.
    Default: auto."""
    importance_sampling_clip_max: Number | None = Field(default=3.0, gt=0)
    """Upper bound of those weights, > 0; null is none. Default: 3.0."""
    importance_sampling_clip_min: Number | None = Field(default=None, ge=0)
    """Lower bound of those weights, >= 0; null is none. Default: null."""
    off_policy_mask_threshold: Number | None = Field(default=None, gt=0)
    """Drop a completion of negative advantage whose mean log-probability fell by more than this, in nats, > 0; null
    drops none. Default: null."""
    scale_rewards: ScaleRewards = "group"
    """Whose standard deviation advantages are divided by: group, batch or none; true is read as group, false as none.
    For advantage_estimator: grpo; rloo (undivided), reinforce_plus_plus_baseline, maxrl and normalize_then_sum bring
    their own scale, and leave this at group. Default: group."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that the completions of a step are learned from, >= 1. Default: 1."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into the length limit out of the loss. Default: false."""
    entropy_coef: Number = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, >= 0; 0 is none. Default: 0.0."""
    top_entropy_quantile: Number = Field(default=1.0, gt=0, le=1)
    """Share of tokens, from the highest entropy down, that enter the loss, > 0 and <= 1; 1.0 is all. Default: 1.0."""
    perception_coef: Number = Field(default=0.0, ge=0)
    """Weight of PAPO's term, the KL between answers to the image and to the masked image, which is maximised
    (docs/algorithms.md), >= 0; 0 is none; 0.01 is common. Default: 0.0."""
    perception_mask_ratio: Number = Field(default=0.6, gt=0, le=1)
    """Chance that a square of an image, or of all frames of a video, is made black, for that term and for credit, > 0
    and <= 1. Default: 0.6."""
    perception_entropy_coef: Number = Field(default=0.0, ge=0)
    """Weight of that term's entropies, >= 0; 0 is none; 0.03 is common. Default: 0.0."""
    credit: Annotated[
        PgpoConfig | VppoConfig | None,
        BeforeValidator(_credit),
        Accepts("null, pgpo, vppo or a mapping of rule and its options"),
    ] = None
    """Rule that weighs the advantage of each token by how much the token depends on its image (docs/algorithms.md):
    pgpo or vppo, or with options {rule: pgpo, tau: 0.3}; null weighs none. Default: null."""
    twin_view: Annotated[TwinViewConfig | None, Accepts("null or a mapping of view, coef and max_pixels")] = (
        None
    )
    """Learn from the same weights with a better view of the image (docs/algorithms.md); null is none. Default: null."""

    features: Annotated[
        list[str], Accepts("a list of path/to/file.py:Class or package.module:Class"), RelativeToFile()
    ] = Field(default_factory=list)
    """Loss features of your own (docs/algorithms.md), as path/to/file.py:Class. Default: []."""

    @model_validator(mode="after")
    def _options_without_effect(self) -> Self:
        if self.twin_view is not None and self.perception_coef > 0:
            raise CheckError("algorithm.twin_view: must be null with algorithm.perception_coef > 0")
        perceives, has_credit = self.perception_coef > 0, self.credit is not None
        for prefix, acts, owner in (
            ("sapo_", self.loss_type == "sapo", "loss_type = sapo"),
            ("vespo_", self.loss_type == "vespo", "loss_type = vespo"),
            ("perception_mask_ratio", perceives or has_credit, "perception_coef > 0 and for credit"),
            ("perception_entropy_coef", perceives, "perception_coef > 0"),
        ):
            for name, field in type(self).model_fields.items():
                if not acts and name.startswith(prefix) and getattr(self, name) != field.default:
                    value = getattr(self, name)
                    raise CheckError(f"algorithm.{name} = {value:g}: is for {owner}; leave it out")
        return self

    @property
    def correction(self) -> CorrectionMode | None:
        """The mode of the mismatch correction, if any; `GRPOConfig.with_correction` puts in what auto means."""
        mode = self.importance_sampling_mode
        return None if mode == "none" or mode == "auto" else mode


class OptimConfig(Section):
    """The optimizer (AdamW), and how the completions of a step are laid out for it."""

    where: ClassVar[str] = "optim"
    learning_rate: Annotated[Number | None, Essential()] = Field(default=None, ge=0)
    """Peak learning rate, >= 0; null is 1e-6, and 1e-4 for the adapters of model.lora. Default: null."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled weight decay, >= 0. Default: 0.0."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's running mean, >= 0 and < 1. Default: 0.9."""
    adam_beta2: Number = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's running mean square, >= 0 and < 1. Default: 0.999."""
    adam_epsilon: Number = Field(default=1e-8, gt=0)
    """Added to Adam's denominator, > 0. Default: 1e-08."""
    max_grad_norm: Number = Field(default=1.0, ge=0)
    """Longest gradient, as the 2-norm over all weights, >= 0; 0 is no clipping. Default: 1.0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, linear or cosine; the last two end at 0. Default: constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises from 0 to its peak, >= 0; at most the run's.
    Default: 0."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates that share out the prompts of a step, >= 1; at most rollout.prompts_per_step. Default: 1."""
    max_tokens_per_pack: Annotated[int, Essential()] = Field(default=16384, ge=1)
    """Tokens in one forward and backward pass, >= 1; bounds the memory; changes no update, but for rows that
    data.on_overlong drops. Default: 16384."""
    gradient_checkpointing: bool | None = None
    """Compute activations twice, to hold fewer of them; null is true on a GPU and false on a CPU. Default: null."""
    zero_stage: Annotated[int, Accepts("0, 1, 2 or 3")] = Field(default=2, ge=0, le=3)
    """What several processes share out (ZeRO), >= 0 and <= 3; 0 is nothing, 1 the optimizer's state, 2 the gradients
    too (DeepSpeed), 3 the language model's weights too (torch's fully_shard); changes no update. Default: 2."""
    offload_optimizer: bool = False
    """Keep fp32 weights and the optimizer's state in the host's memory; needs zero_stage 1 or 2. Default: false."""

    @model_validator(mode="after")
    def _offloads_what_is_shared(self) -> Self:
        if self.offload_optimizer and self.zero_stage not in (1, 2):
            raise CheckError(
                f"optim.offload_optimizer = true: needs optim.zero_stage 1 or 2, and that is {self.zero_stage}"
            )
        return self

    def peak_rate(self, *, adapters: bool = False) -> float:
        """The peak learning rate that is meant: `learning_rate`, or the default for all weights or for adapters."""
        return (1e-4 if adapters else 1e-6) if self.learning_rate is None else self.learning_rate


class RunConfig(Section):
    """The run folder, the length of the run, and what watches it."""

    where: ClassVar[str] = "run"
    dir: Annotated[PathText, Essential()] = "runs/mm_grpo"
    """Folder of the run; {time} in it, as in runs/{time}, stands for date and time of the start, and with --resume for
    the newest run's. Default: runs/mm_grpo."""
    seed: int = Field(default=42, ge=0)
    """Seed of the order of the data and of every sample, >= 0. Default: 42."""
    max_steps: Annotated[int | None, Essential()] = Field(default=None, ge=1)
    """Steps of the run, >= 1; null is one pass over the data. Default: null."""
    eval_every: Annotated[int | None, Essential()] = Field(default=None, ge=0)
    """Steps from one evaluation to the next, >= 0; 0 is before and after only; null is a tenth of the run, at least 1.
    Without data.eval nothing is evaluated. Default: null."""
    headline: HeadlineText = None
    """What evaluations, and the best checkpoint, are judged by: NAME >= MARK, such as exact_match >= 1, is the share
    of completions to which that reward gives at least the mark (accuracy); NAME mean, such as iou mean, its mean
    score; null is the mean reward. Default: null."""
    eval_blind: Literal["shuffled", "removed", "frames", "first_frame"] | None = None
    """Also answer the rows of the first evaluation set without their images and videos: shuffled (each with those of
    another row) or removed; or with other frames in videos: frames (in another order) or first_frame (in the place of
    all); null is shuffled after `mm-grpo warm`, else none (docs/evaluation.md). Default: null."""
    sight_every: int = Field(default=10, ge=0)
    """Steps from one that measures how much completions depend on their images (docs/evaluation.md) to the next, the
    first step included, >= 0; 0 is none. Default: 10."""
    report: bool = True
    """Write report.html. Default: true."""
    expected_curve: Annotated[PathText | None, RelativeToFile()] = None
    """JSON file with a measured curve of this config, for report.html (docs/recipes.md); null is none.
    Default: null."""
    save_model: bool = True
    """Save the trained model at the end. Default: true."""
    keep: Literal["best", "last"] = "best"
    """Which weights the saved model has: best (of the best evaluation after a step, if evaluations and checkpoints
    were made) or last. Default: best."""
    save_every: int | None = Field(default=None, ge=0)
    """Steps from one checkpoint to the next, >= 0; 0 is none; null is a tenth of the run, at least 1 and at most 100; a
    killed run redoes at most so many steps. Default: null."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept, >= 1; that of the best headline stays too. Default: 2."""
    allow_changed_code: bool = False
    """Resume although the source of a reward, a tool or an environment is not what it was. Default: false."""
    allow_changed_rows: bool = False
    """Resume although rows changed in their places, as repaired ones do (docs/data.md). Default: false."""
    process_timeout: Number = Field(default=1800.0, gt=0)
    """Seconds that a process waits for the others before the run stops, > 0. Default: 1800.0."""
    overwrite: bool = False
    """Replace what the run folder already holds. Default: false."""
    guards: Annotated[dict[GuardName, GuardAction], Accepts("a mapping of guards to stop, warn or off")] = (
        Field(default_factory=dict)
    )
    """What guards do when they fire, by name: stop, warn or off; a guard that is not named keeps its own choice
    (docs/checking.md). They are duplicate_completions, logp_gap, update_happens, no_update, zero_std, no_reward,
    zero_kl, masked_share, entropy_collapse, clipped_lengths, unread_images, sight_lost, tools_failing, tools_unused,
    phantom_advantage. Default: {}."""
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], Essential()] = Field(
        default_factory=list
    )
    """Where metrics go as well: tensorboard, wandb, trackio; the last two also get tables of completions with images.
    Default: []."""
