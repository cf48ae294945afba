"""Character models with capped weights: accuracy, three bounds, an attack and sigma on text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

from lipscope import MultiheadAttention, SmoothTransformer, linearise
from lipscope.charts import Panel, Series
from lipscope.linalg import max_token_norm, start_named
from lipscope.pages import number
from lipscope.records import stable_id
from lipscope_experiments.data import Corpus, corpus
from lipscope_experiments.experiment import Study, experiment, grid
from lipscope_experiments.findings import Record, average, chosen, geometric, grouped, line
from lipscope_experiments.training import SHARPER, norm_of, seeded, train

CAPS = (1.0, 1.25, 1.5, 2.0, None)
VARIANTS: dict[str, dict[str, Any]] = {
    "dot product": {},
    "L2, tied": {"variant": "l2"},
    "cosine": {"variant": "scaled-cosine", "temperature": 4.0, "gain": 4.0, "eps": 16.0},
}
_GELU_SLOPE = 1.1289
_SEEDS = 3
_BLOCKS = 20  # of the held-out text, for the interval
_READINGS = 4  # along training
_WINDOWS = 2  # of text, at which sigma is measured


# --- bounds, and values below them, of the largest root mean square of a token


def bound_of(model: SmoothTransformer) -> float:
    """The model's own bound."""
    return _as_rms(model) * float(model.bound.detach())


def formula(model: SmoothTransformer, *, right: bool) -> float:
    """The bound of phess2/lipschitz-transformers at commit 9173461, or the same put right.

    From the norms of whole matrices. ``right``: scores are divided by the width of a head, so that
    their slope has a factor H; heads add up, to at most √H of one; the slope of GELU, which the
    network is divided by, is divided out once.
    """
    a = bound = 1.0  # largest root mean square of a token; the bound so far
    for one in model.sums:
        if isinstance(one.part, MultiheadAttention):
            layer: Any = one.part.attention
            q, k, v, o = map(_rms_norm, (layer.query, layer.key, layer.value, layer.output))
            heads = layer.num_heads if right else 1
            grown = math.sqrt(heads) * o * v
            slope = grown * (1 + 2 * heads * a**2 * q * k)
        else:
            inner, _, outer = one.part
            grown = _rms_norm(inner.weight) * _rms_norm(outer.weight)
            slope = _GELU_SLOPE * grown if right else grown
        bound *= 1 - one.alpha + one.alpha * slope
        a *= 1 - one.alpha + one.alpha * grown
    return bound * _rms_norm(model.head.weight)


def _rms_norm(weight: Tensor) -> float:
    rows, columns = weight.shape
    return norm_of(weight) * math.sqrt(columns / rows)


def _as_rms(model: SmoothTransformer) -> float:
    """What makes of a bound by norms of tokens one by their root mean squares."""
    outputs, width = model.head.weight.shape
    return math.sqrt(width / outputs)


def sigma_at(model: SmoothTransformer, tokens: Tensor) -> float:
    """How far a row of scores moves when tokens move, at one input: a lower value."""
    op = linearise(lambda x: model.scores(x[None])[0], tokens)
    return _as_rms(model) * max_token_norm(op, dense=0).lower


def largest_found(model: SmoothTransformer, num_tokens: int, starts: int, steps: int) -> float:
    """The largest `sigma_at` that an ascent in the tokens finds, all of them in the ball.

    Inputs and moves climb together by Adam, from normal inputs; the best one is measured anew.
    """
    gen = start_named(f"{starts} starts")
    width = model.head.in_features
    x, e = torch.randn(2, starts, num_tokens, width, generator=gen, dtype=torch.float64).float()
    x, e = x.requires_grad_(), e.requires_grad_()
    adam, most, best = torch.optim.Adam([x, e], lr=0.1), -math.inf, x
    for step in range(steps):
        adam.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        move = e / e.norm(dim=-1, keepdim=True)
        inside = 0.999 * model.clip(x)
        moved = torch.func.jvp(model.scores, (inside,), (move,))[1]
        found = moved.reshape(starts, -1, moved.shape[-1]).norm(dim=-1).amax(-1)
        if float(found.detach().max()) > most:
            most, best = float(found.detach().max()), inside[int(found.argmax())].detach()
        x.grad, e.grad = torch.autograd.grad(-found.log().sum(), (x, e))
        adam.step()
    return sigma_at(model.double(), best.double())


def bounded(model: SmoothTransformer, data: Corpus, *ascent: int) -> Record:
    """Bounds, the largest sigma found by an ascent of these sizes, and sigmas on text."""
    attack, dots = largest_found(model, *ascent), model.sizes["variant"] == "dot-product"
    model = model.double()
    texts = [model.tokens(one[None, :-1])[0].detach() for one in data.held[:_WINDOWS]]
    return {
        "coded": formula(model, right=False) if dots else None,
        "right": formula(model, right=True) if dots else None,
        "ours": bound_of(model),
        "attack": attack,
        "on_text": [sigma_at(model, one) for one in texts],
    }


# --- training


def trained(run: Record, data: Corpus) -> tuple[SmoothTransformer, Record]:
    """A model, what it predicts of the held-out text by blocks, and bound and sigma on the way."""
    gen, length = torch.Generator().manual_seed(run["seed"]), run["length"]
    with seeded(run["seed"]):
        model = SmoothTransformer(
            **{name: run[name] for name in ("width", "heads", "depth", "length", "cap")},
            **VARIANTS[run["variant"]],
            outputs=data.characters,
            vocabulary=data.characters,
            causal=True,
            capped="after-step",
        )
    curve = list[list[float]]()

    def loss() -> Tensor:
        windows = data.draw(run["batch"], length, gen)
        return _nats(model(windows[:, :-1]), windows)

    for step, _ in train(model, loss, run["steps"]):
        drawn = run["seed"] == 0 and run["cap"] is None
        if drawn and step % (run["steps"] // _READINGS) == 0:
            with torch.no_grad():
                tokens = model.tokens(data.held[:1, :-1])[0, : length // 4]
            curve.append([step, bound_of(model), sigma_at(model, tokens)])
    model.eval()
    return model, held_out(model, data, length) | {"curve": curve}


def _nats(scores: Tensor, windows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(SHARPER * scores.mT, windows[:, 1:])


@torch.no_grad()
def held_out(model: SmoothTransformer, data: Corpus, length: int) -> Record:
    """Accuracy and bits per character of the held-out text, in windows side by side, by block."""
    windows = data.rest[: len(data.rest) // length * length].view(-1, length)
    bits, hits = [], []
    for block in windows.tensor_split(_BLOCKS):
        scores = model(block[:, :-1])
        bits.append(float(_nats(scores, block)) / math.log(2))
        hits.append(float((scores.argmax(-1) == block[:, 1:]).double().mean()))
    return {"accuracy": hits, "bits": bits}


@experiment("newhouse2025/shakespeare")
def shakespeare(study: Study) -> None:
    """Training Transformers with Enforced Lipschitz Constants: characters of Shakespeare."""
    _compare(study, {"steps": 600, "width": 64, "length": 64, "batch": 16}, _SEEDS)


@experiment("newhouse2025/shakespeare-256")
def shakespeare_256(study: Study) -> None:
    """Training Transformers with Enforced Lipschitz Constants: the width of its code.

    The same at width 256, for as many steps as fit in two hours of two cores.
    """
    _compare(study, {"steps": 320, "width": 256, "length": 256, "batch": 16}, 1)


def _compare(study: Study, whole: Record, seeds: int) -> None:
    size = study.pick({"steps": 300, "width": 32, "length": 32, "batch": 8}, whole)
    data = corpus(study.texts[-1], size["length"])
    size |= {"heads": 4, "depth": 3, "text": data.text.name, "sha256": data.text.sha256}
    ascent = {"num_tokens": study.pick(8, 16), "starts": 4, "steps_of_ascent": study.pick(40, 100)}
    runs = grid(seed=range(study.pick(1, seeds)), cap=CAPS, variant=VARIANTS)
    runs = [one | size for one in runs]

    def weights(run: Record) -> Any:
        return study.folder.path / f"{stable_id(run)}.safetensors"

    def one_run(**run: Any) -> Record:
        model, found = trained(run, data)
        model.save(weights(run))
        return found

    def one_bound(num_tokens: int, starts: int, steps_of_ascent: int, **run: Any) -> Record:
        model = SmoothTransformer.load(weights(run))
        return bounded(model, data, num_tokens, starts, steps_of_ascent)

    learnt = study.values("runs", runs, one_run)
    bounds = study.values("bounds", [one | ascent for one in runs], one_bound)
    found = [one | other for one, other in zip(bounds, learnt, strict=True)]
    for one in found:  # of networks of the same seed that are as accurate, or more
        same, least = chosen(found, seed=one["seed"]), fmean(one["accuracy"])
        one["least"] = min(r["ours"] for r in same if fmean(r["accuracy"]) >= least)
    _say(study, data, found)
    _draw(study, found)


def _name_of(cap: float | None) -> str:
    return "none" if cap is None else f"{cap:g}"


def _say(study: Study, data: Corpus, found: Sequence[Record]) -> None:
    """How the bounds compare, and what every setting learnt."""
    hits, bits = data.by_pairs
    about = "accuracy and bits per character of a table of pairs of characters"
    study.claim(about, "what a model that reads one character can reach", f"{hits:.3f}, {bits:.2f}")
    capped = [one for one in found if one["cap"] is not None]
    dots = chosen(capped, variant="dot product")
    study.claim(
        "how many times the least of our bounds, of all networks that are at least as accurate, is "
        "below the formula as coded",
        "below 1: it is above",
        _by_cap(chosen(found, variant="dot product"), "coded", "least"),
    )
    study.claim(
        "how many times our bound is smaller than the formula as coded: same dot-product networks, "
        "so equal accuracy",
        "below 1: ours is larger; ours is a theorem",
        _by_cap(dots, "coded", "ours"),
    )
    about = "how many times it is smaller than the formula put right"
    study.claim(about, "both are true", _by_cap(dots, "right", "ours"))
    for variant in VARIANTS:
        about = f"our bound over the largest sigma found by attack, {variant}"
        study.claim(about, "at least 1", _by_cap(chosen(capped, variant=variant), "ours", "attack"))
    about = "largest sigma found over the bound as coded"
    study.claim(about, "at most 1, if the formula were true", _by_cap(dots, "attack", "coded"))
    means = {"as coded": "coded", "heads right": "right", "our bound": "ours", "attack": "attack"}
    lines = [
        (
            *(variant, _name_of(cap), _of_blocks(mine, "accuracy"), _of_blocks(mine, "bits")),
            *(_mean(mine, what) for what in means.values()),
            geometric([s for one in mine for s in one["on_text"]]),
        )
        for (variant, cap), mine in grouped(found, "variant", "cap")
    ]
    columns = ("attention", "w_max", "accuracy", "bits per character", *means, "sigma on text")
    title = "What was learnt, and what can move (root mean squares, largest over tokens)"
    study.table(title, lines, columns)
    one = found[0]
    study.remark(
        f"{data.text.name}: the last tenth, {len(data.rest):,} characters, is held out and read "
        f"whole, in windows of {one['length']} side by side; intervals are over {_BLOCKS} blocks "
        "of it, of means over seeds.",
        f"Here: width {one['width']}, {one['depth']} blocks, {one['heads']} heads, windows of "
        f"{one['length']}, {one['batch']} a step, {one['steps']:,} steps, "
        f"seeds: {len({r['seed'] for r in found})}; Muon at 0.1 and AdamW at 0.01, linear decay; "
        "caps after each step, on all singular values. Positions are learnt, not rotary. In the "
        f"loss, and in bits per character, scores are multiplied by {SHARPER:g}: capped scores are "
        "small, and accuracy and ratios of bounds do not change.",
        "The code's own size is width 256 and 2,000 steps of 64 windows of 256, some 4.5 s of one "
        "core each: two and a half hours a network. 60 % accuracy (abstract) is of that size."
        + (" Not run: the full size of this command." if study.quick else ""),
        "Bound as coded: phess2/lipschitz-transformers, commit 9173461, from norms of whole "
        "matrices. Its parts as we read them have no factor for heads, whose scores are divided by "
        "the head's width, and divide the slope of GELU out twice. Heads right: the same formula "
        "with these factors. The paper's printed proof was not read: it may define norms of heads "
        "in another way.",
        "Bounds and sigmas are of the map from token vectors with positions, before they are "
        "brought into the ball of root mean square 1, to the scores of a token, in the largest "
        "root mean square over tokens. Sigmas are lower values (alternating maximisation); the "
        f"attack climbs {one['starts']} inputs of {one['num_tokens']} tokens for "
        f"{one['steps_of_ascent']} steps. Sigma on text: {_WINDOWS} held-out windows a model.",
    )


def _by_cap(found: Sequence[Record], above: str, below: str) -> str:
    """The geometric mean of a ratio at every cap, with smallest and largest of several seeds."""
    said = []
    for cap, mine in grouped(found, "cap"):
        values = [one[above] / one[below] for one in mine]
        mean, low, high = (number(of(values), 3) for of in (geometric_mean, min, max))
        said.append(f"w_max {_name_of(cap)}: {mean}" + f" ({low} to {high})" * (len(values) > 1))
    return "; ".join(said)


def _of_blocks(found: Sequence[Record], what: str) -> str:
    """The mean over seeds of every block of text, with its interval over blocks."""
    return average([fmean(each) for each in zip(*(one[what] for one in found), strict=True)])


def _mean(found: Sequence[Record], what: str) -> str:
    values = [one[what] for one in found]
    return "–" if None in values else number(geometric_mean(values), 3)


def _draw(study: Study, found: Sequence[Record]) -> None:
    """Accuracy against bound, and bound and sigma along training."""
    shown = [(variant, variant, "ours") for variant in VARIANTS]
    shown.append(("dot product, as coded", "dot product", "coded"))
    series = []
    for name, variant, what in shown:
        caps = [mine for _, mine in grouped(chosen(found, variant=variant), "cap")]
        bounds = [geometric_mean([one[what] for one in mine]) for mine in caps]
        hits = [100 * fmean([h for one in mine for h in one["accuracy"]]) for mine in caps]
        series.append(line(name, bounds, hits))
    axes = {"x": "bound, root mean squares", "y": "accuracy, %", "log_y": False}
    panels = [Panel("Accuracy against bound", series, **axes)]
    for index, name in enumerate(("Our bound", "Sigma on text"), 1):
        along = [
            Series(one["variant"], [(read[0], read[index]) for read in one["curve"]])
            for one in chosen(found, seed=0, cap=None)
        ]
        title = f"{name} along training, no cap"
        panels.append(Panel(title, along, x="step", y="root mean squares", log_x=False))
    study.draw("shakespeare", "Accuracy against bound; bound and sigma along training", panels)
