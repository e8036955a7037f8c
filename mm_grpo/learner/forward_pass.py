"""One pass over the packs of a plan, with what its packs share: features of images and states of prompts.

The pass lays out its packs one at a time, gives the module what they share while it lasts, and counts what was run.
With gradients a prompt that was run apart has a backward of its own, after the last pack that goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mm_grpo.learner.forward import PackForward
from mm_grpo.learner.image_features import SharedFeatures
from mm_grpo.learner.pack import Item, Pack, by_group, layout, pictured_of, spread_prompts
from mm_grpo.learner.prompt_states import PromptEnd, PromptStates
from mm_grpo.learner.step_report import PackStatistics
from mm_grpo.types import Prompt


class ForwardPass:
    """A context in which `module` runs the packs of a plan, each once and in order; `work` counts them."""

    def __init__(
        self,
        module: PackForward,
        planned: Sequence[Sequence[Sequence[Item]]],
        media_token_ids: frozenset[int],
        work: PackStatistics,
    ) -> None:
        self.module, self.planned, self.work = module, planned, work
        self.media_token_ids = media_token_ids
        spread = spread_prompts(planned) if module.masks.apart else []
        self._apart = {id(prompt): prompt for prompt in spread}
        self._shared: SharedFeatures | None = None
        self._prompts = PromptStates(map(self._prefixes, planned))

    @property
    def backwards(self) -> int:
        """Backward passes of the whole: of its packs and of prompts that are run apart."""
        return len(self.planned) + len(self._apart)

    def packs(self) -> Iterator[Pack]:
        """The packs, laid out when they are asked for."""
        for rows in self.planned:
            pack = layout(rows, self.media_token_ids, self.module.masks.multiple, self._apart)
            self.work.add(pack, rows)
            yield pack

    def ended(self, pack: Pack) -> list[PromptEnd]:
        """The prompts whose last pack this was: what is to be run and taken backward before the next one."""
        return self._prompts.ended(p for row in pack.prefixes for p in row)

    def __enter__(self) -> ForwardPass:
        self.module.prompts = self._prompts
        if self.module.features is None:  # else they are kept for the whole step
            pictured = [
                [one for row in rows for one in pictured_of(row, self._apart)] for rows in self.planned
            ]
            pictured += [[prompt] for prompt in self._apart.values() if prompt.vision]
            module = self.module
            self._shared = SharedFeatures(module.model, module.family, pictured, blanks=module.blank_images)
            module.features = self._shared
        return self

    def __exit__(self, *_: Any) -> None:
        self.module.prompts = None
        for prompt in self._prompts.ran:
            self.work.add_prompt(prompt, self.module.masks.multiple)
        if self._shared is not None:
            self.module.features = None
            self.work.images += self._shared.encoded

    def _prefixes(self, rows: Sequence[Sequence[Item]]) -> list[Prompt]:
        prompts = (group[0].prompt for row in rows for group in by_group(row))
        return [prompt for prompt in prompts if id(prompt) in self._apart]
