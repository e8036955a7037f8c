"""report.html: made from the folder alone, complete, bounded, and inert whatever a run wrote."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import group, run

from mm_grpo.errors import ConfigError
from mm_grpo.run.curves import MOST_BUCKETS, Curves
from mm_grpo.run.folder import RunFolder
from mm_grpo.run.paths import RunPaths
from mm_grpo.run.report import (
    WHILE_RUNNING,
    Report,
    changed_settings,
    inert_json,
    policy_hash,
    render,
    run_names,
    value_before,
)

EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\"'\u202e\x1b[31m\x00"


class Tags(HTMLParser):
    """Every tag and attribute of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(page: str) -> dict[str, Any]:
    """What the page holds for its script."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_the_page_holds_the_run(tmp_path: Path) -> None:
    page = run(tmp_path / "shapes").write_report().read_text()
    assert "<title>shapes – mm_grpo</title>" in page
    assert "30 steps, finished" in page
    assert "from 12.5%, +62.5 points" in page and ">75.0%<" in page
    charts = (
        "Reward",
        "Evaluation accuracy",
        "Entropy",
        "Gradient norm",
        "Step time by phase",
        "Reward parts",
    )
    for title in (*charts, "Tokens per second", "Log-prob gap"):
        assert f"<figcaption><span>{title} <" in page, title
    assert "Cut completions <" not in page and "0 throughout, and not drawn: cut completions." in page
    assert "KL to the reference" not in page  # never measured
    assert "Shown are 60 groups of 30 of the 30 logged steps." in page
    assert "<th>run.max_steps</th><td>30</td>" in page and "torch 2." in page and "path: red" in page
    data = data_of(page)
    assert [(g["step"], g["slot"]) for g in data["groups"]] == [(s, t) for s in range(1, 31) for t in (0, 1)]
    assert len(data["pictures"]) == 2 and page.count("data:image/png;base64,") == 2  # once each, of 60 groups
    assert data["charts"][0][0]["label"] == "each step" and data["charts"][0][1]["label"] == "mean of 5 steps"


def test_the_page_is_well_formed_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    page = run(tmp_path).write_report().read_text()
    tags = Tags(page)
    assert tags.open == []
    assert not [tag for tag, a in tags.tags if tag in ("link", "iframe", "img", "base") or "style" in a]
    sources = [a["href"] for _, a in tags.tags if "href" in a]
    assert {s[:4] for s in sources if s} == {"data", "#p-0"} or all(
        s and s.startswith(("data:image/", "#p-")) for s in sources
    )
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    (own,) = [body for kind, body in scripts if not kind]
    assert {kind.split(" id=")[0] for kind, _ in scripts} <= {
        "",
        ' type="application/json"',
        ' type="text/plain"',
    }
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    policy = next(a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == (
        f"default-src 'none'; img-src data:; style-src {policy_hash(style)}; script-src {policy_hash(own)}; "
        "base-uri 'none'; form-action 'none'"
    )


def test_what_a_run_wrote_is_inert(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", EVIL)
    folder.append_event(3, EVIL, "warn", EVIL)
    page = folder.write_report().read_text()
    tags = Tags(page)
    assert tags.open == []
    assert {tag for tag, _ in tags.tags} & {"iframe", "object", "img"} == set()
    assert [tag for tag, _ in tags.tags].count("script") == 2  # the data and the page's own
    assert [a for _, a in tags.tags if any(name.startswith("on") for name in a)] == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script>alert" not in page
    shown = data_of(page)["groups"][0]["completions"][0]["text"]
    assert shown.startswith("</td><script>alert(1)</script>")  # as it was written
    assert shown.endswith(r"\u202e\x1b[31m\x00") and "\u202e" not in page and "\x1b" not in page


def test_json_ends_no_element() -> None:
    text = inert_json({"a": "</script><!--&\u2028", "b": [1.5, None]})
    assert json.loads(text) == {"a": "</script><!--&\u2028", "b": [1.5, None]}
    assert not set("<>&\u2028") & set(text)


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = RunFolder.create(tmp_path, "x: 1\n").write_report().read_text()
    assert "no step yet" in page and "<figure" not in page and 'id="filters"' not in page
    assert Tags(page).open == []


def test_guards_that_fired_are_marked(tmp_path: Path) -> None:
    folder = run(tmp_path)
    folder.append_event(7, "zero_std", "warn", "no group has a signal")
    page = folder.write_report().read_text()
    assert "1 time a guard fired" in page
    assert "step 7: <b>zero_std</b> (warn): no group has a signal" in page
    assert page.count('<line class="event"') == page.count("<figure")
    assert "step 7: zero_std: no group has a signal</title>" in page


def test_a_page_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", report_every=3).start("x: 1\n")
    page = folder.paths.report
    folder.append_metrics(1, {"reward": 0.5})
    assert not page.exists()
    folder.append_metrics(2, {"reward": 0.5, "eval/heldout/accuracy": 0.5})
    assert "2 steps so far" in page.read_text()
    folder.append_metrics(3, {"reward": 0.5})
    assert "3 steps so far" in page.read_text()
    folder.append_metrics(4, {"reward": 0.5})
    assert "3 steps so far" in page.read_text()
    rare = RunFolder(tmp_path / "rare", report_every=0).start("x: 1\n")
    rare.append_metrics(10, {"reward": 0.5})
    assert not rare.paths.report.exists()
    rare.append_metrics(11, {"eval/accuracy": 0.5})
    assert rare.paths.report.exists()
    never = RunFolder.create(tmp_path / "never", "x: 1\n")
    never.append_metrics(10, {"eval/accuracy": 0.5})
    assert not never.paths.report.exists()


def test_a_long_run_costs_a_page_no_more_than_a_short_one(tmp_path: Path) -> None:
    sizes, folder = [], RunFolder.create(tmp_path, "x: 1\n")
    report = Report([folder.paths])
    rows = 0
    for until in (2_000, 20_000):
        with folder.paths.metrics.open("a") as file:
            for rows in range(rows + 1, until + 1):  # noqa: B020
                file.write(
                    json.dumps(
                        {"step": rows, "reward": rows % 7 / 7, "grad_norm": 99.0 if rows == 77 else 1.0}
                    )
                    + "\n"
                )
        found = report.gather(WHILE_RUNNING)
        sizes.append(len(render(found)))
        kept = [trace for traces in report.curves[0].traces for trace in traces.values()]
        assert all(len(trace.buckets) <= MOST_BUCKETS for trace in kept)
        gradient = next(c for c in found["charts"] if c["title"] == "Gradient norm")
        assert [77, 99.0] in [list(point) for point in gradient["lines"][0]["points"]]
    assert sizes[1] < 1.3 * sizes[0]
    before = read_so_far()
    folder.metrics.append(20_001, {"reward": 1.0})
    report.update()
    assert read_so_far() - before < 40_000  # the end of a file of 1 MB
    assert report.curves[0].last_step == 20_001


def read_so_far() -> int:
    """Bytes that this thread has read."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


def test_a_log_that_was_cut_is_read_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    for step in range(1, 6):
        folder.metrics.append(step, {"reward": float(step)})
    report = Report([folder.paths])
    report.update()
    folder.cut_after(2)
    report.update()
    assert (report.curves[0].last_step, list(report.curves[0].rewards)) == (2, [1.0, 2.0])


def test_an_evaluation_s_reward_is_drawn_where_it_is_not_its_accuracy(tmp_path: Path) -> None:
    for reward, drawn in ((0.5, False), (0.75, True)):
        folder = RunFolder.create(tmp_path / str(reward), "x: 1\n")
        folder.metrics.append(1, {"eval/a/accuracy": 0.5, "eval/a/reward": reward, "eval/b/reward": None})
        titles = [chart["title"] for chart in Report([folder.paths]).gather()["charts"]]
        assert ("Evaluation reward" in titles) is drawn and "Evaluation accuracy" in titles


def test_several_runs_share_the_curves(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one"), run(tmp_path / "two", steps=12)
    page = Report([one.paths, two.paths]).write(tmp_path / "view.html").read_text()
    assert Tags(page).open == []
    data = data_of(page)
    assert data["runs"] == ["one", "two"] and {g["run"] for g in data["groups"]} == {0, 1}
    assert [line["label"] for line in data["charts"][0]] == ["one", "two"]
    assert [len(line["points"]) for line in data["charts"][0]] == [30, 12]
    assert [line["look"] for line in data["charts"][0]] == ["s1", "s2"]
    assert "<title>one, two – mm_grpo</title>" in page and 'id="f-run"' in page
    assert page.count("data:image/png;base64,") == 2  # the same pictures in both


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [RunPaths(tmp_path / name) for name in ("a/out", "b/out")]
    assert run_names(paths) == ["a/out", "b/out"]
    assert run_names([RunPaths(tmp_path / "x"), RunPaths(tmp_path / "y")]) == ["x", "y"]


def test_what_differs_from_the_defaults_is_listed(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path, "model:\n  path: m\nrollout:\n  num_generations: 4\nrun:\n  seed: 42\n"
    )
    assert changed_settings(folder.paths) == [
        {"name": "model.path", "value": "m"},
        {"name": "rollout.num_generations", "value": "4"},
    ]
    folder.paths.config.write_text("nonsense: [")
    assert changed_settings(folder.paths) == []


def test_the_accuracy_before_the_run_comes_from_the_summary(tmp_path: Path) -> None:
    page = run(tmp_path, before=0.25).write_report().read_text()
    assert "heldout, step 0: 0.25</title>" in page and page.count("<title>heldout, step") == 4
    curves = Curves()
    curves.take({"step": 0, "eval/heldout/accuracy": 0.125})
    trace = curves.traces[1]["heldout"]
    assert value_before("heldout", trace, {"eval": {"heldout": {"before": 0.25}}}) == ()
    assert value_before("other", trace, {"eval": {"heldout": {"before": 0.25}}}) == ()


def test_a_picture_of_the_page_s_group(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x: 1\n")
    folder.write_rollouts(1, [group(0, (1.0, 0.0))])
    page = folder.write_report().read_text()
    (name,) = data_of(page)["pictures"]
    assert f'<use href="#p-{name}"/>' in page and f'<image id="p-{name}" width="8" height="4"' in page


def controlled(path: Path) -> RunFolder:
    """A run of three evaluations with a blind control and sight, which expects a curve."""
    curve = path.parent / "curve.json"
    curve.write_text(
        json.dumps(
            {"metric": "eval/a/accuracy", "steps": [0, 20], "values": [0.1, 0.9], "source": f"{EVIL} seed 0"}
        )
    )
    folder = RunFolder(path, expected=curve)
    folder.start("model:\n  path: m\nrun:\n  eval_blind: removed\n")
    for step, right, gap in ((0, 0.25, 0.05), (10, 0.5, 0.25), (20, 0.75, 0.5)):
        row = {"eval/a/accuracy": right, "eval/a/score": right, "eval/a/reward": right, "time/eval": 3.0}
        row |= {
            "eval/a/score_low": right - 0.125,
            "eval/a/score_high": right + 0.125,
            "sight/nats": 2 * right,
        }
        row |= {"eval/blind/accuracy": right - gap, "eval/blind/score": right - gap, "eval/blind/gap": gap}
        row |= {"eval/blind/reward": right - gap, "eval/blind/gap_low": gap - 0.1, "kl": 0.0}
        row |= {"eval/blind/gap_high": gap + 0.1, "step_time": 1.0, "time/learner": 0.5}
        folder.metrics.append(step, row)
    return folder


def test_the_control_sight_and_the_expected_curve_are_drawn(tmp_path: Path) -> None:
    folder = controlled(tmp_path / "run")
    (tmp_path / "curve.json").unlink()  # the page needs the run folder alone
    found = Report([folder.paths]).gather()
    charts = {chart["title"]: chart["lines"] for chart in found["charts"]}
    assert list(charts) == ["Evaluation accuracy", "Sight", "Step time by phase", "Evaluation time"]
    assert charts["Evaluation accuracy"] == [
        {"label": "a", "look": "s1", "points": [(0, 0.25), (10, 0.5), (20, 0.75)]},
        {"label": "images removed", "look": "s2", "points": [(0, 0.2), (10, 0.25), (20, 0.25)]},
        {"label": "expected a", "look": "expected", "points": [(0, 0.1), (20, 0.9)]},
    ]
    assert charts["Sight"][0]["points"] == [(0, 0.5), (10, 1.0), (20, 1.5)]
    assert [line["label"] for line in charts["Step time by phase"]] == ["whole step", "learner"]
    assert found["zeros"] == ["kl to the reference"]
    page = render(found)
    assert Tags(page).open == [] and [tag for tag, _ in Tags(page).tags].count("script") == 2
    assert "Expected eval/a/accuracy: &lt;/td&gt;&lt;script&gt;" in page and "\u202e" not in page
    assert '<polyline class="line expected"' in page and "expected a, step 20: 0.9</title>" in page
    both = Report([folder.paths, controlled(tmp_path / "two").paths]).gather()
    lines, phases = (both["charts"][place]["lines"] for place in (0, 2))
    assert [line["label"] for line in phases] == ["run whole step", "two whole step"]
    assert [line["label"] for line in lines] == [
        "run a", "run images removed", "two a", "two images removed", "expected a",
    ]  # fmt: skip


def test_a_set_that_is_called_blind_keeps_its_name(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "model:\n  path: m\n")
    folder.metrics.append(1, {"eval/blind/accuracy": 0.5, "eval/b/accuracy": 0.5})
    (chart,) = Report([folder.paths]).gather()["charts"]
    assert [line["label"] for line in chart["lines"]] == ["blind", "b"]


def test_an_expected_curve_is_checked_at_the_start_and_goes_with_the_run(tmp_path: Path) -> None:
    curve, root = tmp_path / "curve.json", tmp_path / "run"
    with pytest.raises(ConfigError, match=r"run.expected_curve = '.*curve.json': cannot be read"):
        RunFolder(root, expected=curve).check()
    values = {"metric": "rewrad", "steps": [1], "values": [0.5], "source": "here"}
    curve.write_text(json.dumps(values))
    with pytest.raises(
        ConfigError, match=r"curve.json': metric 'rewrad' is none that report.html draws; name"
    ):
        RunFolder(root, expected=curve).check()
    assert not root.exists()
    curve.write_text(json.dumps(values | {"metric": "reward"}))
    folder = RunFolder(root, expected=curve).start("x: 1\n")
    assert folder.paths.expected.read_text() == curve.read_text()
    folder.metrics.append(1, {"reward": 0.25})
    (chart,) = Report([folder.paths]).gather()["charts"]
    assert [(line["label"], line["points"]) for line in chart["lines"]] == [
        ("reward", [(1, 0.25)]),
        ("expected", [(1, 0.5)]),
    ]
    RunFolder(root, resume=True).start("x: 1\n")
    assert not folder.paths.expected.exists()
    RunFolder(root, expected=curve, overwrite=True).start("x: 1\n")
    RunFolder(root, overwrite=True).start("x: 1\n")
    assert not folder.paths.expected.exists()
