"""Lipschitz bounds of whole networks, composed from constants of their parts.

Constants multiply along the network and add in residual sums; each holds for tokens of the
radius that the parts before it produce. Theorem and proof: ``docs/theory/network-bound.md``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor, nn

from lipscope.attention import Attention, Clip, MultiheadAttention, spectral_norm
from lipscope.display import Piece, Shown, pieces, rounded_down, rounded_up
from lipscope.errors import InputError, check_count, check_positive, shown
from lipscope.models import (
    ACTIVATIONS,
    ActivationName,
    Branch,
    Chain,
    Feed,
    Network,
    Norm,
    check_finite,
    checked_data,
    own_parts,
    read_parts,
)
from lipscope.theorems.derived.layer_constants import (
    BoundNorm,
    Constant,
    Tokens,
    attention_constant,
    length,
    product_above,
    reach,
)
from lipscope.theorems.register import DERIVED, NotApplicableError, theorem

_ROUNDING = 1e-12  # relative error of the constant of one part
_FAR, _GRID = 12.0, 240_001  # range and grid of the search for activation slopes


@dataclass(frozen=True, repr=False)
class PartBound(Shown):
    """One factor of a bound: ``constant = stream + norm * rows * weights``."""

    name: str  # of the part
    what: str  # its kind
    constant: float  # its Lipschitz constant
    stream: float  # weight of the stream in a residual sum, 0 without one
    norm: float  # slope of the norm before the part
    rows: float  # constant of an attention row in its steepest head; 1 for token-wise parts
    weights: float  # factor of the weights: values and output of all heads, or a network's maps
    radius: float  # largest norm of an input token


@dataclass(frozen=True, repr=False)
class LipschitzBound(Shown):
    """An upper bound of the Lipschitz constant of a network.

    ``|f(x) - f(y)| <= value |x - y|`` in ``norm``, for all inputs of the radius.

    Attributes:
        value: The bound, float64, differentiable in the weights. ``float(bound)`` is the same,
            rounded up.
        norm: ``max-token``, the largest norm of a token, or ``frobenius``.
        radius: Largest norm of an input token; infinite for all inputs.
        num_tokens: Number of tokens, if the bound depends on it.
        parts: The factors, in order.
    """

    value: Float[Tensor, ""]
    norm: BoundNorm
    radius: float
    num_tokens: int | None
    parts: tuple[PartBound, ...]

    def __float__(self) -> float:
        up = float(self.value.detach()) * (1 + _ROUNDING * (1 + len(self.parts)))
        return math.nextafter(up, math.inf)


@pieces.register
def _bound(found: LipschitzBound) -> Iterator[Piece]:
    # round down: the bound must not be printed for more inputs than it covers
    radius = f"{rounded_down(found.radius):.4g}"
    inputs = "all inputs" if math.isinf(found.radius) else f"tokens of norm ≤ {radius}"
    tokens = "" if found.num_tokens is None else f", {found.num_tokens} of them"
    most = f"{rounded_up(float(found)):.4g}"
    table = Table(title=f"Lipschitz constant ≤ {most} ({found.norm}, {inputs}{tokens})")
    for name in ("part", "what"):
        table.add_column(name)
    for name in ("constant", "= stream", "+ norm", "× rows", "× weights", "radius"):
        table.add_column(name, justify="right")
    for one in found.parts:
        numbers = (one.constant, one.stream, one.norm, one.rows, one.weights, one.radius)
        table.add_row(one.name, one.what, *(f"{number:.4g}" for number in numbers))
    yield table


def lipschitz_bound(
    model: Any,
    data: Any = None,
    *,
    norm: BoundNorm = "max-token",
    radius: float | Float[Tensor, ""] | None = None,
    num_tokens: int | None = None,
) -> LipschitzBound:
    """An upper bound of the Lipschitz constant of a whole network.

    Each part has a constant on tokens of the radius that the parts before it produce; constants
    multiply, and add in residual sums. In ``frobenius`` the largest move of a single token is
    tracked too: if token-wise constants do not depend on the number of tokens, that number enters
    once and not in every layer. Differentiable in the weights, float64.

    Holds for attention in closed form, norms, token-wise networks, weighted residual sums, clips,
    fixed pools and linear heads, with the model's own masks. Proof:
    ``docs/theory/network-bound.md``.

    Args:
        model: The network: parts (`lipscope.models.Network`, `Chain`), an attention layer, a
            module or open model with a method ``as_network`` that returns parts, or any other
            module.
        data: One input of a module without that method: its parts are found by running it, from
            the stream that enters its first block to the first tensor it returns. A tensor, or
            arguments by name. For an open model a text; None: the default one.
        norm: ``max-token``, the largest move of a token (or the scores) if no token moves by more
            than 1, or ``frobenius``.
        radius: Largest norm of a token of the stream; None: all inputs.
        num_tokens: Number of tokens, if the bound depends on it; without a pool, an upper limit.
            None: that of the parts; for a `SmoothTransformer` any number up to its ``length``.

    Raises:
        InputError: If no bound is known, or it is infinite; names the part and a remedy.

    Source: derived here.

    >>> from lipscope.attention import DotProduct
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> bound = lipschitz_bound(DotProduct(eye, eye, eye, scale=1.0), radius=1.0)
    >>> f"{float(bound):.4f}"  # √(1 + R⁴) + R²
    '2.4142'
    """
    network = _parts(model, data)
    if norm not in get_args(BoundNorm):
        raise InputError(f"`norm` should be `max-token` or `frobenius`. Found `{norm}`.")
    if radius is not None:
        check_positive("radius", radius)
    if num_tokens is not None:
        check_count("num_tokens", num_tokens)
    pooled = isinstance(network, Network)
    share: Tensor | None = None
    if pooled and len(network.share):
        share, num_tokens = _pool(network, num_tokens)
    elif not pooled and num_tokens is None:
        num_tokens = network.num_tokens
    r = torch.as_tensor(math.inf if radius is None else radius, dtype=torch.float64)
    run = _Run(norm, num_tokens, r)
    try:
        for branch in network.branches:
            run.through(branch)
        if pooled and len(network.head):
            run.pool(share)
            for branch in network.tail:
                run.through(branch)
            run.score(network.head.double())
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        raise InputError(
            "Weights should be finite. Found some without singular values: training diverged?"
        ) from None
    if not bool(run.value.isfinite()):
        raise InputError(
            "The bound of a network should be finite in float64. Found that the constants of its "
            f"{len(run.parts)} parts multiply to more; scale weights down, or bound fewer blocks."
        )
    return LipschitzBound(run.value, norm, float(r.detach()), num_tokens, tuple(run.parts))


@theorem(
    cite=DERIVED,
    statement="Largest token norm, heads together",
    metric="max-token",
    scope="global",
)
def layer_max_token(layer: Attention, num_tokens: int, radius: float) -> float:
    """Largest move of an output token of a whole layer if every input token moves by at most 1.

    ``√(Σ_h c_h) ‖Σ_h (a_h + t_h)² M_h M_h^T / c_h‖^(1/2)``, ``M_h = O_h V_h``, with
    ``a_h = √(1 + β²)`` and ``t_h = α`` for inner products of affine maps; other scores and
    variants have their own. Or, if smaller, from the query shared by all heads,
    ``‖Σ_h M_h M_h^T / c_h‖^(1/2) (√(Σ_h c_h + T²) + T)``, ``T = R² ‖Σ_h c_h A_h^T A_h‖^(1/2)``.

    Holds for any mask and biases, rotary embeddings, soft caps, norms of queries and keys, and the
    variants, on n tokens of norm at most R.

    Source: derived here (``docs/theory/network-bound.md``).
    """
    r = torch.tensor(radius, dtype=torch.float64)
    own = layer.in_double()
    found = attention_constant(own, Tokens(r), norm="max-token", num_tokens=num_tokens)
    if not bool(found.constant.isfinite()):
        raise NotApplicableError("it overflows")
    return float(found.constant)


def _parts(model: Any, data: Any) -> Network | Chain:
    if isinstance(model, Network | Chain):
        return model
    model = getattr(model, "_orig_mod", model)  # what `torch.compile` wraps
    if isinstance(model, MultiheadAttention):
        model = model.as_layer()
    if isinstance(model, nn.Module):
        check_finite(model)
    if isinstance(model, Attention):
        return Chain((Branch(model, skip=False),))
    if not isinstance(model, nn.Module):
        if callable(opened := getattr(model, "as_network", None)):
            found: Any = opened() if data is None else opened(data)
            return found
        raise InputError(
            "`model` should be a module, a network of known parts or an open model. Found "
            f"`{shown(model)}`; `lipscope.load_model` opens a model by its name."
        )
    if (own := own_parts(model)) is not None:
        return own
    if data is None or isinstance(data, str | Path):
        raise InputError(
            "`data` should be an input of the module, a tensor or tensors by name: running it "
            f"finds the parts. Found `{data}`; a text is for an open model with a tokenizer."
        )
    data = checked_data(data)
    return read_parts(model, (data,) if isinstance(data, Tensor) else data)[0]


def _pool(network: Network, num_tokens: int | None) -> tuple[Tensor | None, int]:
    """Weights of the pool (None: the mean of any number of tokens) and the number of tokens."""
    most = len(network.share)
    if num_tokens is None:
        return None if network.of_any_number else network.share, most
    if network.of_any_number and num_tokens <= most:
        # In float32 the entries would not add up to one.
        share = network.share.new_full((num_tokens,), 1 / num_tokens, dtype=torch.float64)
        return share, num_tokens
    if num_tokens != most and len(network.head):
        raise InputError(
            f"`num_tokens` should be {most}, the number of pooled tokens. Found {num_tokens}; omit "
            "it, or give an input of another length."
        )
    return network.share, num_tokens


class _Run:
    """The bound and the radius up to some part of the network.

    In the norm ``frobenius`` also ``token``: the largest move of a token for a joint move of 1.
    """

    def __init__(self, norm: BoundNorm, num_tokens: int | None, radius: Tensor) -> None:
        self.norm: BoundNorm = norm
        self.n, self.radius = num_tokens, radius
        self.value = self.token = torch.ones_like(radius)
        self.parts: list[PartBound] = []
        self.counts: dict[str, int] = {}

    @property
    def largest(self) -> Float[Tensor, ""]:
        """The largest move of a token relative to the joint move."""
        moved = self.value > 0
        return torch.where(moved, self.token / torch.where(moved, self.value, 1.0), 1.0)

    def _multiply(self, what: str, weights: Tensor, *by: Tensor) -> None:
        """Multiply by a further factor: of weights, and of rows, norm and stream if there are."""
        one = torch.ones_like(weights)
        rows, norm, stream = by or (one, one, 0 * one)
        own = stream + norm * weights
        kind = what.split(maxsplit=1)[0].removesuffix(",")
        at = self.counts[kind] = self.counts.get(kind, -1) + 1
        if not bool(own.isfinite()):
            raise InputError(
                f"`{kind} {at}` should have a finite constant. Found none on "
                + (
                    "all inputs: give `radius`, put a norm or a clip before it, or use a variant "
                    "that is Lipschitz on all inputs (L2 attention for given `num_tokens`)."
                    if bool(self.radius.isinf())
                    else f"tokens of norm {self.radius.item():.3g} ({what}); scale weights down"
                    + (", or give `num_tokens`." if self.n is None else ".")
                )
            )
        weights = weights / rows.clamp_min(1e-300)
        numbers = (float(x.detach()) for x in (own, stream, norm, rows, weights, self.radius))
        self.parts.append(PartBound(f"{kind} {at}", what, *numbers))
        self.value = self.value * own

    def through(self, branch: Branch) -> None:
        """Apply a branch, including its residual connection."""
        slope, tokens = _input_tokens(branch.norm, self.radius)
        name = "" if branch.norm is None else f" after {_name(branch.norm)}"
        part = branch.part
        if isinstance(part, Attention):
            what = f"attention, {type(part).__name__}{name}"
            found, each = self._attention(part, tokens)
        elif isinstance(part, Feed):
            what, found = _feed_name(part) + name, _feed(part, tokens)
            each = found.constant
        else:
            what, found = name[len(" after ") :] or "identity", Constant(tokens.slope, tokens.size)
            each = found.constant
        kept = torch.as_tensor(branch.skip, dtype=torch.float64, device=slope.device).abs()
        rows = torch.ones_like(slope) if found.rows is None else found.rows
        self._multiply(what, found.constant, rows, slope, kept)
        token = reach(self.token, kept + reach(slope, each))
        self.token = torch.minimum(token, self.value)  # a token moves by at most the joint move
        radius = found.radius + reach(kept, self.radius)
        self.radius = radius if bool(radius.isfinite()) else radius.detach()

    def _attention(self, part: Attention, tokens: Tokens) -> tuple[Constant, Tensor]:
        """The constant in the norm, and that of a single token."""
        of = functools.partial(attention_constant, part, tokens, num_tokens=self.n)
        try:
            found = of(norm=self.norm, largest=self.largest)
        except NotApplicableError as why:
            raise InputError(
                f"A network should be of parts that have a bound in the norm {self.norm}. "
                f"Found `{type(part).__name__}`: {why}."
            ) from None
        if self.norm == "max-token":
            return found, found.constant
        try:
            each = of(norm="max-token").constant
        except NotApplicableError:
            return found, torch.full_like(found.constant, math.inf)
        n = self.n if part.mask is None else part.mask.shape[-1]
        if n is not None:  # each row moves by at most the largest one
            whole = torch.minimum(found.constant, reach(n**0.5 * self.largest, each))
            found = found._replace(constant=whole)
        return found, each

    def pool(self, share: Float[Tensor, " n"] | None) -> None:
        """Apply a pool: weights of tokens, or None for the mean of any number of tokens."""
        size = torch.ones_like(self.radius) if share is None else share.double().abs().sum()
        together = size * self.largest
        if share is not None:
            together = torch.minimum(length(share.double()), together)
        self._multiply("pool", size if self.norm == "max-token" else together)
        self.radius = reach(size, self.radius)
        self.norm, self.token = "frobenius", self.value  # for a single row both norms agree

    def score(self, head: Float[Tensor, "c d"]) -> None:
        """Apply the linear head."""
        self._multiply("head", spectral_norm(head))


def _name(norm: Norm | Clip) -> str:
    if isinstance(norm, Clip):
        return "clip"
    if not norm.scaled:
        return "norm without variance"
    return "LayerNorm" if norm.centred else "RMSNorm"


def _input_tokens(norm: Norm | Clip | None, radius: Tensor) -> tuple[Tensor, Tokens]:
    """The slope of the norm or clip before a part's weights, and its output tokens."""
    one = radius.new_ones(())
    if norm is None:
        return one, Tokens(radius)
    if isinstance(norm, Clip):
        return one, Tokens(radius.clamp_max(norm.radius))
    gain, shift = norm.weight.double(), norm.bias.double()
    if not norm.scaled:
        return one, Tokens(radius, gain, shift, norm.centred)
    d = len(gain)
    floor = math.sqrt(d * norm.eps)
    if not floor:
        return one * math.inf, Tokens(one, math.sqrt(d) * gain, shift, norm.centred)
    share = radius / torch.hypot(radius, one * floor) if bool(radius.isfinite()) else one
    return one / floor, Tokens(share, math.sqrt(d) * gain, shift, norm.centred)


# --- token-wise networks


def _feed_name(feed: Feed) -> str:
    if feed.activation == "identity" and feed.gate is None:
        return "linear map"
    return f"feed, {feed.activation}" + (" gated" if feed.gate is not None else "")


def _feed(feed: Feed, tokens: Tokens) -> Constant:
    """``W_2 diag(s) W_1`` with slopes ``s`` in an interval: its midpoint plus half its width."""
    inner, outer = tokens.weight(feed.inner.double()), feed.outer.double()
    b, shift = tokens.bias(feed.inner.double(), feed.inner_bias), feed.outer_bias.double()
    least, most = slopes(feed.activation)
    r, written = tokens.radius, spectral_norm(outer)
    if feed.gate is not None:
        gate = tokens.weight(feed.gate.double())
        beside = tokens.bias(feed.gate.double(), feed.gate_bias)
        z, u = (reach(length(w), r) + c.abs() for w, c in ((inner, b), (gate, beside)))
        hidden = length(z * u)
        moves = _between(outer, most * u, inner) + _between(outer, z, gate)
        start = ACTIVATIONS[feed.activation](b) * beside
    else:
        middle, half, taken = (most + least) / 2, (most - least) / 2, spectral_norm(inner)
        moves = middle * product_above(outer.mT, inner)
        if half:
            moves = moves + half * written * taken
        start, hidden = ACTIVATIONS[feed.activation](b), reach(taken, r) + length(b)
    from_zero = length(outer @ start + shift) + reach(moves, r)
    # No activation exceeds its argument in magnitude.
    at_most = reach(written, hidden) + length(shift)
    return Constant(moves, torch.minimum(from_zero, at_most))


def _between(outer: Tensor, sizes: Tensor, inner: Tensor) -> Tensor:
    """``>= ‖W_2 diag(t) W_1‖`` for ``|t| <= sizes``."""
    if not bool(sizes.isfinite().all()):
        return sizes.sum()
    root = (sizes + 1e-300).sqrt()
    return spectral_norm(outer * root) * spectral_norm(root[:, None] * inner)


@functools.cache
def slopes(name: ActivationName) -> tuple[float, float]:
    """The least and the largest slope of an activation on the whole line.

    >>> slopes("relu"), [round(one, 6) for one in slopes("gelu")]
    ((0.0, 1.0), [-0.128904, 1.128904])
    """
    if name in ("relu", "tanh"):
        return 0.0, 1.0
    if name == "identity":
        return 1.0, 1.0
    z = torch.linspace(-_FAR, _FAR, _GRID, dtype=torch.float64)
    with torch.enable_grad():
        z.requires_grad_()
        (slope,) = torch.autograd.grad(ACTIVATIONS[name](z).sum(), z)
    off = (2 * _FAR / (_GRID - 1)) ** 2 / 8  # interpolation error, with |second derivative| <= 1
    return float(slope.min()) - off, float(slope.max()) + off
