"""The scripts of recipes, which are no modules of a package: `script("zoom/make_base.py")`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(path: str) -> ModuleType:
    """Import a script of examples/, each time anew."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    with patch.object(sys, "path", [*sys.path]):  # some of them add folders
        spec.loader.exec_module(module)
    return module
