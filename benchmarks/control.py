"""What control costs a training step, and how far the estimate of sigma stays below it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from tables import Section, Target, say, table
from torch import Tensor, nn

import lipscope as ls

LENGTH, BATCH = 128, 8
EVERY = 100  # the monitor's default
_VOCABULARY = (1000, 20000)


def section(*, quick: bool) -> Section:
    """MiniLM, six layers, fine-tuned on random tokens."""
    found = Section("Control of training")
    found.add(
        f"MiniLM (6 layers, width 384, 12 heads), AdamW, batches of {BATCH} sequences of {LENGTH} "
        "tokens, float32, one thread. The probe is one sequence. Medians of processor time "
        f"(load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        "cores)."
    )
    steps, readings = (3, 2) if quick else (9, 5)
    net, step = _training()
    plain = _timed(step, steps)
    monitor = ls.Monitor(net, _ids(1, 0), every=EVERY)
    monitor.read()
    reading = _timed(monitor.read, readings)
    share = reading / (EVERY * plain)
    rows: list[list[object]] = [
        ["training step", f"{1e3 * plain:.0f}", "1"],
        ["reading of the monitor", f"{1e3 * reading:.0f}", f"{reading / plain:.2f}"],
    ]
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

        took = _timed(act, readings)
        found.raw.append({"what": how, "seconds": took, "step": plain})
        rows.append([f"`{how}`, all layers", f"{1e3 * took:.0f}", f"{took / plain:.2f}"])
        say(f"control: {how} {took:.2f} s")
    found.add(table(["", "ms", "training steps"], rows))
    found.add(
        "Of a penalty: value and gradient. Of a constraint: one call that finds nothing to change."
    )
    words = f"{share:.1%} of the step time at the default `every={EVERY}`"
    found.targets.append(
        Target("monitor on 6 layers: under 5 % of the step time", words, share < 0.05)
    )
    return found


def estimate_section(*, quick: bool) -> Section:
    """How far the cheap penalty stays below what it estimates."""
    found = Section("The estimate of sigma in a penalty")
    steps = 2 if quick else 8
    found.add(
        "`sigma-estimate` takes two products a call, from where the call before ended. How far it "
        f"is below sigma, mean over the layers of MiniLM, while that is trained for {steps} steps "
        f"(AdamW, rate 1e-5, batches of {BATCH} sequences of {LENGTH} tokens): the same probe of "
        "one sequence at each call, or another one."
    )
    found.add(_bias(steps))
    return found


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


def _bias(steps: int) -> str:
    """Rows for 1, 2, 4, … calls."""
    marks = [one for one in (1, 2, 4, 8) if one <= steps]
    found: dict[str, dict[int, float]] = {}
    for name in ("same probe", "another batch"):
        net, step = _training()
        held = ls.restrain(net, _ids(1, 0), "sigma-estimate")
        ratios: dict[int, float] = {}
        for call in range(1, steps + 1):
            data = _ids(1, 0 if name == "same probe" else 10**6 + call)
            value = float(held.penalty(data).detach())
            if call in marks:
                sigmas = [row.sigma or 0.0 for row in ls.measure(net, data)]
                ratios[call] = value / statistics.fmean(sigmas) - 1
            step()
        found[name] = ratios
    rows = [[str(m), *(f"{found[name][m]:+.1%}" for name in found)] for m in marks]
    return table(["calls", *found], rows)


def _ids(count: int, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(*_VOCABULARY, (count, LENGTH), generator=gen)


def _timed(work: Callable[[], object], times: int) -> float:
    """Seconds of the processor, the median of several runs after one that does not count."""
    work()
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return statistics.median(found)
