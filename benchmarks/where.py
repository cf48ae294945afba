"""Where the time of one solve goes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from cases import BERT_BASE, source
from solvers import lipscope
from tables import Section, table
from torch.profiler import ProfilerActivity, profile

_KINDS = {
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv"),
    "elementwise": ("aten::mul", "aten::sub", "aten::add", "aten::addcmul", "aten::threshold"),
    "sums and norms": ("aten::sum", "aten::linalg_vector_norm", "aten::_softmax"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone"),
}


def section(*, quick: bool) -> Section:
    """Shares of the time by kind of operation, one thread."""
    torch.set_num_threads(1)
    n = 128 if quick else 512
    out = Section("Where the time of a solve goes")
    out.add(
        f"""One solve at the default tolerance, n = {n}, one thread, under torch's profiler: share
of the operators' own time. What the peers do more of is the same matrix products; fewer of them,
not faster ones, would raise the ratios above."""
    )
    rows = []
    for name, layer in (("minilm", 0), ("minilm", 3), (BERT_BASE, 0)):
        model = source(name)
        case = model.cases(model.windows([n], 1)[0], [layer])[0]
        lipscope(case, 0)
        with profile(activities=[ProfilerActivity.CPU]) as record:
            products = lipscope(case, 0).products
        spent = _spent(record.key_averages())
        whole = sum(spent.values())
        shares = [f"{100 * spent[kind] / whole:.0f}" for kind in (*_KINDS, "rest")]
        rows.append([case.name, products, *shares])
    out.add(table(["layer", "products", *(f"{kind}, %" for kind in (*_KINDS, "rest"))], rows))
    return out


def _spent(events: Any) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        kinds = [k for k, ops in _KINDS.items() if event.key.rstrip("_") in _plain(ops)]
        spent[kinds[0] if kinds else "rest"] += event.self_cpu_time_total
    return spent


def _plain(names: tuple[str, ...]) -> set[str]:
    return {name.rstrip("_") for name in names}
