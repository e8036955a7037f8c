"""`mm-grpo check --pass-rate N`: how often the model answers training rows right before it is trained on them.

A row is answered N times with the sampling of training, through the engine of the config, and its pass rate is the
share of successes (rollout/success.py). Rows that are always or never solved teach nothing; those between can be
written to a file, in the layout trl with images beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mm_grpo.build import open_sampler
from mm_grpo.data.image_files import readable
from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.evaluate import answer_rows
from mm_grpo.rollout.success import Success
from mm_grpo.terminal import print_phase

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.files import OutputFile
    from mm_grpo.types import Group


def measure(
    config: GRPOConfig,
    samples: int,
    rows: int,
    bounds: tuple[float, float],
    file: OutputFile | None,
    report: Callable[[str, int, int], None],
) -> None:
    """Answer `rows` training rows, evenly spread, `samples` times each; print how many are never or always right, and
    write those within `bounds`, both included, to `file`. `report` is told how far it is."""
    toolbox, ranks, shares = toolbox_of(config, None, None), Ranks(), dict[int, float]()
    several = toolbox is not None
    scorer = Scorer(reward_entries(config, None, toolbox), several_turns=several)
    success = Success.of(config, scorer.specs)
    loaded = load_train(config, needs=scorer.check, turns=several)
    all_rows = readable(loaded, config.data.on_bad_image, ranks)
    chosen = spread(all_rows, rows)
    if toolbox is not None:
        toolbox.place(scorer.asking_for(("environment", "environments"), chosen.columns), processes=1)
    scorer.conversational = all_rows.conversational
    as_trained = {"num_generations": samples, "temperature": config.rollout.temperature}
    config = config.with_values({f"rollout.eval.{name}": value for name, value in as_trained.items()})

    def keep(groups: list[Group]) -> None:
        known = ((group.slot, success.share(group)) for group in groups)
        shares.update((row, share) for row, share in known if share is not None)

    with open_sampler(config, [chosen], scorer, toolbox, phase=print_phase) as (prompt_builder, sampler):
        scorer.start()
        given = (prompt_builder, sampler, scorer, config, 0, ranks)
        answer_rows(chosen, *given, keep=keep, report=lambda done, of: report("pass rate", done, of))
    never, always = (list(shares.values()).count(share) for share in (0.0, 1.0))
    between = len(shares) - never - always
    print_phase(
        f"pass rates of {len(shares)} of {len(all_rows)} rows, {samples} answers each: never right {never}, sometimes "
        f"{between}, always {always}"
    )
    low, high = bounds
    kept = [row for row, share in sorted(shares.items()) if low <= share <= high]
    print_phase(f"within {low:g} and {high:g}: {len(kept)}")
    if file is not None:
        write_jsonl(plain_rows(chosen, kept), file.path)
        print_phase(
            f"{file.path}: {len(kept)} rows in the layout trl, prompts as the model gets them, columns by our names"
        )


def spread(dataset: Rows, count: int) -> Rows:
    """So many rows, evenly spread over all; of a mixture those of its sources."""
    if count >= len(dataset):
        return dataset
    picked = {at * len(dataset) // count for at in range(count)}
    return dataset.without(set(range(len(dataset))) - picked)


def plain_rows(dataset: Rows, rows: list[int]) -> Iterator[dict[str, Any]]:
    for row in rows:
        sample = dataset.sample(row)
        images = {"images": list(sample.images)} if sample.images else {}
        yield {"prompt": list(sample.messages), **images, **sample.columns}
