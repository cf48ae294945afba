"""The worst directions of a layer in the model's own words: their tokens and heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Unpack

from lipscope.engine.checks import argument, one_of, whole
from lipscope.engine.ranges import COPIES
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, Progress, of_one_window
from lipscope.engine.spec import MeasureOptions
from lipscope.engine.text_anchors import texts_of
from lipscope.errors import InputError
from lipscope.pages import Rows

_WITHOUT = ("per_head", "side", "inputs", "ascent_steps", "theorems", "sharp", "radius")
_WITHOUT += ("rest", "average")
_MOST = 100


def directions(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layer: Sequence[int] | int | str | Literal["all"] = 0,
    k: int = 5,
    among: Sequence[str] | Path | None = None,
    length: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[MeasureOptions],
) -> Rows:
    """The leading singular directions of a layer at an input, and what they read as.

    ``J = sum_j sigma_j u_j v_j^T``: a move along ``v_1`` changes the output most, by ``sigma_1``
    along ``u_1``; then come the best of those that are orthogonal to it. Of both vectors the
    three tokens with the largest shares are read, as the words whose vectors have the largest
    and the smallest cosine with theirs: tokens in this token's place (layer 0 of a text), gradients
    of the model's own logits (decoders with a final norm), or the other tokens or patches of
    this input. The nearest cosine, and what the ten nearest span, stand beside those of 99
    random directions: a vector that is no nearer than all of these reads as nothing, and a
    random one is nearer once in a hundred times.

    Holds for self-attention, all heads together, in the Frobenius and the token-relative metric.
    Each direction has its own interval, and a bound of its angle with the singular vector; equal
    singular values have no directions of their own. That a direction reads as something does not
    say that the model uses it so.

    Args:
        model: As for `measure`.
        data: Text or a batch, as for `measure`; the default text if None.
        layer: Index from 0, several, or "all".
        k: Number of directions.
        among: Texts, or the ``Path`` of a file with one on each line, for an encoder of texts: each
            direction has their parts ``text``, whose ``share`` is the derivative, along v, of the
            cosine of the mean over tokens of the model's output with that of the text.
        length: Number of tokens of the text window; 64 if None.
        out: Run folder, or one that is open, as for `measure`.
        progress: Called as ``progress(done, total, row)``.
        **options: Those of `measure` about the input, the question and the solver.

    Returns:
        A row for each layer, with ``directions``: their tokens and heads.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: derived here (``docs/theory/directions.md``).

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*2 * [torch.zeros(2, 2)], torch.diag(torch.tensor([3.0, 2.0])))
    >>> rows = ls.directions(layer, torch.ones(1, 2), k=2)
    >>> [(one.rank, round(one.sigma, 3)) for one in rows.directions if one.side == "right"]
    [(1, 3.0), (2, 2.0)]
    """
    k = argument(whole(1, _MOST), "k", k)
    if "metric" in options:
        argument(one_of("frobenius", "token-relative"), "metric", options["metric"])
    if options.get("move") == COPIES:
        raise InputError("`move` should be tokens, whose directions are read. Found `copies`.")
    asked = {**options, **of_one_window(data, options, length), "layers": layer}
    more = {"directions": k, "among": tuple(texts_of(among))}
    with LocalRun(
        model, data, asked, verb="directions", without=_WITHOUT, more=more, norms=True, out=out
    ) as run:
        return run.rows(progress)
