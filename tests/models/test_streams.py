"""How blocks hand on their stream: scaled sums, bare ids, pairs; against dense Jacobians.

The truth is automatic differentiation of the unmodified model between what one hook writes and
another reads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, BeitConfig, GraniteConfig, MiniCPM3Config

import lipscope as ls

WIDTH, HEADS = 8, 2
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
EXACT = {"dtype": "float64", "tol": 1e-6}


def truth(model: nn.Module, inputs: Any, start: str, end: str, *, entrance: bool = False) -> float:
    """Sigma from the first tensor that a module takes to one that another takes or returns."""
    found: dict[str, Tensor] = {}

    def tensor(values: Any) -> Tensor:
        if isinstance(values, Tensor):
            return values
        return next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if "x" not in found:
            found["x"] = tensor([*args, *kwargs.values()]).detach()
            return None
        now, old = found["now"], found["x"]
        new = [now if torch.is_tensor(a) and a.shape == old.shape else a for a in args]
        given = {k: now if k == "hidden_states" else v for k, v in kwargs.items()}
        return tuple(new), given

    def leave(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        found["y"] = tensor([*args, *kwargs.values()] if entrance else out)

    def once(x: Tensor) -> Tensor:
        found["now"] = x.clone()  # a block may write into it
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return found["y"]

    first = model.get_submodule(start).register_forward_pre_hook(enter, with_kwargs=True)
    last = model.get_submodule(end).register_forward_hook(leave, with_kwargs=True)
    try:
        with torch.no_grad():
            once(torch.zeros(1))
        jacobian: Any = torch.autograd.functional.jacobian(once, found["x"])
    finally:
        first.remove()
        last.remove()
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, found["x"].numel()), 2))


def one(model: nn.Module, inputs: Any, map: str, layer: int = 1) -> ls.Measurement:
    row = ls.measure(model, inputs, map=map, layers="all" if map == "model" else [layer], **EXACT)[
        0
    ]
    assert row.derivative_error is not None
    assert row.derivative_error < 1e-4
    return row


# --- scaled residuals

SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 30}
TEXT = {**SMALL, "intermediate_size": 12, "num_key_value_heads": 2, "pad_token_id": 0}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
SCALED = {
    "granite": (GraniteConfig(**TEXT, residual_multiplier=0.22), "layers.1", "input", "post"),
    "minicpm3": (MiniCPM3Config(**TEXT, **LATENT, v_head_dim=4), "layers.1", "input", "post"),
    "beit": (
        BeitConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=12,
                   image_size=8, patch_size=4, layer_scale_init_value=0.3),
        "layers.1", "before", "after",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_residuals_of_models(kind: str) -> None:
    config, block, before, after = SCALED[kind]
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(config, attn_implementation="eager").double().eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.3
    pixels = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    inputs = {"pixel_values": pixels} if kind == "beit" else {"input_ids": IDS}
    names = {n for n, _ in model.get_submodule(block).named_children() if "norm" in n}
    start, end = (f"{block}.{next(n for n in names if part in n)}" for part in (before, after))
    row = one(model, inputs, "residual")
    assert row.argument == f"input of {start}"
    assert row.sigma == pytest.approx(truth(model, inputs, block, end, entrance=True), rel=1e-5)
    row = one(model, inputs, "block")
    assert row.sigma == pytest.approx(truth(model, inputs, block, block), rel=1e-5)


class Attention(nn.Module):
    """Causal, as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.drop = HEADS, nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """``x + s N(f(x))``, with or without N, and an MLP behind."""

    def __init__(self, scaled: Any, *, known: bool = False, normed: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if known else Attention()
        self.ln_after = nn.LayerNorm(WIDTH) if normed else None
        self.gamma = nn.Parameter(torch.randn(WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        u = self.ln_1(x)
        y = self.attn(u) if isinstance(self.attn, Attention) else self.attn(u, u, u)[0]
        y = y if self.ln_after is None else self.ln_after(y)
        x = self.scaled(self, x, y)
        return x + self.mlp(self.ln_2(x))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.h = nn.Embedding(30, WIDTH), nn.ModuleList(blocks)
        self.double().eval()
        for p in self.parameters():
            p.data += torch.randn_like(p) * 0.5

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        return x


def added(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + y


def weighed(block: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + block.gamma * y


def in_place(block: Any, x: Tensor, y: Tensor) -> Tensor:
    y.mul_(block.gamma)
    x += y
    return x


SCALES = {
    "number": lambda b, x, y: x + 0.3 * y,
    "division": lambda b, x, y: y / 3 + x,
    "channels": weighed,
    "gate": lambda b, x, y: x + b.gamma[:1].tanh() * y,
    "two": lambda b, x, y: x + (y * 2) * b.gamma,
    "zero": lambda b, x, y: x + 0.0 * y,
    "in place": in_place,
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_scaled_residuals_written_by_hand(name: str, normed: bool) -> None:
    def stack(scaled: Any) -> Stack:
        torch.manual_seed(0)
        return Stack(Block(scaled, normed=normed), Block(scaled, normed=normed))

    model = stack(SCALES[name])
    same = stack(weighed) if name == "in place" else model  # autograd keeps what it overwrites
    expected = truth(same, IDS, "h.1", "h.1.ln_2", entrance=True)
    assert one(model, IDS, "residual").sigma == pytest.approx(expected, rel=1e-5)


def test_bounds_know_the_scale() -> None:
    """The same as those of a model whose projection, or norm, has taken it up."""
    torch.manual_seed(0)
    for normed in (False, True):
        model = Stack(Block(weighed, known=True, normed=normed))
        other = Stack(Block(added, known=True, normed=normed))
        other.load_state_dict(model.state_dict())
        block: Any = other.h[0]
        last = block.ln_after if normed else block.attn.out_proj
        last.weight.data *= block.gamma.data.reshape(-1, *[1] * (last.weight.ndim - 1))
        last.bias.data *= block.gamma.data
        asked = {"map": "residual", "sharp": True, "dtype": "float64"}
        found, same = (ls.bounds(m, IDS, **asked) for m in (model, other))
        assert same[0].sigma == pytest.approx(found[0].sigma, rel=1e-3)
        values = {b.theorem: b.value for b in found.bounds}
        assert sum(v is not None for v in values.values()) >= 5
        for bound in same.bounds:
            assert values[bound.theorem] == (
                None if bound.value is None else pytest.approx(bound.value, rel=1e-6)
            )


@pytest.mark.parametrize(
    ("combine", "said"),
    [
        (lambda b, x, y: 2 * x + y, "needs a sum of the layer's input and output"),  # DeepNorm
        (lambda b, x, y: x + y * x.mean((0, 1)).tanh(), "needs a sum of the layer's"),
        (lambda b, x, y: x + y * x.mean().tanh().item(), "a finite difference gives"),
        (lambda b, x, y: x + y * x.detach().mean((0, 1)), "a finite difference gives"),
    ],
    ids=["the stream is scaled", "a gate", "a gate read as a number", "a gate without gradient"],
)
def test_what_is_no_fixed_scale_is_refused(combine: Any, said: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ls.InputError, match=said):
        ls.measure(Stack(Block(combine)), IDS, map="residual", dtype="float64")


# --- nanoGPT: ids alone, no configuration, logits of the last token and a loss


class GPT(nn.Module):
    def __init__(self, gives: str = "hidden", vocab: int = 30) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(30, WIDTH), "wpe": nn.Embedding(16, WIDTH)}
        blocks = nn.ModuleList([Block(added), Block(added)])
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head, self.gives = nn.Linear(WIDTH, vocab, bias=False), gives
        self.double().eval()
        for p in self.parameters():
            p.data += torch.randn_like(p) * 0.5

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        parts: Any = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1]))
        for block in parts["h"]:
            x = block(x)
        x = parts["ln_f"](x)
        if self.gives == "hidden":
            return x
        return self.lm_head(x) if self.gives == "logits" else (self.lm_head(x[:, [-1]]), None)


@pytest.mark.parametrize("gives", ["hidden", "logits", "last and loss"])
def test_a_model_that_is_called_with_bare_ids(gives: str) -> None:
    torch.manual_seed(0)
    model, block = GPT(gives), "transformer.h.1"
    for map, start, end in (
        ("attention", f"{block}.attn", f"{block}.attn"),
        ("normed", f"{block}.ln_1", f"{block}.attn"),
        ("block", block, block),
    ):
        expected = truth(model, IDS, start, end)
        for given in (IDS, {"idx": IDS}):
            assert one(model, given, map).sigma == pytest.approx(expected, rel=1e-5)
    expected = truth(model, IDS, "transformer.h.0", "transformer.ln_f")
    row = one(model, IDS, "model")
    assert row.sigma == pytest.approx(expected, rel=1e-5)
    assert (row.note or "").startswith("read after `transformer.ln_f`") == (gives != "hidden")


def test_logits_of_one_token_are_no_hidden_state_however_wide() -> None:
    torch.manual_seed(0)
    model = GPT("last and loss", vocab=WIDTH)
    expected = truth(model, IDS, "transformer.h.0", "transformer.ln_f")
    assert one(model, IDS, "model").sigma == pytest.approx(expected, rel=1e-5)


# --- a stream in two parts: what the last layer gave, and the sum of what came before (vLLM)


class AddNorm(nn.LayerNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:  # pyright: ignore
        if residual is None:
            return super().forward(x)
        total = x + residual
        return super().forward(total), total


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = AddNorm(WIDTH), AddNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            hidden, residual = self.before(hidden), hidden
        else:
            hidden, residual = self.before(hidden, residual)
        hidden, residual = self.after(self.attn(hidden), residual)
        return self.mlp(hidden), residual


class PairModel(Stack):
    def __init__(self) -> None:
        super().__init__(PairBlock(), PairBlock())
        self.norm = AddNorm(WIDTH).double()

    def forward(self, idx: Tensor) -> Tensor:
        x, residual = self.embed(idx), None
        for block in self.h:
            x, residual = block(torch.arange(idx.shape[1]), x, residual)
        return self.norm(x, residual)[0]


def test_a_stream_in_two_parts() -> None:
    torch.manual_seed(0)
    model = PairModel()
    for layer, said in ((0, "`h.0` returns 2"), (1, "`h.1` returns 2")):
        with pytest.raises(ls.InputError, match=f"with one output stream. Found that {said}"):
            ls.measure(model, IDS, map="block", layers=[layer], dtype="float64")
        with pytest.raises(ls.InputError, match="with one output stream"):
            ls.measure(model, IDS, map="stack", layers=[layer], dtype="float64")
    expected = truth(model, IDS, "h.1.attn", "h.1.attn")
    assert one(model, IDS, "attention").sigma == pytest.approx(expected, rel=1e-5)
    expected = truth(model, IDS, "h.0", "norm")
    assert one(model, IDS, "model").sigma == pytest.approx(expected, rel=1e-5)


# --- Mllama: some blocks of the decoder read the picture, under a name of their own


def test_cross_attention_of_mllama() -> None:
    from transformers import MllamaTextConfig, MllamaTextModel

    torch.manual_seed(0)
    sizes = {**TEXT, "cross_attention_layers": [1], "rope_theta": 10.0, "bos_token_id": 1}
    config = MllamaTextConfig(**sizes, eos_token_id=2)
    model: Any = MllamaTextModel._from_config(config, attn_implementation="eager").double().eval()
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.3
    states = torch.randn(1, 3, 8, dtype=torch.float64)
    inputs = {"input_ids": IDS, "cross_attention_states": states}
    site, taken = model.layers[1].cross_attn, dict[str, Any]()
    site.register_forward_pre_hook(lambda _, a, given: taken.update(given), with_kwargs=True)
    for side, name in (("query", "hidden_states"), ("key", "cross_attention_states")):
        row = ls.measure(model, inputs, side=side, dtype="float64", tol=1e-6)[0]  # pyright: ignore
        assert (row.module, row.argument) == ("layers.1.cross_attn", name)
        given = {k: None if k in ("cache", "past_key_values") else v for k, v in taken.items()}
        x = given.pop(name).detach()
        jacobian: Any = torch.autograd.functional.jacobian(
            lambda u, given=given, name=name: site(**{**given, name: u})[0], x
        )
        expected = torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2)
        assert row.sigma == pytest.approx(float(expected), rel=1e-5)
