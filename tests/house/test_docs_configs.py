"""YAML in the docs: configs are legal, the README's passes `mm-grpo check`; pages are in the site's nav."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.preflight.check import check_config
from mm_grpo.testing.tiny_models import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
SECTIONS = set(GRPOConfig.model_fields)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language, without their indentation."""
    found = re.findall(
        rf"^([ ]*)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(text) for _, text in found]


def configs() -> list[Any]:
    """Each block that reads as a mapping of sections."""
    found = []
    for page in PAGES:
        for number, text in enumerate(blocks(page, "yaml")):
            values = yaml.safe_load(text)
            if isinstance(values, dict) and set(values) & SECTIONS:
                found.append(pytest.param(values, id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("values", configs())
def test_a_config_of_the_docs_is_legal(values: dict[str, Any]) -> None:
    data = values.get("data", {})
    whole = {
        "rewards": ["exact_match"],
        **values,
        "model": {"path": "m", **values.get("model", {})},
        "data": {"eval": "e.jsonl", **data} if isinstance(data, dict) else data,
    }
    GRPOConfig.from_dict(whole).check()


def test_the_blocks_that_are_looked_at_are_many() -> None:
    assert len(configs()) >= 20


def test_a_mistake_in_a_block_would_be_noticed() -> None:
    with pytest.raises(Exception, match="unknown key"):
        test_a_config_of_the_docs_is_legal({"rollout": {"prompt_per_step": 4}})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_json_and_yaml_of_the_docs_can_be_read(page: Path) -> None:
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)
    for text in blocks(page, "json"):
        json.loads(text)
    for number, text in enumerate(blocks(page, "python")):
        compile(text, f"{page.name}, block {number}", "exec")


def test_the_readmes_config_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (row,), (config, *_) = blocks(ROOT / "README.md", "json"), blocks(ROOT / "README.md", "yaml")
    assert len(config.splitlines()) == 12
    (tmp_path / "rows.jsonl").write_text(row)
    (tmp_path / "mine.yaml").write_text(config)
    image = tmp_path / json.loads(row)["image"]
    image.parent.mkdir()
    Image.new("RGB", (64, 64), "white").save(image)
    build("qwen2_5_vl", tmp_path / "model")
    passed = check_config(GRPOConfig.from_yaml("mine.yaml", ["model.path=model"]))
    assert passed, capsys.readouterr().out


def test_tables_for_other_trainers_are_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_coming_from.py"))
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert made["page"](text) == text


def test_every_page_is_in_the_sites_nav() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- (\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE))
    there = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert listed == there, "pages of docs/ and the nav of mkdocs.yml differ"


def test_links_out_of_the_docs_become_links_to_the_repository() -> None:
    replaced = runpy.run_path(str(ROOT / "docs" / "site_links.py"))["replaced"]
    text = "see [it](../README.md#x), [that](b.md) and ![a](../images/a.png)"
    assert (
        replaced(text, "a.md", "https://host/o/n/")
        == "see [it](https://host/o/n/blob/main/README.md#x), [that](b.md) and ![a](../images/a.png)"
    )
    assert replaced(text, "a.md", "") == "see it, [that](b.md) and ![a](../images/a.png)"


def test_the_page_on_installing_names_every_extra_and_the_versions_of_the_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = re.search(r"## Extras\n(.*?)\n## ", text, re.DOTALL)
    assert extras is not None
    rows = [line.split("|")[1] for line in extras[1].splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(project["optional-dependencies"])
    asked = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    pins = (ROOT / "requirements" / "cpu.in").read_text(encoding="utf-8")
    versions = re.findall(r"^\| (\w+) \| ([\d.]+)[^|]*\| ([\d.]+)", text, re.MULTILINE)
    assert len(versions) == 8
    for package, lowest, tested in versions:
        if package == "Python":
            assert project["requires-python"] == f">={lowest}"
            continue
        assert any(one.startswith(f"{package.lower()}>={lowest}") for one in asked), package
        assert re.search(rf"^{package.lower()}(-cpu)?=={re.escape(tested)}", pins, re.MULTILINE), package


def test_names_that_the_reference_is_made_of_exist() -> None:
    import importlib

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(names) >= 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name
