"""What `lipscope attack --budget` says about edits of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lipscope.cli.terminal import Screen

if TYPE_CHECKING:
    from lipscope.engine.edited import TextAttack
    from lipscope.records.edits import TextEdit

_WIDTH = 100
_COLUMNS = ("texts", "skipped", "failed", "succeeded", "rate", "edits", "queries")
_COLUMNS += ("layer", "model")


def lines(found: TextAttack) -> Iterator[str]:
    """One JSON object for each window and recipe."""
    first = found.rows[0]
    about = {"model": first.model, "layer": first.layer, "by": found.by}
    for one in found.edits:
        yield json.dumps(about | vars(one), ensure_ascii=False)


def show(found: TextAttack) -> None:
    """A line for every window and recipe, then the summary."""
    from lipscope.pages.bounds_table import empty_table
    from lipscope.pages.table import number

    console = Screen(width=max(_WIDTH, Console().width))
    for one in found.edits:
        console.print(_line(one), markup=False, soft_wrap=True)
    first = found.rows[0]
    table = empty_table(
        f"{first.model}, layer {first.layer}, {first.num_tokens} tokens",
        ("recipe",),
        _COLUMNS,
    )
    for one in found.summary():
        counts = (one.originals, one.skipped, one.failed, one.succeeded)
        table.add_row(
            Text(one.recipe),
            *map(str, counts),
            "–" if one.rate is None else f"{one.rate:.0%}",
            *(number(value, 3) for value in (one.changed, one.queries)),
            *(number(value, 3) for value in (one.change_layer, one.change_model)),
        )
    console.print(table)
    what = f"the decision changed ({found.by})" if found.by else "a text with edits was found"
    console.print(
        f"Succeeded: {what}. Skipped: the window's own text is not read back as its tokens. "
        "Under layer and model: how much their outputs change, relative, ‖f(X') − f(X)‖ / ‖f(X)‖; "
        "means over what succeeded. A lower bound on what edits can do, not a proof that none does "
        "more.",
        markup=False,
        soft_wrap=True,
    )


def _line(one: TextEdit) -> str:
    """What was done, and what it changed."""
    from lipscope.pages.table import number

    head = f"{one.sample} {one.recipe}: {one.status}"
    if not one.changed or one.change_model is None:
        return f"{head} ({one.queries} queries)"
    said = f"layer {number(one.change_layer, 3)}, model {number(one.change_model, 3)}"
    if one.predicted is not None:
        said += f", to first order {number(one.predicted, 3)}"
    if one.decision is not None:
        said += f"; {one.decision} → {one.decided}"
    return f"{head}  {one.edits}  ({said}; {one.queries} queries)"
