"""Fields of records in the reference: what a comment beside a field, or above it, says of it."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Gives a class that has such comments a section of its attributes."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Append the section to the docstring, which has none where fields have comments."""
        if cls.docstring is None or not isinstance(node, ast.ClassDef):
            return
        lines = cls.lines_collection[cls.filepath]
        said = {
            field.target.id: words
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if (words := _comment(lines, field))
        }
        if said and "Attributes:" not in cls.docstring.value:
            section = [f"    {name}: {words}." for name, words in said.items()]
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(section)


def _comment(lines: list[str], field: ast.AnnAssign) -> str:
    """The comment on the last line of a field, or else the lines of comment above it."""
    beside = re.search(r"  # (.*)", lines[(field.end_lineno or field.lineno) - 1])
    above, at = list[str](), field.lineno - 2
    while not beside and (found := re.match(r" *# (.*)", lines[at])):
        above.insert(0, found[1])
        at -= 1
    words = beside[1] if beside else " ".join(above)
    return "" if words.startswith("pyright") else words[:1].upper() + words[1:]
