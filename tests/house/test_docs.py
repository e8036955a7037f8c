"""The docs are true: links lead somewhere, snippets and configs run, tables are those of the code."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import field_bugs
import pytest
import yaml
from helpers.documents import PAGES, ROOT, blocks, read, write_readme_files
from helpers.metrics_page import metrics_of_the_page, not_on_the_page
from PIL import Image

from mm_grpo.config import GRPOConfig
from mm_grpo.data.sources import load_train
from mm_grpo.data.videos import VideoSource
from mm_grpo.errors import ConfigError, DataError
from mm_grpo.preflight.gold_warnings import warn_of_golds
from mm_grpo.rewards.scorer import Scorer


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the forge makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        if anchor and (target.endswith(".md") or not target):
            assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_pages_that_the_package_names_exist() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "mm_grpo").rglob("*.py"))
    named = set(re.findall(r"docs/[\w-]+\.md", source))
    assert len(named) > 5 and [name for name in named if not (ROOT / name).exists()] == []


def test_the_docs_stay_short() -> None:
    assert len(read("README.md")) <= 8000
    pages = [
        page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md") if page != field_bugs.PAGE
    ]
    assert len(pages) <= 22 and sum(len(page.split()) for page in pages) <= 24_500


def test_the_page_of_the_fields_bugs_is_that_of_its_tests() -> None:
    """Each record has a test unless it is open, and a message that is quoted stands in the file of a test."""
    records, marked = field_bugs.bugs(), field_bugs.tests()
    assert sorted(bug.key for bug in records if bug.verdict != "open") == sorted(marked)
    for bug in (bug for bug in records if bug.verdict in ("stopped", "warned")):
        files = [read("tests/" + name.partition("::")[0]) for name in marked[bug.key]]
        assert any(bug.here.removeprefix("guard ") in file for file in files), bug.key
    verdicts = [bug.verdict for bug in records]
    assert {*verdicts} == {*field_bugs.VERDICTS}
    assert verdicts.count("impossible") + verdicts.count("stopped") >= 50
    assert read("docs/field-bugs.md") == field_bugs.text()


def test_the_page_of_fields_is_current() -> None:
    assert read("docs/config.md") == runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]()


def configs() -> list[Any]:
    """Each block that reads as a mapping of sections."""
    found = []
    for page in PAGES:
        for number, text in enumerate(blocks(page.read_text(encoding="utf-8"), "yaml")):
            values = yaml.safe_load(text)
            if isinstance(values, dict) and set(values) & set(GRPOConfig.model_fields):
                found.append(pytest.param(values, id=f"{page.relative_to(ROOT)}-{number}"))
    assert len(found) >= 15
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


def test_the_reward_and_the_loop_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_readme_files(tmp_path)
    monkeypatch.setattr("mm_grpo.rewards.registry._REGISTRY", {})  # other tests register it too
    score = runpy.run_path(str(tmp_path / "my_rewards.py"))["says_a_number"]
    for completion, answer, expected in (("it is 12", "12", 1.0), ("it is 3", "12", 0.0), ("3", "red", None)):
        assert score(completion, answer) == expected
    assert blocks(read("README.md"), "python")[-1] in read("examples/loop.py")


@pytest.mark.parametrize("name", ["data", "turns"])
@pytest.mark.usefixtures("own_rewards")
def test_the_python_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = blocks(read(f"docs/{name}.md"), "python")
    assert snippets
    coco = {"images": [{"id": 7, "file_name": "a.png"}], "categories": [{"id": 3, "name": "dog"}]}
    marks = [{"image_id": 7, "category_id": 3, "bbox": [at, 0, 9, 9]} for at in (1, 2)]
    (tmp_path / "instances.json").write_text(json.dumps({**coco, "annotations": marks}))
    for snippet in snippets:
        if (
            "import verifiers" not in snippet
        ):  # 0.4.0 asks for older versions of mcp and openai than vLLM's pins
            exec(compile(snippet, name, "exec"), {"__name__": name})
    if name == "data":
        row = json.loads((tmp_path / "rows.jsonl").read_text())
        boxes = [[1, 0, 9, 9], [2, 0, 9, 9]]
        assert row == {"image": "a.png", "prompt": "Where is each dog?", "boxes": boxes}
        with pytest.raises(DataError, match=r"instances\.json: .*COCO.*docs/data\.md"):
            load_train(GRPOConfig.from_dict({"model": {"path": "m"}, "data": {"train": "instances.json"}}))


@pytest.mark.slow
def test_the_snippets_on_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "python"}
    for snippet in blocks(read("docs/python.md"), "python"):
        exec(compile(snippet, "python.md", "exec"), names)
    assert (names["summary"]["steps"], names["summary"]["stopped"]) == (3, "three steps are enough here")
    rows = [json.loads(line) for line in (tmp_path / "runs/page/metrics.jsonl").read_text().splitlines()]
    equal = [row.get("my/right") == row.get("rewards/exact_match/mean") for row in rows]
    assert equal == [True, True, True, True, False]
    assert (tmp_path / "page_model" / "config.json").exists()
    assert not_on_the_page({name for row in rows for name in row}) == ["my/right"]


READ: list[tuple[int, dict[str, Any]]] = [  # images and columns of the rows in docs/data.md
    (1, {"answer": "3"}),
    (2, {"answer": "first"}),
    (1, {"answer": "stop"}),
    (1, {"answer": "red"}),
    (1, {"answer": "4", "data_source": "clevr"}),
    (1, {"answer": "red", "id": "000000033471"}),
    (1, {"answer": "3"}),
    (1, {"box": [4, 4, 16, 20], "category": "dog"}),
    (0, {"answer": "door"}),
]


def test_rows_are_read_by_the_config_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for at, side in enumerate((32, 40)):
        Image.new("RGB", (side, side)).save(tmp_path / "images" / f"{at}.png")
    shown = re.findall(r"```json\n(.*?)```\s.*?```yaml\n(.*?)```", read("docs/data.md"), re.DOTALL)
    for (row, config_text), (images, columns) in zip(shown, READ, strict=True):
        (tmp_path / "rows.jsonl").write_text(row)
        config = GRPOConfig.from_dict({"model": {"path": "m"}, **yaml.safe_load(config_text)})
        dataset = load_train(config, needs=Scorer(config.rewards).check)
        fields = dataset.fields(0)
        if images:
            assert [image.size[0] for image in dataset.sample(0).images] == [32, 40][:images]
        else:
            assert fields.videos == (VideoSource("clips/0.mp4", fps=1.0, start=3.0, end=8.0),)
        assert {name: fields.columns.get(name) for name in columns} == columns
        assert fields.messages[-1]["role"] == "user"
        warn_of_golds([dataset], Scorer(config.rewards).specs)
    assert caplog.messages == []


def test_the_page_of_metrics_names_what_the_code_logs() -> None:
    """Every text of the package that begins as a metric does, such as `time/...`, is on the page."""
    page = metrics_of_the_page()
    kinds = "|".join(sorted({name.partition("/")[0] for name in page if "/" in name} - {"images", "rewards"}))
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "mm_grpo").rglob("*.py"))
    logged = set(re.findall(rf'"((?:{kinds})/[a-z_/{{}}]+?)/?"', source))
    assert len(logged) > 60
    part = {name: re.sub(r"\{\w*\}", "[^/]+", name) + "(/|$)" for name in not_on_the_page(logged)}
    assert [name for name, form in part.items() if not any(re.match(form, one) for one in page)] == []


def test_names_of_other_trainers_are_answered_as_the_page_says() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+)` \|$", read("docs/coming-from.md"), re.MULTILINE)
    assert len(rows) > 25
    for names, here in rows:
        for name in re.findall(r"\w+", names):
            with pytest.raises(ConfigError, match=re.escape(here)):
                GRPOConfig.from_dict({"model": {"path": "m"}, name: 1})
    with pytest.raises(ConfigError) as refused:
        GRPOConfig.from_dict({"model": {"path": "m"}, "per_device_train_batch_size": 4})
    assert f"error: {refused.value}" in " ".join(read("docs/coming-from.md").split())


def test_the_page_on_installing_names_every_extra_and_the_versions_of_the_pins() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    text = read("docs/install.md")
    extras = re.findall(r"^\| (`.*?) \|", text.partition("## Extras")[2], re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", "".join(extras))) == set(project["optional-dependencies"])
    optional = project["optional-dependencies"]
    asked = [*project["dependencies"], *optional["vllm"], *optional["qlora"]]
    pins = read("requirements/cpu.in")
    versions = re.findall(r"^\| (\w+) \| ([\d.]+)[^|]*\| ([\d.]+)", text, re.MULTILINE)
    assert len(versions) == 9 and versions[0][:2] == ("Python", project["requires-python"].removeprefix(">="))
    for package, lowest, tested in versions[1:]:
        assert any(one.startswith(f"{package.lower()}>={lowest}") for one in asked), package
        assert re.search(rf"^{package.lower()}(-cpu)?=={re.escape(tested)}", pins, re.MULTILINE), package


def test_every_promise_of_the_readme_has_tests_that_exist() -> None:
    lines = re.findall(r"^\| ([^|]+) \| (.+) \|$", read("benchmarks/results/promises.md"), re.MULTILINE)
    rows = [(first, rest.partition(" | ")[0]) for first, rest in lines][1:]
    for _, tests in rows:
        for name in re.findall(r"`([^`]+)`", tests):
            file, _, function = name.partition("::")
            assert f"def {function or 'test_'}" in read(f"tests/{file}"), name
    bold = re.findall(r"^- \*\*(.+?)\.?\*\*", read("README.md"), re.DOTALL | re.MULTILINE)
    promised = [promise.rstrip(".") for promise, _ in rows]
    assert len(bold) == 8 and [one for one in bold if one not in promised] == []


def test_the_number_of_rewards_that_ship_is_counted() -> None:
    files = (ROOT / "mm_grpo/rewards/builtins").glob("*.py")
    number = sum(len(re.findall(r"^@reward\(", file.read_text(), re.MULTILINE)) for file in files)
    for page in ("docs/index.md", "README.md"):
        assert re.findall(r"(\d+) (?:that ship|\[rewards\])", read(page)) == [str(number)]
