"""The result of one question for one layer or one head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lipscope.errors import InputError, out_of_memory
from lipscope.linalg import Leading, TopSingular
from lipscope.records import AGAIN, TokenShare


@dataclass(frozen=True)
class Found:
    """One of the leading directions of a map, on all of its tokens.

    Attributes:
        of: The direction, its vectors on all tokens: zero where none moves or none is read.
        move: ``D v``, the move that it is in the metric.
    """

    of: Leading
    move: Float[Tensor, "n d"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one layer, or of one head.

    Attributes:
        head: Head, or None for all together.
        top: The solver's record; None if the computation failed.
        x: Input of the map, ``(n, d)``.
        output_norm: ``‖f(X)‖_F`` (of the head's slice or contribution, per head).
        share_in: Share of each token in the top right singular vector.
        share_out: Share of each output token in the left one.
        norms: Norm of each input token.
        sigma_rest: Sigma with the top token held fixed, or None.
        frobenius: Estimate of ``‖J‖_F``, or None.
        derivative_error: How far ``J v`` is from a finite difference of the model, or None.
        seconds: Solving time.
        notes: Remarks for the row.
        error: What failed, or None.
        leading: The leading directions, if they are asked for.
    """

    head: int | None
    top: TopSingular | None
    num_tokens: int
    input_norm: float
    output_norm: float | None
    share_in: list[float | None]
    share_out: list[float | None]
    norms: list[float | None]
    sigma_rest: float | None = None
    frobenius: float | None = None
    derivative_error: float | None = None
    seconds: float
    notes: tuple[str, ...] = ()
    error: str | None = None
    leading: tuple[Found, ...] = ()

    def columns(self) -> dict[str, Any]:
        """The columns of the row that the computation fills."""
        top = self.top
        sigma = finite(top.sigma) if top is not None else None
        known = [s for s in self.share_in if s is not None]
        best = self.share_in.index(max(known)) if known else None
        norms = [x for x in self.norms if x is not None]
        relative = None
        if known and sigma is not None and self.output_norm:  # of the same metric
            relative = sigma * self.input_norm / self.output_norm
        return {
            "sigma": sigma,
            "upper": finite(top.upper) if top is not None else None,
            "status": top.status if top is not None else "failed",
            "solver_residual": finite(top.solver_residual) if top is not None else None,
            "products": top.products if top is not None else 0,
            "relative": relative,
            "top_token": best,
            "top_share": self.share_in[best] if best is not None else None,
            "sigma_rest": self.sigma_rest,
            "frobenius": self.frobenius,
            "derivative_error": self.derivative_error,
            "radius_max": max(norms) if norms else None,
            "radius_rms": math.sqrt(sum(x * x for x in norms) / len(norms)) if norms else None,
            "input_norm": finite(self.input_norm),
            "output_norm": self.output_norm,
            "seconds": self.seconds,
            "error": self.error,
        }

    def token_shares(self, row_id: str, texts: Sequence[str] | None) -> list[TokenShare]:
        """One record per token of the window, under the row that it belongs to."""
        if texts is not None and len(texts) != self.num_tokens:
            texts = None  # several streams, or patches: these are no tokens of the text
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


def no_answer(head: int | None, num_tokens: int, error: str) -> Answer:
    """The answer where nothing could be computed."""
    return Answer(
        head=head,
        top=None,
        num_tokens=num_tokens,
        input_norm=math.nan,
        output_norm=None,
        share_in=[],
        share_out=[],
        norms=[],
        seconds=0.0,
        error=error,
    )


def finite(value: float) -> float | None:
    """A number that JSON can hold, or None."""
    return value if math.isfinite(value) else None


def explained(problem: Exception) -> str:
    """An error in one line, which says whether another run may well have none.

    Want of memory, and files that cannot be read or written, are not the question's fault.

    >>> explained(MemoryError("nothing left"))
    'MemoryError: nothing left; the next run tries it again'
    """
    kind = "" if isinstance(problem, InputError) else f"{type(problem).__name__}: "
    text = " ".join(f"{kind}{problem}".split())[:300]
    cause = problem.__cause__ if isinstance(problem, InputError) else problem
    outside = cause is not None and (out_of_memory(cause) or isinstance(cause, OSError))
    return f"{text.rstrip('.')}; {AGAIN}" if outside else text
