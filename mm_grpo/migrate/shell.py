"""Commands of a shell script, with the script's own variables in their place; nothing is run.

Read are assignments in their order (NAME=, NAME+=, arrays, export), quotes, comments, line continuations, $NAME,
${NAME:-default}, "${NAME[@]}" and $((2 * N)). Any other `$`, and a variable that is set inside an if, a loop or a
function, is unknown: it stays in the word, between the characters of UNKNOWN.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

UNKNOWN = "\ue000\ue001"
_SEAM = "\ue002"
"""Stands between the words that one expansion makes."""
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*+\))*+\)"
_EXPANSION = rf"\${_PARENTHESES}|`[^`]*`|\$\{{(?:[^{{}}]|\{{[^{{}}]*\}})*+\}}|\$(?:[A-Za-z_]\w*|[\d@*#?!$])"
_PIECE = re.compile(
    rf"""(?P<skipped>\\\n|(?<![^\s;&|()])\#[^\n]*|<<-?\s*['"]?(?P<tag>\w+)['"]?.*?\n\s*(?P=tag)(?=\n|$)
        |\d*[<>]+&?[ ]*[^\s;&|()]*)
    |'(?P<single>[^']*)' | "(?P<double>(?:\\.|{_EXPANSION}|[^"\\])*+)" | \\(?P<escaped>.)
    |(?P<space>[ \t]+) | (?P<end>[\n;&|()]+) | (?P<expansion>{_EXPANSION}) | (?P<bare>[^\s'"\\;&|()<>$`]+|\$)""",
    re.DOTALL | re.VERBOSE,
)
_BLOCKS = {
    **dict.fromkeys(["if", "for", "while", "until", "case", "select", "{"], 1),
    **dict.fromkeys(["fi", "done", "esac", "}"], -1),
}
_NO_WORDS = (*_BLOCKS, *["then", "do", "else", "elif", "!", "time"])
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
}  # fmt: skip


class Command(NamedTuple):
    """A command of a script."""

    words: list[str]
    environment: dict[str, str]
    """The variables that the script gives it."""


class _Script:
    def __init__(self) -> None:
        self.variables, self.exported, self.depth = {"HOME": "~"}, set[str](), 0

    def expand(self, text: str, *, quoted: bool) -> str:
        """Return text with its variables in place; SEAMs stand where words end."""
        escapes = r'\\(?P<escaped>[$`"\\\n])|' if quoted else ""

        def piece(match: re.Match[str]) -> str:
            if quoted and match["escaped"]:
                return match["escaped"].strip("\n")
            value = self._value(match[0])
            return value if quoted or UNKNOWN[0] in value else re.sub(r"\s+", _SEAM, value)

        return re.sub(escapes + _EXPANSION, piece, text)

    def _value(self, text: str) -> str:
        if text.startswith("$(("):
            named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._value(f"${match[1]}"), text[3:-2])
            try:
                return str(_calculate(ast.parse(named.strip(), mode="eval").body))
            except (SyntaxError, LookupError, AttributeError, ValueError, ArithmeticError):
                return text.join(UNKNOWN)
        simple = re.fullmatch(r"\$\{?(\w+|[@*])(?:\[[@*]\])?(?::?[-=](.*?))?\}?", text, re.DOTALL)
        if simple is None:
            return text.join(UNKNOWN)
        if simple[1] in ("@", "*"):
            return _SEAM  # arguments of the script: there are none
        if (value := self.variables.get(simple[1])) or simple[2] is None:
            return text.join(UNKNOWN) if value is None else value
        return self.expand(simple[2].strip("\"'"), quoted=True)

    def assign(self, word: str, exports: bool = False) -> bool:
        """Set the variable of NAME=value; return False if the word is none."""
        if (match := re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.DOTALL)) is None:
            return False
        name, value = match[1], match[3] if match[3].startswith(_SEAM) else match[3].replace(_SEAM, " ")
        before = self.variables.get(name, "") if match[2] else ""
        self.variables[name] = f"${name}".join(UNKNOWN) if self.depth else before + value
        self.exported |= {name} if exports else set()
        return True

    def finish(self, words: list[str]) -> Command | None:
        """Return the command that words make; None if they only set variables."""
        while words and words[0] in _NO_WORDS:
            self.depth += _BLOCKS.get(words.pop(0), 0)
        count = next((at for at, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*\+?=", word)), None)
        if count is None or words[count] in ("export", "declare", "readonly", "local", "typeset"):
            exports = count is not None and words[count] == "export"
            for word in words if count is None else words[count + 1 :]:
                if not self.assign(word, exports) and exports:
                    self.exported.add(word)
            return None
        environment = {name: self.variables[name] for name in self.exported if name in self.variables}
        own = dict(word.split("=", 1) for word in words[:count])
        parts = [part for word in words[count:] for part in word.split(_SEAM) if part or _SEAM not in word]
        return Command(
            parts, {name: value.replace(_SEAM, " ") for name, value in (environment | own).items()}
        )


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of a script. Raises ValueError if a quote has no end."""
    script, words, word, in_array, at = _Script(), list[str](), None, False, 0
    text = text.replace("\r\n", "\n") + "\n"
    while at < len(text):
        if (match := _PIECE.match(text, at)) is None:
            raise ValueError(f"line {text.count(chr(10), 0, at) + 1}: {text[at]} has no end")
        at, kind = match.end(), match.lastgroup or ""
        if kind in ("tag", "skipped"):
            continue
        if kind not in ("space", "end"):
            quoted = kind == "double"
            expanded = kind in ("double", "expansion")
            inner = script.expand(match[kind], quoted=quoted) if expanded else match[kind]
            word = None if word is None and kind == "expansion" and not inner else (word or "") + inner
        elif match[0].startswith("(") and word is not None and word.endswith("="):
            words.append(word)
            word, in_array = None, True
        else:
            if word is not None:
                words.append(word)
            word = None
            if in_array and ")" in match[0]:
                start = next(n for n in reversed(range(len(words))) if re.fullmatch(r"\w+\+?=", words[n]))
                words[start:] = [words[start] + _SEAM + _SEAM.join(words[start + 1 :])]
                in_array = False
            if kind == "end" and not in_array:
                command = script.finish(words)
                words = []
                if command is not None:
                    yield command


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    return int(node.value)  # type: ignore[attr-defined]
