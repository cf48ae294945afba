"""Modules of anyone's own: each is measured right or refused, where a plausible number is easy.

Truths are dense Jacobians of the module itself by `torch.autograd`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope import InputError

WIDTH, N = 16, 7
GRID = torch.tensor([[1, 1, N]])
EXACT: dict[str, Any] = {"dtype": "float64", "tol": 1e-9}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def truth(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def tokens(n: int = N, width: int = WIDTH, batch: int = 1) -> Tensor:
    return torch.randn(batch, n, width, dtype=torch.float64)


class Own(nn.Module):
    """Single-head attention; what its copies add to it is in their methods."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        for p in self.parameters():
            p.data *= 2

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.q(x) @ self.k(y).mT).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.weights(x, x) @ self.v(x))


class OwnAttention(Own):
    pass


class Block(nn.Module):
    """What a site is called in, in a list of blocks with an MLP each."""

    def __init__(self, site: nn.Module) -> None:
        super().__init__()
        self.attn = site
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def only(rows: Any) -> Any:
    (row,) = rows
    return row


def site_of(model: nn.Module) -> Any:
    return model.get_submodule("layers.0.attn")


# --- batches and padding


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_mapping_of_tokens_first_is_cut_along_the_batch(count):
    model = nn.Transformer(WIDTH, 4, 1, 1, 24, dropout=0.0).double().eval()
    src, tgt = (tokens(n, batch=count).transpose(0, 1) for n in (7, 5))
    rows = ls.measure(model, {"src": src, "tgt": tgt}, **EXACT)
    assert [(r.sample, r.num_tokens) for r in rows] == [
        (s, n) for s in range(count) for n in (7, 5)
    ]
    site = model.encoder.layers[0].self_attn
    expected = truth(lambda u: site(u[:, None], u[:, None], u[:, None])[0][:, 0], src[:, -1])
    assert rows[-2].sigma == pytest.approx(expected, rel=1e-8)


def test_a_model_that_turns_its_input_itself_is_cut_along_its_first_axis():
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            return self.attn(x, x, x)[0].transpose(0, 1)

    for batch in (3, N):
        rows = ls.measure(Turning().double().eval(), tokens(batch=batch), **EXACT)
        assert [r.num_tokens for r in rows] == [N] * batch


class Packed(nn.Module):
    """Patches of a picture as the rows of one tensor, without a batch; as many as its grid says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(OwnAttention())])

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
        grid = torch.arange(int(grid_thw.prod(-1).sum())).to(hidden_states)[:, None]
        return self.layers[0](hidden_states + grid)  # one row alone would be spread over all


def test_packed_patches_are_one_sample_and_no_batch():
    model, x = Packed().double(), tokens()[0]
    row = only(ls.measure(model, {"hidden_states": x, "grid_thw": GRID}, map="block", **EXACT))
    start = x + torch.arange(N)[:, None]
    assert row.sigma == pytest.approx(truth(model.layers[0], start), rel=1e-8)
    with pytest.raises(InputError, match="one picture"):
        ls.measure(model, {"hidden_states": x, "grid_thw": GRID.repeat(2, 1)}, map="block")


@pytest.mark.parametrize("map", ["attention", "block", "model"])
def test_padding_of_torch_encoders_neither_moves_nor_is_read(map):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).double().eval()
    x, pad = tokens(), torch.tensor([[False] * 5 + [True] * 2])
    row = only(ls.measure(model, {"src": x, "src_key_padding_mask": pad}, map=map, **EXACT))
    site: Any = model.get_submodule("layers.0.self_attn")

    def f(u: Tensor) -> Tensor:
        u = torch.cat([u, x[0, 5:]])[None]
        if map != "attention":
            return model(u, src_key_padding_mask=pad)[0, :5]
        return site(u, u, u, key_padding_mask=pad)[0][0, :5]

    assert row.sigma == pytest.approx(truth(f, x[0, :5]), rel=1e-8)
    assert row.num_tokens == 5 and "2 padding tokens" in row.note


class Masked(nn.Module):
    """Hands a mask on, under a name and with a meaning of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.attn, self.how = MaskedAttention(), how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.how == "unseen":
            return self.attn(x + 0 * mask.sum())
        return self.attn(x, **{self.how: ~mask if self.how == "padding" else mask})


class MaskedAttention(Own):
    def forward(self, x: Tensor, keep: Any = None, mask: Any = None, padding: Any = None) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        for shown in (keep, mask, None if padding is None else ~padding):
            scores = scores if shown is None else scores.masked_fill(~shown[:, None], -1e9)
        return self.o(scores.softmax(-1) @ self.v(x))


@pytest.mark.parametrize("how", ["mask", "padding", "keep"])
def test_a_mask_of_anyones_own_is_recognised_by_what_it_does(how):
    model, x = Masked(how).double().eval(), tokens()
    shown = torch.tensor([[True] * 5 + [False] * 2])
    row = only(ls.measure(model, {"x": x, "mask": shown}, **EXACT))
    expected = truth(
        lambda u: model.attn.forward(u[None])[0], x[0, :5]
    )  # as if they were not there
    assert row.sigma == pytest.approx(expected, rel=1e-8)
    assert row.num_tokens == 5


def test_a_mask_that_no_layer_is_seen_to_take_is_said():
    shown = torch.tensor([[True] * 5 + [False] * 2])
    row = only(ls.measure(Masked("unseen").double().eval(), {"x": tokens(), "mask": shown}))
    assert row.num_tokens == N and "`mask` does not appear to hide any token" in row.note


def test_a_mask_that_does_not_fit_is_refused():
    from tiny import tiny

    ids = torch.arange(5, 11)[None]
    for mask, words in ((torch.ones(1, 5), r"\(1, 6\)\. Found \(1, 5\)"), (ids, "0 or 1")):
        with pytest.raises(InputError, match=words):
            ls.measure(tiny("bert").model, {"input_ids": ids, "attention_mask": mask})


# --- which modules


class Plain(Own):
    """Attention by what it does, not by its name."""


def test_what_lies_inside_a_match_is_no_layer():
    model = Model(Block(Plain())).double()
    assert only(ls.measure(model, tokens(), modules=r"layers\.\d+\.attn")).module == "layers.0.attn"
    with pytest.raises(InputError, match=r"attn\.k`, a `Linear` in which no token reads"):
        ls.measure(model, tokens(), modules=r"attn\.k$")
    exact = only(ls.measure(model, tokens(), modules="layers.0.attn.k", **EXACT))
    weight = site_of(model).k.weight.detach()
    assert exact.sigma == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-8)
    with pytest.raises(InputError, match=r"which contains it in `layers\.0\.attn`"):
        ls.measure(Model(Block(OwnAttention())).double(), tokens(), modules=r"layers\.\d$")


class ReadAttention(nn.Module):
    """The step of another layer that has no weights, as in deformable attention."""

    def forward(self, weights: Tensor, values: Tensor) -> Tensor:
        return weights @ values


class SteppedAttention(Own):
    def __init__(self) -> None:
        super().__init__()
        self.attn = ReadAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.attn(self.weights(x, x), self.v(x)))


def test_a_step_without_weights_is_no_layer():
    x, layer = tokens(), SteppedAttention().double()
    row = only(ls.measure(Model(Block(layer)).double(), x, **EXACT))
    assert row.module == "layers.0.attn"
    assert row.sigma == pytest.approx(truth(layer, x), rel=1e-8)


class WeightsFirst(Own):
    def forward(self, x: Tensor) -> Any:
        weights = self.weights(x, x)
        return weights, self.o(weights @ self.v(x))


class WeightsFirstAttention(WeightsFirst):
    pass


@pytest.mark.parametrize("n", [N, WIDTH])
def test_a_module_that_returns_its_weights_first(n):
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = WeightsFirstAttention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)[1]

    model, x = Taking().double(), tokens(n)
    expected = truth(lambda u: model(u[None])[0], x[0])
    assert only(ls.measure(model, x, **EXACT)).sigma == pytest.approx(expected, rel=1e-8)


class Cached(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 32, WIDTH))

    def forward(self, x: Tensor, /) -> Tensor:  # pyright: ignore
        n, cache = x.shape[1], self.get_buffer("cache")
        cache[:, :n] = self.k(x)
        return self.o((self.q(x) @ cache[:, :n].mT).softmax(-1) @ self.v(x))


class CachedAttention(Cached):
    pass


@pytest.mark.parametrize("map", ["attention", "block", "model"])
def test_a_cache_stays_as_it_was_and_arguments_may_have_no_name(map):
    model, x = Model(Block(CachedAttention())).double().eval(), tokens()
    row = only(ls.measure(model, x, map=map, **EXACT))
    cache = site_of(model).cache
    assert not cache.requires_grad and not cache.any()
    f = site_of(model) if map == "attention" else model
    assert row.sigma == pytest.approx(truth(lambda u: f(u[None])[0], x[0]), rel=1e-8)


class Rotated(Own):
    """Complex angles in a buffer, as Llama's first code had them."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(32.0)[:, None] * torch.arange(8.0) / 3
        self.register_buffer("angles", torch.polar(torch.ones(32, 8), angles))

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.unflatten(-1, (8, 2)).contiguous())
            by = self.get_buffer("angles")[: t.shape[1]]
            return torch.view_as_real(pairs * by).flatten(-2)

        return (turned(self.q(x)) @ turned(self.k(y)).mT).softmax(-1)


class RotatedAttention(Rotated):
    pass


def test_complex_buffers_keep_their_imaginary_part():
    model, x = Model(Block(RotatedAttention())), tokens().float()
    rows = [only(ls.measure(model, x, dtype=d, tol=1e-4)) for d in ("float32", "float64")]
    expected = truth(lambda u: site_of(model)(u[None])[0], x[0])
    assert [row.sigma for row in rows] == pytest.approx([expected] * 2, rel=1e-4)


class VmapAttention(OwnAttention):
    """A mask that is made inside `vmap`, where a tensor has no place in memory."""

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        seen = torch.vmap(lambda i: (at[None] + at[None] * 1.0) * 0.5 + i * 0 <= i)(at)
        return (self.q(x) @ self.k(y).mT).where(seen[:, 0], -torch.inf).softmax(-1)


def test_sums_of_a_model_that_makes_its_mask_inside_vmap():
    model, x = Model(Block(VmapAttention())).double(), tokens()
    row = only(ls.measure(model, x, map="block", **EXACT))
    assert row.sigma == pytest.approx(truth(lambda u: model(u[None])[0], x[0]), rel=1e-8)
    row = only(ls.measure(model, x, map="residual", **EXACT))
    site = site_of(model)
    assert row.sigma == pytest.approx(truth(lambda u: u + site(u[None])[0], x[0]), rel=1e-8)


class TalkingHeadAttn(Own):
    """Named as CaiT names it."""


class ClassAttn(Own):
    """The class token reads all, as behind CaiT: one token comes out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.weights(x[:, :1], x) @ self.v(x))


class CrossCovarianceAttn(Own):
    """Named as EdgeNeXt names it: of channels, and no cross-attention."""


class WindowAttentionGlobal(Own):
    """Named as GCViT names it."""


class FactorAttnConvRelPosEnc(Own):
    """Named as CoaT names it."""


NAMED = [TalkingHeadAttn, ClassAttn, CrossCovarianceAttn]
NAMED += [WindowAttentionGlobal, FactorAttnConvRelPosEnc]


@pytest.mark.parametrize("kind", NAMED)
def test_attention_by_its_shorter_name(kind):
    model, x = Model(Block(kind())).double(), tokens()
    row = only(ls.measure(model, x, **EXACT))
    assert row.sigma == pytest.approx(truth(lambda u: site_of(model)(u[None])[0], x[0]), rel=1e-8)


# --- the output projection


class Low(nn.Module):
    """A linear layer with an adapter beside it, as peft builds them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a, self.b = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


class Quantised(nn.Module):
    """Weights in eight bits: no `nn.Linear`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = base.weight.abs().max() / 127
        self.register_buffer("packed", (base.weight / self.scale).round().to(torch.int8))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("packed").to(x.dtype) * self.scale
        return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("change", [Low, Quantised])
@pytest.mark.parametrize("inside", [True, False])
def test_an_output_projection_of_another_kind_is_part_of_the_map(change, inside):
    from tiny import tiny

    torch.manual_seed(0)
    if inside:
        model: Any = Model(Block(OwnAttention())).double()
        site, data = site_of(model), tokens()
        site.o = change(site.o).double()
        x = data[0]

        def f(u: Tensor) -> Tensor:
            return site(u[None])[0]

    else:
        model, data = copy.deepcopy(tiny("bert").model).double().eval(), torch.arange(5, 12)[None]
        block = model.encoder.layer[1]
        block.attention.output.dense = change(block.attention.output.dense).double()
        with torch.no_grad():
            x = model.encoder.layer[0](model.embeddings(data))[0]

        def f(u: Tensor) -> Tensor:
            return block.attention.output.dense(block.attention.self(u[None])[0])[0]

    row = ls.measure(model, data, **EXACT)[-1]
    assert row.sigma == pytest.approx(truth(f, x), rel=1e-6)
    assert row.projection is True and "generic path" in row.note


class Normed(Own):
    """A norm of queries and keys, and a norm of the input, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.weights(self.q_norm(x), x) @ self.v(x)


class NormedSelfAttention(Normed):
    pass


def test_a_norm_inside_does_not_hide_the_projection_behind():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site, self.dense = NormedSelfAttention(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.site(x))

    model, x = Model(Block(Outer())).double(), tokens()
    row = only(ls.measure(model, x, **EXACT))
    assert row.sigma == pytest.approx(truth(lambda u: site_of(model)(u[None])[0], x[0]), rel=1e-8)
    assert row.module == "layers.0.attn.site" and row.projection is True


# --- what moves


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)
        self.dec = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(x, memory=x)


def test_a_decoder_that_reads_its_own_input_moves_in_both():
    model, x = Twice().double().eval(), tokens()
    whole = only(ls.measure(model, x, map="model", **EXACT))
    assert whole.sigma == pytest.approx(truth(lambda u: model(u[None])[0], x[0]), rel=1e-8)
    first, second = ls.measure(model, x, map="block", **EXACT)
    layers: Any = model.dec.layers
    expected = truth(lambda u: layers[0](u[None], u[None])[0], x[0])
    assert first.sigma == pytest.approx(expected, rel=1e-8)
    assert first.argument == second.argument == "tgt, memory"
    # Two tensors by now: both move, one below the other.
    h = layers[0](x, x)[0].detach()
    both = torch.cat([h, x[0]])
    expected = truth(lambda u: layers[1](u[None, :N], u[None, N:])[0], both)
    assert second.sigma == pytest.approx(expected, rel=1e-8)
    assert second.num_tokens == 2 * N


class Placed(Block):
    """Positions first, the stream second; the sum goes on beside its last update."""

    def forward(self, pos: Tensor, x: Tensor, skip: Tensor) -> Tensor:  # pyright: ignore
        x = x + self.attn(x + pos)
        return x + self.mlp(x) + skip


class PlacedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, N, WIDTH))
        self.layers = nn.ModuleList([Placed(OwnAttention()), Placed(OwnAttention())])

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for layer in self.layers:
            x = layer(self.pos, x, start)
        return x


def test_what_moves_is_found_by_what_depends_on_the_input():
    model, x = PlacedModel().double(), tokens()
    whole = only(ls.measure(model, x, map="model", **EXACT))
    assert whole.sigma == pytest.approx(truth(lambda u: model(u[None])[0], x[0]), rel=1e-8)
    first, second = ls.measure(model, x, map="block", **EXACT)
    assert (first.argument, second.argument) == ("x, skip", "x, skip")
    layer: Any = model.layers[0]
    expected = truth(lambda u: layer(model.pos, u[None], u[None])[0], x[0])
    assert first.sigma == pytest.approx(expected, rel=1e-8) and first.num_tokens == N
    assert second.num_tokens == 2 * N


class Reading(Own):
    """Cross-attention under names of its own."""

    def forward(self, x: Tensor, facts: Tensor) -> Tensor:  # pyright: ignore
        return self.o(self.weights(x, facts) @ self.v(facts))


class ReadingAttention(Reading):
    pass


@pytest.mark.parametrize("m", [4, N])
def test_a_source_of_keys_is_found_under_any_name(m):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = ReadingAttention()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.attn(x, y)

    model, x, y = Reader().double(), tokens(), tokens(m)
    with pytest.raises(InputError, match="keys from elsewhere"):
        ls.measure(model, {"x": x, "y": y})
    for side, f, at in (
        ("query", lambda u: model(u[None], y)[0], x),
        ("key", lambda u: model(x, u[None])[0], y),
    ):
        row = only(ls.measure(model, {"x": x, "y": y}, side=side, **EXACT))
        assert row.sigma == pytest.approx(truth(f, at[0]), rel=1e-8), side


# --- gradients that are cut, and models that are no values


@pytest.mark.parametrize("cut", [torch.no_grad, torch.inference_mode])
def test_gradients_that_the_model_cuts_are_no_zero(cut):
    class Cut(Model):
        def forward(self, x: Tensor) -> Tensor:
            with cut():
                return super().forward(x)

    model = Cut(Block(OwnAttention())).double()
    with pytest.raises(InputError, match="cuts the gradient"):
        ls.measure(model, tokens(), map="model")
    with pytest.raises(InputError, match="cuts the gradient"):
        ls.linearise(cut()(lambda x: 3 * x), torch.ones(4))
    assert only(ls.measure(model, tokens())).sigma > 0.1  # the layer itself has its derivative
    assert ls.top_singular(ls.linearise(lambda _: torch.ones(3), torch.ones(4))).sigma == 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_measured_as_they_were_written():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).double().eval()
    x = tokens()
    expected = only(ls.measure(model, x, map="block", **EXACT)).sigma
    inner, whole = copy.deepcopy(model), torch.compile(copy.deepcopy(model))
    inner.layers[0] = torch.compile(inner.layers[0])  # pyright: ignore
    for one in (inner, whole):
        assert only(ls.measure(one, x, map="block", **EXACT)).sigma == pytest.approx(expected)
    assert hasattr(inner.layers[0], "_orig_mod")  # put back


def test_weights_without_values_and_in_eight_bits():
    with torch.device("meta"):
        nothing = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True)
    with pytest.raises(InputError, match="on the device `meta`"):
        ls.measure(nothing, tokens().float())
    model = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, dropout=0.0).eval()
    model.linear1.weight.data = model.linear1.weight.data.to(torch.float8_e4m3fn)
    x = tokens().float()
    wide = copy.deepcopy(model).double()
    row = only(ls.measure(Model(model), x, map="block", tol=1e-4))
    assert row.sigma == pytest.approx(truth(lambda u: wide(u[None])[0], x[0].double()), rel=1e-4)


# --- windows


def test_blocks_and_models_of_windows_are_maps_and_their_attention_is_refused():
    from transformers import SwinConfig, SwinModel

    sizes = {"depths": [2, 1], "num_heads": [2, 2], "image_size": 16, "patch_size": 2}
    model: Any = SwinModel(SwinConfig(**sizes, embed_dim=8, window_size=4)).double().eval()
    pixels = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    rows = ls.measure(model, {"pixel_values": pixels}, map="block", layers=[2], **EXACT)
    with torch.no_grad():
        x = model(pixels, output_hidden_states=True).hidden_states[1][0]
    assert only(rows).module == "encoder.layers.1.blocks.0"
    block = model.encoder.layers[1].blocks[0]
    expected = truth(lambda u: block(u[None], (4, 4))[0][0], x)
    assert only(rows).sigma == pytest.approx(expected, rel=1e-6)
    with pytest.raises(InputError, match=r"one sample, \(1, tokens, width\).*`block` or `model`"):
        ls.measure(model, {"pixel_values": pixels})


class SparseAttention(OwnAttention):
    """Returns which keys each query reads most, ``(1, n, n)`` integers, before its output."""

    def forward(self, x: Tensor) -> Any:
        weights = self.weights(x, x)
        return weights.argsort(-1), self.o(weights @ self.v(x))


class OfParts(nn.Module):
    """A composite model: it returns what its parts return, and no tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SparseAttention()

    def forward(self, x: Tensor) -> Any:
        return {"text": {"indices_and_states": self.attention(x)}}


def test_indices_and_outputs_of_parts_are_no_tokens():
    model, x = OfParts().double(), tokens()
    (row,) = ls.measure(model, x, **EXACT)
    expected = truth(lambda x: model.attention(x)[1], x)
    assert row.sigma == pytest.approx(expected, rel=1e-8)


class LongMLA(OwnAttention):
    """Multi-head latent attention is named so."""


def test_latent_attention_is_found():
    x = tokens()
    model = nn.Sequential(LongMLA()).double()
    (row,) = ls.measure(model, x, **EXACT)
    assert row.sigma == pytest.approx(truth(model, x), rel=1e-8)
