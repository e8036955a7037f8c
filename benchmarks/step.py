"""Whole training steps: our GRPOTrainer, with its transformers engine, against TRL's, with its own generation.

    OMP_NUM_THREADS=2 python benchmarks/step.py [--json FILE] [--rounds 5] [--workloads shapes "24M, 448 px"]

Both do the same work (see workloads.py), each in a process of its own with the same number of threads, and take
turns: one makes a step while the other waits, so that both meet the same machine. Medians over the steps after the
warm-up. That both saw as many tokens is asserted for every step. --json adds a sitting to those that the file has of
equal versions.

    generate   ours: the engine's `generate`; TRL's: `_generate_single_turn`, prompts already tokenized
    learner    packing or padding, loss, backward, clipping and the optimizer's step
    step       from the end of one step to the end of the next: these two, data, rewards, logging, ours also
               the verified weight sync
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import Stopwatch
from harness import arguments, by_workload, parse, positive, run, versions
from transformers import TrainerCallback
from workloads import WORKLOADS, Workload, our_trainer, trl_trainer

LIMIT = 600
"""Seconds to wait for one step, the first of which loads everything."""
KEYS = ("generate", "learner", "step")


class Done(Exception):
    """Enough steps were made."""


class Clock(Stopwatch):
    """Hands the record of each step over, and waits for its turn to make the next."""

    def __init__(self, turn: Connection) -> None:
        super().__init__()
        self.turn = turn
        self.start = 0.0

    def wait(self) -> None:
        if self.turn.recv() != "go":
            raise Done
        self.take()
        self.start = time.perf_counter()

    def hand_over(self, **values: float) -> None:
        """The step is over: its record, then the wait for the next turn."""
        self.turn.send({**self.take(), "step": time.perf_counter() - self.start, **values})
        self.wait()


class OurSteps:
    """Our callbacks: the learner's seconds are the metric `time/learner`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tokens = 0

    def on_train_begin(self, trainer: Any) -> None:
        self.clock.wait()

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        tokens, self.tokens = int(metrics["num_tokens"]) - self.tokens, int(metrics["num_tokens"])
        self.clock.hand_over(learner=metrics["time/learner"], tokens=tokens)


class TRLSteps(TrainerCallback):
    """TRL's: `training_step` less `_prepare_inputs`, which samples and scores, and then clipping and update."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.clock.wrap(optimizer, "step", "update")  # it is made when training begins
        self.clock.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sums = self.clock.sums
        learner = sums["training_step"] - sums["prepare"] + sums["clip"] + sums["update"]
        tokens, self.tokens = state.num_input_tokens_seen - self.tokens, state.num_input_tokens_seen
        self.clock.hand_over(learner=learner, tokens=int(tokens))


def serve(side: str, work: Workload, steps: int, turn: Connection) -> None:
    """Train on one side, step by step as `turn` says. Runs in a process of its own."""
    warnings.filterwarnings("ignore")
    clock = Clock(turn)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), tempfile.TemporaryDirectory() as folder:
        if side == "ours":
            trainer = our_trainer(work, steps, Path(folder), [OurSteps(clock)])
            clock.wrap(trainer.engine, "generate", "generate")
            clock.silence(trainer.sync, "update")  # which samples too, to verify
        else:
            trainer = trl_trainer(work, steps, Path(folder), [TRLSteps(clock)])
            clock.wrap(trainer, "_generate_single_turn", "generate")
            clock.wrap(trainer, "_prepare_inputs", "prepare")
            clock.wrap(trainer, "training_step", "training_step")
            clock.wrap(trainer, "_clip_grad_norm", "clip")
        turn.send("ready")
        with suppress(Done):
            trainer.train()


def receive(turn: Connection, side: str) -> Any:
    if not turn.poll(LIMIT):
        raise TimeoutError(f"{side} made no step within {LIMIT} s")
    try:
        return turn.recv()
    except EOFError:
        raise RuntimeError(f"the process of {side} ended early; its own message is above") from None


def measure(name: str, rounds: int, warm: int) -> dict[str, Any]:
    """One workload: both sides in turn, `warm` steps that do not count and `rounds` that do."""
    work = WORKLOADS[name]
    context = multiprocessing.get_context("spawn")
    turns: dict[str, Connection] = {}
    processes = []
    records: dict[str, list[dict[str, float]]] = {"ours": [], "trl": []}
    try:
        for side in records:
            turns[side], other = context.Pipe()
            # one more step than is asked for: a run's last step does more than the others
            process = context.Process(
                target=serve, args=(side, work, warm + rounds + 1, other), daemon=True, name=f"step-{side}"
            )
            process.start()
            processes.append(process)
            other.close()
            assert receive(turns[side], side) == "ready"
        for _ in range(warm + rounds):
            for side, turn in turns.items():
                turn.send("go")
                records[side].append(receive(turn, side))
        for turn in turns.values():
            turn.send("stop")
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.terminate()
    tokens = [[record["tokens"] for record in found] for found in records.values()]
    assert tokens[0] == tokens[1], f"tokens of the steps: ours {tokens[0]}, TRL {tokens[1]}"
    row: dict[str, Any] = {
        "workload": name, "P": work.prompts, "G": work.generations, "T": work.tokens, "side": work.side,
        "tokens": int(statistics.median(tokens[0])),
    }  # fmt: skip
    for key in KEYS:
        medians = {s: statistics.median(r[key] for r in found[warm:]) for s, found in records.items()}
        row |= {
            f"{key}_ours": medians["ours"], f"{key}_trl": medians["trl"],
            f"{key}_ratio": medians["trl"] / medians["ours"],
        }  # fmt: skip
    return row


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, machine=False)
    parser.add_argument("--rounds", type=positive, default=5, help="timed steps of each side")
    parser.add_argument("--warm", type=int, default=2, help="steps before them")
    parser.add_argument("--workloads", nargs="+", default=["shapes", "24M, 448 px"], choices=WORKLOADS)
    args = parse(parser, argv, "trl")

    def case(name: str) -> dict[str, Any]:
        return measure(name, args.rounds, args.warm)

    run("step", args.workloads, case, args, versions(None, "trl"), summary=by_workload)


if __name__ == "__main__":
    main()
