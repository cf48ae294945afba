"""Where the time of one solve goes."""

from __future__ import annotations

from collections import defaultdict

import torch
from cases import BERT_BASE, source
from solvers import lipscope
from tables import Raw, Section, table
from torch.profiler import ProfilerActivity, profile

_KINDS = {
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv"),
    "elementwise": ("aten::mul", "aten::sub", "aten::add", "aten::addcmul", "aten::threshold"),
    "sums and norms": ("aten::sum", "aten::linalg_vector_norm", "aten::_softmax"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone"),
}


def measure(*, quick: bool) -> Raw:
    """Own time of every operator in one solve, one thread."""
    torch.set_num_threads(1)
    n = 128 if quick else 512
    raw = []
    for name, layer in (("minilm", 0), ("minilm", 3), (BERT_BASE, 0)):
        model = source(name)
        case = model.cases(model.windows([n], 1)[0], [layer])[0]
        lipscope(case, 0)
        with profile(activities=[ProfilerActivity.CPU]) as record:
            products = lipscope(case, 0).products
        own = {event.key: event.self_cpu_time_total for event in record.key_averages()}
        raw.append({"layer": case.name, "n": n, "products": products, "microseconds": own})
    return raw


def render(raw: Raw) -> Section:
    """Shares of the time by kind of operation."""
    out = Section("Where the time of a solve goes")
    out.add(
        f"""One solve at the default tolerance, n = {raw[0]["n"]}, one thread, under torch's
profiler: share of the operators' own time. What the peers do more of is the same matrix products;
fewer of them, not faster ones, would raise the ratios above."""
    )
    rows = []
    for one in raw:
        spent = _spent(one["microseconds"])
        whole = sum(spent.values())
        shares = [f"{100 * spent[kind] / whole:.0f}" for kind in (*_KINDS, "rest")]
        rows.append([one["layer"], one["products"], *shares])
    out.add(table(["layer", "products", *(f"{kind}, %" for kind in (*_KINDS, "rest"))], rows))
    return out


def _spent(own: dict[str, float]) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for operator, time in own.items():
        kinds = [k for k, ops in _KINDS.items() if operator.rstrip("_") in _plain(ops)]
        spent[kinds[0] if kinds else "rest"] += time
    return spent


def _plain(names: tuple[str, ...]) -> set[str]:
    return {name.rstrip("_") for name in names}
