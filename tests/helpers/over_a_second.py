"""Which tests without a mark took more than a second, over_a_second.txt: `make test` leaves them out.

    .venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "not slow and not long" --junitxml=x.xml
    python tests/helpers/over_a_second.py x.xml

A name that is no test's any more changes nothing. Tests that are slow by what they do have the mark `slow` or `long`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_suffix(".txt")


def names() -> frozenset[str]:
    """Node ids without parameters."""
    return frozenset(FILE.read_text(encoding="utf-8").split())


def write(junit: Path) -> None:
    cases = [case for case in ElementTree.parse(junit).iter("testcase") if float(case.get("time", 0)) > 1]
    found = {
        f"{c.get('classname', '').replace('.', '/')}.py::{c.get('name', '').partition('[')[0]}" for c in cases
    }
    FILE.write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
