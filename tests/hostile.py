"""Hostile small layers, and their Jacobians in extended precision.

Nothing of the truth comes from lipscope: blocks are formed one by one in numpy's long double
(64 bits of mantissa on x86, and exponents up to 16,383), where neither heads that cancel to
1e-12 nor scales of 1e-30 to 1e30 lose what is asked about.
"""

from __future__ import annotations

import numpy as np
import torch

from lipscope import DotProduct

KINDS = ("plain", "cancelling", "saturated", "duplicates", "zero", "scales", "folded")
EXTENDED = np.finfo(np.longdouble).eps < 1e-18  # not on every machine


def hostile(kind: str, seed: int) -> tuple[DotProduct, torch.Tensor]:
    """A layer and an input; sizes, mask and projection vary with the seed."""
    g = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=g, dtype=torch.float64))

    n, d, k = (int(torch.randint(1, 4, (), generator=g)) for _ in range(3))
    heads = 1 + seed % 3
    q, key, v, o, x = t(heads * k, d), t(heads * k, d), t(heads * k, d), t(d, heads * k), t(n, d)
    if kind == "cancelling":  # heads that differ by little are subtracted
        heads, small = 2, 10 ** between(-12, -2)
        q, key, v = (torch.cat([w[:k], w[:k] + small * t(k, d)]) for w in (q, key, v))
        o = torch.cat([o[:, :k], -o[:, :k]], 1)
    if kind == "folded":  # the projection takes away nearly all that the values give
        heads = 1
        q, key, v = q[:k], key[:k], t(k, 1) @ t(1, d)
        o = torch.randn(d, k, generator=g, dtype=torch.float64)
        along = v[:, :1] / v[:, :1].norm()
        o = o - (o @ along) @ along.T + 10 ** between(-14, -4) * t(d, k)
    if kind == "saturated":
        q = q * 10 ** between(0, 4)
    if kind == "duplicates":
        x = x[:1] + 10 ** between(-17, -6) * t(n, d) * (t(n, 1) > 0)
    if kind == "zero":
        small = [(0.0, 1e-200, 1e-30, *8 * [1.0])[int(between(0, 11))] for _ in range(5)]
        q, key, v, o, x = (w * s for w, s in zip((q, key, v, o, x), small, strict=True))
    if kind == "scales":
        q, key, v, o, x = (w * 10 ** between(-30, 30) for w in (q, key, v, o, x))
    layer = DotProduct(
        q, key, v, None if kind == "plain" and seed % 2 else o, heads=heads, causal=seed % 4 == 1
    )
    return layer, x


def jacobian(layer: DotProduct, x: torch.Tensor | np.ndarray) -> np.ndarray:
    """``(n, d_out, n, d)`` in long double."""
    return value_and_jacobian(layer, x)[1]


def value_and_jacobian(
    layer: DotProduct, x: torch.Tensor | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``f(X)`` and its Jacobian, in long double."""
    heads, (n, d) = layer.num_heads, x.shape
    long = np.longdouble
    tokens = np.asarray(x).astype(long)
    q, k, v = (
        w.unflatten(0, (heads, -1)).numpy().astype(long)
        for w in (layer.query, layer.key, layer.value)
    )
    width = layer.value.shape[0]
    out = np.eye(width, dtype=long) if layer.output is None else layer.output.numpy().astype(long)
    total = np.zeros((n, len(out), n, d), dtype=long)
    written = np.zeros((n, len(out)), dtype=long)
    for h in range(heads):
        scale = long(layer.scale)
        queries, keys, values = (tokens.dot(w[h].T) for w in (q, k, v))
        logits = scale * queries.dot(keys.T)
        if layer.causal:
            logits = np.where(np.tril(np.ones((n, n), dtype=bool)), logits, -np.inf)
        with np.errstate(under="ignore"):
            p = np.exp(logits - logits.max(1, keepdims=True))
            p = p / p.sum(1, keepdims=True)
        kv = v.shape[1]
        written += p.dot(values).dot(out[:, h * kv : (h + 1) * kv].T)
        for i in range(n):
            best = logits[i].argmax()  # relative to it, small differences keep their digits
            around = values - values[best]
            y = around - p[i].dot(around)
            near = keys - keys[best]
            z = scale * (near - p[i].dot(near)).dot(q[h])
            a = scale * queries[i].dot(k[h])
            for j in range(n):
                block = p[i, j] * (v[h] + np.outer(y[j], a))
                if i == j:
                    block = block + (p[i, :, None] * y).T.dot(z)
                total[i, :, j] += out[:, h * kv : (h + 1) * kv].dot(block)
    return written, total


def through_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """RMSNorm of every token and its derivatives ``(n, d, d)``, in long double."""
    x = x.astype(np.longdouble)
    d = x.shape[1]
    slope = 1 / np.sqrt((x * x).mean(1) + np.longdouble(eps))
    u = x * slope[:, None]
    inner = np.eye(d, dtype=np.longdouble) - u[:, :, None] * u[:, None, :] / d
    return gain * u, slope[:, None, None] * gain[:, None] * inner


def residual_jacobian(
    layer: DotProduct, x: torch.Tensor, form: str, gain: np.ndarray, eps: float
) -> np.ndarray:
    """Of ``x + f(x)``, with an RMSNorm in front, behind attention, behind the sum, or none."""
    tokens = x.numpy().astype(np.longdouble)
    inner, before = tokens, None
    if form in ("pre-norm", "both sides"):
        inner, before = through_norm(tokens, gain, eps)
    y, total = value_and_jacobian(layer, inner)
    if before is not None:
        total = np.einsum("iajb,jbc->iajc", total, before)
    if form in ("both sides", "own output"):
        y, after = through_norm(y, gain, eps)
        total = np.einsum("iba,iajc->ibjc", after, total)
    for i in range(len(x)):
        total[i, :, i] += np.eye(x.shape[1], dtype=np.longdouble)
    if form == "post-norm":
        _, after = through_norm(tokens + y, gain, eps)
        total = np.einsum("iba,iajc->ibjc", after, total)
    return total


def sigma_from_below(jacobian: np.ndarray, seed: int = 0) -> float:
    """A Ritz value of the dense matrix in long double: never above its norm."""
    m = jacobian.reshape(jacobian.shape[0] * jacobian.shape[1], -1)
    largest = np.abs(m).max()
    if largest == 0:
        return 0.0
    m = m / largest
    e = np.random.default_rng(seed).standard_normal(m.shape[1]).astype(np.longdouble)
    for _ in range(60):
        e = m.T.dot(m.dot(e))
        e = e / np.sqrt((e * e).sum())
    moved = m.dot(e)
    return float(largest * np.sqrt((moved * moved).sum()))
