"""Second row of Figure 1: two clusters of tokens, placed by one head after another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from lipscope import Attention, InputError, Measurement, Rows
from lipscope.attacks import two_cluster
from lipscope.models import LoadedModel
from lipscope.records import off_line, percent_off, slope_of
from lipscope_experiments.experiment import Study, layers_of
from lipscope_experiments.findings import middle

# Radii of the published scripts for the first and the middle layer (adversarial.py): the first
# layer of GPT-2 is that of the pretrained model there, the middle one that of random weights.
_SCRIPTS = {"bert": (15.5, 21.5), "gpt2": (10.0, 100.0)}
_FROM = 10  # the law is one for large n: below, n - 1 is not n


@dataclass(frozen=True)
class Adversarial:
    """One layer: by name of the radius, a row for every placing head (`sample`) and n.

    Attributes:
        model: Name of the model.
        layer: Index of the layer.
        rows: Rows by name of the radius.
        radii: The radii.
    """

    model: str
    layer: int
    rows: dict[str, list[Measurement]]
    radii: dict[str, float]

    def curves(self, name: str) -> list[list[tuple[int, float]]]:
        """Sigma against n where n is large, head by head."""
        rows = [row for row in self.rows[name] if row.num_tokens >= _FROM]
        heads = dict.fromkeys(row.sample for row in rows)
        return [[(r.num_tokens, r.sigma or 0.0) for r in rows if r.sample == h] for h in heads]

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
        at_text = round(statistics.median(norms), 2)
        radii = {"the text": at_text}
        if family in _SCRIPTS:
            radii["the scripts"] = _SCRIPTS[family][min(layer, 1)]
        try:
            two_cluster(one.attention, num_tokens=2, radius=at_text)
        except InputError as why:
            if "real eigenvalue" not in str(why):
                return  # rotary: nothing to place
        found = {
            name: _rows(study, loaded, layer, one.attention, radius, every, lengths)
            for name, radius in radii.items()
        }
        yield Adversarial(loaded.name, layer, found, radii)


def _rows(
    study: Study,
    loaded: LoadedModel,
    layer: int,
    attention: Attention,
    radius: float,
    every: int,
    lengths: Sequence[int],
) -> list[Measurement]:
    heads = range(0, attention.num_heads, every)

    def placed(head: int, n: int) -> tuple[int, Callable[[], Tensor]]:
        return head, lambda: two_cluster(attention, head=head, num_tokens=n, radius=radius).x

    inputs = [placed(head, n) for head in heads if _placeable(attention, head) for n in lengths]
    options = {"layer": attention, "kind": "two_cluster", "of": loaded, "index": layer}
    return list(study.built("adversarial", inputs, **options))


def _placeable(attention: Attention, head: int) -> bool:
    try:
        two_cluster(attention, head=head, num_tokens=2, radius=1.0)
    except InputError:
        return False
    return True
