"""Sigma along depth: all layers together beside the product of them, in flows and in models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lipscope import Attention, InputError, L2Attention, SinkhornAttention
from lipscope.charts import Panel, Series
from lipscope.dynamics import sigma_along, sigma_of_blocks
from lipscope.linalg import start_named
from lipscope.models import LoadedModel
from lipscope_experiments.castin2024.maps import multiple
from lipscope_experiments.experiment import Study, ValueJob, layers_of
from lipscope_experiments.findings import Claim, Record, Table, average, geometric, grouped
from lipscope_experiments.texts import Text

_TIMES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
_LENGTH = 32


@dataclass(frozen=True)
class Depths:
    """What is said and drawn of sigma along depth."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]


def depths(study: Study) -> Depths:
    """Flows of small layers, and blocks of models on windows of text."""
    seeds = range(study.pick(2, 6))
    flows = study.values("depth", [_flow_job(kind, seed) for kind in _KINDS for seed in seeds])
    models = [r for place in study.places() for r in _of_model(study, *place)]
    panels = [_panel(kind, _first(flows, kind)) for kind in ("A = +I", "A = -I")]
    panels += [
        _panel(f"{name}, {_LENGTH} tokens", next(r for r in models if r["model"] == name), "block")
        for name in dict.fromkeys(r["model"] for r in models)
    ]
    last = [r for r in flows if r["kind"] == "A = +I"]
    return Depths(
        (
            Claim(
                "flow, V = A = I, t = 2: product of infinitely thin layers / sigma of all together",
                "at least 1 (derived here)",
                average([r["product"][-1] / r["sigma"][-1] for r in last]),
            ),
            *(
                Claim(
                    f"{name}, {text}: product of the blocks' sigmas / sigma of all blocks together",
                    "at least 1",
                    geometric([r["product"][-1] / r["sigma"][-1] for r in mine]),
                )
                for (name, text), mine in grouped(models, "model", "text")
            ),
        ),
        (_flow_table(flows), _model_table(models)),
        tuple(panels),
    )


# --- flows


def _two_tied(d: int) -> Attention:
    eye = torch.eye(d, dtype=torch.float64)
    return L2Attention(eye, d**0.5 * eye)


def _sinkhorn(d: int) -> Attention:
    eye = torch.eye(d, dtype=torch.float64)
    return SinkhornAttention(eye, eye, eye, scale=0.1)


_KINDS = {
    "A = +I": lambda d: multiple(1.0, d),
    "A = -I": lambda d: multiple(-1.0, d),
    "A = +I, causal": lambda d: multiple(1.0, d).replace(causal=True),
    "V = -I": lambda d: multiple(1.0, d).replace(value=-torch.eye(d, dtype=torch.float64)),
    "L2": _two_tied,
    "Sinkhorn, A = I / 10": _sinkhorn,
}


def _flow_job(kind: str, seed: int) -> ValueJob:
    def compute() -> Record:
        x = torch.randn(10, 2, generator=start_named(f"depth|{seed}"), dtype=torch.float64)
        found = sigma_along(_KINDS[kind](2), x, _TIMES, rtol=1e-4)
        assert found.norms is not None
        names = ("times", "sigma", "product", "norms")
        return {name: getattr(found, name).tolist() for name in names}

    return {"kind": kind, "seed": seed}, compute


def _first(flows: Sequence[Record], kind: str) -> dict[str, Any]:
    return next(r for r in flows if r["kind"] == kind)


def _flow_table(flows: Sequence[Record]) -> Table:
    lines = []
    for kind in _KINDS:
        mine = [r for r in flows if r["kind"] == kind]
        over = [r["product"][-1] / r["sigma"][-1] for r in mine]
        crude = [r["norms"][-1] / r["sigma"][-1] for r in mine]
        sigma = average([r["sigma"][-1] for r in mine])
        lines.append((kind, sigma, average(over), average(crude)))
    columns = ("layer", "sigma of the flow", "product / sigma", "exp ∫ ‖J‖ / sigma")
    return Table("Flows to t = 2, ten standard normal tokens in the plane", columns, tuple(lines))


# --- models: from block to block


def _of_model(study: Study, loaded: LoadedModel, text: Text) -> Iterator[Record]:
    count = study.pick(1, 4)
    for window in range(count):
        part = text.content[window * len(text.content) // count :]
        key = {"model": loaded.name, "text": text.name, "window": window, "length": _LENGTH}
        yield from study.values("blocks", [(key, lambda part=part: _blocks(loaded, part))])


def _blocks(loaded: LoadedModel, text: str) -> dict[str, Any]:
    maps = layers_of(
        loaded, text, layers="all", lengths=[_LENGTH], samples=1, map="block", dtype="float32"
    )
    found = [(built.x, built.output, built.linearise()) for built in maps]
    together = all(
        bool(torch.allclose(y, x, rtol=1e-4, atol=1e-4 * float(x.abs().max())))
        for (_, y, _), (x, _, _) in pairwise(found)
    )
    if not together:
        raise InputError("A block should read what the one before it gives. Found another model.")
    last = len(found)
    ends = sorted({1, 2, 3, max(1, last // 2), last} & {*range(1, last + 1)})
    whole = sigma_of_blocks([op for _, _, op in found], depths=ends, tol=0.05)
    names = ("times", "sigma", "upper", "product")
    return {name: getattr(whole, name).tolist() for name in names}


def _model_table(models: Sequence[Record]) -> Table:
    lines = []
    for (name, text), mine in grouped(models, "model", "text"):
        for i, depth in enumerate(mine[0]["times"][1:], 1):
            sigma = geometric([r["sigma"][i] for r in mine])
            product = geometric([r["product"][i] for r in mine])
            over = geometric([r["product"][i] / r["sigma"][i] for r in mine])
            lines.append((name, text, f"{depth:g}", sigma, product, over))
    columns = ("model", "text", "blocks", "sigma together", "product", "product / sigma")
    title = f"From the entrance of the first block to the end of another, {_LENGTH} tokens"
    return Table(title, columns, tuple(lines))


# --- figures


def _panel(title: str, r: Record, x: str = "t") -> Panel:
    named = {"sigma": "all together", "product": "product", "norms": "exp ∫ ‖J‖"}
    series = [
        Series(name, tuple(zip(r["times"], r[key], strict=True)))
        for key, name in named.items()
        if key in r
    ]
    return Panel(title, tuple(series), x, "sigma", log_x=False)
