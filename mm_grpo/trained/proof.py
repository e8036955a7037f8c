"""Compare a written folder with the trained model: equal tensors to the bit, and equal log-probs.

The folder is loaded with plain transformers, adapters with plain peft, and scores prompts of the run one by one, made
by its own processor. The learner's forward scores the same tokens with unmerged adapters. So a wrong merge is found,
and so is a damaged file.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from mm_grpo.config import GRPOConfig
from mm_grpo.data.images import open_image
from mm_grpo.errors import ConfigError
from mm_grpo.health.checks import LIMITS, LogprobGap
from mm_grpo.learner.forward_pass import score
from mm_grpo.learner.lora import ADAPTER
from mm_grpo.learner.model import resolve_device
from mm_grpo.learner.quantization import nf4_options, run_exactly
from mm_grpo.parity.gaps import gap_of
from mm_grpo.processors.base import Processor, processor_class
from mm_grpo.processors.model_folder import quoted
from mm_grpo.processors.video_input import FRAMES_UNCHANGED, frames_array, video_metadata
from mm_grpo.rollout.weights import digest, few
from mm_grpo.run.paths import IMAGE_NAME, RunPaths
from mm_grpo.run.rollout_log import logged_steps, read_rollouts
from mm_grpo.terminal import quiet_libraries
from mm_grpo.trained.model import Trained, as_config_error
from mm_grpo.types import Prompt, Sample, Video

COUNT = 4  # prompts of a comparison
MAX_TOKENS = 64  # of a completion

ProofPrompts = list[tuple[Prompt, tuple[int, ...]]]
"""Prompts, each with the token ids [T] of a completion."""
MAX_GAP = 1e-4
"""Largest gap of a token in float32, in nats. In bfloat16 the mean gap is limited, as between learner and engine."""

MATCH_PATTERNS = """
import json, re, sys
config, names = json.load(open(sys.argv[1], encoding="utf-8")), json.load(sys.stdin)
for field in "target_modules exclude_modules modules_to_save layers_pattern rank_pattern alpha_pattern".split():
    for pattern in [config[field]] if isinstance(config.get(field), str) else config.get(field) or ():
        for name in names:
            re.match(rf"(.*\\.)?({pattern})$", name)
"""
PATTERN_TIMEOUT = 20.0  # seconds for the patterns of an adapter, which normally take milliseconds


@dataclass(frozen=True)
class Proof:
    """Gap of log-probs [nats] over some prompts; the largest is limited in float32, the mean in bfloat16."""

    gap: LogprobGap
    prompts: int
    limit: float
    dtype: str

    def limited(self) -> tuple[str, float]:
        """Return the name and the value of the limited difference."""
        return ("largest", self.gap.max) if self.dtype == "float32" else ("mean", self.gap.mean)

    def __str__(self) -> str:
        kind, difference = self.limited()
        return (
            f"log-probs of {self.gap.tokens} tokens after {self.prompts} prompts of the run, by plain transformers: "
            f"the {kind} difference from the trainer's is {difference:.1e} nats ({self.dtype}, at most {self.limit:g})"
        )


def prove(
    folder: Path,
    trained: Trained,
    prompts: ProofPrompts,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    adapter: bool,
) -> Proof:
    """Load `folder` and compare it with the trained model, whose `tensors` are named as in the folder.

    Raises ConfigError, naming the difference, if it is not the trained model.
    """
    config, dtype = trained.config, trained.model.dtype
    with as_config_error("what was written cannot be loaded"), quiet_libraries():
        model = load_plain(folder, config, dtype, adapter=adapter)
        trust = config.model.trust_remote_code
        processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tensors:
        if name not in parameters or digest(parameters[name]) != digest(tensor):
            fault = "differs from what was written" if name in parameters else "is missing"
            raise ConfigError(f"{name} {fault} when it is read back: the disk or the copy is faulty")
    scores, expected = list[list[float]](), list[list[float]]()
    for prompt, ids in prompts:
        expected += score(trained.model, trained.processor, config, prompt, [ids])
        with torch.no_grad():
            kwargs = {**config.data.chat_template_kwargs, **prompt.sample.chat_template_kwargs}
            inputs = plain_inputs(processor, prompt, ids, kwargs)
            input_ids, media = inputs["input_ids"][0].tolist(), trained.processor.media_token_ids
            # tokens of InternVL's videos are an image's in transformers, and a video's in vLLM and for the trainer
            pairs = zip_longest(input_ids, (*prompt.token_ids, *ids))
            if not all(a == b or {a, b} <= media for a, b in pairs):
                count = len(input_ids) - len(ids)
                counts = f"{count} tokens, the trainer's {len(prompt.token_ids)} other ones"
                raise ConfigError(f"{prompt.uid}: the saved processor is not the run's: it makes {counts}")
            scores.append(plain_logprobs(model, inputs, ids))
    name = str(dtype).removeprefix("torch.")
    limit = MAX_GAP if name == "float32" else LIMITS["bfloat16"]
    proof = Proof(gap_of(scores, expected), len(scores), limit, name)
    if not proof.limited()[1] <= limit:  # a NaN is refused too
        raise ConfigError(f"what was written is not the trained model: {proof}; nothing was kept")
    return proof


def load_plain(folder: Path, config: GRPOConfig, dtype: torch.dtype, *, adapter: bool) -> Any:
    """Load the model in `folder` with transformers; with `adapter` the base model, and the adapter with peft."""
    trust = config.model.trust_remote_code
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust}
    base = config.model.path if adapter else folder
    if adapter:
        cls, base_config = processor_class(
            str(base), processor=config.model.processor, trust_remote_code=trust
        )
        options |= nf4_options(config.model, base_config, cls.family, dtype)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        base, use_safetensors=True, output_loading_info=True, **options
    )
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info[kind])):
            raise ConfigError(f"{kind.replace('_', ' ')} in '{base}': {', '.join(keys[:3])}")
    if adapter:
        run_exactly(model)
        model = _with_adapter(model, folder)
    return model.to(resolve_device(config.model.device)).eval()


def _with_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder` to a model. Raises ConfigError if the folder lacks a tensor or has a foreign one."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    _refuse_slow_patterns(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft only warns of missing tensors, which are an error here
        model = PeftModel.from_pretrained(model, str(folder))
        keys: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    missing = sorted(name for name in keys.missing_keys if f".{ADAPTER}" in name)  # without the base's keys
    for names, fault in ((missing, "lacks"), (sorted(keys.unexpected_keys), "has no layer for")):
        if names:
            listed = few(names).replace(f".{ADAPTER}", "")
            raise ConfigError(f"'{folder}' {fault} {listed}; give the whole adapter, as it was saved")
    return model


def _refuse_slow_patterns(model: Any, folder: Path) -> None:
    """Raise ConfigError if the patterns of an adapter take too long; peft would match them in this process."""
    file = folder / "adapter_config.json"
    names = json.dumps([name for name, _ in model.named_modules()])
    command = [sys.executable, "-I", "-c", MATCH_PATTERNS, str(file)]
    try:
        subprocess.run(command, input=names, text=True, stderr=subprocess.DEVNULL, timeout=PATTERN_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"'{file}': a pattern, say of target_modules, takes more than {PATTERN_TIMEOUT:g} s on the names of the "
            "layers; list the names instead"
        ) from None


def plain_inputs(
    processor: Any, prompt: Prompt, completion: Sequence[int], template_kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Make model inputs by transformers' own `processor`: a row, its media at their final size, and a completion.

    M-RoPE positions of a row with videos are the trainer's: up to version 5.19 transformers' are wrong behind a video.
    """
    # some templates take only strings as contents, others only lists of parts
    messages = [dict(message) for message in prompt.sample.messages]
    with_parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
        for m in messages
    ]
    media: dict[str, Any] = {"images": list(prompt.engine_prompt.images) or None}
    if videos := prompt.engine_prompt.videos:
        media |= {"videos": [*map(frames_array, videos)], "video_metadata": [*map(video_metadata, videos)]}
        media["videos_kwargs"] = dict(FRAMES_UNCHANGED)
        # transformers 5.19 warns if this is not said
        if hasattr(processor.video_processor, "cap_pixels_per_frame"):
            media["videos_kwargs"]["cap_pixels_per_frame"] = False
    inputs: dict[str, Tensor] = {}
    for conversation in (messages, with_parts):
        try:
            text = processor.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:
            if conversation is with_parts:
                raise ConfigError(f"{prompt.uid}: the saved chat template fails ({quoted(error)})") from error
            continue
        inputs = dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **media))
        if tuple(inputs["input_ids"][0].tolist()) == prompt.token_ids:
            break
    for name in ("attention_mask", "video_metadata", "second_per_grid_ts"):
        inputs.pop(name, None)
    ids = torch.tensor([list(completion)], dtype=torch.long)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(completion)))
    if videos and prompt.position_ids.ndim == 2:
        counted = torch.arange(len(completion)).expand(3, -1) + prompt.next_position
        inputs["position_ids"] = torch.cat([prompt.position_ids, counted], 1)[:, None]
    return inputs


def plain_logprobs(model: Any, inputs: Mapping[str, Tensor], completion: Sequence[int]) -> list[float]:
    """Return log-probs [T] of the completion at the end of `inputs`, over the whole vocabulary."""
    device = next(model.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    logits = model(**on_device, use_cache=False).logits[0].float()[-len(completion) - 1 : -1]
    ids = torch.tensor(list(completion), device=logits.device)[:, None]
    values: list[float] = logits.log_softmax(-1).gather(1, ids)[:, 0].tolist()
    return values


# prompts from the rollout log ---------------------------------------------------------------


def prompts_of_run(paths: RunPaths, processor: Processor, config: GRPOConfig) -> ProofPrompts:
    """Return COUNT logged prompts, preferably with media, each with a completion; ConfigError if there are none."""
    prompts = list(itertools.islice(_logged_prompts(paths, processor, config), 8 * COUNT))
    if not prompts:
        raise ConfigError(f"'{paths.root}' has no rollouts/ to compare on; put them back")
    prompts.sort(key=lambda pair: not pair[0].engine_prompt.media)
    return prompts[:COUNT]


def _logged_prompts(
    paths: RunPaths, processor: Processor, config: GRPOConfig
) -> Iterator[tuple[Prompt, Any]]:
    uids: set[str] = set()
    for step in reversed(logged_steps(paths)):
        for row in read_rollouts(paths, step):
            names = [*row["images"], *(name for video in row["videos"] for name in video["frames"])]
            exist = all(IMAGE_NAME.fullmatch(n) and (paths.images / n).is_file() for n in names)
            if row["uid"] in uids or not exist:
                continue
            uids.add(row["uid"])
            yield processor.prompt(_sample(paths, row)), _text_ids(processor, config, row["completion"])


def _sample(paths: RunPaths, row: Mapping[str, Any]) -> Sample:
    """Return the sample that was logged in a row, with its media at their final size; frames were compressed."""

    def read(names: Sequence[str]) -> tuple[Image, ...]:
        return tuple(open_image(str(paths.images / name), row=row["uid"]) for name in names)

    videos = (Video(read(v["frames"]), tuple(v["times"]), v["fps"]) for v in row["videos"])
    return Sample(row["uid"], row["messages"], read(row["images"]), tuple(videos))


def _text_ids(processor: Processor, config: GRPOConfig, text: str) -> tuple[int, ...]:
    """Return the ids of a completion's text without media tokens, and an end token behind them."""
    # a processor of the user's own need not have a tokenizer
    tokenizer: Any = getattr(processor, "tokenizer", None) or AutoTokenizer.from_pretrained(config.model.path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    text_ids = [int(i) for i in ids if i not in processor.media_token_ids][: MAX_TOKENS - 1]
    return (*text_ids, min(processor.stop_token_ids))
