"""Blocks that gave their output before: what stands in for them, and where nothing may."""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch
from torch import nn

import lipscope as ls
from lipscope.models import run_of_blocks
from lipscope.models.tracing.recorder import standing_in
from tiny import TEXT, TINY, tiny

IDS = torch.arange(5, 13)[None]


@pytest.mark.parametrize("family", sorted(TINY))
def test_the_blocks_below_a_module_give_what_they_gave(family: str) -> None:
    model = tiny(family).model.eval()
    site = next(name for name, _ in model.named_modules() if ".1." in name)
    with torch.no_grad():
        whole = model(input_ids=IDS).last_hidden_state
        run = run_of_blocks(model, {"input_ids": IDS}, torch.float32)
        below = run.below(site)
        assert [path.rpartition(".")[2] for path in below] == ["0"]
        calls: list[str] = []
        for path in run.outputs:
            model.get_submodule(path).register_forward_hook(
                lambda *_, path=path: calls.append(path)
            )
        with standing_in(model, below):
            assert torch.equal(model(input_ids=IDS).last_hidden_state, whole)
    assert calls == [path for path in run.outputs if path not in below]
    assert run.below("embeddings") == {}


class Blocks(nn.Module):
    """Blocks of one kind in a list, each called ``turns`` times."""

    def __init__(self, block: type[nn.Module], turns: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.turns = turns

    def forward(self, x):
        for block in [*self.blocks] * self.turns:
            x = block(x)
            x = x["x"] if isinstance(x, dict) else x
        return x


class Doubles(nn.Module):
    def forward(self, x):
        return 2 * x


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class Named(nn.Module):
    def forward(self, x):
        return {"x": 2 * x}


@pytest.mark.parametrize(
    ("model", "known"),
    [
        (Blocks(Doubles), ["blocks.0", "blocks.1"]),
        (Blocks(Doubles, turns=2), []),
        (Blocks(InPlace), []),
        (Blocks(Named), []),
    ],
    ids=["plain", "called twice", "one memory", "no tensors"],
)
def test_nothing_stands_in_where_copies_would_part_what_is_one(model, known) -> None:
    run = run_of_blocks(model, {"x": torch.ones(1, 2)}, torch.float32)
    assert [*run.below("blocks.2")] == known


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_check_of_many_layers_does_not_run_all_blocks_again(family: str) -> None:
    loaded = tiny(family)
    calls: list[int] = []
    first = next(m for n, m in loaded.model.named_modules() if n.endswith(".0"))
    first.register_forward_hook(lambda *_: calls.append(0))
    last = next(m for n, m in loaded.model.named_modules() if n.endswith(".1"))
    last.register_forward_hook(lambda *_: calls.append(1))
    rows = ls.measure(loaded, TEXT, lengths=[8], samples=1)
    assert all((row.derivative_error or 0) < 1e-2 for row in rows)
    # The trace alone: what it saw stands in for the first block, whose own differences end inside.
    assert calls.count(0) == 1


def test_a_block_that_needs_those_below_it_is_checked_by_the_whole_model() -> None:
    """The second block reads what the first one left behind: it cannot run by itself."""
    loaded = tiny("gpt2")
    first, second = (m for n, m in loaded.model.named_modules() if n in ("h.0", "h.1"))
    left: list[int] = []
    first.register_forward_hook(lambda *_: left.append(1))
    second.register_forward_pre_hook(lambda *_: left.pop() and None)
    rows = ls.measure(loaded, TEXT, lengths=[8], samples=1)
    assert [row.status for row in rows] == ["converged"] * 2
    assert all((row.derivative_error or 1) < 1e-2 for row in rows)


def test_a_singular_vector_that_is_none_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's difference is compared with what was solved, not with a product of its own."""
    solve = resolve_name("lipscope.engine.answer:top_singular_batch")

    def turned(*args, **options):
        return [replace(top, u=top.u.flip(-1)) for top in solve(*args, **options)]

    monkeypatch.setattr("lipscope.engine.answer.top_singular_batch", turned)
    with pytest.raises(ls.InputError, match="should be the derivative of the model"):
        _ = ls.load_model(tiny("bert").model).at(IDS, layer=0).sigma
