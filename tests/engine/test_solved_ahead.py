"""Layers that are asked one after the other are solved ahead, and say what each says alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pkgutil import resolve_name

import pytest
import torch

import lipscope as ls
from lipscope.errors import InputError

SIZES = "hidden_size=12,num_attention_heads=3,num_hidden_layers=5,intermediate_size=16"
MODELS = {
    "bert": f"random:bert:{SIZES},vocab_size=300",
    "gpt2": "random:gpt2:n_embd=12,n_head=3,n_layer=5,n_positions=64,vocab_size=300",
    "llama": f"random:llama:{SIZES},num_key_value_heads=1,vocab_size=300",
    "qwen3": f"random:qwen3:{SIZES},num_key_value_heads=1,head_dim=4,vocab_size=300",
}
SOLVER = "lipscope.engine.solve_queue.solved_together"
ALIKE = ("sigma", "upper", "relative", "input_norm", "top_share")
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def unwatched(_: int | None):
    return lambda now: None


def rows(model: object, **options: object) -> list:
    return list(ls.measure(model, TEXT, lengths=12, layers="all", **options))


EACH = [
    pytest.param("bert", {}, marks=pytest.mark.slow),
    ("gpt2", {"move": "not-first"}),
    pytest.param("llama", {}, marks=pytest.mark.slow),
    pytest.param("llama", {"metric": "token-relative"}, marks=pytest.mark.slow),
    ("qwen3", {"metric": "token-relative"}),
]


@pytest.mark.parametrize(("name", "options"), EACH)
def test_rows_are_those_of_one_layer_at_a_time(name: str, options: dict, two, monkeypatch) -> None:
    model, shared = ls.load_model(MODELS[name]), []
    usual = resolve_name(SOLVER)
    monkeypatch.setattr(SOLVER, lambda q, found: shared.append(len(q)) or usual(q, found))
    ahead = rows(model, **options)
    assert sum(shared) == len(ahead) > 1
    torch.set_num_threads(1)
    alone = rows(model, **options)
    assert sum(shared) == len(ahead)
    for one, other in zip(ahead, alone, strict=True):
        assert (one.id, one.status, one.products) == (other.id, other.status, other.products)
        assert (one.derivative_error is None) == (other.derivative_error is None)
        for column in ALIKE:
            assert getattr(one, column) == pytest.approx(getattr(other, column), rel=1e-5)


@pytest.mark.parametrize("options", [{"per_head": True}, {"map": "block"}, {"metric": "max-token"}])
def test_what_shares_nothing_is_solved_as_before(options: dict, two, monkeypatch) -> None:
    monkeypatch.setattr(SOLVER, None)
    found = ls.measure(MODELS["bert"], TEXT, lengths=6, layers=[0, 1], **options)
    assert len(found) > 1 and all(row.sigma for row in found)


def test_a_layer_that_fails_fails_alone(two, monkeypatch) -> None:
    """Whatever goes wrong in a thread is tried again where the row is made."""

    def broken(*_: object) -> None:
        raise InputError("no product")

    alone = rows(MODELS["gpt2"])
    monkeypatch.setattr(SOLVER, broken)
    again = rows(MODELS["gpt2"])
    assert [row.sigma for row in again] == pytest.approx([row.sigma for row in alone])


def test_an_answer_does_not_wait_for_those_that_share_its_products(two, monkeypatch) -> None:
    """The second of a group goes on only when the row of the first is there."""
    made, waited = threading.Event(), []

    def solver(questions, found) -> None:
        for i, one in enumerate(questions):
            if i == 1:
                waited.append(made.wait(60))
            solve = resolve_name("lipscope.engine.answer.Solve")(one)
            solve.solve()
            found(i, solve)

    monkeypatch.setattr(SOLVER, solver)
    for at in ls.load_model(MODELS["bert"]).layers(TEXT, lengths=12, watch=unwatched):
        assert at.rows()
        if at.layer == 1:
            made.set()
    assert waited
    assert all(waited)


def test_nothing_is_told_of_a_layer_after_its_answer(two, monkeypatch) -> None:
    usual, ended, told = resolve_name(SOLVER), set(), []

    def solver(questions, found) -> None:
        def tell(i: int, solve: object) -> None:
            ended.add(questions[i][2].layer)
            found(i, solve)

        usual(questions, tell)

    def watch(layer: int | None):
        return lambda now: told.append(layer in ended)

    monkeypatch.setattr(SOLVER, solver)
    for at in ls.load_model(MODELS["bert"]).layers(TEXT, lengths=12, watch=watch):
        assert at.rows()
    assert ended == set(range(5))
    assert told
    assert not any(told)


def test_one_thread_is_left_beside_solves(two, monkeypatch) -> None:
    """The first thread checks rows while others solve: two threads for it would be three."""
    usual, threads = resolve_name("lipscope.engine.answer.difference"), []

    def noted(*about: object) -> object:
        threads.append(torch.get_num_threads())
        return usual(*about)

    monkeypatch.setattr("lipscope.engine.answer.difference", noted)
    name = "lipscope.engine.ready_model.few_threads"  # as for an input that is large
    monkeypatch.setattr(name, partial(resolve_name(name), small=0))
    rows(MODELS["llama"])
    assert (threads[0], threads[-1]) == (1, 2)
    assert torch.get_num_threads() == 2


def threads_of_a_new_one() -> int:
    """How many threads torch uses in a thread that begins."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


class GoneError(BaseException):
    pass


def test_what_a_watch_raises_ends_all_solves(two) -> None:
    model, told, before = ls.load_model(MODELS["llama"]), [], threading.active_count()

    def watch(layer: int | None):
        def step(now) -> None:
            told.append((layer, now()))
            if len(told) > 4:
                raise GoneError

        return step

    found = model.layers(TEXT, lengths=12, watch=watch)
    with pytest.raises(GoneError):
        [at.rows() for at in found]
    found.close()
    assert threading.active_count() == before
    assert threads_of_a_new_one() == 2
    assert all(0 < low <= high for _, ((low, high),) in told)


def test_a_solve_that_was_ended_midway_leaves_memory_at_once(two) -> None:
    """No circle of problems, frames and futures keeps it until the garbage is collected."""
    model = ls.load_model(MODELS["llama"])

    def tensors_after_one() -> int:
        steps = []

        def watch(_: int | None):
            def step(now) -> None:
                steps.append(now())
                if len(steps) > 9:
                    raise GoneError

            return step

        found = model.layers(TEXT, lengths=12, watch=watch)
        with pytest.raises(GoneError), closing(found):
            [at.rows() for at in found]
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    tensors_after_one()
    gc.collect()
    gc.disable()
    try:
        assert tensors_after_one() == tensors_after_one()
    finally:
        gc.enable()


def test_a_session_that_is_over_leaves_no_thread(two) -> None:
    model, before = ls.load_model(MODELS["llama"]), threading.active_count()
    found = model.layers(TEXT, lengths=12, watch=unwatched)
    assert next(found).rows()
    found.close()
    assert threading.active_count() == before
    assert threads_of_a_new_one() == 2


def test_what_is_asked_after_a_session_begins_no_thread(two) -> None:
    model, before = ls.load_model(MODELS["llama"]), threading.active_count()
    kept = [*model.layers(TEXT, lengths=12, watch=unwatched)]
    assert all(at.rows() for at in kept)
    assert threading.active_count() == before
    assert threads_of_a_new_one() == 2


def test_norms_are_found_where_they_were_not_recorded(two) -> None:
    """A pass for sigma alone records none; who asks for them gets them all the same."""
    given = ls.load_model(MODELS["llama"])
    norms = [one for name, one in given.model.named_parameters() if "layernorm" in name]
    with torch.no_grad():  # so that no two are the same
        [one.uniform_(0.5, 2.0) for one in norms]
    model = ls.load_model(given.model, tokenizer=given.tokenizer)
    watched = model.layers(TEXT, lengths=12, watch=unwatched)
    found = [(at.rows()[0].id, at.radius_of_norm()) for at in watched]
    assert found == [(at.id, at.radius_of_norm()) for at in model.layers(TEXT, lengths=12)]
    assert len(set(found)) == len({radius for _, radius in found}) == 5
