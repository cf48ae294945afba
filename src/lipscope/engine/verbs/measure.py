"""Verbs that return rows: sigma at an input, bounds beside it, and its worst directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import Tensor

from lipscope.attention import Attention
from lipscope.engine.checks import COPIES, argument, flag, one_of, whole_number
from lipscope.engine.direction_words import given_texts
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, Progress, is_text, of_one_window
from lipscope.engine.spec import ADVERSARIAL, OF_QUESTION, REAL, MeasureOptions, Verb
from lipscope.errors import InputError, shown
from lipscope.linalg import SPECTRAL
from lipscope.models import LoadedModel, Sample, digest
from lipscope.pages import Rows
from lipscope.records import Measurement
from lipscope.theorems import bounds_at, catalogue

_MEASURE = Verb("measure")
_BOUNDS = Verb("bounds", dtype="float64")
_OF_DIRECTIONS = ("metric", "move", "read")
_WITHOUT = [one for one in OF_QUESTION if one not in _OF_DIRECTIONS]
_DIRECTIONS = Verb("directions", _WITHOUT, norms=True)
_MOST = 100  # maximum number of directions


def measure(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layers: Sequence[int] | int | str | Literal["all"] = "all",
    lengths: Sequence[int] | int | str | None = None,
    samples: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[MeasureOptions],
) -> Rows:
    """Measure sigma, the local Lipschitz constant of attention, on real inputs.

    ``sigma = max ‖R J D e‖_F / ‖e‖_F`` over moves ``e`` of the tokens in ``move``, where ``J`` is
    the Jacobian of the map at the captured input, ``R`` reads the tokens in ``read`` and
    ``D`` is the metric. Every row carries the interval ``[sigma, upper]``, valid with probability
    ``1 - delta``.

    Holds for any model whose attention modules can be found. Dropout is switched off.

    Args:
        model: A name for `load_model`, a loaded model, a torch module, or an `Attention` layer,
            whose ``data`` is its own input, ``(n, d)`` or ``(b, n, d)``.
        data: Text, the ``Path`` of a text file or of a folder of them, or a batch for a module:
            input ids (integers), input embeddings (3 axes) or pixel values (4 axes), or a mapping
            of arguments. The default text if None.
        layers: Layer indices from 0, such as ``[0, 3]`` or ``"0:5"``, or "all".
        lengths: Numbers of tokens of the text windows; 16, 64, 128, 256 if None.
        samples: Windows per length, or pictures; 10 if None.
        out: Run folder, open or not; a run of the same question there is continued, also with more
            layers, lengths or samples; any other is refused.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            in rows.
        **options: Shared by all verbs, each with its default:

            * ``map="attention"``: ``heads``, ``attention``, ``normed``, ``residual``, ``block``,
              ``stack`` (the blocks up to this one) or ``model``; of a model with a head also
              ``logits``, its scores (a row for each token whose next one is scored, or one row of
              classes), and ``margin``, the largest score minus the second largest, of the last row.
            * ``per_head=False``: one row per query head.
            * ``metric="frobenius"``; ``token-relative``: each token's move in proportion to its
              norm; ``max-token``: largest token norm; ``infinity``: largest entry. The last two
              have deterministic intervals.
            * ``move="all"``: tokens that may move: ``all``, ``first``, ``last``, ``not-first``,
              ``a:b`` (both included), ``a%:b%`` of the window, or ``copies`` of every token
              against each other (mass splitting, see `split`); ``read="all"``: output tokens that
              are read, likewise.
            * ``side="self"``, or the layers of cross-attention instead, moved through their
              ``query`` side (the decoder's stream) or their ``key`` side (encoder states,
              retrieved passages) while the other is fixed.
            * ``windows="spread"`` over the text, or ``disjoint``; ``special_tokens=True``: add
              the model's special tokens to each window; ``position_offset=0``: shift of the
              position ids, to separate effects of length and position.
            * ``images``: pictures instead of a text, a folder or ``random`` pixels;
              ``resolutions``: their sides in pixels, the model's own if None.
            * ``causal=None``: the model's own mask; True adds a causal one to every layer of an
              encoder, False removes it from a decoder with learnt positions.
            * ``inputs="real"``, or inputs built for the layer: a construction, ``adversarial``
              (the worst of all) or ``ascent`` with ``ascent_steps=40``; both search where all
              tokens move, in the metric ``frobenius``.
            * ``theorems="none"``: names in the catalogue to evaluate for every row, or ``all``
              quick ones; ``sharp=True``: compute named ones that take seconds per head;
              ``radius="row"``: largest token norm that bounds on all inputs cover: that of the
              row's own input, of all inputs of the layer (``inputs``), the largest possible one
              after the norm before the layer (``norm``), or a number.
            * ``rest=False``: also sigma with the most sensitive token held fixed;
              ``average=False``: also ``‖J‖_F`` by random probes.
            * ``tol=1e-3``: relative width of intervals, ``upper <= (1 + tol) sigma``;
              ``delta=0.01``: failure probability of each; a small one may need float64.
            * ``dtype="float32"``; ``device="auto"`` uses a GPU if available; ``seed=0`` of the
              random starts; ``memory="free"``: budget such as 1GiB for blocks of weights
              read from disk, hidden states, chunks, stored probabilities and the solver's
              basis, of which the last three take at most 1 GiB by default; ``modules``:
              regular expression for the attention modules, searched in their paths.
            * ``tokenizer`` of a module of your own that reads text; ``revision`` of a hub id;
              ``allow_pickle=False``: accept a checkpoint that exists only as a pickle.

    Returns:
        The rows, in order of length, sample, layer and head.

    Raises:
        InputError: If the request cannot be answered.

    Source: the local Lipschitz constant of [castin2024], Section 3; interval derived here.

    >>> import lipscope as ls
    >>> rows = ls.measure("minilm", layers=[0], lengths=[16], samples=1)
    >>> rows[0].status, rows[0].sigma < rows[0].upper
    ('converged', True)
    """
    asked = dict(options) | {"layers": layers, "lengths": lengths, "samples": samples}
    return LocalRun(model, data, asked, _MEASURE, out=out).only_rows(progress)


def measure_built(
    layer: Attention,
    x: Tensor,
    *,
    kind: str,
    of: LoadedModel | None = None,
    index: int = 0,
    sample: int = 0,
    out: AnyFolder = None,
    **options: Unpack[MeasureOptions],
) -> Measurement:
    """Sigma of a layer at an input ``(n, d)`` built for it, from an independent random start.

    The interval is valid even if the input was found by maximising sigma. Holds for every
    `Attention` layer, in the dtype of its weights.

    ``kind`` names the input in the row's ``input``, such as ``two_cluster``; ``of`` is the model of
    the layer, at ``index``; ``sample`` counts inputs of the same length.

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> round(measure_built(layer, torch.zeros(3, 2), kind="zeros").sigma, 6)
    1.0
    """
    loaded = replace(of or LoadedModel("layer", layer, None, None, "float32"), model=layer)
    items = [Sample(kind, (x,), sample, None, len(x), digest(x), None)]
    asked: dict[str, Any] = {**options, "layers": [index]}
    return LocalRun(loaded, items, asked, _MEASURE, more={"tokens": False}, out=out).only_rows()[0]


def bounds(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    layers: Sequence[int] | int | str | Literal["all"] = 0,
    lengths: Sequence[int] | int | str | None = None,
    samples: int | None = None,
    attack: bool = False,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[MeasureOptions],
) -> Rows:
    """All bounds on the Lipschitz constants of a model's layers, next to sigma.

    For every layer, length and sample: sigma with its interval, every theorem of the catalogue
    with its value or the reason why it has none, and, if requested, the worst input found.

    Holds for families whose weights are read in closed form. A theorem is compared with a
    measurement only in its own metric and map.
    ``model``, ``data``, ``out`` and ``progress`` are as for `measure`.

    Args:
        layers: Indices from 0, or "all".
        lengths: Numbers of tokens of windows of text; 64 if None.
        samples: Windows per length; 1 if None.
        attack: Also report the worst input within the radius that `attack` finds, and its sigma;
            takes seconds per head.
        **options: Options of `measure`, with these changes: ``map`` is ``attention``, ``heads``,
            ``normed`` or ``residual``; ``metric`` selects the theorems in this metric, and
            measures sigma in it (by default all theorems, and sigma in the Frobenius norm);
            ``theorems`` are all; ``sharp``: compute slow bounds, of which the row-Gram certificate
            is the sharpest at an input, always (True) or never (False); by default those expected
            to take up to 5 seconds, while records of the others say how long;
            ``radius="inputs"``: that of the largest input, except with a norm in front, where
            bounds on all inputs hold for all token norms from the smallest of the inputs on;
            ``dtype`` is float64.

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    >>> rows = bounds(layer, torch.eye(2, dtype=torch.float64))
    >>> value = {one.theorem: one.value for one in rows.bounds}
    >>> rows[0].sigma <= value["local_rows"] <= value["castin_thm_3_3"]
    True
    """
    attack = argument(flag, "attack", attack)
    wanted: dict[str, Any] = {"radius": "inputs", **_given(options)}
    if attack and (wanted.get("per_head") or wanted.get("map", "attention") != "attention"):
        per_head = ", per head" * bool(wanted.get("per_head"))
        raise InputError(
            "`attack` goes with the map `attention` and all heads together. Found "
            f"`map = {wanted.get('map', 'attention')}`{per_head}."
        )
    more: dict[str, Any] = {}
    if isinstance(named := wanted.get("theorems", "all"), str) and named == "all":
        if "sharp" not in wanted:  # a given value, or that with named theorems, stays as it is
            more["sharp"] = None
        metric = wanted.get("metric")
        more["theorems"] = tuple(t.name for t in catalogue() if metric in (None, t.metric))
        if not more["theorems"] and metric in SPECTRAL:
            raise InputError(
                "`metric` should be one of a theorem: frobenius, max-token or infinity. Found "
                f"`metric = {shown(metric)}`; sigma in it is what `measure` finds."
            )
        wanted["theorems"] = "all"
    if attack:
        wanted["inputs"] = (REAL, ADVERSARIAL)
    if is_text(data, wanted):
        lengths, samples = 64 if lengths is None else lengths, 1 if samples is None else samples
    asked = _given(wanted) | {"layers": layers, "lengths": lengths, "samples": samples}
    with LocalRun(model, data, asked, _BOUNDS, more=more, out=out) as run:
        if run.left():  # refuse a layer without bounds, and a radius that excludes its input
            at = run.at(run.jobs[0])
            radius, floor = at.allowed
            bounds_at(at.for_theorems, at.x, radius=radius, floor=floor, names=[])
        return run.rows(progress)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


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
    """The leading singular directions of a layer at an input, and their readings.

    ``J = sum_j sigma_j u_j v_j^T``: a move along ``v_1`` changes the output most, by ``sigma_1``
    along ``u_1``; each further direction is the best one orthogonal to the previous ones. In both
    vectors the three tokens with the largest shares are read as the words whose vectors have the
    largest and the smallest cosine with theirs: tokens in this token's place (layer 0 of a text),
    gradients of the model's own logits (decoders with a final norm), or the other tokens or
    patches of this input. The nearest cosine, and the part spanned by the ten nearest, are compared
    with those of 99 random directions: a vector that is no nearer than all of them has no
    reading, and a random one is nearer with probability 1/100.

    Holds for self-attention, all heads together, in the Frobenius and the token-relative metric.
    Each direction has its own interval, and a bound on its angle to the singular vector; equal
    singular values have no unique directions. A reading of a direction does not imply that the
    model uses it in this way.
    ``model``, ``data``, ``out`` and ``progress`` are as for `measure`.

    Args:
        layer: Index or indices from 0, or "all".
        k: Number of directions.
        among: Texts, or the ``Path`` of a file with one per line, for text encoders: each direction
            gets parts ``text``, whose ``share`` is the derivative along v of the cosine between
            the model's mean output over tokens and that of the text.
        length: Number of tokens of the text window; 64 if None.
        **options: Options of `measure` about the input, the question and the solver.

    Source: derived here (``docs/theory/directions.md``).

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*2 * [torch.zeros(2, 2)], torch.diag(torch.tensor([3.0, 2.0])))
    >>> rows = ls.directions(layer, torch.ones(1, 2), k=2)
    >>> [(one.rank, round(one.sigma, 3)) for one in rows.directions if one.side == "right"]
    [(1, 3.0), (2, 2.0)]
    """
    k = argument(whole_number(1, _MOST), "k", k)
    if "metric" in options:
        argument(one_of("frobenius", "token-relative"), "metric", options["metric"])
    if options.get("move") == COPIES:
        raise InputError("`move` should select tokens for directions. Found `copies`.")
    asked = {**options, **of_one_window(data, options, length), "layers": layer}
    more = {"directions": k, "among": tuple(given_texts(among))}
    return LocalRun(model, data, asked, _DIRECTIONS, more=more, out=out).only_rows(progress)
