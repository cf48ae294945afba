"""Data of run folders besides their rows: tokens on demand, and words on the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lipscope.records import Run, TokenShare, records_of

_NAMED = 40  # letters of a text that stand for it in a control


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


def labels(texts: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Short names of texts, none for two of them.

    Args:
        texts: Pairs of a folder and what `text_of` says; a text without digest is its folder's own.

    Returns:
        For each pair its name, "" where nothing is known.
    """
    names: dict[tuple[str, str], str] = {}
    by_name: dict[str, set[str]] = {}
    for pair in texts:
        said, _, digest = pair[1].partition(" (SHA-256 ")
        said = said.removeprefix("the text ").strip("“”")
        names[pair] = said if len(said) <= _NAMED else f"{said[: _NAMED - 1]}…"
        by_name.setdefault(names[pair], set()).add(digest)
    return {
        pair: f"{name} ({pair[1][-13:-1]})" if len(by_name[name]) > 1 else name
        for pair, name in names.items()
    }


def folder_names(runs: Iterable[Run]) -> dict[str, str]:
    """The last part of each folder's path that tells it from the others, by path."""
    paths = list(dict.fromkeys(str(run.path) for run in runs))
    parts = {path: Path(path).parts for path in paths}
    for count in range(1, max((len(p) for p in parts.values()), default=0) + 1):
        names = {path: "/".join(part[-count:]) for path, part in parts.items()}
        if len(set(names.values())) == len(paths):
            return names
    return {path: path for path in paths}


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
