"""Two processes, of which one is killed: the run goes on as one that was not killed. robustness/test_kills.py has runs
of one process."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest
import runs
import torch
from helpers import processes
from helpers.run_folders import metrics_of, rollouts_of, weights_of, write_config


@pytest.mark.long
def test_two_processes_go_on_when_one_was_killed_while_it_wrote_a_checkpoint(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Of a mixture, whose places in the sources are kept too."""
    model, straight, killed = models["qwen2_5_vl"], tmp_path / "straight", tmp_path / "killed"
    values = {"max_steps": 5, "save_every": 2, "eval_every": 3, "report": False}
    one, other = (write_config(model, folder, **runs.MIXTURE, run=values) for folder in (straight, killed))
    (killed / "notes").mkdir(parents=True)
    (killed / "notes" / "mine.txt").write_text("mine")
    base = digests(model)

    def train(name: str, config: Path, kill: tuple[int, str] | None = None) -> list[int]:
        writing = kill and (kill[0], lambda: any((killed / "checkpoints").glob(kill[1])))
        return processes.launch(Path(runs.__file__), 2, [config], tmp_path / f"of-{name}", kill=writing)

    assert train("straight", one) == [0, 0], processes.outputs(tmp_path / "of-straight", 2)
    lost = train("killed", other, (1, ".step-*.new"))
    assert lost[0] == 1 and lost[1] == -signal.SIGKILL, processes.outputs(tmp_path / "of-killed", 2)
    assert train("resumed", other) == [0, 0], processes.outputs(tmp_path / "of-resumed", 2)
    assert metrics_of(killed) == metrics_of(straight) and len(metrics_of(killed)) == 6
    assert rollouts_of(killed) == rollouts_of(straight)
    want = weights_of(straight)
    assert all(torch.equal(weight, want[name]) for name, weight in weights_of(killed).items())
    files, left = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (straight, killed))
    assert left - {"error.txt"} == files | {"notes/mine.txt"}
    assert (killed / "notes" / "mine.txt").read_text() == "mine" and digests(model) == base


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
