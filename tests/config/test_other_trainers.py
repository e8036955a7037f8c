"""Keys that do not exist: names of other trainers, right names in the wrong place, slips of the finger."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mm_grpo.config import GRPOConfig
from mm_grpo.config.messages import leaves
from mm_grpo.config.other_trainers import ADVICE, PREFIXES, VALUES, unknown_key
from mm_grpo.errors import ConfigError, did_you_mean, nearest

LEGAL = [path for path, _ in leaves(GRPOConfig)]
VLLM = "write it into rollout.vllm.engine_kwargs, beside rollout.engine: vllm"
LATER = "not in this version of mm_grpo yet; leave it out"
RESUME = "it is an option of the command: mm-grpo train CONFIG --resume (in Python GRPOTrainer(config, resume=True))"
BATCH = "write rollout.prompts_per_step x rollout.num_generations; accumulation is derived"


def lines_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.from_dict({"model": {"path": "m"}, **values})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        # TRL, ms-swift
        (
            "per_device_train_batch_size",
            f"{BATCH} (prompts_per_step = per-device batch x devices x steps_per_generation /"
            f" num_generations)",
        ),
        (
            "gradient_accumulation_steps",
            "accumulation is derived from rollout.prompts_per_step, optim.updates_per_step and"
            " optim.max_tokens_per_pack; leave it out",
        ),
        (
            "steps_per_generation",
            "write optim.updates_per_step (= steps_per_generation / gradient_accumulation_steps)",
        ),
        (
            "generation_batch_size",
            "write rollout.prompts_per_step (= generation_batch_size / num_generations)",
        ),
        ("vllm_gpu_memory_utilization", "write rollout.vllm.gpu_memory_utilization"),
        ("vllm_max_model_len", "write rollout.vllm.max_model_len"),
        ("vllm_importance_sampling_mode", "write algorithm.importance_sampling_mode"),
        ("use_vllm", "write rollout.engine: vllm"),
        ("reward_funcs", "write rewards (a list of names or mappings)"),
        (
            "reward_weights",
            "give each entry of rewards its own weight: rewards: [{name: ..., weight: 1.0}]",
        ),
        ("external_plugins", "write the file into rewards: rewards: [path/to/file.py:function]"),
        ("MAX_PIXELS", "write data.max_pixels"),
        ("num_train_epochs", "write run.max_steps (steps, not epochs; null is one pass over the data)"),
        ("output_dir", "write run.dir"),
        ("model_name_or_path", "write model.path"),
        ("max_prompt_length", "write data.max_prompt_length (expanded tokens; a longer prompt is never cut)"),
        ("warmup_ratio", "write optim.warmup_steps (= warmup_ratio x run.max_steps)"),
        ("delta", "write algorithm.delta"),
        ("importance_sampling_level", "write algorithm.importance_sampling_level"),
        ("save_steps", "write run.save_every (steps; 0 is no checkpoint)"),
        ("save_total_limit", "write run.keep_checkpoints (the newest that are kept)"),
        ("resume_from_checkpoint", RESUME),
        ("vllm_importance_sampling_cap", "write algorithm.importance_sampling_clip_max"),
        ("vllm_group_port", "ports are chosen by the transfer (rollout.server.transfer)"),
        (
            "vllm_server_host",
            "write rollout.engine: vllm_server, and the servers of `mm-grpo serve` into rollout.server.urls",
        ),
        ("vllm_structured_outputs_regex", LATER),
        (
            "sglang_tp_size",
            "SGLang is not in mm_grpo; write rollout.engine: transformers, vllm or vllm_server",
        ),
        ("target_modules", "write model.lora.target_modules"),
        ("zero_stage", "write optim.zero_stage"),
        ("fsdp_config", "FSDP is not in this version of mm_grpo; write optim.zero_stage (0, 1 or 2)"),
        (
            "lora_rank",
            "write model.lora: {rank: 16, alpha: 32, target_modules: [...]} (null trains every weight)",
        ),
        # verl, EasyR1
        (
            "kl_coef",
            "write algorithm.beta (the weight of the KL term; 0 is no KL term and no reference model)",
        ),
        # a right name without its section
        ("learning_rate", "write optim.learning_rate"),
        ("loss_type", "write algorithm.loss_type"),
        ("temperature", "write rollout.temperature or rollout.eval.temperature"),
        ("seed", "write run.seed"),
        # a dotted name, which is for the command line
        ("optim.learning_rate", "nest it in its section: optim: {learning_rate: ...}"),
        # near misses
        ("num_generation", "the nearest is rollout.num_generations"),
        ("reward", "the nearest is rewards"),
        ("learning-rate", "write optim.learning_rate"),
        ("zzz", "the sections are model, data, rollout, rewards, algorithm, optim, run"),
    ],
)
def test_a_key_at_the_top(key: str, advice: str) -> None:
    assert lines_of({key: 1}) == [f"{key}: unknown key; {advice}"]


@pytest.mark.parametrize(
    ("section", "key", "advice"),
    [
        ("rollout", "num_generation", "the nearest is rollout.num_generations"),
        ("rollout", "n", "write rollout.num_generations"),
        ("rollout", "max_prompt_length", "write data.max_prompt_length (expanded tokens; a longer prompt is"),
        ("rollout", "enforce_eager", VLLM),
        ("algorithm", "learning_rate", "write optim.learning_rate"),
        ("optim", "lr", "write optim.learning_rate"),
        ("optim", "deepspeed_config", "write optim.zero_stage (0, 1 or 2) and optim.offload_optimizer;"),
        ("run", "save_steps", "write run.save_every (steps; 0 is no checkpoint)"),
        ("data", "task", "a source is one mapping: write data.train: {task: ...}"),
        (
            "data",
            "zzz",
            "data has train, eval, columns, layout, answer_from, text_only, image_dir, min_pixels, ",
        ),
        ("run", "guard", "the nearest is run.guards"),
        ("algorithm", "clip_ratio_c", "write algorithm.delta"),
        ("algorithm", "clip_ratio_dual", "write algorithm.delta"),
        ("run", "resume_mode", RESUME),
    ],
)
def test_a_key_in_a_section(section: str, key: str, advice: str) -> None:
    (line,) = lines_of({section: {"path": "m", key: 1} if section == "model" else {key: 1}})
    assert line.startswith(f"{section}.{key}: unknown key; {advice}")


def test_a_key_whose_value_has_another_name_too() -> None:
    note = "write auto, which is flex_attention on a GPU in bfloat16: completions share their prompt"
    (line,) = lines_of({"attn_implementation": "flash_attention_2"})
    assert line.startswith(
        f"attn_implementation: unknown key; write model.attn; flash_attention_2 there: {note}"
    )
    (line,) = lines_of({"algorithm": {"importance_sampling_level": "gspo"}})
    assert line == (
        "algorithm.importance_sampling_level = 'gspo': must be one of token, sequence; write sequence, which is GSPO, "
        "with algorithm.loss_type: grpo"
    )


def test_a_key_in_the_sampling_of_evaluation() -> None:
    assert lines_of({"rollout": {"eval": {"topk": 3}}}) == [
        "rollout.eval.topk: unknown key; the nearest is rollout.eval.top_k"
    ]


def test_a_key_of_the_adapters() -> None:
    assert lines_of({"model": {"path": "m", "lora": {"rnk": 8, "r": 8}}}) == [
        "model.lora.rnk: unknown key; the nearest is model.lora.rank",
        "model.lora.r: unknown key; model.lora has rank, alpha, target_modules, vision",
    ]


def test_a_config_of_verl_is_translated_leaf_by_leaf() -> None:
    values = {
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {"optim": {"lr": 1e-6}, "ppo_mini_batch_size": 128, "clip_ratio_high": 0.3},
            "rollout": {"n": 5, "val_kwargs": {"temperature": 1.0, "n": 4}},
        },
        "trainer": {"total_epochs": 15, "n_gpus_per_node": 8},
    }
    assert lines_of(values) == [
        "actor_rollout_ref.model.path: unknown key; write model.path",
        "actor_rollout_ref.actor.optim.lr: unknown key; write optim.learning_rate",
        f"actor_rollout_ref.actor.ppo_mini_batch_size: unknown key; {BATCH} (optim.updates_per_step"
        f" = prompts a"
        " step / prompts an update)",
        "actor_rollout_ref.actor.clip_ratio_high: unknown key; write algorithm.epsilon_high",
        "actor_rollout_ref.rollout.n: unknown key; write rollout.num_generations",
        "actor_rollout_ref.rollout.val_kwargs.temperature: unknown key; write rollout.eval.temperature or"
        " rollout.temperature",
        "actor_rollout_ref.rollout.val_kwargs.n: unknown key; write rollout.eval.num_generations",
        "trainer.total_epochs: unknown key; write run.max_steps (steps, not epochs; null is one pass over the"
        " data)",
        "trainer.n_gpus_per_node: unknown key; no setting depends on the number of processes; leave it out",
    ]


def test_a_misspelt_section_is_explained_key_by_key() -> None:
    assert lines_of({"optimizer": {"learning_rate": 1, "weight_decay": 0}}) == [
        "optimizer.learning_rate: unknown key; write optim.learning_rate",
        "optimizer.weight_decay: unknown key; write optim.weight_decay",
    ]


def test_every_advice_names_keys_that_exist() -> None:
    sections = sorted({path.split(".")[0] for path in LEGAL if "." in path})
    named = re.compile(rf"(?<![\w./])(?:{'|'.join(sections)})\.[a-z_0-9]+(?:\.[a-z_0-9]+)?")
    values = [text for advice in VALUES.values() for text in advice.values()]
    for text in [*ADVICE.values(), *PREFIXES.values(), *values]:
        for path in named.findall(text):
            assert path in LEGAL, text


def test_every_advised_value_is_one_that_its_field_refuses() -> None:
    for path, advice in VALUES.items():
        section, _, field = path.partition(".")
        for name, text in advice.items():
            values = {"path": "m"} if section == "model" else {}
            (line,) = lines_of({section: {**values, field: int(name) if name.isdigit() else name}})
            assert line.startswith(f"{path} = ") and line.endswith(f"; {text}")


def test_no_advice_hides_a_legal_key() -> None:
    """A leaf of ours may be an entry only for the sake of a note on the same leaf."""
    leaf_names = {path.rpartition(".")[2]: path for path in LEGAL}
    for name in ADVICE:
        if name in leaf_names:
            assert leaf_names[name] in ADVICE[name], name
        assert name == name.casefold().replace("-", "_"), "entries are looked up folded"


def test_every_unknown_name_gets_one_line() -> None:
    for name in [*ADVICE, *(f"{prefix}x" for prefix in PREFIXES)]:
        (line,) = unknown_key(name, 1, LEGAL)
        assert line.startswith(f"{name}: unknown key; ") and "\n" not in line


def test_the_nearest_name_and_the_question_about_it() -> None:
    assert nearest("Epsilon-High", ["epsilon", "epsilon_high"]) == "epsilon_high"
    assert nearest("beta", ["alpha", "gamma"]) is None
    assert did_you_mean("iuo", ["iou", "length"]) == "did you mean 'iou'? "
    assert did_you_mean("beta", ["alpha", "gamma"]) == ""
