"""What control costs a training step, and how far the estimate of sigma stays below it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
from tables import Raw, Section, Target, at_most, say, table
from torch import Tensor, nn

import lipscope as ls

LENGTH, BATCH = 128, 8
EVERY = 100  # the monitor's default
_VOCABULARY = (1000, 20000)


def measure(*, quick: bool) -> Raw:
    """MiniLM, six layers, fine-tuned on random tokens: seconds of the processor, run by run."""
    steps, readings = (3, 2) if quick else (9, 5)
    at = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    net, step = _training()
    raw = [{"what": "training step", **at, "seconds": _timed(step, steps)}]
    monitor = ls.Monitor(net, _ids(1, 0), every=EVERY)
    monitor.read()
    raw.append({"what": "reading of the monitor", "seconds": _timed(monitor.read, readings)})
    for how, cap in (
        ("sigma-estimate", None),
        ("sigma", None),
        ("softmax-spread", None),
        ("weight-norms", None),
        ("sigma-cap", 1e3),
        ("query-key-clip", 1e3),
        ("spectral-cap", 1e3),
    ):
        held = ls.restrain(net, _ids(1, 0), how, cap=cap)

        def act(held: ls.Restraint = held) -> None:
            value = held.penalty()
            if value.requires_grad:
                value.backward()
            held.step()

        raw.append({"what": f"`{how}`, all layers", "seconds": _timed(act, readings)})
        say(f"control: {how} done")
    return raw


def render(raw: Raw) -> Section:
    """Milliseconds, and how many training steps that is."""
    out = Section("Control of training")
    step, reading = raw[:2]
    out.add(
        f"MiniLM (6 layers, width 384, 12 heads), AdamW, batches of {BATCH} sequences of {LENGTH} "
        "tokens, float32, one thread. The probe is one sequence. Medians of processor time "
        f"(load of the machine {step['load']:.1f} on {step['cores']} cores)."
    )
    plain = median(step["seconds"])
    times = [(one["what"], median(one["seconds"])) for one in raw]
    rows = [[what, f"{1e3 * took:.0f}", f"{took / plain:.2f}"] for what, took in times]
    out.add(table(["", "ms", "training steps"], rows))
    out.add(
        "Of a penalty: value and gradient. Of a constraint: one call that finds nothing to change."
    )
    shares = [took / (EVERY * plain) for took in reading["seconds"]]
    words = f"{median(shares):.1%} of the step time at the default `every={EVERY}`"
    goal = "monitor on 6 layers: under 5 % of the step time"
    out.targets.append(Target(goal, words, at_most(shares, 0.05)))
    return out


def measure_estimate(*, quick: bool) -> Raw:
    """The cheap penalty and the sigmas that it estimates, after 1, 2, 4, … calls."""
    steps = 2 if quick else 8
    raw = []
    for name in ("same probe", "another batch"):
        net, step = _training()
        held = ls.restrain(net, _ids(1, 0), "sigma-estimate")
        for call in range(1, steps + 1):
            data = _ids(1, 0 if name == "same probe" else 10**6 + call)
            value = float(held.penalty(data).detach())
            if call in (1, 2, 4, 8):
                sigmas = [row.sigma or 0.0 for row in ls.measure(net, data)]
                raw.append({"probe": name, "calls": call, "estimate": value, "sigmas": sigmas})
            step()
    return raw


def render_estimate(raw: Raw) -> Section:
    """How far the cheap penalty stays below what it estimates."""
    out = Section("The estimate of sigma in a penalty")
    marks = list(dict.fromkeys(one["calls"] for one in raw))
    out.add(
        "`sigma-estimate` takes two products a call, from where the call before ended. How far it "
        f"is below sigma, mean over the layers of MiniLM, while that is trained for {marks[-1]} "
        f"steps (AdamW, rate 1e-5, batches of {BATCH} sequences of {LENGTH} tokens): the same "
        "probe of one sequence at each call, or another one."
    )
    off = {(o["probe"], o["calls"]): o["estimate"] / fmean(o["sigmas"]) - 1 for o in raw}
    probes = list(dict.fromkeys(one["probe"] for one in raw))
    rows = [[m, *(f"{off[probe, m]:+.1%}" for probe in probes)] for m in marks]
    out.add(table(["calls", *probes], rows))
    return out


_CAPS = {"none": None, "parametrised": "parametrised", "after a step": "after-step"}


def measure_caps(*, quick: bool) -> Raw:
    """A step of Muon and AdamW on a Transformer of width 256, with caps and without, in turn."""
    batch, rounds = (4, 2) if quick else (64, 4)
    steps = {name: _capped(capped, batch) for name, capped in _CAPS.items()}
    raw = [{"caps": name, "batch": batch, "seconds": list[float]()} for name in steps]
    for step in steps.values():
        step()
    for _ in range(rounds):
        for one in raw:
            began = time.process_time()
            steps[one["caps"]]()
            one["seconds"].append(time.process_time() - began)
        say("caps: a round done")
    return raw


def render_caps(raw: Raw) -> Section:
    """Seconds of a step, and what caps add to it."""
    out = Section("Caps on every matrix")
    out.add(
        "`SmoothTransformer` of width 256, 3 blocks, 4 heads, 256 characters a window, "
        f"{raw[0]['batch']} windows a step, 19 matrices; Muon and AdamW, float32, one thread. "
        "Medians of processor time; the three in turn."
    )
    plain = raw[0]["seconds"]
    rows, shares = [], {}
    for one in raw:
        added = [took / base - 1 for took, base in zip(one["seconds"], plain, strict=True)]
        shares[one["caps"]] = added
        rows.append([one["caps"], f"{median(one['seconds']):.2f}", f"{median(added):+.1%}"])
    out.add(table(["caps", "s", "beside none"], rows))
    added = shares["parametrised"]
    goal = "parametrised caps at width 256: under 10 % of a step"
    out.targets.append(Target(goal, f"{median(added):+.1%} of a step", at_most(added, 0.1)))
    return out


def _capped(capped: str | None, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"outputs": 65, "vocabulary": 65, "length": 256, "causal": True}
    caps: dict[str, Any] = {"cap": None} if capped is None else {"cap": 1.5, "capped": capped}
    net = ls.SmoothTransformer(256, 4, 3, **sizes, **caps)
    ids = torch.randint(65, (batch, 257), generator=torch.Generator().manual_seed(0))
    optimisers = [torch.optim.Muon(net.matrices, lr=0.02), torch.optim.AdamW(net.others)]

    def step() -> None:
        loss = nn.functional.cross_entropy(net(ids[:, :-1]).mT, ids[:, 1:])
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        net.cap_weights()

    return step


def _training() -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    net = ls.load_model("minilm").model.train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-5)
    seeds = iter(range(1, 10**6))

    def step() -> None:
        optimiser.zero_grad()
        net(_ids(BATCH, next(seeds))).last_hidden_state.square().mean().backward()
        optimiser.step()

    return net, step


def _ids(count: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(*_VOCABULARY, (count, LENGTH), generator=gen)


def _timed(work: Callable[[], object], times: int) -> list[float]:
    """Seconds of the processor of several runs, after one that does not count."""
    work()
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return found
