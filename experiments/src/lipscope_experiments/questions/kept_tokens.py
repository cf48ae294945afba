"""Which keys and values must stay: does sigma's share of a token say what losing it costs?"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lipscope.charts import Panel
from lipscope.models import LoadedModel
from lipscope_experiments.experiment import Source, Study, batch_of, experiment, grid, layers_of
from lipscope_experiments.findings import Record, average, line, middle
from lipscope_experiments.frozen import column_sizes
from lipscope_experiments.joint_test import flips, ranks, shown, verdict
from lipscope_experiments.questions.precision import WORDS, decides, output_changes

Texts = Sequence[Sequence[Record]]
"""Windows, text by text."""
_CONTEXT, _LATER = 64, 32  # tokens whose keys and values are changed, and those that read them
_BUDGETS = (4, 8, 16, 32)
_SINKS, _ROWS = 4, 8
_BATCH = 32
_TREATMENTS = {"evicted": 0, "2 bits": 2, "4 bits": 4}
_ALONE = ("evicted", "2 bits")  # treatments of one token at a time, and those of the figure
PLACE, NORM, RECEIVED = "position", "norm of the stream", "attention received"
LATE = f"attention of the last {_ROWS} rows"
SHARE, COLUMN = "sigma's share", "frozen column"
BASELINES = (PLACE, NORM, RECEIVED, LATE)
TESTED = (SHARE, COLUMN)
SCORES = (*BASELINES, *TESTED)
FIRST, LAST, RANDOM = "first k", "last k", "random"
STREAM = f"first {_SINKS}, then last"
_DRAWN = (STREAM, RANDOM, *BASELINES[1:], *TESTED)
_POLICIES = (FIRST, LAST, *_DRAWN)
PLAN = (
    "Question: does what sigma says of a token predict what is lost when its key and value go, "
    "or are rounded, beside the attention that it receives and its position? And is it a better "
    "guide to which tokens to keep?",
    f"Windows that share no text. Decoders read {_CONTEXT} tokens; the {_LATER} after them read "
    "the keys and values of those, at all layers, without the evicted ones, or rounded: an even "
    "grid for each token and head from its smallest to its largest entry. Encoders read "
    f"{_CONTEXT} tokens, whose every row does without them. Cost: of decoders the change of the "
    "loss of the later tokens, and the KL divergence of the next token; of encoders 1 − cosine of "
    "the mean token, and the relative change of the last hidden state.",
    "Scores, known before the later tokens, each a mean over layers of a share of all tokens. "
    f"Baselines: {', '.join(BASELINES)} (later positions are expected to cost more, and what has "
    f"a larger norm or receives more). Tested: {SHARE} of |v|², v the top right singular vector "
    f"of a layer's attention; {COLUMN}, ‖C_s‖_F² of the token's column at frozen attention.",
    "First statistic: Spearman's correlation over the tokens of a window of a score with the cost "
    f"of the token alone, {' or '.join(_ALONE)}; mean over the windows of a text, then over texts. "
    "Also given the four baselines: between what is left of ranks after their linear fit. Units "
    "are texts: their signs are flipped in all ways, for all scores, costs and treatments of a "
    "model at once (the largest mean over root mean square counts). A correlation of the other "
    "sign counts as found, and is printed negative.",
    f"{SHARE.capitalize()} is refuted as a predictor where its correlation, its gap to any "
    "baseline, or its correlation given the baselines is not above 0 at joint p < 0.05.",
    f"Second statistic: mean cost over budgets of {', '.join(map(str, _BUDGETS))} tokens kept. "
    f"Policies: {FIRST}; {LAST}; {STREAM} (StreamingLLM); at random; and by each score. In "
    "decoders half of the budget of scores and of random is the last tokens, as heavy hitters are "
    "kept. Gaps of each tested score to every other policy, tested in the same way over all "
    f"treatments: {SHARE} is refuted as a guide where one of them is not above 0.",
)


@experiment("questions/kept-tokens", models=("minilm", "smollm2"))
def kept_tokens(study: Study) -> None:
    """Which tokens must stay? Keys and values evicted, or rounded."""
    study.plan(*PLAN)
    by_model: dict[str, list[list[Record]]] = {}
    for source in study.sources():
        by_model.setdefault(source.model.name, []).append(_windows(study, source))
    panels: list[Panel] = []
    for name, texts in by_model.items():
        _of_tokens(study, name, texts)
        panels += _of_budgets(study, name, texts)
    study.draw("kept-tokens", "What keeping some tokens costs, mean over texts", panels, columns=2)
    study.remark(
        "Sigma to 1 %. A token goes at all layers and heads at once; keys are rounded as they are "
        "cached, after rotation. Tokens kept have all bits; the grid's two ends, which take room "
        "too, are not counted.",
        "Two windows of a text for encoders, one for decoders. Intervals: 95 %, Student's over "
        "texts. Of the gaps in costs and correlations the joint tests decide, not these.",
        "What it does not show: longer contexts, where more is evicted; a score of each head or "
        "layer by itself; quantisers that group channels; larger models.",
    )


def _correlations(w: Record, outcome: str, treatment: str) -> dict[str, float]:
    """What is said of each score against the costs of single tokens of a window."""
    known = ranks(np.transpose([w["scores"][name] for name in SCORES]))
    cost = ranks(np.transpose([w["costs"][treatment]["alone"][outcome]]))
    given = known[:, : len(BASELINES)]
    rho = dict(zip(SCORES, (known.T @ cost).flatten().tolist(), strict=True))
    left = (_left(known, given).T @ _left(cost, given)).flatten().tolist()
    rest = dict(zip(SCORES, left, strict=True))
    said = dict(rho)
    for name in TESTED:
        said[f"{name}, given the baselines"] = rest[name]
        said |= {f"{name}, less {b}": rho[name] - rho[b] for b in BASELINES}
    return said


def _left(columns: Tensor, given: Tensor) -> Tensor:
    """What a linear fit on given columns leaves, of unit length."""
    left = columns - given @ torch.linalg.lstsq(given, columns, driver="gelsd").solution
    return left / left.norm(dim=0).clamp_min(1e-12)


def _windows(study: Study, source: Source) -> list[Record]:
    """Windows of a text with scores of their tokens, and costs by treatment, policy, outcome."""
    loaded, count = source.model, source.depth
    layers = [*range(0, count, max(count // study.pick(2, 6), 1))]
    later = _LATER if decides(loaded) else 0
    ids = batch_of(loaded, **source.asking(_CONTEXT + later, 2))["input_ids"]
    ids = ids[: study.pick(1, 1 if later else 2)]  # a decoder's take five times as long
    part = f"sigma, {source.where}"
    rows = study.measure(part, loaded, ids[:, :_CONTEXT], layers=layers, tol=1e-2)
    layer_of = {row.id: row.sample for row in rows}
    shares = torch.zeros(len(ids), _CONTEXT, dtype=torch.float64)
    for token in rows.tokens:
        shares[layer_of[token.id], token.index] += (token.share_in or 0.0) / len(layers)
    return study.values(
        f"kept, {source.where}",
        grid(model=[loaded.name], text=[source.text.sha256], window=range(len(ids))),
        lambda window, **_: _window(loaded, ids[window], layers, shares[window]),
    )


def _outcomes(texts: Texts) -> tuple[str, str]:
    """What counts as cost, and a second measure of it."""
    known = texts[0][0]["costs"]["evicted"][FIRST]
    return ("loss", "divergence") if "loss" in known else ("cosine", "hidden")


def _of_tokens(study: Study, name: str, texts: Texts) -> None:
    """The costs of single tokens, and what goes with them."""
    pairs = [*itertools.product(_outcomes(texts), _ALONE)]
    said = {pair: [[_correlations(w, *pair) for w in text] for text in texts] for pair in pairs}
    words = [*said[pairs[0]][0][0]]
    levels = flips(
        {
            (*pair, one): [fmean(w[one] for w in text) for text in some]
            for pair, some in said.items()
            for one in words
        }
    )
    for outcome, treatment in pairs:
        mine = {one: levels[outcome, treatment, one] for one in words if one.startswith(SHARE)}
        lost = [f"{one} {shown(at)}" for one, at in mine.items() if at[0] <= 0 or at[1] >= 0.05]
        costs = [w["costs"][treatment]["alone"][outcome] for text in texts for w in text]
        study.claim(
            f"{name}: {SHARE} with the {WORDS[outcome]}, one token {treatment}",
            "above 0, also given the baselines, and above each of them, joint p < 0.05",
            f"{shown(mine[SHARE])}. " + (f"Refuted: {'; '.join(lost)}" if lost else "Not refuted"),
        )
        study.claim(
            f"{name}: {WORDS[outcome]}, the first token {treatment}, and the costliest other",
            "the first one, if it is a sink",
            f"{middle((one[0] for one in costs), 4)}; {middle((max(one[1:]) for one in costs), 4)}",
        )
    for outcome in _outcomes(texts):
        lines = [(one, *(shown(levels[outcome, t, one]) for t in _ALONE)) for one in words]
        columns = ("rank correlation over tokens", *(f"{t} alone" for t in _ALONE))
        study.table(f"{name}: {WORDS[outcome]}, one token changed", lines, columns)


def _of_budgets(study: Study, name: str, texts: Texts) -> list[Panel]:
    """What keeping some tokens costs, policy by policy."""
    (outcome, _), panels = _outcomes(texts), []
    costs = {  # by text and budget
        (t, p): np.array([[w["costs"][t][p][outcome] for w in text] for text in texts]).mean(1)
        for t, p in itertools.product(_TREATMENTS, _POLICIES)
    }
    levels = flips(
        {
            (t, one, other): (costs[t, other] - costs[t, one]).mean(1).tolist()
            for t, one, other in itertools.product(_TREATMENTS, TESTED, _POLICIES)
            if one != other
        }
    )
    for t, bits in _TREATMENTS.items():
        for one in TESTED:
            study.claim(
                f"{name}: tokens kept by {one}, the others {t}: {WORDS[outcome]}, saved against",
                "above 0 against each, joint p < 0.05",
                verdict({p: levels[t, one, p] for p in _POLICIES if p != one}, 4),
            )
        size = " kept" if not bits else " kept, {:.3g} bits"
        kept = (f"{k}{size}".format(bits + (16 - bits) * k / _CONTEXT) for k in _BUDGETS)
        lines = [(p, *map(average, costs[t, p].T.tolist())) for p in _POLICIES]
        study.table(f"{name}: {WORDS[outcome]}, others {t}", lines, ("policy", *kept))
        curves = [
            line(p, _BUDGETS, costs[t, p].mean(0).tolist(), "dashes" if p == RANDOM else "line")
            for p in _DRAWN
        ]
        axes = f"tokens kept of {_CONTEXT}", WORDS[outcome]
        if t in _ALONE:
            panels.append(Panel(f"{name}, others {t}", curves, *axes, log_y=False))
    return panels


def _window(loaded: LoadedModel, ids: Tensor, layers: Sequence[int], share: Tensor) -> Record:
    """Scores of the tokens of one window, and what losing them costs."""
    scores = _scores(loaded, ids[None, :_CONTEXT], layers) | {SHARE: share}
    with cached_run(loaded, ids) as cost:
        causal = len(ids) > _CONTEXT
        kept = {
            policy: torch.stack([tokens_kept(policy, scores, k, causal) for k in _BUDGETS])
            for policy in _POLICIES
        }
        costs = {
            name: {p: cost(one, bits) for p, one in kept.items()}
            for name, bits in _TREATMENTS.items()
        }
        for name in _ALONE:
            alone = ~torch.eye(_CONTEXT, dtype=torch.bool)
            costs[name]["alone"] = cost(alone, _TREATMENTS[name])
    return {"scores": {name: one.tolist() for name, one in scores.items()}, "costs": costs}


def _scores(loaded: LoadedModel, ids: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(int(ids.sum()))
    with torch.no_grad():
        streams = loaded.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    norms = torch.stack([streams[layer][0].norm(dim=-1) for layer in layers])
    held: dict[str, list[Tensor]] = {NORM: [*norms]}
    for one in layers_of(loaded, ids, layers=layers, dtype="float32"):
        q, k, _ = one.attention.project(one.x)
        p = one.attention.weights(q, k).mean(0)
        held.setdefault(RECEIVED, []).append(p.mean(0))
        held.setdefault(LATE, []).append(p[-_ROWS:].mean(0))
        held.setdefault(COLUMN, []).append(column_sizes(one.attention, one.x).square())
    means = {name: torch.stack([v / v.sum() for v in some]).mean(0) for name, some in held.items()}
    place = torch.arange(_CONTEXT, dtype=torch.float64)
    return {PLACE: place, RANDOM: torch.rand(_CONTEXT, generator=gen)} | means


def tokens_kept(policy: str, scores: Mapping[str, Tensor], k: int, causal: bool) -> Tensor:
    """The tokens that a policy keeps, as a mask."""
    place = scores[PLACE]
    score = {FIRST: -place, LAST: place, STREAM: place}.get(policy)
    if score is None:
        score = scores[policy].masked_fill(place >= len(place) - causal * (k // 2), torch.inf)
    if policy == STREAM:
        score = score.masked_fill(place < _SINKS, torch.inf)
    return torch.zeros(len(place), dtype=torch.bool).scatter(0, score.topk(k).indices, True)


def on_grid(x: Tensor, bits: int) -> Tensor:
    """Every row on ``2^bits`` evenly spaced values from its smallest to its largest entry.

    Errors: at most half a step, ``(max − min) / (2^bits − 1) / 2``.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(x.dtype).tiny)
    return low + ((x - low) / step).round() * step


@contextlib.contextmanager
def cached_run(loaded: LoadedModel, ids: Tensor) -> Iterator[Callable[[Tensor, int], Record]]:
    """A model with attention of its own, which has read the context of a window.

    What it costs, by outcome and mask ``(masks, context)`` of tokens that
    stay as they are, that keys and values of the others are rounded, or evicted where bits are 0.
    """
    from transformers import AttentionInterface

    model: Any = loaded.model
    usual, later = model.config._attn_implementation, len(ids) - _CONTEXT
    places = torch.arange(len(ids))[None, -later:]
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def hidden(kept: Tensor, bits: int) -> Tensor:
        at = places.expand(len(kept), -1)
        return model(
            ids[at], position_ids=at, held=held, kept=kept, bits=bits, use_cache=False
        ).last_hidden_state

    def cost(kept: Tensor, bits: int) -> Record:
        found = defaultdict[str, list[float]](list)
        for some in kept.split(_BATCH):
            changes = output_changes(loaded, before, hidden(some, bits), ids[places])
            for name, values in changes.items():
                found[name] += values
        return found

    AttentionInterface.register("kept_tokens", _attend)
    model.set_attn_implementation("kept_tokens")
    try:
        with torch.no_grad():
            context = ids[None, :_CONTEXT]
            model(context, held=held, use_cache=False)
            before = hidden(torch.ones(1, _CONTEXT, dtype=torch.bool), 0)
            yield cost
    finally:
        model.set_attn_implementation(usual)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **given: Any
) -> tuple[Tensor, None]:
    """Attention that holds keys and values of a decoder's context, and reads them changed."""
    held, kept, bits = given["held"], given.get("kept"), given.get("bits", 0)
    if kept is None:
        held[module.layer_idx] = key, value
        kept = torch.ones(1, key.shape[2], dtype=torch.bool)
    elif module.is_causal:
        context = (one.expand(len(query), -1, -1, -1) for one in held[module.layer_idx])
        key, value = (torch.cat([one, x], 2) for one, x in zip(context, (key, value), strict=True))
    rows, columns = query.shape[2], key.shape[2]
    kept = pad(kept, (0, columns - kept.shape[1]), value=True)[:, None]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    seen = seen.tril(columns - rows if module.is_causal else columns)
    if bits:
        key, value = (torch.where(kept[..., None], x, on_grid(x, bits)) for x in (key, value))
    else:
        seen = seen & kept[:, :, None]
    read = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=given["scaling"], enable_gqa=True
    )
    return read.transpose(1, 2), None
