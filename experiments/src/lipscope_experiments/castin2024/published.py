"""Quantities that published scripts compute under the name of sigma, for comparison only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lipscope import LayerAtInput
from lipscope.models import LoadedModel, MapName
from lipscope_experiments.experiment import Study, layers_of
from lipscope_experiments.findings import Record
from lipscope_experiments.texts import Text

Curves = dict[int, list[tuple[int, float]]]

# What the scripts call attention: for BERT with residual and norm, for GPT-2 without.
_AS_CODED: dict[str, MapName] = {"bert": "residual"}


def castin_scripts(layer: LayerAtInput) -> float:
    """``√‖J(X)^T f(X)‖_F``: where the power iteration of the published scripts ends.

    They take ``torch.func.jvp(f, (X,), (u,))[0]``, which is ``f(X)`` and not ``J u``, so that
    ``v = J^T f(X)`` in every round whatever ``u`` is, and return ``√<v / |v|, v>``. It has the
    unit of ``√(sigma ‖f(X)‖)`` and is at most that; it is not sigma.

    Holds for every map. For BERT the scripts take the map ``residual`` on text and ``heads``
    on adversarial inputs, for GPT-2 ``attention``.

    Args:
        layer: A map at its input.

    Returns:
        The quantity.

    Source: read in the code of [castin2024] (github.com/vcastin/how-smooth-is-attention,
    commit eff2f2a, ``loc_lipschitz``); ``examples/published_power_iteration.py`` repeats it.
    """
    with torch.no_grad():
        output = layer(layer.x)
        return float(layer.linearise(layer.x).rmatvec(output).norm().sqrt())


def as_coded(
    study: Study, loaded: LoadedModel, text: Text, layers: Sequence[int], options: dict[str, Any]
) -> Curves:
    """The quantity of the published scripts on windows of a text: pairs ``(n, value)`` by layer.

    Args:
        study: Keeps the values.
        loaded: The model.
        text: The text.
        layers: Layers.
        options: How the text is cut, as for `lipscope.measure`.
    """
    name = f"{loaded.name}, {text.name}"
    what = _AS_CODED.get(str(getattr(loaded.config, "model_type", "")), "attention")

    def compute() -> Record:
        maps = layers_of(loaded, text.content, layers=layers, map=what, dtype="float32", **options)
        found = [
            {"layer": one.layer, "n": len(one.x), "value": castin_scripts(one)} for one in maps
        ]
        return {"values": found}

    key = {"case": name, "map": what, "lengths": str(options["lengths"])}
    (record,) = study.values(f"as-coded-{name}", [(key, compute)])
    return {
        layer: [(v["n"], v["value"]) for v in record["values"] if v["layer"] == layer]
        for layer in layers
    }
