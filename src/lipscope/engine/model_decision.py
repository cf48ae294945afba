"""The decision of a model at an input: its margin, and certified radii for moves of tokens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from rich.text import Text
from torch import Tensor, nn

from lipscope.attention import Attention
from lipscope.certificates import (
    DecisionBall,
    NetworkCertificate,
    certify_network,
    check_memory,
    in_double,
)
from lipscope.charts import visible
from lipscope.display import Piece, Shown, pieces, rounded_down
from lipscope.engine.answer import finite
from lipscope.engine.checks import argument, is_whole, items, one_of, whole_number
from lipscope.engine.classifier import By, Classifier, classifier_of_texts, nearest_by_angle
from lipscope.engine.direction_words import Texts, body_of, counted, mean_outputs, names_of
from lipscope.engine.ready_model import ReadyModel
from lipscope.engine.runs import AnyData, LocalRun, is_text, of_one_window
from lipscope.engine.session import MapAtInput
from lipscope.engine.spec import OF_QUESTION, Verb
from lipscope.errors import InputError, shown
from lipscope.models import (
    Network,
    Sample,
    checked_data,
    eval_mode,
    first_tensor,
    implementation_for,
    inputs_of_ids,
    layer_network,
    prepared,
    read_network,
    run,
    to_device,
    whole_text,
    with_own_head,
)
from lipscope.pages import empty_table, number
from lipscope.records import Bound, stable_id
from lipscope.sources import default_text
from lipscope.theorems import DERIVED, tokens_in_double

DecisionMap = Literal["model", "attention"]
BALLS: tuple[DecisionBall, ...] = ("joint", "token", "each")
_OF_RADII: dict[str, Any] = {"cite": DERIVED, "kind": "radius", "scope": "ball"}
_METRICS = {"joint": "frobenius", "token": "frobenius", "each": "max-token"}
_POOLS = ("mean", "first", "last")
_INDEX = 10**6  # larger than any token index
_BEGINNING = 1000  # number of characters used of the default text
_LONGEST = 64  # maximum number of tokens of a text read whole
_SAME = 1e-3  # relative tolerance for a token's own embedding, in the model's own precision
_BLOCK = 2**22  # number of embedding entries processed at a time


@dataclass(frozen=True, kw_only=True, repr=False)
class DecisionCertificate(NetworkCertificate):
    """The decision of a model, and the radius within which no move of its tokens changes it.

    Attributes:
        model: Name of the model.
        by: Description of how the decision is made.
        words: The tokens that may move.
        nearest: Smallest distance from the embedding of a moving token to that of another word;
            None if the model reads no token ids, or if the stream of a later layer moves.
        words_within: Number of embeddings of other words within the radius of a moving token.
        id: Id of its row of sigma in a run folder, or None.
        question: Digest of the decision rule there (texts or read-out, pool, layer), or None.
        sample: Index of the window or entry.
        at_layer: The attention layer before which tokens move.
        map: ``model``, or ``attention``: that layer alone, with its output pooled.
    """

    model: str
    by: str
    map: DecisionMap = "model"
    words: tuple[str, ...]
    nearest: float | None = None
    words_within: int | None = None
    id: str | None = None
    question: str | None = None
    sample: int = 0
    at_layer: int = 0

    @property
    def violated(self) -> bool:
        """Whether an attack changed the decision within the radius."""
        return self.attack is not None and 0 < self.attack < self.radius

    @property
    def moves(self) -> str:
        """Which tokens move, in words; of a range both ends do."""
        first, last, count = self.tokens[0], self.tokens[-1], len(self.tokens)
        if count == 1:
            return f"token {first} moves"
        some = f"{first}:{last}" if last - first + 1 == count else str(list(self.tokens))[1:-1]
        how = "each move" if self.ball == "each" else "together move"
        return f"tokens {some} {how}"

    def as_bound(self) -> Bound:
        """The certificate as a bound of the row of sigma."""
        alone = f"_{self.tokens[0]}" if self.ball == "token" else ""
        return Bound(
            id=self.id or "",
            theorem=f"decision_{self.ball}{alone}",
            statement=f"{self.decision_name} stays ahead of {self.rival_name} while {self.moves}",
            **_OF_RADII,
            metric=_METRICS[self.ball],
            value=finite(self.radius),
            eps=finite(self.radius),
            reason="" if math.isfinite(self.radius) else self.note or "",
            note=self.note or "",
        )


def radius_key(id: str | None, ball: DecisionBall, tokens: Sequence[int], **asked: Any) -> str:
    """The key of a certificate in the values of a run folder."""
    usual = {"between": None, "pool": None, "at_layer": 0, "read_out": None}
    return stable_id(usual | asked | {"ball": ball, "id": id, "tokens": list(tokens)})


def certificate_of(held: Mapping[str, Any]) -> DecisionCertificate:
    """The certificate from its value in a run folder."""
    lists: dict[str, Any] = {name: tuple(held[name]) for name in ("tokens", "words")}
    return DecisionCertificate(**{**held, **lists})


def missing_radius(id: str, ball: DecisionBall, reason: str) -> Bound:
    """The record of a decision that was not certified."""
    about: dict[str, Any] = {"theorem": f"decision_{ball}", "statement": "the decision stays"}
    about |= _OF_RADII | {"metric": _METRICS[ball]}
    return Bound(id=id, **about, value=None, reason=reason)


@dataclass(frozen=True, repr=False)
class TokenRadii(Shown):
    """Certificates of moves of single tokens, one per token."""

    each: tuple[DecisionCertificate, ...]


@dataclass(kw_only=True, eq=False, repr=False)
class ModelDecision(Shown):
    """The decision of a model, or of a read-out of one of its layers, at an input.

    Attributes:
        network: The model from the token stream on, in float64 and checked against the model; or
            the layer.
        x: The stream, ``(n, d)``.
        words: Its tokens.
        model: Name of the model.
        by: Description of how the decision is made.
        sample: Index of the window or entry; ``place`` describes it.
        at_layer: The attention layer before which tokens move.
        map: ``model``, or ``attention``: that layer alone, with its output pooled.
        distances: Returns distances from each token to other words in its place, ``(words, n)``.
        answer: Class with the largest score; ``answer_name`` is its name.
        runner_up: Class with the second-largest score; ``runner_up_name`` is its name.
        margin: Difference of their scores.
    """

    network: Network
    x: Float[Tensor, "n d"]
    words: tuple[str, ...]
    model: str
    by: str
    sample: int = 0
    place: str = ""
    at_layer: int = 0
    map: DecisionMap = "model"
    distances: Callable[[], Tensor | None] = lambda: None
    answer: int = field(init=False)
    answer_name: str = field(init=False)
    runner_up: int = field(init=False)
    runner_up_name: str = field(init=False)
    margin: float = field(init=False)

    def __post_init__(self) -> None:
        scores = self.network(self.x)
        if len(scores) < 2 or not bool(scores.isfinite().all()):
            raise InputError(
                f"A decision needs at least two scores, all finite. Found `{scores[:2].tolist()}`."
            )
        self.answer, self.runner_up = scores.topk(2).indices.tolist()
        self.answer_name = self.network.name(self.answer)
        self.runner_up_name = self.network.name(self.runner_up)
        self.margin = float(scores[self.answer] - scores[self.runner_up])

    @cached_property
    def slope(self) -> float:
        """Frobenius norm of the gradient of the margin."""

        def margin(x: Tensor) -> Tensor:
            scores = self.network(x)
            return scores[self.answer] - scores[self.runner_up]

        return float(torch.func.grad(margin)(self.x).norm())

    @overload
    def certify(
        self,
        ball: Literal["joint", "each"] = "joint",
        *,
        tokens: Sequence[int] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> DecisionCertificate: ...

    @overload
    def certify(
        self,
        ball: DecisionBall,
        *,
        token: int | None = None,
        tokens: Sequence[int] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> DecisionCertificate | TokenRadii: ...

    def certify(
        self,
        ball: DecisionBall = "joint",
        *,
        token: int | None = None,
        tokens: Sequence[int] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> DecisionCertificate | TokenRadii:
        """Certify how far tokens may move without changing this decision (`certify_network`).

        Args:
            ball: ``joint``: all of ``tokens`` together; ``each``: each of them by at most the
                radius; ``token``: a single one.
            token: The token that moves alone; None: each of ``tokens`` in turn.
            tokens: The tokens that may move; all if None.
            progress: Called with a description of the current step.

        Returns:
            The certificate, or one per token in turn; after a keyboard interrupt, with the radius
            proved so far.

        Raises:
            InputError: If tokens do not fit the ball, or the certificate would need more than 4 GB.
        """
        if token is not None and (ball != "token" or tokens is not None):
            raise InputError(
                "`token` is the one that moves in the ball `token`. Found it with "
                f"`{'tokens' if ball == 'token' else ball}`; leave one of them out."
            )
        if token is not None:
            tokens = [argument(whole_number(0, len(self.x) - 1), "token", token)]
        groups = self.groups(ball, tokens)
        found: list[DecisionCertificate] = []
        for one in groups:
            found.append(self.certified(ball, one, progress))
            if found[-1].stopped:
                break
        return TokenRadii(tuple(found)) if ball == "token" and token is None else found[0]

    def groups(self, ball: DecisionBall, tokens: Sequence[int] | None) -> list[tuple[int, ...]]:
        """Groups of tokens that move together: each token alone in the ball ``token``, else all."""
        ball, n = argument(one_of(*BALLS), "ball", ball), len(self.x)
        given = range(n) if tokens is None else items(tokens)
        chosen = sorted({argument(whole_number(0, n - 1), "tokens", one) for one in given})
        if not chosen:
            raise InputError("`tokens` should name the tokens that may move. Found none.")
        groups = [(one,) for one in chosen] if ball == "token" else [tuple(chosen)]
        check_memory(self.network, tuple(self.x.shape), len(groups[0]), ball)
        return groups

    def certified(
        self,
        ball: DecisionBall,
        tokens: tuple[int, ...],
        progress: Callable[[str], None] | None = None,
        before: DecisionCertificate | None = None,
    ) -> DecisionCertificate:
        """The certificate of moves of the given tokens; ``before`` is a stopped one to continue."""
        moving = torch.zeros(len(self.x), dtype=torch.bool)
        moving[list(tokens)] = True
        at = f"token {tokens[0]}" if ball == "token" else ball

        def report(text: str) -> None:
            if progress is not None:
                progress(f"{at}: {text}")

        how: dict[str, Any] = {"progress": report, "before": before}
        found = certify_network(self.network, self.x, ball=ball, tokens=moving, **how)
        near = self.distances()
        apart = None if near is None else near[:, list(tokens)]
        return DecisionCertificate(
            **asdict(found),
            model=self.model,
            by=self.by,
            words=tuple(self.words[i] for i in tokens),
            nearest=None if apart is None else finite(float(apart.min())),
            words_within=None if apart is None else int((apart <= found.radius).sum()),
            sample=self.sample,
            at_layer=self.at_layer,
            map=self.map,
        )

    def certificates(
        self,
        ball: DecisionBall,
        groups: Sequence[tuple[int, ...]],
        held: Mapping[str, Mapping[str, Any]],
        named: Mapping[str, Any],
        progress: Callable[[str], None] | None = None,
        **asked: Any,
    ) -> Iterator[tuple[str, DecisionCertificate, bool]]:
        """Certificates of groups of tokens one by one, with their keys, and whether they are new.

        Those ``held`` are not computed again; stopped ones are continued. ``named`` has their
        ``id`` and ``question``.
        """
        for group in groups:
            key = radius_key(named["id"], ball, group, **asked)
            found = certificate_of(held[key]) if key in held else None
            new = found is None or found.stopped
            if found is None or found.stopped:
                found = replace(self.certified(ball, group, progress, found), **named)
            yield key, found, new

    def display_lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the display."""
        yield "model", self.model
        yield "tokens", counted(self.words)
        if self.place:
            yield "sample", self.place
        yield "answer", self.answer_name
        yield "runner-up", self.runner_up_name
        yield "decided by", self.by
        yield "margin", f"{self.margin:.4g}"
        yield "gradient norm", f"{self.slope:.4g}"
        if self.slope > 0:
            yield "first order", f"{self.margin / self.slope:.4g} (to the runner-up, no bound)"


def one_sample(
    model: ReadyModel,
    data: AnyData,
    length: int | None,
    sample: int,
    options: Mapping[str, Any],
    verb: str,
) -> tuple[ReadyModel, Sample]:
    """The input of a verb: a whole text, a window of it, or an entry of a batch.

    The model is the given one with the requested mask.
    """
    sample = argument(whole_number(0, 100_000), "sample", sample)
    asked = {name: value for name, value in options.items() if value is not None}
    if asked.get("map", "model") != "model":
        raise InputError(
            f"`{verb}` needs the whole model. Found `map = {shown(asked['map'])}`; leave it out."
        )
    check_double(asked)
    if is_text(data, asked) and length is None:
        data = whole_input(model, data, special_tokens=asked.get("special_tokens", True))
    else:
        asked |= of_one_window(data, asked, length, sample)
    run = LocalRun(model, data, asked, Verb(verb, OF_QUESTION, "float64"))
    return run.model, run.samples([sample])[0]


def check_double(asked: Mapping[str, Any]) -> None:
    """Require float64, in which certificates hold."""
    if asked.get("dtype", "float64") not in ("float64", torch.float64):
        raise InputError(
            "`dtype` should be float64, in which decisions are certified. Found "
            f"`{shown(asked['dtype'])}`; leave it out."
        )


def whole_input(model: ReadyModel, data: AnyData, *, special_tokens: bool = True) -> Tensor:
    """The token ids of a text, truncated to 64 tokens."""
    text = checked_data(data)
    longest = min(_LONGEST, model.loaded.max_tokens or _LONGEST)
    text = default_text()[:_BEGINNING] if text is None else text
    how: dict[str, Any] = {"special_tokens": special_tokens, "longest": longest}
    ids = whole_text(text, model.loaded.reader_of_text(), **how)
    if not ids.numel():
        raise InputError("The text should not be empty. Found no words in it.")
    return ids


def decision_at(
    model: ReadyModel,
    item: Sample,
    by: By = None,
    *,
    pool: Any = None,
    at_layer: int = 0,
    special_tokens: bool = True,
) -> ModelDecision:
    """The decision at a sample; ``special_tokens`` applies to class texts."""
    at_layer = argument(whole_number(0, 10_000), "at_layer", at_layer)
    _check_pool(pool)
    if isinstance(model.model, Attention):
        assert isinstance(item.arguments, tuple)
        if not isinstance(by, Classifier):
            raise InputError("A decision of a standalone layer needs a `read_out`. Found none.")
        about: Any = {"model": model.name, "sample": item.sample, "place": item.place}
        return decision_of_layer(model.model, item.arguments[0], by, pool, **about)
    model = model.in_memory("A decision of a model")
    with eval_mode(model.model):
        module, label, read = _deciding(model, by, pool, special_tokens)
        on_top: Any = {}
        if read is not None:
            on_top = {"read_out": read.weight, "bias": read.bias, "names": read.names}
        network, x = read_network(module, item.arguments, at_layer=at_layer, pool=pool, **on_top)
    if not network.names and (names := _words_of(model, module, len(network.bias))):
        network = replace(network, names=names)

    @cache  # shared by certificates of single tokens
    def distances() -> Tensor | None:
        return None if at_layer else word_distances(module, item.arguments, x)

    return ModelDecision(
        network=network,
        x=x,
        words=tuple(names_of(model.loaded, item, len(x))),
        model=model.name,
        by=label,
        sample=item.sample,
        place=item.place,
        at_layer=at_layer,
        distances=distances,
    )


def _check_pool(pool: Any) -> None:
    known = pool in _POOLS if isinstance(pool, str) else is_whole(pool) and abs(pool) < _INDEX
    if pool is not None and not known:
        raise InputError(
            f"`pool` should be mean, first, last or the index of a token. Found `{shown(pool)}`."
        )


def decision_of_layer(
    layer: nn.Module,
    x: Float[Tensor, "n d"],
    given: Classifier,
    pool: Any = None,
    *,
    words: Sequence[str] = (),
    model: str = "layer",
    **about: Any,
) -> ModelDecision:
    """The decision of a read-out on an attention layer's pooled output, at its input."""
    assert isinstance(layer, Attention)
    own = in_double(layer, None)
    x = tokens_in_double(x, own.query.shape[1])
    _check_pool(pool)
    given.scores(own(x))  # refuses another width by the name that was given
    head = given.weight, given.bias
    network = layer_network(own, len(x), *head, pool=pool or "mean", names=given.names)
    tokens = tuple(words or map(str, range(len(x))))
    about |= {"model": model, "by": given.by, "map": "attention"}
    return ModelDecision(network=network, x=x, words=tokens, **about)


def decision_at_layer(
    at: MapAtInput, by: Classifier | Sequence[str], *, pool: Any, special_tokens: bool
) -> ModelDecision:
    """The decision of a read-out, given or from texts, on the pooled output of a model's layer."""
    layer = at.job.layer or 0
    if not isinstance(by, Classifier):
        pool = pool or "mean"
        if pool not in ("mean", "first"):
            raise InputError(
                f"`pool` should be mean or first with `between`. Found `{shown(pool)}`."
            )
        how: Any = {"layer": layer, "pool": pool, "special_tokens": special_tokens}
        by = classifier_of_texts(at.model, by, **how)
    about: Any = {"model": at.model.name, "words": at.tokens, "at_layer": layer}
    about |= {"sample": at.job.sample, "place": at.item.place}
    with at.window.ready():
        return decision_of_layer(at.attention, at.x, by, pool, **about)


def _deciding(
    model: ReadyModel, by: By, pool: Any, special_tokens: bool
) -> tuple[nn.Module, str, Classifier | None]:
    """The deciding module, a description, and the read-out unless it is the module's own head."""
    if by is None:
        module = with_own_head(model.loaded)
        nexts = getattr(module, "get_output_embeddings", lambda: None)() is not None
        return module, "the model's next token" if nexts else "the model's own scores", None
    body = model.model.get_submodule(body_of(model.model))
    if not isinstance(by, Classifier):
        by = nearest_by_angle(_texts(model, body, by, pool, special_tokens), pool or "mean")
    return body, by.by.replace("this layer's", "the model's"), by


def _texts(
    model: ReadyModel, body: nn.Module, texts: Sequence[str], pool: Any, special_tokens: bool
) -> Texts:
    """Texts, represented by the model's outputs in float64, pooled like that of the input."""
    read = {None: slice(None), "mean": slice(None), "first": slice(1), "last": slice(-1, None)}
    if pool not in read:
        raise InputError(f"`pool` should be mean, first or last with `between`. Found `{pool}`.")
    cpu, how = torch.device("cpu"), implementation_for(body, closed=True)
    with prepared(body, dtype=torch.float64, device=cpu, implementation=how) as (own, _):

        def output(ids: Tensor) -> Tensor:
            with torch.no_grad():
                return first_tensor(run(own, inputs_of_ids(own, ids)))[0][read[pool]]

        return mean_outputs(texts, model.loaded, special_tokens, output)


def _words_of(model: ReadyModel, module: nn.Module, count: int) -> tuple[str, ...]:
    """The words scored by a vocabulary head."""
    tokenizer = model.tokenizer
    if tokenizer is None or getattr(module, "get_output_embeddings", lambda: None)() is None:
        return ()
    known = len(tokenizer) if hasattr(tokenizer, "__len__") else count
    found = tokenizer.convert_ids_to_tokens(list(range(min(count, known))))
    found += [None] * (count - len(found))
    return tuple(str(i) if one is None else str(one) for i, one in enumerate(found))


class _EntryError(Exception):
    """Stops a forward pass where the stream enters the first block."""


def word_distances(
    model: nn.Module, inputs: Any, x: Float[Tensor, "n d"]
) -> Float[Tensor, "v n"] | None:
    """Distances from every token's embedding to those of all other words in its place.

    Embeddings as they enter the first block, with positions and norm; infinite for the token
    itself. None if the model reads no token ids, or embeddings depend on more than one token.
    """
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    table = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, nn.Embedding) or not isinstance(ids, Tensor):
        return None
    n, d = x.shape
    if ids.shape != (1, n):
        return None
    entry: list[nn.Module] = []
    taken: list[Tensor] = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[-2:] != (n, d):
                continue
            stream = value.detach().to("cpu", torch.float64)
            if not entry and len(stream) == 1 and (stream[0] - x).norm() <= _SAME * x.norm():
                entry.append(module)
            if entry and module is entry[0]:
                taken.append(stream)
                raise _EntryError

    def streams_of(words: Tensor) -> Tensor | None:
        taken.clear()
        given = {
            name: value.expand(len(words), *value.shape[1:])
            if isinstance(value, Tensor) and value.shape[:1] == (1,)
            else value
            for name, value in inputs.items()
        }
        with contextlib.suppress(_EntryError):
            model(
                **to_device(given | {"input_ids": words}, table.weight.device, table.weight.dtype)
            )
        return taken[0] if taken and len(taken[0]) == len(words) else None

    handles = [
        one.register_forward_pre_hook(look, with_kwargs=True)
        for one in model.modules()
        if one is not model
    ]
    found: list[Tensor] = []
    try:
        with eval_mode(model), torch.no_grad():
            if streams_of(ids) is None:
                return None
            every = torch.arange(table.num_embeddings)
            for some in every.split(max(1, _BLOCK // (n * d))):
                streams = streams_of(some[:, None].expand(-1, n))
                if streams is None:
                    return None
                found.append((streams - x).norm(dim=-1))
    finally:
        for handle in handles:
            handle.remove()
    apart, own = torch.cat(found), (ids[0].cpu(), torch.arange(n))
    if not bool((apart[own] <= _SAME * x.norm(dim=-1)).all()):
        return None
    apart[own] = torch.inf
    if table.padding_idx is not None:  # padding is not a word
        apart[table.padding_idx] = torch.inf
    return apart


# --- display


@pieces.register
def _radii(found: TokenRadii) -> Iterator[Piece]:
    """A row per token: its radius, and the smallest change of decision found."""
    first = found.each[0]
    made = empty_table(
        f"“{first.decision_name}” stays while a token moves alone",
        ("token", "", "rival"),
        ("certified radius", "attack", "first order", "other words within"),
    )
    for one in found.each:
        cells = (str(one.tokens[0]), visible(one.words[0]), visible(one.rival_name))
        values = (number(one.radius, 4, rounded_down), number(one.attack), number(one.first_order))
        within = "–" if one.words_within is None else str(one.words_within)
        made.add_row(*map(Text, cells), *values, within)
    yield made
    yield (
        "attack: the smallest move found that changes the decision; first order: where a linear "
        "margin would vanish, not a bound; other words within: those whose embeddings lie within "
        "the certified radius."
    )
    yield from (f"Note: {text}." for text in dict.fromkeys(one.note for one in found.each) if text)
