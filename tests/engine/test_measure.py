"""The one verb: its intervals, what never changes a row, and what is refused."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

import lipscope as ls
from lipscope import InputError, Measurement
from lipscope.engine import answer as sensitivity
from lipscope.models import LayerMap, build_map
from tiny import tiny
from truth import (
    FAMILIES,
    IDS,
    LAYER,
    columns,
    measured,
    model_of,
    top,
    truth_of,
)

# --- intervals and stopping rules


@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_are_as_narrow_as_asked_and_hold_the_truth(family):
    for name in ("attention", "block"):
        truth = top(truth_of(family, name)[0])
        for seed in range(3):
            row = ls.measure(model_of(family), IDS, layers=[LAYER], map=name, seed=seed)[0]
            assert (row.status, row.dtype, row.seed) == ("converged", "float32", seed)
            assert row.sigma is not None and row.upper is not None
            assert row.sigma <= truth * (1 + 1e-5) and truth <= row.upper
            assert row.sigma >= truth * (1 - 1e-3) and row.upper <= (1 + 1e-3) * row.sigma
            close = ls.measure(
                model_of(family),
                IDS,
                layers=[LAYER],
                map=name,
                seed=seed,
                dtype="float64",
                tol=1e-4,
            )[0]
            assert (close.status, close.dtype) == ("converged", "float64")
            assert close.sigma is not None and close.upper is not None
            assert close.upper <= (1 + 1e-4) * close.sigma
            assert close.sigma <= truth * (1 + 1e-6) and truth <= close.upper * (1 + 1e-6)


def test_a_larger_delta_takes_no_more_products_for_an_interval_of_the_same_width():
    deltas = (1e-9, 1e-6, 1e-3, 1e-2)
    rows = [measured("gpt2", tol=1e-2, delta=delta)[0] for delta in deltas]
    assert [row.delta for row in rows] == list(deltas)
    products = [row.products for row in rows]
    assert products == sorted(products, reverse=True) and products[0] > products[-1]
    best = max(row.sigma or 0.0 for row in rows)
    for row in rows:
        assert row.sigma and row.upper and best <= row.upper <= 1.01 * row.sigma


def test_a_sigma_rest_that_did_not_converge_says_so(monkeypatch):
    solve, calls = sensitivity.top_singular_batch, []

    def impatient(*arguments: Any, **options: Any) -> list[ls.TopSingular]:
        calls.append(options)
        return solve(*arguments, **options | ({"max_steps": 2} if len(calls) == 2 else {}))

    monkeypatch.setattr(sensitivity, "top_singular_batch", impatient)
    row = measured("gpt2", rest=True)[0]
    assert row.status == "converged" and row.sigma_rest is not None
    assert "sigma_rest may be too low" in (row.note or "")
    monkeypatch.undo()
    assert measured("gpt2", rest=True)[0].note is None


def test_a_map_is_built_once_for_each_window(monkeypatch):
    built: list[tuple[Any, int | None]] = []  # traces are kept: no two of them have one address

    def counted(record: Any, layer: int | None, *names: Any, **options: Any) -> LayerMap:
        built.append((record, layer))
        return build_map(record, layer, *names, **options)

    module = importlib.import_module("lipscope.engine.ready_model")
    monkeypatch.setattr(module, "build_map", counted)
    measured("gpt2", torch.cat([IDS, IDS + 1]), layers="all", tol=1e-3)
    assert [layer for _, layer in built] == [0, 1, 0, 1]
    assert len({(id(record), layer) for record, layer in built}) == 4


# --- the same rows whatever the threads, the order, the batch and the interruptions


@pytest.fixture(scope="module")
def minilm_rows() -> ls.Rows:
    return ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, rest=True)


def test_the_same_seed_gives_the_same_rows(minilm_rows):
    again = ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, rest=True)
    assert [columns(r) for r in again] == [columns(r) for r in minilm_rows]
    assert again.tokens == minilm_rows.tokens


def test_order_and_company_do_not_change_a_row(minilm_rows):
    turned = ls.measure("minilm", layers=[3, 0], lengths=[16, 8], samples=2, rest=True)
    assert [r.layer for r in turned][:2] == [3, 0]
    expected = {r.id: columns(r) for r in minilm_rows}
    assert {r.id: columns(r) for r in turned} == expected
    alone = ls.measure("minilm", layers=[3], lengths=[16], samples=2, rest=True)
    for row in alone:
        assert columns(row) == expected[row.id]


def test_another_number_of_threads_gives_the_same_sigma(minilm_rows):
    torch.set_num_threads(2)
    try:
        other = ls.measure("minilm", layers=[3], lengths=[16], samples=1, rest=True)
    finally:
        torch.set_num_threads(1)
    same = [r for r in minilm_rows if r.layer == 3 and r.num_tokens == 16 and r.sample == 0]
    assert [r.id for r in other] == [r.id for r in same]
    for a, b in zip(other, same, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-5)
        assert math.isclose(a.sigma_rest or 0, b.sigma_rest or 0, rel_tol=1e-5)
        assert (a.products, a.top_token) == (b.products, b.top_token)


def test_another_seed_gives_another_start_and_the_same_sigma(minilm_rows):
    other = ls.measure("minilm", layers=[0, 3], lengths=[8, 16], samples=2, seed=1)
    assert not {r.id for r in other} & {r.id for r in minilm_rows}
    for a, b in zip(other, minilm_rows, strict=True):
        assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-3)
        assert a.sigma != b.sigma and a.upper != b.upper
        # both intervals hold the one truth
        assert max(a.sigma or 0, b.sigma or 0) <= min(a.upper or 0, b.upper or 0)


def test_an_interrupted_run_ends_with_the_same_rows(tmp_path, minilm_rows):
    class Interrupted(Exception):
        pass

    def stop(done: int, total: int, row: Measurement | None) -> None:
        assert total == 8
        if done == 5 and row is not None:
            raise Interrupted

    options: dict[str, Any] = {"layers": [0, 3], "lengths": [8, 16], "samples": 2, "rest": True}
    with pytest.raises(Interrupted):
        ls.measure("minilm", out=tmp_path / "run", progress=stop, **options)
    told: list[tuple[int, int, Measurement | None]] = []
    rows = ls.measure(
        "minilm", out=tmp_path / "run", progress=lambda *at: told.append(at), **options
    )
    assert told[0] == (5, 8, None)  # a row is on the disk before it is told
    assert [at[0] for at in told] == [5, 6, 7, 8]
    assert [columns(r) for r in rows] == [columns(r) for r in minilm_rows]
    assert rows.tokens == minilm_rows.tokens
    frozen = ls.measure("minilm", out=tmp_path / "run", **options)
    assert list(frozen) == list(rows)  # seconds too: nothing was measured again


@pytest.mark.parametrize("family", FAMILIES)
def test_an_entry_of_a_batch_is_measured_as_if_alone(family):
    ids = torch.cat([IDS, IDS.flip(1), IDS + 20])
    together = measured(family, ids, layers="all")
    assert [(r.sample, r.layer) for r in together] == [(s, i) for s in range(3) for i in range(2)]
    first = measured(family, ids[:1], layers="all")
    assert [columns(r) for r in first] == [columns(r) for r in together[:2]]
    for s in range(3):
        alone = measured(family, ids[s : s + 1], layers="all")
        for a, b in zip(alone, together[2 * s : 2 * s + 2], strict=True):
            assert math.isclose(a.sigma or 0, b.sigma or 0, rel_tol=1e-5)
            assert a.tokens_sha256 == b.tokens_sha256
    assert {(r.input, r.start) for r in together} == {("batch", None)}


def test_the_model_comes_back_as_it_went_in():
    model = tiny("gpt2").model
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    ls.measure(model, IDS, dtype="float64", map="residual")
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad and p.equal(before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.random.get_rng_state().equal(state)


# --- what is refused before anything is written


@pytest.mark.parametrize(
    ("options", "found"),
    [
        # What the command can be asked as well is in test_cli_errors.
        ({"layers": [-1]}, "whole numbers from 0"),
        ({"layers": []}, "layer"),
        ({"read": "6"}, "read"),
        ({"move": "middle"}, "move"),
        ({"lengths": [4]}, "leave them out"),
        ({"modules": "("}, "regular expression"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_answered_writes_nothing(options, found, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match=found) as caught:
        measured("gpt2", out=out, **options)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (torch.zeros(2, 3), "shape"),
        ({}, "at least one tensor"),
    ],
    ids=["empty", "blank", "two axes", "no tensor"],
)
def test_data_that_cannot_be_measured(data, found, tmp_path):
    with pytest.raises(InputError, match=found):
        measured("gpt2", data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
