"""Sinks: the frozen column against a dense one, planted laws, the task of the small models."""

from __future__ import annotations

import pytest
import torch

from lipscope import DotProduct, to_dense
from lipscope_experiments.castin2024.sink_law import LayerLaw, error, verdict
from lipscope_experiments.data import Text
from lipscope_experiments.frozen import column_norm, frozen_column, frozen_norm
from lipscope_experiments.questions.sink_training import (
    DECODER,
    ENCODER,
    CopyingNet,
    Letters,
    _reading,
    targets,
    triggers,
)
from tiny import TEXT


@pytest.mark.parametrize("causal", [False, True])
def test_the_frozen_column_is_that_of_the_dense_matrix(causal: bool) -> None:
    g = torch.Generator().manual_seed(1)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    output = w(7, 12)
    layer = DotProduct(w(12, 5), w(6, 5), w(6, 5), output, heads=4, groups=2, causal=causal)
    x = w(6, 5)
    q, k, _ = layer.project(x)
    parts = [out @ layer.head(h).value for h, out in enumerate(output.split(3, dim=1))]  # W_h
    dense = sum(map(torch.kron, layer.weights(q, k), parts)).reshape(42, 6, 5)
    found = frozen_column(layer, x)
    norms = dense.transpose(0, 1).norm(dim=(1, 2))
    assert found.token == int(norms.argmax())
    exact = float(torch.linalg.matrix_norm(dense[:, found.token], 2))
    assert found.norm == pytest.approx(exact)
    assert frozen_norm(layer, x) == pytest.approx(
        float(torch.linalg.matrix_norm(dense.flatten(1), 2)), rel=1e-3
    )
    own = to_dense(layer.linearise(x)).reshape(42, 6, 5)[:, found.token]
    whole = column_norm(layer.linearise(x), found.token)
    assert whole == pytest.approx(float(torch.linalg.matrix_norm(own, 2)), rel=1e-3)
    for (token, mass, norm), p, part in zip(found.heads, layer.weights(q, k), parts, strict=True):
        received = p.square().mean(0).sqrt()
        assert token == int(received.argmax()) and mass == pytest.approx(float(received.max()))
        assert norm == pytest.approx(6**0.5 * mass * float(torch.linalg.matrix_norm(part, 2)))


def law_of(slope: float, layer: int, predicted: float | None = None) -> LayerLaw:
    told = slope if predicted is None else predicted
    points = [
        {"text": text, "passage": "p", "n": n, "sigma": n**slope, "norm": 0.9 * n**slope}
        | {"mass": n ** (told - 0.5), "received": 0.1}
        for text in "ab"
        for n in (16, 64)
    ]
    return LayerLaw("m", layer, None, points)


def test_what_was_written_before_the_runs_decides() -> None:
    steep = (0.1, 0.2, 0.4, 0.5)
    planted = [law_of(slope, layer) for layer, slope in enumerate(steep)]
    assert all(law.is_sink for law in planted) and verdict(planted, 0.3) == "not refuted"
    assert planted[0].over_texts(error) == pytest.approx([0.0, 0.0])
    off = [law_of(slope, layer, slope + 0.06) for layer, slope in enumerate(steep)]
    assert verdict(off, 0.3).startswith("refuted: its error 0.060 is above")
    turned = [law_of(slope, layer, 0.6 - slope) for layer, slope in enumerate(steep)]
    assert "rank correlation -1.00" in verdict(turned, 0.3)
    alike = [law_of(0.25, layer, 0.26) for layer in range(4)]
    assert "a constant's" in verdict(alike, 0.3)
    assert verdict(planted[:2], 0.3).startswith("not decided")


@pytest.mark.parametrize("kind", [DECODER, ENCODER])
def test_small_models_copy_at_triggers(kind: str) -> None:
    windows = Letters(Text("t", TEXT)).windows(4, torch.Generator().manual_seed(0))
    asked = targets(kind, windows)
    for row, said in zip(windows.tolist(), asked.tolist(), strict=True):
        for i in range(1, len(row) - 1):
            copies = bool(triggers(torch.tensor(row[i]))) and i > 1
            if kind == DECODER:
                assert said[i - 1] == row[i + 1] and (not copies or row[i + 1] == row[i - 1])
            else:
                assert said[i - 1] == (row[i - 1] if copies else row[i])
    torch.manual_seed(0)
    read = _reading(CopyingNet(kind == DECODER).eval(), kind, windows)
    assert len(read["layers"]) == 4
    for layer in read["layers"]:  # hardly any sink before training
        assert 0 < layer["first"] < 0.2 and layer["logit"] > 0 and layer["share"] < 1
