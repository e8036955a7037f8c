"""A hook of mkdocs: files outside docs/ that a page links to are on the site too, in repository/.

On the forge such links work as they are. On the site a text or a notebook becomes a page that is not in the nav, and
any other file a copy. The pages that come in so are followed in the same way.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\[[^\]]*\]\()([^)#:\s]+)")
FENCED = re.compile(r"(?ms)(^ *```.*?^ *```$)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file that is linked to, from page to page."""
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()]
    known = {*waiting, *(repository_path(file.src_uri) for file in files)}
    while waiting:
        page = waiting.pop()
        for _, target in LINK.findall("".join(FENCED.split(markdown_of(page))[::2])):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            if path in known or not (ROOT / path).is_file():
                continue
            known.add(path)
            uri = site_path(path)
            if uri.endswith(".md"):
                waiting.append(path)
                files.append(File.generated(config, uri, content=markdown_of(path)))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text with links as they are on the site; fenced code stays as it is."""
    parts = FENCED.split(markdown)
    parts[::2] = [with_site_links(part, repository_path(page.file.src_uri)) for part in parts[::2]]
    return "".join(parts)


def markdown_of(path: str) -> str:
    """Return the text of a page, or of a notebook's cells."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".ipynb"):
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def repository_path(uri: str) -> str:
    """Return the path in the repository of a file of the site.

    >>> repository_path("data.md"), repository_path("repository/examples/a.ipynb.md")
    ('docs/data.md', 'examples/a.ipynb')
    """
    inside = uri.removeprefix("repository/")
    return f"docs/{uri}" if inside == uri else inside.removesuffix(".md") if ".ipynb" in inside else inside


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}.md" if path.endswith(".ipynb") else f"repository/{path}"


def with_site_links(text: str, page: str) -> str:
    """Return the text with the links of the page, which is at a path of the repository, as they are on the site.

    >>> with_site_links("[a](../README.md#x), [b](b.md), ![c](images/c.png), [d](https://h/d)", "docs/a.md")
    '[a](repository/README.md#x), [b](b.md), ![c](images/c.png), [d](https://h/d)'
    >>> with_site_links("[a](docs/a.md), [b](examples/b.ipynb)", "README.md")
    '[a](../a.md), [b](examples/b.ipynb.md)'
    """

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        return match[1] + posixpath.relpath(site_path(path), posixpath.dirname(site_path(page)) or ".")

    return LINK.sub(link, text)
