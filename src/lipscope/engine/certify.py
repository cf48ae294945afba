"""A certificate over a ball around a layer's input, on the map that is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from lipscope.attention import Attention, Map
from lipscope.certificates.certify import BallCertificate, HeadCertificate, certify_ball
from lipscope.engine.checks import argument, flag, is_number, one_of, whole, word
from lipscope.engine.progress import Progress, Tell
from lipscope.engine.runs import AnyData, AnyFolder, AnyModel, LocalRun, of_one_window
from lipscope.engine.spec import Options
from lipscope.errors import InputError, shown
from lipscope.models import LoadedModel
from lipscope.pages.rows import Rows
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.place import Place
from lipscope.records.rows import Bound, Measurement, TokenShare, stable_id
from lipscope.theorems import (
    DERIVED,
    PATIENCE,
    AskedLayer,
    NotApplicableError,
    catalogue,
    expected_seconds,
    how_long,
)
from lipscope.theorems.derived.intervals import BallName

_SHARP = [one for one in catalogue() if one.name in ("row_gram", "row_gram_joint")]
_WITHOUT = ("metric", "move", "read", "side", "inputs", "ascent_steps", "theorems")
_WITHOUT += ("sharp", "radius", "rest", "average")


def certify(
    model: str | Path | nn.Module | LoadedModel = "minilm",
    data: str | Path | Tensor | Mapping[str, Any] | None = None,
    *,
    eps: float | Tensor = 0.01,
    layer: int = 0,
    length: int | None = None,
    ball: BallName = "token",
    head: int | None = None,
    steps: int = 4,
    sharp: bool | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> BallCertificate:
    """``L`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in a ball around the input.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary
    embedding whose weights are read in closed form; deterministic, up to float64 rounding. Proof:
    ``docs/theory/ball-certificate.md``. Twelve heads at 64 tokens take eight seconds, and some
    40 with ``sharp``.

    Args:
        model: As for `measure`; an `Attention` layer with its input as ``data``.
        data: Text or a batch, as for `measure`; the default text if None.
        eps: Radius of the ball, positive; one per token if wanted (ball ``token``), where tokens
            with 0 stay.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window; 64 if None.
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        head: One query head alone, or None for all.
        steps: Radii of the mean that the certificate takes; the cost grows with it.
        sharp: Also use the row-Gram certificate at X; if None, where that is expected to take up
            to 5 seconds, else the note says how long.
        out: Run folder for the row of sigma at X and for the certificate; several of one input may
            stand in it.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            at the start, and when sigma at X is known.
        **options: Those of `measure` about the input and the solver; the map is ``attention`` or
            ``heads``, and ``dtype`` float64.

    Returns:
        The certificate, with sigma at X.

    Raises:
        InputError: For every request that cannot be answered as asked, or if there is no
            certificate.

    Tokens at the origin with ``Q = K = V = I`` average, so sigma is 1 there:

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    >>> round(certify(layer, torch.zeros(3, 2, dtype=torch.float64), eps=1e-9).value, 6)
    1.0
    """
    if isinstance(eps, Tensor):
        fits = not (eps.is_complex() or eps.is_meta) and bool((eps > 0).any())
    else:
        fits = is_number(eps) and eps > 0
    if not fits:
        raise InputError(
            "`eps` should be positive: a ball of radius 0 holds one input. Found "
            f"`eps = {shown(eps)}`."
        )
    steps = argument(whole(1, 1000), "steps", steps)
    sharp = None if sharp is None else argument(flag, "sharp", sharp)
    ball = argument(one_of("token", "frobenius"), "ball", ball)
    head = None if head is None else argument(whole(0, 10_000), "head", head)
    asked = dict(options) | {"per_head": head is not None}
    map = argument(word, "map", options.get("map", "attention"))
    if map not in ("attention", "heads"):
        raise InputError(
            "`map` should be attention or heads, the maps that certificates are for. Found "
            f"`{shown(map)}`."
        )
    with _run(model, data, layer, length, asked, out) as run:

        def find() -> dict[str, Any]:
            own, _ = run.session.layer(run.jobs[0])
            built, _, _ = run.session.place(run.jobs[0])
            assert isinstance(own, Attention)  # the map is not `normed`
            if head is not None and not 0 <= head < own.num_heads:
                raise InputError(
                    f"`head` should be between 0 and {own.num_heads - 1}. Found `head = {head}`."
                )
            rows = run.rows(progress, keep=False)
            row = rows[head or 0]
            if row.sigma is None or row.upper is None:
                raise InputError(f"No certificate: {row.error or row.note}.")
            sigma = row.sigma, row.upper
            seconds = sharp_seconds(own, built.x, map, head)
            wanted = how | {"sharp": seconds <= PATIENCE if sharp is None else sharp}
            found = certify_ball(own, built.x, eps=eps, map=map, sigma=sigma, **wanted)
            if sharp is None and not wanted["sharp"]:
                left = f"the row-Gram certificate is left out: {how_long(seconds)}"
                found = replace(found, note="; ".join(filter(None, [left, found.note])))
            if run.folder is not None:
                run.keep([Finished(row, _tokens(rows, row), tuple(as_bounds(found, row)))])
            return asdict(found)

        how: Any = {"ball": ball, "head": head, "steps": steps, "sharp": sharp}
        size = eps.tolist() if isinstance(eps, Tensor) else eps
        held = run.once("certificate", how | {"eps": size}, find)
    heads = tuple(HeadCertificate(**one) for one in held.pop("heads"))
    return BallCertificate(heads=heads, **held)


def sharp_seconds(layer: Attention, x: Tensor, map: Map, head: int | None = None) -> float:
    """How long the row-Gram certificates are expected to take, by shapes alone."""
    whole = AskedLayer(layer, map, head, x)
    with contextlib.suppress(NotApplicableError):  # the certificate will say why
        return sum(expected_seconds(one, whole) for one in _SHARP)
    return 0.0


def answered(
    model: str,
    data: AnyData,
    find: Callable[[LoadedModel, RunFolder | None], tuple[list[dict[str, Any]], dict[str, Tensor]]],
    *,
    asked: Mapping[str, Any],
    layer: int,
    length: int | None,
    out: Place | None,
    progress: Tell,
    **options: Any,
) -> tuple[list[dict[str, Any]], str]:
    """What is said of certificates and attacks on them, from the folder if it was said before.

    Args:
        model: A name.
        data: As for `certify`.
        find: Given the model and the folder, what is said as plain values, and inputs by their
            names.
        asked: What determines it, besides the input.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window.
        out: The folder; None for none.
        progress: As for `certify`.
        **options: As for `certify`.

    Returns:
        What is said, and the name of the file with the inputs; one for each ``asked``.
    """
    file = f"worst-{stable_id(dict(asked))[:8]}.npz"
    with _run(model, data, layer, length, options, out) as run:

        def make() -> dict[str, Any]:
            said, points = find(run.loaded, run.folder)
            run.save(file, points)
            return {"said": said}

        progress(0, 1, None)
        return run.once("certify", asked, make, file)["said"], file


def keep(
    model: AnyModel,
    data: AnyData,
    found: Sequence[Bound],
    *,
    layer: int,
    length: int | None,
    out: AnyFolder,
    **options: Any,
) -> None:
    """Write what was certified at an input into a run folder, beside the row of sigma there.

    Args:
        model: As for `certify`.
        data: Likewise.
        found: The certificates.
        layer: Index of the layer from 0.
        length: Number of tokens of the text window.
        out: The folder.
        **options: As for `certify`.
    """
    with _run(model, data, layer, length, options, out) as run:
        rows = run.rows(keep=False)
        bounds = tuple(replace(one, id=rows[0].id) for one in found)
        run.keep([Finished(rows[0], _tokens(rows, rows[0]), bounds)])


def _run(
    model: AnyModel,
    data: AnyData,
    layer: int,
    length: int | None,
    options: Mapping[str, Any],
    out: AnyFolder,
) -> LocalRun:
    """The run that measures sigma of one layer at one input."""
    return LocalRun(
        model,
        data,
        dict(options) | of_one_window(data, options, length) | {"layers": [layer]},
        verb="certify",
        without=_WITHOUT,
        dtype="float64",
        out=out,
        asked={"verb": "certify"},  # several certificates may stand beside one row
    )


def _tokens(rows: Rows, row: Measurement) -> tuple[TokenShare, ...]:
    return tuple(one for one in rows.tokens if one.id == row.id)


def as_bounds(found: BallCertificate, row: Measurement) -> list[Bound]:
    """A certificate as records of the row of sigma at its centre."""
    values = {"certificate": found.value, "sigma_bound": found.sigma_bound}
    said = {
        "certificate": "‖f(X') − f(X)‖ ≤ L ‖X' − X‖",
        "sigma_bound": "sigma anywhere in the ball",
    }
    return [
        Bound(
            id=row.id,
            theorem=f"{name}_{found.ball}",
            statement=said[name],
            cite=DERIVED,
            kind="upper",
            scope="ball",
            metric="frobenius",
            value=value,
            eps=found.eps,
            note=found.note or "",
        )
        for name, value in values.items()
    ]
