"""Answer for one layer: sigma, its interval, token shares, and the result row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import joined
from lipscope.display import rounded_down, rounded_up
from lipscope.engine.checks import COPIES, OF_TEXT, parse_tokens
from lipscope.engine.plan import Job, Shape, heads_one_by_one, row_id
from lipscope.engine.ready_model import ReferenceModel
from lipscope.engine.spec import REAL, Spec
from lipscope.errors import InputError, out_of_memory
from lipscope.linalg import (
    SPECTRAL,
    Leading,
    Operator,
    Product,
    TopSingular,
    Watch,
    bracketed,
    difference,
    frobenius_interval,
    leading,
    over_leading,
    restrict,
    start_named,
    together,
    top_singular_batch,
)
from lipscope.measures import own_operator
from lipscope.models import OF_MODELS, LayerMap, Sample
from lipscope.records import AGAIN, Finished, Measurement, TokenShare, version

_PROBES = 16  # for the Frobenius norm; the interval narrows like the inverse root of their number
_LEAST_MEMORY = 2**22  # bytes; smaller budgets are not halved further
_Remarked = tuple[float | None, str | None]  # a number, and a remark on it


@dataclass(frozen=True)
class LeadingMove:
    """A leading singular direction of a map, on all tokens."""

    of: Leading  # the direction; its vectors are zero on tokens that do not move or are not read
    move: Float[Tensor, "n d"]  # ``D v``, the corresponding move in the metric


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer for one layer, or one head."""

    head: int | None  # head, or None for all together
    num_tokens: int  # number of tokens of the input
    top: TopSingular | None = None  # the solver's result; None if the computation failed
    input_norm: float = math.nan  # ``‖X‖_F``
    output_norm: float | None = None  # ``‖f(X)‖_F`` (of the head's slice or contribution, per head)
    share_in: Sequence[float | None] = ()  # share of each token in the top right singular vector
    share_out: Sequence[float | None] = ()  # share of each output token in the left one
    norms: Sequence[float | None] = ()  # norm of each input token
    sigma_rest: float | None = None  # sigma with the top token held fixed, or None
    frobenius: float | None = None  # estimate of ``‖J‖_F``, or None
    # relative error of ``J v`` against a finite difference of the model, or None
    derivative_error: float | None = None
    seconds: float = 0.0  # solving time
    notes: tuple[str, ...] = ()  # remarks for the row
    error: str | None = None  # what failed, or None
    leading: tuple[LeadingMove, ...] = ()  # the leading directions, if requested

    def columns(self) -> dict[str, Any]:
        """The computed columns of the row."""
        top = self.top
        sigma = finite(top.sigma) if top is not None else None
        known = [s for s in self.share_in if s is not None]
        best = self.share_in.index(max(known)) if known else None
        norms = [x for x in self.norms if x is not None]
        relative = None
        if known and sigma is not None and self.output_norm:  # in the same metric
            relative = sigma * self.input_norm / self.output_norm
        same = ("sigma_rest", "frobenius", "derivative_error", "output_norm", "seconds", "error")
        return {name: getattr(self, name) for name in same} | {
            "sigma": sigma,
            "upper": finite(top.upper) if top is not None else None,
            "status": top.status if top is not None else "failed",
            "solver_residual": finite(top.solver_residual) if top is not None else None,
            "products": top.products if top is not None else 0,
            "relative": relative,
            "top_token": best,
            "top_share": self.share_in[best] if best is not None else None,
            "radius_max": max(norms) if norms else None,
            "radius_rms": math.sqrt(sum(x * x for x in norms) / len(norms)) if norms else None,
            "input_norm": finite(self.input_norm),
        }

    def token_shares(self, row_id: str, texts: Sequence[str] | None) -> list[TokenShare]:
        """One record per token of the window, with the id of its row."""
        if texts is not None and len(texts) != self.num_tokens:
            texts = None  # several streams, or patches: not the tokens of the text
        return [
            TokenShare(
                id=row_id,
                index=i,
                text=texts[i] if texts is not None else str(i),
                share_in=self.share_in[i],
                share_out=self.share_out[i] if i < len(self.share_out) else None,
                norm=self.norms[i],
            )
            for i in range(self.num_tokens)
        ]


def finite(value: float) -> float | None:
    """The number if it is finite, as JSON requires, else None."""
    return value if math.isfinite(value) else None


def explained(problem: Exception) -> str:
    """An error in one line, with a note if another run may succeed.

    Out-of-memory and file errors do not depend on the question.

    >>> explained(MemoryError("nothing left"))
    'MemoryError: nothing left; the next run tries it again'
    """
    kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
    text = " ".join(f"{kind}{problem}".split())[:300]
    cause = problem.__cause__ if isinstance(problem, InputError) else problem
    outside = cause is not None and (out_of_memory(cause) or isinstance(cause, OSError))
    return f"{text.rstrip('.')}; {AGAIN}" if outside else text


class Question(NamedTuple):
    """A job for a layer, or for each of its heads."""

    layer: LayerMap
    spec: Spec
    job: Job
    memory: int  # bytes
    key: str  # names the model, layer, length and sample; with the seed it determines the starts
    watch: Watch | None  # receives the intervals of sigma after every step; may stop the solver

    @property
    def heads(self) -> list[int | None]:
        """The heads to measure individually; None for all together."""
        if self.spec.per_head and self.layer.num_heads is not None:
            return list(range(self.layer.num_heads))
        return [None]


def answer(
    asked: Question,
    reference: Callable[[], ReferenceModel] | None = None,
    solved: Solve | None = None,
) -> list[Answer]:
    """Answer a question, retrying with less memory if it runs out.

    With a ``reference``, the model itself between the map's ends, the Jacobian is compared with its
    finite difference along the top direction; it is created after the solve. ``solved`` already
    has sigma.

    Raises:
        InputError: If Jacobian and finite difference disagree.
    """
    began, halved = time.perf_counter(), asked.memory
    while True:
        try:
            if solved is None:
                solved = Solve(asked._replace(memory=halved))
            found = solved.answers(reference)
        except (RuntimeError, MemoryError) as problem:
            if out_of_memory(problem) and halved > _LEAST_MEMORY:
                halved //= 2
                solved = None
                continue
            seconds, why = (time.perf_counter() - began) / len(asked.heads), explained(problem)
            return [_failed(asked.layer, head, seconds, why) for head in asked.heads]
        if halved == asked.memory:
            return found
        note = f"out of memory: repeated with `memory = {halved / 2**20:.3g}MiB`"
        return [replace(one, notes=(*one.notes, note)) for one in found]


class Solve:
    """Operators of one layer and their solves, with a heads axis (of size one for all heads)."""

    def __init__(self, asked: Question) -> None:
        self._began = time.perf_counter()
        self.layer, self.spec, self.job, self.memory, self.key, self.watch = asked
        self.heads, self.n = asked.heads, len(asked.layer.x)
        self.jacobian = self._jacobian()
        self.norms = self.layer.x.norm(dim=1)
        rms = self.norms.square().mean().sqrt()
        # A zero input has D = 0: no token can move in proportion to its norm.
        unit = self.norms / rms if rms != 0 else self.norms
        self.scale = unit if self.job.metric == "token-relative" else None
        self.still = self.scale is not None and bool(rms == 0)
        self.rows_out = self.jacobian.out_shape[-2]
        self.move = self._index("move", self.spec.move, self.n)
        self.read = self._index("read", self.spec.read, self.rows_out)
        self.operator = restrict(self.jacobian, move=self.move, read=self.read, scale=self.scale)
        self.tops: list[TopSingular] | None = None
        self.seconds = 0.0  # per head

    def solve(self) -> list[TopSingular]:
        """Sigma of all heads together, or of each head."""
        tops = self._top(self.operator, "sigma")
        self.keep(tops, (time.perf_counter() - self._began) / len(self.heads))
        return tops

    def keep(self, tops: list[TopSingular], seconds: float) -> None:
        """Store sigma and the time per head."""
        self.tops, self.seconds = tops, seconds

    def _jacobian(self) -> Operator:
        """The Jacobian of the map; for ``copies``, its part through each token's own query."""
        layer, options = self.layer, {"memory": self.memory, "per_head": self.spec.per_head}
        if self.spec.move != COPIES:
            return layer.linearise(layer.x, **options)
        if layer.attention is None:
            raise InputError(
                "`move = copies` needs weights that are read in closed form. Found a layer without "
                "them."
            )
        return own_operator(layer.attention, layer.x, map=layer.map, **options)

    def _index(self, option: str, text: str, n: int) -> Tensor | None:
        chosen = parse_tokens(text, n, option)
        return None if chosen is None else torch.tensor(chosen, device=self.layer.x.device)

    def answers(self, reference: Callable[[], ReferenceModel] | None) -> list[Answer]:
        """The answers, checked against the model itself."""
        tops = self.tops or self.solve()
        error, remark = self._beside(reference(), tops) if reference is not None else (None, None)
        shares = [_token_shares(_embedded(top.v, self.move, self.n)) for top in tops]
        nothing: list[_Remarked] = [(None, None)] * len(tops)
        rest = self._rest(shares, tops) if self.spec.rest else nothing
        average = self._averages(tops) if self.spec.average else nothing
        outputs = self._output_norms()
        about = [
            "the map's input is zero, so no token moves in this metric" * self.still,
            self.layer.note,
            self._of_copies(),
            remark,
        ]
        return [
            Answer(
                head=head,
                top=top,
                num_tokens=self.n,
                input_norm=float(self.layer.x.norm()),
                output_norm=outputs[i],
                share_in=shares[i],
                share_out=_token_shares(_embedded(top.u, self.read, self.rows_out)),
                norms=_finite_values(self.norms),
                sigma_rest=rest[i][0],
                frobenius=average[i][0],
                derivative_error=error,
                seconds=self.seconds,
                notes=(*filter(None, (top.note, *about, rest[i][1], average[i][1])),),
                leading=self._leading(top) if self.spec.directions else (),
            )
            for i, (head, top) in enumerate(zip(self.heads, tops, strict=True))
        ]

    def _leading(self, top: TopSingular) -> tuple[LeadingMove, ...]:
        """The leading directions of all heads together, on all tokens."""
        if not top.sigma > 0:
            return ()
        found = leading(
            self.operator,
            top,
            lambda rank: self.generator(None, f"direction {rank}"),
            count=self.spec.directions,
            memory=self.memory // 2,
            tol=self.spec.tol,
            delta=self.spec.delta,
        )
        whole = [
            replace(
                one,
                v=_embedded(one.v, self.move, self.n),
                u=_embedded(one.u, self.read, self.rows_out),
            )
            for one in found
        ]
        scale = 1.0 if self.scale is None else self.scale[:, None]
        return tuple(LeadingMove(one, one.v * scale) for one in whole)

    def _beside(self, reference: ReferenceModel, tops: list[TopSingular]) -> _Remarked:
        """The error of ``J v`` against a finite difference of the model, and a remark."""
        e, product = self._direction(tops)
        if not bool(product.isfinite().all()):
            return None, None  # reported as non-finite by the solver
        product = self.layer.onward(product)
        x = self.layer.x.to(reference.dtype)
        found = None
        if reference.quick is not None:
            with suppress(InputError, *OF_MODELS):  # blocks may depend on those below them
                found = difference(reference.quick, x, e, product)
        if found is None or found.status != "agrees":
            found = difference(reference.function, x, e, product)
        if found.sides is not None:
            raise InputError(
                f"The map `{self.layer.map}` should have a derivative at its input. Found that it "
                f"changes by {found.sides[0]:.4g} per unit one way and by {found.sides[1]:.4g} "
                "the other, however small the step: a maximum of equal values, as of a max-pooling "
                "after a ReLU, or a ReLU at zero. Measure other `layers` or another input."
            )
        if found.status == "disagrees":
            raise InputError(
                f"The Jacobian of the map `{self.layer.map}` should be the derivative of the model "
                f"itself. Found |J v| = {found.product:.4g} where a finite difference gives "
                f"{found.quotient:.4g} ({found.error:.2g} apart): gradients are cut here, not "
                "everything that depends on the input moved, scores are so large that their "
                "rounding shows, or the model has another attention than the eager one that is "
                "differentiated; so nothing is measured."
            )
        if found.status == "unsettled":
            return finite(found.error), (
                "the derivative could not be checked: finite differences of the model do not "
                "converge in its precision"
            )
        return found.error, None

    def _direction(self, tops: list[TopSingular]) -> tuple[Tensor, Tensor]:
        """The top right singular vector ``v`` as a move of all tokens, and ``J v``.

        If there is no such vector, a random move.
        """
        best = max(tops, key=lambda top: top.sigma if math.isfinite(top.sigma) else -1.0)
        v = best.v.to(self.layer.x)
        known = bool(v.isfinite().all()) and bool(v.any())
        if not known:
            v = torch.randn(v.shape, generator=self.generator(None, "difference")).to(v)
        if self.scale is not None:
            v = v * (self.scale if self.move is None else self.scale[self.move])[:, None]
        e = _embedded(v, self.move, self.n)
        if known and len(tops) == 1 and self.read is None and self.job.metric in SPECTRAL:
            return e, best.sigma * best.u  # checks the solver's own result against the model
        product = self.jacobian.matvec(e.expand(len(self.heads), *e.shape))
        if product.shape[-1] < self.layer.output.shape[-1]:  # slices: no projection
            return e, product.transpose(0, 1).flatten(1)
        return e, product.sum(0)  # contributions of heads; only one without `per_head`

    def _top(self, operator: Operator, purpose: str) -> list[TopSingular]:
        if self.job.metric not in SPECTRAL:
            end = {"tol": self.spec.tol, "delta": self.spec.delta, "seed": self.job.seed}
            alone = [self._alone(operator, i) for i in range(len(self.heads))]
            return [bracketed(one, self.job.metric, **end) for one in alone]
        return top_singular_batch(
            operator,
            [self.generator(head, purpose) for head in self.heads],
            memory=self.memory // 2,
            watch=self.watch if purpose == "sigma" else None,
            tol=self.spec.tol,
            delta=self.spec.delta,
        )

    def _alone(self, op: Operator, index: int) -> Operator:
        """The operator of a single head."""

        def of(product: Product) -> Product:
            return over_leading(lambda e: product(e.expand(len(self.heads), *e.shape))[index], 2)

        return replace(op, matvec=of(op.matvec), rmatvec=of(op.rmatvec))

    def generator(self, head: int | None, purpose: str) -> torch.Generator:
        """A random start that depends on names only, not on batches, order or restarts."""
        name = f"{self.job.seed}|{self.key}|{self.job.map}|{head}|{self.n}|{purpose}"
        return start_named(name)

    def _rest(self, shares: list[list[float | None]], tops: list[TopSingular]) -> list[_Remarked]:
        """Sigma with each head's top token held fixed, from a fresh start, and a remark."""
        if all(top.status == "non_finite" for top in tops):
            return [(None, None)] * len(tops)
        allowed = range(self.n) if self.move is None else [int(i) for i in self.move]
        if len(allowed) == 1:
            return [(0.0, None)] * len(tops)
        kept = []
        for share in shares:
            top_token = max(allowed, key=lambda i: share[i] or 0.0)
            kept.append([i for i in allowed if i != top_token])
        index = torch.tensor(kept, device=self.layer.x.device)
        if len(kept) == 1:
            index = index[0]
        held = restrict(self.jacobian, move=index, read=self.read, scale=self.scale)
        low = "sigma_rest may be too low: maximum number of steps reached before the tolerance"
        return [
            (finite(top.sigma), low if top.status == "max_steps" else None)
            for top in self._top(held, "rest")
        ]

    def _averages(self, tops: list[TopSingular]) -> list[_Remarked]:
        """``‖J‖_F`` of each head: ``‖J v‖``, and Gaussian probes of the rest, with its interval."""
        generators = [self.generator(head, "average") for head in self.heads]
        total = torch.zeros(len(tops), dtype=torch.float64)
        v = torch.stack([top.v for top in tops]).nan_to_num().cpu()
        for _ in range(_PROBES):
            z = torch.stack([torch.randn(self.operator.in_shape, generator=g) for g in generators])
            z = z - v * (v * z).sum(dim=(-2, -1), keepdim=True)
            y = self.operator.matvec(z.to(self.operator.device, self.operator.dtype))
            total += y.double().square().sum(dim=(-2, -1)).cpu()
        values = (total / _PROBES).sqrt().tolist()
        return [
            (None, None) if top.status == "non_finite" else self._in_words(value, top)
            for value, top in zip(values, tops, strict=True)
        ]

    def _in_words(self, rest: float, top: TopSingular) -> _Remarked:
        low, high = frobenius_interval(rest, top.upper, _PROBES, self.spec.delta)
        low, value, high = (
            math.hypot(*pair) for pair in ((top.sigma, low), (top.sigma, rest), (top.upper, high))
        )
        ends = f"[{rounded_down(low):.4g}, {rounded_up(high):.4g}]"
        words = f"frobenius in {ends} with probability 1 - 2 delta"
        if top.sigma > 0:  # the zero map has none
            words += f", stable rank {(value / top.sigma) ** 2:.3g}"
        return finite(value), words

    def _output_norms(self) -> list[float | None]:
        if not self.spec.per_head:
            return [finite(float(self.layer.output.norm()))]
        with torch.no_grad():
            return [finite(float(part.norm())) for part in self.layer.head_outputs()]

    def _of_copies(self) -> str | None:
        """A remark on what copies of a token share, if positions differ."""
        one = self.layer.attention
        if self.spec.move != COPIES or one is None:
            return None
        if not (one.positional or one.causal or one.window or one.mask is not None):
            return None
        return "copies of a token share its position and read what it reads"


def solved_together(questions: Sequence[Question], found: Callable[[int, Solve], None]) -> None:
    """Solve layers of one specification; layers of equal structure share their products.

    ``found`` is called with the index of each question and its solve as it finishes.
    """
    began = time.perf_counter()
    solves = [Solve(one) for one in questions]
    first = solves[0]

    def join(some: Sequence[int]) -> Operator | None:
        jacobian = joined([solves[i].jacobian for i in some])
        scales = [scale for i in some if (scale := solves[i].scale) is not None]
        scale = torch.stack(scales) if scales else None
        if jacobian is None:
            return None
        return restrict(jacobian, move=first.move, read=first.read, scale=scale)

    shared = together(join, [one.operator for one in solves])
    if shared is None:
        for i, one in enumerate(solves):
            one.solve()
            found(i, one)
        return

    spent, left, last = 0.0, len(solves), began

    def keep(i: int, top: TopSingular) -> None:
        nonlocal spent, left, last
        now = time.perf_counter()
        spent, left, last = spent + (now - last) / left, left - 1, now
        solves[i].keep([top], spent)  # their sum is the time of the batch
        found(i, solves[i])

    def watch(now: Callable[[], Sequence[tuple[float, float]]]) -> None:
        for i, one in enumerate(solves):
            if one.watch is not None and one.tops is None:
                one.watch(lambda i=i: now()[i : i + 1])

    top_singular_batch(
        shared,
        [one.generator(None, "sigma") for one in solves],
        memory=first.memory // 2,
        watch=watch,
        found=keep,
        tol=first.spec.tol,
        delta=first.spec.delta,
    )


def _embedded(vector: Tensor, index: Tensor | None, n: int) -> Tensor:
    """Rows of selected tokens as rows of all tokens; others are zero, unknown without a vector."""
    if index is None:
        return vector
    rest = math.nan if bool(vector.isnan().any()) else 0.0
    return vector.new_full((n, vector.shape[1]), rest).index_copy(0, index, vector)


def _finite_values(values: Tensor) -> list[float | None]:
    return [finite(float(x)) for x in values]


def _token_shares(vector: Tensor) -> list[float | None]:
    return _finite_values(vector.double().square().sum(dim=-1))


def _failed(layer: LayerMap, head: int | None, seconds: float, error: str) -> Answer:
    """The answer for a failed layer, of which only the tokens are known."""
    none = [None] * len(layer.x)
    return Answer(
        head=head,
        num_tokens=len(layer.x),
        input_norm=float(layer.x.norm()),
        share_in=none,
        share_out=none,
        norms=_finite_values(layer.x.norm(dim=1)),
        seconds=seconds,
        error=error,
    )


# --- rows for tables, figures and pages


def row_of(
    spec: Spec,
    job: Job,
    reply: Answer,
    about: Mapping[str, Any],
    *,
    of: LayerMap | None = None,
    item: Sample | None = None,
    device: str | None = None,
    notes: Iterable[str] = (),
) -> Measurement:
    """The row of an answer to a job, with details of its map and input if available.

    ``about`` is `LoadedModel.about`, if known; ``notes`` are remarks on the model.
    """
    model, weights = spec.models[job.model], about.get("weights", "unknown")
    if job.weights is not None and weights in ("random", "unknown"):
        weights = f"random, seed {job.weights}"
    usual = "image" if spec.images is not None else OF_TEXT
    same_in_job = ("layer", "map", "metric", "sample", "dtype", "seed")
    same_in_spec = ("move", "read", "side", "position_offset", "delta")
    return Measurement(
        id=row_id(job.id, reply.head),
        model=model.name,
        revision=about.get("revision"),
        weights=weights,
        head=reply.head,
        input=item.kind if item is not None else usual if job.input == REAL else job.input,
        num_tokens=reply.num_tokens,
        start=getattr(item, "start", None),
        device=device or spec.device,
        tokens_sha256=getattr(item, "sha256", ""),
        version=version(),
        note="; ".join([*notes, *reply.notes]) or None,
        text=job.text or None,
        step=model.step,
        **{name: getattr(of, name, None) for name in ("module", "argument", "projection")},
        trained_length=about.get("trained_length"),
        **{name: getattr(job, name) for name in same_in_job},
        **{name: getattr(spec, name) for name in same_in_spec},
        **reply.columns(),
    )


def failed_rows(
    spec: Spec, job: Job, shape: Shape, error: str, about: Mapping[str, Any]
) -> list[Finished]:
    """The rows of a failed job: one, or one per head."""
    text = error if error.endswith(AGAIN) else " ".join(error.split())[:300]
    answers = [
        Answer(head=head, num_tokens=job.num_tokens or 0, error=text)
        for head in heads_one_by_one(job, shape)
    ]
    return [Finished(row_of(spec, job, one, about)) for one in answers]
