"""What a page asks of run folders besides their rows: tokens on demand, and words on the text."""

from __future__ import annotations

from collections.abc import Iterable

from lipscope.records.rows import TokenShare, records_of
from lipscope.records.run import Run


def paired(run: Run) -> bool:
    """Whether a sample is the same passage at every length."""
    return run.manifest["spec"].get("windows", "spread") == "spread"


def text_of(run: Run, name: str | None) -> str:
    """What a row was measured on, in words; "" where the folder does not say.

    Args:
        run: The folder.
        name: Of the text, in a sweep.
    """
    made = run.manifest["provenance"]
    if images := made.get("images"):
        return "random pixels" if images == "random" else f"the folder “{images}”"
    named = run.manifest["spec"].get("texts", {})
    begins, sha256 = made.get("text"), made.get("text_sha256")
    if name in named:
        begins, sha256 = name, named[name]
    if not begins or not sha256:
        return ""
    said = "Python's language manual" if begins == "default" else f"the text “{begins}”"
    return f"{said} (SHA-256 {sha256[:12]})"


def windows_of(
    runs: Iterable[Run], ids: Iterable[str], *, most: int | None = None
) -> dict[str, list[TokenShare]]:
    """The tokens of these rows, in their order.

    Args:
        runs: The folders; an id of several is read from the first.
        ids: Rows.
        most: Only so many tokens from the beginning of each.

    Returns:
        By row, its tokens; a row whose tokens were not kept is missing.
    """
    import polars as pl

    wanted = set(ids)
    found: dict[str, list[TokenShare]] = {}
    for run in runs:
        if not wanted:
            break
        some = run.tokens.lazy().filter(pl.col("id").is_in(sorted(wanted)))
        frame = (some if most is None else some.filter(pl.col("index") < most)).collect()
        for one in records_of(TokenShare, frame.sort("id", "index")):
            found.setdefault(one.id, []).append(one)
        wanted -= found.keys()
    return found
