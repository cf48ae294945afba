"""Formulas as docstrings write them, such as ``√(n-1) ‖V‖ e^(2 γ R²)``, in LaTeX.

The register of theorems holds each formula once, readable in `help`; the pages typeset it.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<number>\d+(\.\d+)?)|(?P<word>[A-Za-z]+\d*)|(?P<greek>[α-ωΑ-Ω])"""
    r"""|(?P<raised>[⁻⁰¹²³⁴]+)|(?P<script>[_^])|(?P<open>[(\[{])|(?P<close>[)\]}])"""
    r"""|(?P<bar>[|‖])|(?P<relation><=|>=)|(?P<other>.)""",
    re.DOTALL,
)
_OPERATORS = {"max", "min", "sup", "exp", "log"}
_BETWEEN = {*"+-=/,;:·<≤≥±→√Σ", "argmax", "tr", "sum"}
_SIGNS = {
    "Σ": r"\sum ",
    "sum": r"\sum ",
    "argmax": r"\operatorname{argmax} ",
    "tr": r"\operatorname{tr} ",
    "log2": r"\log_2 ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "·": r"\cdot ",
    "±": r"\pm ",
    "…": r"\ldots ",
    "∞": r"\infty ",
    "→": r"\to ",
    "#": r"\#",
    "*": r"^{*}",
}
_BARS = {"|": "vert", "‖": "Vert"}
_RAISED = str.maketrans("⁻⁰¹²³⁴", "-01234")
_ENDS = {"(": ")", "[": "]", "{": "}"}
# A code span that names something: two letters at least before any underscore, and no sign.
_NAME = re.compile(r"[A-Za-z0-9]{2,}(_\w+)*|lipscope .*")


def is_formula(code: str) -> bool:
    """Whether a code span is a formula and not a name or a command.

    >>> [is_formula(c) for c in ("‖V‖", "W_h", "n", "num_tokens", "eps", "F2(eps)")]
    [True, True, True, False, False, True]
    """
    return not _NAME.fullmatch(code)


def latex(plain: str) -> str:
    r"""A formula in LaTeX.

    >>> latex("√(n-1) ‖V‖ e^(2 γ R²)")
    '\\sqrt{n-1} \\lVert V\\rVert  e^{2 γ R^{2}}'
    >>> latex("max_i |J^h_ij|")
    '\\max _{i} \\lvert J^{h}_{ij}\\rvert '
    """
    return "".join(_Reader(plain).sequence(""))


class _Reader:
    """Reads from left to right; a bar opens or closes by what is open and what stood before."""

    def __init__(self, plain: str) -> None:
        self.tokens = [(str(m.lastgroup), m[0]) for m in _TOKEN.finditer(plain)]
        self.at = 0

    def sequence(self, end: str) -> list[str]:
        """Everything up to a bracket that closes, which is read and left out."""
        made: list[str] = []
        bars: list[str] = []
        operand = False  # whether something stands before to which a bar could belong
        while self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if text == end:
                self.at += 1
                break
            if kind == "bar":
                closes = bool(bars) and bars[-1] == text and operand
                bars.pop() if closes else bars.append(text)
                made.append(rf"\{'r' if closes else 'l'}{_BARS[text]} ")
                operand = closes
                self.at += 1
                continue
            made.append(self.atom())
            if kind not in ("space", "script"):  # what has a script is what it was
                operand = kind != "relation" and text not in _OPERATORS | _BETWEEN
        return made

    def atom(self) -> str:
        """The next token, with all that belongs to it."""
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "open":
            inside = "".join(self.sequence(_ENDS[text]))
            return rf"\{{{inside}\}}" if text == "{" else f"{text}{inside}{_ENDS[text]}"
        if kind in ("script", "raised"):
            raised = kind == "raised"
            return f"^{{{text.translate(_RAISED)}}}" if raised else f"{text}{{{self.argument()}}}"
        if text in ("√", "sqrt"):
            return rf"\sqrt{{{self.argument()}}}"
        if kind == "word":
            return self.word(text)
        if text == "<" and self.next() != "space":
            return r"\langle "
        return r"\rangle " if text == ">" and self.before() != "space" else _SIGNS.get(text, text)

    def word(self, text: str) -> str:
        """A variable, an operator, or a word."""
        if text in _SIGNS or len(text) == 1:
            return _SIGNS.get(text, text)
        if text in _OPERATORS:
            return rf"\{text} "
        between = self.next() == "space" and self.before() == "space"
        return rf"\text{{ {text} }}" if between else rf"\mathrm{{{text}}}"

    def argument(self) -> str:
        """What a root or a script takes: brackets without themselves, or the next token."""
        kind, text = self.tokens[self.at]
        if kind == "open":
            self.at += 1
            inside = "".join(self.sequence(_ENDS[text]))
            return f"({inside})" if text == "(" and inside.isdigit() else inside
        if text == "-":
            self.at += 1
            return "-" + self.argument()
        if kind != "word":
            return self.atom()
        self.at += 1
        return text if len(text) < 3 and text != "tr" else rf"\mathrm{{{text}}}"

    def next(self) -> str:
        """Kind of the next token."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def before(self) -> str:
        """Kind of the token before the one that was just read."""
        return self.tokens[self.at - 2][0] if self.at > 1 else "end"
