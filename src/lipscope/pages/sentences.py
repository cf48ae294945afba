"""Sentences on lines of a table: meaning of sigma, comparison of layers, and growth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lipscope import records
from lipscope.charts import visible
from lipscope.display import rounded_up
from lipscope.pages.table import Line, interval, number, percent, without

# map: what moves, what answers
ENDS = {
    "attention": ("the layer's input", "its output"),
    "heads": ("the layer's input", "the output of its heads"),
    "normed": ("the input of the layer's norm", "the output of its attention"),
    "residual": ("the layer's input", "its output with the residual connection"),
    "block": ("the block's input", "its output"),
    "stack": ("the first block's input", "this block's output"),
    "model": ("the model's embedded input", "its last hidden state"),
    "logits": ("the model's embedded input", "its scores"),
    "margin": ("the model's embedded input", "the margin of its answer"),
}

# metric: how large the change is, and what moves by up to so much
SIZES = {
    "frobenius": ("of size ε", "{}"),
    "token-relative": ("each token moving in proportion to its norm, of size ε", "{}"),
    "max-token": ("no token moving by more than ε", "a token of {}"),
    "infinity": ("no entry moving by more than ε", "an entry of {}"),
}


def sentences(lines: Sequence[Line], line: Line | None = None) -> str:
    """Two or three sentences on a line beside others, by default the one of largest sigma."""
    line = line or remarkable(lines)
    if line.row is None:
        status = ", ".join(sorted({row.status for each in lines for row in each.last}))
        reasons = [row.error or row.note for each in lines for row in each.last]
        reason = next((f" ({text})" for text in reasons if text), "")
        return f"No row at {line.num_tokens} tokens has a finite sigma: {status}{reason}."
    parts = [_meaning(line.row, line.token), _comparison(line.row, lines), _growth_sentence(line)]
    return " ".join(part for part in parts if part)


class Intervals(NamedTuple):
    """All intervals of some rows together."""

    total: int  # how many: of sigma, of ‖J‖_F, and of the leading directions after the first
    delta: float  # sum of their failure probabilities: at most so likely is one wrong

    def sentence(self, more: str = "") -> str:
        """A sentence on their failure probability; "" if there are none.

        It says that all hold at once if that is as likely as `CONFIDENCE`; otherwise it gives the
        expected number of misses.
        """
        if not self.total:
            return ""
        delta = rounded_up(self.delta, 2)
        if delta > 1 - records.CONFIDENCE:
            return f"Of {self.total:,} intervals{more}, at most {delta:.2g} are expected to miss."
        if self.total == 1:
            return f"The interval{more} holds with probability at least {without(delta)}."
        kind = f"All {self.total:,} intervals{more} hold at once"
        return f"{kind} with probability at least {without(delta)}."


def intervals_of(
    rows: Iterable[records.Measurement], directions: Iterable[records.Direction] = ()
) -> Intervals:
    """The intervals of rows and of their directions, by the union bound.

    ``delta`` for each row with an interval, once more where ``‖J‖_F`` has one too, for every rank
    after the first, and for the rank after the last, on which the bounds of angles rest.
    """
    ranks: dict[str, dict[int, bool]] = {}
    for one in directions:
        ranks.setdefault(one.id, {})[one.rank] = one.sine is not None
    count, deltas = 0, []
    for row in rows:
        if row.upper is not None:
            mine = ranks.get(row.id, {1: False})
            own = len(mine) + (row.frobenius is not None)
            count += own
            deltas.append(row.delta * (own + any(mine.values())))
    return Intervals(count, math.fsum(deltas))


def remarkable(lines: Sequence[Line]) -> Line:
    """The line of largest sigma among those of one setting."""
    return max(lines, key=lambda line: -1.0 if line.row is None else line.row.sigma or 0.0)


def place(row: records.Measurement | records.Group) -> str:
    """The layer, and the head if it is one."""
    if row.layer is None:
        return "whole model"
    return f"layer {row.layer}" if row.head is None else f"layer {row.layer}, head {row.head}"


def _tokens_named(which: str) -> str:
    if which == "all":
        return ""
    names = {"last": "the last token", "first": "the first token"}
    names |= {"not-first": "all tokens but the first", "copies": "copies against each other"}
    return f" at {names.get(which, f'tokens {which}')}"


def _meaning(row: records.Measurement, token: str | None) -> str:
    """The meaning of sigma, and the token that carries it."""
    sigma = number(row.sigma, 3)
    source, answer = ENDS.get(row.map, ("the input", "the output"))
    size, target = SIZES.get(row.metric, (f"of size ε ({row.metric})", "{}"))
    text = (
        f"{place(row)}: sigma {sigma} means that a small change of {source}"
        f"{_tokens_named(row.move)}, {size}, can move {target.format(answer)}"
        f"{_tokens_named(row.read)} by up to {sigma} ε"
    )
    if row.status == "max_steps":
        text += f" (the solver ran out of steps, the interval is {interval(row.sigma, row.upper)})"
    if row.top_token is not None and row.top_share is not None:
        share, name = percent(row.top_share), _top_token_named(row, token)
        text += (
            f"; {share} of that direction sits on {name}"
            if row.top_share >= 0.2
            else f"; that direction is spread, its largest part ({share}) sits on {name}"
        )
        if row.sigma_rest is not None:
            text += f"; without it, {number(row.sigma_rest, 3)}"
    return text[0].upper() + text[1:] + "."


def _top_token_named(row: records.Measurement, token: str | None) -> str:
    """The top token by its position, and its text where known."""
    ends = {0: "the first token", row.num_tokens - 1: "the last token"}
    place = ends.get(row.top_token or 0, f"token {row.top_token}")
    return place if token is None else f"{place}, {visible(token)!r}"


def _comparison(row: records.Measurement, lines: Sequence[Line]) -> str:
    """The number by which layers are compared."""
    value = number(row.relative, 3)
    if row.relative is None or not math.isfinite(row.relative):
        return ""
    text = (
        f"Relative to the norms of input and output this is {value}: to first order, the output"
        f" moves by up to {value} times the input's relative change"
    )
    others = [r for r in (line.row for line in lines) if r is not None and r.relative is not None]
    if len(others) < 2:
        return text + "."
    top = max(others, key=lambda r: r.relative or 0.0)
    best = (
        "which is the largest here"
        if top is row
        else f"of which the largest is {number(top.relative, 3)}, at {place(top)}"
    )
    return f"{text}; compare layers by this number, {best}."


def _growth_sentence(line: Line) -> str:
    """The growth of sigma of this line, or the reason why there is none."""
    fit = line.growth
    if fit is None:
        trained = line.row.trained_length if line.row is not None else None
        most = f"the {trained} tokens" if trained else "the length"
        return f"The growth exponent needs three lengths, none beyond {most} of training."
    span = f"From {fit.lengths[0]} to {fit.lengths[-1]} tokens"
    if fit.fits is False:
        return f"{span} its growth is {fit.verdict}, the slopes from length to length."
    slope = _exponent(fit.slope)
    verb = f"{'grows' if fit.slope > 0 else 'falls'} like n^{slope}"
    if float(slope) == 0:
        verb = "hardly changes"
    if fit.low is None or fit.high is None:
        return f"{span} it {verb}; there is no interval: {fit.note}. {_off(fit)}"
    interval = f"{_exponent(fit.low)} to {_exponent(fit.high)}, {fit.interval}"
    interval += " for the sampling of text"
    if fit.low <= 0 <= fit.high:
        text = f"{span} no growth can be told from none (exponent {slope}: {interval})."
    else:
        text = f"{span} it {verb} ({interval})."
    return f"{text} {_off(fit)}"


def _off(fit: records.Growth) -> str:
    """The deviation of the means from the power law, and its significance."""
    law = f"n^{_exponent(fit.slope)}"
    text = f"The means leave {law} by up to {records.percent_off(fit.off)} %"
    if fit.lack_of_fit_p is None:
        return f"{text} (not tested)."
    much = "more than chance explains" if fit.nearly else "no more than chance explains"
    return f"{text}, {much} ({records.format_p(fit.lack_of_fit_p)})."


def _exponent(value: float) -> str:
    """Two decimals, and no minus in front of a zero."""
    return f"{value:z.2f}"
