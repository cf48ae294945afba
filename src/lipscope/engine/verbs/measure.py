"""The main verb: the local Lipschitz constant of a model's attention on an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from torch import Tensor

from lipscope.attention import Attention
from lipscope.engine.progress import Progress
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun
from lipscope.engine.spec import MeasureOptions
from lipscope.models import LoadedModel, Sample, digest
from lipscope.pages import Rows
from lipscope.records import Measurement


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
        lengths: Numbers of tokens of the text windows; 16, 64, 256 if None.
        samples: Windows per length, or pictures; 10 if None.
        out: Run folder, or one that is open; a run of the same question there is continued, also
            by more layers, lengths or samples, and any other is refused.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            in rows.
        **options: Shared by all verbs, each with its default:

            * ``map="attention"``: ``heads``, ``attention``, ``normed``, ``residual``, ``block``,
              ``stack`` (the blocks up to this one) or ``model``; of a model with a head also
              ``logits``, its scores (a row for each token whose next one is scored, or one row of
              classes), and ``margin``, the answer's score less the next one's, of the last row.
            * ``per_head=False``: one row per query head.
            * ``metric="frobenius"``; ``token-relative``: each token's move in proportion to its
              norm; ``max-token``: largest token norm; ``infinity``: largest entry. The last two
              are bracketed without a probability.
            * ``move="all"``: tokens that may move: ``all``, ``first``, ``last``, ``not-first``,
              ``a:b`` (both included), ``a%:b%`` of the window, or ``copies`` of every token
              against each other (mass splitting, see `split`); ``read="all"``: output tokens that
              are read, likewise.
            * ``side="self"``, or the layers of cross-attention instead, moved through their
              ``query`` side (the decoder's stream) or their ``key`` side (encoder states,
              retrieved passages) while the other stays.
            * ``windows="spread"`` over the text, or ``disjoint``; ``special_tokens=True``: put
              the model's own special tokens around each window; ``position_offset=0``: position
              ids start this much later, to tell length from position.
            * ``images``: pictures instead of a text, a folder or ``random`` pixels;
              ``resolutions``: their sides in pixels, the model's own if None.
            * ``causal=None``: the model's own mask; True puts a causal one on every layer of an
              encoder, False takes it off a decoder with learnt positions.
            * ``inputs="real"``, or inputs built for the layer: a construction, ``adversarial``
              (the worst of all) or ``ascent`` with ``ascent_steps=40``.
            * ``theorems="none"``: names in the catalogue that are asked about every row, or
              ``all`` that are quick; ``sharp=True``: compute named ones that take seconds a head;
              ``radius="row"``: of which tokens bounds on all inputs speak: up to the norm of the
              row's own input, of the layer's largest (``inputs``), of the largest that the norm
              before the layer lets through (``norm``), or a number.
            * ``rest=False``: also sigma with the most sensitive token held fixed;
              ``average=False``: also ``‖J‖_F`` by random probes.
            * ``tol=1e-3``: how wide intervals may be, ``upper <= (1 + tol) sigma``;
              ``delta=0.01``: failure probability of each; a small one may need float64.
            * ``dtype="float32"``; ``device="auto"`` takes a GPU where there is one; ``seed=0``: of
              the random starts; ``memory="1GiB"``: budget for chunks, stored probabilities and
              the solver's basis; ``modules``: regular expression for the attention modules,
              searched in their paths.
            * ``tokenizer`` of a module of your own that reads text; ``revision`` of a hub id;
              ``allow_pickle=False``: accept a checkpoint that exists only as a pickle.

    Returns:
        The rows, in order of length, sample, layer and head.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: the local Lipschitz constant of [castin2024], Section 3; interval derived here.

    >>> import lipscope as ls
    >>> rows = ls.measure("minilm", layers=[0], lengths=[16], samples=1)
    >>> rows[0].status, rows[0].sigma < rows[0].upper
    ('converged', True)
    """
    asked = dict(options) | {"layers": layers, "lengths": lengths, "samples": samples}
    with LocalRun(model, data, asked, verb="measure", out=out) as run:
        return run.rows(progress)


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
    """Sigma of one layer at an input that was built for it, from a start of its own.

    An input that was found by maximising sigma keeps a valid interval. Holds for every
    `Attention` layer, in the dtype of its weights.

    Args:
        layer: The layer.
        x: The input, ``(n, d)``.
        kind: What the input is, for the row's ``input``: for example ``two_cluster``.
        of: The model that the layer is from.
        index: Its layer index.
        sample: Index among inputs of the same length.
        out: As for `measure`.
        **options: As for `measure`.

    Returns:
        The row.

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(torch.eye(2), torch.eye(2), torch.eye(2))
    >>> round(measure_built(layer, torch.zeros(3, 2), kind="zeros").sigma, 6)
    1.0
    """
    loaded = replace(of or LoadedModel("layer", layer, None, None, "float32"), model=layer)
    item = Sample(kind, (x,), sample, None, len(x), digest(x), None)
    asked: dict[str, Any] = {**options, "layers": [index]}
    no_tokens = {"tokens": False}
    with LocalRun(loaded, [item], asked, verb="measure", more=no_tokens, out=out) as run:
        (row,) = run.rows()
    return row
