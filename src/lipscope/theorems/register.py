"""The theorem catalogue: functions whose signatures state their hypotheses.

The type of the first parameter is the subject: `Head`, one head of dot-product attention, for
all inputs; `HeadAt` or `HeadsAt`, one head or all heads at an input ``x``; a subclass of
`Attention`, a whole layer of that variant. The others are required arguments: ``eps`` (for inputs
in a ball around ``x``), ``num_tokens`` and ``radius`` (for all inputs of that length with tokens
of at most that norm). A theorem with a parameter ``slope`` (of a norm in front, token by token)
covers the map ``normed`` itself, one with ``around`` (norms and residual path) the map
``residual``; all others are extended by the chain rule (`lipscope.theorems.layer_bounds`).
Hypotheses not expressed by the signature (no mask, no rotary embedding, …) are checked first,
with a `NotApplicableError`.
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
"""Printed with theorems whose formula was not seen in print."""
PATIENCE = 5.0
"""Maximum predicted time (`Theorem.cost`) of a theorem computed by default, in seconds."""


class NotApplicableError(Exception):
    """A hypothesis of a theorem does not hold; the message gives the reason."""


@dataclass(frozen=True, repr=False)
class Theorem:
    """One entry of the catalogue."""

    name: str  # name of the function
    function: Callable[..., float]  # returns the value of the bound
    statement: str  # where it is stated, such as "Theorem 3.3", marked if `RECALLED`
    cite: str  # key of the bibliography, or `DERIVED`
    kind: BoundKind  # ``upper`` or ``lower`` bound of sigma
    scope: Scope  # inputs for which it holds
    metric: Metric  # metric of input and output
    subject: type  # type of the first parameter
    # required arguments: ``x`` if the first parameter is at an input, and the other parameters
    # without a default
    needs: tuple[str, ...]
    by_token: bool  # whether it takes the ``slope`` of a norm in front, one value per token
    inside: bool  # whether it takes ``around`` and includes the identity
    sound: bool  # false for a published statement that fails
    # predicted seconds on one core from numbers of tokens and width of values; None if always
    # fast. Theorems that take longer than `PATIENCE` are computed only on request
    cost: Cost | None
    note: str  # a remark for readers, or ""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.stated} [{self.cite}], {self.scope} {self.kind} bound>"

    @property
    def stated(self) -> str:
        """The statement, marked if it fails."""
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
        """A record of its value for a layer, or of the reason why it has none."""
        names = ("statement", "cite", "kind", "scope", "metric", "note", "sound")
        fields = {name: getattr(self, name) for name in names}
        return Bound(theorem=self.name, value=value, reason=reason, **fields, **more)


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
    """Decorate a function to enter it into the catalogue; arguments as for `Theorem`.

    ``scope`` follows from the signature if None; ``recalled``: the printed formula was not seen.
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
    """All theorems in the order of registration; plug-ins come last."""
    load_plugins("lipscope.theorems")
    return list(_CATALOGUE.values())


def theorem_named(name: str) -> Theorem:
    """A built-in theorem."""
    return _CATALOGUE[name]


def _scope_of_needs(needs: list[str]) -> Scope:
    if "eps" in needs:
        return "ball"
    if "x" in needs:
        return "local"
    return "global" if "num_tokens" in needs else "mean-field"
