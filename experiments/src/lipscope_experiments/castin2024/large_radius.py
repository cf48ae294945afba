"""Theorem 3.7: sigma of s X as s grows, against the square root of the largest in-degree."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipscope import DotProduct, InputError, top_singular
from lipscope.certificates import in_double
from lipscope.charts import Panel, Series
from lipscope.theorems import HeadAt, NotApplicableError, castin_thm_3_7_limit, heads_of
from lipscope_experiments.experiment import Study, ValueJob, experiment, layers_of
from lipscope_experiments.findings import Claim, Findings, Record, Table, grouped, middle


@experiment(
    "castin2024/large-radius",
    title="How Smooth Is Attention?, Theorem 3.7: the large-radius regime",
    cite="castin2024",
    models=("minilm", "random:gpt2"),
    quick_models=("minilm",),
)
def large_radius(study: Study) -> Findings:
    """One head at a time, random and real, masked and not; tokens scaled by s."""
    scales = [2.0**k for k in range(study.pick(8, 13))]
    places = [*_random(study), *_real(study)]
    found = study.values(
        "large-radius", [_job(name, layer, x, s) for name, layer, x in places for s in scales]
    )
    known = [r for r in found if r["limit"] is not None]
    _draw(study, known)
    last = [r for r in known if r["scale"] == scales[-1]]
    groups = dict(grouped(last, "group"))
    tied = sum(r["limit"] is None and r["scale"] == 1.0 for r in found)
    far = [
        r["share"] for r in known if r["scale"] == 1.0 and not r["group"].startswith("random head")
    ]
    return Findings(
        (
            *(
                Claim(
                    f"sigma(sX) / limit at s = {scales[-1]:g}, {group}",
                    "tends to 1: ‖V‖ √(largest in-degree) (Theorem 3.7; exact value derived here)",
                    f"{middle((r['share'] for r in mine), 6)} over {len(mine)} heads",
                )
                for group, mine in groups.items()
            ),
            Claim(
                "heads of models on text, at their own radius, s = 1",
                "an oversimplified model of real data (Section 3.2)",
                f"sigma / limit {middle(far)}",
            ),
            Claim("heads with two keys that tie", "measure zero", f"{tied} of {len(places)}"),
        ),
        (_table(known, scales),),
        ("Layers with a rotary embedding have no such limit and are left out.",),
    )


def _random(study: Study) -> Iterator[tuple[str, DotProduct, Tensor]]:
    for seed in range(study.pick(3, 20)):
        gen = torch.Generator().manual_seed(seed)
        weights = [torch.randn(8, 8, generator=gen, dtype=torch.float64) for _ in range(3)]
        x = torch.randn(32, 8, generator=gen, dtype=torch.float64)
        for causal in (False, True):
            kind = "random heads, causal" if causal else "random heads"
            yield f"{kind}|{seed}", DotProduct(*weights, causal=causal), x


def _real(study: Study) -> Iterator[tuple[str, DotProduct, Tensor]]:
    for name in study.models:
        loaded = study.load(name)
        layer = int(loaded.config.num_hidden_layers) // 2
        for text in study.texts:
            try:
                one = next(layers_of(loaded, text.content, layers=[layer], lengths=[32]))
            except InputError:
                continue
            for head in range(0, one.attention.num_heads, study.pick(4, 1)):
                place = f"{name}, layer {layer}, {text.name}|{head}"
                yield place, in_double(one.attention, head), one.x


def _job(name: str, layer: DotProduct, x: Tensor, scale: float) -> ValueJob:
    group, _, which = name.partition("|")

    def compute() -> Record:
        head = heads_of(layer)[0]
        try:
            limit = castin_thm_3_7_limit(HeadAt(head, x))
        except NotApplicableError:
            return {"limit": None, "sigma": None, "share": None, "in_degree": None}
        start = torch.Generator().manual_seed(0)
        sigma = top_singular(layer.linearise(scale * x), tol=1e-6, generator=start).sigma
        degree = round((limit / head.norm_v) ** 2)
        return {"limit": limit, "sigma": sigma, "share": sigma / limit, "in_degree": degree}

    return {"group": group, "which": which, "scale": scale}, compute


def _draw(study: Study, found: list[Record]) -> None:
    panels = []
    for group, mine in grouped(found, "group"):
        heads = [rows for _, rows in grouped(mine, "which")][:6]
        series = [
            Series(f"head {k}", tuple((r["scale"], r["share"]) for r in rows))
            for k, rows in enumerate(heads, 1)
        ]
        ends = (min(r["scale"] for r in mine), max(r["scale"] for r in mine))
        one = Series("limit", tuple((s, 1.0) for s in ends), "dashes")
        panels.append(Panel(group, (*series, one), x="scale s", y="sigma(sX) / limit"))
    study.draw("large-radius", "Theorem 3.7: large radii", panels, columns=2)


def _table(found: list[Record], scales: list[float]) -> Table:
    lines = []
    few = scales[:: max(1, len(scales) // 4)]
    for group, mine in grouped(found, "group"):
        cells = (middle((r["share"] for r in mine if r["scale"] == s), 3) for s in few)
        degrees = middle((float(r["in_degree"]) for r in mine if r["scale"] == 1.0), 0)
        lines.append((group, degrees, *cells))
    columns = ("heads", "largest in-degree", *(f"s = {s:g}" for s in few))
    return Table("Sigma(sX) / limit: median and range over heads", columns, tuple(lines))
