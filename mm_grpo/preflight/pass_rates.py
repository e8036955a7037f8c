"""`mm-grpo check --pass-rate N`: measure how often the model answers training rows right before it is trained.

A row is answered N times with the sampling of training, through the engine of the config. Its pass rate is the
share of successes (rollout/success.py). Rows that are always or never solved teach nothing; the others can be
written to a file in the layout trl, with their images in a folder next to it; a video becomes its frames, whose times
then count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mm_grpo.build import open_runner, processor_of
from mm_grpo.config import GRPOConfig
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.jsonl import write_jsonl
from mm_grpo.data.sources import load_train
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.files import OutputFile
from mm_grpo.health.rows import warm_advice
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.evaluate import answer_rows
from mm_grpo.rollout.success import Success
from mm_grpo.terminal import print_phase
from mm_grpo.types import Group


def measure(
    config: GRPOConfig,
    samples: int,
    rows: int,
    bounds: tuple[float, float],
    file: OutputFile | None,
    report: Callable[[str, int, int], None],
) -> None:
    """Answer `rows` training rows, evenly spaced, `samples` times each; print how many are never or always right.

    Rows with a pass rate within `bounds`, both included, are written to `file`. `report` gets (label, done, total).
    """
    toolbox, ranks, shares = toolbox_of(config, None, None), Ranks(), dict[int, float]()
    totals: list[float] = []
    several_turns = toolbox is not None
    scorer = Scorer(reward_entries(config, None, toolbox), several_turns=several_turns)
    success = Success.of(config, scorer.specs)
    train = load_train(config, needs=scorer.check, turns=several_turns)
    processor = processor_of(config)
    all_rows = readable(train, config.data.on_bad_media, ranks, processor)
    subset = evenly_spaced(all_rows, rows)
    if toolbox is not None:
        toolbox.place(scorer.asking_for(("environment", "environments"), subset.columns), processes=1)
    as_trained = {"num_generations": samples, "temperature": config.rollout.temperature}
    config = config.with_values({f"rollout.eval.{name}": value for name, value in as_trained.items()})

    def keep(groups: list[Group]) -> None:
        for group in groups:
            totals.extend(total or 0.0 for total in group.rewards)
            if (share := success.share(group)) is not None:
                shares[group.slot] = share

    # a source of the subset may have no row
    options: Any = {"conversational": all_rows.conversational, "phase": print_phase}
    with open_runner(config, [subset], scorer, toolbox, processor, ranks, **options) as runner:
        answer_rows(runner, subset, config, 0, keep=keep, report=partial(report, "pass rate"))
    never, always = (list(shares.values()).count(share) for share in (0.0, 1.0))
    between = len(shares) - never - always
    print_phase(
        f"pass rates of {len(shares)} of {len(all_rows)} rows, {samples} answers each: never right {never}, sometimes "
        f"{between}, always {always}{warm_advice(max(totals, default=None), str(len(totals)))}"
    )
    low, high = bounds
    selection = [row for row, share in sorted(shares.items()) if low <= share <= high]
    print_phase(f"within {low:g} and {high:g}: {len(selection)}")
    if file is not None:
        write_jsonl(plain_rows(subset, selection), file.path)
        print_phase(
            f"{file.path}: {len(selection)} rows in the layout trl, prompts as the model gets them, columns by our "
            "names"
        )


def evenly_spaced(dataset: Rows, count: int) -> Rows:
    """Return `count` evenly spaced rows of a dataset or a mixture; all rows if it has no more."""
    if count >= len(dataset):
        return dataset
    indices = {i * len(dataset) // count for i in range(count)}
    return dataset.without(set(range(len(dataset))) - indices)


def plain_rows(dataset: Rows, rows: list[int]) -> Iterator[dict[str, Any]]:
    for row in rows:
        sample = dataset.sample(row)
        videos = [{"video": video.frames, "fps": video.fps} for video in sample.videos]
        media = {name: value for name, value in (("images", sample.images), ("videos", videos)) if value}
        yield {"prompt": list(sample.messages), **media, **sample.other_columns}
