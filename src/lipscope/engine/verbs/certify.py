"""A certificate over a ball around a layer's input, on the map that is measured."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from torch import Tensor

from lipscope import theorems
from lipscope.attacks import attack_in_ball
from lipscope.attention import Attention, Map
from lipscope.certificates import (
    BallCertificate,
    HeadCertificate,
    certify_ball,
    certify_map,
)
from lipscope.engine.checks import argument, flag, is_number, one_of, whole_number
from lipscope.engine.plan import check_one_input
from lipscope.engine.ready_model import AnyModel
from lipscope.engine.runs import AnyData, AnyFolder, LocalRun, Progress, of_one_input
from lipscope.engine.session import MapAtInput
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.errors import InputError, shown
from lipscope.models import Chain, eval_mode, read_map
from lipscope.records import Bound, Finished, MapName, Measurement, stable_id

_SHARP = ("row_gram", "row_gram_joint")
_VERB = Verb("certify", [one for one in OF_QUESTION if one != "per_head"], "float64")
_MOST_POINTS = 100_000
_USUAL, _OF_NETWORKS = "attention", ("residual", "block", "stack", "model")
_OF_ATTENTION = (_USUAL, "heads")


@dataclass(frozen=True, kw_only=True, repr=False)
class CertifiedBall(BallCertificate):
    """A certificate of a model's layer in a ball, and an attack on it.

    Attributes:
        model: Name of the model.
        layer: Index of the layer; None for the map ``model``.
        head: The query head, or None for all.
        map: ``attention``, ``heads``, ``residual``, ``block``, ``stack`` or ``model``.
        num_tokens: Number of tokens of the input.
        largest_ratio: Largest ``‖f(X') - f(X)‖ / ‖X' - X‖`` that the attack found in the ball;
            None if there was none.
        largest_sigma: Largest sigma that it found there, or None.
        attempts: Random points and ascents that it tried.
        file: Name of the file with the worst input in the run folder, or None.
    """

    model: str
    layer: int | None
    head: int | None
    map: MapName
    num_tokens: int
    largest_ratio: float | None = None
    largest_sigma: float | None = None
    attempts: int = 0
    file: str | None = None

    @property
    def over_attack(self) -> float | None:
        """``value / largest_ratio``: how much larger it is than what was found."""
        return self.value / self.largest_ratio if self.largest_ratio else None

    @property
    def violated(self) -> bool:
        """Whether the attack found more than is certified, by more than its own rounding."""
        return self.largest_ratio is not None and self.largest_ratio > self.value * (1 + 1e-9)


def certify(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    eps: float | Tensor = 0.01,
    layer: int = 0,
    length: int | None = None,
    ball: theorems.BallName = "token",
    head: int | None = None,
    steps: int | None = None,
    sharp: bool | None = None,
    random: int | None = None,
    ascents: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> CertifiedBall:
    """``L`` with ``‖f(X') - f(X)‖ <= L ‖X' - X‖`` for every X' in a ball around the input.

    Holds for dot-product attention with any mask, biases, grouped heads and rotary
    embedding whose weights are read in closed form, and for residual sums, blocks and models that
    `read_map` takes apart; deterministic, up to float64 rounding. Proof:
    ``docs/theory/ball-certificate.md``. Twelve heads at 64 tokens take eight seconds, and some
    40 with ``sharp``; larger maps take time like the cube of tokens times width, and 4 GB at most.
    ``model`` and ``data`` are as for `measure`.

    Args:
        eps: Radius of the ball, positive; one per token if wanted (ball ``token``), where tokens
            with 0 stay.
        length: Number of tokens of the text window; 64 if None.
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        head: One query head alone, or None for all.
        steps: Radii of the mean that the certificate of attention takes, 4 if None; the cost grows
            with it.
        sharp: Also use the row-Gram certificate at X; if None, where that is expected to take up
            to 5 seconds, else the note says how long.
        random: Random points of an attack on the certificate in its ball; if both are None, there
            is no attack.
        ascents: Its ascents of each kind.
        out: Run folder for the row of sigma at X, the certificate and the worst input; several of
            one input may stand in it.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            at the start, and when sigma at X is known.
        **options: Those of `measure` about the input and the solver; the map is ``attention``,
            ``heads``, ``residual``, ``block``, ``stack`` or ``model``, and ``dtype`` float64.
            ``head``, ``steps`` and ``sharp`` go with the first two.

    Raises:
        InputError: For every request that cannot be answered as asked, or if there is no
            certificate.

    Tokens at the origin with ``Q = K = V = I`` average, so sigma is 1 there:

    >>> import lipscope as ls, torch
    >>> layer = ls.DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    >>> round(certify(layer, torch.zeros(3, 2, dtype=torch.float64), eps=1e-9).value, 6)
    1.0
    """
    _check_eps(eps)
    map: MapName = argument(
        one_of(*_OF_ATTENTION, *_OF_NETWORKS), "map", options.get("map", _USUAL)
    )
    of_layer = {"head": head, "steps": steps, "sharp": sharp}
    if map in _OF_NETWORKS and (wrong := [n for n, v in of_layer.items() if v is not None]):
        raise InputError(
            f"`{wrong[0]}` goes with the maps {' and '.join(_OF_ATTENTION)}. Found `map = {map}`; "
            "leave it out."
        )
    steps = argument(whole_number(1, 1000), "steps", 4 if steps is None else steps)
    sharp = None if sharp is None else argument(flag, "sharp", sharp)
    ball = argument(one_of("token", "frobenius"), "ball", ball)
    head = None if head is None else argument(whole_number(0, 10_000), "head", head)
    asked = dict(options) | {"per_head": head is not None}
    attempts = {
        name: argument(whole_number(0, _MOST_POINTS), name, 0 if count is None else count)
        for name, count in (("random", random), ("ascents", ascents))
    }
    how: Any = {"ball": ball, "head": head, "steps": steps, "sharp": sharp}
    size = eps.tolist() if isinstance(eps, Tensor) else eps
    wanted = how | {"eps": size} | attempts
    file = f"worst-{stable_id(wanted)[:8]}.npz" if any(attempts.values()) else None
    asked |= of_one_input(data, options, length) | {"layers": [layer]}
    several = {"verb": "certify"}  # certificates may stand beside one row
    with LocalRun(model, data, asked, _VERB, out=out, asked=several) as run:
        check_one_input(run.jobs)

        def find() -> dict[str, Any]:
            at = run.at(run.jobs[0])
            of: Any = _layer_of(at, head) if map in _OF_ATTENTION else _chain_of(run, map)
            rows = run.rows(progress, keep=False)
            row = rows[head or 0]
            if row.sigma is None or row.upper is None:
                raise InputError(f"No certificate: {row.error or row.note}.")
            sigma, x = (row.sigma, row.upper), at.x.double().cpu()
            kind: Any = {"eps": eps, "ball": ball, "seed": row.seed, **attempts}
            kind |= {"head": head, "map": map} if map in _OF_ATTENTION else {}
            with at.window.ready():
                if map in _OF_NETWORKS:
                    found = certify_map(of, x, eps=eps, ball=ball, sigma=sigma)
                else:
                    which = "heads" if map == "heads" else "attention"
                    found = _of_layer(of, x, which, sigma, eps=eps, **how)
                tried = None if file is None else attack_in_ball(of, x, **kind)
            if run.folder is not None:
                mine = tuple(one for one in rows.tokens if one.id == row.id)
                run.keep([Finished(row, mine, tuple(as_bounds(found, row)))])
            said = asdict(found) | {"model": run.model.name, "layer": row.layer, "map": map}
            said |= {"head": head, "num_tokens": len(x)}
            if file is None or tried is None:
                return said
            run.save(file, {"x": x, "worst": tried.worst})
            said |= {"largest_ratio": tried.ratio, "largest_sigma": tried.sigma}
            return said | {"attempts": tried.attempts}

        held = run.once("certificate", wanted, find, file)
    held.pop("sha256", None)
    heads = tuple(HeadCertificate(**one) for one in held.pop("heads"))
    return CertifiedBall(heads=heads, file=file, **held)


def _layer_of(at: MapAtInput, head: int | None) -> Attention:
    """The attention layer, which has this head."""
    own = at.attention
    if head is not None and not 0 <= head < own.num_heads:
        raise InputError(
            f"`head` should be between 0 and {own.num_heads - 1}. Found `head = {head}`."
        )
    return own


def _chain_of(run: LocalRun, map: MapName) -> Chain:
    """The parts of a larger map, held against the map itself."""
    at, job = run.at(run.jobs[0]), run.jobs[0]
    module = run.model.in_memory(f"A certificate of the map `{map}`").model
    with eval_mode(module):
        how: Any = {"layer": job.layer or 0, "map": map, "modules": run.spec.modules}
        chain, x = read_map(module, at.item.arguments, **how)
    if x.shape != at.x.shape:
        raise InputError(
            f"The map `{map}` should be of tokens that all move. Found padding; leave it out."
        )
    return chain


def _of_layer(
    own: Attention,
    x: Tensor,
    map: Map,
    sigma: tuple[float, float],
    *,
    sharp: bool | None,
    **how: Any,
) -> BallCertificate:
    """The certificate of one attention layer, as sharp as is asked for or quick."""
    seconds = sharp_seconds(own, x, map, how["head"])
    sharply = seconds <= theorems.PATIENCE if sharp is None else sharp
    found = certify_ball(own, x, sigma=sigma, map=map, sharp=sharply, **how)
    if sharp is not None or sharply:
        return found
    left = f"the row-Gram certificate is left out: {theorems.how_long(seconds)}"
    return replace(found, note="; ".join(filter(None, [left, found.note])))


def _check_eps(eps: float | Tensor) -> None:
    if isinstance(eps, Tensor):
        fits = not (eps.is_complex() or eps.is_meta) and bool((eps > 0).any())
    else:
        fits = is_number(eps) and eps > 0
    if not fits:
        raise InputError(
            "`eps` should be positive: a ball of radius 0 holds one input. Found "
            f"`eps = {shown(eps)}`."
        )


def sharp_seconds(layer: Attention, x: Tensor, map: Map, head: int | None = None) -> float:
    """How long the row-Gram certificates are expected to take, by shapes alone."""
    whole = theorems.AskedLayer(layer, map, head, x)
    with contextlib.suppress(theorems.NotApplicableError):  # the certificate will say why
        return sum(
            theorems.expected_seconds(theorems.theorem_named(name), whole) for name in _SHARP
        )
    return 0.0


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
            cite=theorems.DERIVED,
            kind="upper",
            scope="ball",
            metric="frobenius",
            value=value,
            eps=found.eps,
            note=found.note or "",
        )
        for name, value in values.items()
    ]
