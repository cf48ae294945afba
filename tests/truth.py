"""Dense Jacobians of the models' own modules, to compare the one verb with.

`Truth` evaluates every map from the modules of transformers alone, in float64, and applies
metric, move and read to the dense matrix by hand: nothing of it comes from lipscope.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import models

import lipscope as ls
from lipscope import Measurement
from tiny import tiny

FAMILIES = ("bert", "gpt2", "llama")
ALL_MAPS = ("heads", "attention", "normed", "residual", "block", "stack", "model")
LAYER, N, WIDTH = 1, 6, 12
HEADS = {"bert": 3, "gpt2": 3, "llama": 6}
IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])


@functools.cache
def model_of(family: str) -> Any:
    return tiny(family).model


class Truth:
    """A tiny model's second layer, from the modules of transformers, in float64."""

    def __init__(self, family: str, ids: Tensor = IDS) -> None:
        self.family, self.heads = family, HEADS[family]
        self.model: Any = copy.deepcopy(model_of(family)).double().eval().requires_grad_(False)
        self.model.set_attn_implementation("eager")
        n = ids.shape[1]
        self.future = torch.ones(n, n).triu(1).bool() if family != "bert" else None
        mask = None
        if self.future is not None:
            lowest = torch.finfo(torch.float64).min
            mask = torch.zeros(1, 1, n, n).double().masked_fill(self.future, lowest)
        self.extra: dict[str, Any] = {"attention_mask": mask}
        blocks = {"bert": lambda m: m.encoder.layer, "gpt2": lambda m: m.h}
        self.blocks = blocks.get(family, lambda m: m.layers)(self.model)
        self.block: Any = self.blocks[LAYER]
        self.embedded = self._embed(ids)
        if family == "llama":
            position = torch.arange(n)[None]
            self.extra["position_embeddings"] = self.model.rotary_emb(self.embedded, position)
        below: Tensor = self.embedded
        seen: list[Tensor] = []
        norm = self.blocks[0].output.LayerNorm if family == "bert" else self.block
        handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for block in self.blocks:
            below = block(below, **self.extra)
        handle.remove()
        self.stream = seen[0][0]  # what the norm before the layer takes

    def _embed(self, ids: Tensor) -> Tensor:
        m = self.model
        if self.family == "bert":
            return m.embeddings(ids)
        if self.family == "gpt2":
            return m.wte(ids) + m.wpe(torch.arange(ids.shape[1]))[None]
        return m.embed_tokens(ids)

    def norm(self, x: Tensor) -> Tensor:
        b = self.block
        owner = {"bert": lambda: self.blocks[0].output.LayerNorm, "gpt2": lambda: b.ln_1}
        return owner.get(self.family, lambda: b.input_layernorm)()(x)

    def qkv(self, u: Tensor) -> list[Tensor]:
        """Queries, keys and values, each ``(heads, n, k)``."""
        b = self.block
        if self.family == "bert":
            inner = b.attention.self
            parts = (inner.query(u), inner.key(u), inner.value(u))
        elif self.family == "gpt2":
            parts = b.attn.c_attn(u).chunk(3, dim=-1)
        else:
            attention = b.self_attn
            parts = (attention.q_proj(u), attention.k_proj(u), attention.v_proj(u))
        width = WIDTH // self.heads
        q, k, v = (p.unflatten(-1, (-1, width)).transpose(0, 1) for p in parts)
        if self.family == "llama":
            cos, sin = self.extra["position_embeddings"]
            rotated = models.llama.modeling_llama.apply_rotary_pos_emb(q[None], k[None], cos, sin)
            q, k = (t[0] for t in rotated)
            k, v = (t.repeat_interleave(self.heads // len(t), dim=0) for t in (k, v))
        return [q, k, v]

    def each_head(self, u: Tensor) -> Tensor:
        """``(heads, n, k)``: softmax attention written out."""
        q, k, v = self.qkv(u)
        score = q @ k.mT / math.sqrt(q.shape[-1])
        if self.future is not None:
            score = score.masked_fill(self.future, -math.inf)
        return torch.softmax(score, -1) @ v

    def projection(self) -> tuple[Tensor, Tensor]:
        """``W_O`` of shape ``(d, d)`` and its bias."""
        if self.family == "llama":
            weight = self.block.self_attn.o_proj.weight
            return weight, weight.new_zeros(len(weight))
        if self.family == "gpt2":
            leaf = self.block.attn.c_proj
            return leaf.weight.T, leaf.bias
        leaf = self.block.attention.output.dense
        return leaf.weight, leaf.bias

    def contributions(self, u: Tensor) -> Tensor:
        """``(heads, n, d)``: what each head adds to the output."""
        weight, _ = self.projection()
        parts = weight.unflatten(1, (self.heads, -1)).transpose(0, 1)  # (heads, d, k)
        return self.each_head(u) @ parts.mT

    def attention(self, u: Tensor) -> Tensor:
        """The module itself."""
        if self.family == "bert":
            inner = self.block.attention
            return inner.output.dense(inner.self(u[None], **self.extra)[0])[0]
        module = self.block.attn if self.family == "gpt2" else self.block.self_attn
        return module(u[None], **self.extra)[0][0]

    def stack(self, x: Tensor, count: int | None = None) -> Tensor:
        """The first blocks, all of them if None, one after the other."""
        x = x[None]
        for block in self.blocks[:count]:
            x = block(x, **self.extra)
        return x[0]

    def whole(self, x: Tensor) -> Tensor:
        x = self.stack(x)
        if self.family == "bert":
            return x
        last = self.model.ln_f if self.family == "gpt2" else self.model.norm
        return last(x)

    def map(self, name: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The function and its input."""
        u, x = self.norm(self.stream), self.stream
        post = self.family == "bert"
        functions: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
            "heads": (lambda u: self.each_head(u).transpose(0, 1).flatten(1), u),
            "attention": (self.attention, u),
            "normed": (lambda x: self.attention(self.norm(x)), x),
            "residual": (
                (lambda u: self.block.attention(u[None], **self.extra)[0][0], u)
                if post
                else (lambda x: x + self.attention(self.norm(x)), x)
            ),
            "block": (lambda x: self.block(x[None], **self.extra)[0], u if post else x),
            "stack": (lambda x: self.stack(x, LAYER + 1), self.embedded[0]),
            "model": (self.whole, self.embedded[0]),
        }
        return functions[name]


def dense_jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``(n_out, d_out, n, d)``."""
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return jacobian


@functools.cache
def truth_of(family: str, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Jacobian, input and output of a map."""
    f, x = Truth(family).map(name)
    return dense_jacobian(f, x), x, f(x)


@functools.cache
def heads_of(family: str, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Jacobians ``(heads, n, d_out, n, d)``, input and outputs of every head."""
    truth = Truth(family)
    each = truth.each_head if name == "heads" else truth.contributions
    if name == "normed":
        x = truth.stream
        return dense_jacobian(lambda x: each(truth.norm(x)), x), x, each(truth.norm(x))
    u = truth.norm(truth.stream)
    return dense_jacobian(each, u), u, each(u)


def asked(jacobian: Tensor, x: Tensor, metric: str, move: list[int], read: list[int]) -> Tensor:
    """``R J D M`` as a matrix: columns scaled and chosen, rows chosen, by hand."""
    if metric == "token-relative":
        norms = x.norm(dim=1)
        jacobian = jacobian * (norms / norms.square().mean().sqrt())[:, None]
    return jacobian[read][:, :, move]


def top(matrix: Tensor) -> float:
    rows = matrix.shape[0] * matrix.shape[1]
    if matrix.shape[2] == 0:
        return 0.0
    return float(torch.linalg.matrix_norm(matrix.reshape(rows, -1), 2))


def shares(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm of each token's part of the top right and left singular vector."""
    n_out, d_out, n, d = matrix.shape
    u, _, vh = torch.linalg.svd(matrix.reshape(n_out * d_out, n * d), full_matrices=False)
    return vh[0].reshape(n, d).square().sum(1), u[:, 0].reshape(n_out, d_out).square().sum(1)


def measured(family: str, data: Any = IDS, **options: Any) -> ls.Rows:
    options = {"layers": [LAYER], "dtype": "float64", "tol": 1e-9} | options
    if options.get("map") == "model":
        options["layers"] = "all"
    # A text is read by the tokenizer of the loaded model, bytes.
    model = tiny(family) if isinstance(data, str) else model_of(family)
    return ls.measure(model, data, **options)


def frobenius_of(row: Measurement) -> tuple[float, float]:
    """The interval that the note states."""
    found = re.search(r"frobenius in \[([\d.e+-]+), ([\d.e+-]+)\]", row.note or "")
    assert found is not None, row.note
    return float(found[1]), float(found[2])


def columns(row: Measurement, *without: str) -> dict[str, Any]:
    left_out = {"seconds", *without}
    return {k: v for k, v in row.to_dict().items() if k not in left_out}
