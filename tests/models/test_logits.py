"""The maps `logits` and `margin`: a model's own scores, against dense Jacobians."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lipscope as ls
from lipscope import InputError
from tiny import tiny

IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])
PIXELS = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))
# Norms and softmax of transformers are in float32 inside, also in a model in float64.
INSIDE = 1e-6
EXACT: dict[str, Any] = {"dtype": "float64", "tol": 1e-6, "samples": None}
SMALL: dict[str, Any] = {"hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 20}
WORDS = SMALL | {"vocab_size": 300, "max_position_embeddings": 32}


class Own(nn.Module):
    """Blocks in a list, then a mean over tokens and a linear map to classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def drawn(kind: Any, config: Any) -> nn.Module:
    """A random model whose weights are large enough for a Jacobian that is far from linear."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind() if config is None else kind(config)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.data.mul_(4.0)
    return model.double().eval()


def models() -> dict[str, tuple[nn.Module, dict[str, Any] | Tensor, str]]:
    t = transformers
    heads = {"num_attention_heads": 3}
    bert = t.BertConfig(**WORDS, **heads, num_labels=4)
    vit = t.ViTConfig(**SMALL, **heads, image_size=16, patch_size=8, num_labels=5)
    llama = t.LlamaConfig(**WORDS, **heads, num_key_value_heads=3, tie_word_embeddings=False)
    own = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1)).double()
    return {
        "bert": (
            drawn(t.BertForSequenceClassification, bert),
            {"input_ids": IDS},
            "bert.encoder.layer.0",
        ),
        "vit": (
            drawn(t.ViTForImageClassification, vit),
            {"pixel_values": PIXELS.double()},
            "vit.layers.0",
        ),
        "llama": (drawn(t.LlamaForCausalLM, llama), {"input_ids": IDS}, "model.layers.0"),
        "own": (drawn(Own, None), own, "encoder.layers.0"),
    }


MODELS = models()


def truth(name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The first block's input, and the scores as a function of it: by torch alone."""
    model, inputs, first = MODELS[name]
    model = copy.deepcopy(model).requires_grad_(False)
    block = next(m for n, m in model.named_modules() if n == first)
    seen: list[Tensor] = []

    def scores(x: Tensor | None) -> Tensor:
        def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            seen.append(args[0].detach())
            return ((args[0] if x is None else x[None]), *args[1:]), kwargs

        handle = block.register_forward_pre_hook(put, with_kwargs=True)
        try:
            found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        finally:
            handle.remove()
        found = getattr(found, "logits", found)
        return found.flatten(0, -2)

    scores(None)
    return seen[0][0], scores


def top(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    jacobian: Any = torch.autograd.functional.jacobian(f, x)
    rows = jacobian.shape[: jacobian.ndim - x.ndim].numel()
    return float(torch.linalg.matrix_norm(jacobian.reshape(rows, -1), 2))


def one(name: str, map: str, **options: Any) -> ls.Measurement:
    model, inputs, _ = MODELS[name]
    (row,) = ls.measure(model, inputs, map=map, **(EXACT | options))  # pyright: ignore
    return row


@pytest.mark.parametrize("name", MODELS)
def test_sigma_of_the_scores_is_that_of_the_dense_jacobian(name: str) -> None:
    x, scores = truth(name)
    row, expected = one(name, "logits"), top(scores, x)
    assert row.layer is None and row.num_tokens == len(x)
    assert row.sigma == pytest.approx(expected, rel=2e-6)
    assert row.upper is not None and row.upper >= expected * (1 - INSIDE)
    assert row.output_norm == pytest.approx(float(scores(x).norm()), rel=INSIDE)
    assert row.derivative_error is not None and row.derivative_error < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_sigma_of_the_margin_is_the_norm_of_its_gradient(name: str) -> None:
    x, scores = truth(name)
    first, second = scores(x)[-1].topk(2).indices.tolist()
    row = one(name, "margin")
    expected = top(lambda z: scores(z)[-1, first] - scores(z)[-1, second], x)
    assert row.sigma == pytest.approx(expected, rel=INSIDE)
    assert row.output_norm == pytest.approx(float(scores(x)[-1].topk(2).values.diff().abs()))


def test_of_a_decoder_the_last_row_alone_is_the_next_token() -> None:
    x, scores = truth("llama")
    row = one("llama", "logits", read="last", move="last")
    jacobian: Any = torch.autograd.functional.jacobian(lambda z: scores(z)[-1], x)
    assert row.sigma == pytest.approx(float(torch.linalg.matrix_norm(jacobian[:, -1], 2)), rel=2e-6)


def test_scores_are_read_where_a_loss_stands_before_them() -> None:
    model, inputs, _ = MODELS["bert"]
    assert isinstance(inputs, dict)
    (row,) = ls.measure(model, {**inputs, "labels": torch.tensor([1])}, map="logits", **EXACT)
    assert row.sigma == pytest.approx(one("bert", "logits").sigma, rel=1e-9)


def test_padding_is_not_read_and_the_margin_is_of_the_last_word() -> None:
    model, _, _ = MODELS["llama"]
    padded = {"input_ids": torch.cat([IDS, IDS[:, :2]], 1)}
    padded["attention_mask"] = torch.tensor([[1] * 6 + [0] * 2])
    for map in ("logits", "margin"):
        (row,) = ls.measure(model, padded, map=map, **EXACT)  # pyright: ignore
        alone = one("llama", map)
        assert row.sigma == pytest.approx(alone.sigma, rel=1e-6)
        assert row.output_norm == pytest.approx(alone.output_norm, rel=1e-9)


@pytest.mark.parametrize("map", ["logits", "margin"])
@pytest.mark.parametrize("model", [tiny("bert").model, nn.Sequential(Own().encoder)])
def test_a_model_without_a_head_is_refused_in_one_line(map: Any, model: nn.Module) -> None:
    data = IDS if hasattr(model, "config") else torch.randn(1, 6, 8)
    with pytest.raises(InputError, match=r"a model that ends in scores.*or use the map `model`\.$"):
        ls.measure(model, data, map=map)


def test_one_score_has_no_margin() -> None:
    model = Own()
    model.head = nn.Linear(8, 1)
    with pytest.raises(InputError, match="needs two scores"):
        ls.measure(model, torch.randn(1, 6, 8), map="margin")


def test_a_folder_is_read_with_the_head_that_it_holds(tmp_path: Path) -> None:
    for name in ("bert", "llama"):
        model, inputs, _ = MODELS[name]
        model.save_pretrained(tmp_path / name)  # pyright: ignore[reportCallIssue]
        (row,) = ls.measure(str(tmp_path / name), inputs, map="logits", **EXACT)
        assert row.sigma == pytest.approx(one(name, "logits").sigma, rel=1e-6)
    (row,) = ls.measure(str(tmp_path / "bert"), {"input_ids": IDS}, map="model", **EXACT)
    assert row.sigma == pytest.approx(one("bert", "model").sigma, rel=1e-6)


def test_a_head_is_of_the_same_files_as_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model, inputs, _ = MODELS["llama"]
    model.save_pretrained(tmp_path / "llama")  # pyright: ignore[reportCallIssue]
    opened = ls.load_model("~/llama")
    (tmp_path / "llama" / "results.json").write_text("{}")  # which are no part of it
    (row,) = ls.measure(opened, inputs, map="logits", **EXACT)
    assert row.sigma == pytest.approx(one("llama", "logits").sigma, rel=1e-6)
    other = copy.deepcopy(model)
    other.lm_head.weight.data *= 2  # pyright: ignore
    opened = ls.load_model("~/llama")
    other.save_pretrained(tmp_path / "llama")  # pyright: ignore[reportCallIssue]
    with pytest.raises(InputError, match="as they were when it was opened"):
        ls.measure(opened, inputs, map="logits", **EXACT)


def test_a_tied_decoder_without_its_head_has_that_of_its_class() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=12, n_head=3, vocab_size=300)
    whole = drawn(transformers.GPT2LMHeadModel, config)
    (bare,) = ls.measure(whole.transformer, IDS, map="logits", **EXACT)  # pyright: ignore
    (own,) = ls.measure(whole, IDS, map="logits", **EXACT)
    assert bare.sigma == pytest.approx(own.sigma, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("map", ["logits", "margin"])
def test_directions_and_pushes_take_the_maps_too(name: str, map: Any) -> None:
    model, inputs, _ = MODELS[name]
    rows = ls.directions(model, inputs, layer="all", map=map, k=2)  # pyright: ignore
    assert rows[0].sigma == pytest.approx(one(name, map).sigma, rel=2e-3)
    found = ls.push(model, inputs, map=map, eps=[1e-4])  # pyright: ignore
    along = next(step for step in found.steps if step.direction == "+v")
    assert along.layer == pytest.approx(along.promise, rel=1e-2)


def test_directions_of_scores_are_read_as_classes() -> None:
    model, inputs, _ = MODELS["bert"]
    model.config.id2label = dict(enumerate(("cat", "dog", "emu", "fox")))  # pyright: ignore
    rows = ls.directions(model, inputs, layer="all", map="logits", k=1, dtype="float64", tol=1e-9)
    x, scores = truth("bert")
    jacobian: Any = torch.autograd.functional.jacobian(scores, x)
    u = torch.linalg.svd(jacobian.reshape(4, -1))[0][:, 0]
    best = ("cat", "dog", "emu", "fox")[int((u - u.mean()).abs().argmax())]
    (left,) = [one for one in rows.directions if one.side == "left"]
    assert f'"{best}"' in str(left.plus) + str(left.minus)
    assert left.space == "read-out"
