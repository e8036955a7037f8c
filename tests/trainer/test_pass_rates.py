"""Runs with `data.pass_rate`: the rows that follow from the log, resumed too, and what is refused."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from helpers.small_runs import ROWS, config_for, rollouts_of, vowels

from mm_grpo import GRPOTrainer
from mm_grpo.build import plan_run
from mm_grpo.data.mixture import Mixture
from mm_grpo.data.pass_rate_order import PassRateOrder
from mm_grpo.data.sources import load_train
from mm_grpo.errors import ConfigError
from mm_grpo.run.same_run import deciding_fields

STEPS = 7


@pytest.mark.slow
def test_rows_follow_from_the_successes_that_are_logged(model: Path, tmp_path: Path) -> None:
    run = {"max_steps": STEPS, "report": False, "save_model": False, "headline": "vowels >= 1"}
    config = config_for(model, tmp_path / "r", run=run, data={"pass_rate": 0.5})
    assert deciding_fields(config)["run.headline"] == "vowels >= 1"
    GRPOTrainer(config, train=ROWS, rewards=[vowels]).train()
    order = PassRateOrder(6, 4, 5, 0.5)
    for step in range(1, STEPS + 1):
        rows = rollouts_of(tmp_path / "r", step)
        groups = [list(group) for _, group in groupby(rows, key=lambda row: row["slot"])]
        assert [int(group[0]["uid"].split(":")[1]) for group in groups] == order.rows(step)
        shares = [sum(row["reward"] >= 1 for row in group) / len(group) for group in groups]
        order.observe(step, list(zip(order.rows(step), shares, strict=True)))
    assert order._drawn and len({*order.rates}) > 1


@pytest.mark.parametrize(
    ("train", "changes", "names"),
    [
        (Mixture([ROWS, ROWS]), {}, "mixture"),
        (ROWS, {"run": {"max_steps": 3}}, r"run\.max_steps"),
        (ROWS, {"run": {"max_steps": None}}, r"run\.max_steps"),
        (ROWS, {"data": {"shuffle": False}}, r"data\.shuffle"),
    ],
)
def test_what_it_cannot_go_with_is_refused(train: Any, changes: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        data = {"pass_rate": 0.5, **changes.get("data", {})}
        config = config_for("m", **{"run": {"max_steps": 9}, **changes, "data": data})
        plan_run(config, load_train(config, train))
