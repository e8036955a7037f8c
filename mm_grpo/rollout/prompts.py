"""From the prompt order to the prompts of a step.

One place decides which rows a step asks about and what happens to a prompt that is too long, or whose image cannot be
read: it is refused or dropped, by policy, never cut. A dropped row leaves its slot empty, so the seeds of the other
slots stay what they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from mm_grpo.data.images import BadImage
from mm_grpo.errors import ConfigError, DataError, UserError
from mm_grpo.rewards.thinking import OPEN
from mm_grpo.rollout.prefetch import Made, Prefetcher

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.data.order import PromptOrder
    from mm_grpo.environments.toolbox import Toolbox
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Prompt, Sample


@dataclass(frozen=True)
class StepPrompts:
    """The prompts of one step with their slots, how many rows were dropped, and how many images were decoded."""

    slots: list[int]
    prompts: list[Prompt]
    dropped: int
    decoded: int = 0


log = logging.getLogger(__name__)
THINK_TOKENS = 16
"""Tokens at the end of a prompt in which `<think>` is looked for; a tokenizer that does not know it needs several."""
TRAINING, EVALUATION = "rollout.max_completion_length", "rollout.eval.max_completion_length"

WORKERS = 2
"""Threads in each process that decode and resize the images of the next rows while a step runs."""


class PromptBuilder:
    """Samples to prompts under the config's length limit. `context` is the model's own, in tokens, `max_model_len` what
    vLLM is started for, None with another engine.

    Where prompts are dropped, those go too that may not fit a pack with their completion. `evaluation` is the builder
    for evaluation, which makes no packs and whose completions may be longer. Raises ConfigError when the longest
    completion (`completion_length`, by the field of that name) takes all of the context.
    """

    def __init__(
        self,
        processor: Processor,
        config: GRPOConfig,
        context: int | None,
        max_model_len: int | None = None,
        completion_length: int | None = None,
        length_field: str = TRAINING,
        prefetcher: Prefetcher | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        completion_length = completion_length or config.rollout.max_completion_length
        self.processor = processor
        # an environment begins in the thread that goes on with it
        workers = 0 if toolbox is not None and toolbox.factory else WORKERS
        prepare = toolbox.prepare if toolbox is not None else None
        self.prefetcher = prefetcher or Prefetcher(processor, workers, prepare)
        self.policy, self.bad_images = config.data.on_overlong, config.data.on_bad_image
        limits = {"data.max_prompt_length": config.data.max_prompt_length}
        # scoring with vLLM samples one token more
        for name, most, more in (
            (f"the model's context of {context}", context, 0),
            (f"rollout.vllm.max_model_len = {max_model_len}", max_model_len, 1),
        ):
            room = None if most is None else most - completion_length - more
            if room is not None and room < 1:
                raise ConfigError(
                    f"{length_field} = {completion_length}: {name} leaves a prompt none of it; lower the first, or "
                    "raise the second where it can be"
                )
            limits[f"{name} less {length_field}"] = room
        if self.policy == "drop" and length_field == TRAINING:
            pack = config.optim.max_tokens_per_pack
            limits[f"optim.max_tokens_per_pack = {pack}, with any completion,"] = config.pack_room
        known = {name: limit for name, limit in limits.items() if limit is not None}
        self.limit_name = min(known, key=lambda name: known[name]) if known else None
        self.limit = known[self.limit_name] if self.limit_name else None
        self.evaluation = self
        longer = config.rollout.eval.max_completion_length
        if length_field == TRAINING and (longer is not None or self.policy == "drop"):
            self.evaluation = PromptBuilder(
                processor, config, context, max_model_len, longer, EVALUATION, self.prefetcher
            )

    def process(self, sample: Sample) -> Prompt:
        """The prompt of a sample. DataError when it is longer than the limit."""
        return self._checked(self.prefetcher.process(sample))

    def prompts(self, dataset: Rows, rows: Mapping[int, int], ahead: Iterable[int] = ()) -> StepPrompts:
        """The prompts of some rows, by slot; a row with two slots has one prompt. Those of the rows `ahead`, which will
        be asked for next, are begun in the background.
        """
        begun = {row: self.prefetcher.begin(dataset, row) for row in dict.fromkeys(rows.values())}
        self.prefetcher.ahead(dataset, ahead)
        found = {row: self._usable(wait) for row, wait in begun.items()}
        made = {slot: found[row] for slot, row in rows.items()}
        kept = {slot: one.prompt for slot, one in made.items() if one is not None}
        decoded = sum(one.decoded for one in found.values() if one is not None)
        return StepPrompts(list(kept), list(kept.values()), len(made) - len(kept), decoded)

    def warn_if_none(self, step: int, prompts: int, dropped: int) -> None:
        """Warn of a step that has no prompt left over all processes, and so makes no update."""
        if prompts == 0:
            log.warning(
                "step %d: all %d prompts were dropped, so it makes no update: they are longer than %s allows (%s "
                "tokens), or their images cannot be read; lower data.max_pixels or mend the files, or raise the limit",
                step, dropped, self.limit_name, self.limit,
            )  # fmt: skip

    def first(self, dataset: Rows, order: PromptOrder) -> Iterator[tuple[int, int, Prompt]]:
        """(step, slot, prompt) in the order of the run, no row twice; a prompt is made when it is asked for.

        They are those of the first places, as many as there are rows: all rows, unless weights repeat some.
        """
        places = ((step, slot, row) for step in count(1) for slot, row in enumerate(order.rows(step)))
        seen: set[int] = set()
        for step, slot, row in islice(places, len(dataset)):
            if row in seen:
                continue
            seen.add(row)
            made = self._usable(self.prefetcher.begin(dataset, row))
            if made is not None:
                yield step, slot, made.prompt

    def close(self) -> None:
        """Make nothing more in the background."""
        self.prefetcher.close()

    def _usable(self, wait: Callable[[], Made]) -> Made | None:
        """Make a row's prompt; None when it is dropped."""
        try:
            made = wait()
            return replace(made, prompt=self._checked(made.prompt))
        except DataError as error:
            if self.dropped_by(error) is not None:
                return None
            if isinstance(error, BadImage):
                remedy = "data.on_bad_image=drop leaves the row out, also with --resume of a run that stopped"
                raise BadImage(f"{error}. {remedy}") from None
            raise

    def dropped_by(self, error: UserError) -> str | None:
        """The field for which a row is left out after an error about its prompt; None where that ends the run."""
        if isinstance(error, TooLong) and self.policy == "drop":
            return "data.on_overlong"
        return "data.on_bad_image" if isinstance(error, BadImage) and self.bad_images == "drop" else None

    def _checked(self, prompt: Prompt) -> Prompt:
        """The prompt, which knows whether the template opened the thinking. TooLong where it is."""
        if self.limit is not None and len(prompt.token_ids) > self.limit:
            drop = "" if self.policy == "drop" else ", or drop such rows with data.on_overlong=drop"
            raise TooLong(
                f"{prompt.uid}: the prompt has {len(prompt.token_ids)} tokens, and {self.limit_name} allows "
                f"{self.limit}; prompts are never cut. Lower data.max_pixels or raise the limit{drop}"
            )
        end = self.processor.decode(prompt.token_ids[-THINK_TOKENS:]).rstrip()
        return replace(prompt, opens_thinking=True) if end.endswith(OPEN) else prompt


def context_of(config: Any) -> int | None:
    """The longest text of a transformers model, in tokens, by its config; None where that does not say."""
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context


class TooLong(DataError):
    """A prompt is longer than its limit."""
