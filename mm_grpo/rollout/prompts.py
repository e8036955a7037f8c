"""From rows to the prompts of a step.

A prompt that is too long, or whose image cannot be read, is refused or dropped, by policy, and never cut. A dropped row
leaves its slot empty, so the seeds of the other slots stay what they were.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from mm_grpo.errors import BadMedia, DataError, UserError
from mm_grpo.rewards.thinking import OPEN
from mm_grpo.rollout.engine_limits import prompt_limit
from mm_grpo.rollout.prefetch import Prefetched, Prefetcher

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.order import PromptOrder
    from mm_grpo.processors.base import Processor
    from mm_grpo.rollout.prefetch import SamplePreparer
    from mm_grpo.types import Prompt, Sample


@dataclass(frozen=True)
class StepPrompts:
    """The prompts of one step with their slots, and the numbers of dropped rows and decoded pictures."""

    slots: list[int]
    prompts: list[Prompt]
    dropped: int
    decoded: Counter[str] = field(default_factory=Counter)


class TooLong(DataError):
    """A prompt is longer than its limit."""


log = logging.getLogger(__name__)
THINK_TOKENS = 16
"""Tokens at the end of a prompt in which `<think>` is looked for; a tokenizer that does not know it needs several."""
WORKERS = 2
"""Threads in each process that decode and resize the images of the next rows while a step runs."""


class PromptBuilder:
    """Builder of prompts under the config's length limit.

    `context` is the model's own, in tokens; `max_model_len` what vLLM is started for, None with another engine;
    `preparer` changes samples before the processor gets them. Attribute `evaluation` is the builder for evaluation,
    whose completions may be longer. Raises ConfigError when the longest completion takes all of the context.
    """

    def __init__(
        self,
        processor: Processor,
        config: GRPOConfig,
        context: int | None,
        max_model_len: int | None = None,
        preparer: SamplePreparer | None = None,
    ) -> None:
        self.processor, self.prefetcher = processor, Prefetcher(processor, WORKERS, preparer)
        self.policy, self.bad_media = config.data.on_overlong, config.data.on_bad_media
        sizes = context, max_model_len
        self.limit_name, self.limit = prompt_limit(config, *sizes, training=True)
        self.evaluation = self
        if config.rollout.eval.max_completion_length is not None or self.policy == "drop":
            # it shares the prefetcher, and so its threads
            self.evaluation = copy.copy(self)
            self.evaluation.limit_name, self.evaluation.limit = prompt_limit(config, *sizes, training=False)

    def process(self, sample: Sample) -> Prompt:
        """Return the prompt of a sample. DataError when it is longer than the limit."""
        return self._checked(self.prefetcher.process(sample))

    def prompts(self, dataset: Rows, rows: Mapping[int, int], next_rows: Iterable[int] = ()) -> StepPrompts:
        """Make the prompts of rows, by slot; slots of one row share a prompt.

        Prompts of `next_rows`, which will be asked for next, begin in the background.
        """
        # all rows begin before the first is waited for, and before the next ones, which have time
        waits = {row: self.prefetcher.begin(dataset, row) for row in dict.fromkeys(rows.values())}
        self.prefetcher.ahead(dataset, next_rows)
        results = {row: self._usable(wait) for row, wait in waits.items()}
        usable = {slot: result.prompt for slot, row in rows.items() if (result := results[row]) is not None}
        decoded = sum((result.decoded for result in results.values() if result is not None), Counter[str]())
        return StepPrompts(list(usable), list(usable.values()), len(rows) - len(usable), decoded)

    def warn_if_none(self, step: int, prompts: int, dropped: int) -> None:
        """Warn of a step that has no prompt left over all processes, and so makes no update."""
        if prompts == 0:
            log.warning(
                "step %d: all %d prompts were dropped, so it makes no update: they are longer than %s allows (%s "
                "tokens), or their media cannot be read; lower data.max_pixels or data.video_max_frames, fix the "
                "files, or raise the limit",
                step, dropped, self.limit_name, self.limit,
            )  # fmt: skip

    def first(self, dataset: Rows, order: PromptOrder) -> Iterator[tuple[int, int, Prompt]]:
        """Yield (step, slot, prompt) in the order of the run, no row twice; a prompt is made when it is asked for."""
        # as many places as rows: all rows come, unless the order repeats some
        places = ((step, slot, row) for step in count(1) for slot, row in enumerate(order.rows(step)))
        rows: set[int] = set()
        for step, slot, row in islice(places, len(dataset)):
            if row in rows:
                continue
            rows.add(row)
            result = self._usable(self.prefetcher.begin(dataset, row))
            if result is not None:
                yield step, slot, result.prompt

    def close(self) -> None:
        """Make nothing more in the background."""
        self.prefetcher.close()

    def dropped_by(self, error: UserError) -> str | None:
        """Return the field by which an error about a prompt leaves its row out; None if it ends the run."""
        if isinstance(error, TooLong) and self.policy == "drop":
            return "data.on_overlong"
        return "data.on_bad_media" if isinstance(error, BadMedia) and self.bad_media == "drop" else None

    def _usable(self, wait: Callable[[], Prefetched]) -> Prefetched | None:
        """Wait for a row's prompt; None when it is dropped."""
        try:
            result = wait()
            return replace(result, prompt=self._checked(result.prompt))
        except DataError as error:
            if self.dropped_by(error) is not None:
                return None
            if isinstance(error, BadMedia):
                remedy = "data.on_bad_media=drop leaves the row out, also with --resume of a run that stopped"
                raise BadMedia(f"{error}. {remedy}") from None
            raise

    def _checked(self, prompt: Prompt) -> Prompt:
        """Return the prompt, marked if the template opened the thinking. Raises TooLong."""
        if self.limit is not None and len(prompt.token_ids) > self.limit:
            drop = "" if self.policy == "drop" else ", or drop such rows with data.on_overlong=drop"
            raise TooLong(
                f"{prompt.uid}: the prompt has {len(prompt.token_ids)} tokens, and {self.limit_name} allows "
                f"{self.limit}; prompts are never cut. Lower data.max_pixels or data.video_max_frames, or raise the "
                f"limit{drop}"
            )
        end = self.processor.decode(prompt.token_ids[-THINK_TOKENS:]).rstrip()
        return replace(prompt, opens_thinking=True) if end.endswith(OPEN) else prompt


def context_of(config: Any) -> int | None:
    """Return the longest text of a transformers model, in tokens, by its config; None if that does not say."""
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context
