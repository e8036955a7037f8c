"""A conversation of several turns, as a growing list of tokens that is never tokenized again.

It begins as a prompt. Sampled tokens are appended as they are; answers of tools and environments are appended as the
tokens that the chat template gives. So the ids of a turn always begin with the ids of the turn before. That is checked
at every turn, and the engine's ids are compared with them as with every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mm_grpo.errors import GuardStop
from mm_grpo.types import Completion, Picture, Prompt, Tail

if TYPE_CHECKING:
    from mm_grpo.processors.base import ConversationProcessor


class Conversation:
    """Conversation with `start`, the prompt that its group shares, and `prompt`, which is asked next."""

    def __init__(self, start: Prompt, processor: ConversationProcessor) -> None:
        self.start, self.prompt, self.processor = start, start, processor
        self.answers: list[Completion] = []
        self._sampled: list[bool] = []
        self._pictures: list[Picture] = []

    @property
    def run_length(self) -> int:
        """Tokens after the start, expanded: sampled ones and observations."""
        return len(self.prompt.token_ids) - len(self.start.token_ids)

    def add_answer(self, completion: Completion) -> None:
        """Append what the model sampled to `prompt`."""
        self.answers.append(completion)
        prompt = self.processor.extended(self.prompt, completion.token_ids, ())
        self._go_on(prompt, (), sampled=completion.token_ids)

    def add_observation(
        self, token_ids: Sequence[int], pictures: Sequence[Picture], below: int | None = None
    ) -> int | None:
        """Append an observation: collapsed ids, with one placeholder for each picture. Returns the count of new tokens.

        Returns None, and appends nothing, if `run_length` would not stay below `below`.
        """
        prompt, length = self.processor.extended(self.prompt, token_ids, pictures), len(self.prompt.token_ids)
        if below is not None and len(prompt.token_ids) - len(self.start.token_ids) >= below:
            return None
        self._go_on(prompt, pictures)
        return len(prompt.token_ids) - length

    def _go_on(
        self, prompt: Prompt, pictures: Sequence[Picture], sampled: tuple[int, ...] | None = None
    ) -> None:
        """Replace the prompt by a longer one, which adds `sampled`, or an observation if that is None."""
        before = self.prompt
        length = len(before.token_ids)
        unchanged = prompt.token_ids[:length] == before.token_ids
        unchanged = unchanged and bool((prompt.position_ids[..., :length] == before.position_ids).all())
        if not unchanged or (sampled is not None and prompt.token_ids[length:] != sampled):
            raise GuardStop(
                f"{self.start.uid}: turn {len(self.answers)} changed tokens that were there before it, or their "
                "positions; the model would be trained on others than it sampled. Check `extended` of the processor"
            )
        self.prompt = prompt
        self._sampled += [sampled is not None] * (len(prompt.token_ids) - length)
        self._pictures += pictures

    def tail(self) -> Tail | None:
        """Return what follows the start; None after a single answer."""
        if len(self.answers) < 2 and all(self._sampled):
            return None
        length = len(self.start.token_ids)
        return Tail(
            token_ids=self.prompt.token_ids[length:],
            sampled=tuple(self._sampled),
            position_ids=self.prompt.position_ids[..., length:],
            pictures=tuple(self._pictures),
        )
