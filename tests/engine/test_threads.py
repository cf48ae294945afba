"""How many threads a solve takes."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest
import torch

import lipscope as ls
from lipscope.linalg import few_threads


@pytest.fixture
def several():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_caller_has_its_threads_again(several) -> None:
    with few_threads(10):
        assert torch.get_num_threads() == 1
        with few_threads(2**30):  # of a batch, say
            assert torch.get_num_threads() == 3
        with few_threads(None):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    for entries in (None, 2**30):
        with few_threads(entries):
            assert torch.get_num_threads() == 3


def test_a_small_layer_is_measured_on_one_thread(several, monkeypatch) -> None:
    place, used = "lipscope.engine.session.answer", []
    usual = resolve_name(place)
    monkeypatch.setattr(place, lambda *a: used.append(torch.get_num_threads()) or usual(*a))
    layer = ls.DotProduct(*3 * [torch.eye(2, dtype=torch.float64)])
    ls.measure(layer, torch.ones(3, 2, dtype=torch.float64))
    assert used == [1] and torch.get_num_threads() == 3
