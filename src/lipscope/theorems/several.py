"""From one head to a layer: the combinations of Lemma 3.8, in one place.

A layer is ``Σ_h W_h f_h``. In every norm of outputs in which the heads' parts add up,
``‖J‖ ≤ Σ_h ‖W_h J_h‖`` (each ``W_h`` folded into its head), and, where ``‖·‖`` is the
Frobenius norm or the largest token norm, ``‖J‖ ≤ ‖W_O‖ √(Σ_h ‖J_h‖²)``. Neither is always
the smaller one.

The map ``normed`` is reached from the layer that has taken up the norm (`Normed.absorbed`), at
radius 1 and with the slope of the norm: by the chain rule, ``‖J_f N'‖ ≤ ‖J_f‖ max_j s_j``, or
token by token where a theorem takes the slopes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention import Attention, DotProduct
from lipscope.attention import Map as Part
from lipscope.theorems.head import Head, Heads, all_heads_of, heads_of
from lipscope.theorems.register import NotApplicableError, Theorem

_TOO_LARGE = "its value exceeds the float64 range"


@dataclass(frozen=True)
class Layer:
    """A layer as theorems ask for it: its heads are taken out once, whoever asks.

    Attributes:
        attention: The layer.
        part: ``attention`` or ``heads``.
        head: One query head alone, or None for all.
    """

    attention: Attention
    part: Part = "attention"
    head: int | None = None

    @cached_property
    def heads(self) -> list[Head]:
        """Heads with the output projection folded in, for the part ``attention``."""
        assert isinstance(self.attention, DotProduct)
        return self._chosen(heads_of(self.attention, fold=self.part == "attention"))

    @cached_property
    def bare(self) -> list[Head]:
        """Heads before the output projection."""
        assert isinstance(self.attention, DotProduct)
        return self._chosen(heads_of(self.attention, fold=False))

    @cached_property
    def together(self) -> Heads:
        """The heads unfolded, with the part of the output projection that is theirs."""
        assert isinstance(self.attention, DotProduct)
        every = all_heads_of(self.attention, fold=self.part == "attention")
        if self.head is None or every.output is None:
            return Heads(tuple(self._chosen(list(every.heads))), every.output)
        own = every.output.chunk(len(every.heads), 1)[self.head]
        return Heads((every.heads[self.head],), own)

    @property
    def projected(self) -> bool:
        """Whether an output projection is part of the map."""
        return self.part == "attention" and self.attention.output is not None

    @cached_property
    def norm_output(self) -> float:
        """``‖W_O‖``."""
        output = self.attention.output
        assert output is not None
        w = output.detach().to("cpu", torch.float64)
        w = w if w.shape[0] <= w.shape[1] else w.T
        return float(torch.linalg.eigvalsh(w @ w.T)[-1].clamp_min(0).sqrt())

    def _chosen(self, heads: list[Head]) -> list[Head]:
        return heads if self.head is None else [heads[self.head]]


def evaluate(
    theorem: Theorem,
    layer: Attention | Layer,
    *,
    x: Tensor | None = None,
    num_tokens: int | None = None,
    radius: float | None = None,
    part: Part = "attention",
    slope: Tensor | None = None,
) -> float:
    """The value of a theorem for a whole layer.

    Upper bounds of one head become bounds of the layer by the smaller of the two forms of
    Lemma 3.8; lower bounds do not add up and stand for layers of one head only.

    Args:
        theorem: An entry of the catalogue.
        layer: The layer, or a `Layer` made of it (then ``part`` is that of the `Layer`).
        x: ``(n, d)``, for local theorems.
        num_tokens: For theorems on all inputs of that length.
        radius: For theorems on all inputs with tokens of at most that norm.
        part: ``attention``, or ``heads`` for the concatenation before the projection.
        slope: For the map ``normed``, whose norm ``layer`` has taken up: `Norm.slope` of every
            token at ``x``, or the largest one for all inputs.

    Returns:
        The value, finite.

    Raises:
        NotApplicableError: If a hypothesis does not hold or something it asks for is not
            known; the message continues "not applicable because …".

    Source: Lemma 3.8 of [castin2024].
    """
    if not isinstance(layer, Layer):
        layer = Layer(layer, part)
    given = {"x": x, "num_tokens": num_tokens, "radius": radius}
    missing = [name for name in theorem.needs if given.get(name) is None]
    if missing:
        raise NotApplicableError(f"it asks for `{missing[0]}`")
    wanted = {name: given[name] for name in theorem.needs}
    factor = 1.0
    if slope is not None:
        factor = _chain_rule(theorem, slope)
        wanted |= {"slope": slope} if theorem.by_token else {}
    try:
        value = _value(theorem, layer, lambda subject: theorem.function(subject, **wanted))
        value *= factor
    except OverflowError:
        raise NotApplicableError(_TOO_LARGE) from None
    except RuntimeError as error:
        if "failed to converge" not in str(error):  # torch's exception for it is private
            raise
        raise NotApplicableError("an eigenvalue routine did not converge") from None
    if not math.isfinite(value):
        raise NotApplicableError(_TOO_LARGE)
    return value


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


def _value(theorem: Theorem, layer: Layer, value: Callable[[object], float]) -> float:
    if theorem.subject in (Head, Heads):
        if not isinstance(layer.attention, DotProduct):
            raise NotApplicableError("it is stated for dot-product attention")
        if theorem.subject is Heads:
            return value(layer.together)
        return _of_heads(theorem, layer, value)
    if not isinstance(layer.attention, theorem.subject):
        raise NotApplicableError(f"it is stated for {theorem.subject.__name__}")
    if layer.head is not None and layer.attention.num_heads > 1:
        raise NotApplicableError("it is stated for the whole layer, not for one head")
    if layer.part == "heads" and layer.attention.output is not None:
        raise NotApplicableError("it is stated for the layer with its output projection")
    return value(layer.attention)


def _of_heads(theorem: Theorem, layer: Layer, value: Callable[[object], float]) -> float:
    if len(layer.heads) == 1:
        return value(layer.heads[0])
    if theorem.kind == "lower":
        raise NotApplicableError("lower bounds of heads do not add up; ask for one head")
    if not layer.projected:
        return math.hypot(*[value(head) for head in layer.heads])
    added = sum(value(head) for head in layer.heads)
    if layer.head is not None:
        return added
    joined = layer.norm_output * math.hypot(*[value(head) for head in layer.bare])
    return min(added, joined)
