"""Ids of a conversation's later messages by the chat template: tools' answers between turns, and gold answers.

A template renders whole conversations only, so the ids of interest are cut out of a longer text, and compared with what
was asked for: templates drop media, text and stop tokens without a word.
"""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mm_grpo.errors import DataError
from mm_grpo.processors.special_tokens import conversation_ids, defused
from mm_grpo.processors.tool_calls import answer_messages, knows_tools
from mm_grpo.types import Medium, Prompt, Sample, message_part


class TurnIds(ABC):
    """Base of processors of conversations, which have a chat template."""

    tokenizer: Any
    template: str
    image_token_id: int
    video_token_id: int | None
    stop_token_ids: frozenset[int]

    @abstractmethod
    def ids(self, sample: Sample, **options: Any) -> list[int]:
        """Return the ids of a sample's conversation, with one placeholder for each medium."""

    @abstractmethod
    def text_of(self, messages: Sequence[Mapping[str, Any]], row: str, **arguments: Any) -> str:
        """Render messages, with one placeholder for each medium."""

    def observation(self, answers: Sequence[Sequence[str | Medium]], sample: Sample) -> list[int]:
        """Return the collapsed ids between the end of the model's turn and its next one, by the chat template.

        `answers` are the texts and media of each tool's answer. DataError if the template cannot show them.
        """
        row, arguments = sample.uid, sample.chat_template_kwargs
        # a template renders whole conversations only: the ids of interest follow a marker in a made-up turn
        marker, kinds = "mm-grpo-turn", {self.image_token_id: "image", self.video_token_id: "video"}
        media = [
            message_part(part)["type"] for parts in answers for part in parts if not isinstance(part, str)
        ]
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
        ends = [self.tokenizer.convert_ids_to_tokens(token) for token in sorted(self.stop_token_ids)]

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            _, _, after = self.text_of(messages, row, **arguments).partition(marker)
            end = next((token for token in ends if after.startswith(token)), None)
            return "" if end is None else after[len(end) :]

        # a tool's answer is untrusted text: special tokens in it must not act as such
        plain = [
            [defused(p, self.tokenizer) if isinstance(p, str) else p for p in parts] for parts in answers
        ]
        # some templates know the role `tool` and drop its images: a user's turn may show them
        for as_tool in (True, False) if knows_tools(self.template) else (False,):
            messages = [*before, *answer_messages(plain, as_tool=as_tool)]
            ids = conversation_ids(render, self.tokenizer, messages, row)
            if ids and [kinds[token] for token in ids if token in kinds] == media:
                return ids
        raise DataError(
            f"{row}: the model's chat template does not show an answer with {count_kinds(media)} after a turn of the "
            "model that ends with a stop token; conversations of several turns need one that does (model.path)"
        )

    def answer_ids(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Return the ids that the chat template writes for an answer to a prompt, up to and with the stop token.

        DataError if the template writes another prompt before an answer, drops a part of it or ends it without a stop
        token, or if the text holds a special token.
        """
        sample, start = prompt.sample, prompt.engine_prompt.token_ids
        messages = [*sample.messages, {"role": "assistant", "content": text}]
        ids = tuple(self.ids(replace(sample, messages=messages), add_generation_prompt=False))
        answer = ids[len(start) :]
        end = next((place for place, token in enumerate(answer) if token in self.stop_token_ids), None)
        why = ""
        if prompt.opens_thinking:  # the tag stands in the prompt
            text = text.lstrip().removeprefix("<think>")
        if ids[: len(start)] != start:
            why = "writes another prompt before an answer (does it add or drop <think>?)"
        elif end is None:
            why = "writes no stop token behind an answer"
        elif _letters(text) not in _letters(self.tokenizer.decode(list(answer[:end]))):
            why = f"drops a part of the answer {text[:60]!r}"
        if end is None or why:
            raise DataError(
                f"{sample.uid}: the model's chat template {why}, so this answer cannot be taught; set "
                "data.chat_template_kwargs, or correct the template in model.path"
            )
        return answer[: end + 1]


def count_kinds(kinds: Sequence[str]) -> str:
    """Format kinds of media for a message: "2 image, 1 video"."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items())) or "none"


def _letters(text: str) -> str:
    """Return a text without white space, which templates strip, and composed (NFC), as tokenizers read it."""
    return "".join(unicodedata.normalize("NFC", text).split())
