"""The site of `make docs` builds strictly, asks no other host for anything, and is searched without a server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.browser import BROWSER, browse

ROOT = Path(__file__).parents[2]
BUILDER = ROOT / ".venv-docs" / "bin" / "mkdocs"


@pytest.mark.slow
@pytest.mark.skipif(
    not BUILDER.exists(), reason="no .venv-docs, which `make docs` makes: the site is not built"
)
def test_the_site_is_whole_and_is_searched_as_files(tmp_path: Path) -> None:
    site, environment = tmp_path / "site", {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    program = [BUILDER, "build", "--strict", "--site-dir", site]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "excluded from the built site" not in done.stderr, done.stderr
    assert [*site.rglob("__pycache__")] == []
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    loaded = r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]* (?:src|href)="https?:'
    assert [page for page, text in pages.items() if re.search(loaded, text)] == []
    assert {"repository/index.html", "repository/examples/notebook.ipynb.html"} <= set(
        re.findall(r'<a href="([^"#]+)', pages[site / "index.html"])
    )
    if BROWSER is not None:
        dom = browse(tmp_path, f"{(site / 'index.html').as_uri()}?q=staleness", "--dump-dom")
        hits = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', dom)
        assert f"{(site / 'served.html').as_uri()}#staleness" in hits
