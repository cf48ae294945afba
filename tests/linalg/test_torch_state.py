"""Threads that draw, or set types, do not disturb each other."""

from __future__ import annotations

import threading

import pytest
import torch

import lipscope as ls
from lipscope.linalg import by_threads, draws_from, few_threads
from lipscope.models import exact_maths

NAME = "random:bert:hidden_size=8,num_attention_heads=2,num_hidden_layers=1,intermediate_size=8"


def weights() -> torch.Tensor:
    return torch.cat([one.flatten() for one in ls.load_model(NAME).model.parameters()])


def test_a_model_is_drawn_alike_whatever_another_thread_is_within() -> None:
    expected, begun, found = weights(), threading.Event(), list[torch.Tensor]()

    def load() -> None:
        begun.set()
        found.append(weights())

    loader = threading.Thread(target=load)
    with draws_from(7), exact_maths(torch.float64):
        loader.start()
        begun.wait()
        loader.join(0.5)  # time enough to draw in float64, if nothing holds it
        assert loader.is_alive()
    loader.join()
    assert found[0].dtype == expected.dtype
    assert torch.equal(found[0], expected)


def test_the_callers_generator_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with draws_from(7), draws_from(8):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_a_batch_is_shared_by_as_many_threads_as_the_caller_has() -> None:
    m = torch.randn(7, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: list[tuple[int, int, bool]] = []

    def top(some: torch.Tensor) -> torch.Tensor:
        seen.append((len(some), threading.get_ident(), torch.is_grad_enabled()))
        return torch.linalg.eigvalsh(some)[..., -1]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with torch.no_grad(), few_threads(1):  # of a small input, whose batch is none
            found, expected = by_threads(top, m), top(m)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0.0)  # some units of rounding
    sizes, threads, grads = zip(*seen[:3], strict=True)
    assert sorted(sizes) == [1, 3, 3]
    assert threads.count(threading.get_ident()) == 1
    assert not any(grads)


def test_what_fails_in_a_thread_of_a_batch_is_told() -> None:
    def fails(some: torch.Tensor) -> torch.Tensor:
        raise ValueError(str(len(some)))

    with pytest.raises(ValueError, match=r"^[12]$"):
        by_threads(fails, torch.zeros(2, 1, 1))
