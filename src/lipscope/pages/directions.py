"""Leading directions to tables and to what the page shows: tokens, what they read as, heads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lipscope.charts import readable
from lipscope.display import Sheet, printable, rounded_up
from lipscope.pages.table import number, percent
from lipscope.records import Direction, Measurement

SPACES = {
    "vocabulary": "tokens that could stand in its place: the move that each would make",
    "read-out": "the model's own logits: the gradient of each word's, less the mean of all",
    "window": "the other tokens or patches of this input: the step towards each",
}
SIDES = {"right": "moves", "left": "answers"}
NOTHING = "reads as nothing"
READING = (
    "Along and against: readings of the largest and the smallest cosine with the vector at this "
    "token; with both signs changed in all tokens, it is the same direction. Nearest: the largest "
    "cosine. Spanned: how much of its squared norm the ten nearest readings span. In brackets, the "
    "largest of 99 random directions; what is no nearer reads as nothing, and a random direction "
    "is nearer once in a hundred times."
)
_BLANKS = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})
_WORDS = 4  # of each sign in a table
_HEADS = 3


def by_rank(parts: Iterable[Direction]) -> dict[str, dict[int, list[Direction]]]:
    """Parts by row and rank, the largest shares first."""
    found: dict[str, dict[int, list[Direction]]] = {}
    for one in sorted(parts, key=lambda p: (p.rank, -p.share)):
        found.setdefault(one.id, {}).setdefault(one.rank, []).append(one)
    return found


def direction_heading(part: Direction) -> str:
    """What is known of a direction: its interval, and how well its vector is determined."""
    upper = number(rounded_up(part.upper))
    said = f"direction {part.rank}: sigma in [{number(part.sigma)}, {upper}]; "
    if part.sine is None:
        return said + "its interval meets a neighbour's: the vector is not determined"
    angle = f"sine of the angle to the singular vector at most {rounded_up(part.sine, 2):.2g}"
    return said + (f"{angle}" if part.determined else f"the vector is not determined ({angle})")


def directions_shown(rows: Iterable[Measurement], parts: Iterable[Direction]) -> Sheet:
    """Every direction of every row: a line for each token that was read, then the heads."""
    parts, shown = list(parts), []
    found = by_rank(parts)
    for row in rows:
        place = f"{row.model}, " + ("" if row.layer is None else f"layer {row.layer}, ")
        place += f"map {row.map}, {row.num_tokens} tokens, "
        for some in found.get(row.id, {}).values():
            shown += [place + direction_heading(some[0]), _direction_table(some)]
            said = [_largest_heads([one for one in some if one.side == "head"]), turning(some)]
            shown.append("".join(f"  {one}\n" for one in said if one))
    if not shown:
        return Sheet("No directions: sigma is zero here, or not finite.")
    read = {one.space for one in parts if one.space}
    spaces = [f"{name}: {about}." for name, about in SPACES.items() if name in read]
    return Sheet(*shown, " ".join([READING, "Read in", *spaces]))


def top_direction(
    rows: Iterable[Measurement], parts: Sequence[Direction]
) -> tuple[Table | str, ...]:
    """The top direction of the row of largest sigma, and where the others are."""
    found = by_rank(parts)
    held = [row for row in rows if row.id in found]
    if not held:
        return ()
    row = max(held, key=lambda row: row.sigma or 0.0)
    top = min(found[row.id])
    shown = directions_shown([row], found[row.id][top]).parts[:-1]
    count = sum(map(len, found.values()))
    more = f"`.directions_table()` shows all {count} directions and how to read them."
    return (*shown, more)


def _direction_table(parts: Sequence[Direction]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "token", "share", "along", "against", "nearest", "spanned", "read in"):
        right = name in ("share", "nearest", "spanned")
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=right)
    for side, verb in SIDES.items():
        for one in (part for part in parts if part.side == side):
            name = f"{_unmarked(one.text)} ({one.index})"
            cells = (verb, name, percent(one.share), *_along_against(one))
            near = _with_chance(one.cosine, one.chance_cosine)
            spanned = _with_chance(one.spanned, one.chance_spanned)
            cells = (*cells, near, spanned, one.space or "–")
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _unmarked(word: str) -> str:
    """A word without the marks of its tokenizer, its place after it where it has one.

    Blanks alone are shown by signs.

    >>> _unmarked("Ġthe (3)"), _unmarked("##ing"), _unmarked("(any other)"), _unmarked("čĊĠĠ")
    ('the (3)', 'ing', '(any other)', '␍↵␣␣')
    """
    place = "".join(re.findall(r" \(\d+\)\Z", word))
    name = word.removesuffix(place)
    text = readable(name)
    return (text.strip() or text.translate(_BLANKS)) + place


def _along_against(one: Direction) -> tuple[str, str]:
    if one.reads is False:
        return NOTHING, ""
    along, against = (
        " · ".join(_unmarked(word) for word, _ in one.words(sign)[:_WORDS])
        for sign in ("plus", "minus")
    )
    return along or "–", against or "–"


def _with_chance(value: float | None, chance: float | None) -> str:
    return "–" if value is None or chance is None else f"{value:.2f} ({chance:.2f})"


def _largest_heads(parts: Sequence[Direction]) -> str:
    """The heads with the largest parts in the answer."""
    if not parts:
        return ""
    best = sorted(parts, key=lambda one: -abs(one.share))[:_HEADS]
    rest = sum(one.share for one in parts) - sum(one.share for one in best)
    others = f", the others {percent(rest)}" if len(parts) > len(best) else ""
    return ", ".join(f"{one.text} {percent(one.share)}" for one in best) + others + " of the answer"


def turning(parts: Iterable[Direction]) -> str:
    """Towards which texts the move turns the model's output; "" where none were given."""
    texts = [one for one in parts if one.side == "text"]
    some = sorted((one for one in texts if one.reads), key=lambda one: -one.share)
    if not texts:
        return ""
    if not some:
        return "along v, the model's output turns towards or away from no text by more than chance"
    said = [
        f"{way} {', '.join(f'“{one.text}” ({_signed(one.share)})' for one in found[:_WORDS])}"
        for way, found in (
            ("towards", [one for one in some if one.share > 0]),
            ("away from", [one for one in some[::-1] if one.share < 0]),
        )
        if found
    ]
    return f"along v, the model's output turns {', '.join(said)}: cosine for each unit of size"


def _signed(value: float) -> str:
    return f"{value:+.2g}".replace("-", "−")


def directions_in_words(parts: Iterable[Direction]) -> list[dict[str, Any]]:
    """The directions of one row as the scripts of the page read them."""
    return [one for ranks in by_rank(parts).values() for one in as_plain(ranks)]


def as_plain(ranks: Mapping[int, Sequence[Direction]]) -> list[dict[str, Any]]:
    """The directions of one row as the scripts of the page read them."""
    return [
        {
            "rank": rank,
            "said": direction_heading(parts[0]),
            "turns": turning(parts),
            "tokens": [_token_record(one) for one in parts if one.side in SIDES],
            "heads": [
                [one.index, float(f"{one.share:.4g}")] for one in parts if one.side == "head"
            ],
        }
        for rank, parts in ranks.items()
    ]


def _token_record(one: Direction) -> dict[str, Any]:
    numbers = ("share", "cosine", "spanned", "chance_cosine", "chance_spanned")
    values = {name: getattr(one, name) for name in numbers}
    words = {
        sign: [[_unmarked(word), cosine] for word, cosine in one.words(sign)]
        for sign in ("plus", "minus")
    }
    return {
        "side": one.side,
        "index": one.index,
        "text": _unmarked(one.text),
        "space": one.space,
        "reads": one.reads,
        **{k: None if v is None else float(f"{v:.4g}") for k, v in values.items()},
        **words,
    }
