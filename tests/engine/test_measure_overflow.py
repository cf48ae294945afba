"""Dropout, NaN and overflow: refused or a row with a status, never a wrong number."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope import InputError
from tiny import encoder, tiny
from truth import (
    ALL_MAPS,
    FAMILIES,
    IDS,
    LAYER,
    columns,
    model_of,
)


def test_live_dropout_is_switched_off_with_a_note():
    for model, data in [(tiny("gpt2").model, IDS), (encoder(dropout=0.3), torch.randn(1, 5, 8))]:
        quiet = ls.measure(model.eval(), data)
        live = ls.measure(model.train(), data)
        assert all("dropout" in (r.note or "") for r in live)
        assert not any("dropout" in (r.note or "") for r in quiet)
        assert [columns(r, "note") for r in live] == [columns(r, "note") for r in quiet]


def test_dropout_that_is_live_in_a_part_of_the_model_is_noted_too():
    model: Any = tiny("gpt2").model.eval()
    model.h.train()
    rows = ls.measure(model, IDS)
    assert all("dropout" in (r.note or "") for r in rows)
    assert model.h[0].training and not model.training


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad, tmp_path):
    model: Any = tiny("gpt2").model
    model.h[1].attn.c_proj.weight.data[3, 4] = bad
    with pytest.raises(InputError, match=r"h\.1\.attn\.c_proj\.weight") as caught:
        ls.measure(model, IDS, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Parallel(nn.Module):
    """Attention modules side by side on one input: none feeds another."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            parts = [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(count)]
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(part(x, x, x, need_weights=False)[0] for part in self.parts)


def overflowing(weight: Tensor) -> None:
    """Make a weight as large as float32 holds."""
    values = weight.detach()
    values /= values.abs().max()
    values *= 3e38
    assert bool(values.isfinite().all())


def test_a_layer_that_overflows_is_a_row_among_good_ones(tmp_path):
    good, model = Parallel().eval(), Parallel().eval()
    overflowing(model.parts[1].in_proj_weight[16:])  # values of the middle layer
    overflowing(model.parts[1].out_proj.weight)  # pyright: ignore
    batch = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    rows = ls.measure(model, batch, rest=True, average=True, out=tmp_path / "run")
    expected = ls.measure(good, batch, rest=True, average=True)
    assert [(r.sample, r.layer) for r in rows] == [(s, i) for s in range(2) for i in range(3)]
    for row, other in zip(rows, expected, strict=True):
        if row.layer == 1:
            assert row.status == "non_finite"
            for name in ("sigma", "upper", "relative", "top_share", "sigma_rest", "frobenius"):
                assert getattr(row, name) is None, name
            assert row.output_norm is None and row.input_norm is not None
            assert "null" in row.to_json()
        else:
            # the broken model is another model: its rows have names of their own
            own = {"id", "revision"}
            assert {k: v for k, v in columns(row).items() if k not in own} == {
                k: v for k, v in columns(other).items() if k not in own
            }
    assert "non_finite" in rows.text() + rows[1].to_json()
    assert len((tmp_path / "run" / "rows.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("name", ALL_MAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_survives_an_overflow(family, name):
    """The layer of the overflow, and what comes after it, have a status and no number."""
    model: Any = tiny(family).model
    if family == "bert":
        inner = model.encoder.layer[0].attention
        weights = [inner.self.value.weight, inner.output.dense.weight]
    elif family == "gpt2":
        weights = [model.h[0].attn.c_attn.weight, model.h[0].attn.c_proj.weight]
    else:
        attention = model.layers[0].self_attn
        weights = [attention.v_proj.weight, attention.o_proj.weight]
    for weight in weights:
        overflowing(weight)
    rows = ls.measure(model, IDS, map=name, rest=True)
    assert len(rows) == (1 if name == "model" else 2)
    for row in rows:
        if name == "heads" and row.layer == 0:
            continue  # before the second product of the two; may be finite
        assert row.status == "non_finite", row
        assert row.sigma is None and row.upper is None
        row.to_json()


def test_an_overflowing_head_leaves_the_others_alone():
    model: Any = copy.deepcopy(model_of("bert"))
    value = model.encoder.layer[LAYER].attention.self.value.weight
    options: dict[str, Any] = {"layers": [LAYER], "map": "heads", "per_head": True, "rest": True}
    good = ls.measure(model, IDS, **options)
    overflowing(value[4:8])  # the second of three heads
    rows = ls.measure(model, IDS, **options)
    assert [r.status for r in rows] == ["converged", "non_finite", "converged"]
    assert rows[1].sigma is None
    for i in (0, 2):
        assert math.isclose(rows[i].sigma or 0, good[i].sigma or 0, rel_tol=1e-5)
        assert math.isclose(rows[i].sigma_rest or 0, good[i].sigma_rest or 0, rel_tol=1e-3)
