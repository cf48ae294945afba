"""Small single and several-headed layers with inputs of every kind that bounds must survive."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lipscope import to_dense
from lipscope.attention import (
    Attention,
    ClippedAttention,
    DividedAttention,
    DotProduct,
    L2Attention,
    LipschitzNormAttention,
    Rotary,
    ScaledCosineAttention,
    SigmoidAttention,
    SinkhornAttention,
    TokenNorm,
)
from lipscope.theorems import catalogue, evaluate

THEOREMS = {theorem.name: theorem for theorem in catalogue()}

REGIMES = (
    "soft",
    "medium",
    "sharp",
    "clustered",
    "large radius",
    "causal",
    "causal, sharp",
    "masked",
    "biased",
    "biased, causal",
    "sphere",
    "rotary",
    "rotary, biased, causal",
    "heads",
    "heads, grouped, biased, causal",
    "heads, no projection",
    "one token",
    "equal tokens",
    "two clusters",
    "relative bias",
    "heads, relative bias, causal",
    "rotary, relative bias",
    "window, causal",
    "soft cap, causal",
    "heads, grouped, normalised",
)


# Other variants.
OTHERS = ("L2", "cosine", "LipschitzNorm", "Sinkhorn", "sigmoid", "clipped", "divided")


def draw(regime: str, seed: int) -> tuple[DotProduct, Tensor]:
    """A layer with dot-product scores and an input, float64, at most 8 tokens of width 5."""
    gen = torch.Generator().manual_seed(1000 * REGIMES.index(regime) + seed)

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    n, d, k, d_v = 6 + seed % 3, 5, 3, 3
    heads = 4 if "heads" in regime else 1
    groups = 2 if "grouped" in regime else heads
    size = {"soft": 0.3, "sharp": 3.0, "large radius": 12.0, "causal, sharp": 3.0}.get(regime, 1.0)
    x = size * t(n, d)
    if regime == "clustered":
        centres = t(2, d)
        x = centres[torch.randint(2, (n,), generator=gen)] + 0.05 * x
    if regime == "sphere":
        x = x - x.mean(1, keepdim=True)
        x = d**0.5 * x / x.norm(dim=1, keepdim=True)
    if regime == "one token":
        x = x[:1]
    if regime == "equal tokens":
        x = x[:1].expand(n, -1).clone()
    if regime == "two clusters":
        u = t(d)
        x = -u.expand(n, -1).clone()
        x[0] = u
    n = len(x)
    options: dict[str, Any] = {"causal": "causal" in regime}
    if regime == "masked":
        shown = torch.rand(n, n, generator=gen) < 0.6
        options["mask"] = shown | torch.eye(n, dtype=torch.bool)
    if "biased" in regime:
        options |= {"query_bias": t(heads * k), "key_bias": t(groups * k)}
    if "rotary" in regime:
        angle = t(n, 1).repeat(1, 2)
        options["rotary"] = Rotary(angle.cos(), angle.sin())
    if "relative bias" in regime:
        options["score_bias"] = 2 * t(heads, n, n)
    if "soft cap" in regime:
        options["softcap"] = 1.5
    if "normalised" in regime:
        options |= {"query_norm": TokenNorm(t(k), 0.1), "key_norm": TokenNorm(t(k), 0.1)}
    if "window" in regime:
        options["window"] = 3
    output = None if "no projection" in regime else t(4, heads * d_v)
    layer = DotProduct(
        t(heads * k, d),
        t(groups * k, d),
        t(groups * d_v, d),
        output if "heads" in regime else None,
        heads=heads,
        groups=groups,
        **options,
    )
    return layer, x


def draw_variant(name: str, seed: int) -> tuple[Attention, Tensor]:
    """A layer of another variant and an input of any size."""
    gen = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    n = 2 + seed % 6
    x = t(n, 4) * 10 ** float(t(1).clamp(-1, 1))
    causal = bool(seed % 2)
    if name == "L2":
        layer = L2Attention(t(6, 4), t(4, 4), t(3, 4), heads=2, causal=causal)
    elif name == "cosine":
        layer = ScaledCosineAttention(
            t(6, 4), t(6, 4), t(4, 4), t(3, 4), temperature=2.0, eps=0.1, heads=2, causal=causal
        )
    elif name == "LipschitzNorm":
        layer = LipschitzNormAttention(t(3, 4), t(3, 4), t(2, 4), t(3, 2))
    elif name == "Sinkhorn":
        layer = SinkhornAttention(t(6, 4), t(6, 4), t(4, 4), t(3, 4), heads=2, scale=0.01)
    else:
        kinds = {
            "sigmoid": (SigmoidAttention, {}),
            "clipped": (ClippedAttention, {"radius": 1.5}),
            "divided": (DividedAttention, {"by": "G2", "num_tokens": n, "radius": 1.5}),
        }
        kind, options = kinds[name]
        weights = t(6, 4), t(6, 4), t(4, 4), t(3, 4)
        layer = kind(*weights, heads=2, causal=causal, scale=0.1, **options)
    return layer, x


def all_cases(per_regime: int) -> Iterator[tuple[str, Attention, Tensor]]:
    """Every regime and variant, ``per_regime`` of each."""
    for seed in range(per_regime):
        for regime in REGIMES:
            yield regime, *draw(regime, seed)
        for name in OTHERS:
            yield name, *draw_variant(name, seed)


def eye(d: int) -> torch.Tensor:
    return torch.eye(d, dtype=torch.float64)


def single(a: torch.Tensor, value: torch.Tensor | None = None, **options) -> DotProduct:
    """One head with ``A = a``."""
    a = a.to(torch.float64)
    value = eye(len(a)) if value is None else value
    return DotProduct(a, eye(len(a)), value, scale=1.0, **options)


def sigma(layer, x: torch.Tensor, part: str = "attention") -> float:
    return float(torch.linalg.matrix_norm(to_dense(layer.linearise(x, map=part)), 2))


def value(name: str, layer, **given) -> float:
    return evaluate(THEOREMS[name], layer, **given)


def counterexample() -> tuple[DotProduct, torch.Tensor]:
    """Theorem C.3 as coded: A = 3 e1 e2^T sends x to nothing, but not A^T."""
    a = torch.zeros(2, 2)
    a[0, 1] = 3
    x = torch.zeros(8, 2, dtype=torch.float64)
    x[:, 0] = 3.0 * (-1.0) ** torch.arange(8)
    return single(a), x
