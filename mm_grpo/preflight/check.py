"""`mm-grpo check`: find the faults of a config, its rows and its rewards before a model is loaded.

Every row of every set is decoded and made into a prompt, and every reward is called on the row's right answer and
on wrong ones (gold_answers.py). Failing rows are listed by cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from logging.handlers import BufferingHandler
from statistics import fmean
from typing import Any, Literal

import xxhash
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mm_grpo.build import check_features, plan_run, processor_of, vllm_settings
from mm_grpo.config import GRPOConfig
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.data.base import Rows
from mm_grpo.data.image_files import readable
from mm_grpo.data.sources import RowKey, load_eval, load_train, shared_rows
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.environments.toolbox import reward_entries, toolbox_of
from mm_grpo.errors import BadMedia, DataError, UserError, by_cause
from mm_grpo.learner.features.twin_view import TwinPrompts
from mm_grpo.learner.lora import target_pattern
from mm_grpo.learner.reference import load_reference_model
from mm_grpo.messages import content_parts
from mm_grpo.pages.check_page import CheckPage
from mm_grpo.pages.curves import read_expected_curve
from mm_grpo.preflight.estimate import build_on_meta
from mm_grpo.preflight.gold_answers import RewardCheck, RewardReport, number
from mm_grpo.preflight.gold_text import gold_text
from mm_grpo.preflight.gold_warnings import GoldWarnings
from mm_grpo.preflight.understood import other_uses, understood
from mm_grpo.processors.base import Processor
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.prompts import PromptBuilder, context_of
from mm_grpo.rollout.vllm.launch import engine_arguments
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.folder import RunFolder, outputs_of
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.trackers import Trackers
from mm_grpo.terminal import cell, print_line, print_phase, printable
from mm_grpo.types import Prompt, Sample, Video

MAX_CAUSES = 20  # causes of failing rows that are listed for a set and for a reward; the others are counted
MIN_WIDTH = 120  # least width of the tables, in characters
NUMBER_COLUMNS = ("rows", "usable", "images", "videos", "weight")
"""Columns of the tables that hold one number."""


@dataclass
class RowReport:
    """Result of making the rows of one set into prompts."""

    lengths: list[int] = field(default_factory=list)  # tokens of each usable row's prompt
    images: int = 0  # images of the usable rows
    videos: int = 0  # the same of videos
    failures: list[str] = field(default_factory=list)  # messages about rows that would stop a run
    dropped: dict[str, list[str]] = field(default_factory=dict)  # config field that drops rows -> messages
    keys: list[RowKey] = field(default_factory=list)  # (content, row name) of each readable row


def check_config(config: GRPOConfig, *, strict: bool = False, **options: Any) -> bool:
    """Print what a run would load; return True if every row is usable and every reward tells right from wrong.

    With `strict` a warning is a problem; the options are those of `_check`. Raises UserError if the config itself, the
    sources or the rewards' arguments are wrong.
    """
    logged, logger = BufferingHandler(10**9), logging.getLogger("mm_grpo")
    logged.setLevel(logging.WARNING)
    logger.addHandler(logged)
    try:
        problems, printed = _check(config, **options)
    finally:
        logger.removeHandler(logged)
    warnings = len(logged.buffer) + printed
    problems += warnings if strict else 0
    result = f"{problems} problem(s)" if problems else "ok"
    print_phase(result + (f", {warnings} warning(s)" if warnings else ""))
    return not problems


def _check(  # noqa: PLR0915
    config: GRPOConfig,
    *,
    call_judges: bool = False,
    rows: int | None = None,
    page: str | None = None,
    smoke: bool = False,
    known: Sequence[str] = (),
) -> tuple[int, int]:
    """Print the report, with `known` among its warnings; return the numbers of problems and of warnings in it.

    `rows` limits the rows of each set; `page` is the path of the page of `--page`; `smoke` if the tokenizer stands in.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, MIN_WIDTH))
    toolbox = toolbox_of(config, None, None)
    several_turns = toolbox is not None
    scorer = Scorer(reward_entries(config, None, toolbox), several_turns=several_turns)
    eval_metric = EvalMetric.of(config, [spec.name for spec in scorer.specs])
    train = load_train(config, verify=False, needs=scorer.check)
    evaluations = list(load_eval(config, verify=False, needs=scorer.check).values())
    processor, template = processor_of(config), config.data.gold_template
    if config.data.on_bad_media == "drop":
        train, *evaluations = (readable(d, "drop", Ranks(), processor) for d in (train, *evaluations))
    sets = {dataset.name: dataset for dataset in (train, *evaluations)}
    # the reward of an environment has no right answer
    specs = scorer.specs[: len(config.rewards)]
    scorer.close()
    plan = plan_run(config, train, several_turns=several_turns)
    eval_sets = {dataset.name: dataset for dataset in evaluations}
    Evaluations(config, eval_sets, eval_metric, several_turns=several_turns)
    check_features(config, train, several_turns=several_turns)
    if toolbox is not None:
        toolbox.place(scorer.asking_for(("environment", "environments"), train.columns))
    Trackers(config.run.trackers)
    writes = outputs_of(config, saves=config.run.save_every != 0)
    RunFolder(config.run.dir, inputs=inputs_of(config), writes=writes, resume=True).check()
    if config.run.expected_curve is not None:
        read_expected_curve(config.run.expected_curve)
    context = context_of(_check_model(config, processor).config)
    embedded = ENGINE_FACTS[config.rollout.engine].embedded
    length = None if embedded else config.rollout.vllm.max_model_len
    prompt_builder = PromptBuilder(processor, config, context, length, preparer=toolbox)
    twins = TwinPrompts(processor, config) if config.algorithm.twin_view is not None else None
    answer = partial(gold_text, template=template)
    check_page = CheckPage(page, processor, specs, answer)

    tokenizer = None if smoke else getattr(processor, "tokenizer", None)
    titles = ("set", "rows", "usable", "images", "videos", "prompt tokens (min / mean / max)")
    table = _table("rows", *titles)
    failures: list[str] = []
    notes, warnings = list(plan.sentences), [*known]
    reports: dict[str, list[RewardReport]] = {}
    keys: dict[str, list[RowKey]] = {}
    for name, dataset in sets.items():
        conversational = True
        with suppress(DataError):  # a wrong first row is listed below
            conversational = dataset.conversational
        rewards = RewardCheck(
            specs, template=template, conversational=conversational, several_turns=several_turns,
            call_judges=call_judges,
        )  # fmt: skip
        checked = dataset if rows is None else dataset.head(rows)
        for_training = dataset is train
        find_fault = partial(_limit_fault, config=config, for_training=for_training, twins=twins)
        builder = prompt_builder if for_training else prompt_builder.evaluation
        lines = understood(checked, builder, rewards, other_uses(config, dataset, toolbox))
        print_line("\n".join(lines), console)
        limit = None if for_training else config.rollout.eval.max_completion_length
        golds = GoldWarnings(specs, template, tokenizer, limit or config.rollout.max_completion_length)
        report = _check_rows(checked, builder, find_fault, rewards, console, check_page, golds)
        warnings += golds.sentences(alike=rows is None)
        # with --rows all rows are compared too, by what can be read without their images
        keys[name] = report.keys if rows is None else list(dataset.row_keys())
        reports[name] = rewards.finish()
        lengths = report.lengths
        min_mean_max = f"{min(lengths)} / {fmean(lengths):.0f} / {max(lengths)}" if lengths else "-"
        counts = map(str, (len(dataset), len(lengths), report.images, report.videos))
        table.add_row(cell(name), *counts, min_mean_max)
        failures += _by_cause(name, report.failures, len(checked))
        dropped = [
            f"{name}: left out ({key} = drop): {len(messages)} of {len(checked)}, the first {messages[0]}"
            for key, messages in report.dropped.items()
        ]
        (notes if lengths else failures).extend(dropped)
    check_page.shared = [] if smoke else shared_rows(keys.pop(train.name), keys)  # a fixture is both sets
    warnings += check_page.shared
    console.print(table)
    for note in notes:
        print_line(note, console)
    for warning in warnings:
        print_line(f"warning: {warning}", console, style="yellow")
    _print_rewards(console, reports)
    print_line(config.batch_sentence(processes=1) + f", {plan.max_steps} steps", console)
    for name, set_reports in reports.items():
        all_rows = rows is None and name == train.name
        for reward in set_reports:
            failures += _faults(reward, name, all_rows=all_rows)
    for failure in failures:
        print_line(failure, console, style="red")
    if page is not None:
        print_line(check_page.write(), console)
    return len(failures), len(warnings)


def _check_model(config: GRPOConfig, processor: Processor) -> Any:
    """Build the model without weights; raise ConfigError if the learner or the engine would refuse it."""
    # adapter targets are searched, adapters are not made: that takes seconds
    model, family = build_on_meta(config.with_values({"model.lora": None, "model.quantization": None}))
    if config.model.lora is not None:
        target_pattern(model, config.model.lora, family)
    if config.algorithm.reference_path is not None:
        load_reference_model(config, model, processor)
    if ENGINE_FACTS[config.rollout.engine].colocated:
        dtype = str(model.dtype).removeprefix("torch.")
        engine_arguments(vllm_settings(config, processor, dtype, context_of(model.config)))
    return model


def _limit_fault(
    prompt: Prompt, config: GRPOConfig, *, for_training: bool, twins: TwinPrompts | None
) -> str | None:
    """Return why the learner (only for training rows) or the engine would refuse a prompt; None if neither would."""
    if for_training and twins is not None:
        twins.twin(prompt)
    rollout, pack, copies = config.rollout, config.optim.max_tokens_per_pack, config.algorithm.perception_coef
    length = len(prompt.token_ids)
    if for_training and length > config.pack_room:
        twice = ", twice with algorithm.perception_coef," if copies > 0 else ""
        return (
            f"the prompt has {length} tokens, which with rollout.max_completion_length = "
            f"{rollout.max_completion_length}{twice} is more than optim.max_tokens_per_pack = {pack}; raise that, "
            "or lower data.max_pixels, data.video_max_frames or rollout.max_completion_length"
        )
    for kind in () if ENGINE_FACTS[rollout.engine].embedded else ("images", "videos"):
        count, limit = len(getattr(prompt.engine_prompt, kind)), getattr(rollout.vllm, f"max_{kind}")
        if limit is not None and count > limit:
            return f"the row has {count} {kind}, and rollout.vllm.max_{kind} = {limit}; raise it"
    return None


def _check_rows(
    dataset: Rows,
    prompt_builder: PromptBuilder,
    find_fault: Callable[[Prompt], str | None],
    rewards: RewardCheck,
    console: Console,
    page: CheckPage,
    golds: GoldWarnings,
) -> RowReport:
    """Make each row into a prompt, and hand usable ones to `rewards`, `page` and `golds`."""
    report = RowReport()
    indices = track(
        range(len(dataset)),
        description=escape(printable(dataset.name, lines=False)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for index in indices:
        row, uid, key = dataset.row_name(index), dataset.uid(index), None
        source = uid.rpartition(":")[0]
        try:
            sample = dataset.sample(index)
            report.keys.append((_content_of(sample), row))
            prompt = prompt_builder.process(sample)
            message = find_fault(prompt)
        except UserError as error:
            message, key = str(error), prompt_builder.dropped_by(error)
            if isinstance(error, BadMedia) and key is None:
                message += "; data.on_bad_media=drop leaves out a tenth of the rows at most"
        if message:
            # An error about a sample begins with its uid, which counts rows from 0; a user looks for the file's line.
            message = message.removeprefix(f"{uid}: ")
            with_row = message if message.startswith(row) else f"{row}: {message}"
            (report.failures if key is None else report.dropped.setdefault(key, [])).append(with_row)
            page.refuse(source, row, ("" if key is None else "left out: ") + message)
            continue
        report.lengths.append(len(prompt.token_ids))
        report.images += len(prompt.engine_prompt.images)
        report.videos += len(prompt.engine_prompt.videos)
        rewards.add(row, prompt)
        page.add(source, row, prompt)
        golds.add(source, row, sample.messages, sample.columns)
    return report


def _content_of(sample: Sample) -> Hashable:
    """Return a key that is equal for rows of the same texts, except white space, and the same pixels."""
    texts: list[tuple[str, ...]] = []
    for message in sample.messages:
        parts = content_parts(message["content"])
        texts.append((message["role"], *(" ".join(part.get("text", "").split()) for part in parts)))
    images = (m.frames if isinstance(m, Video) else (m,) for m in sample.media)
    return *texts, *((i.size, xxhash.xxh3_128_digest(i.tobytes())) for i in chain(*images))


def _by_cause(name: str, messages: Sequence[str], rows: int) -> list[str]:
    """Merge messages about some of `rows` rows into one for each cause, MAX_CAUSES at most."""
    causes = by_cause(messages, rows)
    if len(causes) <= MAX_CAUSES:
        return causes
    return [*causes[:MAX_CAUSES], f"{name}: rows fail for {len(causes) - MAX_CAUSES} more reasons"]


def _print_rewards(console: Console, reports: dict[str, list[RewardReport]]) -> None:
    titles = ("set", "reward", "weight", "rows", "right answer", "wrong answers", "result")
    table = _table("rewards: scores (min / mean / max)", *titles)
    for name, set_reports in reports.items():
        for report in set_reports:
            counts = (f"{report.weight:g}", str(len(report.gold) or "-"))
            scores = (_min_mean_max(report.gold), _min_mean_max(report.wrong))
            table.add_row(cell(name), cell(report.name), *counts, *scores, cell(_result(report)))
    console.print(table)


def _result(report: RewardReport) -> str:
    if report.failures:
        return f"{len(report.failures)} row(s) fail"
    if 0 < report.rows == report.unapplied:
        return "applies to no row"
    if report.skipped:
        return report.skipped + "; it gave None to all" * (report.rows > 0 and not report.wrong)
    if not report.gold:
        return "not judged: no row has a right answer for it"
    return "ok" + (f", does not apply to {report.unapplied} row(s)" if report.unapplied else "")


def _faults(report: RewardReport, name: str, *, all_rows: bool) -> Iterator[str]:
    """Yield the faults of a reward on the set `name`; `all_rows` if these are all rows of the training set."""
    yield from _by_cause(report.name, report.failures, report.rows)
    if all_rows and report.applies_nowhere:
        yield (
            f"reward {report.name!r} applies to no row of {name}: in all {report.rows} a column that it needs is null, "
            "or it gives even the right answer None; fill it, name another (data.columns, data.gold_template), or set "
            "weight 0"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in NUMBER_COLUMNS else "left"
        table.add_column(column, justify=justify, no_wrap=column == "reward")
    return table


def _min_mean_max(scores: Sequence[float]) -> str:
    return " / ".join(map(number, (min(scores), fmean(scores), max(scores)))) if scores else "-"
