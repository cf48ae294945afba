"""Attention over an ellipsoid of inputs: bounds of its weights and of changes of derivatives.

Computed on balls with a grid of radii. Derived here; proofs: ``docs/theory/decision.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lipscope.certificates.attention_at import (
    TINY,
    AttentionAt,
    Bend,
    extreme_mean,
    extreme_size,
    graded,
)
from lipscope.certificates.forms import (
    RowForm,
    about,
    added,
    norm_above,
    top_value,
    weighted_gram,
)

_LOST = 1e-200  # total weight of keys below which their relative weights are unknown
_PAIRS = 2_000_000  # maximum number of key pairs of a row for cached logit differences
PIECES = 16  # number of radii of the grid


class Reach:
    """Bounds of the weights over each ball ``b`` of a grid of radii."""

    def __init__(
        self, at: AttentionAt, radius: Tensor, upper: Tensor, lower: Tensor, first: Tensor
    ) -> None:
        p, r = at.p, radius[:, None, None]
        self.radius = radius  # (b,)
        self.upper, self.lower = upper, lower  # U, L, (b, h, i, j)
        self.change = torch.maximum(upper - p, p - lower).clamp_min(0)  # D >= |P' - P|
        # tv >= sum_j |P' - P|, (b, h, i)
        self.total = 2 * torch.minimum((upper - p).sum(-1), (p - lower).sum(-1)).clamp_min(0)
        # >= |P' - P - P a(e)|
        beyond = p * (first + at.bend * r[..., None].square())
        moved = self.change + p * at.a.norm(dim=-1) * r[..., None]
        self.beyond = torch.minimum(beyond, moved)
        self.key_upper, self.key_change = (graded(at.key_spread, w) for w in (upper, self.change))
        # sum_j varied_j g_j^2 >= Var'(g) if g_j = 0 for fixed keys, (b, h, i, j); for a single key
        # the largest p (1 - p)
        largest = torch.maximum(upper * (1 - upper), lower * (1 - lower))
        largest = torch.where((lower < 0.5) & (upper > 0.5), 0.25, largest)
        self.varied = torch.where(at.single, largest, upper)
        # sd'(alpha), (E' alpha^2)^(1/2), and by D
        self.own_bent = 2 * r * at.bent_rows(self.varied, self.key_upper)
        self.mean_bent = 2 * r * at.bent_rows(upper, self.key_upper)
        self.change_bent = 2 * r * at.bent_rows(self.change, self.key_change)
        self.spread_upper, self.spread_change, self.spread_beyond = (
            graded(at.spread, w) for w in (upper, self.change, self.beyond)
        )
        self.path = (r[0] * (self.spread_upper + self.own_bent)).cumsum(0)  # of sd'(velocity)
        length = torch.minimum(self.change.norm(dim=-1), self.total / 2**0.5)
        self.length = torch.minimum(length, upper.amax(-1).sqrt() * self.path)  # >= |P' - P|_2
        # for keys with moving values: the same, and the largest entry of varied
        self.value_length = torch.minimum(self.length, (self.change * at.carries).norm(dim=-1))
        self.carried = (self.varied * at.carries).amax(-1)

    def of(self, balls: Bool[Tensor, " b"]) -> Reach:
        """Select some of the balls."""
        found = copy.copy(self)
        vars(found).update({name: value[balls] for name, value in vars(self).items()})
        return found


class AttentionBall:
    """A layer at a centre, over balls with a grid of radii up to ``r``."""

    def __init__(self, at: AttentionAt, radius: float, pieces: int = PIECES) -> None:
        self.at, self.radius, self.pieces = at, radius, pieces
        self.centre = at.spread(at.p), at.bent_rows(at.p, at.key_spread(at.p))
        r = at.p.new_tensor([radius * (k + 1) / pieces for k in range(pieces)])
        some = r.split(max(1, _PAIRS // at.apart.numel()))
        upper, lower, first = map(torch.cat, zip(*map(self._weights, some), strict=True))
        self.grid = Reach(at, r, upper, lower, first)

    def _weights(self, radius: Float[Tensor, " b"]) -> tuple[Tensor, Tensor, Tensor]:
        """``U``, ``L`` and ``|P'/P - 1 - s'|`` for each ball."""
        at, p, r = self.at, self.at.p, radius[:, None, None, None]
        s = at.a.norm(dim=-1) * r + at.bend * r.square()
        spread, bent = self.centre
        v = spread * r[..., 0] + bent * r[..., 0].square()
        # the logits' changes have P-mean 0: Jensen below, Bennett above
        z = 1 + v.square() * _bennett(s.amax(-1))  # infinite or NaN: no bound yet
        r = r[..., None]
        apart = at.apart * r + at.bend_apart * r.square()
        # an underflowed weight is not zero and has no effect on others
        log = p.clamp_min(TINY).log()
        ratio = log.masked_fill(at.hidden, -torch.inf)[..., None, :] - log[..., :, None]
        others = ratio.masked_fill((p < TINY)[..., None, :], -torch.inf)
        upper = torch.minimum(
            (p.clamp_min(TINY) * s.exp()).clamp_max(1), torch.exp(-(others - apart).logsumexp(-1))
        )
        lower = torch.maximum(
            p * (-s).exp() / z[..., None], torch.exp(-(ratio + apart).logsumexp(-1))
        )
        upper, lower = (w.masked_fill(at.hidden, 0.0) for w in (upper, lower))
        return upper, lower, torch.maximum(torch.expm1(s) - s, s.exp() * (1 - 1 / z)[..., None])

    # --- change of the Jacobian

    def change_of(
        self, reads: Float[Tensor, "i g k d"], lead: Float[Tensor, "i g"] | None = None
    ) -> Float[Tensor, "b i g"]:
        """``>= ‖R_ig (J(x) - J(x_0)) T‖`` for every group of read-outs of a row, on each ball.

        ``lead`` bounds the second derivatives at the centre, ``sup |R_ig H[e, f]|``.
        """
        return self.with_lead(*self.changes_of(reads), lead)

    def with_lead(
        self, plain: Float[Tensor, "b i g"], rest: Float[Tensor, "b i g"], lead: Tensor | None
    ) -> Float[Tensor, "b i g"]:
        """`change_of` from the results of `changes_of`."""
        if lead is None:
            return plain
        return torch.minimum(plain, self.grid.radius[:, None, None] * lead + rest)

    def changes_of(
        self, reads: Float[Tensor, "i g k d"]
    ) -> tuple[Float[Tensor, "b i g"], Float[Tensor, "b i g"]]:
        """`change_of` without ``lead``, and the remainder to add to ``lead``."""
        at, one = self.at, self.grid
        w = torch.einsum("igkd,hdv->higkv", reads, at.output)
        y = torch.einsum("igkd,hijd->higjk", reads, at.v)  # values read

        def x(t: Tensor) -> Tensor:
            return t[:, :, :, None]

        r, upper, change = one.radius[:, None, None, None], x(one.upper), x(one.change)
        if reads.shape[2] == 1:  # a single read-out: rank 1
            w1, alone = w[:, :, :, 0], y[..., 0]
            of_values = torch.einsum("higv,hjvlu,higu->higjl", w1, at.gram_value, w1)
            size = top_value(of_values).sqrt()
            c_upper, c_change, c_beyond = (
                torch.einsum("bhij,higj->bhig", w, alone.square()).sqrt()
                for w in (one.upper, one.change, one.beyond)
            )
            lower = x(one.lower)
            mean = extreme_size(alone, lower, upper)
            largest = alone.abs().amax(-1) + mean
            c_upper = torch.minimum(c_upper, extreme_mean(alone.square(), lower, upper).sqrt())
        else:
            size = norm_above(reads)[None] * at.read_norms[:, None, None]
            size = torch.minimum(size, norm_above(w) * at.value_norms[:, None, None])
            gram = torch.einsum("higjk,higlk->higjl", y, y)
            c_upper, c_change, c_beyond = (
                graded(lambda w: _top_weighted(gram, w).sqrt(), x(w))
                for w in (one.upper, one.change, one.beyond)
            )
            largest = y.norm(dim=-1)
            mean = (change * largest).sum(-1)
            largest = largest.amax(-1) + mean
        f = x(1 + one.total)
        shared = size * r * x(one.carried.sqrt())
        plain = size * x(one.value_length) + c_upper * x(one.own_bent)
        plain = plain + torch.minimum(
            f * c_change * x(one.spread_change), largest * x(one.path * one.spread_upper)
        )
        plain = plain + shared * x(one.spread_upper + one.own_bent)
        rest = size * x((one.beyond * at.carries).norm(dim=-1)) + c_beyond * x(one.spread_beyond)
        # |E'y|: a moved mean multiplies E'a and, as bends are not centred, all of E'alpha
        mean = torch.minimum(
            mean, torch.minimum(x(one.total.sqrt()) * c_change, x(one.path) * c_upper)
        )
        rest = rest + mean * x(one.path * one.spread_upper)
        rest = rest + torch.minimum(
            c_change * x(one.change_bent) + mean * x(one.mean_bent),
            largest * x(one.path * one.own_bent),
        )
        rest = rest + size * r * x(_uneven(one, at) * one.spread_change)
        rest = rest + shared * x(one.own_bent)
        return plain.sum(1), rest.sum(1)

    def joint_change(
        self,
        reads: Float[Tensor, "i k d"],
        shares: Float[Tensor, " b"],
        lead: Callable[[], Tensor | None] = lambda: None,
    ) -> Float[Tensor, "p p"]:
        """``F``: ``sum_b shares_b |R (J(x_b) - J(x_0)) T f| <= (f^T F f)^(1/2)``, x_b in ball b.

        ``lead`` gives ``G``, ``sum_ik |H_ik f|^2 <= f^T G f`` at the centre, or None.
        """
        at, used = self.at, shares > 0
        one, shares = self.grid.of(used), shares[used]
        seen = torch.einsum("ikd,hdv->hikv", reads, at.output)
        metric = seen.mT @ seen  # (h, i, v, v)
        y = torch.einsum("ikd,hijd->hijk", reads, at.v)
        gram = y @ y.mT
        c_upper, c_change, c_beyond = (
            _top_weighted(gram, w) for w in (one.upper, one.change, one.beyond)
        )
        largest = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        largest = largest.amax(-1) + (one.change * largest).sum(-1)
        outer = torch.minimum(
            norm_above(metric).sqrt() * at.value_norms[:, None],
            norm_above(reads) * at.read_norms[:, None],
        )
        carried = (outer * one.radius[:, None, None]).square()
        shared, squares = carried * one.carried, one.path.square()

        def values(*each: Tensor) -> RowForm:
            averages = (self._averages(w, metric, shares) for w in each)
            return at.form(rest=min(averages, key=lambda form: float(form.trace())))

        def velocities(*each: tuple[Tensor, Tensor]) -> RowForm:
            """``sum w_hij <a_hij, f>^2``, averaged: the form of smallest trace."""
            weights = (c.sum(1, keepdim=True)[..., None] * w for c, w in each)
            means = [_averaged(w, (w * at.sizes).flatten(1).sum(1), shares) for w in weights]
            return at.form(min(means, key=lambda w: float((w * at.sizes).sum())))

        def bends(c: Tensor, w: Tensor, key_w: Tensor) -> RowForm:
            whole = c.sum(1, keepdim=True).expand_as(c)
            far = one.radius.square()
            sizes = far * (whole * key_w.square()).flatten(1).sum(1)
            return self._bent(far * _evened(sizes, shares), whole, w, key_w)

        by_mean, moved = squares[..., None] * one.varied, one.change * at.carries
        beyond = one.beyond * at.carries
        plain = [
            values(moved.sum(-1, keepdim=True) * moved, by_mean),
            velocities(
                (c_change * (1 + one.total).square(), one.change),
                (largest.square() * squares, one.upper),
            ),
            bends(c_upper, one.varied, one.key_upper),
            velocities((shared, one.upper)),
            bends(shared, one.varied, one.key_upper),
        ]
        # |E'y|^2: a moved mean multiplies E'a and, as bends are not centred, all of E'alpha
        mean = torch.minimum(one.total * c_change, squares * c_upper)
        rest = [
            values(beyond.sum(-1, keepdim=True) * beyond),
            velocities((c_beyond, one.beyond)),
            velocities((mean * squares, one.upper)),
            *min(
                [
                    bends(c_change, one.change, one.key_change),
                    bends(mean, one.upper, one.key_upper),
                ],
                [bends(largest.square() * squares, one.varied, one.key_upper)],
                key=_sizes,
            ),
            velocities((carried * _uneven(one, at).square(), one.change)),
            plain[-1],
        ]
        if _sizes(rest) < _sizes(plain) and (first := lead()) is not None:
            exact = [at.form(rest=(shares @ one.radius).square() * first), *rest]
            plain = min(plain, exact, key=_sizes)
        return added(plain).matrix()

    def _averages(
        self, w: Float[Tensor, "b h i j"], metric: Float[Tensor, "h i v v"], shares: Tensor
    ) -> Float[Tensor, "p p"]:
        """Average of ``sum_i (sum_h (sum_j w_hij |R_i V_hj f|^2)^(1/2))^2``."""
        at = self.at
        each = torch.einsum("bhij,hivu->bhjvu", w, metric)
        flat = at.value.flatten(1, 2)
        sizes = torch.einsum("bhjvu,hjvju->bh", each, at.gram_value).clamp_min(0)
        heads = sizes.sqrt() + TINY
        heads = heads / heads.sum(1, keepdim=True)
        each = _averaged(each / heads[:, :, None, None, None], (sizes / heads).sum(1), shares)
        rows = torch.einsum("hjvu,hjup->hjvp", each, at.value).flatten(1, 2)
        return torch.einsum("hvp,hvq->pq", flat, rows)

    # --- change of the Hessian

    def hessian_change(self, bend: Bend, shares: Float[Tensor, " b"]) -> Float[Tensor, "p p"]:
        """``sum_b shares_b Q_b``, ``H(x) >= H(x_0) - Q_b`` for every x in ball b of the grid."""
        at, used, y = self.at, shares > 0, bend.y
        one, shares = self.grid.of(used), shares[used]
        r, upper, lower, change = one.radius[:, None, None], one.upper, one.lower, one.change

        def shared(w: Tensor) -> Tensor:
            return torch.einsum("b,b...->...", shares, w)

        def of_n(n: Tensor, w: Tensor) -> RowForm:
            return at.form(rest=weighted_gram(n.flatten(0, 2), shared(w).flatten()))

        def of_a(w: Tensor) -> RowForm:
            return at.form(shared(w))

        mean = extreme_size(y, lower, upper)  # |E'y|
        own = bend.n.norm(dim=-1)
        moved = r * torch.minimum(bend.size * one.value_length, (change * own).sum(-1))
        wider = own * r[..., None] + (moved + mean)[..., None]  # |y' - y|
        large = y.abs() + wider
        # 2 (Cov' - Cov)(n, a)
        rows = (~at.lone)[..., None].to(upper.dtype)  # lone rows have a form of their own
        c = rows * change * (1 + one.total)[..., None]
        q = _product(of_n(bend.n, c), of_a(c))
        q = q + at.form(rest=self._of_lone(bend, one, shares))
        # E'[y' a^2] - E[y a^2] without means; or all of both, if y' is at least -fall
        deviation = extreme_mean(large.square(), lower, upper).sqrt()
        each = change * y.abs() + upper * wider + 2 * self._mean_moved(one, deviation)
        above = moved + extreme_mean(y, lower, upper)
        fall = (own * r[..., None] + above[..., None] - y).amax(-1).clamp_min(0)
        whole = at.p * y + upper * fall[..., None]
        less = (whole * at.sizes).sum(-1) < (each * at.sizes).sum(-1)
        q = q + of_a(rows * torch.where(less[..., None], whole, each))
        # rows with a moving query bend: 2 Cov'(n, alpha), and E'[y' ((a + alpha)^2 - a^2)]
        turns = (at.norm_query > 0).to(upper.dtype)
        most = turns * torch.where(less, fall, large.amax(-1))
        alone = at.single.any(-1)[..., None]
        n = torch.where(alone[..., None], bend.read, bend.n)  # variances of a single key
        w = turns[..., None] * torch.where(alone, at.single * one.varied, upper)
        far = shares * one.radius.square()
        bent = self._bent(far, turns.expand_as(most), one.varied, one.key_upper)
        q = q + _product(of_n(n, w), bent)
        bent = self._bent(far, most, one.varied, one.key_upper)
        q = q + bent + _product(of_a(most[..., None] * upper), bent)
        # 2 (Cov' - Cov)(y, q) and 2 Cov'(n(e), q)
        gram = n @ n.mT
        size = r * graded(lambda w: _top_weighted(gram, w).sqrt(), w)
        w = turns[..., None] * (change * y.abs() + mean[..., None] * upper)
        if at.turns is not None:
            where, _, forms = at.turns
            w = shared(w + size[..., None] * one.varied.sqrt())
            return q.matrix() + 2 * torch.einsum("m,mpq->pq", w[where], forms)
        q = q + _product(at.form(queries=shared(w.sum(-1))), at.form(keys=shared(w.sum(-2))))
        keys = torch.einsum("b,bhi,bhij->hj", shares, size, one.varied)
        return (q + _product(at.form(queries=shared(size)), at.form(keys=keys))).matrix()

    def _bent(
        self, shares: Tensor, c: Float[Tensor, "b h i"], w: Float[Tensor, "b h i j"], key_w: Tensor
    ) -> RowForm:
        """``sum shares_b c_hi sum_j w_hij alpha_j(e, f)^2`` for unit ``e``, as a form in ``f``.

        ``key_w``: the `key_spread` of ``w``.
        """
        at, each = self.at, torch.einsum("b,bhi,bhij->hij", shares, c, w)
        if at.turns is not None:
            where, squares, _ = at.turns
            return at.form(rest=4 * torch.einsum("m,mpq->pq", each[where], squares))
        # <Q e, K f>^2, for all rows of a head jointly or for each separately; <Q f, K e>^2
        rows = torch.einsum("b,bhi->hi", shares, c)
        most = torch.where(rows[..., None] > 0, each / rows[..., None], 0.0).amax(-2)
        together = at.of_heads(rows).square()[:, None] * most
        each = (at.norm_query.square()[..., None] * each).sum(-2)
        sizes = at.key.square().sum((-2, -1))
        less = (together * sizes).sum(-1) < (each * sizes).sum(-1)
        keys = torch.where(less[:, None], together, each)
        queries = torch.einsum("b,bhi->hi", shares, c * key_w.square())
        return at.form(queries=2 * queries, keys=2 * keys)

    def _of_lone(self, bend: Bend, one: Reach, shares: Float[Tensor, " b"]) -> Float[Tensor, "p p"]:
        """The contribution of rows ``p_s (Y + nu) + const``, with ``p_s`` logistic in ``tau``.

        ``F'' = p (1 - p) (1 - 2 p) (Y + nu) tau^2 + 2 p (1 - p) nu tau``.
        """
        at = self.at
        h, i, s = (at.single & at.lone[..., None]).nonzero(as_tuple=True)
        tau, nu, p = at.velocity[h, i], bend.read[h, i, s], at.p[h, i, s]
        others = at.p[h, i].scatter(1, s[:, None], 0.0)
        total, y, own = others.sum(-1), bend.y[h, i], bend.y[h, i, s]
        apart = own - (others * y).sum(-1) / total.clamp_min(TINY)
        lower, upper = one.lower[:, h, i, s], one.upper[:, h, i, s]
        half = p.new_tensor(0.5).clamp(lower, upper)
        first = [m * (1 - m) for m in (lower, upper, p.expand_as(lower), half)]
        turning = ((3 - 3**0.5) / 6, (3 + 3**0.5) / 6)
        at_turning = (p.new_tensor(t).clamp(lower, upper) for t in turning)
        second = torch.stack([m * (1 - m) * (1 - 2 * m) for m in (lower, upper, *at_turning)])
        here = p * (1 - p) * (1 - 2 * p)
        falls = here - second.amin(0), second.amax(0) - here
        fall, far = torch.where(apart > 0, *falls), apart.abs()
        # If the others' weights are rounded away, so is their mean: use the extremes.
        lost = total < _LOST
        fall = torch.where(lost, torch.maximum(*falls), fall).clamp_min(0)
        far = torch.where(lost, (y - own[:, None]).abs().amax(-1), far)
        change = torch.stack([(m - first[2]).abs() for m in first]).amax(0)
        sizes = tau.norm(dim=-1), nu.norm(dim=-1)
        ratio = (sizes[0] + TINY) / (sizes[1] + TINY)
        of_tau = far * fall + second.abs().amax(0) * sizes[1] * one.radius[:, None]
        of_tau = weighted_gram(tau, shares @ (of_tau + change / ratio))
        return of_tau + weighted_gram(nu, shares @ (change * ratio))

    def _mean_moved(self, one: Reach, deviation: Float[Tensor, "b h i"]) -> Tensor:
        """``w`` with ``|E'a E'[y a]| <= sum_j w_j a_j^2`` where ``E'y^2 <= deviation^2``."""
        by_path = (deviation * one.path)[..., None] * one.upper
        ratio = ((one.upper.sum(-1) + TINY) / (one.change.sum(-1) + TINY)).sqrt()[..., None]
        each = (one.change * ratio + one.upper / ratio) / 2
        by_change = (deviation * one.total.sqrt())[..., None] * each
        less = (by_change * self.at.sizes).sum(-1) < (by_path * self.at.sizes).sum(-1)
        return torch.where(less[..., None], by_change, by_path)


def _uneven(one: Reach, at: AttentionAt) -> Tensor:
    """``c`` with ``|(Cov' - Cov)(V e, a)| <= c ‖V‖ |e| (sum_j D_j a_j^2)^(1/2)``, ``(b, h, i)``."""
    change, moved = one.change, one.total.sqrt()
    centred = change.amax(-1).sqrt() + change.sum(-1).sqrt() * at.p.norm(dim=-1)
    found = centred + one.value_length * moved
    # for a single key s, V e ((P'_s - P_s) a_s - P'_s E'a)
    alone = ((change.sqrt() + one.upper * moved[..., None]) * at.single).amax(-1)
    return torch.where(at.single.any(-1), torch.minimum(found, alone), found)


def _evened(sizes: Float[Tensor, " b"], shares: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """``w`` with ``sum_b shares_b F_b(f)^(1/2) <= (sum_b w_b F_b(f))^(1/2)``: Cauchy-Schwarz.

    ``sizes`` estimates the size of ``F_b``; any positive values are valid.
    """
    root = sizes.clamp_min(0).sqrt() + TINY
    return (shares @ root) * shares / root


def _averaged(w: Float[Tensor, "b ..."], sizes: Float[Tensor, " b"], shares: Tensor) -> Tensor:
    """Weights of the averaged form, from the weights of ``F_b``."""
    return torch.einsum("b,b...->...", _evened(sizes, shares), w)


def _sizes(forms: Sequence[RowForm]) -> float:
    """The sum of the square roots of rough sizes of forms."""
    return sum(max(float(form.trace()), 0.0) ** 0.5 for form in forms)


def _product(left: RowForm, right: RowForm) -> RowForm:
    """A form ``>= 2 (L(f) R(f))^(1/2)`` for nonnegative forms: ``θ L + R / θ``."""
    sizes = about(left) + TINY, about(right) + TINY
    theta = (sizes[1] / sizes[0]).sqrt().clamp(1e-100, 1e100)  # any finite positive value is valid
    return theta * left + (1 / theta) * right


def _top_weighted(gram: Tensor, w: Tensor) -> Tensor:
    root = w.clamp_min(0).sqrt()
    return top_value(gram * root[..., :, None] * root[..., None, :])


def _bennett(b: Tensor) -> Tensor:
    """``>= (e^b - 1 - b) / b^2``."""
    b = b.clamp_min(1e-3)  # an increasing function
    return (torch.expm1(b) - b) / b.square()
