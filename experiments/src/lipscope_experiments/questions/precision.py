"""Which blocks to keep in high precision: does sigma rank what rounding one of them does?"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import InputError, Rows
from lipscope.charts import Panel, Series
from lipscope.models import (
    LoadedModel,
    Rounds,
    inputs_of,
    reinitialised,
    rounded,
    rounding,
    rounding_error,
)
from lipscope.pages import number
from lipscope.records import mean_interval, rank_correlation
from lipscope_experiments.experiment import Source, Study, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, chosen

_TOKENS = 64
_LAYERS = 32  # at most so many of a model, evenly
_BITS = (8, 4)
_WHAT: tuple[Rounds, ...] = ("weights", "inputs")
_TOL = 0.05  # of sigma of a block, which is run again for every product
ERROR, INDEX = "error alone", "index of the block"
BASELINES = (ERROR, INDEX)
LOCAL = "change of the block's own output (measured)"


@dataclass(frozen=True)
class RoundedCase:
    """A model on what it reads: what could be known before, and what rounding did.

    By bits and what is rounded: ``known`` by predictor, values ``[window][layer]``, and the true
    changes of the output by two measures.
    """

    where: str
    measure: str
    layers: list[int]
    known: dict[tuple[int, str], dict[str, list[list[float]]]]
    change: dict[tuple[int, str], list[list[float]]]
    second: str
    other: dict[tuple[int, str], list[list[float]]]


@experiment(
    "questions/precision",
    title="Which blocks do I keep in high precision? Sigma against simulated rounding",
    cite="derived here",
    models=("minilm", "smollm2", "dinov2"),
    reads_images=True,
)
def precision(study: Study) -> None:
    """Rank correlation over blocks of sigma and rounding errors with what rounding one does."""
    missing: list[str] = []
    cases = [case for one in study.sources(missing) for case in _trained_and_not(study, one)]
    _draw_rounding(study, cases)
    for case in cases:
        _of_rounding(study, case)
    for case in cases:
        _rounding_tables(study, case)
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
        f"guess. Sigma of blocks to {_TOL:.0%}.",
        "Output of encoders: the last hidden state, and the mean token as an embedding. Of "
        "decoders: the next token by the model's own embedding table; the loss is that of the "
        "text.",
        "Rank correlations are over blocks, one for each window; intervals: 95 %, Student's "
        "over windows of this text, without a correction for how many there are. They say "
        "nothing of other blocks or models: over six blocks a rank correlation differs from 0 "
        "at 5 % only from 0.89 on. A predictor is advice where its mean is above 0 and "
        "above that of each baseline, both beyond the interval "
        "(pairs of one window); the index counts in the direction that suits it.",
        *missing,
    )


def _trained_and_not(study: Study, source: Source) -> Iterator[RoundedCase]:
    yield _rounded_model(study, source)
    loaded = source.model
    if not (loaded.weights.startswith("random") or decides(loaded.config) or source.sees):
        yield _rounded_model(study, Source(reinitialised(loaded), source.name, source.asked))


def _rounded_model(study: Study, source: Source) -> RoundedCase:
    count = int(source.model.config.num_hidden_layers)
    layers = [*range(0, count, math.ceil(count / study.pick(6, _LAYERS)))]
    asked: Record = {"layers": layers, **source.asked}
    if not source.sees:
        asked["lengths"] = [_TOKENS]
    if source.asked.get("images", "random") == "random":
        asked["samples"] = study.pick(4, 8)
    sigmas = {
        map: study.measure(f"{map}, {source.where}", source.model, map=map, tol=tol, **asked)
        for map, tol in (("block", _TOL), ("attention", 1e-3))
    }
    key = {name: value for name, value in asked.items() if name != "data"}
    (errors,) = study.values(
        f"errors, {source.where}", [key], lambda **_: _rounding_errors(source, asked)
    )
    paths = [_path(sigmas["block"], layer) for layer in layers]
    run = functools.cache(lambda: RoundedModel(source, asked))
    del key["layers"]
    done = study.values(
        f"rounded, {source.where}",
        [one | key for one in grid(path=paths, bits=_BITS, what=_WHAT)],
        lambda path, bits, what, **_: run().rounded(path, bits, what),
    )
    first, second = ("divergence", "loss") if "loss" in done[0] else ("hidden", "cosine")
    every = {
        name: {
            (bits, what): _transposed([r[name] for r in chosen(done, bits=bits, what=what)])
            for bits in _BITS
            for what in _WHAT
        }
        for name in (first, second, "local")
    }
    known = {
        (bits, what): _predictors_by_window(layers, sigmas, errors, bits, what) | {LOCAL: local}
        for (bits, what), local in every["local"].items()
    }
    return RoundedCase(
        source.where, WORDS[first], layers, known, every[first], WORDS[second], every[second]
    )


WORDS = {
    "hidden": "relative change of the last hidden state",
    "cosine": "1 − cosine of the mean tokens",
    "divergence": "KL divergence of the next token, nats",
    "loss": "change of the loss, nats",
}


def _transposed(layers: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(window) for window in zip(*layers, strict=True)]


def _path(rows: Rows, layer: int) -> str:
    found = next((row.module for row in rows if row.layer == layer and row.module), None)
    if found is None:
        raise InputError(f"Layer {layer} should be in a block of its own. Found none.")
    return found


def _rounding_errors(source: Source, asked: Record) -> Record:
    """Relative rounding errors, of the inputs by map, bits, layer and window, and of weights."""
    found: Record = {}
    for map in ("block", "attention"):
        for one in layers_of(source.model, map=map, dtype="float32", **asked):
            x = one.x.detach()
            for bits in _BITS:
                error = float((rounded(x, bits) - x).norm() / x.norm())
                found[f"{map}, {bits}, {one.layer}, {one.sample}"] = error
                if map == "block" and one.sample == 0:
                    block = source.model.model.get_submodule(one.module or "")
                    found[f"weights, {bits}, {one.layer}"] = rounding_error(block, bits)
    return {"errors": found}


def _predictors_by_window(
    layers: Sequence[int], sigmas: Mapping[str, Rows], errors: Record, bits: int, what: str
) -> dict[str, list[list[float]]]:
    """Every predictor, by window and layer."""
    found: dict[str, dict[tuple[int, int], float]] = {}
    for map, rows in sigmas.items():
        for row in rows:
            assert row.layer is not None
            name = (
                f"weights, {bits}, {row.layer}"
                if what == "weights"
                else f"{map}, {bits}, {row.layer}, {row.sample}"
            )
            error, place = errors["errors"][name], (row.sample, row.layer)
            relative = math.nan if row.relative is None else row.relative
            found.setdefault(f"relative sigma, {map}", {})[place] = relative
            found.setdefault(f"relative sigma · error, {map}", {})[place] = relative * error
            moved = (row.sigma or math.nan) * (row.input_norm or math.nan) * error
            found.setdefault(f"sigma ‖X‖ · error, {map}", {})[place] = moved
            if map == "block":
                found.setdefault(ERROR, {})[place] = error
                found.setdefault(INDEX, {})[place] = float(row.layer)
    windows = sorted({sample for sample, _ in found[INDEX]})
    return {
        name: [[values[w, layer] for layer in layers] for w in windows]
        for name, values in found.items()
    }


def correlations(known: list[list[float]], change: list[list[float]]) -> list[float]:
    """Spearman's rank correlation over layers, window by window; without those that have none."""
    pairs = zip(known, change, strict=True)
    return [rho for rho in (rank_correlation(x, y)[0] for x, y in pairs) if math.isfinite(rho)]


def holds(
    known: Mapping[str, list[list[float]]], change: list[list[float]], name: str
) -> tuple[bool, bool]:
    """Whether a predictor's correlation is above 0, and above that of each baseline.

    Each beyond the 95 % interval over windows. A baseline that is constant over layers says
    nothing, and is beaten by what is above 0.
    """
    mine = correlations(known[name], change)
    if len(mine) < 3 or not mean_interval(mine)[1] > 0:
        return False, False
    for baseline in BASELINES:
        other = correlations(known[baseline], change)
        if len(other) != len(mine):
            continue
        sign = math.copysign(1.0, fmean(other)) if baseline == INDEX else 1.0
        gaps = [a - sign * b for a, b in zip(mine, other, strict=True)]
        if not mean_interval(gaps)[1] > 0:
            return True, False
    return True, True


def _sigma_predictors(case: RoundedCase) -> list[str]:
    one = next(iter(case.known.values()))
    return [name for name in one if name not in (*BASELINES, LOCAL)]


def _condition(key: tuple[int, str]) -> str:
    return f"{key[0]}-bit {key[1]}"


def _of_rounding(study: Study, case: RoundedCase) -> None:
    _advice(study, case)
    study.claim(
        f"{case.where}: {case.measure}, largest block / smallest",
        "far above 1, if it matters which block is kept",
        "; ".join(f"{_condition(k)}: {_range_over_blocks(v)}" for k, v in case.change.items()),
    )
    for name in ("relative sigma, block", "relative sigma · error, block", *BASELINES):
        study.claim(
            f"{case.where}: {name}, rank correlation with that",
            "a baseline" if name in BASELINES else "near 1, if it is advice",
            "; ".join(
                f"{_condition(key)} {_mean_correlation(case.known[key][name], change)}"
                for key, change in case.change.items()
            ),
        )


def _advice(study: Study, case: RoundedCase) -> None:
    """Which predictors made of sigma are advice for this model on this text."""
    words, advice = [], []
    for name in _sigma_predictors(case):
        answers = [holds(case.known[key], change, name) for key, change in case.change.items()]
        above, better = (sum(one[i] for one in answers) for i in (0, 1))
        words.append(f"{name} {above}, {better}")
        advice += [name] * (better == len(answers))
    study.claim(
        f"{case.where}: is sigma advice? Of {len(case.change)} ways to round: in how many the "
        "correlation is above 0; in how many also above that of the error and of the index",
        f"{len(case.change)}, {len(case.change)}, if it is advice",
        f"{'; '.join(words)}. Advice: {', '.join(advice) or 'none of them'}",
    )


def _mean_correlation(known: list[list[float]], change: list[list[float]]) -> str:
    found = correlations(known, change)
    if not found:
        return "–"
    mean, low, high = (round(value, 2) + 0.0 for value in mean_interval(found))
    ends = f" [{max(low, -1.0):.2f}, {min(high, 1.0):.2f}]" if len(found) > 2 else ""
    return f"{mean:.2f}{ends}"


def _range_over_blocks(change: list[list[float]]) -> str:
    means = [fmean(layer) for layer in _transposed(change)]
    low, high = min(means), max(means)
    ratio = f"{number(high / low, 3)} times" if low > 0 else "–"
    return f"{ratio} ({number(high, 2)} at most)"


def _rounding_tables(study: Study, case: RoundedCase) -> None:
    names = [*_sigma_predictors(case), *BASELINES, LOCAL]
    for measure, change in ((case.measure, case.change), (case.second, case.other)):
        lines = [
            (name, *(_mean_correlation(case.known[key][name], own) for key, own in change.items()))
            for name in names
        ]
        title = f"rank correlation over {len(case.layers)} blocks with the {measure}"
        columns = ("what is known before", *map(_condition, change))
        study.table(f"{case.where}: {title}", lines, columns)
    lines = [
        (str(layer), *(average([window[i] for window in own]) for own in case.change.values()))
        for i, layer in enumerate(case.layers)
    ]
    columns = ("block", *map(_condition, case.change))
    study.table(f"{case.where}: {case.measure}, one block rounded", lines, columns)


def _draw_rounding(study: Study, cases: Sequence[RoundedCase]) -> None:
    """One line of panels a model: trained weights on the first text; the rest is in the tables."""
    panels = []
    shown: dict[str, RoundedCase] = {}
    for case in cases:
        shown.setdefault(case.where.split(",")[0], case)
    for case in shown.values():
        means = {key: [fmean(one) for one in _transposed(v)] for key, v in case.change.items()}
        lines = [
            Series(_condition(key), tuple(zip(case.layers, values, strict=True)))
            for key, values in means.items()
        ]
        panels.append(Panel(case.where, tuple(lines), "block", case.measure, log_x=False))
        for name in ("relative sigma, block", ERROR):
            dots, every = [], list[float]()
            for key, values in means.items():
                known = _over_mean([fmean(one) for one in _transposed(case.known[key][name])])
                points = tuple(zip(known, _over_mean(values), strict=True))
                dots.append(Series(_condition(key), points, "points"))
                every += known
            ends = min(every), max(every)
            line = Series("in proportion", tuple((x, x) for x in ends), "dashes")
            axes = f"{name}, over its mean", "change of the output, over its mean"
            panels.append(Panel(case.where, (*dots, line), *axes))
    study.draw("precision", "What rounding one block does, and what was known before", panels)


def _over_mean(values: Sequence[float]) -> list[float]:
    return [value / fmean(values) for value in values]


def decides(config: Any) -> bool:
    """Whether the next token is what a model is for."""
    return hasattr(config, "vocab_size") and config.model_type != "bert"


class RoundedModel:
    """A model on all windows at once, as it is and with one block rounded."""

    def __init__(self, source: Source, asked: Mapping[str, Any]) -> None:
        self.loaded = source.model
        items = inputs_of(
            source.model,
            source.asked.get("data"),
            lengths=asked.get("lengths"),
            samples=asked.get("samples"),
            windows="spread",
            special_tokens=True,
            images=source.asked.get("images"),
        )
        arguments = [dict(one.arguments) for one in items]
        self.arguments = {
            name: torch.cat([one[name] for one in arguments])
            if isinstance(value, Tensor)
            else value
            for name, value in arguments[0].items()
        }
        self.ids = self.arguments.get("input_ids") if decides(source.model.config) else None
        self.blocks: dict[str, Tensor] = {}
        self.before = self._hidden()
        self.log_p = None if self.ids is None else next_token(self.loaded, self.before)

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        """The last hidden state."""
        model: Any = self.loaded.model
        return model(**self.arguments).last_hidden_state

    def _block(self, path: str) -> tuple[Tensor, Tensor]:
        """The last hidden state, and the output of one block on the way."""
        block, held = self.loaded.model.get_submodule(path), []

        def keep(module: nn.Module, given: Any, output: Any) -> None:
            held.append(output if isinstance(output, Tensor) else output[0])

        hook = block.register_forward_hook(keep)
        try:
            return self._hidden(), held[0]
        finally:
            hook.remove()

    @torch.no_grad()
    def rounded(self, path: str, bits: int, what: Rounds) -> Record:
        """What rounding the weights or inputs of one block does, by window.

        ``local`` and ``hidden``: relative changes of the block's output and of the last hidden
        state. Of encoders ``cosine``: 1 less the cosine of mean tokens. Of decoders
        ``divergence``: of the next token, mean over places; ``loss``: its change.
        """
        if path not in self.blocks:
            self.blocks = {path: self._block(path)[1]}
        own = self.blocks[path]
        with rounding(self.loaded.model.get_submodule(path), what, bits):
            hidden, block = self._block(path)
        found = {
            "local": relative_change(block, own),
            "hidden": relative_change(hidden, self.before),
        }
        if self.log_p is None or self.ids is None:
            means = self.before.double().mean(1), hidden.double().mean(1)
            cosine = torch.cosine_similarity(*means)
            return found | {"cosine": (1 - cosine).tolist()}
        return found | next_token_changes(self.log_p, next_token(self.loaded, hidden), self.ids)


def next_token(loaded: LoadedModel, hidden: Tensor) -> Tensor:
    """Logarithms of a decoder's probabilities by its own embedding table, from hidden states."""
    model: Any = loaded.model
    return (hidden @ model.get_input_embeddings().weight.detach().T).log_softmax(-1)


def next_token_changes(log_p: Tensor, log_q: Tensor, ids: Tensor) -> Record:
    """By window: KL divergence of the next token, mean over places, and change of the loss."""
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)
    lost = _loss(log_q, ids) - _loss(log_p, ids)
    return {"divergence": divergence.tolist(), "loss": lost.tolist()}


def relative_change(after: Tensor, before: Tensor) -> list[float]:
    """``‖after − before‖_F / ‖before‖_F``, by window."""
    change = (after - before).flatten(1).norm(dim=1) / before.flatten(1).norm(dim=1)
    return change.tolist()


def _loss(log_p: Tensor, ids: Tensor) -> Tensor:
    """Mean surprise of every window's next tokens."""
    after = ids[:, 1:, None].expand(len(log_p), -1, -1)
    return -log_p[:, :-1].gather(-1, after).mean((1, 2))
