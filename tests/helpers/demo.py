"""What a run of the shapes demo must have come to, whoever started it, and the files of a clone that starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def source_files() -> list[Path]:
    """What a commit of the working tree would hold, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).exists())


def copy_sources(folder: Path) -> None:
    for file in source_files():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)


def check_the_demo(run: Path, said: str, measured: int = 9) -> None:
    """Accuracy from chance to 0.90 and more, back at chance when images are shuffled, and sight rises."""
    summary = json.loads((run / "summary.json").read_text())
    print(f"{run.name}: {summary}")
    assert summary["accuracy_before"] <= 0.45
    assert summary["accuracy_after"] >= 0.90
    assert summary["seconds"] <= 300
    assert summary["first_set"]["after"]["blind"]["score"] <= 0.40
    assert summary["first_set"]["before"]["interval"][0] < summary["accuracy_before"]
    assert 0 <= summary["eval"]["count"]["after"] <= 1  # reported beside, not trained on
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    sight = [row["sight/nats"] for row in rows if "sight/nats" in row]
    assert len(sight) == measured and sight[0] < 0.3 and "guard sight_lost" not in said
    assert min(sight[-(measured // 3) :]) > 1.5
    assert (run / "report.html").stat().st_size > 10_000
