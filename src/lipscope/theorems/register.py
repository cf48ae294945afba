"""The catalogue: one theorem is one small function whose signature is its hypothesis.

The first parameter says for what it holds: `Head`, one head of dot-product attention, for all
inputs; `HeadAt` or `HeadsAt`, one head or all together at this input ``x``; a subclass of
`Attention`, a whole layer of that variant. The others say what it needs to know: ``eps`` (for
inputs in a ball around ``x``), ``num_tokens`` and ``radius`` (for all inputs of that length with
tokens of at most that norm). One that may be told the
``slope`` of a norm in front, token by token, knows the map ``normed`` itself, one that may be told
what is ``around`` attention the map ``residual``; all others reach them by the chain rule
(`lipscope.theorems.layer_bounds`). What a signature cannot
say (no mask, no rotary embedding, …) a theorem checks first and raises `NotApplicableError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from lipscope.linalg import Metric
from lipscope.plugins import check_name, load_plugins
from lipscope.records import Bound

BoundKind = Literal["upper", "lower"]
Scope = Literal["local", "ball", "global", "mean-field", "limit"]
Cost = Callable[[int, int], float]
DERIVED = "derived here"
RECALLED = "as recalled"
"""Said wherever such a theorem is printed: its formula was not seen in print."""
PATIENCE = 5.0
"""Seconds that a theorem may take on one core without being asked for, as `Theorem.cost` says."""


class NotApplicableError(Exception):
    """A hypothesis of a theorem does not hold; the message says which one and why."""


@dataclass(frozen=True, repr=False)
class Theorem:
    """One entry of the catalogue."""

    name: str  # name of its function
    function: Callable[..., float]  # the function; returns the value as a float
    statement: str  # where it is stated, such as "Theorem 3.3", and whether that is `RECALLED`
    cite: str  # key of the bibliography, or `DERIVED`
    kind: BoundKind  # ``upper`` or ``lower`` bound of sigma
    scope: Scope  # for which inputs
    metric: Metric  # how input and output are measured
    subject: type  # type of the first parameter
    # what it must be told: ``x`` if the first parameter is about an input, and the names of the
    # other parameters that have no default
    needs: tuple[str, ...]
    by_token: bool  # whether it takes the ``slope`` of a norm in front, one value per token
    inside: bool  # whether it takes what is ``around`` attention, so that the identity is inside it
    sound: bool  # false for a statement that is exposed as found although it fails
    # about how many seconds it takes on one core at a number of tokens and a width of values, where
    # it may take long; None where it does not. What takes longer than `PATIENCE` is left out unless
    # sharper forms are asked for
    cost: Cost | None
    note: str  # what a reader must know about it, or ""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.stated} [{self.cite}], {self.scope} {self.kind} bound>"

    @property
    def stated(self) -> str:
        """Its statement, and whether it fails."""
        return self.statement + ("" if self.sound else " (as found; fails)")

    @property
    def slow(self) -> bool:
        """Whether it may take seconds."""
        return self.cost is not None

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").splitlines()[0]

    def record(self, value: float | None, reason: str = "", **more: Any) -> Bound:
        """Its value for a layer, or why it has none."""
        names = ("statement", "cite", "kind", "scope", "metric", "note", "sound")
        said = {name: getattr(self, name) for name in names}
        return Bound(theorem=self.name, value=value, reason=reason, **said, **more)


_CATALOGUE: dict[str, Theorem] = {}


def theorem(
    *,
    cite: str,
    statement: str,
    kind: BoundKind = "upper",
    metric: Metric = "frobenius",
    scope: Scope | None = None,
    sound: bool = True,
    recalled: bool = False,
    cost: Cost | None = None,
    note: str = "",
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Enter a function into the catalogue, with what `Theorem` says of its entries.

    ``scope`` is read off the signature if None; ``recalled``: its printed formula was not seen.
    """

    def enter(function: Callable[..., float]) -> Callable[..., float]:
        hints: dict[str, Any] = get_type_hints(function)
        parameters = inspect.signature(function).parameters
        subject, *rest = parameters
        needs = [
            *getattr(hints[subject], "needs", ()),
            *(name for name in rest if parameters[name].default is inspect.Parameter.empty),
        ]
        name = function.__name__
        check_name("theorem", name, function, getattr(_CATALOGUE.get(name), "function", None))
        _CATALOGUE[name] = Theorem(
            name,
            function,
            f"{statement} ({RECALLED})" if recalled else statement,
            cite,
            kind,
            scope or _scope_of_needs(needs),
            metric,
            hints[subject],
            tuple(needs),
            "slope" in rest,
            "around" in rest,
            sound,
            cost,
            note,
        )
        return function

    return enter


def catalogue() -> list[Theorem]:
    """Every theorem, in the order in which the papers were registered; plug-ins come last."""
    load_plugins("lipscope.theorems")
    return list(_CATALOGUE.values())


def theorem_named(name: str) -> Theorem:
    """One of the house's own entries."""
    return _CATALOGUE[name]


def _scope_of_needs(needs: list[str]) -> Scope:
    if "eps" in needs:
        return "ball"
    if "x" in needs:
        return "local"
    return "global" if "num_tokens" in needs else "mean-field"
