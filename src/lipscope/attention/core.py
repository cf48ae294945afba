"""The attention layer and its closed-form Jacobian; shared scores and Lipschitz bounds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar, Unpack, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrize import type_before_parametrizations

from lipscope.attention.jacobian import (
    CHUNK_BYTES,
    SURE,
    ChunkedCore,
    Linearised,
    rows_by_head,
    several_layers,
    stretch_in_chunks,
)
from lipscope.attention.layer import (
    Clip,
    Framed,
    Layer,
    Map,
    MovingSide,
    Rotary,
    TokenNorm,
    check_frame_of,
    check_log_weights,
    returned,
    uncast,
    wide,
)
from lipscope.attention.weighting import Weighting
from lipscope.errors import InputError, check_positive
from lipscope.linalg import Operator, start_named
from lipscope.plugins import check_name, load_plugins

_SMALL = "Scores should be small enough for {} to know the attention weights."
_AGREED = 1e-3  # largest accepted relative difference from float64

VARIANTS: dict[str, type[Attention]] = {}
"""The variants imported so far."""


class Attention(Layer):
    """An attention layer ``R^(n x d) -> R^(n x d_out)`` with any number of heads.

    ``f(X) = concat_h(P_h V_h) W_O^T + b_O``. ``P_h`` is the weighting of the variant (usually the
    row softmax) applied to the masked ``cap(S_h) + B_h``; ``S_h`` is the variant's score of
    ``Q_h = X W_Q^T + b_Q`` and ``K_h``; ``cap(s) = c tanh(s / c)`` if a soft cap is set. With
    fewer key/value heads, groups of query heads of equal size share them. With a ``context``,
    keys and values are computed from its tokens (cross-attention).

    A row that may attend to no token outputs zero heads and has a zero derivative.

    Holds for a fixed number of tokens if a mask, a bias of the logits or a rotary embedding
    is given.

    Args:
        query: ``(heads * k, d)``.
        key: ``(groups * k, d)``.
        value: ``(groups * d_v, d)``.
        output: ``(d_out, heads * d_v)``, or None for concatenated heads.
        heads: Number of query heads.
        groups: Number of key/value heads; ``heads`` if None.
        query_bias: ``(heads * k,)``.
        key_bias: ``(groups * k,)``.
        value_bias: ``(groups * d_v,)``.
        output_bias: ``(d_out,)``.
        scale: Factor of the score; ``1 / sqrt(k)`` if None.
        causal: Token i attends only to tokens j <= i.
        window: Token i attends only to tokens j > i - window.
        mask: ``(n, n)`` or ``(heads, n, n)``: True where i may attend to j. ``(n, m)`` for
            queries and keys of different tokens, likewise ``score_bias``.
        rotary: Rotary embedding of queries and keys.
        score_bias: ``B``, ``(n, n)`` or ``(heads, n, n)``, added to the (capped) scores.
        softcap: ``c``, positive; None: no cap.
        query_norm: Norm of the queries, applied before the rotary embedding and the scale.
        key_norm: Norm of the keys, applied before the rotary embedding.
        value_norm: Norm of the values.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass that changes what closed forms and theorems take as given.

        Fixed are the final methods; of a registered variant, whatever computes something, so that
        copies are of the variant. A score comes with its derivatives.
        """
        super().__init_subclass__(**options)
        known = [one for one in cls.__mro__[1:] if one in VARIANTS.values()]
        parent = known[0] if known else Attention
        cls._copied_as = known[0] if known else None
        names = {name for one in parent.__mro__ if issubclass(one, Layer) for name in vars(one)}
        public = {name for name in names if not name.startswith("_")} - {"extra_repr"}
        for name in ("__call__", "_call_impl", *sorted(public)):
            fixed = inspect.getattr_static(parent, name)
            changed = inspect.getattr_static(cls, name) is not fixed
            if changed and (known or getattr(fixed, "__final__", False)):
                raise InputError(
                    f"`{cls.__name__}` should compute what `{parent.__name__}` computes: closed "
                    f"forms and theorems hold for that. Found another `{name}`; derive from "
                    "`InnerProduct`, `Distance` or `Attention`, and define the score or weighting."
                )
        slopes = {"score_jvp", "score_vjp"}
        if "score" in vars(cls) and not slopes <= vars(cls).keys():
            raise InputError(
                f"`{cls.__name__}` should define the derivatives of its score. Found `score` "
                f"without `{min(slopes - vars(cls).keys())}`; define both."
            )

    @final
    def forward(
        self,
        x: Float[Tensor, "*b n d"],
        context: Float[Tensor, "*b m d"] | None = None,
        *,
        log_weights: Float[Tensor, " m"] | None = None,
    ) -> Float[Tensor, "*b n d_out"]:
        """The layer's output, differentiable by autograd; the reference for the closed form.

        Args:
            context: Tokens from which keys and values are computed.
            log_weights: Logarithms of the weights of the keys, added to their scores: for
                softmax, a key of weight c counts as c copies of it.
        """
        return self.project_out(self.heads(x, context, log_weights=log_weights))

    @final
    def heads(
        self,
        x: Float[Tensor, "*b n d"],
        context: Float[Tensor, "*b m d"] | None = None,
        *,
        log_weights: Float[Tensor, " m"] | None = None,
    ) -> Float[Tensor, "*b n hv"]:
        """Concatenated heads before the projection; chunked if no gradient is needed."""
        check_log_weights(log_weights, x if context is None else context)
        if x.ndim == 2 and not (torch.is_grad_enabled() or transformed()):
            core = ChunkedCore(self, x, 8 * CHUNK_BYTES, context, log_weights)
            return core.o.transpose(0, 1).flatten(1).to(returned(x))
        q, k, v = self.project(x, context)
        with uncast(x.device):
            o = self.weights(q, k, log_weights=log_weights) @ v
        return o.transpose(-3, -2).flatten(-2).to(returned(x))

    @final
    def linearise(
        self,
        x: Float[Tensor, "n d"],
        *,
        memory: int = 2**30,
        map: Map = "attention",
        per_head: bool = False,
        context: Float[Tensor, "m d"] | None = None,
        side: MovingSide = "query",
        log_weights: Float[Tensor, " m"] | None = None,
    ) -> Operator:
        """The Jacobian at ``x`` in closed form: 8 n d^2 + 8 n^2 d flops per product (MHA).

        Half-precision layers are computed in float32; autocast is ignored.

        Queries, keys, values, row statistics and, if they fit, weights are computed once; a
        product costs matrix multiplications and one elementwise pass. Blocks hidden by a causal
        mask or a window are skipped: causal layers cost about half.

        Args:
            memory: Bytes for stored weights and chunks; stored weights take at most half of it.
            map: ``attention``, or ``heads`` for the concatenation before the output
                projection.
            per_head: One operator per query head, on a leading axis of length
                ``num_heads``: the head's slice for ``heads``, its contribution through its
                part of the projection for ``attention``.
            context: Tokens ``(m, d)`` of keys and values, for cross-attention; None: those of
                ``x``.
            side: With a context, which input moves while the other is fixed: ``query`` (``x``) or
                ``key`` (the context).
            log_weights: See `forward`.

        Raises:
            InputError: If the scores are so large that rounding shows in the Jacobian; float32
                products are then compared with float64.

        Returns:
            Operator ``(n, d) -> (n, d_out)``, for ``side = "key"`` ``(m, d) -> (n, d_out)``;
            with ``per_head`` the products take and return the leading axis of heads.

        Source: Lemma C.2 of [castin2024], in matrix form (``docs/theory``).
        """
        check_layer(self)
        check_log_weights(log_weights, x if context is None else context)
        if x.ndim != 2:
            raise InputError(f"`x` should be one input, (n, d). Found shape {tuple(x.shape)}.")
        options: dict[str, Any] = {"map": map, "per_head": per_head, "side": side}
        others = {"context": context, "log_weights": log_weights}
        if wide(x).dtype != x.dtype:
            options |= {name: None if t is None else wide(t) for name, t in others.items()}
            single = self.in_double().to(x.device, torch.float32)
            op = single.linearise(wide(x), memory=memory, **options)
            return replace(
                op,
                matvec=lambda e: op.matvec(wide(e)).to(x.dtype),
                rmatvec=lambda g: op.rmatvec(wide(g)).to(x.dtype),
                dtype=x.dtype,
            )
        at = Linearised(self, x, memory, **others, **options)
        at.shares = _known_scores(type(self))
        shapes = tuple(at.moved.shape), (x.shape[0], at.frame.width_out)
        op = Operator(at.matvec, at.rmatvec, *shapes, x.dtype, x.device)
        if at.doubt > SURE and x.dtype == torch.float64:
            raise InputError(
                f"{_SMALL.format('float64')} Found some that rounding shifts by {at.doubt:.1g}; "
                "scale queries, keys or tokens down."
            )
        if at.doubt > SURE:
            double = {"device": "cpu", "dtype": torch.float64}
            options |= {name: None if t is None else t.to(**double) for name, t in others.items()}
            alone = x.detach().to(**double)
            exact = self.in_double().linearise(alone, memory=memory // 2, **options)
            _agree(op, exact, self.num_heads if per_head else None)
        return op

    def constant(self, num_tokens: int) -> Float[Tensor, ""]:
        """A differentiable upper bound of sigma over all inputs of ``num_tokens`` tokens.

        Frobenius norm, in the layer's precision; the register states and proves it in float64.
        """
        raise InputError(
            f"A layer should have a bound at all inputs of {num_tokens} tokens. "
            f"Found {type(self).__name__}, which has no known bound."
        )

    @final
    def stretch(
        self,
        x: Float[Tensor, "n d"],
        g: Float[Tensor, "n d_out"],
        e: Float[Tensor, "n d"],
        *,
        memory: int = 2**30,
    ) -> Float[Tensor, ""]:
        """``<g, J(x) e>``, differentiable in all arguments and weights, computed in chunks."""
        return stretch_in_chunks(self, x, g, e, memory)


def joined(operators: Sequence[Operator]) -> Operator | None:
    """The Jacobians of layers of one shape as one operator, stacked along a leading axis.

    Entry ``i`` of a product belongs to operator ``i``. The same matrix products are computed in
    fewer calls.

    Holds for layers of one kind and size that differ only in weights and inputs; else None.

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> w = torch.randn(2, 4, 6, 6)
    >>> ops = [DotProduct(*one, heads=2).linearise(torch.randn(3, 6)) for one in w]
    >>> joined(ops).matvec(torch.ones(2, 3, 6)).shape
    torch.Size([2, 3, 6])
    """
    parts = list[Linearised]()
    for op in operators:
        at = getattr(op.matvec, "__self__", None)
        if isinstance(at, Linearised) and (op.matvec, op.rmatvec) == (at.matvec, at.rmatvec):
            parts.append(at)
    at = several_layers(parts) if 0 < len(parts) == len(operators) else None
    return None if at is None else replace(operators[0], matvec=at.matvec, rmatvec=at.rmatvec)


def _known_scores(kind: type[Layer]) -> bool:
    """Whether the score derivatives are the built-in ones, functions of queries and keys only."""
    ours = [
        {getattr(one, name) for one in (InnerProduct, Distance)}
        for name in ("score_jvp", "score_vjp")
    ]
    return kind.score_jvp in ours[0] and kind.score_vjp in ours[1]


def _agree(op: Operator, exact: Operator, heads: int | None) -> None:
    """Refuse products that differ from those in float64 by more than rounding allows."""
    axes = () if heads is None else (heads,)
    start = start_named("agreement with float64")
    for ours, true, shape in (
        (op.matvec, exact.matvec, op.in_shape),
        (op.rmatvec, exact.rmatvec, op.out_shape),
    ):
        e = torch.randn(*axes, *shape, generator=start, dtype=torch.float64)
        expected = true(e)
        off = (ours(e.to(op.device, op.dtype)).to("cpu", torch.float64) - expected).flatten(
            len(axes)
        )
        share = off.norm(dim=-1) / expected.flatten(len(axes)).norm(dim=-1).clamp_min(1e-300)
        if not float(share.max()) <= _AGREED:
            raise InputError(
                f"{_SMALL.format(str(op.dtype)[6:])} Found a Jacobian that is "
                f"{float(share.max()):.1%} off beside float64; use float64."
            )


def transformed() -> bool:
    """Whether a torch transform, forward-mode AD or the compiler traces the computation."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


# --- scores that variants share


def _both(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, out: Tensor | None) -> Tensor:
    """``<dq_i, k_j> + <q_i, dk_j>``: one product twice as wide would copy all four."""
    return torch.bmm(dq, k.mT, out=out).baddbmm_(q, dk.mT)


class InnerProduct(Attention):
    """Attention with ``S_ij = <q_i, k_j>``; variants define ``q`` and ``k``."""

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``<q_i, k_j>``; scale, temperature or divisor are in ``q`` already."""
        return torch.matmul(q, k.mT, out=out)

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``<dq_i, k_j> + <q_i, dk_j>``."""
        return _both(q, k, dq, dk, out)

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``gs k`` and ``gs^T q``."""
        return torch.bmm(gs, k), torch.bmm(gs.mT, q)


class Biased(InnerProduct):
    """Inner-product attention with biases, masks and a scale, but no other frame options."""

    takes: ClassVar[type] = Framed

    def __init__(
        self,
        query: Float[Tensor, "hk d"],
        key: Float[Tensor, "hk d"],
        value: Float[Tensor, "hv d"],
        output: Float[Tensor, "d_out hv"] | None = None,
        **frame: Unpack[Framed],
    ) -> None:
        check_frame_of(frame, Framed)
        super().__init__(query, key, value, output, **frame)


class Distance(Attention):
    """Attention with ``S_ij = -|q_i - k_j|²``; layers define ``q`` and ``k``."""

    def score(self, q: Tensor, k: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``-|q_i - k_j|²``."""
        s = torch.matmul(2 * q, k.mT, out=out)
        return s - q.square().sum(-1, keepdim=True) - k.square().sum(-1)[..., None, :]

    def score_jvp(
        self, q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """``-2 <q_i - k_j, dq_i - dk_j>``."""
        left, right = (q * dq).sum(-1, keepdim=True), (k * dk).sum(-1)[..., None, :]
        return _both(q, k, dq, dk, out).sub_(left).sub_(right).mul_(2)

    def score_size(self, q: Tensor, k: Tensor) -> Tensor:
        """``(|q_i| + max_j |k_j|)²``: the scale of the terms that cancel in the distance."""
        q, k = q.double().norm(dim=-1), k.double().norm(dim=-1)
        return (q + k.amax(-1, keepdim=True)).square()

    def score_vjp(self, q: Tensor, k: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
        """``2 (gs k - rowsum(gs) q)`` and ``2 (gs^T q - colsum(gs) k)``."""
        gq = torch.matmul(gs, k) - gs.sum(-1)[..., None] * q
        gk = torch.matmul(gs.mT, q) - gs.sum(-2)[..., None] * k
        return 2 * gq, 2 * gk


# --- weight norms and ball bounds, differentiable in the weights
#
# ``α = ‖A‖ R²`` and ``β = (‖A‖ R + |b|) R`` for each head; proofs: docs/theory/global-bounds.md.


def spectral_norm(matrix: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b"]:
    """``‖M‖``, with derivative ``u v^T`` (top singular vectors); in float32 or wider.

    >>> spectral_norm(torch.tensor([[0.0, 3.0], [4.0, 0.0]])).item()
    4.0
    """
    matrix = wide(matrix)
    with torch.no_grad():
        v = top_right(matrix)
        u = _unit(matrix @ v)
    return (u * (matrix @ v)).sum((-2, -1))


def top_right(matrix: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b c 1"]:
    """The top right singular vector, from the smaller Gram matrix."""
    tiny = torch.finfo(matrix.dtype).tiny
    m = matrix / matrix.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    if m.shape[-2] >= m.shape[-1]:
        return torch.linalg.eigh(m.mT @ m).eigenvectors[..., -1:]
    return _unit(m.mT @ torch.linalg.eigh(m @ m.mT).eigenvectors[..., -1:])


def _unit(v: Tensor) -> Tensor:
    tiny = torch.finfo(v.dtype).tiny
    v = v / v.abs().amax(-2, keepdim=True).clamp_min(tiny)  # avoids overflow and underflow of v²
    return v / v.norm(dim=-2, keepdim=True).clamp_min(tiny)


def product_norm(
    left: Float[Tensor, "*b k d"], right: Float[Tensor, "*b k c"]
) -> Float[Tensor, "*b"]:
    """``‖L^T R‖``, reduced to a matrix with ``k`` rows if ``k`` is the smaller dimension.

    >>> product_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])).item()
    10.0
    """
    with torch.no_grad():
        few = left.shape[-2] < left.shape[-1]
        v = top_right(torch.linalg.qr(left.mT, mode="r").R @ right if few else left.mT @ right)
        u = _unit(left.mT @ (right @ v))
    return ((left @ u) * (right @ v)).sum((-2, -1))


def of_heads(
    heads: Float[Tensor, " h"], output: Float[Tensor, "d_out hv"] | None
) -> Float[Tensor, ""]:
    """``‖W_O‖ √(Σ_h c_h²)``: a bound of the layer from a bound ``c_h`` for each head."""
    together = torch.linalg.vector_norm(heads)
    return together if output is None else spectral_norm(output) * together


BallBound = Literal["theorem-3.3", "G2", "mean-field"]


def on_ball(layer: Layer, by: BallBound, *, num_tokens: int, radius: float) -> Float[Tensor, " h"]:
    """A bound of sigma for each head ``x ↦ P V x``, for tokens of norm at most ``radius``.

    Holds for softmax of inner products with any mask and biases of queries, keys and values;
    ``mean-field`` without a mask. Not with rotary embeddings, score biases or norms.
    ``theorem-3.3`` is from [castin2024] (Theorem E.3 with biases), for at most ``num_tokens``.
    """
    check_positive("radius", radius)
    scale = abs(layer.scale)
    query, key, value = (
        rows_by_head(wide(w), count, layer.num_heads)
        for w, count in zip((layer.query, layer.key, layer.value), layer.head_counts, strict=True)
    )
    alpha = scale * product_norm(key, query) * radius**2
    beta = alpha
    if layer.query_bias is not None:
        bias = wide(layer.query_bias).unflatten(0, (layer.num_heads, -1, 1))
        # vector_norm is differentiable at zero, where biases start.
        beta = alpha + scale * radius * torch.linalg.vector_norm(key.mT @ bias, dim=(1, 2))
    if by == "theorem-3.3":
        n = num_tokens
        factor = (3 * (alpha.square() + 4 * n * beta.square() + n)).sqrt()
    elif by == "G2":
        seen, n = None, slice(0, num_tokens)
        if layer.causal or layer.window is not None or layer.mask is not None:
            seen = layer.visible(n, n, alpha.device)
        factor = _largest_rows(beta, num_tokens, seen) + alpha
    else:
        factor = beta.exp() * (1 + beta.square()).sqrt() + alpha
    bound = spectral_norm(value) * factor
    if not bool(torch.isfinite(bound).all()):
        raise InputError(
            f"The bound `{by}` at radius {radius:g} should be finite in {str(bound.dtype)[6:]}. "
            "Scale tokens or weights down, or choose another bound."
        )
    return bound


def _largest_rows(
    beta: Float[Tensor, " h"], num_tokens: int, seen: Bool[Tensor, "*h n n"] | None
) -> Float[Tensor, " h"]:
    """``√(max_j Σ_{i attends to j} max_{p≤p_i} p (1 + β² min(1, 4p(1-p))))``."""
    if seen is None:
        others = beta.new_tensor([num_tokens - 1.0])
    else:
        others = (seen.sum(-1) - 1).clamp_min(0).to(beta)
    p_max = 1 / (1 + others * (-2 * beta[:, None]).exp())
    rows = row_gain(p_max, beta.square()[:, None])
    if seen is None:
        return (num_tokens * rows[:, 0]).sqrt()
    return (rows[:, None] @ seen.to(rows).expand(len(rows), -1, -1))[:, 0].amax(-1).sqrt()


def row_gain(p_max: Float[Tensor, "*b n"], t: Float[Tensor, "*b _"]) -> Float[Tensor, "*b n"]:
    """``max_{p≤p_max} p (1 + t min(1, 4p(1-p)))``.

    Increasing up to 1/2, then a cubic with one maximum, beyond 1 for ``t ≤ 1/4``.
    """
    best = (1 + (1 + 0.75 / t.clamp_min(0.25)).sqrt()) / 3
    p = torch.minimum(p_max, best)
    return p * (1 + t * (4 * p * (1 - p)).masked_fill(p <= 0.5, 1.0))


def check_layer(layer: object) -> None:
    """Refuse anything but an `Attention` layer (torch modules go to the verbs)."""
    if not isinstance(layer, Attention):
        raise InputError(f"`layer` should be an Attention layer. Found `{type(layer).__name__}`.")
    check_as_written(layer, type(layer).__name__)


# Whose hooks change nothing: torch's make a weight before it is used, others load one or look on.
_LOOKING = ("torch.nn.utils.", "lipscope.", "transformers.utils.")
_MOVING = "accelerate.hooks.AlignDevicesHook"  # moves weights and inputs to a device


def check_as_written(module: nn.Module, name: str) -> None:
    """Refuse attention that is not computed as its class is written, for no closed form knows."""
    if what := change_of(*module.modules()):
        raise InputError(
            f"`{name}` should be computed as its class is written. Found {what}, which may change "
            "it; take that away."
        )


def hooks_of(module: nn.Module) -> list[Any]:
    """Hooks of forward passes that may change something."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    of = [getattr(one, "func", one) for one in map(inspect.unwrap, hooks)]
    of = [getattr(one, "__module__", None) or type(one).__module__ for one in of]
    return [one for one, at in zip(hooks, of, strict=True) if not f"{at}.".startswith(_LOOKING)]


def change_of(*modules: nn.Module) -> str:
    """What the first changed module has beside what its class computes; empty if nothing."""
    for module in modules:
        held = vars(module).get("_hf_hook")  # accelerate's, around the method `forward`
        kinds = [type(one) for one in getattr(held, "hooks", (held,))]
        moves = all(f"{one.__module__}.{one.__name__}" == _MOVING for one in kinds)
        kept = {"forward"} if moves else set[str]()
        written = {key: getattr(type(module), key, None) for key in vars(module).keys() - kept}
        own = [k for k, at in written.items() if callable(at) or isinstance(at, Weighting)]
        parts = _parts(module) if isinstance(module, Attention) else ()
        kinds = map(type_before_parametrizations, parts)
        own += [kind.__name__ for kind in kinds if kind not in (Rotary, TokenNorm, Clip)]
        if (hooked := bool(hooks_of(module))) or own:
            what = "hooks" if hooked else f"a `{min(own)}` of its own"
            return f"{what} in `{type(module).__name__}`"
    return ""


def _parts(layer: Attention) -> list[Any]:
    """Rotation, norms and entrance of a layer; asked only of a class that has its own."""
    found = [layer.rotary, layer.query_norm, layer.key_norm, layer.value_norm]
    kind = type(layer)
    if kind.norms is not Layer.norms:
        found += layer.norms()
    if kind.entrance is not Layer.entrance:
        found.append(layer.entrance())
    return [part for part in found if part is not None]


# --- variants

_Variant = TypeVar("_Variant", bound=type[Attention])


def variant(layer: _Variant) -> _Variant:
    """Register a kind of attention in `variants`; one class per file of ``kinds``."""
    check_name("variant", layer.__name__, layer, VARIANTS.get(layer.__name__))
    VARIANTS[layer.__name__] = layer
    return layer


def variants() -> list[type[Attention]]:
    """All variants sorted by name, plug-ins included."""
    load_plugins("lipscope.variants")
    return [VARIANTS[name] for name in sorted(VARIANTS)]
