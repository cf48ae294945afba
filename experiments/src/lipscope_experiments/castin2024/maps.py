"""Which maps split: every variant and what is made of layers, searched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import Attention, DotProduct, InputError
from lipscope.attention import arguments, variants
from lipscope.linalg import start_named
from lipscope.measures import split_at
from lipscope.pages import number
from lipscope_experiments.experiment import Study, ValueJob
from lipscope_experiments.findings import Record, Table

Map = Callable[[Tensor], Tensor]
SIGNS = {"A = -I": -1.0, "A = +I": 1.0}
CLEAR = 1e-6  # above 1: what rounding cannot do
_OPTIONS: dict[str, Any] = {"temperature": 5.0, "radius": 3.0, "num_tokens": 64, "by": "G2"}


def multiple(sign: float, d: int) -> DotProduct:
    """One head with ``A = sign I`` and ``V = I``."""
    eye = torch.eye(d, dtype=torch.float64)
    return DotProduct(sign * eye, eye, eye, scale=1.0)


def table_of_maps(study: Study) -> Table:
    """Every map, the largest ratio that a search found, and what is proved."""
    maps = study.values("maps", [_map_job(study, name) for name in _maps()])
    return Table(
        "Which maps split: largest split / moved that a search found",
        ("map", "largest", "found", "proved"),
        tuple(
            (
                r["map"],
                "–" if r["largest"] is None else number(r["largest"]),
                _verdict(r),
                _PROVED.get(r["map"], "–"),
            )
            for r in maps
        ),
    )


_ENCODER = "model without positions: two encoder layers"
_L2 = "never: the own block is T plus a positive matrix"
_PROVED = {
    "L2Attention, A = -I": _L2,
    "L2Attention, A = +I": _L2,
    "token by token (MLP, LayerNorm)": "never: both sides are equal",
    "mean of all tokens": "never: no own query",
    "A = 0 (uniform attention)": "never: no own query",
    "one token": "never for attention: it reads itself alone",
}


def _maps() -> dict[str, tuple[Callable[[int], Map], int]]:
    """Maps on tokens by name: what makes one of width d, and the number of tokens."""
    gen = start_named("splitting|maps")

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def mlp(d: int) -> Map:
        first, second = weight(4 * d, d), weight(d, 4 * d)
        return lambda x: torch.tanh(x @ first.T) @ second.T

    def block(d: int) -> Map:
        f, g = multiple(-1.0, d), mlp(d)

        def both(x: Tensor) -> Tensor:
            y = x + f(nn.functional.layer_norm(x, (d,)) if d > 1 else x)
            return y + g(y)

        return both

    def encoder(d: int) -> Map:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            one = nn.TransformerEncoderLayer(d, 1, 4 * d, dropout=0.0, batch_first=True)
            both = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        return both.double().eval().requires_grad_(False)

    made: dict[str, tuple[Callable[[int], Map], int]] = {}
    for kind in variants():
        for name, sign in SIGNS.items():
            made[f"{kind.__name__}, {name}"] = (_builder(kind, sign), 3)
    made["residual, A = -I"] = (lambda d: _plus(multiple(-1.0, d)), 3)
    made["residual, A = +I"] = (lambda d: _plus(multiple(1.0, d)), 3)
    made["block: attention, then MLP"] = (block, 3)
    made[_ENCODER] = (encoder, 3)
    made["A = 0 (uniform attention)"] = (lambda d: multiple(0.0, d), 3)
    made["one token"] = (lambda d: multiple(-1.0, d), 1)
    made["token by token (MLP, LayerNorm)"] = (mlp, 3)
    made["mean of all tokens"] = (lambda d: lambda x: x.mean(-2, keepdim=True).expand_as(x), 3)
    return made


def _plus(f: Map) -> Map:
    return lambda x: x + f(x)


def _builder(kind: type[Attention], sign: float) -> Callable[[int], Map]:
    """A layer of a variant with ``A`` a multiple of the identity, whatever else it asks for."""

    def build(d: int) -> Map:
        eye = torch.eye(d, dtype=torch.float64)
        needed = [
            name for name, one in arguments(kind).items() if one.default is inspect.Parameter.empty
        ]
        given: dict[str, Any] = {"query": sign * eye, "key": eye, "value": eye, **_OPTIONS}
        return kind(**{name: given.get(name, 1.0) for name in needed})

    return build


def _map_job(study: Study, name: str) -> ValueJob:
    starts, steps = study.pick((4, 25), (6, 60))

    def compute() -> Record:
        make, n = _maps()[name]
        widths = (4,) if name == _ENCODER else (1, 2)  # a norm of two entries is constant
        found = [_search(make(d), n, d, starts, steps, name) for d in widths]
        kept = [one for one in found if one is not None]
        return {"largest": max(kept, default=None), "inputs": len(widths) * starts * (steps + 1)}

    return {"map": name, "starts": starts, "steps": steps}, compute


def _search(f: Map, n: int, d: int, starts: int, steps: int, name: str) -> float | None:
    """The largest ratio by random steps from random inputs; None where none could be had."""
    gen, best = start_named(f"splitting|{name}|{d}"), None

    def value(x: Tensor) -> float:
        try:
            found = split_at(f, x)
        except InputError:
            return -1.0  # scores that float64 does not resolve
        return found.ratio if found.moving > 1e-9 else -1.0

    for _ in range(starts):
        size = 10 ** (1.4 * torch.rand(1, generator=gen, dtype=torch.float64) - 0.4)
        x = size * torch.randn(n, d, generator=gen, dtype=torch.float64)
        here = value(x)
        for step in range(steps):
            scale = size * 10 ** (-2 * step / steps)
            other = x + 0.5 * scale * torch.randn(n, d, generator=gen, dtype=torch.float64)
            if (tried := value(other)) > here:
                x, here = other, tried
        best = max(here, -1.0 if best is None else best)
    return None if best is None or best < 0 else best


def _verdict(r: Record) -> str:
    if r["largest"] is None:
        return "no gain at all"
    if r["largest"] > 1 + CLEAR:
        return "splits"
    return f"not found among {r['inputs']:,} inputs"
