"""A written folder against the trained model: the same tensors to the bit, and the same log-probs.

The folder is loaded with plain transformers, adapters with plain peft, and runs prompts of the run one by one, as its
own processor makes them. What the trained model says of the same tokens was computed by the learner's forward, with
its adapters unmerged. So a wrong merge shows, and so does a file that is not what was written.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from mm_grpo.config import GRPOConfig
from mm_grpo.errors import ConfigError
from mm_grpo.health.checks import LIMITS, LogprobGap
from mm_grpo.learner.forward_pass import score
from mm_grpo.learner.lora import ADAPTER
from mm_grpo.learner.quantization import nf4_options, run_exactly
from mm_grpo.parity.gaps import gap_of
from mm_grpo.processors.base import processor_class
from mm_grpo.processors.model_folder import quoted
from mm_grpo.rollout.weights import digest
from mm_grpo.terminal import quiet_libraries
from mm_grpo.trained.model import Trained, as_config_error
from mm_grpo.trained.prompts import Asked
from mm_grpo.types import Prompt

LARGEST = 1e-4
"""Largest gap of a token in float32, in nats; in bfloat16 the mean gap is bounded, by that between two engines."""

MATCHES = """
import json, re, sys
config, names = json.load(open(sys.argv[1], encoding="utf-8")), json.load(sys.stdin)
for field in "target_modules exclude_modules modules_to_save layers_pattern rank_pattern alpha_pattern".split():
    for pattern in [config[field]] if isinstance(config.get(field), str) else config.get(field) or ():
        for name in names:
            re.match(rf"(.*\\.)?({pattern})$", name)
"""
PATIENCE = 20.0
"""Seconds for the patterns of an adapter, which take milliseconds."""

Scores = list[list[float]]


@dataclass(frozen=True)
class Expected:
    """What a written folder has to show: log-probs of `asked` under the trained model, digests of tensors by name."""

    asked: Asked
    scores: Scores
    digests: Mapping[str, str]
    dtype: torch.dtype


@dataclass(frozen=True)
class Proof:
    """The gap [nats] over some prompts, and what it was held against: the largest in float32, the mean in bfloat16."""

    gap: LogprobGap
    prompts: int
    limit: float
    dtype: str

    def __str__(self) -> str:
        kind, limit = ("largest", self.gap.max) if self.dtype == "float32" else ("mean", self.gap.mean)
        return (
            f"log-probs of {self.gap.tokens} tokens after {self.prompts} prompts of the run, by plain transformers: "
            f"the {kind} difference from the trainer's is {limit:.1e} nats ({self.dtype}, at most {self.limit:g})"
        )


def expected_of(trained: Trained, asked: Asked, tensors: Iterator[tuple[str, Tensor]]) -> Expected:
    """Scores by the learner's forward, and digests of the tensors that will be read back, under their names there."""
    scores = [
        score(trained.model, trained.processor, trained.config, prompt, [ids])[0] for prompt, ids in asked
    ]
    return Expected(asked, scores, {name: digest(tensor) for name, tensor in tensors}, trained.model.dtype)


def prove(folder: Path, config: GRPOConfig, expected: Expected, *, adapter: bool) -> Proof:
    """Load `folder` and compare. ConfigError, naming what differs, when it is not the trained model."""
    trust = config.model.trust_remote_code
    with as_config_error("what was written cannot be loaded"), quiet_libraries():
        model = load_plain(folder, config, expected.dtype, adapter=adapter)
        processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, wanted in expected.digests.items():
        if name not in named or digest(named[name]) != wanted:
            how = "differs from what was written" if name in named else "is missing"
            raise ConfigError(f"{name} {how} where it is read back: the disk or the copy is faulty")
    found: Scores = []
    kwargs = config.data.chat_template_kwargs
    with torch.no_grad():
        for prompt, ids in expected.asked:
            inputs = plain_inputs(processor, prompt, ids, kwargs)
            made = tuple(inputs["input_ids"][0].tolist())
            if made != (*prompt.token_ids, *ids):
                counts = f"{len(made) - len(ids)} tokens, and the trainer made {len(prompt.token_ids)} others"
                raise ConfigError(f"{prompt.uid}: the saved processor is not the run's: it makes {counts}")
            found.append(plain_logprobs(model, inputs, ids))
    gap, dtype = gap_of(found, expected.scores), str(expected.dtype).removeprefix("torch.")
    exact = dtype == "float32"
    proof = Proof(gap, len(found), LARGEST if exact else LIMITS["bfloat16"], dtype)
    if not (gap.max if exact else gap.mean) <= proof.limit:
        raise ConfigError(f"what was written is not the trained model: {proof}; nothing was kept")
    return proof


def load_plain(folder: Path, config: GRPOConfig, dtype: torch.dtype, *, adapter: bool) -> Any:
    """The model in `folder` by transformers, or the base model, quantised as the run's, with the adapter in `folder` by
    peft."""
    trust = config.model.trust_remote_code
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust}
    base = config.model.path if adapter else folder
    if adapter:
        cls, found = processor_class(str(base), processor=config.model.processor, trust_remote_code=trust)
        options |= nf4_options(config.model, found, cls.family, dtype)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        base, use_safetensors=True, output_loading_info=True, **options
    )
    model, info = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[what])):
            raise ConfigError(f"{what.replace('_', ' ')} in '{base}': {', '.join(keys[:3])}")
    if adapter:
        run_exactly(model)
        model = _with_adapter(model, folder)
    from mm_grpo.learner.model import resolve_device

    return model.to(resolve_device(config.model.device)).eval()


def _with_adapter(model: Any, folder: Path) -> Any:
    """The model with the adapter in `folder`. ConfigError when the folder has not all of its tensors, or others."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    _require_quick_patterns(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft only warns of what is missing, which is an error here
        model = PeftModel.from_pretrained(model, str(folder))
        read: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    missing = sorted(name for name in read.missing_keys if f".{ADAPTER}" in name)  # and not the base's own
    for names, fault in ((missing, "lacks"), (sorted(read.unexpected_keys), "has no layer for")):
        if names:
            listed = ", ".join(names[:3]).replace(f".{ADAPTER}", "") + f" and {len(names) - 3} more" * (
                len(names) > 3
            )
            raise ConfigError(f"'{folder}' {fault} {listed}; give the whole adapter, as it was saved")
    return model


def _require_quick_patterns(model: Any, folder: Path) -> None:
    """ConfigError when the patterns of an adapter take too long: peft matches them in this process."""
    file = folder / "adapter_config.json"
    names = json.dumps([name for name, _ in model.named_modules()])
    command = [sys.executable, "-I", "-c", MATCHES, str(file)]
    try:
        subprocess.run(command, input=names, text=True, stderr=subprocess.DEVNULL, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        why = f"a pattern takes more than {PATIENCE:g} s on the names of the layers"
        raise ConfigError(f"'{file}': {why} (target_modules, say); list the names instead") from None


def plain_inputs(
    processor: Any, prompt: Prompt, completion: Sequence[int], template_kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What transformers' own `processor` makes of the row, its images at their final size, with a completion behind."""
    # a template that takes no list of parts is given strings, and one that takes no string, parts
    messages = [dict(message) for message in prompt.sample.messages]
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in messages
    ]
    images = list(prompt.engine_prompt.images) or None
    made: dict[str, Tensor] = {}
    for given in (messages, parts):
        try:
            text = processor.apply_chat_template(
                given, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:
            if given is parts:
                raise ConfigError(f"{prompt.uid}: the saved chat template fails ({quoted(error)})") from error
            continue
        made = dict(processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))
        if tuple(made["input_ids"][0].tolist()) == prompt.token_ids:
            break
    made.pop("attention_mask", None)
    ids = torch.tensor([list(completion)], dtype=torch.long)
    made["input_ids"] = torch.cat([made["input_ids"], ids], 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in made:
            made[name] = torch.nn.functional.pad(made[name], (0, len(completion)))
    return made


def plain_logprobs(model: Any, inputs: Mapping[str, Tensor], completion: Sequence[int]) -> list[float]:
    """Log-probs [T] of a completion at the end of `inputs`, by the model's own forward; over the whole vocabulary."""
    device = next(model.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    logits = model(**on_device, use_cache=False).logits[0].float()[-len(completion) - 1 : -1]
    chosen = torch.tensor(list(completion), device=logits.device)[:, None]
    values: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return values
