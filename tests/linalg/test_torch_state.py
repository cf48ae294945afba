"""Threads that draw, or set types, do not disturb each other."""

from __future__ import annotations

import threading

import torch

import lipscope as ls
from lipscope.linalg import draws_from
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
