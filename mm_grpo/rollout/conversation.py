"""A conversation of several turns, as a growing list of tokens that is never tokenized again.

It begins as a prompt. What the model samples is appended as it was sampled, what a tool or an environment answers as
the tokens that the chat template puts there; so the ids of a turn always begin with those of the turn before. That is
checked at every turn, and the engine's own ids are compared with them as with every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mm_grpo.errors import GuardStop
from mm_grpo.types import Completion, Picture, Prompt, Tail

if TYPE_CHECKING:
    from mm_grpo.processors.base import ConversationProcessor


class Conversation:
    """One conversation: `start`, the prompt that its group shares, and `prompt`, which is asked next."""

    def __init__(self, start: Prompt, processor: ConversationProcessor) -> None:
        self.start, self.prompt, self.processor = start, start, processor
        self.answers: list[Completion] = []
        self._sampled: list[bool] = []
        self._pictures: list[Picture] = []

    @property
    def run_length(self) -> int:
        """Tokens after the start, expanded: sampled ones and observations."""
        return len(self.prompt.token_ids) - len(self.start.token_ids)

    def answered(self, completion: Completion) -> None:
        """Append what the model sampled to `prompt`."""
        self.answers.append(completion)
        after = self.processor.extended(self.prompt, completion.token_ids, ())
        self._go_on(after, (), sampled=completion.token_ids)

    def observed(
        self, token_ids: Sequence[int], pictures: Sequence[Picture], below: int | None = None
    ) -> int | None:
        """Append an observation: collapsed ids, with one image token for each picture. Returns the count of new tokens.

        None, with nothing appended, where `run_length` would not stay below `below`.
        """
        after, length = self.processor.extended(self.prompt, token_ids, pictures), len(self.prompt.token_ids)
        if below is not None and len(after.token_ids) - len(self.start.token_ids) >= below:
            return None
        self._go_on(after, pictures)
        return len(after.token_ids) - length

    def _go_on(
        self, after: Prompt, pictures: Sequence[Picture], sampled: tuple[int, ...] | None = None
    ) -> None:
        """Take `after` for the prompt, which adds what was `sampled`, or where that is None an observation."""
        before = self.prompt
        length = len(before.token_ids)
        kept = after.token_ids[:length] == before.token_ids
        kept = kept and bool((after.position_ids[..., :length] == before.position_ids).all())
        if not kept or (sampled is not None and after.token_ids[length:] != sampled):
            raise GuardStop(
                f"{self.start.uid}: turn {len(self.answers)} changed tokens that were there before it, or their "
                "positions; the model would be trained on others than it sampled. Check `extended` of the processor"
            )
        self.prompt = after
        self._sampled += [sampled is not None] * (len(after.token_ids) - length)
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
