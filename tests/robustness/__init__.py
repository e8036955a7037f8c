"""Hostile input: a table of cases (cases.py), run whole by test_robustness.py; runs that are killed (test_kills.py)."""
