"""Mass splitting in real layers: tokens of an input for which splitting beats moving."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import torch
from rich.text import Text

from lipscope.charts import visible
from lipscope.display import Piece, Shown, pieces
from lipscope.engine.checks import COPIES, argument, one_of
from lipscope.engine.plan import Job
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, Progress, as_callback, of_one_window
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.errors import InputError
from lipscope.linalg import (
    Operator,
    TopSingular,
    restrict,
    start_named,
    together,
    top_singular_batch,
)
from lipscope.measures import own_operator
from lipscope.pages import Rows, empty_table, number
from lipscope.records import GAINS, Measurement, TokenGain, stable_id

_SPLIT = Verb("split", OF_QUESTION)
_TOKENS = 8  # number of tokens per layer in the table
_TOL = 0.05  # tolerance of the gains of single tokens


@dataclass(frozen=True, repr=False)
class Splitting(Shown):
    """The effect of splitting tokens in the layers of a model, next to that of moving them."""

    moved: Rows  # sigma of every layer, and of every head
    split: Rows  # in the same order, the largest gain of splitting a token, the ``top_token``
    tokens: tuple[TokenGain, ...]  # every token of every layer

    @property
    def rows(self) -> Rows:
        """All rows, with their tokens."""
        tokens = [*self.moved.tokens, *self.split.tokens]
        return Rows([*self.moved, *self.split], tokens=tokens)

    def ratio(self, index: int) -> float | None:
        """``split / moved`` of a row: above 1, splitting beats every move of whole tokens."""
        apart, whole = self.split[index].sigma, self.moved[index].sigma
        return apart / whole if apart is not None and whole else None


def split(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layers: Sequence[int] | int | str | Literal["all"] = 0,
    length: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Splitting:
    """Gains of splitting tokens, ``max_i ‖T_i‖``, next to sigma, for layers, heads and tokens.

    ``T_i`` is the derivative of token i's output through its own query, with keys and values fixed:
    the effect of two halves of the token that move against each other. If it exceeds sigma, the
    local Lipschitz constant of the layer on measures is larger than on its tokens.

    Holds for self-attention whose weights are read in closed form. With a mask or positions, copies
    share those of their token. Intervals of single tokens are five per cent wide.
    ``model``, ``data`` and ``progress`` are as for `measure`.

    Args:
        layers: Indices from 0, or "all".
        length: Number of tokens of the text window; 64 if None.
        out: Run folder: rows with ``move = copies`` and without, tokens as values of the part
            ``tokens``.
        **options: Options of `measure` about the input and the solver; the map is ``attention`` or
            ``heads``.

    Source: derived here (``docs/theory/splitting.md``).

    >>> import lipscope as ls
    >>> one = torch.ones(1, 1).double()
    >>> x = torch.tensor([[-3.0], [-0.3]]).double()
    >>> found = split(ls.DotProduct(-one, one, one), x)
    >>> round(found.ratio(0), 3), found.tokens[1].better_split
    (1.275, True)
    """
    argument(one_of("attention", "heads"), "map", options.get("map", "attention"))
    asked = {**options, **of_one_window(data, options, length), "layers": layers}
    more = {"move": COPIES}
    run = LocalRun(model, data, asked, _SPLIT, more=more, out=out, asked={"verb": "split"})
    with contextlib.ExitStack() as stack:
        folder = run.opened(stack)
        found: dict[str, list[Rows]] = {"all": [], COPIES: []}
        tokens: list[TokenGain] = []
        tell = as_callback(progress)
        for per_head in (False, True):
            for move, some in found.items():
                with run.also(folder, move=move, per_head=per_head) as one:
                    some.append(one.rows(tell))
                    for row in some[-1]:
                        if row.status == "non_finite":
                            raise InputError(
                                f"Layer {row.layer} should have finite inputs and outputs. Found "
                                f"NaN or Inf in window {row.sample}."
                            )
                    if move == COPIES and not per_head:
                        tokens = _token_gains(one, some[-1])
    return Splitting(_with_heads(found["all"]), _with_heads(found[COPIES]), tuple(tokens))


def _with_heads(parts: Sequence[Rows]) -> Rows:
    """Rows of whole layers and of their heads, without repeated rows."""
    rows = {row.id: row for part in parts for row in part}
    return Rows([*rows.values()], tokens=[token for part in parts for token in part.tokens])


def _token_gains(run: LocalRun, rows: Rows) -> list[TokenGain]:
    """The gains of every token, from the folder if they are there."""
    held, found = run.values(GAINS), []
    for job, row in zip(run.jobs, rows, strict=True):
        keys = [stable_id({"id": row.id, "token": i}) for i in range(row.num_tokens)]
        if row.sigma is not None and not all(key in held for key in keys):
            for key, one in zip(keys, _gains(run, job, row), strict=True):
                run.keep_value(GAINS, key, one)
        found += [TokenGain(**held[key]) for key in keys if key in held]
    return found


def _gains(run: LocalRun, job: Job, row: Measurement) -> list[TokenGain]:
    at = run.at(job)
    built = at.map
    assert built.attention is not None  # else the row has no sigma
    own = own_operator(built.attention, built.x, map=built.map)
    index = torch.arange(row.num_tokens, device=built.x.device)[:, None]
    linear = built.linearise(built.x)
    whole = together(
        lambda some: restrict(linear, move=index[list(some)]),
        [restrict(linear, move=i) for i in index],
    )
    # Every token's matrix is a separate operator; they share products.
    shape = own.in_shape[1:], own.out_shape[1:]
    apart = Operator(own.matvec, own.rmatvec, *shape, own.dtype, own.device)
    assert whole is not None
    with at.window.ready():
        split, moved = _solve_tokens(apart, row, COPIES), _solve_tokens(whole, row, "all")
    about = row.id, row.layer or 0, row.sample
    return [
        TokenGain(*about, i, name, one.sigma, one.upper, other.sigma, other.upper)
        for i, (name, one, other) in enumerate(zip(at.tokens, split, moved, strict=True))
    ]


def _solve_tokens(op: Operator, row: Measurement, kind: str) -> list[TopSingular]:
    starts = [start_named(f"{row.seed}|{row.id}|{kind}|{i}") for i in range(row.num_tokens)]
    return top_singular_batch(op, starts, tol=_TOL, delta=row.delta)


# --- display


@pieces.register
def _split(found: Splitting) -> Iterator[Piece]:
    """Layers and heads, then the tokens that gain most from splitting."""
    first = found.moved[0]
    title = f"{first.model}, map {first.map}, {first.num_tokens} tokens"
    made = empty_table(
        title, ("layer", "head", "token"), ("sigma, moved", "split", "split / moved")
    )
    names = {(one.id, one.index): visible(one.text) for one in found.split.tokens}
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
                *map(Text, (str(layer), str(one.index), visible(one.text))),
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
