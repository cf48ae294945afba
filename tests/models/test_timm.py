"""Models of timm by name: their pictures, their layers; only where timm is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lipscope as ls
import zoo_timm
from lipscope import InputError
from lipscope.models import load_model

timm = pytest.importorskip("timm")
SMALL = "img_size=16,patch_size=8,embed_dim=16,depth=2,num_heads=2"
VIT = f"random:timm:vit_tiny_patch16_224,{SMALL}"


def test_pictures_go_through_the_models_own_transform(tmp_path):
    from PIL import Image

    picture = Image.linear_gradient("L").resize((20, 13)).convert("RGB")
    picture.save(tmp_path / "a.png")
    model = load_model(VIT).model
    row = ls.measure(VIT, images=tmp_path, layers=[1], dtype="float64", tol=1e-9)[0]
    own = {**timm.data.resolve_model_data_config(model), "input_size": (3, 16, 16)}
    pixels = timm.data.create_transform(**own)(picture)[None]
    again = ls.measure(model, pixels, layers=[1])[0]
    assert row.tokens_sha256 == again.tokens_sha256
    model, first = model.double(), list[torch.Tensor]()
    site = model.get_submodule("blocks.1.attn")
    site.register_forward_pre_hook(lambda _, args: first.append(args[0].detach()))
    model(pixels.double())
    jacobian: Any = torch.autograd.functional.jacobian(site, first[0])
    jacobian = jacobian.reshape(80, 80)
    assert row.sigma == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-8)


@pytest.mark.parametrize("name", ["cait_xxs24_224", "xcit_nano_12_p16_224", "convit_tiny"])
def test_attention_of_every_name_is_found(name):
    rows = ls.measure(f"random:timm:{name},{SMALL}", images="random", samples=1, dtype="float64")
    assert [row.num_tokens for row in rows][:2] == [4, 4]
    assert all(row.sigma and (row.derivative_error or 0) < 1e-4 for row in rows)


def test_the_model_ends_in_its_tokens():
    (row,) = ls.measure(VIT, images="random", samples=1, map="model", dtype="float64")
    assert (row.num_tokens, row.module) == (5, "blocks.0")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:vit_tinny_patch16_224", "nearest are .*tiny_patch16_224"),
        (f"{VIT},colour=3", "unexpected keyword argument 'colour'"),
        (f"{VIT},colour", "of the form key=value"),
    ],
)
def test_a_name_that_timm_does_not_have_is_refused(name, words):
    with pytest.raises(InputError, match=words):
        load_model(name)


def test_a_picture_of_another_side_and_a_text_are_refused():
    with pytest.raises(InputError, match="doesn't match model"):
        ls.measure(VIT, images="random", resolutions=[32], samples=1)
    with pytest.raises(InputError, match="pass `images`"):
        ls.measure(VIT, "no picture")


@pytest.mark.parametrize("name", ["crossvit_9_240", "deepseek_vit_412m_enc"])
def test_a_model_that_keeps_its_pooling_or_has_no_head_is_built(name):
    small = "embed_dim=16,depth=1,num_heads=2" if name.startswith("deepseek") else "img_size=240"
    assert load_model(f"random:timm:{name},{small}").name.startswith(f"random:timm:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo_timm.FAMILIES)
def test_every_family_is_exact_or_refused(family):
    """Up to a few minutes each; `docs/timm-models.md` is what they became."""
    found = zoo_timm.found_in(family)
    assert found.verdict != "wrong", found.why
    if found.verdict == "not compared":
        pytest.skip(found.why)
