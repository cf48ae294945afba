"""Cross-attention through its query side and its key side: against the dense SVD.

Both in float64 and to 1e-9, like the closed forms of self-attention.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import lipscope as ls
from layouts import (
    BART,
    GPT2,
    HEADS,
    SMALL,
    T5,
    WIDTH,
    agree,
    check,
    check_heads,
    foreign,
    randomised,
)
from lipscope import to_dense
from lipscope.errors import InputError
from lipscope.models import (
    Side,
    attention_sites,
    build_map,
    prepared,
    trace,
    without_padding,
)
from lipscope.models.tracing.prepare import exact_maths
from tiny import TEXT

QUERIES, KEYS = 4, 6
_CROSS = {"is_decoder": True, "add_cross_attention": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "bart": ("bart", BART),
    "bert": ("bert", {**SMALL, **_CROSS}),
    "gpt2": ("gpt2", {**GPT2, "add_cross_attention": True}),
}
SIDES: tuple[Side, ...] = ("query", "key")


class Torch(nn.Module):
    """Torch's own decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, states: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.decoder(x, states, memory_key_padding_mask=padding)


def model_of(family: str) -> nn.Module:
    if family == "torch":
        return randomised(Torch())
    kind, options = MODELS[family]
    return randomised(AutoModel.from_config(AutoConfig.for_model(kind, **options)))


def inputs_of(family: str, *, padded: bool = False) -> Any:
    gen = torch.Generator().manual_seed(2)
    mask = torch.tensor([[1] * (KEYS - 2) + [0] * 2])
    if family == "torch":
        x, states = (
            torch.randn(1, n, WIDTH, generator=gen, dtype=torch.float64) for n in (QUERIES, KEYS)
        )
        return (x, states, mask == 0) if padded else (x, states)
    ids = torch.randint(3, 60, (1, KEYS), generator=gen)
    if family in ("t5", "bart"):
        given = {"input_ids": ids, "decoder_input_ids": ids[:, :QUERIES]}
        return {**given, "attention_mask": mask} if padded else given
    states = torch.randn(1, KEYS, WIDTH, generator=gen, dtype=torch.float64)
    given = {"input_ids": ids[:, :QUERIES], "encoder_hidden_states": states}
    return {**given, "encoder_attention_mask": mask} if padded else given


@contextlib.contextmanager
def ready_model(family: str) -> Iterator[Any]:
    options: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
    with prepared(model_of(family), implementation="eager", **options) as (ready, _):
        yield ready


def maps(family: str, side: Side, names: tuple[str, ...], **inputs: Any) -> dict[str, Any]:
    """Maps of the second layer, in closed form and on the generic path."""
    options: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
    model = model_of(family)
    with prepared(model, implementation="eager", **options) as (ready, _):
        sites = attention_sites(ready, side=side)
        given = inputs_of(family, **inputs)
        record = trace(ready, given, sites, norms=True, dtype=torch.float64, side=side)
        assert len(record.calls) == 2
        closed = [build_map(record, 1, name) for name in names]
        _all_foreign(ready)
        generic = [build_map(record, 1, name) for name in names]
    assert all(one.attention is not None for one in closed)
    assert all(one.attention is None for one in generic)
    return dict(zip(names, zip(closed, generic, strict=True), strict=True))


def _all_foreign(model: nn.Module) -> None:
    foreign(model)
    for site in attention_sites(model, side="query").values():
        if type(site).__module__ != "elsewhere":
            site.__class__ = type(type(site).__name__, (type(site),), {"__module__": "elsewhere"})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", [*MODELS, "torch"])
def test_either_side_of_every_family(family, side):
    names = ("heads", "attention")
    names += ("normed",) if family == "t5" or (family == "gpt2" and side == "query") else ()
    names += ("residual",) if side == "query" else ()
    found = maps(family, side, names)
    for name, pair in found.items():
        seen = check(*pair)
        assert seen.shape == (QUERIES, QUERIES if side == "query" else KEYS)
        if side == "query":  # a query moves its own row only
            assert seen.equal(torch.eye(QUERIES, dtype=torch.bool))
        else:
            assert bool(seen.all())
        if name != "residual":
            check_heads(*pair)


@pytest.mark.parametrize("family", [*MODELS, "torch"])
def test_padded_encoder_states_are_not_read(family):
    seen = check(*maps(family, "key", ("attention",), padded=True)["attention"])
    assert not seen[:, KEYS - 2 :].any()
    assert bool(seen[:, : KEYS - 2].all())


def test_both_sides_together_are_the_whole_derivative():
    """Along one tensor that feeds both, the two Jacobians add up."""
    options: Any = {"dtype": torch.float64, "device": torch.device("cpu")}
    model = randomised(Torch())
    x = torch.randn(1, QUERIES, WIDTH, dtype=torch.float64)
    total = torch.zeros(QUERIES * WIDTH, QUERIES * WIDTH, dtype=torch.float64)
    with prepared(model, implementation="eager", **options) as (ready, _):
        sites = attention_sites(ready, "multihead_attn")
        for side in SIDES:
            record = trace(ready, (x, x.clone()), sites, dtype=torch.float64, side=side)
            layer = build_map(record, 0, "attention")
            total += to_dense(layer.linearise(layer.x))
        queries = trace(ready, (x, x.clone()), sites, dtype=torch.float64, side="query").calls[0].x
        site: Any = ready.get_submodule("decoder.layers.0.multihead_attn")

        def both(z: Tensor) -> Tensor:
            return site(z[None] + queries - x[0], z[None], z[None])[0][0]

        truth: Any = torch.autograd.functional.jacobian(both, x[0])
    agree(total, truth.reshape(total.shape))


# --- blocks and models


@contextlib.contextmanager
def wholes(family: str, side: Side, **inputs: Any) -> Iterator[list[Any]]:
    """The maps of both blocks and of the model."""
    with ready_model(family) as ready:
        sites = attention_sites(ready, side=side)
        given = inputs_of(family, **inputs)
        record = trace(ready, given, sites, blocks=True, dtype=torch.float64, side=side)
        pairs = [(0, "block"), (1, "block"), (None, "model")]
        yield [without_padding(build_map(record, *pair), record) for pair in pairs]


def last_states(family: str, ready: Any, side: Side) -> tuple[Any, Tensor]:
    """The decoder as a function of its embeddings or of its states, by its own arguments."""
    given = inputs_of(family)
    if family == "torch":
        x, states = given
        return (lambda z: ready(z, states)) if side == "query" else (lambda z: ready(x, z)), (
            x if side == "query" else states
        )
    decoder, ids = ready, given["input_ids"]
    if family in ("t5", "bart"):
        decoder, ids = ready.decoder, given["decoder_input_ids"]
        states = ready.encoder(given["input_ids"]).last_hidden_state
    else:
        states = given["encoder_hidden_states"]
    if side == "key":
        options: Any = {"input_ids": ids, "use_cache": False}
        return lambda z: decoder(encoder_hidden_states=z, **options).last_hidden_state, states
    options = {"encoder_hidden_states": states, "use_cache": False}
    embedded = decoder.get_input_embeddings()(ids)
    return lambda z: decoder(inputs_embeds=z, **options).last_hidden_state, embedded


# The embeddings of BART and BERT end in a norm: what enters the first block is no argument.
WHOLE: list[tuple[str, Side]] = [
    (family, side)
    for family in (*MODELS, "torch")
    for side in SIDES
    if side == "key" or family not in ("bart", "bert")
]


@pytest.mark.parametrize(("family", "side"), WHOLE)
def test_the_model_through_either_side(family, side):
    """Against automatic differentiation through the model's own arguments."""
    with wholes(family, side) as (*_, built):
        assert built.x.shape[0] == (QUERIES if side == "query" else KEYS)
        op = built.linearise(built.x)
        e, g = torch.randn_like(built.x), torch.randn_like(built.output)
        products = op.matvec(e), op.rmatvec(g)
    with ready_model(family) as ready, exact_maths(torch.float64):
        function, at = last_states(family, ready, side)
        _, along = torch.autograd.functional.jvp(lambda z: function(z)[0], at, e[None])
        _, back = torch.autograd.functional.vjp(lambda z: function(z)[0], at, g)
    agree(products[0], along)
    agree(products[1], back[0])


@pytest.mark.parametrize("family", ["bart", "bert", "torch"])
def test_blocks_make_up_the_model(family):
    """Chain rule, where nothing follows the blocks: ``J = B₂`` of the states ``+ B₂ B₁``."""
    with wholes(family, "query") as found:
        first, second, whole = (one.linearise(one.x) for one in found)
        e = torch.randn_like(found[0].x)
        agree(whole.matvec(e), second.matvec(first.matvec(e)))
        with wholes(family, "key") as states:
            own, last, whole = (one.linearise(one.x) for one in states)
            e = torch.randn_like(states[0].x)
            agree(whole.matvec(e), last.matvec(e) + second.matvec(own.matvec(e)))


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_padded_states_do_not_move_a_block(family):
    with wholes(family, "key", padded=True) as (block, _, model):
        assert block.x.shape == model.x.shape == (KEYS - 2, WIDTH)
        assert block.output.shape == model.output.shape == (QUERIES, WIDTH)
        assert "2 padding tokens" in (model.note or "")
    with wholes(family, "query", padded=True) as (block, *_):
        assert block.x.shape == block.output.shape == (QUERIES, WIDTH)


# --- the verb


T5 = "random:t5:d_model=12,num_heads=3,d_kv=4,d_ff=16,num_layers=2,vocab_size=300"


@pytest.mark.parametrize("side", SIDES)
def test_measure_takes_a_side(side):
    model = model_of("t5").float()
    inputs = inputs_of("t5")
    rows = ls.measure(model, inputs, side=side, dtype="float64", tol=1e-8)
    assert [(row.layer, row.side) for row in rows] == [(0, side), (1, side)]
    assert {row.num_tokens for row in rows} == {QUERIES if side == "query" else KEYS}
    # The heads' contributions of the same layer, one by one: each at most the whole of them.
    heads = ls.measure(model, inputs, side=side, layers=[1], per_head=True, dtype="float64")
    assert [row.head for row in heads] == list(range(HEADS))
    whole = rows[1].sigma or 0.0
    assert whole <= math.fsum(row.sigma or 0.0 for row in heads) * (1 + 1e-6)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["block", "model"])
def test_measure_takes_a_side_of_blocks_and_models(name, side):
    with wholes("t5", side) as found:
        chosen = found[2:] if name == "model" else found[1:2]
        jacobians = [to_dense(one.linearise(one.x)) for one in chosen]
    rows = ls.measure(
        model_of("t5"),
        inputs_of("t5"),
        layers=[1],
        side=side,
        map=name,
        dtype="float64",
        tol=1e-8,
    )
    assert [row.layer for row in rows] == ([None] if name == "model" else [1])
    for row, jacobian in zip(rows, jacobians, strict=True):
        dense = float(torch.linalg.matrix_norm(jacobian, 2))
        assert row.sigma == pytest.approx(dense, rel=1e-9)
        assert (row.side, row.status) == (side, "converged")


class Doubling(nn.TransformerDecoderLayer):
    """A block whose cross-attention does not read the tokens that the block is given."""

    def forward(self, tgt: Tensor, memory: Tensor, *rest: Any, **more: Any) -> Tensor:
        return super().forward(tgt, 2 * memory, *rest, **more)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("block", "keys' tokens as input. Found that `layers.0` computes those of"),
        ("model", "layers that all read the same tokens. Found others in `layers.1"),
    ],
)
def test_states_that_a_block_makes_itself_are_refused(name, words):
    block = Doubling(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    model = randomised(nn.TransformerDecoder(block, 2))
    inputs = dict(zip(("tgt", "memory"), inputs_of("torch"), strict=True))
    with pytest.raises(InputError, match=re.escape(words)):
        ls.measure(model, inputs, side="key", map=name)
    assert ls.measure(model, inputs, side="key")[0].status == "converged"


def test_an_encoder_decoder_reads_a_text_twice():
    rows = ls.measure(T5, TEXT, lengths=[5], samples=1)
    assert [row.layer for row in rows] == [0, 1, 2, 3]  # the encoder's layers, the decoder's
    assert all("the decoder one token later" in (row.note or "") for row in rows)
    across = ls.measure(T5, TEXT, lengths=[5], samples=1, side="key")
    assert len({row.id for row in [*rows, *across]}) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"side": "query", "map": "block", "per_head": True}, "`per_head` goes with"),
        ({"side": "key", "map": "residual"}, "residual"),
        ({"side": "key", "map": "stack"}, "leave out `side`"),
    ],
)
def test_what_a_side_does_not_have(options, words):
    with pytest.raises(InputError, match=words):
        ls.measure(T5, TEXT, lengths=[5], samples=1, **options)


def test_a_model_without_cross_attention_says_so():
    bert = "random:bert:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,vocab_size=300"
    with pytest.raises(InputError, match="with keys of their own tokens"):
        ls.measure(bert, TEXT, lengths=[5], samples=1, side="query")
