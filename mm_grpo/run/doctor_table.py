"""The doctor's report for people: a table of the prompts, and a few lines."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mm_grpo.run.doctor import Report
from mm_grpo.run.parity import Gap, PromptParity

COLUMNS = ("row", "tokens", "images", "distinct", "gap before", "gap after")
MEMORY = (
    ("resident", "resident"),
    ("resident_peak", "at its peak"),
    ("gpu_allocated_peak", "allocated on the GPU"),
)


def show(report: Report, console: Console | None = None) -> None:
    """Print `report`; each failure stands at the end, in red."""
    console = console or Console(highlight=False)
    console.print(
        f"engine {report.engine}, model {report.model} ({report.dtype} on {report.device}), "
        f"limit {report.limit:g} nats per token",
        soft_wrap=True,
        markup=False,
    )
    if report.before:
        console.print(_table(report))
        console.print(
            "gaps of log-probs per token, mean / max: of given completions, then of the samples themselves",
            soft_wrap=True,
        )
        console.print(_sampling(report), soft_wrap=True)
    console.print(f"prompt ids equal: {'yes' if report.ids_equal else 'not shown'}")
    if report.update is not None:
        done = report.update
        console.print(
            f"weight update: {done.learner_steps} learner step(s) up to learning rate {done.learning_rate:.3g} moved "
            f"log-probs by {done.logp_moved:.3g} per token; sent {done.tensors} tensors, {_size(done.bytes)}",
            soft_wrap=True,
        )
    memory = [
        f"{_size(report.memory[key])} {what}" for key, what in MEMORY if report.memory.get(key) is not None
    ]
    console.print("memory: " + ", ".join(memory), soft_wrap=True)
    console.print("seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in report.seconds.items()), soft_wrap=True)
    console.print("versions: " + ", ".join(f"{k} {v}" for k, v in report.versions.items()), soft_wrap=True)
    for failure in report.failures:
        console.print(failure, style="red", markup=False, soft_wrap=True)
    console.print("ok" if report.ok else f"{len(report.failures)} problem(s)")


def _table(report: Report) -> Table:
    table = Table(title="prompts")
    for title in COLUMNS:
        wide = title == "row"  # gives way on a narrow terminal
        table.add_column(title, justify="left" if wide else "right", overflow="fold", no_wrap=not wide)
    for i, before in enumerate(report.before):
        after = report.after[i] if i < len(report.after) else None
        table.add_row(
            before.uid,
            str(before.prompt_tokens),
            str(before.images),
            f"{before.distinct} of {before.completions}",
            _gaps(before),
            _gaps(after) if after else "-",
        )
    return table


def _sampling(report: Report) -> str:
    seeds = [seed for p in report.before for seed in p.seeds]
    versions = sorted({v for p in (*report.before, *report.after) for v in p.versions})
    return (
        f"seeds: {len(set(seeds))} of {len(seeds)} distinct, the first {seeds[0]}; "
        f"weight versions sampled under: {versions}"
    )


def _gaps(parity: PromptParity) -> str:
    def one(gap: Gap) -> str:
        return f"{gap.mean:.0e} / {gap.max:.0e}"

    return f"{one(parity.score)}\n{one(parity.sampled)}"


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
