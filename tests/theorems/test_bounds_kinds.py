"""Bounds of every variant, and those in balls, on every kind of input: 200 cases of each.

One layer is asked at many inputs at once, and dense Jacobians come from automatic
differentiation, so that hundreds of cases cost seconds.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

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
)
from lipscope.linalg import nonnegative_norm
from lipscope.theorems import (
    Head,
    HeadAt,
    HeadsAt,
    LayerSubject,
    NotApplicableError,
    Theorem,
    ball,
    catalogue,
    evaluate,
    heads_of,
)

ROUNDING = 1e-9
WIDTH, EACH = 4, 5
KINDS = ("random", "clustered", "large radius", "sphere", "equal tokens", "ascent")
VARIANTS = (
    "rotary",
    "L2",
    "cosine",
    "LipschitzNorm",
    "Sinkhorn",
    "sigmoid",
    "clipped",
    "normalised",
    "divided",
)
# A second each: asked now and then.
COSTLY = {"row_gram", "row_gram_joint", "castin_lemma_3_8", "sink_column_upper"}
EXTRAS = ("plain", "causal", "masked", "biased", "heads", "heads, causal", "heads, masked")


def build(variant: str, extra: str, n: int, seed: int) -> Attention | None:
    """A layer of a variant, or None where it has no such mask or bias."""
    gen = torch.Generator().manual_seed(1000 * seed + 10 * n + EXTRAS.index(extra))

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    heads = 2 if "heads" in extra else 1
    output = t(3, 2 * heads) if "heads" in extra else None
    shown = (torch.rand(n, n, generator=gen) < 0.6) | torch.eye(n, dtype=torch.bool)
    mask = {"causal": "causal" in extra, "mask": shown if "masked" in extra else None}
    if variant == "rotary":
        bias = (
            (t(2 * heads), t(2 * heads)) if extra in ("biased", "heads, causal") else (None, None)
        )
        angle = t(n, 1).repeat(1, 2)
        return DotProduct(
            t(2 * heads, WIDTH),
            t(2 * heads, WIDTH),
            t(2 * heads, WIDTH),
            output,
            heads=heads,
            query_bias=bias[0],
            key_bias=bias[1],
            rotary=Rotary(angle.cos(), angle.sin()),
            **mask,
        )
    if variant in ("sigmoid", "clipped", "normalised", "divided"):
        three = tuple(t(2 * heads, WIDTH) for _ in range(3))
        if extra in ("biased", "heads, causal"):
            mask |= {name: t(2 * heads) for name in ("query_bias", "key_bias", "value_bias")}
        mask |= {"heads": heads, "scale": 0.3}
        if variant == "sigmoid":
            return SigmoidAttention(*three, output, offset=-1.0 if seed else None, **mask)
        if variant == "divided":
            by = "theorem-3.3" if seed else "mean-field" if n > 2 else "G2"
            if mask["causal"] or mask["mask"] is not None:
                by = "G2"
            return DividedAttention(*three, output, by=by, num_tokens=n, radius=2.0, **mask)
        into = "clip" if variant == "clipped" else "normalise"
        return ClippedAttention(*three, output, radius=1.0 + seed, into=into, **mask)
    if extra == "biased":
        return None
    if variant == "Sinkhorn":
        if "causal" in extra:
            return None
        shown = shown & shown.T | torch.eye(n, dtype=torch.bool)
        mask = {"mask": shown if "masked" in extra else None}
        three = (0.3 * t(2 * heads, WIDTH) for _ in range(3))
        return SinkhornAttention(*three, output, heads=heads, scale=0.2, **mask)
    if variant == "L2":
        return L2Attention(t(2 * heads, WIDTH), t(2 * heads, WIDTH), output, heads=heads, **mask)
    if variant == "cosine":
        three = (t(2 * heads, WIDTH) for _ in range(3))
        tau = 0.3 + 3 * float(torch.rand(1, generator=gen))
        return ScaledCosineAttention(*three, output, temperature=tau, eps=0.05, heads=heads, **mask)
    if extra not in ("plain", "heads"):
        return None
    return LipschitzNormAttention(t(2, WIDTH), t(2, WIDTH), t(2, WIDTH), t(3, 2))


def jacobians(layer: Attention, points: Tensor) -> Tensor:
    """Dense, ``(b, n d_out, n d)``, by automatic differentiation."""
    found = torch.func.vmap(torch.func.jacrev(layer))(points)
    return found.flatten(3).flatten(1, 2)


def sigmas(layer: Attention, points: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(jacobians(layer, points), 2)


def within(centre: Tensor, radius: float, points: Tensor) -> Tensor:
    """Points with every token put back into the ball around the centre's token."""
    move = points - centre
    return centre + move * (radius / move.norm(dim=-1, keepdim=True).clamp_min(1e-12)).clamp_max(1)


def climb(
    layer: Attention, start: Tensor, centre: Tensor, radius: float, gen: torch.Generator
) -> Tensor:
    """Each of the starts after eight rounds of random moves in a ball that raise sigma."""
    best = within(centre, radius, start)
    values = sigmas(layer, best)
    for size in torch.logspace(0, -2, 8).tolist():
        noise = torch.randn(best.shape, generator=gen, dtype=torch.float64)
        moved = within(centre, radius, best + size * radius * noise / WIDTH**0.5)
        found = sigmas(layer, moved)
        better = found > values
        best = torch.where(better[:, None, None], moved, best)
        values = torch.where(better, found, values)
    return best


def inputs(layer: Attention, n: int, seed: int) -> dict[str, Tensor]:
    """``EACH`` inputs of every kind, ``(EACH, n, WIDTH)``."""
    gen = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    x = t(EACH, n, WIDTH)
    which = torch.randint(2, (EACH, n, 1), generator=gen)
    centres = t(EACH, 2, WIDTH).gather(1, which.expand(-1, -1, WIDTH))
    centred = x - x.mean(-1, keepdim=True)
    made = {
        "random": x * torch.logspace(-1, 0.5, EACH, dtype=torch.float64)[:, None, None],
        "clustered": centres + 0.05 * x,
        "large radius": 20 * t(EACH, n, WIDTH),
        "sphere": WIDTH**0.5 * centred / centred.norm(dim=-1, keepdim=True),
        "equal tokens": x[:, :1].expand(-1, n, -1).clone(),
    }
    made["ascent"] = climb(layer, made["random"], 0 * x, 3.0, gen)
    assert tuple(made) == KINDS
    return made


def upper_bounds(subjects: tuple[type, ...]) -> list[Theorem]:
    return [
        t
        for t in catalogue()
        if t.kind == "upper" and t.sound and t.scope != "limit" and t.subject in subjects
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_on_every_kind_of_input(variant: str) -> None:
    checked: Counter[tuple[str, str]] = Counter()
    subject: tuple[type, ...] = (Head, HeadAt, HeadsAt)
    # Fewer layers where bounds are asked at every input, more where most extras do not exist.
    fewer = {"rotary": (1, (6,)), "LipschitzNorm": (4, (2, 7)), "Sinkhorn": (3, (2, 7))}
    seeds, lengths = fewer.get(variant, (2, (2, 7)))
    sizes = itertools.product(range(seeds), lengths, EXTRAS)
    for index, (seed, n, extra) in enumerate(sizes):
        layer = build(variant, extra, n, seed)
        if layer is None:
            continue
        if not isinstance(layer, DotProduct):
            subject = (type(layer),)
        asked = [t for t in upper_bounds(subject) if "eps" not in t.needs]
        for kind, points in inputs(layer, n, seed).items():
            dense = jacobians(layer, points)
            truth = {
                "frobenius": torch.linalg.matrix_norm(dense, 2),
                "infinity": dense.abs().sum(-1).amax(-1),
            }
            radius = float(points.norm(dim=-1).max())
            shared = [LayerSubject(layer, x=x) for x in points]
            for theorem in asked:
                if theorem.metric not in truth:
                    continue  # not for rotary embeddings, nor for other variants
                if theorem.slow and (index + KINDS.index(kind)) % 6:
                    continue
                local = "x" in theorem.needs
                for k, each in enumerate(shared[:1] if theorem.slow or not local else shared):
                    try:
                        bound = evaluate(theorem, each, num_tokens=n, radius=radius)
                    except NotApplicableError:
                        break
                    sigma = truth[theorem.metric][k] if local else truth[theorem.metric].max()
                    checked[theorem.name, kind] += 1 if local else len(points)
                    assert bound >= float(sigma) * (1 - ROUNDING), (theorem.name, extra, kind, seed)
    for name in {name for name, _ in checked} - COSTLY:
        each = [checked[name, kind] for kind in KINDS]
        assert sum(each) >= 200 and min(each) >= 30, (name, each)
    expected = {"local_norms", "local_rows", "global_rotary", *COSTLY}
    if variant != "rotary":
        expected = {t.name for t in upper_bounds(subject)}
    assert {name for name, _ in checked} == expected


# --- balls


BALL_LAYERS = ("plain", "causal", "biased", "masked", "rotary")


def ball_layer(kind: str, n: int, seed: int) -> DotProduct:
    gen = torch.Generator().manual_seed(100 * seed + BALL_LAYERS.index(kind))

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    angle = t(n, 1).repeat(1, 2)
    return DotProduct(
        t(2, WIDTH),
        t(2, WIDTH),
        t(3, WIDTH),
        query_bias=t(2) if kind == "biased" else None,
        causal=kind == "causal",
        mask=(torch.rand(n, n, generator=gen) < 0.6) | torch.eye(n, dtype=torch.bool)
        if kind == "masked"
        else None,
        rotary=Rotary(angle.cos(), angle.sin()) if kind == "rotary" else None,
    )


def test_ball_theorems_of_the_catalogue() -> None:
    """Sigma climbed to in the ball around every kind of input."""
    balls = [t for t in catalogue() if "eps" in t.needs]
    checked: Counter[str] = Counter()
    gen = torch.Generator().manual_seed(0)
    for seed, layer_kind in enumerate(BALL_LAYERS * 2):
        layer = ball_layer(layer_kind, 5, seed)
        (head,) = heads_of(layer)
        for index, (kind, points) in enumerate(inputs(layer, 5, seed).items()):
            x = points[seed % EACH]
            eps = (1e-3, 0.05, 0.3)[(seed + index) % 3] * float(x.norm(dim=-1).max())
            at = HeadAt(head, x)
            start = x + eps * torch.randn(6, *x.shape, generator=gen, dtype=torch.float64)
            moved = climb(layer, start, x, eps, gen)
            sigma = float(sigmas(layer, moved).max())
            for theorem in balls:
                try:
                    bound = theorem.function(at, eps)
                except NotApplicableError:
                    continue
                checked[theorem.name] += len(moved)
                assert bound >= sigma * (1 - ROUNDING), (theorem.name, layer_kind, kind, eps)
    assert {t.name for t in balls} == set(checked)
    assert min(checked.values()) >= 200, checked


def test_norm_of_a_large_matrix_is_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collatz and Wielandt's bound, used above 1,024 tokens, against a full decomposition."""
    gen = torch.Generator().manual_seed(0)
    for trial in range(60):
        n = 3 + trial % 30
        m = torch.randn(n, n, generator=gen, dtype=torch.float64).mul(1 + trial % 7).exp()
        if trial % 3 == 1:  # causal, and rows that sum to 1
            m = m.tril() / m.tril().sum(-1, keepdim=True)
        if trial % 3 == 2:  # two parts that do not see each other, and a row of zeros
            m[: n // 2, n // 2 :] = m[n // 2 :, : n // 2] = 0
            m[0] = 0
        exact = float(torch.linalg.matrix_norm(m, 2))
        monkeypatch.setattr("lipscope.linalg.norms._EXACT_NORM", 0)
        assert exact * (1 - 1e-12) <= nonnegative_norm(m) <= 1.05 * exact, trial
        monkeypatch.setattr("lipscope.linalg.norms._EXACT_NORM", 1024)
        assert nonnegative_norm(m) == pytest.approx(exact)


def test_ball_blocks_by_the_same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in BALL_LAYERS:
        layer = ball_layer(kind, 6, 3)
        (head,) = heads_of(layer)
        at = HeadAt(head, inputs(layer, 6, 1)["random"][3])
        monkeypatch.setattr("lipscope.linalg.norms._EXACT_NORM", 1024)
        exact = ball.ball_blocks(at, 0.01)
        monkeypatch.setattr("lipscope.linalg.norms._EXACT_NORM", 0)
        assert exact * (1 - 1e-12) <= ball.ball_blocks(at, 0.01) <= 1.05 * exact
