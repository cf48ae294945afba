"""Certificates: of a map in a ball around its input, and of the robustness of a decision."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from lipscope import theorems
from lipscope.attacks import attack_in_ball
from lipscope.attention import Attention, Map
from lipscope.certificates import (
    BallCertificate,
    DecisionBall,
    HeadCertificate,
    certify_ball,
    certify_map,
)
from lipscope.engine.checks import argument, flag, is_number, items, one_of, whole_number
from lipscope.engine.classifier import Classifier, decides_by
from lipscope.engine.model_decision import (
    BALLS,
    DecisionCertificate,
    ModelDecision,
    certificate_of,
    check_double,
    decision_at,
    decision_at_layer,
    whole_input,
)
from lipscope.engine.ready_model import AnyModel, ready_model
from lipscope.engine.runs import (
    AnyData,
    AnyFolder,
    LocalRun,
    Progress,
    Tell,
    as_callback,
    as_voice,
    is_text,
    of_one_input,
)
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.errors import InputError, stated
from lipscope.models import Chain, Pooled, eval_mode, read_map
from lipscope.records import RADII, Bound, MapName, Measurement, stable_id

_SHARP = ("row_gram", "row_gram_joint")
_WITHOUT = [one for one in OF_QUESTION if one != "per_head"]
_VERB = Verb("certify", _WITHOUT, "float64", one_input=True)
_DECISION = Verb("certify_decision", OF_QUESTION, "float64", one_input=True)
_LOADING = ("tokenizer", "revision", "seed", "allow_pickle")
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
        """``value / largest_ratio``: the ratio of the certificate to the attack."""
        return self.value / self.largest_ratio if self.largest_ratio else None

    @property
    def violated(self) -> bool:
        """Whether the attack exceeds the certificate by more than its rounding error."""
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
    `read_map` supports; deterministic, up to float64 rounding. Proof:
    ``docs/theory/ball-certificate.md``. Twelve heads at 64 tokens take eight seconds, and some
    40 with ``sharp``; for larger maps, time grows like the cube of tokens times width (4 GB limit).
    ``model`` and ``data`` are as for `measure`.

    Args:
        eps: Radius of the ball, positive; optionally one per token (ball ``token``), where 0 holds
            a token fixed.
        length: Number of tokens of the text window; 64 if None.
        ball: ``token``: every token moves by at most ``eps``; ``frobenius``: all together.
        head: One query head alone, or None for all.
        steps: Number of radii for the mean in the certificate of attention, 4 if None; the cost
            grows with it.
        sharp: Also use the row-Gram certificate at X; if None, only if that is expected to take up
            to 5 seconds, else the note says how long.
        random: Number of random points in an attack on the certificate in its ball; no attack if
            both this and ``ascents`` are None.
        ascents: Number of ascents of each kind in the attack.
        out: Run folder for the row of sigma at X, the certificate and the worst input; it may hold
            several certificates of an input.
        progress: True for a line on standard error, or called as ``progress(done, total, row)``,
            at the start, and when sigma at X is known.
        **options: Options of `measure` about the input and the solver; the map is ``attention``,
            ``heads``, ``residual``, ``block``, ``stack`` or ``model``, and ``dtype`` float64.
            ``head``, ``steps`` and ``sharp`` apply to the first two.

    Raises:
        InputError: If the request cannot be answered, or there is no certificate.

    At the origin, attention with ``Q = K = V = I`` averages the tokens, so sigma is 1:

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
    several = {"verb": "certify"}  # a row may have several certificates
    with LocalRun(model, data, asked, _VERB, out=out, asked=several) as run:

        def find() -> dict[str, Any]:
            at = run.at(run.jobs[0])
            of: Any = at.attention if map in _OF_ATTENTION else _chain_of(run, map)
            if head is not None:
                of.check_head(head)
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
                run.keep(rows, row, as_bounds(found, row))
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


def _chain_of(run: LocalRun, map: MapName) -> Chain:
    """The parts of a larger map, checked against the map itself."""
    at, job = run.at(run.jobs[0]), run.jobs[0]
    module = run.model.in_memory(f"A certificate of the map `{map}`").model
    with eval_mode(module):
        how: Any = {"layer": job.layer or 0, "map": map, "modules": run.spec.modules}
        chain, x = read_map(module, at.item.arguments, **how)
    if x.shape != at.x.shape:
        raise InputError(
            f"The map `{map}` should have no fixed tokens. Found padding; leave it out."
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
    """The certificate of an attention layer; if ``sharp`` is None, sharp only if quick."""
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
            f"{stated('eps', eps)}."
        )


def sharp_seconds(layer: Attention, x: Tensor, map: Map, head: int | None = None) -> float:
    """How long the row-Gram certificates are expected to take, by shapes alone."""
    whole = theorems.LayerSubject(layer, map, head, x)
    with contextlib.suppress(theorems.NotApplicableError):  # the certificate will say why
        return sum(
            theorems.expected_seconds(theorems.theorem_named(name), whole) for name in _SHARP
        )
    return 0.0


def as_bounds(found: BallCertificate, row: Measurement) -> list[Bound]:
    """A certificate as bounds of the row of sigma at its centre."""
    about: Any = {"cite": theorems.DERIVED, "kind": "upper", "scope": "ball", "eps": found.eps}
    about |= {"id": row.id, "metric": "frobenius", "note": found.note or ""}
    bounds = (
        ("certificate", "‖f(X') − f(X)‖ ≤ L ‖X' − X‖", found.value),
        ("sigma_bound", "sigma anywhere in the ball", found.sigma_bound),
    )
    return [
        Bound(theorem=f"{name}_{found.ball}", statement=statement, value=value, **about)
        for name, statement, value in bounds
    ]


# --- certificates of decisions


def certify_decision(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    pool: Pooled | None = None,
    ball: DecisionBall = "joint",
    tokens: Sequence[int] | None = None,
    at_layer: int = 0,
    length: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> tuple[DecisionCertificate, ...]:
    """Certify how far tokens may move without changing a decision of a model or a layer.

    The decision is that of `OpenModel.decision`: the model's own class or next token, the nearest
    of some texts, or that of a read-out. Within the radius no move of the embeddings changes it.
    With ``map="attention"``, texts or a read-out decide on a single layer's pooled output.

    Holds for models that `read_network` supports, and for dot-product layers in closed form;
    deterministic, up to float64 rounding. Proofs: ``docs/theory/decision.md`` and, where an
    expansion of a layer does not fit, ``docs/theory/ball-certificate.md``. Dense: seconds for about
    256 coordinates, with a limit of 4 GB.

    A keyboard interrupt ends it: the last certificate holds the radius proved so far and is
    ``stopped``. The same request on the same folder continues from there.
    ``model`` and ``data`` are as for `measure`; ``between``, ``read_out``, ``pool``, ``at_layer``
    and ``length`` as for `OpenModel.decision`.

    Args:
        ball: ``joint``: all tokens together; ``each``: each of them by less than the radius;
            ``token``: each token alone, with one certificate per token.
        tokens: Indices of the tokens that may move; all if None.
        out: Run folder for the row of sigma, of the map ``margin``, ``model`` or ``attention``, and
            the radii; tokens in it are not certified again. Whole maps then need a model with its
            blocks in a list.
        progress: As for `certify`; called after each certificate. A bar also shows its steps.
        **options: Options of `measure` about the input and the solver; ``dtype`` float64. The map
            is ``model``, everything after the moves, or ``attention``, that layer alone.

    Raises:
        InputError: If the request cannot be answered.

    Source: derived here.
    """
    ball = argument(one_of(*BALLS), "ball", ball)
    if tokens is not None:
        tokens = [argument(whole_number(0, 10**6), "tokens", one) for one in items(tokens)]
    by = decides_by(between, read_out)
    asked: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    map = argument(one_of("model", "attention"), "map", asked.pop("map", "model"))
    check_double(asked)
    if length is None and is_text(data, asked):
        model = ready_model(model, **{name: asked[name] for name in _LOADING if name in asked})
        asked = {k: v for k, v in asked.items() if k not in ("tokenizer", "revision")}
        data = whole_input(model, data, special_tokens=asked.get("special_tokens", True))
    if by is None and map == "attention":
        raise InputError("A decision of a layer needs `between` or `read_out`. Found neither.")
    asked |= of_one_input(data, asked, length)
    beside = "margin" if by is None else map  # map of the row that a folder stores with the radii
    if map == "attention":
        asked["layers"] = [argument(whole_number(0, 10_000), "at_layer", at_layer)]
    none = out is None and map == "model"  # no row: no map is surveyed
    tell, more = as_callback(progress), {"maps": () if none else (beside,)}
    several = {"verb": "certify"}
    with LocalRun(model, data, asked, _DECISION, more=more, out=out, asked=several) as run:
        about: dict[str, Any] = {"between": between, "pool": pool, "at_layer": at_layer}
        about |= {"read_out": by.digests if isinstance(by, Classifier) else None}

        def find() -> dict[str, Any]:
            how: dict[str, Any] = {"pool": pool, "special_tokens": run.spec.special_tokens}
            if map == "attention" and by is not None:
                decision = decision_at_layer(run.at(run.jobs[0]), by, **how)
            else:
                (item,) = run.samples([0])
                decision = decision_at(run.model, item, by, at_layer=at_layer, **how)
            groups = decision.groups(ball, tokens)
            return {"keys": _certified_groups(run, decision, ball, groups, about, tell)}

        whole = about | {"ball": ball, "tokens": tokens}
        try:
            keys = run.once("decision", whole, find)["keys"]
        except _StoppedError as stopped:
            (keys,) = stopped.args
        return tuple(certificate_of(run.values(RADII)[key]) for key in keys)


class _StoppedError(Exception):
    """An interrupt, with the keys of the certificates found before."""


def _certified_groups(
    run: LocalRun,
    decision: ModelDecision,
    ball: DecisionBall,
    groups: Sequence[tuple[int, ...]],
    about: Mapping[str, Any],
    tell: Tell,
) -> list[str]:
    """Certify groups of tokens, store the certificates, and return their keys."""
    tell(0, len(groups), None)
    rows = run.rows(keep=False) if run.folder is not None else None
    id, found = None if rows is None else rows[0].id, dict[str, DecisionCertificate]()
    named: Any = {"id": id, "question": stable_id({**about, "id": id})}
    how: Any = {"held": run.values(RADII), "named": named, "progress": as_voice(tell), **about}
    try:
        for key, one, new in decision.certificates(ball, groups, **how):
            found[key] = one
            if new:
                run.keep_value(RADII, key, one)
            if one.stopped:
                raise _StoppedError([*found])
            tell(len(found), len(groups), None)
    finally:  # keep results even if a later token fails
        if rows is not None:
            run.keep(rows, rows[0], [one.as_bound() for one in found.values()])
    return [*found]
