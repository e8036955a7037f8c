"""Commands of a shell script, with the script's own variables in their place; nothing is run.

Read are assignments in their order (NAME=, NAME+=, arrays, export), quotes, comments, line continuations, $NAME,
${NAME:-default}, "${NAME[@]}" and $((2 * N)). Any other `$`, and a variable that is set inside an if, a loop or a
function, is unknown: it stays in the word, between the characters of UNKNOWN.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

UNKNOWN = "\ue000\ue001"
_SEAM = "\ue002"
"""Stands between the words that one expansion makes."""
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*+\))*+\)"
_EXPANSION = rf"\${_PARENTHESES}|`[^`]*`|\$\{{(?:[^{{}}]|\{{[^{{}}]*\}})*+\}}|\$(?:[A-Za-z_]\w*|[\d@*#?!$])"
_PIECE = re.compile(
    rf"""(?P<unknown><[A-Za-z][\w ./:-]*\w>(?=[\s/]))
    |(?P<skipped>\\\n|(?<![^\s;&|()])\#[^\n]*|<<-?\s*['"]?(?P<tag>\w+)['"]?.*?\n\s*(?P=tag)(?=\n|$)
        |\d*[<>]+&?[ ]*[^\s;&|()]*)
    |'(?P<single>[^']*)' | "(?P<double>(?:\\.|{_EXPANSION}|[^"\\])*+)" | \\(?P<escaped>.)
    |(?P<space>[ \t]+) | (?P<end>[\n;&|()]) | (?P<expansion>{_EXPANSION}) | (?P<bare>[^\s'"\\;&|()<>$`]+|\$)""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DEPTH = {
    **dict.fromkeys(["if", "for", "while", "until", "case", "select", "{"], 1),
    **dict.fromkeys(["fi", "done", "esac", "}"], -1),
    **dict.fromkeys(["then", "do", "else", "elif", "!", "time"], 0),
}
"""Words in front of a command, and the blocks that they open."""
_OPERATORS = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Div: int.__floordiv__}


Command = tuple[list[str], dict[str, str]]
"""The words of a command, and the variables of the environment that the script gives it."""


class _Script:
    def __init__(self) -> None:
        self.variables, self.exported, self.depth = {"HOME": "~"}, set[str](), 0

    def expand(self, text: str, *, quoted: bool) -> str:
        """Return text with its variables in place; SEAMs stand where words end."""

        def value(match: re.Match[str]) -> str:
            if match[0].startswith("\\"):
                return match[0][1:].strip("\n")
            value = self._value(match[0])
            return value if quoted or UNKNOWN[0] in value else re.sub(r"\s+", _SEAM, value)

        return re.sub((r'\\[$`"\\\n]|' if quoted else "") + _EXPANSION, value, text)

    def _value(self, text: str) -> str:
        if text.startswith("$(("):
            named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._value(f"${match[1]}"), text[3:-2])
            try:
                return str(_calculate(ast.parse(named.strip(), mode="eval").body))
            except (SyntaxError, LookupError, AttributeError, ValueError, ArithmeticError):
                return text.join(UNKNOWN)
        simple = re.fullmatch(r"\$\{?(\w+|[@*])(?:\[[@*]\])?(?::?[-=](.*?))?\}?", text, re.DOTALL)
        if simple and simple[1] in "@*":
            return _SEAM  # arguments of the script: there are none
        value = self.variables.get(simple[1]) if simple else None
        if simple and simple[2] is not None and not value:
            return self.expand(simple[2].strip("\"'"), quoted=True)
        return text.join(UNKNOWN) if value is None else value

    def finish(self, words: list[str]) -> Iterator[Command]:
        """Set the variables that words set, and yield the command that they make."""
        while words and words[0] in _DEPTH:
            self.depth += _DEPTH[words.pop(0)]
        start = next((at for at, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
        program = words[start] if start < len(words) else ""
        sets = program in ("", "export", "declare", "readonly", "local", "typeset")
        environment = {name: value for name, value in self.variables.items() if name in self.exported}
        variables = self.variables if sets else environment
        for word in words if sets else words[:start]:
            name, plus, value = match.groups() if (match := _ASSIGNMENT.match(word)) else (word, "", None)
            self.exported |= {name} if program == "export" else set()
            if value is not None:
                value = value if value.startswith(_SEAM) else value.replace(_SEAM, " ")
                before = variables.get(name, "") if plus else ""
                if sets and self.depth:  # an array keeps what it has in any case
                    before = before + _SEAM if value.startswith(_SEAM) and before else ""
                    value = f"${name}".join(UNKNOWN)
                variables[name] = before + value
        if not sets:
            parts = (
                part for word in words[start:] for part in word.split(_SEAM) if part or _SEAM not in word
            )
            yield [*parts], variables


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
        gap = kind in ("space", "end")
        if gap and word and (in_array or (match[0] == "(" and word.endswith("="))):
            word, in_array = word + _SEAM, match[0] != ")"
        elif gap:
            words += [] if word is None else [word]
            word = None
            if kind == "end":
                yield from script.finish(words)
                words = []
        elif kind in ("double", "expansion"):
            inner = script.expand(match[kind], quoted=kind == "double")
            word = (word or "") + inner if inner or word is not None or kind == "double" else None
        else:
            word = (word or "") + (match[0].join(UNKNOWN) if kind == "unknown" else match[kind])


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right))
    return int(node.value)  # type: ignore[attr-defined]
