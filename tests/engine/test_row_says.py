"""What a row says of its map: the module, what moves in it, and the output projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lipscope as ls
from tiny import encoder, tiny

IDS = torch.arange(5, 11)[None]
SITE = "h.1.attn"
EXPECTED = {
    "heads": (SITE, "hidden_states", False),
    "attention": (SITE, "hidden_states", True),
    "normed": (SITE, "input of h.1.ln_1", True),
    "residual": (SITE, "input of h.1.ln_1", True),
    "block": ("h.1", "hidden_states", None),
    "stack": ("h.0", "hidden_states", None),
    "model": ("h.0", "hidden_states", None),
}


def said(row: Any) -> tuple[Any, Any, Any]:
    return row.module, row.argument, row.projection


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_names_its_module_and_what_moves(name):
    layers = "all" if name == "model" else [1]
    assert said(ls.measure(tiny("gpt2").model, IDS, map=name, layers=layers)[0]) == EXPECTED[name]


def test_the_generic_path_and_a_post_norm_model_say_the_same_things():
    assert said(ls.measure(tiny("olmo").model, IDS, layers=[0])[0]) == (
        "layers.0.self_attn",
        "hidden_states",
        True,
    )
    row = ls.measure(encoder().eval(), torch.randn(1, 5, 8), layers=[1], map="residual")[0]
    assert said(row) == ("layers.1.self_attn", "query, key, value", True)


def test_a_layer_by_itself_has_no_path():
    layer = ls.DotProduct(*torch.eye(3)[None].expand(3, 3, 3))
    assert said(ls.measure(layer, torch.ones(2, 3))[0]) == (None, "x", False)


def test_a_model_that_draws_noise_is_measured_at_the_same_draw_each_time():
    """ViTMAE hides patches that it draws; the caller's own stream of numbers stays as it is."""
    sizes = "hidden_size=16,num_attention_heads=2,num_hidden_layers=1,intermediate_size=16"
    model = f"random:vit_mae:{sizes},image_size=32,patch_size=8,decoder_hidden_size=16"
    before = torch.get_rng_state()
    rows = [
        row
        for _ in range(2)
        for row in ls.measure(model, images="random", resolutions=[32], samples=1)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert rows[0].id == rows[1].id and rows[0].sigma == rows[1].sigma
    assert all("draws random numbers" in (row.note or "") for row in rows)
    (plain,) = ls.measure(tiny("gpt2").model, IDS, layers=[0])
    assert "draws" not in (plain.note or "")
