"""Hostile input: the tables of cases that test_robustness.py and make_table.py run.

Importing a table adds its cases to `CASES`.
"""

from robustness import (  # noqa: F401
    cases_checkpoints,
    cases_commands,
    cases_config,
    cases_engines,
    cases_hub,
    cases_kills,
    cases_media,
    cases_resume,
    cases_rewards,
    cases_rows,
)
from robustness.cases import CASES, Case

__all__ = ["CASES", "Case"]
