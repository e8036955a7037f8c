from __future__ import annotations

from types import ModuleType

import pytest
from helpers.recipe_scripts import script


@pytest.fixture(scope="module")
def make_base(request: pytest.FixtureRequest) -> ModuleType:
    """make_base.py of the recipe that a test file's RECIPE names."""
    return script(f"{request.module.RECIPE.name}/make_base.py")
