"""The protocol of Figure 1: windows of text, the scripts' quantity, two clusters of tokens."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope import Attention, InputError, LayerAtInput, Measurement, Rows
from lipscope.attacks import two_cluster
from lipscope.models import LoadedModel
from lipscope.records import MapName, off_line, percent_off, slope_of
from lipscope_experiments.data import AG_NEWS_TITLE
from lipscope_experiments.experiment import Source, Study, layers_of
from lipscope_experiments.findings import Record, grouped, middle


def as_in_the_paper(study: Study, source: Source) -> dict[str, Any]:
    """A text as the paper cuts it: ten windows a length, none of which shares text with another.

    Lengths are the even ones to 100 (Alice), or every tenth to 512 (AG_NEWS). Deeper models
    than the paper's run on every tenth to 100.
    """
    full = range(2, 512, 10) if source.name == AG_NEWS_TITLE else range(2, 101, 2)
    full = range(10, 101, 10) if source.is_deep else full
    return {
        **source.asked,
        "lengths": study.pick([8, 16, 32, 64], [*full]),
        "samples": study.pick(3, 10),
        "windows": "disjoint",
        "special_tokens": False,
    }


Curves = dict[int, list[tuple[int, float]]]

# What the scripts call attention: for BERT with residual and norm, for GPT-2 without.
_AS_CODED: dict[str, MapName] = {"bert": "residual"}


def castin_scripts(layer: LayerAtInput) -> float:
    """``√‖J(X)^T f(X)‖_F``: where the power iteration of the published scripts ends.

    They take ``torch.func.jvp(f, (X,), (u,))[0]``, which is ``f(X)`` and not ``J u``, so that
    ``v = J^T f(X)`` in every round whatever ``u`` is, and return ``√<v / |v|, v>``. It has the
    unit of ``√(sigma ‖f(X)‖)`` and is at most that; it is not sigma. For BERT they take the map
    ``residual`` on text and ``heads`` on adversarial inputs, for GPT-2 ``attention``.

    Source: read in the code of [castin2024] (github.com/vcastin/how-smooth-is-attention,
    commit eff2f2a, ``loc_lipschitz``); ``examples/published_power_iteration.py`` repeats it.
    """
    with torch.no_grad():
        output = layer(layer.x)
        return float(layer.linearise(layer.x).rmatvec(output).norm().sqrt())


def as_coded(
    study: Study, source: Source, layers: Sequence[int], asked: Mapping[str, Any]
) -> Curves:
    """The quantity of the published scripts on windows of a text: pairs ``(n, value)`` by layer."""
    what = _AS_CODED.get(str(getattr(source.model.config, "model_type", "")), "attention")

    def compute(**_: Any) -> Record:
        maps = layers_of(source.model, layers=layers, map=what, dtype="float32", **asked)
        found = [
            {"layer": one.layer, "n": len(one.x), "value": castin_scripts(one)} for one in maps
        ]
        return {"values": found}

    key = {"case": source.where, "map": what, "lengths": str(asked["lengths"])}
    (record,) = study.values(f"as-coded-{source.where}", [key], compute)
    return {
        layer: [(v["n"], v["value"]) for v in record["values"] if v["layer"] == layer]
        for layer in layers
    }


# Radii of the published scripts for the first and the middle layer (adversarial.py): the first
# layer of GPT-2 is that of the pretrained model there, the middle one that of random weights.
_SCRIPTS = {"bert": (15.5, 21.5), "gpt2": (10.0, 100.0)}
_FROM = 10  # the law is one for large n: below, n - 1 is not n


@dataclass(frozen=True)
class Adversarial:
    """One layer: by name of the radius, a row for every placing head (`sample`) and n."""

    model: str
    layer: int
    rows: dict[str, list[Measurement]]
    radii: dict[str, float]

    def curves(self, name: str) -> list[list[tuple[int, float]]]:
        """Sigma against n where n is large, head by head."""
        rows = [row for row in self.rows[name] if row.num_tokens >= _FROM]
        heads = grouped(rows, "sample")
        return [[(row.num_tokens, row.sigma or 0.0) for row in mine] for _, mine in heads]

    def exponents(self, name: str) -> str:
        """Median and range over heads, which are all that there are or a fixed choice of them."""
        curves = self.curves(name)
        off = percent_off(max(map(off_line, curves), default=math.nan))
        return f"{middle(map(slope_of, curves))}, off by at most {off} %"


def adversarial(
    study: Study,
    loaded: LoadedModel,
    layers: Sequence[int],
    real: Rows,
    *,
    every: int = 1,
    lengths: Sequence[int] = range(2, 100, 5),
) -> Iterator[Adversarial]:
    """Two clusters for every head of some layers, at the radius of real data and the scripts'."""
    every, lengths = study.pick((4, [12, 27, 97]), (every, lengths))
    family = str(getattr(loaded.config, "model_type", ""))
    for layer in layers:
        one = next(layers_of(loaded, layers=[layer], lengths=[16], dtype="float32"))
        norms = [r.radius_rms for r in real if r.layer == layer and r.radius_rms is not None]
        radii = {"the text": round(statistics.median(norms), 2)}
        if family in _SCRIPTS:
            radii["the scripts"] = _SCRIPTS[family][min(layer, 1)]
        heads = [h for h in range(0, one.attention.num_heads, every) if _places(one.attention, h)]
        if not heads:
            return  # rotary: nothing to place
        options = {"layer": one.attention, "kind": "two_cluster", "of": loaded, "index": layer}
        found = {}
        for name, radius in radii.items():
            inputs = [
                (head, functools.partial(_placed, one.attention, head, n, radius))
                for head in heads
                for n in lengths
            ]
            found[name] = list(study.built("adversarial", inputs, **options))
        yield Adversarial(loaded.name, layer, found, radii)


def _placed(layer: Attention, head: int, n: int, radius: float) -> Tensor:
    return two_cluster(layer, head=head, num_tokens=n, radius=radius).x


def _places(layer: Attention, head: int) -> bool:
    try:
        _placed(layer, head, 2, 1.0)
    except InputError:
        return False
    return True
