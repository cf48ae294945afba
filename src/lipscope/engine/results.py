"""Results of verbs as tables and sentences: for a prompt, a notebook and a terminal alike."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from lipscope.display import Drawing, Piece, pieces
from lipscope.engine.text_edits import TextAttack
from lipscope.engine.verbs.attack import Attacked
from lipscope.engine.verbs.push import Pushed
from lipscope.engine.verbs.smooth import MOVE, Smoothed
from lipscope.engine.verbs.split import Splitting
from lipscope.pages import Push, empty_table, number, pushes_in

_TOKENS = 8  # of a layer in the table of `split`
_SIZES = ("size", "token norms", "sigma·size", "certified", "map +v", "−v", "random", "block")
_SIZES += ("model",)
_COUNTS = ("texts", "skipped", "failed", "succeeded", "rate", "edits", "queries")


@pieces.register
def _attacked(found: Attacked) -> Iterator[Piece]:
    """Of each construction the best head, next to what was given."""
    real, worst = found.rows[0], found.rows[1]
    made = empty_table(
        f"{real.model}, layer {real.layer}, map {real.map}, {real.num_tokens} tokens, "
        f"radius {found.radius:.4g}",
        ("input", "where from", "source", "head"),
        ("sigma", "upper", "× text"),
    )
    radius = f"radius {found.given_radius:.4g}"
    ends = (number(real.sigma), number(real.upper), "1")
    made.add_row("real text", radius, "", "", *ends, end_section=True)
    seen: set[str] = set()
    for one in found.found:
        if one.sigma is None or one.name in seen:
            continue
        again = (worst.sigma, worst.upper) if not seen else (one.sigma, one.upper)
        seen.add(one.name)
        head = "" if one.head is None else str(one.head)
        made.add_row(
            *(Text(cell) for cell in (one.name, one.statement, one.cite, head)),
            *(number(value) for value in again),
            number(one.sigma / real.sigma, 3) if real.sigma else "–",
        )
    yield made
    yield (
        "Of each construction the head with the largest sigma of the whole layer. The first is "
        "measured again from a fresh start. A lower bound on the worst case, not a proof that "
        "nothing is worse."
    )
    reasons = dict.fromkeys((one.name, one.reason) for one in found.found if one.sigma is None)
    for name, reason in reasons:
        yield f"{name}: not available, {reason}"


@pieces.register
def _edited(found: TextAttack) -> Iterator[Piece]:
    """What recipes did to all windows, then every edit."""
    first = found.rows[0]
    made = empty_table(
        f"{first.model}, layer {first.layer}, {first.num_tokens} tokens",
        ("recipe",),
        (*_COUNTS, "layer", "model"),
    )
    for one in found.summary():
        counts = (one.originals, one.skipped, one.failed, one.succeeded)
        made.add_row(
            Text(one.recipe),
            *map(str, counts),
            "–" if one.rate is None else f"{one.rate:.0%}",
            *(number(value, 3) for value in (one.changed, one.queries)),
            *(number(value, 3) for value in (one.change_layer, one.change_model)),
        )
    yield made
    yield _edits(found)
    what = f"the decision changed ({found.by})" if found.by else "a text with edits was found"
    yield (
        f"Succeeded: {what}. Skipped: the window's own text is not read back as its tokens. "
        "Under layer and model: how much their outputs change, relative, ‖f(X') − f(X)‖ / ‖f(X)‖; "
        "means over what succeeded. A lower bound on what edits can do, not a proof that none does "
        "more."
    )


def _edits(found: TextAttack) -> Table:
    """What was done to every window, and what it changed."""
    names = ("window", "recipe", "edits"), ("layer", "model", "first order", "queries")
    decided = any(one.decision is not None for one in found.edits)
    made = empty_table("", (*names[0], *(["decision"] if decided else [])), names[1])
    for one in found.edits:
        done = one.edits if one.changed else one.status
        said = "" if one.decision is None else f"{one.decision} → {one.decided}"
        numbers = (one.change_layer, one.change_model, one.predicted)
        cells = (str(one.sample), one.recipe, done, *([said] if decided else []))
        made.add_row(*map(Text, cells), *(number(value, 3) for value in numbers), str(one.queries))
    return made


@pieces.register
def _smoothed(found: Smoothed) -> Iterator[Piece]:
    """Sigma of every layer, and what it cost."""
    made = empty_table("", (), ("layer", "sigma before", "after", "at most"))
    for layer in dict.fromkeys(row.layer for row in found.after):
        before, after = (
            [row for row in rows if row.layer == layer] for rows in (found.before, found.after)
        )
        cells = (
            max(row.sigma or 0.0 for row in before),
            max(row.sigma or 0.0 for row in after),
            max(row.upper or 0.0 for row in after),
        )
        made.add_row(str(layer), *(f"{value:.4g}" for value in cells))
    yield made
    name = "Agreement of embeddings" if found.quality == "agreement" else "Perplexity"
    yield f"{name}: {found.quality_before:.4g} before, {found.quality_after:.4g} after."
    yield (
        f"Largest change found of the last hidden states, embeddings moved by {MOVE:.0%}: "
        f"{found.change_before:.3%} before, {found.change_after:.3%} after."
    )


@pieces.register
def _split(found: Splitting) -> Iterator[Piece]:
    """Layers and heads, then the tokens that gain most by being split."""
    first = found.moved[0]
    title = f"{first.model}, map {first.map}, {first.num_tokens} tokens"
    made = empty_table(
        title, ("layer", "head", "token"), ("sigma, moved", "split", "split / moved")
    )
    names = {(one.id, one.index): one.text for one in found.split.tokens}
    for i, (whole, apart) in enumerate(zip(found.moved, found.split, strict=True)):
        token = names.get((apart.id, apart.top_token or 0), "")
        cells = (str(whole.layer), "all" if whole.head is None else str(whole.head), token)
        values = (whole.sigma, apart.sigma, found.ratio(i))
        made.add_row(*map(Text, cells), *map(number, values))
    yield made
    tokens = empty_table(
        "single tokens", ("layer", "token", ""), ("moved alone", "split", "split / moved")
    )
    for layer in dict.fromkeys(one.layer for one in found.tokens):
        mine = sorted((one for one in found.tokens if one.layer == layer), key=lambda t: -t.split)
        for one in mine[:_TOKENS]:
            tokens.add_row(
                *map(Text, (str(layer), str(one.index), one.text)),
                *map(number, (one.moved, one.split, one.split / one.moved)),
            )
    yield tokens
    above = sum((found.ratio(i) or 0) > 1 for i in range(len(found.moved)))
    better = sum(one.better_split for one in found.tokens)
    yield (
        f"Splitting beats every move of whole tokens in {above} of {len(found.moved)} layers and "
        f"heads; {better} of {len(found.tokens)} tokens gain more by being split than by being "
        "moved alone."
    )
    for note in sorted({row.note for row in found.split if row.note}):
        yield f"Note: {note}."


@pieces.register
def _pushed(found: Pushed) -> Iterator[Piece]:
    """Every size, what it means in words, and the chart."""
    for push in pushes_in(found.rows, found.places, found.directions, found.steps):
        yield _sizes(push)
        yield from push.said
        yield Drawing(lambda push=push: _chart(push), push.name)


def _sizes(push: Push) -> Table:
    reading = push.place.reading
    made = empty_table(f"{push.name}: sigma {number(push.row.sigma)}", (), _SIZES)
    if reading:
        made.add_column("says, +v")
    other = {one.eps: one.layer for one in push.along("-v")}
    drawn = push.random
    for one in push.along("+v"):
        chance = drawn.get(one.eps)
        ends = "–" if not chance else f"{number(min(chance), 2)}–{number(max(chance), 2)}"
        cells = [
            *(number(v, 3) for v in (one.eps, one.relative, one.promise)),
            "–" if one.certificate is None else number(one.certificate * (1 + 1e-3), 3),
            *(number(v, 3) for v in (one.layer, other.get(one.eps))),
            ends,
            *(number(v, 3) for v in (one.block, one.model)),
        ]
        said = [text for text, _ in json.loads(one.reads)[:1]]
        made.add_row(*cells, *([Text(said[0])] if said else []))
    return made


def _chart(push: Push) -> str:
    from lipscope.charts import as_svg
    from lipscope.pages import push_charts

    return "".join(as_svg(chart) for _, chart in push_charts([push]))
