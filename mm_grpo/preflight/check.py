"""`mm-grpo check`: everything a run would stumble over, found before a model is loaded.

Every row of every set is decoded and made into a prompt, and every reward is called on the row's own right
answer and on wrong ones (gold_answers.py). Failing rows are listed by cause.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import xxhash
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mm_grpo.build import check_features, plan_run, processor_of, vllm_settings
from mm_grpo.config.engine_facts import ENGINE_FACTS
from mm_grpo.data.image_files import readable
from mm_grpo.data.sources import RowKey, load_eval, load_train, shared_rows
from mm_grpo.distributed.ranks import Ranks
from mm_grpo.environments.toolbox import toolbox_of
from mm_grpo.errors import DataError, UserError, by_cause
from mm_grpo.learner.features.twin_view import TwinPrompts
from mm_grpo.learner.lora import target_pattern
from mm_grpo.learner.reference import load_reference_model
from mm_grpo.pages.check_page import ROWS, CheckPage
from mm_grpo.pages.curves import read_expected_curve
from mm_grpo.preflight.estimate import build_on_meta
from mm_grpo.preflight.gold_answers import RewardCheck, RewardReport, number
from mm_grpo.preflight.gold_text import gold_text
from mm_grpo.rewards.scorer import Scorer
from mm_grpo.rollout.eval_metric import EvalMetric
from mm_grpo.rollout.prompts import PromptBuilder, context_of
from mm_grpo.rollout.vllm.launch import engine_arguments
from mm_grpo.run.evaluations import Evaluations
from mm_grpo.run.folder import RunFolder, outputs_of
from mm_grpo.run.inputs import inputs_of
from mm_grpo.run.trackers import Trackers
from mm_grpo.terminal import cell, print_line, printable

if TYPE_CHECKING:
    from mm_grpo.config import GRPOConfig
    from mm_grpo.data.base import Rows
    from mm_grpo.processors.base import Processor
    from mm_grpo.types import Prompt, Sample

SHOWN = 20
"""Causes of failing rows that are listed for a set and for a reward; the others are counted."""


WIDTH = 120
"""Least width of the tables, in characters."""
NUMBERS = ("rows", "usable", "images", "weight")
"""Columns of the tables that hold one number."""


def check_config(  # noqa: PLR0915
    config: GRPOConfig,
    *,
    call_judges: bool = False,
    rows: int | None = None,
    page: str | None = None,
) -> bool:
    """Print what a run would load; True when every row can be used and every reward tells right from wrong.

    `rows` bounds the rows of each set that are looked at; `page` is where the page of `--page` goes.
    Raises UserError for what is wrong with the config itself, the sources or the rewards' arguments.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDTH))
    toolbox = toolbox_of(config, None, None)
    several_turns, own = toolbox is not None, [] if toolbox is None else toolbox.rewards
    config.require_rewards(passed=bool(own))
    scorer = Scorer([*config.rewards, *own], several_turns=several_turns)
    headline = EvalMetric.of(config, [spec.name for spec in scorer.specs])
    train = load_train(config, verify=False, needs=scorer.check)
    evaluations = list(load_eval(config, verify=False, needs=scorer.check).values())
    if config.data.on_bad_image == "drop":
        train, *evaluations = (readable(each, "drop", Ranks()) for each in (train, *evaluations))
    sets = {dataset.name: dataset for dataset in (train, *evaluations)}
    specs = scorer.specs[: len(scorer.specs) - len(own)]  # an environment's own has no right answer
    scorer.close()
    plan = plan_run(config, train, several_turns=several_turns)
    Evaluations(config, {each.name: each for each in evaluations}, headline, several_turns=several_turns)
    check_features(config, train, several_turns=several_turns)
    if toolbox is not None:
        toolbox.place(scorer.asking_for(("environment", "environments"), train.columns))
    Trackers.prepare(config.run.trackers)
    writes = outputs_of(config, saves=config.run.save_every != 0)
    RunFolder(config.run.dir, inputs=inputs_of(config), writes=writes, resume=True).check()
    if config.run.expected_curve is not None:
        read_expected_curve(config.run.expected_curve)
    processor, template = processor_of(config), config.data.gold_template
    context = context_of(_check_model(config, processor).config)
    embedded = ENGINE_FACTS[config.rollout.engine].embedded
    length = None if embedded else config.rollout.vllm.max_model_len
    prompt_builder = PromptBuilder(processor, config, context, length, preparer=toolbox)
    twins = TwinPrompts(processor, config) if config.algorithm.twin_view is not None else None
    own_page = partial(CheckPage, answer=partial(gold_text, template=template))
    shown = own_page(page, processor, specs, rows=0 if page is None else ROWS)

    table = _table("rows", "set", "rows", "usable", "images", "prompt tokens (min / mean / max)")
    failures: list[str] = []
    notes = list(plan.sentences)
    reports: dict[str, list[RewardReport]] = {}
    keys: dict[str, list[RowKey]] = {}
    for name, dataset in sets.items():
        conversational = True
        with suppress(DataError):  # the first row is wrong, and will be listed
            conversational = dataset.conversational
        rewards = RewardCheck(
            specs, template=template, conversational=conversational, several_turns=several_turns,
            call_judges=call_judges,
        )  # fmt: skip
        looked = dataset if rows is None else dataset.head(rows)
        trained = dataset is train
        limit = partial(_broken_limit, config=config, trained=trained, twins=twins if trained else None)
        builder = prompt_builder if dataset is train else prompt_builder.evaluation
        lengths, images, failed, dropped, keys[name] = _walk(looked, builder, limit, rewards, console, shown)
        if rows is not None:  # the others are compared too, as far as that needs no picture
            keys[name] = list(dataset.row_keys())
        reports[name] = rewards.finish()
        spread = f"{min(lengths)} / {fmean(lengths):.0f} / {max(lengths)}" if lengths else "-"
        table.add_row(cell(name), str(len(dataset)), str(len(lengths)), str(images), spread)
        failures += _listed(name, failed, len(looked))
        left_out = [
            f"{name}: left out ({field} = drop): {len(of)} of {len(looked)}, the first {of[0]}"
            for field, of in dropped.items()
        ]
        notes += left_out if lengths else []
        failures += [] if lengths else left_out
    shown.shared = shared_rows(keys.pop(train.name), keys)
    notes += shown.shared
    console.print(table)
    for note in notes:
        print_line(note, console)
    _print_rewards(console, reports)
    print_line(config.batch_sentence(processes=1) + f", {plan.max_steps} steps", console)
    for name, of_set in reports.items():
        failures += [
            line for each in of_set for line in _faults(each, name, whole=rows is None and name == train.name)
        ]
    for failure in failures:
        print_line(failure, console, style="red")
    if page is not None:
        print_line(shown.write(), console)
    console.print("ok" if not failures else f"{len(failures)} problem(s)")
    return not failures


def _check_model(config: GRPOConfig, processor: Processor) -> Any:
    """Build the model without weights, and refuse what the learner or the engine would refuse of it."""
    # adapters are looked for and not made: that takes seconds
    model, family = build_on_meta(config.with_values({"model.lora": None, "model.quantization": None}))
    if config.model.lora is not None:
        target_pattern(model, config.model.lora, family)
    if config.algorithm.reference_path is not None:
        load_reference_model(config, model, processor)
    if ENGINE_FACTS[config.rollout.engine].colocated:
        dtype = str(model.dtype).removeprefix("torch.")
        engine_arguments(vllm_settings(config, processor, dtype, context_of(model.config)))
    return model


def _broken_limit(
    prompt: Prompt, config: GRPOConfig, *, trained: bool, twins: TwinPrompts | None
) -> str | None:
    """What the learner, where a set is `trained` on, or the engine would stop at, of a prompt that can be made."""
    if twins is not None:
        twins.twin(prompt)
    rollout, pack, copies = config.rollout, config.optim.max_tokens_per_pack, config.algorithm.perception_coef
    length, images = len(prompt.token_ids), len(prompt.engine_prompt.images)
    if trained and length > config.pack_room:
        twice = ", twice with algorithm.perception_coef," if copies > 0 else ""
        return (
            f"the prompt has {length} tokens, which with rollout.max_completion_length = "
            f"{rollout.max_completion_length}{twice} is more than optim.max_tokens_per_pack = {pack}; raise that, "
            "or lower data.max_pixels or rollout.max_completion_length"
        )
    most = None if ENGINE_FACTS[rollout.engine].embedded else rollout.vllm.max_images
    if most is not None and images > most:
        return f"the row has {images} images, and rollout.vllm.max_images = {most}; raise it"
    return None


def _walk(
    dataset: Rows,
    prompt_builder: PromptBuilder,
    broken_limit: Callable[[Prompt], str | None],
    rewards: RewardCheck,
    console: Console,
    page: CheckPage,
) -> tuple[list[int], int, list[str], dict[str, list[str]], list[RowKey]]:
    """Of the rows that can be used prompt lengths and the count of images; of the others the messages about those
    that stop a run, and about those that it drops, by the field that says so; at last what tells equal rows."""
    lengths: list[int] = []
    keys: list[RowKey] = []
    images = 0
    failed: list[str] = []
    dropped: dict[str, list[str]] = {}
    indices = track(
        range(len(dataset)),
        description=escape(printable(dataset.name, lines=False)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for index in indices:
        row, field = dataset.row_name(index), None
        # A message about a sample has its uid, which counts rows from 0; a user looks for the file's line.
        uid, source = f"{dataset.uid(index)}: ", dataset.uid(index).rpartition(":")[0]
        try:
            sample = dataset.sample(index)
            keys.append((_content_of(sample), row))
            prompt = prompt_builder.process(sample)
            message = uid + broken if (broken := broken_limit(prompt)) else ""
        except UserError as error:
            message, field = str(error), prompt_builder.dropped_by(error)
        if message:
            message = message.removeprefix(uid)
            about = message if message.startswith(row) else f"{row}: {message}"
            (failed if field is None else dropped.setdefault(field, [])).append(about)
            page.refuse(source, row, ("" if field is None else "left out: ") + message)
            continue
        lengths.append(len(prompt.token_ids))
        images += len(prompt.engine_prompt.images)
        rewards.add(row, prompt)
        page.add(source, row, prompt)
    return lengths, images, failed, dropped, keys


def _content_of(sample: Sample) -> Hashable:
    """Return a key that is equal for rows with the same texts, but for white space, and the same pixels."""
    texts: list[tuple[str, ...]] = []
    for message in sample.messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        texts.append((message["role"], *(" ".join(part.split()) for part in parts)))
    pixels = ((image.size, xxhash.xxh3_128_digest(image.tobytes())) for image in sample.images)
    return *texts, *pixels


def _listed(name: str, failed: Sequence[str], rows: int) -> list[str]:
    """One message for each cause why some of `rows` rows fail, SHOWN at most."""
    causes = by_cause(failed, rows)
    more = [f"{name}: rows fail for {len(causes) - SHOWN} more reasons"] if len(causes) > SHOWN else []
    return [*causes[:SHOWN], *more]


def _print_rewards(console: Console, reports: dict[str, list[RewardReport]]) -> None:
    """Of each reward: its scores of right and of wrong answers, and what came out."""
    titles = ("set", "reward", "weight", "rows", "right answer", "wrong answers", "result")
    table = _table("rewards: scores (min / mean / max)", *titles)
    for name, of_set in reports.items():
        for report in of_set:
            counted = (f"{report.weight:g}", str(len(report.gold) or "-"))
            scores = (_spread(report.gold), _spread(report.wrong))
            table.add_row(cell(name), cell(report.name), *counted, *scores, cell(_result(report)))
    console.print(table)


def _result(report: RewardReport) -> str:
    if report.failures:
        return f"{len(report.failures)} row(s) fail"
    if 0 < report.rows == report.unapplied:
        return "applies to no row"
    if report.skipped:
        return report.skipped
    if not report.gold:
        return "not judged: no row has a right answer for it"
    return "ok" + (f", does not apply to {report.unapplied} row(s)" if report.unapplied else "")


def _faults(report: RewardReport, name: str, *, whole: bool) -> Iterator[str]:
    """What is wrong with a reward on the set `name`, by row and as a whole; `whole` where that is all that is trained
    on."""
    reward = f"reward {report.name!r}"
    yield from _listed(report.name, report.failures, report.rows)
    if whole and report.applies_nowhere:
        yield (
            f"{reward} applies to no row of {name}: in all {report.rows} a column that it needs is null, or the right "
            "answer too gets None; fill it, name another (data.columns, data.gold_template), or set weight 0"
        )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in NUMBERS else "left"
        table.add_column(column, justify=justify, no_wrap=column == "reward")
    return table


def _spread(scores: Sequence[float]) -> str:
    return " / ".join(map(number, (min(scores), fmean(scores), max(scores)))) if scores else "-"
