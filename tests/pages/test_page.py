"""The shell of a page: data that is inert whatever it holds, one script, and nobody's file written over."""

from __future__ import annotations

import json
import re

from mm_grpo.pages.page import PageImage, inert_json, policy_hash, render

EVIL = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>\"'&\u2028\u202e\x1b[31m\x00\ud800"


def test_json_ends_no_element_and_holds_what_can_be_shown() -> None:
    text = inert_json({EVIL: [EVIL, float("nan"), float("-inf"), 1.5, None, (True, 2)]})
    assert not set("<>&\u2028\u202e\x1b\ud800") & set(text)
    ((name, values),) = json.loads(text).items()
    shown = EVIL.replace("\u2028", r"\u2028").replace("\u202e", r"\u202e").replace("\x1b", r"\x1b")
    assert name == shown.replace("\x00", r"\x00").replace("\ud800", r"\ud800")
    assert values == [name, None, None, 1.5, None, [True, 2]]


def test_a_page_allows_its_own_script_and_style_alone() -> None:
    page = render(
        EVIL, {"kind": "run", "text": EVIL}, {"a.png": PageImage(3, 2, "data:image/png;base64,aaaa")}
    )
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [kind for kind, _ in scripts] == [
        ' type="application/json" id="data"', ' type="text/plain" id="u-a.png"', "",
    ]  # fmt: skip
    assert json.loads(scripts[0][1])["pictures"] == {"a.png": [3, 2]}
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy == (
        f"default-src 'none'; img-src data:; style-src {policy_hash(style)}; script-src {policy_hash(scripts[2][1])}; "
        "base-uri 'none'; form-action 'none'"
    )
    assert "<img" not in page and "alert(1)</script>" not in page and page.count("alert(1)") == 3
