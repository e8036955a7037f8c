"""What a run of the shapes demo must have come to, whoever started it."""

from __future__ import annotations

import json
from pathlib import Path


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
