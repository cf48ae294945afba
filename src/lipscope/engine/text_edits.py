"""The result of an attack on a text."""

from __future__ import annotations

from dataclasses import dataclass

from lipscope.display import Shown
from lipscope.pages import Rows
from lipscope.records import RecipeSummary, TextEdit, summed


@dataclass(frozen=True, repr=False)
class TextAttack(Shown):
    """The result of editing a few tokens.

    Attributes:
        rows: Sigma of the layer at every window.
        edits: Every window and recipe.
        by: What decides, in words; "" where nothing is decided.
    """

    rows: Rows
    edits: tuple[TextEdit, ...]
    by: str = ""

    def summary(self) -> list[RecipeSummary]:
        """One entry for each recipe."""
        return [
            summed(recipe, [one for one in self.edits if one.recipe == recipe])
            for recipe in dict.fromkeys(one.recipe for one in self.edits)
        ]
