"""From one head to a layer: the combinations of Lemma 3.8, in one place.

A layer is ``Σ_h W_h f_h``. In every norm of outputs in which the heads' parts add up,
``‖J‖ ≤ Σ_h ‖W_h J_h‖`` (each ``W_h`` folded into its head), and, where ``‖·‖`` is the
Frobenius norm or the largest token norm, ``‖J‖ ≤ ‖W_O‖ √(Σ_h ‖J_h‖²)``. Neither is always
the smaller one.

The map ``normed`` is reached from the layer that has taken up the norm (`Normed.absorbed`), at
radius 1 and with the slope of the norm: by the chain rule, ``‖J_f N'‖ ≤ ‖J_f‖ max_j s_j``, or
token by token where a theorem takes the slopes itself. The map ``residual`` is reached from these
by ``1 + ‖J‖`` and the norms that follow, or by a theorem that takes the identity inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct, Map
from lipscope.theorems.head import Head, heads_of
from lipscope.theorems.head_at import AtInput, HeadAt, HeadsAt
from lipscope.theorems.register import NotApplicableError, Theorem
from lipscope.theorems.residual_context import Around
from lipscope.theorems.spectrum import spectral_norm

_TOO_LARGE = "its value exceeds the float64 range"
# Tokens up to which heads at an input are kept: each then holds some tensors of 2 MiB.
_KEPT = 512


@dataclass(frozen=True)
class AskedLayer:
    """A layer as theorems ask for it: heads, and heads at its input, are made once for all.

    Attributes:
        attention: The layer.
        map: ``attention`` or ``heads``.
        head: One query head alone, or None for all.
        x: Its input, ``(n, d)``, or None for theorems on all inputs only.
    """

    attention: Attention
    map: Map = "attention"
    head: int | None = None
    x: Tensor | None = None
    _at: dict[tuple[int, bool], HeadAt] = field(default_factory=dict, repr=False, compare=False)

    @property
    def unturned(self) -> HeadAt:
        """The only head at the input, with its output as it stands: something is added to it."""
        assert isinstance(self.attention, DotProduct) and self.x is not None
        (head,) = heads_of(self.attention, turn=False)
        return HeadAt(head, self.x)

    @cached_property
    def heads(self) -> list[Head]:
        """Heads with the output projection folded in, for the map ``attention``."""
        return self._made(fold=self.map == "attention")

    @cached_property
    def bare(self) -> list[Head]:
        """Heads before the output projection."""
        return self._made(fold=False)

    @property
    def together(self) -> HeadsAt:
        """The heads at the input, with the part of the output projection that is theirs."""
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
        return spectral_norm(self.attention.output)

    def each(self, subject: type, *, bare: bool = False) -> Iterator[Head | HeadAt]:
        """The heads, at the input for theorems about `HeadAt`."""
        for index, head in enumerate(self.bare if bare else self.heads):
            yield head if subject is Head else self._at_input(index, head, bare)

    def _at_input(self, index: int, head: Head, bare: bool) -> HeadAt:
        assert self.x is not None
        found = self._at.get((index, bare)) or HeadAt(head, self.x)
        if len(self.x) <= _KEPT:
            self._at[index, bare] = found
        return found

    def _made(self, *, fold: bool) -> list[Head]:
        assert isinstance(self.attention, DotProduct)
        heads = heads_of(self.attention, fold=fold)
        return heads if self.head is None else [heads[self.head]]


def evaluate(
    theorem: Theorem,
    layer: Attention | AskedLayer,
    *,
    x: Tensor | None = None,
    num_tokens: int | None = None,
    radius: float | None = None,
    map: Map = "attention",
    slope: Tensor | None = None,
    around: Around | None = None,
) -> float:
    """The value of a theorem for a whole layer.

    Upper bounds of one head become bounds of the layer by the smaller of the two forms of
    Lemma 3.8; lower bounds do not add up and stand for layers of one head only.

    Args:
        theorem: An entry of the catalogue.
        layer: The layer, or an `AskedLayer` made of it, whose ``map`` and ``x`` then count.
        x: ``(n, d)``, for local theorems.
        num_tokens: For theorems on all inputs of that length.
        radius: For theorems on all inputs with tokens of at most that norm.
        map: ``attention``, or ``heads`` for the concatenation before the projection.
        slope: For the map ``normed``, whose norm ``layer`` has taken up: `Norm.slope` of every
            token at ``x``, or the largest one for all inputs.
        around: For the map ``residual``: what stands around attention, at ``x`` or at all inputs.

    Returns:
        The value, finite.

    Raises:
        NotApplicableError: If a hypothesis does not hold or something it asks for is not
            known; the message continues "not applicable because …".

    Source: Lemma 3.8 of [castin2024].
    """
    if not isinstance(layer, AskedLayer):
        layer = AskedLayer(layer, map, x=x)
    given = {"x": layer.x, "num_tokens": num_tokens, "radius": radius}
    missing = [name for name in theorem.needs if given.get(name) is None]
    if missing:
        raise NotApplicableError(f"it asks for `{missing[0]}`")
    held = theorem.subject.needs if issubclass(theorem.subject, AtInput) else ()
    wanted = {name: given[name] for name in theorem.needs if name not in held}
    factor = 1.0
    if slope is not None:
        factor = _chain_rule(theorem, slope)
        wanted |= {"slope": slope} if theorem.by_token else {}
    inside = around is not None and _goes_inside(theorem, layer, around)
    wanted |= {"around": around} if inside else {}
    try:
        value = _value(theorem, layer, lambda subject: _asked(theorem, subject, wanted), inside)
        value *= factor
        value = value if around is None or inside else around.of(value)
    except OverflowError:
        raise NotApplicableError(_TOO_LARGE) from None
    except RuntimeError as error:
        if "failed to converge" not in str(error):  # torch's exception for it is private
            raise
        raise NotApplicableError("an eigenvalue routine did not converge") from None
    if not math.isfinite(value):
        raise NotApplicableError(_TOO_LARGE)
    return value


def _asked(theorem: Theorem, subject: Any, wanted: dict[str, Any]) -> float:
    """What a theorem says, plus what rounding at the input may hide from an upper bound."""
    value = theorem.function(subject, **wanted)
    if not isinstance(subject, AtInput) or theorem.kind == "lower":
        return value
    steepest = float(wanted["slope"].max()) if "slope" in wanted else 1.0
    hidden = subject.slack * steepest
    return value + (wanted["around"].slack(hidden) if "around" in wanted else hidden)


def _goes_inside(theorem: Theorem, layer: AskedLayer, around: Around) -> bool:
    """Whether a theorem takes the identity inside: of all heads together, or of the only one."""
    if theorem.kind == "lower":
        raise NotApplicableError("it is of attention without the stream beside it")
    if theorem.scope == "limit":
        raise NotApplicableError("its limit is that of attention alone")
    if not around.plain and theorem.metric == "infinity":
        raise NotApplicableError("a norm after attention mixes entries, its largest one counts")
    if not bool(around.lefts.isfinite().all()):
        raise NotApplicableError("a norm after attention has ε = 0: there is no bound near 0")
    return theorem.inside and (theorem.subject is HeadsAt or layer.attention.num_heads == 1)


def _chain_rule(theorem: Theorem, slope: Tensor) -> float:
    """What the norm in front multiplies a theorem by; 1 where the theorem sees to it."""
    if theorem.kind == "lower":
        raise NotApplicableError("its inputs are not what comes out of a norm")
    if theorem.scope == "limit":
        raise NotApplicableError("tokens do not grow after a norm")
    steepest = float(slope.max())
    if not math.isfinite(steepest):
        raise NotApplicableError("its norm has ε = 0: there is no bound near tokens of norm 0")
    return 1.0 if theorem.by_token else steepest


def _value(
    theorem: Theorem, layer: AskedLayer, value: Callable[[object], float], inside: bool
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


def _of_heads(theorem: Theorem, layer: AskedLayer, value: Callable[[object], float]) -> float:
    if len(layer.heads) > 1 and theorem.kind == "lower":
        raise NotApplicableError("lower bounds of heads do not add up; ask for one head")
    values = [value(head) for head in layer.each(theorem.subject)]
    if len(values) == 1:
        return values[0]
    if not layer.projected:
        return math.hypot(*values)
    bare = [value(head) for head in layer.each(theorem.subject, bare=True)]
    return min(sum(values), layer.norm_output * math.hypot(*bare))
