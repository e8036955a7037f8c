"""Runs faults against two real vLLM servers and writes benchmarks/results/served_faults.md, in a quarter of an hour.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/robustness/make_served_table.py [--staleness 1] [--seed 7]

Without `--staleness` both runs are made: 0, and lockstep with 1. The runs are of the shapes recipe, float32, 8 prompts
with 4 completions. Each fault has two steps: it comes in the first, at a random request of a random server, and no
third begins before all servers are back. Then rollouts, metrics but for times and counts of servers, and the weights at
the end are compared, byte by byte, with those of the same run without a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # the settings of tests, before anything else is imported
from helpers.processes import alone

from mm_grpo import GRPOConfig
from mm_grpo.cli.serve import server_settings
from mm_grpo.rollout.served.launch import ServerProcess, serve
from robustness import served_learner
from robustness.http_proxy import Proxy
from robustness.served_faults import FAULTS, GENERATE, HEALTH_TIMEOUT, TIMEOUT, Fault

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "served_faults.md"
PROMPTS, JOINED = 8, 3
RECIPE = Path(__file__).parents[2] / "examples" / "shapes" / "config.yaml"
DEADLINE, WHOLE_RUN = 180.0, 1800.0
HEAD = """# Faults of vLLM servers

Written by `PYTHONPATH=tests python tests/robustness/make_served_table.py`: the shapes recipe in float32, 8 prompts
with 4 completions, over two vLLM 0.32 servers on two CPU cores. Each fault comes in mid-step, at a request chosen by a
random number, while it is on its way; all faults of a table are in one run, and one of the servers is out of reach when
it begins, and joins after the first step. `rollout.server.timeout` is {timeout:g} s and an answer
to `/health` takes at most {health:g} s: a server that is stopped for less while weights are sent is waited for.

- **seen**: seconds from the fault to the first server that counts as lost; a dash where none does.
- **back**: seconds from the fault until all servers are ready again, and in brackets from its end. A server that was
  killed has to be started anew, which takes vLLM 20 s and more here; of a learner it is until it goes on.
- **step**: seconds of the step that it came in. Without a fault a step takes {usual} s in the median.
"""


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


def measure(
    world: World, folder: Path, staleness: int, seed: int, faults: tuple[Fault, ...], minutes: float
) -> dict[str, Any]:
    """Both runs of one staleness: without faults, and with them."""
    steps, chance, rows = JOINED + 2 * len(faults), random.Random(seed), []
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
    begun = time.monotonic()
    for number, fault in enumerate(faults):
        if time.monotonic() - begun < 60 * minutes:
            rows.append(suffer(world, fault, JOINED + 2 * number + 1, chance))
            print(json.dumps(rows[-1]), flush=True)
    world.end()
    taken = step_times(run)
    for number, row in enumerate(rows):
        row["step"] = taken[JOINED + 2 * number + 1]
    usual = sorted(step_times(whole).values())[steps // 2]
    return {"rows": rows, "usual": usual, "wrong": differences(run, whole), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="the first so many")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no fault is begun")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    faults = FAULTS[: args.faults]
    with tempfile.TemporaryDirectory() as name:
        folder = args.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.yaml"
        config = config_of(folder, JOINED + 2 * len(faults))
        config.save(file)
        said: list[str] = []
        with serve(server_settings(config, 2), log_folder=folder / "logs", report=said.append) as servers:
            world = World(servers, folder, file)
            try:
                for staleness in args.staleness:
                    result = measure(world, folder, staleness, args.seed + staleness, faults, args.minutes)
                    (folder / f"results-{staleness}.json").write_text(json.dumps(result))
                    print(json.dumps({k: v for k, v in result.items() if k != "rows"}), flush=True)
            finally:
                world.close()
        found = {
            number: json.loads(path.read_text())
            for number in (0, 1)
            if (path := folder / f"results-{number}.json").exists()
        }
    text = page(found)
    if args.faults == len(FAULTS):
        PAGE.write_text(text, encoding="utf-8")
    print(text)
    if any(one["wrong"] for one in found.values()):
        raise SystemExit("runs with faults are not the run without")


def page(results: dict[int, dict[str, Any]]) -> str:
    """The page, from what was measured of each staleness."""
    text = HEAD.format(
        health=HEALTH_TIMEOUT,
        timeout=TIMEOUT,
        usual=" and ".join(f"{found['usual']:.1f}" for found in results.values()),
    )
    for staleness, found in results.items():
        rows, wrong, count = found["rows"], found["wrong"], found["steps"]
        same = f"NOT EQUAL: {wrong}" if wrong else "equal byte for byte to the run without a fault"
        text += (
            f"\n## `max_staleness: {staleness}`\n\n{len(rows)} faults in {count} steps. Completions with their\n"
            "seeds, metrics but for times (differences of log-probs are among them), and the weights at the end are\n"
            f"{same}.\n\n{table(rows)}\n"
        )
    return text


if __name__ == "__main__":
    main()
