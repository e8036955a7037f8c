"""A hook of mkdocs: links of a page that lead out of docs/ become links to the repository, or text without one.

On the forge such links work as they are. On the site there is no file behind them, and a strict build would stop.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with such links replaced; what stands in fenced code is left as it is."""
    parts = re.split(r"(?ms)(^```.*?^```)", markdown)
    return "".join(
        part if part.startswith("```") else replaced(part, page.file.src_uri, config["repo_url"] or "")
        for part in parts
    )


def replaced(text: str, source: str, repository: str) -> str:
    """The text with links that leave docs/ replaced, of the page `source` in docs/.

    >>> replaced("see [it](../README.md#x) and [that](b.md)", "a.md", "https://host/o/n")
    'see [it](https://host/o/n/blob/main/README.md#x) and [that](b.md)'
    >>> replaced("see [it](../README.md)", "a.md", "")
    'see it'
    """

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
        if path.startswith("docs/"):
            return found[0]
        return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor or ''})" if repository else words

    return LINK.sub(link, text)
