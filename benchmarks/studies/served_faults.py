"""Runs faults against two real vLLM servers and prints tables for benchmarks/results/served_faults.md, in ten minutes.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python benchmarks/studies/served_faults.py [--staleness 1]

Without `--staleness` both runs are made: 0, and lockstep with 1. The runs are of the shapes recipe, float32, 8 prompts
with 4 completions. Each fault has two steps: it comes in the first, at a random request of a random server, and no
third begins before all servers are back. Then rollouts, metrics but for times and counts of servers, and the weights at
the end are compared, byte by byte, with those of the same run without a fault. What single answers may be wrong with is
tested at the fake server (rollout/test_served_faults.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # the settings of tests, before anything else is imported
import served_learner
from helpers.processes import alone
from http_proxy import Proxy

from mm_grpo import GRPOConfig
from mm_grpo.cli.serve import server_settings
from mm_grpo.rollout.served.client import ServerClient
from mm_grpo.rollout.served.launch import ServerProcess, serve
from mm_grpo.rollout.served.transfer import FileTransfer

GENERATE, UPDATE, FINISH = "/generate", "/update_weights", "/finish_weight_update"
TIMEOUT = 12.0
PROMPTS, JOINED = 8, 3
RECIPE = Path(__file__).parents[2] / "examples" / "shapes" / "config.yaml"
DEADLINE, WHOLE_RUN = 180.0, 1800.0


class World:
    """Servers, the proxies before them, and a learner that goes on step by step."""

    def __init__(self, servers: list[ServerProcess], folder: Path, config: Path) -> None:
        self.servers, self.folder, self.config = servers, folder, config
        self.proxies = [Proxy(server.url) for server in servers]
        self.process: subprocess.Popen[bytes] | None = None

    def start_learner(self, run: Path, staleness: int) -> None:
        """Start a run, or go on with it."""
        self.run = run
        run.with_suffix(".yaml").write_text(
            GRPOConfig.from_yaml(
                self.config,
                [
                    f"run.dir={run}",
                    f"rollout.max_staleness={staleness}",
                    f"rollout.server.urls=[{','.join(proxy.url for proxy in self.proxies)}]",
                ],
            ).to_yaml()
        )
        self._launch()

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, served_learner.__file__, self.run.with_suffix(".yaml"), self.folder],
                stdout=log, stderr=subprocess.STDOUT, env=alone(), start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> Path:
        return self.run.with_suffix(".log")

    def allow(self, step: int) -> None:
        (self.folder / "allowed").write_text(str(step))

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def signal_learner(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; a learner that was ended by a fault is started anew meanwhile."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert self.process is not None
            code = self.process.poll()
            if code in (-signal.SIGKILL, served_learner.ENDED):
                self._launch()
            elif code is not None or time.monotonic() > end:
                raise SystemExit(f"{what}: learner {code}\n" + self.log.read_text(errors="replace")[-4000:])
            time.sleep(0.05)

    def wait_step(self, step: int, since: int, what: str) -> None:
        """Wait until the learner is done with `step` and all servers are ready; `since` counts older events."""

        def there() -> bool:
            new = self.events()[since:]
            ready = [e["ready"] for e in new if "ready" in e] or [len(self.servers)]
            return any(e.get("waits", 0) > step for e in new) and ready[-1] == len(self.servers)

        self.wait(there, what)

    def end(self) -> None:
        """Let the run end."""
        assert self.process is not None
        self.allow(1 << 30)
        code = self.process.wait(WHOLE_RUN)
        if code != 0:
            raise SystemExit(f"the run ended with {code}\n{self.log.read_text(errors='replace')[-4000:]}")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for proxy in self.proxies:
            proxy.close()


# faults --------------------------------------------------------------------------------------


Act = Callable[[World, int], None]


@dataclass(frozen=True)
class Fault:
    """`begin(world, number)`, of which `number` is the server that it happens to, and `end`, `lasts` seconds later.

    It begins once a request whose path ends with `at` is on its way through that server's proxy; "" is between steps.
    """

    name: str
    at: str
    begin: Act
    end: Act = lambda world, number: None
    lasts: float = 0.0


def sent(number: int) -> Act:
    """A signal to a server and all that it started; `serve` starts it anew where that ends it."""

    def act(world: World, server: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(world.servers[server].pid or 0, number)

    return act


def silent(value: bool, both: bool = False) -> Act:
    def act(world: World, number: int) -> None:
        for proxy in world.proxies if both else [world.proxies[number]]:
            proxy.silent = value

    return act


def kill_engine(world: World, number: int) -> None:
    """End what a server started, and not the process that answers."""
    pid = world.servers[number].pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


def rename(world: World, number: int) -> None:
    """Give a server's weights another run's name, as another run's update would."""
    client, another = ServerClient(world.servers[number].url, timeout=30), FileTransfer(timeout=30.0)
    another.send([client], [], 3)
    another.close()
    client.close()


def kill_learner(world: World, number: int) -> None:
    world.signal_learner(signal.SIGKILL)


def kill_learner_and_server(world: World, number: int) -> None:
    kill_learner(world, number)
    KILL(world, number)


def kill_both(world: World, number: int) -> None:
    for each in range(len(world.servers)):
        KILL(world, each)


KILL, STOP, GO_ON = sent(signal.SIGKILL), sent(signal.SIGSTOP), sent(signal.SIGCONT)
FAULTS = (
    Fault("a server is killed (SIGKILL), and started anew", GENERATE, KILL),
    Fault("stopped (SIGSTOP) for 9 s", GENERATE, STOP, GO_ON, 9.0),
    Fault("cut off: nothing passes for 9 s, connections stay open", GENERATE, silent(True), silent(False), 9.0),
    Fault("both cut off so for 9 s", GENERATE, silent(True, True), silent(False, True), 9.0),
    Fault("all connections reset", GENERATE, lambda world, number: world.proxies[number].reset()),
    Fault("connections refused for 5 s", GENERATE, lambda world, number: world.proxies[number].refuse(),
          lambda world, number: world.proxies[number].accept(), 5.0),
    Fault("its weights get another run's name", GENERATE, rename),
    Fault("the learner is killed, and resumed", GENERATE, kill_learner),
    Fault("a server killed", UPDATE, KILL),
    Fault("stopped for 13 s", UPDATE, STOP, GO_ON, 13.0),
    Fault("cut off for 13 s", UPDATE, silent(True), silent(False), 13.0),
    Fault("connections reset", FINISH, lambda world, number: world.proxies[number].reset()),
    Fault("the learner is killed, and resumed", UPDATE, kill_learner),
    Fault("a server killed", "", KILL),
    Fault("its engine alone is killed, the process that answers is not", GENERATE, kill_engine),
    Fault("both servers killed at once", GENERATE, kill_both),
    Fault("the learner and a server killed", GENERATE, kill_learner_and_server),
)  # fmt: skip


def suffer(world: World, fault: Fault, step: int, chance: random.Random) -> dict[str, Any]:
    """Let a fault come in `step`, and wait until the next step is done and all servers are back."""
    number, since = chance.randrange(2), len(world.events())
    place = chance.randint(1, PROMPTS // 2 - 1) if fault.at == GENERATE else 1
    pause = chance.uniform(0.0, 0.15) if fault.at == GENERATE else 0.0
    times: dict[str, float] = {}
    ended = threading.Event()

    def happen() -> None:
        time.sleep(pause)
        times["begin"] = time.monotonic()
        fault.begin(world, number)
        time.sleep(fault.lasts)
        fault.end(world, number)
        times["end"] = time.monotonic()
        ended.set()

    if fault.at:
        world.proxies[number].at(fault.at, place, happen)
    else:
        happen()
    world.allow(step + 1)
    world.wait(ended.is_set, f"'{fault.name}' did not happen")
    world.wait_step(step + 1, since, fault.name)
    begin, new = times["begin"], [e for e in world.events()[since:] if e["t"] >= times["begin"]]
    before = max((e["losses"] for e in world.events()[:since] if "losses" in e), default=0)
    lost = [
        e["t"] for e in new if "losses" in e and (e["losses"] > before or e["ready"] < len(world.servers))
    ]
    back = [e["t"] for e in new if e.get("ready") == len(world.servers) and lost and e["t"] >= lost[0]]
    back += [e["t"] for e in new if "begun" in e]  # the learner's, where that was ended
    return {
        "fault": fault.name,
        "at": f"request {place} of a step" if fault.at == GENERATE else fault.at or "between steps",
        "server": number,
        "seen": lost[0] - begin if lost else None,
        "back": max(back) - begin if back else None,
        "after_end": max(back) - times["end"] if back and fault.lasts else None,
    }


# what the runs left --------------------------------------------------------------------------


def differences(run: Path, other: Path) -> list[str]:
    """What of a run is not as in the other one, byte by byte."""
    found = []
    for file in sorted((other / "rollouts").glob("*.jsonl")):
        mine = run / "rollouts" / file.name
        if not mine.exists() or mine.read_bytes() != file.read_bytes():
            found.append(f"rollouts/{file.name}")
    if len(list((run / "rollouts").glob("*.jsonl"))) != len(list((other / "rollouts").glob("*.jsonl"))):
        found.append("the number of rollout files")
    if plain_metrics(run) != plain_metrics(other):
        found.append("metrics.jsonl")
    weights = "model/model.safetensors"
    if (run / weights).read_bytes() != (other / weights).read_bytes():
        found.append(weights)
    return found


def plain_metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    without = ("time/", "step_time", "served/")
    return [{k: v for k, v in row.items() if not k.startswith(without)} for row in rows]


def step_times(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["step_time"] for row in rows if row["step"]}


def config_of(folder: Path, steps: int) -> GRPOConfig:
    values = GRPOConfig.from_yaml(RECIPE).model_dump()
    values["data"]["eval"] = None
    values["model"] |= {"dtype": "float32", "device": "cpu"}
    values["rollout"] |= {"engine": "vllm_server", "prompts_per_step": PROMPTS, "num_generations": 4}
    values["rollout"]["server"] |= {
        "timeout": TIMEOUT, "wait_timeout": 150.0,
        "urls": ["http://127.0.0.1:1"],
    }  # fmt: skip
    values["run"] |= {
        "dir": str(folder / "unused"), "max_steps": steps, "eval_every": 0, "save_every": 1, "report": False,
        "sight_every": 0, "eval_blind": None, "expected_curve": None, "headline": None, "keep_checkpoints": 2,
    }  # fmt: skip
    return GRPOConfig.from_dict(values)


def table(rows: list[dict[str, Any]]) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    lines = ["| fault | at | seen, s | back, s | step, s |", "|---|---|---|---|---|"]
    for row in rows:
        back = seconds(row["back"]) + (
            f" ({seconds(row['after_end'])})" if (row["after_end"] or -1) >= 0 else ""
        )
        lines.append(
            f"| {row['fault']} | {row['at']} | {seconds(row['seen'])} | {back} | {seconds(row['step'])} |"
        )
    return "\n".join(lines)


def measure(world: World, folder: Path, staleness: int) -> str:
    """Both runs of one staleness, without faults and with them, as a part of the page."""
    steps, chance, rows = JOINED + 2 * len(FAULTS), random.Random(7 + staleness), []
    whole, run = folder / f"whole-{staleness}", folder / f"run-{staleness}"
    (folder / "events.jsonl").unlink(missing_ok=True)
    world.allow(1 << 30)
    world.start_learner(whole, staleness)
    world.end()
    (folder / "events.jsonl").unlink(missing_ok=True)
    # one server is out of reach when the run begins, and joins it in its first steps
    world.allow(0)
    world.proxies[1].refuse()
    world.start_learner(run, staleness)
    world.wait(lambda: any("waits" in event for event in world.events()), "the start")
    world.allow(1)
    world.wait(lambda: any(event.get("done") == 1 for event in world.events()), "the first step")
    world.proxies[1].accept()
    world.allow(JOINED)
    world.wait_step(JOINED, 0, "the server that joins")
    for number, fault in enumerate(FAULTS):
        rows.append(suffer(world, fault, JOINED + 2 * number + 1, chance))
        print(json.dumps(rows[-1]), flush=True)
    world.end()
    taken = step_times(run)
    for number, row in enumerate(rows):
        row["step"] = taken[JOINED + 2 * number + 1]
    if wrong := differences(run, whole):
        raise SystemExit(f"max_staleness {staleness}: the run with faults is not the run without: {wrong}")
    usual = sorted(step_times(whole).values())[steps // 2]
    return (
        f"## `max_staleness: {staleness}`\n\n{len(rows)} faults in {steps} steps, of {usual:.1f} s in the median "
        f"without one; equal byte for byte to the run without.\n\n{table(rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "config.yaml"
        config = config_of(folder, JOINED + 2 * len(FAULTS))
        config.save(file)
        said: list[str] = []
        with serve(server_settings(config, 2), log_folder=folder / "logs", report=said.append) as servers:
            world = World(servers, folder, file)
            try:
                parts = [measure(world, folder, staleness) for staleness in args.staleness]
            finally:
                world.close()
    print("\n".join(parts))


if __name__ == "__main__":
    main()
