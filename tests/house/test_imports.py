"""The house rules on imports: their direction, and the public names.

What loads when is tested in rewards/test_rewards_registry.py and data/test_sources.py.

Imports run one way (design: "The way through the house"). A part of the package may import the
parts of the layers below its own, and itself; parts of one layer do not know each other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grimp
import networkx
import pytest

import mm_grpo

ROOT = Path(mm_grpo.__file__).parent

# From the bottom up; a part is the first name under mm_grpo, module or package.
LAYERS = tuple(
    frozenset(names.split())
    for names in (
        "version types messages numbers errors files hub import_path terminal timing background user_code config "
        "migrate",
        "distributed",
        "data processors rewards algorithm",
        "health environments",
        "rollout learner",
        "run",
        "parity pages",
        "build testing",
        "preflight trained",
        "open_run",
        "exports warm_start",
        "trainer",
        "replay",
        "cli",
    )
)
# Parts of one layer that may import each other: the lowest, where config and migrate use each other.
GROUND = 0
# (importing part, imported part): each needs a reason beside it.
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def level(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def faults(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`; None when it may."""
    above, below = part(importer), part(imported)
    if above == "" or above == below or (above, below) in EXCEPTIONS:
        return None  # the package's own __init__ offers names from everywhere
    if below == "":
        return "inside the package, import from the module that defines the name"
    high, low = level(above), level(below)
    assert high is not None and low is not None
    if high > low or high == low == GROUND:
        return None
    return f"'{above}' may not import '{below}'"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("mm_grpo", cache_dir=None)


def test_every_module_belongs_to_a_layer(graph: grimp.ImportGraph) -> None:
    parts = {part(module) for module in graph.modules}
    strays = sorted(name for name in parts if name and level(name) is None)
    assert strays == [], f"{strays} belong to no layer in tests/house/test_imports.py"


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    edges = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    circles = [sorted(c) for c in networkx.strongly_connected_components(edges) if len(c) > 1]
    assert circles == []


def test_every_package_docstring_names_its_modules() -> None:
    missing = []
    for init in sorted(ROOT.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        packages = {path.parent.name for path in init.parent.glob("*/__init__.py")}
        names = {path.stem for path in init.parent.glob("*.py")} | packages
        modules = sorted(name for name in names if not name.startswith("__"))
        missing += [f"{init}: {name}" for name in modules if not re.search(rf"\b{name}\b", docstring)]
    assert missing == []


def test_imports_run_one_way(graph: grimp.ImportGraph) -> None:
    found = [
        f"{importer} imports {imported}: {why}"
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (why := faults(importer, imported))
    ]
    assert found == []


def test_the_public_names() -> None:
    names = (
        "AlgorithmConfig Completion ConfigError DataConfig DataError EvalSampling GRPOConfig GRPOTrainer Group "
        "GuardStop LoRAConfig ModelConfig OptimConfig Prompt RewardError RolloutConfig RunConfig Sample UserError "
        "VLLMConfig __version__ reward warm"
    )
    assert " ".join(sorted(mm_grpo.__all__)) == names
    assert {name for name in mm_grpo.__all__ if getattr(mm_grpo, name, None) is None} == set()
    public = {name for name in dir(mm_grpo) if not name.startswith("__")}
    assert public == set(mm_grpo.__all__) - {"__version__"}
    assert set(mm_grpo.__all__) <= set(dir(mm_grpo))
