"""Which blocks to keep in high precision: does sigma rank what rounding one of them does?"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipscope import models
from lipscope.charts import Panel
from lipscope.pages import number
from lipscope.records import mean_interval
from lipscope_experiments.experiment import Source, Study, batch_of, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, chosen, grouped, line
from lipscope_experiments.joint_test import correlations

_TOKENS = 64
_LAYERS = 32  # at most so many of a model, evenly
_BITS = (8, 4)
_WHAT: tuple[models.Rounds, ...] = ("weights", "inputs")
_TOLS = {"block": 0.05, "attention": 1e-3}  # of sigma; a block is run again for every product
_OF_SIGMA = ("relative sigma", "relative sigma · error", "sigma ‖X‖ · error")
PREDICTORS = tuple(f"{name}, {map}" for map in _TOLS for name in _OF_SIGMA)
ERROR, INDEX = "error alone", "index of the block"
BASELINES = (ERROR, INDEX)
LOCAL = "change of the block's own output (measured)"
WORDS = {
    "hidden": "relative change of the last hidden state",
    "cosine": "1 − cosine of the mean tokens",
    "divergence": "KL divergence of the next token, nats",
    "loss": "change of the loss, nats",
}


@dataclass(frozen=True)
class RoundedCase:
    """A model on what it reads: what could be known before, and what rounding did.

    Arrays ``(layers, windows)``: predictors by way to round (bits, and what is rounded) and name;
    changes of the output by measure, the main one first, and way to round.
    """

    where: str
    layers: list[int]
    known: dict[str, dict[str, np.ndarray]]
    change: dict[str, dict[str, np.ndarray]]


@experiment("questions/precision", models=("minilm", "smollm2", "dinov2"))
def precision(study: Study) -> None:
    """Which blocks do I keep in high precision? Sigma against simulated rounding."""
    cases = list[RoundedCase]()
    for source in study.sources():
        cases.append(_rounded_model(study, source))
        loaded = source.model
        if not (loaded.weights.startswith("random") or decides(loaded) or source.sees):
            fresh = replace(source, model=models.reinitialised(loaded))
            cases.append(_rounded_model(study, fresh))
    _draw_rounding(study, cases)
    for case in cases:
        _of_rounding(study, case)
    study.remark(
        f"Windows of {_TOKENS} tokens (pictures: at the model's own side). One Transformer "
        f"block at a time, at most {_LAYERS} of a model, evenly spread; all of its linear maps "
        "are rounded, symmetrically to the nearest: weights with a step for each output "
        "channel, or inputs with a step for each token and map. Steps are exact numbers, and "
        "nothing is calibrated.",
        "Error: ‖Q(X) − X‖_F / ‖X‖_F of the input X of the block (of its attention, for the "
        "predictors of attention) where inputs are rounded; ‖Q(W) − W‖_F / ‖W‖_F over all of "
        "its matrices where weights are.",
        "Relative sigma: sigma ‖X‖_F / ‖f(X)‖_F, of the block with its residual connections or "
        "of its attention alone. sigma ‖X‖ · error is the change of the output that such a "
        "move of the input could make at most, to first order; of rounded weights it is a "
        f"guess. Sigma of blocks to {_TOLS['block']:.0%}.",
        "Output of encoders: the last hidden state, and the mean token as an embedding. Of "
        "decoders: the next token by the model's own embedding table; the loss is that of the "
        "text.",
        "Rank correlations are over blocks, one for each window; intervals: 95 %, Student's "
        "over windows of this text, without a correction for how many there are. They say "
        "nothing of other blocks or models: over six blocks a rank correlation differs from 0 "
        "at 5 % only from 0.89 on. A predictor is advice where its mean is above 0 and "
        "above that of each baseline, both beyond the interval "
        "(pairs of one window); the index counts in the direction that suits it.",
        "What it does not show: formats with groups or outliers kept apart, and several blocks "
        "rounded together.",
    )


def _rounded_model(study: Study, source: Source) -> RoundedCase:
    layers = source.even_layers(study.pick(6, _LAYERS))
    asked = source.asking(_TOKENS, study.pick(4, 8))
    at = {"layers": layers, **asked}
    sigmas = {
        map: study.measure(f"{map}, {source.where}", source.model, map=map, tol=tol, **at)
        for map, tol in _TOLS.items()
    }
    key = {name: value for name, value in asked.items() if name != "data"}
    (lost,) = study.values(
        f"errors, {source.where}",
        [key | {"layers": layers}],
        lambda **_: _rounding_errors(source, at),
    )
    run = RoundedModel(source.model, asked)
    paths = [row.module for row in sigmas["block"]][: len(layers)]
    done = study.values(
        f"rounded, {source.where}",
        [one | key for one in grid(path=paths, bits=_BITS, what=_WHAT)],
        lambda path, bits, what, **_: run.rounded(path, bits, what),
    )

    def by_layer(values: Iterable[float | None]) -> np.ndarray:
        """From rows, windows one after the other, each layer by layer; NaN where there is none."""
        return np.array([*values], dtype=float).reshape(-1, len(layers)).T

    case = RoundedCase(source.where, layers, {}, defaultdict(dict))
    for bits, what in itertools.product(_BITS, _WHAT):
        way, mine = f"{bits}-bit {what}", chosen(done, bits=bits, what=what)
        found = {name: np.array([r[name] for r in mine]) for name in mine[0]}
        for name in ("divergence", "loss") if "loss" in found else ("hidden", "cosine"):
            case.change[WORDS[name]][way] = found[name]
        index = np.broadcast_to(np.array(layers)[:, None], found["local"].shape)
        known = {INDEX: index, LOCAL: found["local"]}
        for map, rows in sigmas.items():
            name = f"weights, {bits}, {{}}" if what == "weights" else f"{map}, {bits}, {{}}, {{}}"
            error = by_layer(lost["errors"][name.format(row.layer, row.sample)] for row in rows)
            relative = by_layer(row.relative for row in rows)
            moved = by_layer(row.sigma for row in rows) * by_layer(row.input_norm for row in rows)
            values = (relative, relative * error, moved * error)
            known |= {f"{of}, {map}": v for of, v in zip(_OF_SIGMA, values, strict=True)}
            known.setdefault(ERROR, error)  # that of the block, which comes first
        case.known[way] = known
    return case


def _rounding_errors(source: Source, asked: Record) -> Record:
    """Relative rounding errors, of the inputs by map, bits, layer and window, and of weights."""
    found: Record = {}
    for map in ("block", "attention"):
        for one in layers_of(source.model, map=map, dtype="float32", **asked):
            x = one.x.detach()
            for bits in _BITS:
                error = float((models.rounded(x, bits) - x).norm() / x.norm())
                found[f"{map}, {bits}, {one.layer}, {one.sample}"] = error
                if map == "block" and one.sample == 0:
                    block = source.model.model.get_submodule(one.module or "")
                    found[f"weights, {bits}, {one.layer}"] = models.rounding_error(block, bits)
    return {"errors": found}


def holds(known: Mapping[str, np.ndarray], change: np.ndarray, name: str) -> tuple[bool, bool]:
    """Whether a predictor's correlation is above 0, and above that of each baseline.

    Each beyond the 95 % interval over windows. A baseline that is constant over layers says
    nothing, and is beaten by what is above 0.
    """
    mine = correlations(known[name], change)
    if len(mine) < 3 or not mean_interval(mine)[1] > 0:
        return False, False
    for baseline in BASELINES:
        other = np.nan_to_num(correlations(known[baseline], change))
        sign = math.copysign(1.0, fmean(other)) if baseline == INDEX else 1.0
        if not mean_interval([a - sign * b for a, b in zip(mine, other, strict=True)])[1] > 0:
            return True, False
    return True, True


def _of_rounding(study: Study, case: RoundedCase) -> None:
    """Which predictors made of sigma are advice for this model on this text, and how good."""
    measure, change = next(iter(case.change.items()))
    means, words, advice = {way: own.mean(1) for way, own in change.items()}, [], []
    for name in PREDICTORS:
        answers = [holds(case.known[way], own, name) for way, own in change.items()]
        above, better = map(sum, zip(*answers, strict=True))
        words.append(f"{name} {above}, {better}")
        advice += [name] * (better == len(answers))
    study.claim(
        f"{case.where}: is sigma advice? Of {len(change)} ways to round: in how many the "
        "correlation is above 0; in how many also above that of the error and of the index",
        f"{len(change)}, {len(change)}, if it is advice",
        f"{'; '.join(words)}. Advice: {', '.join(advice) or 'none of them'}",
    )
    study.claim(
        f"{case.where}: {measure}, largest block / smallest",
        "far above 1, if it matters which block is kept",
        "; ".join(
            f"{way}: {number(mean.max() / mean.min(), 3)} times ({number(mean.max(), 2)} at most)"
            for way, mean in means.items()
        ),
    )
    for name in ("relative sigma, block", "relative sigma · error, block", *BASELINES):
        study.claim(
            f"{case.where}: {name}, rank correlation with that",
            "a baseline" if name in BASELINES else "near 1, if it is advice",
            "; ".join(
                f"{way} {_mean_correlation(case.known[way][name], own)}"
                for way, own in change.items()
            ),
        )
    for kind, changes in case.change.items():
        lines = [
            (name, *(_mean_correlation(case.known[way][name], own) for way, own in changes.items()))
            for name in (*PREDICTORS, *BASELINES, LOCAL)
        ]
        title = f"rank correlation over {len(case.layers)} blocks with the {kind}"
        study.table(f"{case.where}: {title}", lines, ("what is known before", *changes))
    lines = [
        (str(layer), *(average(own[i].tolist()) for own in change.values()))
        for i, layer in enumerate(case.layers)
    ]
    study.table(f"{case.where}: {measure}, one block rounded", lines, ("block", *change))


def _mean_correlation(known: np.ndarray, change: np.ndarray) -> str:
    return average([*filter(math.isfinite, correlations(known, change))], (-1.0, 1.0), "z.2f")


def _draw_rounding(study: Study, cases: Sequence[RoundedCase]) -> None:
    """One line of panels a model: trained weights on the first text; the rest is in the tables."""
    panels = []
    for _, (case, *_) in grouped(cases, lambda one: one.where.partition(",")[0]):
        measure, change = next(iter(case.change.items()))
        curves = [line(way, case.layers, own.mean(1).tolist()) for way, own in change.items()]
        panels.append(Panel(case.where, curves, "block", measure, log_x=False))
        for name in ("relative sigma, block", ERROR):
            known = {way: _over_mean(case.known[way][name]) for way in change}
            ends = [of(map(of, known.values())) for of in (min, max)]
            dots = [line(way, known[way], _over_mean(own), "points") for way, own in change.items()]
            dots.append(line("in proportion", ends, ends, "dashes"))
            axes = f"{name}, over its mean", "change of the output, over its mean"
            panels.append(Panel(case.where, dots, *axes))
    study.draw("precision", "What rounding one block does, and what was known before", panels)


def _over_mean(values: np.ndarray) -> list[float]:
    return (values.mean(1) / values.mean()).tolist()


class RoundedModel:
    """A model on all windows at once, as it is and with one block rounded."""

    def __init__(self, model: models.LoadedModel, asked: Mapping[str, Any]) -> None:
        self.loaded, self.arguments = model, batch_of(model, **asked)
        self._as_it_is = functools.lru_cache(maxsize=1)(self._run)

    @torch.no_grad()
    def _run(self, path: str) -> tuple[Tensor, Tensor]:
        """The last hidden state, and the output of one block on the way."""
        model, held = self.loaded.model, list[Tensor]()
        with model.get_submodule(path).register_forward_hook(
            lambda _, __, output: held.append(models.first_tensor(output))
        ):
            return model(**self.arguments).last_hidden_state, held[0]

    def rounded(self, path: str, bits: int, what: models.Rounds) -> Record:
        """What rounding one block does by window, ``local`` to its own output too."""
        before, own = self._as_it_is(path)
        with models.rounding(self.loaded.model.get_submodule(path), what, bits):
            hidden, block = self._run(path)
        local = {"local": relative_change(block, own)}
        ids = self.arguments.get("input_ids")
        return local | output_changes(self.loaded, before, hidden, ids)


def decides(loaded: models.LoadedModel) -> bool:
    """Whether the next token is what a model is for."""
    return hasattr(loaded.config, "vocab_size") and loaded.config.model_type != "bert"


def output_changes(
    loaded: models.LoadedModel, before: Tensor, after: Tensor, ids: Tensor | None
) -> dict[str, list[float]]:
    """What other last hidden states mean for the output, by window.

    ``hidden``: their relative change. Of encoders ``cosine``: 1 less the cosine of mean tokens. Of
    decoders, by their own embedding table, ``divergence``: of the next token, mean over places;
    ``loss``: its change.
    """
    found = {"hidden": relative_change(after, before)}
    if ids is None or not decides(loaded):
        cosine = torch.cosine_similarity(before.double().mean(1), after.double().mean(1))
        return found | {"cosine": (1 - cosine).tolist()}
    model: Any = loaded.model
    table = model.get_input_embeddings().weight.detach()
    log_p, log_q = ((hidden @ table.T).log_softmax(-1) for hidden in (before, after))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)
    before, after = (
        -p[:, :-1].take_along_dim(ids[:, 1:, None], -1).mean((1, 2)) for p in (log_p, log_q)
    )
    return found | {"divergence": divergence.tolist(), "loss": (after - before).tolist()}


def relative_change(after: Tensor, before: Tensor) -> list[float]:
    """``‖after − before‖_F / ‖before‖_F``, by window."""
    change = (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    return change.tolist()
