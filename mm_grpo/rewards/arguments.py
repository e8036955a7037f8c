"""Arguments of a reward function's call by name: ours, then columns, then what the config bound.

Functions get copies, because one that pops from a list or paints on an image would change later calls and the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mm_grpo.messages import messages_text
from mm_grpo.rewards.spec import TURN_ARGUMENTS
from mm_grpo.rewards.thinking import without_thinking
from mm_grpo.user_code.kept_state import own_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mm_grpo.rewards.batch import Batch
    from mm_grpo.rewards.spec import RewardSpec
    from mm_grpo.types import Completion, Turn

NOT_COPIED = {
    "completion", "completion_ids", "trainer_state", "log_extra", "log_metric", "environment", "environments"
}  # fmt: skip
"""Arguments that no other call sees or none can change, and environments, which are the user's."""


def copied_arguments(batch: Batch, spec: RewardSpec, rows: Sequence[int]) -> dict[str, Any]:
    """Return `arguments_of` with copies of everything that the function could change for later calls."""
    arguments = arguments_of(batch, spec, rows)
    for name in arguments.keys() - NOT_COPIED - spec.shared_settings:
        arguments[name] = own_copy(arguments[name])
    return arguments


def arguments_of(batch: Batch, spec: RewardSpec, rows: Sequence[int]) -> dict[str, Any]:
    """Return every argument of a call for `rows` by name. A required one that nothing supplies is None."""
    if spec.kind == "completion":
        supplied, columns = _for_completion(batch, spec, rows[0]), batch.prompts[rows[0]].sample.columns
    else:
        samples = [batch.prompts[row].sample for row in rows]
        supplied = _for_batch(batch, spec, rows) | {"samples": samples}
        columns = {name: [sample.columns.get(name) for sample in samples] for name in batch.columns}
    supplied = {n: v for n, v in supplied.items() if n not in TURN_ARGUMENTS or n not in batch.columns}
    arguments: dict[str, Any] = {}
    for name in spec.required + spec.optional:
        if name in supplied:
            arguments[name] = supplied[name]
        elif name in columns:
            arguments[name] = columns[name]
        elif name in spec.required:
            arguments[name] = None
    if spec.takes_kwargs:
        if spec.kind == "batch":  # TRL's functions look these up in their **kwargs
            arguments |= {name: value for name, value in supplied.items() if name not in arguments}
        excluded = {*arguments, *supplied, *spec.optional, *spec.config_only}
        arguments.update({name: columns.get(name) for name in batch.columns if name not in excluded})
    return arguments | dict(spec.bound)


def _for_completion(batch: Batch, spec: RewardSpec, row: int) -> dict[str, Any]:
    prompt, completion = batch.prompts[row], batch.completions[row]
    return {
        "completion": completion_text(batch, spec, row),
        "completion_ids": list(completion.token_ids),
        "prompt": _prompt(batch, row),
        "images": prompt.engine_prompt.images,
        "videos": prompt.engine_prompt.videos,
        "sample": prompt.sample,
        "trainer_state": batch.state,
        "log_extra": lambda column, value: batch.log_extra(spec, [row], column, own_copy([value])),
        "log_metric": batch.log_metric,
        "turns": turn_messages(completion),
        "environment": completion.final_state,
        "environment_reward": completion.final_reward,
    }


def _for_batch(batch: Batch, spec: RewardSpec, rows: Sequence[int]) -> dict[str, Any]:
    completions = [batch.completions[row] for row in rows]
    supplied = {
        "prompts": [_prompt(batch, row) for row in rows],
        "completions": [
            completion_text(batch, spec, row) if spec.takes_texts else _completion(batch, spec, row)
            for row in rows
        ],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        "images": [list(batch.prompts[row].engine_prompt.images) for row in rows],
        "videos": [list(batch.prompts[row].engine_prompt.videos) for row in rows],
        "trainer_state": batch.state,
        "log_extra": lambda column, values: batch.log_extra(spec, rows, column, own_copy(list(values))),
        "log_metric": batch.log_metric,
    }
    # Without turns these stay out, unless asked for: they would appear in the **kwargs of TRL's functions.
    if any(c.turns for c in completions) or not TURN_ARGUMENTS.isdisjoint(spec.required + spec.optional):
        supplied["turns"] = [turn_messages(completion) for completion in completions]
        supplied["environments"] = [completion.final_state for completion in completions]
        supplied["environment_reward"] = [completion.final_reward for completion in completions]
    return supplied


def _prompt(batch: Batch, row: int) -> Any:
    """Return the messages in a new list, or the text if prompts are not conversational."""
    messages = batch.prompts[row].sample.messages
    if batch.conversational:
        return [dict(message) for message in messages]
    return messages_text(messages)


def _completion(batch: Batch, spec: RewardSpec, row: int) -> Any:
    """Return the answer in TRL's form: messages if the prompt is messages, else the text."""
    text = completion_text(batch, spec, row)
    if not batch.conversational:
        return text
    answer = {"role": "assistant", "content": text}
    return [*map(_message, batch.completions[row].turns[:-1]), answer]


def completion_text(batch: Batch, spec: RewardSpec, row: int) -> str:
    """Return the completion's text; with `strip_thinking` only what follows the thinking."""
    text = batch.completions[row].text
    opened = batch.prompts[row].opens_thinking
    return without_thinking(text, opened=opened) if spec.options.strip_thinking else text


def turn_messages(completion: Completion) -> list[dict[str, Any]]:
    """Return the messages of a conversation of several turns, [] for a single answer."""
    return [turn.shown() for turn in completion.turns]


def _message(turn: Turn) -> dict[str, Any]:
    """Return a turn in TRL's form."""
    if turn.role == "assistant":
        return {"role": "assistant", "content": turn.text}
    media = [{"type": "image", "image": image} for image in turn.images]
    media += [{"type": "video", "video": video} for video in turn.videos]
    content = [*media, {"type": "text", "text": turn.text}] if media else turn.text
    return {"role": "tool", "name": turn.name, "content": content}
