"""Evaluation of all theorems for a layer: values, or reasons why they do not apply.

A layer is ``Σ_h W_h f_h``. In every output norm, ``‖J‖ ≤ Σ_h ‖W_h J_h‖`` (each ``W_h`` folded
into its head), and, if ``‖·‖`` is the Frobenius norm or the max-token norm,
``‖J‖ ≤ ‖W_O‖ √(Σ_h ‖J_h‖²)`` (Lemma 3.8). Either can be the smaller one.

The map ``normed`` uses the layer with the norm absorbed (`Normed.absorbed`), at radius 1 and
with the slope of the norm: by the chain rule, ``‖J_f N'‖ ≤ ‖J_f‖ max_j s_j``, or token by token
if a theorem takes the slopes itself. The map ``residual`` follows from these by ``1 + ‖J‖`` and
the norms after the sum, or by a theorem that includes the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Map, check_layer
from lipscope.errors import (
    InputError,
    check_count,
    check_finite_numbers,
    check_positive,
    shown,
)
from lipscope.linalg import Metric, norm_in_double
from lipscope.records import Bound
from lipscope.theorems.head import (
    AtInput,
    Head,
    HeadAt,
    HeadsAt,
    check_scores,
    head_from,
    single_heads,
    tokens_in_double,
)
from lipscope.theorems.register import PATIENCE, NotApplicableError, Theorem, catalogue
from lipscope.theorems.residual import Around, Normed, Residual

_TOO_LARGE = "its value exceeds the float64 range"
# Maximum number of tokens for which heads at an input are cached: each holds tensors of 2 MiB.
_KEPT = 512


@dataclass(frozen=True)
class LayerSubject:
    """A layer as the subject of theorems: its heads, alone and at its input, computed once."""

    attention: Attention
    map: Map = "attention"
    head: int | None = None
    x: Tensor | None = None
    _at: dict[tuple[int, bool], HeadAt] = field(default_factory=dict, repr=False, compare=False)

    @property
    def unturned(self) -> HeadAt:
        """The only head at the input, without rotating its output, since a sum follows."""
        assert self.x is not None
        (one,) = self._single
        return HeadAt(head_from(one, fold=True, turn=False), self.x)

    @cached_property
    def heads(self) -> list[Head]:
        """Heads including the output projection, for the map ``attention``."""
        return [head_from(one, fold=self.map == "attention") for one in self._single]

    @cached_property
    def bare(self) -> list[Head]:
        """Heads before the output projection."""
        return [head_from(one, fold=False) for one in self._single]

    @property
    def together(self) -> HeadsAt:
        """The heads at the input, with their part of the output projection."""
        assert self.x is not None
        output = self.attention.output if self.map == "attention" else None
        if output is not None:
            output = output.detach().to("cpu", torch.float64)
            parts = output.chunk(self.attention.num_heads, 1)
            output = output if self.head is None else parts[self.head]
        return HeadsAt(self.bare, self.x, output)

    @property
    def projected(self) -> bool:
        """Whether an output projection is part of the map."""
        return self.map == "attention" and self.attention.output is not None

    @cached_property
    def norm_output(self) -> float:
        """``‖W_O‖``."""
        assert self.attention.output is not None
        return norm_in_double(self.attention.output)

    def each(self, subject: type, *, bare: bool = False) -> Iterator[Head | HeadAt]:
        """The heads; at the input for theorems about `HeadAt`."""
        for index, head in enumerate(self.bare if bare else self.heads):
            yield head if subject is Head else self._at_input(index, head, bare)

    def _at_input(self, index: int, head: Head, bare: bool) -> HeadAt:
        assert self.x is not None
        found = self._at.get((index, bare)) or HeadAt(head, self.x)
        if len(self.x) <= _KEPT:
            self._at[index, bare] = found
        return found

    @cached_property
    def _single(self) -> list[DotProduct]:
        assert isinstance(self.attention, DotProduct)
        return single_heads(self.attention, self.head)


def evaluate(
    theorem: Theorem,
    layer: Attention | LayerSubject,
    *,
    x: Tensor | None = None,
    num_tokens: int | None = None,
    radius: float | None = None,
    map: Map = "attention",
    slope: Tensor | None = None,
    around: Around | None = None,
) -> float:
    """The value of a theorem for a whole layer.

    Upper bounds of heads become bounds of the layer by the smaller of the two forms of Lemma
    3.8; lower bounds do not add up and apply to single-head layers only. For the map
    ``normed``, ``slope`` is `Norm.slope` of every token, or the largest one for all inputs; for the
    map ``residual``, ``around`` describes its norms and residual path.

    Raises:
        NotApplicableError: If a hypothesis does not hold or a required argument is missing; the
            message continues "not applicable because …".

    Source: Lemma 3.8 of [castin2024].
    """
    if not isinstance(layer, LayerSubject):
        layer = LayerSubject(layer, map, x=x)
    arguments = {"x": layer.x, "num_tokens": num_tokens, "radius": radius}
    missing = [name for name in theorem.needs if arguments.get(name) is None]
    if missing:
        raise NotApplicableError(f"it needs `{missing[0]}`")
    held = theorem.subject.needs if issubclass(theorem.subject, AtInput) else ()
    wanted = {name: arguments[name] for name in theorem.needs if name not in held}
    factor = 1.0
    if slope is not None:
        factor = _chain_rule(theorem, slope)
        wanted |= {"slope": slope} if theorem.by_token else {}
    inside = around is not None and _goes_inside(theorem, layer, around)
    wanted |= {"around": around} if inside else {}
    try:
        value = _layer_value(
            theorem, layer, lambda subject: _subject_value(theorem, subject, wanted), inside
        )
        value *= factor
        value = value if around is None or inside else around.of(value)
    except OverflowError:
        raise NotApplicableError(_TOO_LARGE) from None
    except RuntimeError as error:
        if "failed to converge" not in str(error):  # torch's exception class is private
            raise
        raise NotApplicableError("an eigenvalue routine did not converge") from None
    if not math.isfinite(value):
        raise NotApplicableError(_TOO_LARGE)
    return value


def _theorem_value(theorem: Theorem, subject: Any, wanted: dict[str, Any]) -> float:
    """The value of a theorem; exceptions of plug-ins become reasons."""
    if theorem.function.__module__.startswith("lipscope."):
        return theorem.function(subject, **wanted)
    try:
        value = float(theorem.function(subject, **wanted))
    except (NotApplicableError, MemoryError):
        raise
    except Exception as problem:  # third-party code may raise anything
        words = " ".join(f"it raised {type(problem).__name__}: {problem}".split())
        raise NotApplicableError(words) from problem
    if math.isnan(value) or value < 0:
        raise NotApplicableError(f"it gave {value}")
    return value


def _subject_value(theorem: Theorem, subject: Any, wanted: dict[str, Any]) -> float:
    """The value of a theorem, plus rounding at the input for upper bounds."""
    value = _theorem_value(theorem, subject, wanted)
    if not isinstance(subject, AtInput) or theorem.kind == "lower":
        return value
    steepest = float(wanted["slope"].max()) if "slope" in wanted else 1.0
    hidden = subject.slack * steepest
    return value + (wanted["around"].slack(hidden) if "around" in wanted else hidden)


def _goes_inside(theorem: Theorem, layer: LayerSubject, around: Around) -> bool:
    """Whether a theorem can include the identity: for all heads together, or for a single head."""
    if theorem.kind == "lower":
        raise NotApplicableError("it is stated for attention without the residual path")
    if theorem.scope == "limit":
        raise NotApplicableError("its limit is that of attention alone")
    if not around.plain and theorem.metric == "infinity":
        raise NotApplicableError("a norm after attention mixes entries, its largest one counts")
    if not bool(around.lefts.isfinite().all()):
        raise NotApplicableError("a norm after attention has ε = 0: there is no bound near 0")
    return theorem.inside and (theorem.subject is HeadsAt or layer.attention.num_heads == 1)


def _chain_rule(theorem: Theorem, slope: Tensor) -> float:
    """The factor of the norm in front; 1 if the theorem includes it."""
    if theorem.kind == "lower":
        raise NotApplicableError("its inputs are not outputs of a norm")
    if theorem.scope == "limit":
        raise NotApplicableError("tokens do not grow after a norm")
    steepest = float(slope.max())
    if not math.isfinite(steepest):
        raise NotApplicableError("its norm has ε = 0: there is no bound near tokens of norm 0")
    return 1.0 if theorem.by_token else steepest


def _layer_value(
    theorem: Theorem, layer: LayerSubject, value: Callable[[object], float], inside: bool
) -> float:
    if theorem.subject in (Head, HeadAt, HeadsAt):
        if not isinstance(layer.attention, DotProduct):
            raise NotApplicableError("it is stated for dot-product attention")
        if theorem.subject is HeadsAt:
            return value(layer.together)
        if inside:
            return value(layer.unturned)
        return _of_heads(theorem, layer, value)
    if not isinstance(layer.attention, theorem.subject):
        raise NotApplicableError(f"it is stated for {theorem.subject.__name__}")
    if layer.head is not None and layer.attention.num_heads > 1:
        raise NotApplicableError("it is stated for the whole layer, not for one head")
    if layer.map == "heads" and layer.attention.output is not None:
        raise NotApplicableError("it is stated for the layer with its output projection")
    return value(layer.attention)


def _of_heads(theorem: Theorem, layer: LayerSubject, value: Callable[[object], float]) -> float:
    if len(layer.heads) > 1 and theorem.kind == "lower":
        raise NotApplicableError("lower bounds of heads do not add up; choose one head")
    values = [value(head) for head in layer.each(theorem.subject)]
    if len(values) == 1:
        return values[0]
    if not layer.projected:
        return math.hypot(*values)
    bare = [value(head) for head in layer.each(theorem.subject, bare=True)]
    return min(sum(values), layer.norm_output * math.hypot(*bare))


# A-priori radii are computed in float64, the tokens they must cover often in float32.
_ROUNDING = 1e-5


def bounds_at(
    layer: Attention | Normed | Residual,
    x: Float[Tensor, "n d"] | None = None,
    *,
    num_tokens: int | None = None,
    radius: float | None = None,
    floor: float | None = None,
    map: Map = "attention",
    head: int | None = None,
    metric: Metric | None = None,
    names: str | Collection[str] | None = None,
    sharp: bool | None = None,
) -> list[Bound]:
    """Evaluate every theorem of the catalogue for a layer.

    Theorems at an input use ``x``; those for all inputs use ``num_tokens`` and ``radius``,
    taken from ``x`` if not given.

    A layer with a norm in front, `Normed`, selects the map ``normed``. Tokens may then have any
    norm; the normalisation has unbounded slope only near zero. Global bounds hold if no token is
    smaller than ``floor`` (for LayerNorm after subtracting its mean); without ``x`` and ``floor``,
    on the whole space, with slope ``1 / √(d ε)``. A layer with a residual connection, `Residual`,
    selects the map ``residual``.

    Args:
        x: Its input, ``(n, d)``; None: only theorems on all inputs.
        radius: Largest token norm; None: that of ``x``. Not with a norm in front.
        floor: Smallest token norm, only with a norm in front; None: that of ``x``.
        map: ``attention``, or ``heads`` for the concatenation before the projection.
        metric: Only bounds in this metric; None: all.
        names: Only these theorems, or this one; None: all.
        sharp: Whether to compute slow forms: always (True), never (False), or if `Theorem.cost`
            predicts a few seconds at most (None).

    >>> import torch
    >>> from lipscope.attention import DotProduct
    >>> layer = DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    >>> for bound in bounds_at(layer, num_tokens=4, radius=1.0):
    ...     if bound.theorem in ("castin_thm_3_3", "global_rows_capped", "yudin_thm_3"):
    ...         print(bound.theorem, f"{bound.value:.2f}" if bound.applicable else bound.reason)
    castin_thm_3_3 6.12
    yudin_thm_3 it needs `x`
    global_rows_capped 2.56
    """
    if metric not in (None, *get_args(Metric)):
        known = ", ".join(get_args(Metric))
        raise InputError(f"`metric` should be one of {known}. Found `{shown(metric)}`.")
    known = {one.name for one in catalogue()}
    names = [names] if isinstance(names, str) else names
    if unknown := [one for one in names or () if one not in known]:
        raise InputError(
            f"`names` should be of theorems in `lipscope.catalogue()`. Found `{unknown[0]}`."
        )
    attention = layer.attention if isinstance(layer, Normed | Residual) else layer
    args = _BoundsAt(LayerSubject(attention, map, head, x), num_tokens, radius, floor)
    args = _complete_args(layer, args)
    found = []
    for theorem in catalogue():
        if metric is not None and theorem.metric != metric:
            continue
        if names is not None and theorem.name not in names:
            continue
        value, reason = None, ""
        try:
            if "eps" in theorem.needs:
                raise NotApplicableError("it holds in a ball; use `certify`")
            seconds = 0.0 if sharp else expected_seconds(theorem, args.layer)
            if seconds > PATIENCE or (seconds and sharp is False):
                raise NotApplicableError(how_long(seconds))
            value = args.answer(theorem)
        except NotApplicableError as error:
            reason = str(error)
        radius = args.radius if args.floor is None else None
        found.append(theorem.record(value, reason, radius=radius, floor=args.floor))
    return found


def expected_seconds(theorem: Theorem, layer: LayerSubject) -> float:
    """Expected time of a theorem for a layer at its input, on one core; 0 if always short.

    Depends on shapes only, so that repeated calls agree.
    """
    own = layer.attention
    if theorem.cost is None or layer.x is None or not isinstance(own, DotProduct):
        return 0.0
    check_scores(own)
    count, bare = own.num_heads if layer.head is None else 1, own.value_width
    if theorem.subject is HeadsAt:
        widths = [count * bare]
    else:  # the effective value width after the projection
        folded = min(len(own.output), bare) if layer.projected and own.output is not None else bare
        widths = [folded] * count
        if theorem.subject is HeadAt and layer.projected and count > 1:
            widths += [bare] * count
    return sum(theorem.cost(len(layer.x), width) for width in widths)


def how_long(seconds: float) -> str:
    """The reason for omitting a slow theorem."""
    return f"it takes about {max(seconds, 1):.0f} s here; `sharp` computes it"


@dataclass(frozen=True)
class _BoundsAt:
    """The arguments of an evaluation: a layer, an input, and properties of all inputs.

    For the map ``normed`` the layer has absorbed the norm, its ``x`` is on the unit sphere, and the
    slopes are those at ``x`` and the largest one over all inputs.
    """

    layer: LayerSubject
    num_tokens: int | None
    radius: float | None
    floor: float | None
    slope: Tensor | None = None
    steepest: Tensor | None = None
    residual: Residual | None = None
    x: Tensor | None = None

    def answer(self, theorem: Theorem) -> float:
        """The value of a theorem, or `NotApplicableError`."""
        return evaluate(
            theorem,
            self.layer,
            num_tokens=self.num_tokens,
            radius=self.radius,
            slope=self.slope if "x" in theorem.needs else self.steepest,
            around=self._around("x" in theorem.needs),
        )

    def _around(self, here: bool) -> Around | None:
        if self.residual is None:
            return None
        return self._here if here and self.x is not None else self.residual.everywhere()

    @cached_property
    def _here(self) -> Around:
        assert self.residual is not None and self.x is not None
        plain = self.residual.second is None and self.residual.outer is None
        if not plain and not isinstance(self.layer.attention, DotProduct):
            raise NotApplicableError(
                "rounding before a norm after it is known for dot-product attention only"
            )
        heads = None if plain else self.layer.together
        return self.residual.at(self.layer.attention, heads, self.x)


def _complete_args(layer: Attention | Normed | Residual, args: _BoundsAt) -> _BoundsAt:
    """Complete the arguments; unwrap a norm in front and the residual path."""
    if isinstance(layer, Normed):
        return _absorbed_args(layer, args)
    if args.floor is not None and not isinstance(layer, Residual):
        raise InputError(
            "`floor` should be left out for attention without a norm in front. Found "
            f"`floor = {args.floor}`."
        )
    if not isinstance(layer, Residual):
        return _validated(args)
    head, map, x = args.layer.head, args.layer.map, args.layer.x
    if head is not None or map != "attention":
        raise InputError(
            "`map` and `head` should be left out for a layer with a residual connection. Found "
            f"`map = {map!r}`, `head = {head}`."
        )
    _ = layer.width, layer.norms  # validate early
    x = None if x is None else x.detach().to("cpu", torch.float64)
    return replace(_complete_args(layer.branch, args), residual=layer, x=x)


def _absorbed_args(layer: Normed, args: _BoundsAt) -> _BoundsAt:
    """The equivalent arguments for the layer with its norm absorbed."""
    if args.radius is not None:
        raise InputError(
            "`radius` should be left out for a layer with a norm in front, which maps tokens of "
            f"every norm to one ellipsoid. Found `radius = {args.radius}`."
        )
    if args.layer.map != "attention":
        raise InputError(
            "`map` should be 'attention' for a layer with a norm in front. Found "
            f"`map = {args.layer.map!r}`."
        )
    args = _validated(args)
    norm, x, floor = layer.constants, args.layer.x, args.floor
    sphere, slope, smallest = None, None, 0.0
    if x is not None:
        sphere, slope, smallest = norm.direction(x), norm.slope(x), float(norm.size(x).min())
    floor = smallest if floor is None else floor
    if not 0 <= floor < float("inf"):
        raise InputError(f"`floor` should be 0 or positive. Found `floor = {floor}`.")
    if x is not None and floor > (1 + _ROUNDING) * smallest:
        raise InputError(
            f"`floor` should be at most the smallest token norm of `x`, {smallest:.6g}. "
            f"Found `floor = {floor:g}`."
        )
    floor = floor if x is None else min(floor, smallest)
    steepest = torch.tensor([norm.steepest(floor)], dtype=torch.float64)
    absorbed = LayerSubject(layer.absorbed, "attention", args.layer.head, sphere)
    return _BoundsAt(absorbed, args.num_tokens, 1.0, floor, slope, steepest)


def _validated(args: _BoundsAt) -> _BoundsAt:
    """Validate the arguments and complete them from ``x``."""
    x, num_tokens, radius, map = args.layer.x, args.num_tokens, args.radius, args.layer.map
    layer = args.layer.attention
    check_layer(layer)
    if map not in ("attention", "heads"):
        raise InputError(f"`map` should be 'attention' or 'heads'. Found `map = {map!r}`.")
    if args.layer.head is not None:
        layer.check_head(args.layer.head)
    if radius is not None and radius != 0:  # 0 is valid for zero tokens
        check_positive("radius", radius)
    for name, weight in layer.state_dict().items():
        check_finite_numbers(f"layer.{name}", weight)
    if x is not None:
        x = tokens_in_double(x, layer.query.shape[1])
        if num_tokens not in (None, len(x)):
            raise InputError(
                f"`num_tokens` should be that of `x`, {len(x)}. Found `num_tokens = {num_tokens}`."
            )
        num_tokens = len(x)
        size = x.abs().max()  # squares of tiny tokens must not underflow
        largest = float(size * (x / torch.where(size > 0, size, 1.0)).norm(dim=1).max())
        radius = largest if radius is None else radius
        if 0 < radius < (1 - _ROUNDING) * largest:
            raise InputError(
                f"`radius` should be at least the largest token norm of `x`, {largest:.6g}. "
                f"Found `radius = {radius:g}`."
            )
        radius = max(radius, largest) if radius > 0 else radius  # round outward to cover all tokens
    if num_tokens is not None:
        check_count("num_tokens", num_tokens)
    zeros = x is not None and not bool(x.any())  # the only input of radius 0
    if radius == 0 and not zeros:
        raise InputError(f"`radius` should be positive. Found `radius = {radius}`.")
    return replace(args, layer=replace(args.layer, x=x), num_tokens=num_tokens, radius=radius)
