"""The reward `reward_model`: a transformers sequence classifier scores the conversation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mm_grpo.errors import RewardError
from mm_grpo.messages import messages_text
from mm_grpo.rewards.registry import reward
from mm_grpo.terminal import quiet_libraries

_LOADING = threading.Lock()


@reward("reward_model")
def reward_model(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    model: str,
    output: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
) -> list[float]:
    """The score that a reward model (AutoModelForSequenceClassification) gives to prompt and completion.

    `model` is a folder or a hub name; it is loaded at the first call and kept. With a chat template in its
    tokenizer the messages are laid out by it, otherwise prompt and completion are joined by a line
    break. The model reads text only: images are left out. The score is the raw logit; of several outputs, `output`
    chooses one.

    `batch_size` completions go through the model at once, similar lengths together; the batch changes a
    score by rounding only. A text longer than the model's context raises, because a cut text would get another
    text's score. `device` is cpu, cuda, cuda:N or auto (a GPU if there is one).

    Returns one score a completion, unbounded; never None. RewardError when the model or `output` does not fit.
    For recipes with a preference model: Skywork-Reward, ArmoRM. Needs torch and transformers, which mm_grpo
    has anyway. There is no example that runs without a model: {name: reward_model, model: path/to/model}.
    """
    import torch

    if not isinstance(model, str) or not isinstance(batch_size, int) or batch_size < 1:
        raise RewardError(
            f"reward_model: model={model!r}, batch_size={batch_size!r}; set a folder or hub name and a number from "
            f"1 in the entry (a column of the dataset with the option's name is taken for it)"
        )
    network, tokenizer = _load(model, device)
    column, outputs = (0 if output is None else output), network.config.num_labels
    if (output is None and outputs > 1) or not 0 <= column < outputs:
        raise ValueError(f"output={output}; set the one of the model's {outputs} that counts, from 0")
    positions = getattr(network.config, "max_position_embeddings", None) or 10**9
    limit = int(min(positions, tokenizer.model_max_length))
    ids = [_tokens(tokenizer, prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
    for i, row in enumerate(ids):
        if len(row) > limit:
            raise RewardError(
                f"reward_model: prompt and completion {i} have {len(row)} tokens, and {model} takes {limit}; "
                f"lower rollout.max_completion_length"
            )
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    scores = [0.0] * len(ids)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [ids[i] for i in indices]}, padding_side="right", return_tensors="pt"
        )
        with torch.inference_mode():
            logits = network(
                **{name: tensor.to(network.device) for name, tensor in batch.items()}
            ).logits.float()
        for i, value in zip(indices, logits[:, column].tolist(), strict=True):
            scores[i] = value
    return scores


def _load(model: str, device: str) -> tuple[Any, Any]:
    with _LOADING:  # lru_cache alone would let two threads load it twice
        return _load_once(model, device)


@lru_cache(maxsize=2)
def _load_once(model: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        with quiet_libraries():
            network, info = AutoModelForSequenceClassification.from_pretrained(
                model, dtype="auto", output_loading_info=True, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward_model: {model!r} cannot be loaded as a sequence classifier: {error}"
        ) from error
    if absent := sorted(info["missing_keys"]):
        # transformers fills them with random numbers: a base model would score at random
        raise RewardError(
            f"reward_model: {model!r} is no trained sequence classifier; it lacks {', '.join(absent[:5])}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if network.config.pad_token_id is None:  # decoders use it to find the last token before the padding
        network.config.pad_token_id = tokenizer.pad_token_id
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return network.to(target).eval(), tokenizer


def _tokens(tokenizer: Any, prompt: Any, completion: Any) -> list[int]:
    if tokenizer.chat_template and isinstance(prompt, list) and isinstance(completion, list):
        messages = [{"role": m["role"], "content": messages_text([m])} for m in [*prompt, *completion]]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    texts = [value if isinstance(value, str) else messages_text(value) for value in (prompt, completion)]
    return list(tokenizer("\n".join(texts))["input_ids"])
