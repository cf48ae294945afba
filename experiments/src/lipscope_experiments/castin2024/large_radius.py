"""Theorem 3.7: sigma of s X over the root of the largest in-degree, random and real heads."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lipscope import DotProduct, InputError
from lipscope.certificates import in_double
from lipscope.charts import Panel
from lipscope.theorems import HeadAt, NotApplicableError, castin_thm_3_7_limit, heads_of
from lipscope_experiments.experiment import Study, experiment, layers_of
from lipscope_experiments.findings import Record, chosen, curve, grouped, level, middle
from lipscope_experiments.simple_layers import normal, top


@experiment("castin2024/large-radius", models=("minilm", "random:gpt2"))
def large_radius(study: Study) -> None:
    """How Smooth Is Attention?, Theorem 3.7: the large-radius regime."""
    scales = [2.0**k for k in range(study.pick(8, 13))]
    places = {**_random_heads(study), **_model_heads(study)}
    keys = [{"group": g, "which": k, "scale": s} for (g, k), s in itertools.product(places, scales)]
    found = study.values(
        "large-radius",
        keys,
        lambda group, which, scale: _beside_limit(places[group, which], scale),
    )
    known = [r for r in found if r["limit"] is not None]
    panels = []
    for group, mine in grouped(known, "group"):
        heads = [rows for _, rows in grouped(mine, "which")][:6]
        series = [curve(f"head {k}", rows, "scale", "share") for k, rows in enumerate(heads, 1)]
        one = level("limit", 1.0, (of(r["scale"] for r in mine) for of in (min, max)))
        panels.append(Panel(group, (*series, one), x="scale s", y="sigma(sX) / limit"))
    study.draw("large-radius", "Theorem 3.7: large radii", panels, columns=2)
    few = scales[:: max(1, len(scales) // 4)]
    tied = len(chosen(found, limit=None, scale=1.0))
    own = chosen(known, scale=1.0)
    far = [r["share"] for r in own if not r["group"].startswith("random head")]
    for group, mine in grouped(chosen(known, scale=scales[-1]), "group"):
        study.claim(
            f"sigma(sX) / limit at s = {scales[-1]:g}, {group}",
            "tends to 1: ‖V‖ √(largest in-degree) (Theorem 3.7; exact value derived here)",
            f"{middle((r['share'] for r in mine), 6)} over {len(mine)} heads",
        )
    study.claim(
        "heads of models on text, at their own radius, s = 1",
        "an oversimplified model of real data (Section 3.2)",
        f"sigma / limit {middle(far)}",
    )
    study.claim("heads with two keys that tie", "measure zero", f"{tied} of {len(places)}")
    lines = [
        (
            *(group, middle((float(r["in_degree"]) for r in chosen(mine, scale=1.0)), 0)),
            *(middle((r["share"] for r in chosen(mine, scale=s)), 3) for s in few),
        )
        for group, mine in grouped(known, "group")
    ]
    columns = ("heads", "largest in-degree", *(f"s = {s:g}" for s in few))
    study.table("Sigma(sX) / limit: median and range over heads", lines, columns)
    study.remark("Layers with a rotary embedding have no such limit and are left out.")


Heads = dict[tuple[str, str], tuple[DotProduct, Tensor]]
"""A head and its input by group and name."""


def _random_heads(study: Study) -> Heads:
    found: Heads = {}
    for seed in range(study.pick(3, 20)):
        gen = torch.Generator().manual_seed(seed)
        weights, x = [normal(gen, 8, 8) for _ in range(3)], normal(gen, 32, 8)
        for causal in (False, True):
            kind = "random heads, causal" if causal else "random heads"
            found[kind, str(seed)] = DotProduct(*weights, causal=causal), x
    return found


def _model_heads(study: Study) -> Heads:
    found: Heads = {}
    for source in study.sources():
        _, layer = source.first_and_middle
        try:
            one = next(layers_of(source.model, layers=[layer], lengths=[32], **source.asked))
        except InputError:
            continue
        for head in range(0, one.attention.num_heads, study.pick(4, 1)):
            place = f"{source.model.name}, layer {layer}, {source.name}"
            found[place, str(head)] = in_double(one.attention, head), one.x
    return found


def _beside_limit(place: tuple[DotProduct, Tensor], scale: float) -> Record:
    layer, x = place
    head = heads_of(layer)[0]
    try:
        limit = castin_thm_3_7_limit(HeadAt(head, x))
    except NotApplicableError:
        return {"limit": None, "sigma": None, "share": None, "in_degree": None}
    sigma = top(layer.linearise(scale * x), tol=1e-6).sigma
    degree = round((limit / head.norm_v) ** 2)
    return {"limit": limit, "sigma": sigma, "share": sigma / limit, "in_degree": degree}
