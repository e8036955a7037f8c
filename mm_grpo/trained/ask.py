"""One question to a run, an export, a model folder or a model of the Hub.

The system prompt, the arguments of the chat template and the pixel limits are those of the run, also in an export of
it; a model folder has none. The answer is sampled by the embedded engine, as a rollout is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_grpo.build import processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.data.images import open_image
from mm_grpo.data.rows import read_row
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.learner.model import load_model, resolve_device, resolve_dtype
from mm_grpo.processors.base import Processor
from mm_grpo.rollout.engine import Request, Sampling
from mm_grpo.rollout.evaluate import sampling_of
from mm_grpo.rollout.prompts import context_of
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.terminal import quiet_libraries
from mm_grpo.trained.export import read_export_mark
from mm_grpo.trained.model import as_config_error, load_trained
from mm_grpo.trained.proof import load_plain
from mm_grpo.trained.source import RunCheckpoint, find_model, refuse_code
from mm_grpo.types import Completion, Sample

MAX_TOKENS = 512
"""Tokens of an answer of a model that no run is known of."""


@dataclass(frozen=True)
class Answering:
    """A model that answers, with the settings of its run; `notes` say what of them is left out."""

    model: Any
    processor: Processor
    config: GRPOConfig
    sampling: Sampling
    notes: tuple[str, ...] = ()


def load_answering(
    source: str, *, which: str | None = None, device: str | None = None, trust: bool = False
) -> Answering:
    """The model at `source`; `which` is the checkpoint of a run, best, last (also None) or step-N.

    Raises ConfigError for what is no model, and for code that its files ask to run, unless `trust`.
    """
    found = find_model(source, which, [f"model.device={device}"] if device else [], trust=trust)
    if isinstance(found, RunCheckpoint):
        return _of_run(found)
    path = Path(source)
    mark = read_export_mark(path)
    settings: dict[str, Any] = mark["settings"] if mark else {}
    base = _base_of(path) if found.is_adapter else source
    model_section = {**settings.get("model", {}), "path": base}
    model_section |= ({"device": device} if device else {}) | ({"trust_remote_code": True} if trust else {})
    config = GRPOConfig.from_dict({**settings, "model": model_section})
    if not trust:
        refuse_code(source, config.model)
    processor = processor_of(config)
    if found.is_adapter:
        dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
        with as_config_error(f"'{source}' is no adapter for '{base}'"):
            model = load_plain(path, config, dtype, adapter=True).get_base_model()
    else:
        model = load_model(config.model, processor.family).eval()
    sampling = sampling_of(config) if mark else Sampling(MAX_TOKENS, temperature=0.0)
    return Answering(model, processor, config, sampling)


def _of_run(found: RunCheckpoint) -> Answering:
    trained, rollout = load_trained(found), found.config.rollout
    notes = "the run's tools and environment are not called: the answer is one turn"
    several = bool(rollout.tools or rollout.environment)
    return Answering(
        trained.model, trained.processor, found.config, sampling_of(found.config), (notes,) * several
    )


def ask(
    answering: Answering,
    question: str,
    images: Sequence[str],
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Completion:
    """The answer to a question about images, which stand before its text. DataError for an image that cannot be read.

    None is the run's own sampling in evaluation, which is greedy where nothing else was asked for.
    """
    config, processor = answering.config, answering.processor
    if absent := [each for each in images if not Path(each).is_file()]:
        raise DataError(f"--image {absent[0]}: there is no such file")
    pictures = tuple(open_image(each, row="--image") for each in images)
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
    row = {"prompt": [{"role": "user", "content": content}], "images": list(pictures)}
    fields = read_row(row, row_name="the question", system_prompt=config.data.system_prompt)
    prompt = processor.prompt(Sample(uid="the question", messages=fields.messages, images=pictures))
    own = answering.sampling
    heat = own.temperature if temperature is None else temperature
    sampling = replace(own, temperature=heat, max_tokens=max_tokens or own.max_tokens)
    context, length = context_of(answering.model.config), len(prompt.token_ids)
    if context is not None and length + sampling.max_tokens > context:
        raise ConfigError(
            f"--max-tokens {sampling.max_tokens}: the question has {length} tokens, and the model's context is "
            f"{context}; lower it, or ask with fewer or smaller images"
        )
    (answer,) = TransformersEngine(answering.model, processor).generate([Request(prompt, seed, sampling)])
    return answer


def _base_of(path: Path) -> str:
    """The base model that an adapter's config names."""
    with quiet_libraries():
        from peft import PeftConfig

    with as_config_error(f"'{path}/adapter_config.json' cannot be read"):
        if not (base := PeftConfig.from_pretrained(str(path)).base_model_name_or_path):
            raise ValueError("base_model_name_or_path is missing")
    return str(base)
