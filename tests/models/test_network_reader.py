"""From modules to networks: every kind that is read, and what is refused, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn import functional as F

import lipscope as ls
from lipscope import InputError, SmoothTransformer
from lipscope.attention import DotProduct
from lipscope.control import MeanPool
from lipscope.models import (
    Branch,
    Feed,
    Network,
    check_network,
    layer_network,
    read_map,
    read_network,
    read_parts,
)

IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])
PADDED = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40}
WORDS = SIZES | {"vocab_size": 300, "max_position_embeddings": 40, "num_attention_heads": 3}
PICTURES = SIZES | {"num_attention_heads": 3, "image_size": 16, "patch_size": 8, "num_labels": 5}
GROUPED = WORDS | {"num_attention_heads": 6, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40}
GPT2 |= {"vocab_size": 300, "num_labels": 3, "pad_token_id": 0, "eos_token_id": 1}
GPT2 |= {"bos_token_id": 1}
DISTIL: dict[str, Any] = {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40}
# transformers compute softmax and some norms in float32, also in float64.
INSIDE = 1e-5

Case = tuple[nn.Module, Any]


def random(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn(make: Callable[[], nn.Module], factor: float = 3.0) -> nn.Module:
    """A random model far from linear, all of whose weights matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        for p in model.parameters():
            p.data.mul_(factor) if p.ndim == 2 else p.data.add_(0.2 * torch.randn_like(p))
    return model.double().eval()


def words(kind: str, config: Any, inputs: Any = None) -> Callable[[], Case]:
    make = lambda: getattr(t, kind)(config)  # noqa: E731
    return lambda: (drawn(make), {"input_ids": IDS} if inputs is None else inputs)


class Encoder(nn.Module):
    """Torch's encoder, pooled, and a linear map to classes."""

    def __init__(self, pool: str, *, norm_first: bool, activation: Any, d: int = 16) -> None:
        super().__init__()
        how: dict[str, Any] = {"norm_first": norm_first, "activation": activation}
        layer = nn.TransformerEncoderLayer(d, 2, 24, dropout=0.1, batch_first=True, **how)
        end = nn.LayerNorm(d) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=end, enable_nested_tensor=False)
        self.head, self.pool = nn.Linear(d, 5), pool

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        return self.head(h.mean(1) if self.pool == "mean" else h[:, 0])


class Plain(nn.Module):
    """One block written out, on embedded tokens."""

    def __init__(self, kind: str = "pre", d: int = 16) -> None:
        super().__init__()
        self.kind, self.embed, self.fc = kind, nn.Linear(5, d), nn.Linear(d, 3)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.RMSNorm(d, eps=1e-5)
        self.up, self.down = nn.Linear(d, 24), nn.Linear(24, d)
        self.score, self.pair = nn.Linear(d, 1), nn.Linear(d, 1)

    def mixed(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        match self.kind:
            case "attention alone":
                return self.fc(self.mixed(h).mean(1))
            case "post":
                h = self.norm1(h + self.mixed(h))
                return self.fc(self.norm2(h + self.down(F.silu(self.up(h)))).mean(1))
            case "layer scale":
                h = h + torch.tanh(self.norm2.weight) * self.mixed(self.norm1(h))
            case "parallel":
                y = self.norm1(h)
                return self.fc((h + self.mixed(y) + self.down(F.relu(self.up(y)))).mean(1))
            case _:
                h = h + self.mixed(self.norm1(h))
        if self.kind == "clamp":
            h = h.clamp(-1e6, 1e6)
        h = h + self.down(F.relu(self.up(self.norm2(h))))
        match self.kind:
            case "max":
                return self.fc(h.amax(1))
            case "attention pool":
                return self.fc((self.score(h).softmax(1) * h).sum(1))
            case "one score":
                return self.pair(h.mean(1))
            case "tokens":
                return self.fc(h)
            case "detached":
                return self.fc(h.mean(1)) + self.fc(h.detach().mean(1))
            case "two maps":
                return self.fc(self.embed.weight.T.new_ones(1) * self.down(self.up(h)).mean(1))
            case "tempered":
                return self.fc(h.mean(1)) / 0.07
            case "normed mean":
                return self.fc(self.norm1(h.mean(1)))
        return self.fc(h.mean(1))


class Own(nn.Module):
    """Layers of lipscope, one in its module and one by itself."""

    def __init__(self, variant: str = "dot-product", d: int = 12) -> None:
        super().__init__()
        self.first = ls.MultiheadAttention(d, 3, variant=variant, batch_first=True)
        self.second = DotProduct(torch.randn(d, d), torch.randn(d, d), torch.randn(d, d))
        self.norm, self.fc = nn.RMSNorm(d), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x, x, x)[0]
        x = x + self.second(self.norm(x))
        return self.fc(x[:, 0])


X = random((1, 6, 16))
FEATURES = random((1, 6, 5))
PIXELS = {"pixel_values": random((1, 3, 16, 16))}
CASES: dict[str, tuple[Callable[[], Case], str]] = {
    # Branches: A attention, F token-wise, N a norm alone; n with a norm before, + with a sum.
    "bert": (words("BertForSequenceClassification", t.BertConfig(**WORDS)), "A+ N F+ N A+ N F+ N"),
    "roberta": (
        words("RobertaForSequenceClassification", t.RobertaConfig(**WORDS)),
        "A+ N F+ N A+ N F+ N",
    ),
    "distilbert": (
        words("DistilBertForSequenceClassification", t.DistilBertConfig(**DISTIL, vocab_size=300)),
        "A+ N F+ N A+ N F+ N",
    ),
    "mpnet": (
        words("MPNetForSequenceClassification", t.MPNetConfig(**WORDS)),
        "A+ N F+ N A+ N F+ N",
    ),
    "padded": (
        words("BertForSequenceClassification", t.BertConfig(**WORDS), PADDED),
        "A+ N F+ N A+ N F+ N",
    ),
    "gpt2": (words("GPT2LMHeadModel", t.GPT2Config(**GPT2)), "nA+ nF+ nA+ nF+ N"),
    "gpt2 classes": (
        words("GPT2ForSequenceClassification", t.GPT2Config(**GPT2)),
        "nA+ nF+ nA+ nF+ N",
    ),
    "llama": (words("LlamaForCausalLM", t.LlamaConfig(**GROUPED)), "nA+ nF+ nA+ nF+ N"),
    "vit": (
        words("ViTForImageClassification", t.ViTConfig(**PICTURES), PIXELS),
        "nA+ nF+ nA+ nF+ N",
    ),
    "own layers": (lambda: (drawn(Own, 1.0), (random((1, 5, 12)),)), "A+ nA+"),
    "attention": (lambda: (drawn(lambda: Plain("attention alone")), (FEATURES,)), "A"),
    "pre": (lambda: (drawn(Plain), (FEATURES,)), "nA+ nF+"),
    "tempered": (lambda: (drawn(lambda: Plain("tempered")), (FEATURES,)), "nA+ nF+"),
    "post": (lambda: (drawn(lambda: Plain("post")), (FEATURES,)), "A+ N F+ N"),
    "layer scale": (lambda: (drawn(lambda: Plain("layer scale")), (FEATURES,)), "nA+ nF+"),
    "normed mean": (lambda: (drawn(lambda: Plain("normed mean")), (FEATURES,)), "nA+ nF+"),
    **{
        f"torch {activation} {pool}{' first' * first}": (
            lambda a=activation, p=pool, f=first: (
                drawn(lambda: Encoder(p, norm_first=f, activation=a), 1.0),
                (X,),
            ),
            "nA+ nF+ nA+ nF+ N" if first else "A+ N F+ N A+ N F+ N",
        )
        for activation, pool, first in (
            ("relu", "mean", False),
            ("relu", "first", True),
            ("gelu", "first", False),
            ("gelu", "mean", True),
        )
    },
}


@cache
def read(name: str) -> tuple[nn.Module, Any, Network, Tensor]:
    model, inputs = CASES[name][0]()
    return model, inputs, *read_network(model, inputs)


def described(network: Network) -> str:
    """Its branches in letters."""

    def letters(one: Branch) -> str:
        if one.part is None:
            return "N"
        kind = "F" if isinstance(one.part, Feed) else "A"
        return "n" * (one.norm is not None) + kind + "+" * one.skip

    return " ".join(map(letters, network.branches))


def test_a_gate_of_a_weight_is_a_factor() -> None:
    model, inputs, network, x = read("layer scale")
    parts, same = read_parts(model.requires_grad_(), inputs)
    assert torch.equal(x, same)
    torch.testing.assert_close(parts(x), network(x))


def activations(network: Network) -> set[str]:
    parts = [one.part for one in (*network.branches, *network.tail)]
    return {part.activation for part in parts if isinstance(part, Feed)}


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_the_module(name: str) -> None:
    model, inputs, network, x = read(name)
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        own = getattr(out, "logits", out)
        own = own[0, -1] if own.ndim == 3 else own[0]
        assert (network(x) - own).norm() <= INSIDE * own.norm()
    assert described(network) == CASES[name][1]
    assert x.dtype == network.head.dtype == torch.float64
    assert not any(one.requires_grad for one in (x, network.head, network.bias))


def test_activations_gates_and_tails_are_told_apart() -> None:
    def of(name: str) -> Network:
        return read(name)[2]

    assert activations(of("bert")) == {"gelu", "tanh"}
    assert activations(of("distilbert")) == {"gelu", "relu"}
    assert activations(of("gpt2")) == {"gelu_tanh"}
    assert activations(of("post")) == {"silu"}
    llama = of("llama")
    feed = llama.branches[1].part
    assert isinstance(feed, Feed) and feed.gate is not None and activations(llama) == {"silu"}
    norm = llama.branches[0].norm
    assert norm is not None and not norm.centred and not norm.bias.any() and norm.eps == 1e-6
    (only,) = of("normed mean").tail
    assert only.part is None and only.norm is not None and only.norm.centred


def silent() -> tuple[SmoothTransformer, Tensor]:
    """A module that knows its parts; at this input all units of its first network are off."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"outputs": 3, "length": 5, "vocabulary": 6, "pool": "mean"}
    model = SmoothTransformer(8, 2, 2, cap=None, activation="relu", **sizes).double().eval()
    ids, part = torch.tensor([[0, 4, 1, 4, 2]]), model.blocks[0][1].part
    with torch.no_grad():
        h = model.blocks[0][0](model.clip(model.tokens(ids)))[0]
        off = torch.linalg.pinv(h).sum(1)  # every token h_i has the product 1 with it
        part[0].weight.sub_(off * (h @ part[0].weight.T).max(0).values.clamp_min(0)[:, None] * 2)
        assert not bool(part(h).any()) and bool(part(-h).any())
    return model, ids


def test_a_module_that_knows_its_parts_is_read_where_one_is_silent() -> None:
    """The weights of that sum show in no value of the run."""
    model, ids = silent()
    network, x = read_network(model, (ids,))
    assert isinstance(network, Network)
    torch.testing.assert_close(network(x), model(ids)[0])
    parts, same = read_parts(model, (ids,))
    block, _ = read_map(model, (ids,), layer=1)
    torch.testing.assert_close(same, x)
    far = x + random((5, 8))
    expected = model.head(model.blocks[1](model.blocks[0](far[None])).mean(1))[0]
    torch.testing.assert_close(network(far), expected)
    torch.testing.assert_close(parts(far), expected)
    torch.testing.assert_close(block(far), model.blocks[1](far[None])[0])
    parts(far).sum().backward()
    grads = [model.blocks[i][1].part[0].weight.grad for i in (0, 1)]
    assert all(g is not None and bool(g.any()) for g in grads)
    kept = network(far).detach()
    with torch.no_grad():
        model.blocks[0][0].part.attention.query.mul_(2.0)
    torch.testing.assert_close(network(far), kept)


def test_what_a_module_says_of_its_parts_is_held_against_it() -> None:
    model, ids = silent()
    own = model.as_network

    def wrong() -> Network:
        known = own()
        assert isinstance(known, Network)
        sums = [replace(b, skip=0.5) if isinstance(b.part, Feed) else b for b in known.branches]
        return replace(known, branches=tuple(sums))

    model.as_network = wrong
    with pytest.raises(InputError, match="the stream there goes to"):
        read_network(model, (ids,))


def test_a_module_that_knows_its_parts_may_hold_what_is_refused() -> None:
    sizes: dict[str, Any] = {"outputs": 3, "length": 5, "vocabulary": 6, "pool": "mean"}
    with pytest.raises(InputError, match=r"of dot-product attention.*`L2Attention`"):
        read_network(SmoothTransformer(8, 2, 1, variant="l2", **sizes), ((IDS % 6)[:, :5],))


def test_a_norm_without_variance_is_read() -> None:
    class CentreNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(-1, keepdim=True)

    model = drawn(Plain)
    model.norm1 = CentreNorm()
    network, _ = read_network(model, (FEATURES,))
    norm = network.branches[0].norm
    assert norm is not None and norm.centred and not norm.scaled


@pytest.mark.parametrize("swiglu", [False, True])
def test_factors_of_channels_are_folded(swiglu: bool) -> None:
    """DINOv2 scales its branches; a fused gate is cut in two."""
    make = lambda: t.Dinov2Model(t.Dinov2Config(**PICTURES, use_swiglu_ffn=swiglu))  # noqa: E731
    head = random((3, 24))
    model = drawn(make)
    network, x = read_network(model, PIXELS, read_out=head, pool="first")
    with torch.no_grad():
        own = head @ model(**PIXELS).last_hidden_state[0, 0]
        assert (network(x) - own).norm() <= INSIDE * own.norm()
    assert described(network) == "nA+ nF+ nA+ nF+ N"


def test_the_stream_may_enter_later() -> None:
    model, inputs, whole, x = read("bert")
    upper, h = read_network(model, inputs, at_layer=1)
    assert described(upper) == "A+ N F+ N" and not torch.equal(h, x)
    assert torch.allclose(upper(h), whole(x), rtol=1e-12)
    with pytest.raises(InputError, match="`at_layer` should be between 0 and 1"):
        read_network(model, inputs, at_layer=2)


def test_a_head_pools_what_is_no_padding() -> None:
    head, bias = random((3, 24)), random((3,))
    model = drawn(lambda: t.BertModel(t.BertConfig(**WORDS)))
    given: dict[str, Any] = {"read_out": head, "bias": bias, "names": ("a", "b", "c")}
    network, x = read_network(model, PADDED, **given)
    assert network.share.tolist() == [0.25] * 4 + [0.0] * 2 and network.name(2) == "c"
    with torch.no_grad():
        own = head @ model(**PADDED).last_hidden_state[0, :4].mean(0) + bias
        assert (network(x) - own).norm() <= INSIDE * own.norm()
    last, _ = read_network(model, PADDED, pool="last", **given)
    assert last.share.argmax() == 3
    with pytest.raises(InputError, match="Found padding at 5"):
        read_network(model, PADDED, pool=5, **given)
    with pytest.raises(InputError, match="`between`, `read_out`"):
        read_network(model, PADDED)
    with pytest.raises(InputError, match=r"`read_out` should have shape \(classes, 24\)"):
        read_network(model, PADDED, read_out=random((3, 12)))


def test_scores_of_tokens_need_a_token() -> None:
    model = drawn(lambda: Plain("tokens"))
    with pytest.raises(InputError, match="`pool` should say which token's scores decide"):
        read_network(model, (FEATURES,))
    network, x = read_network(model, (FEATURES,), pool=2)
    assert torch.allclose(network(x), model(FEATURES)[0, 2])
    with pytest.raises(InputError, match="the index of one of 6 tokens"):
        read_network(model, (FEATURES,), pool=6)
    with pytest.raises(InputError, match="left out for a model that pools"):
        read_network(drawn(Plain), (FEATURES,), pool="mean")


@pytest.mark.parametrize(("mask", "last"), [([1, 1, 1, 1, 0, 0], 3), ([0, 0, 1, 1, 1, 1], 5)])
def test_a_padded_decoder_answers_at_its_last_real_token(mask: list[int], last: int) -> None:
    model = drawn(lambda: t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)))
    inputs = {"input_ids": IDS, "attention_mask": torch.tensor([mask])}
    network, x = read_network(model, inputs)
    with torch.no_grad():
        own = model(**inputs).logits[0, last]
        assert (network(x) - own).norm() <= INSIDE * own.norm()


def test_a_model_is_left_as_it_was() -> None:
    model = Encoder("mean", norm_first=False, activation="relu").train()
    read_network(model, (X.float(),))
    kinds = {p.dtype for p in model.parameters()}
    assert model.training and kinds == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())


def test_classes_are_named_by_the_model() -> None:
    config = t.BertConfig(**WORDS, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    model = drawn(lambda: t.BertForSequenceClassification(config))
    assert read_network(model, {"input_ids": IDS})[0].names == ("no", "yes")
    assert read("bert")[2].names == ()


def test_one_layer_is_a_network() -> None:
    layer = DotProduct(*(random((4, 4), seed) for seed in range(3)))
    x, head = random((5, 4), 7), random((2, 4), 8)
    network = layer_network(layer, 5, head, names=("a", "b"))
    assert torch.allclose(network(x), head @ layer(x).mean(0))
    first = layer_network(layer, 5, head, head[:, 0], pool="first")
    assert torch.allclose(first(x), head @ layer(x)[0] + head[:, 0])


def bert(**changes: Any) -> Callable[[], Case]:
    return words("BertForSequenceClassification", t.BertConfig(**(WORDS | changes)))


def with_other_dropout() -> nn.Module:
    model: Any = words("GPT2ForSequenceClassification", t.GPT2Config(**GPT2))()[0]
    model.transformer.h[1].attn.resid_dropout = nn.Hardtanh(-1e3, 1e3)  # no stream that is tried
    return model


REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "albert": (
        words("AlbertForSequenceClassification", t.AlbertConfig(**WORDS, embedding_size=8)),
        "no closed form is known for `AlbertAttention`",
    ),
    "norms after parts": (
        words("Gemma2ForCausalLM", t.Gemma2Config(**GROUPED, head_dim=4)),
        "after 1 attention layer",
    ),
    "no dropout": (
        lambda: (with_other_dropout(), {"input_ids": IDS}),
        r"`GPT2Attention` contains an adapter or another part .*: `resid_dropout` \(.*\.Hardtanh\)",
    ),
    "both at once": (
        words("GPTNeoXForCausalLM", t.GPTNeoXConfig(**WORDS)),
        "after 1 attention layer",
    ),
    "parallel": (lambda: (drawn(lambda: Plain("parallel")), (FEATURES,)), "after 1 attention"),
    "another activation": (bert(hidden_act="quick_gelu"), r"intermediate.dense` \(Linear\)"),
    "relu6": (bert(hidden_act="relu6"), "Found `Hardtanh`"),
    "clamp": (lambda: (drawn(lambda: Plain("clamp")), (FEATURES,)), "Found `Clamp`"),
    "max": (lambda: (drawn(lambda: Plain("max")), (FEATURES,)), "Found `Amax`"),
    "attention pool": (
        lambda: (drawn(lambda: Plain("attention pool")), (FEATURES,)),
        "Found `Softmax`",
    ),
    "one score": (lambda: (drawn(lambda: Plain("one score")), (FEATURES,)), "needs two scores"),
    "detached": (
        lambda: (drawn(lambda: Plain("detached")), (FEATURES,)),
        "reads values of the stream",
    ),
    "no activation": (
        lambda: (drawn(lambda: Plain("two maps")), (FEATURES,)),
        r"the stream there goes to `up` \(Linear\)",
    ),
    "two samples": (lambda: (drawn(Plain), (random((2, 6, 5)),)), "one sample"),
    "another variant": (
        lambda: (drawn(lambda: Own("l2"), 1.0), (random((1, 5, 12)),)),
        "`first`: it is `L2Attention`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(InputError, match=why) as problem:
        read_network(*make())
    assert "\n" not in str(problem.value)


def test_a_part_that_hides_its_stream_is_refused() -> None:
    model, inputs = bert()()
    for p in model.parameters():
        p.data.mul_(1e8)
    with pytest.raises(InputError, match="rounding hides the sum"):
        read_network(model, inputs)


def test_one_token_has_a_head_too() -> None:
    model, inputs = bert()()[0], {"input_ids": IDS[:, :1]}
    network, x = read_network(model, inputs)
    with torch.no_grad():
        own = model(**inputs).logits[0]
        assert (network(x) - own).norm() <= INSIDE * own.norm()


def test_disagreement_is_refused() -> None:
    _, _, network, x = read("pre")
    first = network.branches[0]
    assert first.norm is not None
    other = replace(first, norm=replace(first.norm, eps=1e-4))
    wrong = replace(network, branches=(other, *network.branches[1:]))
    with pytest.raises(InputError, match=r"scores of the module itself. Found a relative"):
        check_network(wrong, network, x)

    def bent(power: int, size: float) -> Callable[[Tensor], Tensor]:
        return lambda h: network(h) + size * (h - x).mean() ** power

    with pytest.raises(InputError, match=r"gradients of the module itself.* at the input"):
        check_network(network, bent(1, 1.0), x)
    with pytest.raises(InputError, match=r"after a random move of 0.01"):
        check_network(network, bent(2, 1.0), x)
    with pytest.raises(InputError, match="relative difference of inf"):
        check_network(network, lambda h: network(h)[:2], x)


def test_embeddings_may_stand_in_the_list_of_blocks() -> None:
    def layers() -> nn.Module:
        one, two = (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))
        return nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(), one, two, nn.LayerNorm(8), nn.Linear(8, 3)
        )

    model: Any = drawn(layers, 1.0)
    given = random((1, 6, 4))
    network, x = read_network(model, (given,), pool="last")
    torch.testing.assert_close(x, model[0](given)[0])
    for at in (x, x + random((6, 8), 2)):
        torch.testing.assert_close(network(at), model[2:](at[None])[0, -1])


@pytest.mark.parametrize(
    "front",
    [
        lambda: (nn.Linear(5, 8), nn.LayerNorm(8)),
        lambda: (nn.LayerNorm(5), nn.Linear(5, 8)),
        lambda: (nn.Linear(5, 8), nn.ReLU()),
        lambda: (nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 8)),
    ],
)
def test_what_makes_a_stream_of_vectors_is_a_part(front: Callable[[], tuple]) -> None:
    """With a norm or an activation; moves are of the vectors."""

    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        return nn.Sequential(*front(), layer, MeanPool(), nn.Linear(8, 3))

    model = drawn(layers, 1.0)
    given = random((1, 6, 5))
    network, x = read_network(model, (given,))
    torch.testing.assert_close(x, given[0].double())
    at = x + random((6, 5), 2)
    torch.testing.assert_close(network(at), model.double()(at[None])[0])


class Positions(nn.Module):
    """Sinusoids or learnt ones, and dropout, as in torch's tutorial."""

    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 8) if learnt else nn.Identity()
        self.register_buffer("angles", torch.outer(torch.arange(6.0), torch.rand(8)).sin())
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        added = self.angles if isinstance(self.rows, nn.Identity) else self.rows.weight
        return self.dropout(8**0.5 * x + added)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_positions_may_stand_before_the_blocks(learnt: bool, whole: bool) -> None:
    """Beside an embedding in a Sequential: the stream is what enters the first layer."""

    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) if whole else layer
        return nn.Sequential(nn.Embedding(9, 8), Positions(learnt), blocks, nn.Linear(8, 3))

    model: Any = drawn(layers, 1.0)
    ids = torch.tensor([[1, 5, 2, 8, 3, 1]])
    network, x = read_network(model, (ids,), pool="last")
    torch.testing.assert_close(x, model[:2](ids)[0])
    at = x + random((6, 8), 2)
    torch.testing.assert_close(network(at), model[2:](at[None])[0, -1])
    assert float(ls.lipschitz_bound(model, ids, radius=3.0)) > 0


@pytest.mark.parametrize("dropout", [False, True])
def test_a_leaf_of_several_matrices_may_be_a_block(dropout: bool) -> None:
    class OfMatrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(4, 8))
            if dropout:
                self.dropout = nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(x @ self.inner) @ self.outer

    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        return nn.Sequential(OfMatrices(), layer, nn.Linear(8, 3))

    with pytest.raises(InputError, match="otherwise after 0 attention layers"):
        read_network(drawn(layers, 1.0), (random((1, 6, 8)),), pool="last")


# --- token ids that act beside the stream, and log-probabilities


class OfWords(nn.Module):
    """A classifier of padded words, whose scores are a function of stream and ids."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.pool, self.head = nn.Embedding(9, 8), pool, nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def scores(self, x: Tensor, ids: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=ids == 0)
        return self.head(self.pool(x, (ids != 0)[..., None]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.table(ids), ids)


POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, real: (x * real).sum(1) / real.sum(1),
    "of floats": lambda x, real: (x * real.to(x)).sum(1) / real.to(x).sum(1).clamp(min=1e-9),
    "filled": lambda x, real: x.masked_fill(~real, 0.0).sum(1) / real.sum(1),
    "chosen": lambda x, real: torch.where(real, x, 0.0).sum(1) / real.sum(1),
    "sum": lambda x, real: (x * real).sum(1),
    "last": lambda x, real: x[torch.arange(len(x)), real.sum((1, 2)) - 1],
}
LEFT, RIGHT, FULL = ([[0, 0, 3, 1, 4, 1]], [[3, 1, 4, 1, 0, 0]], [[3, 1, 4, 1, 5, 2]])


@pytest.mark.parametrize("ids", [RIGHT, FULL])
@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_may_leave_out_padding_by_its_ids(pool: str, ids: list[list[int]]) -> None:
    model: Any = drawn(lambda: OfWords(POOLS[pool]), 1.0)
    given = torch.tensor(ids)
    network, x = read_network(model, (given,))
    for move in (0.0, 0.1, 3.0):
        at = x + move * random((6, 8))
        own = model.scores(at[None], given)[0]
        assert (network(at) - own).norm() <= 1e-9 * own.norm()
    if pool != "last":  # of any ids
        with pytest.raises(InputError, match="by the stream alone"):
            ls.lipschitz_bound(model, given)


def test_padding_may_come_first() -> None:
    model: Any = drawn(lambda: OfWords(POOLS["product"]), 1.0)
    network, _ = read_network(model, (torch.tensor(LEFT),))
    assert network.share.tolist() == [0.0, 0.0, 0.25, 0.25, 0.25, 0.25]


def test_padding_that_inference_sets_to_zero_is_refused() -> None:
    model: Any = drawn(lambda: OfWords(lambda x, _: x.mean(1)), 1.0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        read_network(model, (torch.tensor(FULL),))
        with pytest.raises(InputError, match=r"with and without gradients.*set_fastpath_enabled"):
            read_network(model, (torch.tensor(RIGHT),))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            read_network(model, (torch.tensor(RIGHT),))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_padding_alone_gives_no_numbers() -> None:
    model = drawn(lambda: OfWords(POOLS["product"]), 1.0)
    with pytest.raises(InputError, match=r"finite numbers. Found NaN .* every token is padding"):
        read_network(model, (torch.zeros_like(torch.tensor(FULL)),))


def test_a_module_that_needs_gradients_is_refused() -> None:
    def needing(x: Tensor, _: Tensor) -> Tensor:
        assert torch.is_grad_enabled()
        return x.mean(1)

    model = drawn(lambda: OfWords(needing), 1.0)
    with pytest.raises(InputError, match="raised AssertionError"):
        read_network(model, (torch.tensor(FULL),))


def test_a_mask_of_the_stream_is_refused() -> None:
    def few(x: Tensor, real: Tensor) -> Tensor:
        return x.masked_fill((x < -5.0).any(-1, keepdim=True), 0.0).mean(1)

    model = drawn(lambda: OfWords(few), 1.0)
    with pytest.raises(InputError, match="reads values of the stream"):
        read_network(model, (torch.tensor(FULL),))


class Then(nn.Module):
    """A model, and a function of its scores."""

    def __init__(self, model: nn.Module, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.last = model, last

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.model(ids))


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_log_probabilities_decide_as_scores_do(factor: float) -> None:
    model, ids = drawn(lambda: OfWords(POOLS["product"]), 1.0), torch.tensor(RIGHT)
    of = Then(model, lambda y: (factor * y).log_softmax(-1))
    plain, found = (ls.load_model(one).decision(ids) for one in (model, of))
    assert found.margin == pytest.approx(factor * plain.margin, rel=1e-9)
    assert found.answer == plain.answer
    with pytest.raises(InputError, match="LogSoftmax"):
        ls.lipschitz_bound(of, ids)


@pytest.mark.parametrize(
    "last",
    [
        lambda y: y.softmax(-1),
        lambda y: 2.0 * y.log_softmax(-1) + F.relu(y),
        lambda y: y.log_softmax(-1) @ random((3, 3)),
        lambda y: y * y.log_softmax(-1).exp(),
    ],
)
def test_other_functions_of_scores_are_refused(last: Callable[[Tensor], Tensor]) -> None:
    model = drawn(lambda: OfWords(POOLS["product"]), 1.0)
    with pytest.raises(InputError):
        read_network(Then(model, last), (torch.tensor(FULL),))


def test_probabilities_and_single_scores_have_a_remedy() -> None:
    model: Any = drawn(lambda: OfWords(POOLS["product"]), 1.0)
    ids = (torch.tensor(FULL),)
    with pytest.raises(InputError, match="return the scores before it"):
        read_network(Then(model, lambda y: y.softmax(-1)), ids)
    with pytest.raises(InputError, match="certify one layer"):  # in between no remedy
        read_network(Then(model, lambda y: y.softmax(-1) @ random((3, 3))), ids)
    model.head = nn.Linear(8, 1).double()
    with pytest.raises(InputError, match="if its sign decides"):
        read_network(model, ids)
    follow = nn.Linear(1, 2, bias=False).double()
    follow.weight.data = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    network, x = read_network(nn.Sequential(model, follow), ids)
    assert network(x).tolist() == pytest.approx([0.0, model(*ids).item()], rel=1e-12)


def test_log_probabilities_of_every_token_are_pooled_as_scores_are() -> None:
    model: Any = drawn(lambda: OfWords(lambda x, _: x), 1.0)
    ids = torch.tensor(FULL)
    for pool in ("mean", "last"):
        network, x = read_network(Then(model, lambda y: y.log_softmax(-1)), (ids,), pool=pool)
        own = model.scores(x[None], ids)[0].log_softmax(-1)
        own = own.mean(0) if pool == "mean" else own[-1]
        differences = (network(x) - own).diff()
        assert differences.abs().max() <= 1e-9 * own.norm()
