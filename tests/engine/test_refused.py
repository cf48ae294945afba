"""What cannot be taken is refused in one line, where it is given; without the tests' own types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope import control, measures
from lipscope.measures import TokenMeasure
from lipscope.theorems import bounds_at

EYE, NAN = torch.eye(4), float("nan")
X = torch.arange(12.0).view(3, 4)
WEIGHTS = [EYE] * 3
BLOCK = control.InvertibleResidual(control.ContractiveMLP([4, 6, 4], 0.5))
MU = TokenMeasure(X.double())
LAYER = ls.DotProduct(*WEIGHTS)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
BATCH = torch.ones(1, 3, 8)


class Own(nn.Module):
    """A model around an attention of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ls.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


class Words(nn.Module):
    """Classes of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.own = nn.Embedding(5, 8), Own()

    def forward(self, input_ids: Any) -> Any:
        return self.own(self.table(input_ids))


def divided(**options: Any) -> Any:
    return ls.DividedAttention(*WEIGHTS, **({"by": "G2", "num_tokens": 3, "radius": 1.0} | options))


class ByHand(nn.Module):
    """Attention whose class is not named so, with no module inside."""

    def forward(self, x: Any) -> Any:
        return torch.softmax(x @ x.mT, -1) @ x


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an attack on a batch": (
        lambda: ls.attack(LAYER, torch.stack([X, X + 1]), steps=0),
        r"one input here. Found 2",
    ),
    "a certificate of a batch": (
        lambda: ls.certify(ENCODER.eval(), BATCH.repeat(2, 1, 1), eps=0.1),
        r"one input here. Found 2",
    ),
    "attention by hand": (
        lambda: ls.measure(ByHand(), BATCH),
        r"none in `ByHand`; measure any function by `ls\.top_singular\(ls\.linearise\(f, x\)\)`",
    ),
    "a function": (
        lambda: ls.measure(lambda x: x, BATCH),  # pyright: ignore[reportArgumentType]
        r"Found `function`; measure any function by `ls\.top_singular",
    ),
    "one layer of a verb for several": (
        lambda: ls.measure(ENCODER, BATCH, layer=0),  # pyright: ignore[reportCallIssue]
        r"`measure` has no option `layer`; write `layers=`",
    ),
    "one length of a verb for several": (
        lambda: ls.bounds(ENCODER, BATCH, length=3),  # pyright: ignore[reportCallIssue]
        r"`bounds` has no option `length`; write `lengths=`",
    ),
    **{
        f"layers of {verb.__name__}": (
            lambda verb=verb, more=more: verb(ENCODER, "text", layers=[1], **more),
            r"no option `layers`; write `layer=`",
        )
        for verb, more in {
            ls.attack: {},
            ls.attack_text: {},
            ls.certify: {"eps": 0.1},
            ls.directions: {},
            ls.push: {},
        }.items()
    },
    "lengths of a verb for one window": (
        lambda: ls.split(ENCODER, BATCH, lengths=[3]),  # pyright: ignore[reportCallIssue]
        r"no option `lengths`; write `length=`",
    ),
    "radius": (lambda: ls.ClippedAttention(*WEIGHTS, radius="2"), r"`radius = '2'`"),
    "radius of a divided layer": (lambda: divided(radius="2"), r"`radius = '2'`"),
    "half a token": (lambda: divided(num_tokens=4.5), r"positive integer.*4\.5"),
    "temperature": (
        lambda: ls.ScaledCosineAttention(*WEIGHTS, temperature="hot"),
        r"`temperature = 'hot'`",
    ),
    "no end of a temperature": (
        lambda: ls.ScaledCosineAttention(*WEIGHTS, temperature=float("inf")),
        r"`temperature = inf`",
    ),
    "offset": (lambda: ls.SigmoidAttention(*WEIGHTS, offset="a"), r"`offset = 'a'`"),
    "scale": (lambda: ls.DotProduct(*WEIGHTS, scale="a"), r"`scale = 'a'`"),
    "scale of NaN": (lambda: ls.DotProduct(*WEIGHTS, scale=NAN), r"`scale = nan`"),
    "soft cap": (lambda: ls.DotProduct(*WEIGHTS, softcap="a"), r"`softcap = 'a'`"),
    "half a window": (lambda: ls.DotProduct(*WEIGHTS, window=1.5), r"`window = 1\.5`"),
    "a word for causal": (lambda: ls.DotProduct(*WEIGHTS, causal="no"), r"`causal = no`"),
    "a list as mask": (lambda: ls.DotProduct(*WEIGHTS, mask=[[True]]), r"booleans. Found list"),
    "numbers as mask": (
        lambda: ls.DotProduct(*WEIGHTS, mask=torch.ones(3, 3)),
        r"booleans. Found torch\.float32",
    ),
    "a word for heads": (lambda: ls.DotProduct(*WEIGHTS, heads="2"), r"`heads = '2'`"),
    "heads that are true": (lambda: ls.MultiheadAttention(8, True), r"`num_heads = True`"),
    "a word for bias": (lambda: ls.MultiheadAttention(8, 2, bias="yes"), r"`bias = 'yes'`"),
    "a word for the order": (
        lambda: ls.MultiheadAttention(8, 2, batch_first="yes"),
        r"`batch_first` should be True or False",
    ),
    "attention without numbers": (
        lambda: ls.attention(*[X.to("meta")] * 3),
        r"should hold numbers. Found tensors on the meta device",
    ),
    "attention, a word for causal": (lambda: ls.attention(X, X, X, causal="no"), r"`causal = no`"),
    "power": (lambda: measures.wasserstein(MU, MU, p="a"), r"`p = 'a'`"),
    "power of a ratio": (lambda: measures.lipschitz_ratio(LAYER, MU, MU, p="2"), r"`p = '2'`"),
    "fewer than no steps": (
        lambda: measures.search_ratio(LAYER, radius=1.0, steps=-1),
        r"`steps` should be a whole number, not negative. Found `steps = -1`",
    ),
    "targets of another width": (
        lambda: measures.tiny_mass_gain(LAYER, MU, torch.ones(2, 5)),
        r"`targets` should be tokens in a tensor, \(n, 4\), at least one. Found float32, \(2, 5\)",
    ),
    "whole numbers as targets": (
        lambda: measures.tiny_mass_gain(LAYER, MU, torch.ones(2, 4).long()),
        r"`targets` should be tokens in a tensor, .* Found int64",
    ),
    "an atom that is not there": (
        lambda: measures.tiny_mass_ratio(LAYER, MU, 3, X[0], mass=0.1),
        r"`atom` should be between 0 and 2. Found `atom = 3`",
    ),
    "more mass than there is": (
        lambda: measures.tiny_mass_ratio(LAYER, MU, 0, X[0], mass=0.5),
        r"`mass` should be below the weight of the atom, 0\.3333",
    ),
    "an inverse of another width": (
        lambda: BLOCK.inverse(torch.ones(3, 5)),
        r"`y` should have shape \(\.\.\., n, 4\) in float32, as the weights. Found \(3, 5\)",
    ),
    "an inverse in another dtype": (
        lambda: BLOCK.inverse(X.double()),
        r"Found \(3, 4\) in float64",
    ),
    "a tolerance": (lambda: BLOCK.inverse(X, tol="a"), r"`tol = 'a'`"),
    "a word for steps": (lambda: BLOCK.inverse(X, max_steps="a"), r"`max_steps = 'a'`"),
    "a determinant of another width": (
        lambda: BLOCK.log_determinant(torch.ones(3, 5)),
        r"`x` should have shape",
    ),
    "a tolerance below zero": (lambda: BLOCK.log_determinant(X, tol=-1), r"`tol = -1`"),
    "halves as widths": (lambda: control.ContractiveMLP([2.5, 2.5], 0.5), r"positive integers"),
    "one width": (lambda: control.ContractiveMLP(5, 0.5), r"Found `5`"),
    "letters as widths": (lambda: control.ContractiveMLP("aa", 0.5), r"Found `aa`"),
    "one block": (lambda: control.Flow(BLOCK), r"a list of `InvertibleResidual`"),
    "fewer than no samples": (lambda: control.Flow([BLOCK]).sample(-1, 3, 4), r"`count = -1`"),
    "a batch of another width": (
        lambda: ls.restrain(ENCODER, torch.ones(1, 3, 9), "sigma"),
        r"should run on this input",
    ),
    "a word for a seed": (lambda: ls.restrain(Own(), BATCH, "sigma", seed="a"), r"`seed = 'a'`"),
    "attention by itself": (
        lambda: ls.restrain(ls.MultiheadAttention(8, 2), BATCH, "sigma"),
        r"give `module\.attention`",
    ),
    "queries and keys of ours": (
        lambda: ls.restrain(Own(), BATCH, "query-key-norm"),
        r"linear maps of their own for queries and keys",
    ),
    "queries and keys packed": (
        lambda: ls.restrain(ENCODER, BATCH, "query-key-norm"),
        r"linear maps of their own for queries and keys",
    ),
    "a monitor's tolerance": (lambda: ls.Monitor(ENCODER, BATCH, tol=-1), r"`tol` should be"),
    "a monitor's map": (lambda: ls.Monitor(ENCODER, BATCH, map="all"), r"`map` should be one of"),
    "a monitor's layers": (
        lambda: ls.Monitor(ENCODER, BATCH, layers=[7]),
        r"`layers` should be between 0 and 0",
    ),
    "a layer at NaN": (
        lambda: ls.load_model(ENCODER).at(torch.stack([X.tile(2), X.tile(2) * NAN])),
        r"`data` should be finite. Found NaN or Inf in it, first at \(1, 0, 0\)",
    ),
    "a decision at infinity": (
        lambda: ls.load_model(ENCODER).decision({"src": BATCH / 0}),
        r"`src` should be finite",
    ),
    "a bound at NaN": (lambda: ls.lipschitz_bound(ENCODER, BATCH * NAN), r"should be finite"),
    "sigma at NaN": (lambda: ls.sigma(ENCODER, BATCH * NAN), r"`x` should be finite"),
    "sigma of a name": (lambda: ls.sigma("minilm", X), r'load_model\("minilm"\)\.at\(text\)'),
    "the Jacobian of a model": (
        lambda: ls.linearise(ls.load_model(ENCODER), X),
        r"be a function or a module",
    ),
    "the Jacobian at a number": (
        lambda: ls.linearise(ENCODER, 5),
        r"`x` should be a tensor of some real numbers. Found `int`",
    ),
    "sigma of a module as operator": (
        lambda: ls.top_singular(ENCODER),
        r"`op` should be an `Operator`, as returned by `lipscope\.linearise\(layer, x\)`",
    ),
    "the matrix of a matrix": (lambda: ls.to_dense(EYE), r"`op` should be an `Operator`"),
    "sigma of none": (lambda: ls.sigma(nn.Identity(), X[:0]), r"`x` should be a tensor of some"),
    "sigma at another width": (
        lambda: ls.sigma(nn.Linear(8, 8), X),
        r"`f` should run on `x`. Found that it raised RuntimeError: mat1 and mat2 shapes",
    ),
    "sigma in another dtype": (
        lambda: ls.sigma(LAYER, X.double()),
        r"in float32\. Found .* in float64",
    ),
    "sigma of a batch": (lambda: ls.sigma(LAYER, X[None]), r"one input, \(n, d\)"),
    "sigma in little memory": (lambda: ls.sigma(LAYER, X, memory="1GiB"), r"`memory` should be"),
    "tokens of another width": (lambda: LAYER(X[:, 1:]), r"\(\.\.\., n, 4\), .*Found \(3, 3\)"),
    "weights in whole numbers": (
        lambda: ls.DotProduct(*[EYE.long()] * 3),
        r"Weights should be matrices of real numbers, .*\. Found int64, \(4, 4\)",
    ),
    "weights of NumPy": (
        lambda: ls.DotProduct(*[np.eye(4)] * 3),
        r"floating-point tensors of torch\. Found ndarray",
    ),
    "whole numbers as the input of a layer": (
        lambda: ls.measure(LAYER, torch.ones(5, 8, dtype=torch.long)),
        r"floating-point numbers of shape \(n, d\) or \(b, n, d\)\. Found int64, \(5, 8\)",
    ),
    "a map at another width": (
        lambda: ls.load_model(ENCODER).at(BATCH)(X),
        r"`x` should have shape \(n, 8\) in torch\.float32. Found \(\(3, 4\),",
    ),
    "no theorem": (lambda: bounds_at(LAYER, X, names=["none"]), r"`names` .* Found `none`"),
    "a text for a module": (lambda: ls.lipschitz_bound(ENCODER, "a"), r"Found `a`; a text is for"),
    "letters as texts": (
        lambda: ls.load_model("random:bert:num_hidden_layers=1").decision("a", between="abc"),
        r"`between` should name at least two classes, .* Found `abc`",
    ),
    "splitting what overflows": (lambda: ls.split(LAYER, X * 1e30), r"NaN or Inf in window 0"),
    "a decision of no text": (
        lambda: ls.load_model("random:gpt2:n_layer=1").decision(""),
        r"The text should not be empty",
    ),
    "a length in words": (
        lambda: ls.load_model("random:bert:num_hidden_layers=1").at("a", length="4"),
        r"`length` should be a whole number of at least 1. Found `'4'`, a str",
    ),
    "a radius in words": (
        lambda: ls.lipschitz_bound(LAYER, radius="1"),
        r"`radius` should be positive. Found `radius = '1'`, a str",
    ),
    "a head in words": (lambda: ls.load_model(ENCODER).at(BATCH, head="1"), r"between 0 and 1"),
    "a size in words": (
        lambda: ls.certify(LAYER, X, eps="0.1"),
        r"`eps` should be positive.* Found `eps = '0\.1'`, a str",
    ),
    "ids that are no words": (
        lambda: ls.load_model(Words()).at(torch.tensor([[3, 9]])),
        r"ids and positions should be from 0 to 4 for `table`. Found 9",
    ),
    "a metric": (
        lambda: bounds_at(LAYER, X, metric="frob"),
        r"`metric` should be one of frobenius, .* Found `frob`",
    ),
    "a distance of tensors": (lambda: measures.wasserstein(X, X), r"Two of `TokenMeasure` should"),
    "a page of no text": (lambda: ls.load_model(ENCODER).explore(5), r"`text` should be a str"),
    "a page on a number": (lambda: ls.explore.explore(5), r"`model` should be a name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_in_one_line(unchecked, name) -> None:
    ask, said = REFUSED[name]
    with pytest.raises(ls.InputError, match=said):
        ask()


@pytest.mark.parametrize(
    ("verb", "option", "meant"),
    [
        ("at", "lenght", "length"),
        ("layers", "lenght", "lengths"),
        ("decision", "betwen", "between"),
        ("certify", "epsilon", "eps"),
    ],
)
def test_what_is_misspelt_is_looked_for_among_the_verb_s_own(verb, option, meant) -> None:
    model = ls.load_model(ENCODER)
    asked: Any = partial(ls.certify, model) if verb == "certify" else getattr(model, verb)
    with pytest.raises(TypeError, match=rf"{verb}\(\) got .* Did you mean `{meant}`\?") as found:
        list(asked(BATCH, **{option: 3}))
    assert isinstance(found.value, ls.InputError)  # one line, at a prompt too


@pytest.mark.parametrize("additive", [False, True])
def test_what_no_query_may_read_may_be_anything(additive) -> None:
    """NaN times an attention of zero is NaN, in the value and in the gradients."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, generator=gen).double() for n in (3, 5, 5))
    mask = torch.arange(5) != 3
    shown = torch.zeros(5).double().masked_fill(~mask, -torch.inf) if additive else mask
    spoilt = [t.clone().index_fill_(1, torch.tensor([3]), NAN).requires_grad_() for t in (k, v)]
    y = ls.attention(q, *spoilt, mask=shown.expand(3, 5))
    expected = ls.attention(q, k[:, mask], v[:, mask])
    assert torch.allclose(y, expected)
    gradients = torch.autograd.grad(y.square().sum(), spoilt)
    assert all(bool(g.isfinite().all()) and not g[:, 3].any() for g in gradients)
    module = ls.MultiheadAttention(4, 2, batch_first=True).double()
    padding = torch.zeros(2, 5).double().masked_fill(~mask, -torch.inf) if additive else ~mask
    x = spoilt[0].detach()
    y = module(x, x, x, key_padding_mask=padding.expand(2, 5))[0]
    rest = x[:, mask]
    assert torch.allclose(y[:, mask], module(rest, rest, rest)[0])
