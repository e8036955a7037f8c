"""Ask a run, an export, a model folder or a model of the Hub one question.

A run and its exports keep the system prompt, the arguments of the chat template and the pixel limits; a model folder
has none. The embedded engine samples the answer.
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
from mm_grpo.data.videos import VideoSource, open_video
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.files import read_json
from mm_grpo.learner.model import load_model, resolve_device, resolve_dtype
from mm_grpo.processors.base import Processor
from mm_grpo.rollout.engine import Request, Sampling
from mm_grpo.rollout.evaluate import sampling_of
from mm_grpo.rollout.prompts import context_of
from mm_grpo.rollout.transformers_engine import TransformersEngine
from mm_grpo.trained.export import read_export_mark
from mm_grpo.trained.model import as_config_error, load_trained
from mm_grpo.trained.proof import load_plain
from mm_grpo.trained.source import RunCheckpoint, find_model, refuse_code
from mm_grpo.types import Completion, Sample

MAX_TOKENS = 512  # tokens of an answer, for a model that comes without a run's settings


@dataclass(frozen=True)
class AnsweringModel:
    """Model that answers questions, with the settings of its run."""

    model: Any
    processor: Processor
    config: GRPOConfig
    sampling: Sampling
    notes: tuple[str, ...] = ()  # settings of the run that are not applied


def load_answering(
    source: str, *, checkpoint: str | None = None, device: str | None = None, trust: bool = False
) -> AnsweringModel:
    """Load the model at `source`; `checkpoint` of a run is best, last (also None) or step-N.

    Raises ConfigError if there is no model, and unless `trust` if its files ask to run code.
    """
    overrides = [f"model.device={device}"] if device else []
    found_model = find_model(source, checkpoint, overrides, trust=trust)
    if isinstance(found_model, RunCheckpoint):
        config, trained = found_model.config, load_trained(found_model)
        note = "the run's tools and environment are not called: the answer is one turn"
        notes = (note,) if config.rollout.tools or config.rollout.environment else ()
        return AnsweringModel(trained.model, trained.processor, config, sampling_of(config), notes)
    path = Path(source)
    mark = read_export_mark(path)
    settings: dict[str, Any] = mark["settings"] if mark else {}
    base = source
    if found_model.is_adapter:
        with as_config_error(f"'{path}/adapter_config.json' cannot be read"):
            base = read_json(path / "adapter_config.json", dict)["base_model_name_or_path"]
    model_section = {**settings.get("model", {}), "path": base}
    model_section |= ({"device": device} if device else {}) | ({"trust_remote_code": True} if trust else {})
    config = GRPOConfig.from_dict({**settings, "model": model_section})
    if not trust:
        refuse_code(source, config.model)
    processor = processor_of(config)
    if found_model.is_adapter:
        dtype = resolve_dtype(config.model.dtype, resolve_device(config.model.device))
        with as_config_error(f"'{source}' is no adapter for '{base}'"):
            model = load_plain(path, config, dtype, adapter=True).get_base_model()
    else:
        model = load_model(config.model, processor.family).eval()
    sampling = sampling_of(config) if mark else Sampling(MAX_TOKENS, temperature=0.0)
    return AnsweringModel(model, processor, config, sampling)


def ask(
    answering: AnsweringModel,
    question: str,
    images: Sequence[str] = (),
    videos: Sequence[str] = (),
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Completion:
    """Answer a question; its images, then its videos, stand before its text. DataError for one that cannot be read.

    `temperature` and `max_tokens` None are the run's in evaluation, which is greedy by default.
    """
    config, processor = answering.config, answering.processor
    for option, paths in (("--image", images), ("--video", videos)):
        if missing := [path for path in paths if not Path(path).is_file()]:
            raise DataError(f"{option} {missing[0]}: there is no such file")
    opened = tuple(open_image(path, row="--image") for path in images)
    bounds: Any = {"fps": config.data.video_fps, "max_frames": config.data.video_max_frames}
    clips = tuple(open_video(VideoSource(path), row="--video", **bounds) for path in videos)
    parts = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
    content = [*parts, {"type": "text", "text": question}]
    row = {"prompt": [{"role": "user", "content": content}], "images": [*images], "videos": [*videos]}
    fields = read_row(row, row_name="the question", system_prompt=config.data.system_prompt)
    prompt = processor.prompt(Sample("the question", fields.messages, opened, clips))
    sampling = answering.sampling
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    if max_tokens:
        sampling = replace(sampling, max_tokens=max_tokens)
    context, length = context_of(answering.model.config), len(prompt.token_ids)
    if context is not None and length + sampling.max_tokens > context:
        raise ConfigError(
            f"--max-tokens {sampling.max_tokens}: the question has {length} tokens, and the model's context is "
            f"{context}; lower it, or ask with fewer or smaller images or shorter videos"
        )
    (answer,) = TransformersEngine(answering.model, processor).generate([Request(prompt, seed, sampling)])
    return answer
