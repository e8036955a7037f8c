"""Numbers that a run can calculate with."""

from __future__ import annotations

from typing import Any, TypeGuard

MAX_MAGNITUDE = 2.0**63
"""Largest magnitude of a score, weight, metric or number of the config: the product of two fits into a float32."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for an int or float, not a bool, of at most MAX_MAGNITUDE either way; False for NaN."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= MAX_MAGNITUDE
