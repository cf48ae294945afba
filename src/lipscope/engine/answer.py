"""One layer, one question: sigma, its interval, and which tokens carry it."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.engine.plan import Job
from lipscope.engine.ranges import COPIES, parse_tokens
from lipscope.engine.ready_model import ReferenceModel
from lipscope.engine.result import Answer, Found, explained, finite
from lipscope.engine.spec import Spec
from lipscope.errors import InputError, out_of_memory
from lipscope.linalg import (
    Operator,
    Product,
    TopSingular,
    bracketed,
    difference,
    frobenius_interval,
    leading,
    over_leading,
    restrict,
    start_named,
    top_singular_batch,
)
from lipscope.measures import own_operator
from lipscope.models import LayerMap

_PROBES = 16  # of the Frobenius norm; the interval narrows like their root
_LEAST_MEMORY = 2**22  # bytes below which a budget is not halved any more


def answer(
    layer: LayerMap,
    spec: Spec,
    job: Job,
    memory: int,
    key: str,
    itself: ReferenceModel | None = None,
) -> list[Answer]:
    """Answer a job for a layer, or for each of its heads.

    Args:
        layer: The map at its input.
        spec: The specification.
        job: What to measure.
        memory: Budget in bytes.
        key: Names the model, layer, length and sample; with the seed it fixes the starts.
        itself: The model itself between the map's ends; with it, the Jacobian is compared with
            its finite difference along the direction that was found.

    Returns:
        One answer, or one per head.

    Raises:
        InputError: If the two disagree.
    """
    heads: list[int | None] = [None]
    if spec.per_head and layer.num_heads is not None:
        heads = list(range(layer.num_heads))
    began = time.perf_counter()
    halved = memory
    while True:
        try:
            found = _Solve(layer, spec, job, halved, key, heads).answers(began, itself)
        except (RuntimeError, MemoryError) as problem:
            if out_of_memory(problem) and halved > _LEAST_MEMORY:
                halved //= 2
                continue
            seconds = (time.perf_counter() - began) / len(heads)
            return [_failed(layer, head, seconds, explained(problem)) for head in heads]
        if halved == memory:
            return found
        said = f"out of memory: done again with `memory = {halved / 2**20:.3g}MiB`"
        return [replace(one, notes=(*one.notes, said)) for one in found]


class _Solve:
    """The operators of one layer and the runs on them."""

    def __init__(
        self,
        layer: LayerMap,
        spec: Spec,
        job: Job,
        memory: int,
        key: str,
        heads: list[int | None],
    ) -> None:
        self.layer, self.spec, self.job = layer, spec, job
        self.memory, self.key, self.heads = memory, key, heads
        self.n = layer.x.shape[0]
        jacobian = self._jacobian()
        if not spec.per_head:
            jacobian = _as_batch_of_one(jacobian)
        self.jacobian = jacobian
        norms = layer.x.norm(dim=1)
        self.norms = norms
        rms = norms.square().mean().sqrt()
        # Where the input is zero, D is too: no token may move in proportion to its norm.
        unit = norms / rms if rms != 0 else norms
        self.scale = unit if job.metric == "token-relative" else None
        self.still = self.scale is not None and bool(rms == 0)
        self.move = self._index("move", spec.move, self.n)
        self.read = self._index("read", spec.read, jacobian.out_shape[-2])
        self.operator = restrict(jacobian, move=self.move, read=self.read, scale=self.scale)

    def _jacobian(self) -> Operator:
        """That of the map; for copies against each other, what tokens do by their own queries."""
        layer, options = self.layer, {"memory": self.memory, "per_head": self.spec.per_head}
        if self.spec.move != COPIES:
            return layer.linearise(layer.x, **options)
        if layer.attention is None:
            raise InputError(
                "`move = copies` needs weights that are read in closed form. Found a layer that "
                "is run again as it is."
            )
        return own_operator(layer.attention, layer.x, map=layer.map, **options)

    def _index(self, option: str, text: str, n: int) -> Tensor | None:
        chosen = parse_tokens(text, n, option)
        return None if chosen is None else torch.tensor(chosen, device=self.layer.x.device)

    def answers(self, began: float, itself: ReferenceModel | None) -> list[Answer]:
        tops = self._top(self.operator, "sigma")
        seconds = (time.perf_counter() - began) / len(self.heads)
        error, remark = self._beside(itself, tops) if itself is not None else (None, None)
        shares = [self._spread(_shares(top.v), self.move, self.n) for top in tops]
        rest = self._rest(shares, tops) if self.spec.rest else [(None, None)] * len(tops)
        average = self._averages(tops) if self.spec.average else [None] * len(tops)
        outputs = self._output_norms()
        return [
            Answer(
                head=head,
                top=top,
                num_tokens=self.n,
                input_norm=float(self.layer.x.norm()),
                output_norm=outputs[i],
                share_in=shares[i],
                share_out=self._spread(_shares(top.u), self.read, self.jacobian.out_shape[-2]),
                norms=[finite(float(x)) for x in self.norms],
                sigma_rest=rest[i][0],
                frobenius=_value(average[i]),
                derivative_error=error,
                seconds=seconds,
                notes=tuple(self._notes(top, rest[i][1], average[i], remark)),
                leading=self._leading(top) if self.spec.directions else (),
            )
            for i, (head, top) in enumerate(zip(self.heads, tops, strict=True))
        ]

    def _leading(self, top: TopSingular) -> tuple[Found, ...]:
        """The leading directions of all heads together, on all tokens."""
        if not top.sigma > 0:
            return ()
        found = leading(
            self.operator,
            top,
            lambda rank: self._generator(None, f"direction {rank}"),
            count=self.spec.directions,
            memory=self.memory // 2,
            **self.spec.solver(),
        )
        rows_out = self.jacobian.out_shape[-2]
        whole = [
            replace(one, v=_whole(one.v, self.move, self.n), u=_whole(one.u, self.read, rows_out))
            for one in found
        ]
        scale = 1.0 if self.scale is None else self.scale[:, None]
        return tuple(Found(one, one.v * scale) for one in whole)

    def _beside(
        self, itself: ReferenceModel, tops: list[TopSingular]
    ) -> tuple[float | None, str | None]:
        """How far ``J v`` is from the finite difference of the model; a remark."""
        e = self._direction(tops)
        product = self.jacobian.matvec(e.expand(len(self.heads), *e.shape))
        if self.layer.map == "heads":
            product = product.transpose(0, 1).flatten(1)
        else:
            product = product.sum(0)  # contributions, of which there is one without `per_head`
        if not bool(product.isfinite().all()):
            return None, None  # reported as non-finite by the solver
        product = self.layer.onward(product)
        found = difference(itself.function, self.layer.x.to(itself.dtype), e, product)
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
                "settle in its precision"
            )
        return found.error, None

    def _direction(self, tops: list[TopSingular]) -> Tensor:
        """The top right singular vector as a move of all tokens; a random one where none is."""
        best = max(tops, key=lambda top: top.sigma if math.isfinite(top.sigma) else -1.0)
        v = best.v.to(self.layer.x)
        if not bool(v.isfinite().all()) or not bool(v.any()):
            v = torch.randn(v.shape, generator=self._generator(None, "difference")).to(v)
        if self.scale is not None:
            v = v * (self.scale if self.move is None else self.scale[self.move])[:, None]
        return _whole(v, self.move, self.n)

    def _top(self, operator: Operator, purpose: str) -> list[TopSingular]:
        if self.job.metric in ("max-token", "infinity"):
            end = {"tol": self.spec.tol, "delta": self.spec.delta, "seed": self.job.seed}
            alone = [self._alone(operator, i) for i in range(len(self.heads))]
            return [bracketed(one, self.job.metric, **end) for one in alone]
        return top_singular_batch(
            operator,
            [self._generator(head, purpose) for head in self.heads],
            memory=self.memory // 2,
            **self.spec.solver(),
        )

    def _alone(self, op: Operator, index: int) -> Operator:
        """The operator of one head by itself."""

        def of(product: Product) -> Product:
            return over_leading(lambda e: product(e.expand(len(self.heads), *e.shape))[index], 2)

        return replace(op, matvec=of(op.matvec), rmatvec=of(op.rmatvec))

    def _generator(self, head: int | None, purpose: str) -> torch.Generator:
        """A start that depends on names only: not on batches, order or restarts."""
        name = f"{self.job.seed}|{self.key}|{self.job.map}|{head}|{self.n}|{purpose}"
        return start_named(name)

    def _notes(
        self,
        top: TopSingular,
        on_rest: str | None,
        average: tuple[float, str] | None,
        on_derivative: str | None,
    ) -> list[str]:
        words = [
            top.note,
            "the map's input is zero, so that no token moves in this metric"
            if self.still
            else None,
            self.layer.note,
            _of_copies(self.layer) if self.spec.move == COPIES else None,
            on_derivative,
            on_rest,
            average[1] if average is not None else None,
        ]
        return [w for w in words if w]

    def _rest(
        self, shares: list[list[float | None]], tops: list[TopSingular]
    ) -> list[tuple[float | None, str | None]]:
        """Sigma with each head's own top token held fixed, from a fresh start; a remark."""
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
        return [
            (
                finite(top.sigma),
                "sigma_rest may be too low: its steps ran out before the tolerance was met"
                if top.status == "max_steps"
                else None,
            )
            for top in self._top(held, "rest")
        ]

    def _averages(self, tops: list[TopSingular]) -> list[tuple[float, str] | None]:
        """``‖J‖_F`` of each head from Gaussian probes, with its interval in words."""
        generators = [self._generator(head, "average") for head in self.heads]
        total = torch.zeros(len(tops), dtype=torch.float64)
        for _ in range(_PROBES):
            z = torch.stack([torch.randn(self.operator.in_shape, generator=g) for g in generators])
            y = self.operator.matvec(z.to(self.operator.device, self.operator.dtype))
            total += y.double().square().sum(dim=(-2, -1)).cpu()
        values = (total / _PROBES).sqrt().tolist()
        return [
            None if top.status == "non_finite" else self._in_words(value, top)
            for value, top in zip(values, tops, strict=True)
        ]

    def _in_words(self, value: float, top: TopSingular) -> tuple[float, str]:
        low, high = frobenius_interval(value, top.upper, _PROBES, self.spec.delta)
        words = f"frobenius in [{low:.4g}, {high:.4g}] with probability 1 - 2 delta"
        if top.sigma > 0:  # the zero map has none
            words += f", stable rank {(value / top.sigma) ** 2:.3g}"
        return value, words

    def _output_norms(self) -> list[float | None]:
        if not self.spec.per_head:
            return [finite(float(self.layer.output.norm()))]
        with torch.no_grad():
            return [finite(float(part.norm())) for part in self.layer.head_outputs()]

    @staticmethod
    def _spread(shares: list[float | None], index: Tensor | None, n: int) -> list[float | None]:
        """Shares of the chosen tokens as shares of all; the others have none."""
        if index is None:
            return shares
        spread: list[float | None] = [0.0] * n
        for i, share in zip(index.tolist(), shares, strict=True):
            spread[i] = share
        return spread


def _whole(vector: Tensor, index: Tensor | None, n: int) -> Tensor:
    """Rows of some tokens as rows of all; those of the others are zero."""
    if index is None:
        return vector
    return vector.new_zeros(n, vector.shape[1]).index_copy(0, index, vector)


def _of_copies(layer: LayerMap) -> str | None:
    """What copies of a token share, where tokens are not alike."""
    one = layer.attention
    if one is None or not (one.positional or one.causal or one.window or one.mask is not None):
        return None
    return "copies of a token share its position and read what it reads"


def _as_batch_of_one(op: Operator) -> Operator:
    """Products with a leading axis of length one, without a loop over it."""
    return Operator(
        lambda e: op.matvec(e[0])[None],
        lambda g: op.rmatvec(g[0])[None],
        op.in_shape,
        op.out_shape,
        op.dtype,
        op.device,
    )


def _shares(vector: Tensor) -> list[float | None]:
    squared = vector.double().square().sum(dim=-1)
    return [finite(float(x)) for x in squared]


def _value(average: tuple[float, str] | None) -> float | None:
    return None if average is None else finite(average[0])


def _failed(layer: LayerMap, head: int | None, seconds: float, error: str) -> Answer:
    n = layer.x.shape[0]
    return Answer(
        head=head,
        top=None,
        num_tokens=n,
        input_norm=float(layer.x.norm()),
        output_norm=None,
        share_in=[None] * n,
        share_out=[None] * n,
        norms=[finite(float(x)) for x in layer.x.norm(dim=1)],
        seconds=seconds,
        error=error,
    )
