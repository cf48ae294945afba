"""`lipscope theorems`: the catalogue of bounds, and the pages on families and variants."""

from __future__ import annotations

import sys
from typing import Any

from rich.text import Text

from lipscope import pages
from lipscope.cli.options import with_options
from lipscope.cli.terminal import say, say_table, write_lines
from lipscope.errors import InputError

_PLAIN = ("statement", "cite", "kind", "scope", "metric", "subject", "needs", "sound", "slow")


@with_options(
    kind=(str, None, "Only upper, or only lower bounds."),
    scope=(str, None, "Only local, ball, global, mean-field or limit ones."),
    cite=(str, None, "Only of one source, such as castin2024."),
    jsonl=(bool, False, "One JSON object per theorem on stdout."),
    markdown=(bool, False, "The page docs/theorems.md; with --cite, of that source."),
    families=(bool, False, "The page docs/families.md."),
    variants=(bool, False, "The page docs/variants.md."),
)
def theorems(**options: Any) -> None:
    """List every bound: statement, source, scope, metric."""
    from lipscope.theorems import catalogue

    choices = {"kind": ("upper", "lower")}
    choices |= {"scope": ("local", "ball", "global", "mean-field", "limit")}
    choices |= {"cite": tuple(dict.fromkeys(one.cite for one in catalogue()))}
    chosen, cite = [*catalogue()], options["cite"]
    for name, known in choices.items():
        value = options[name]
        if value not in (None, *known):
            raise InputError(f"`{name}` should be one of {', '.join(known)}. Found `{value}`.")
        chosen = [one for one in chosen if value in (None, getattr(one, name))]
    if options["families"]:
        sys.stdout.write(pages.families_page())
    elif options["variants"]:
        sys.stdout.write(pages.variants_page())
    elif options["jsonl"]:
        write_lines(map(_theorem_line, chosen))
    elif options["markdown"]:
        page = pages.catalogue_page(chosen) if cite is None else pages.source_page(cite, chosen)
        sys.stdout.write(page)
    else:
        made = pages.empty_table(f"{len(chosen)} theorems", ("theorem", "statement", "source"), ())
        for name in ("kind", "scope", "metric"):
            made.add_column(name, no_wrap=True)
        for one in chosen:
            cells = (one.name, one.statement, one.cite, one.kind, one.scope, one.metric)
            made.add_row(*(Text(cell) for cell in cells))
        say_table(made)
        say([f"Scope. {' '.join(pages.SCOPES)}"])


def _theorem_line(one: Any) -> dict[str, Any]:
    found = {name: getattr(one, name) for name in (*_PLAIN, "summary", "note")}
    own = {"subject": one.subject.__name__, "needs": list(one.needs)}
    return {"theorem": one.name} | found | own
