"""The decision of a whole model at one input, certified: rows beside the sigma of its margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from lipscope.certificates import DecisionBall
from lipscope.engine.checks import argument, one_of
from lipscope.engine.classifier import Classifier
from lipscope.engine.model_decision import (
    BALLS,
    DecisionCertificate,
    decides_by,
    decision_at,
    whole_input,
)
from lipscope.engine.plan import check_one_input
from lipscope.engine.ready_model import AnyModel, ready_model
from lipscope.engine.runs import (
    AnyData,
    AnyFolder,
    LocalRun,
    Progress,
    as_callback,
    is_text,
    of_one_input,
)
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.models import Pooled
from lipscope.records import RADII, Finished, stable_id

_VERB = Verb("certify_model", OF_QUESTION, "float64")
_LOADING = ("tokenizer", "revision", "seed", "allow_pickle")


def certify_model(
    model: AnyModel = "minilm",
    data: AnyData = None,
    *,
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    pool: Pooled | None = None,
    ball: DecisionBall = "joint",
    tokens: Sequence[int] | None = None,
    at_layer: int = 0,
    length: int | None = None,
    out: AnyFolder = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> tuple[DecisionCertificate, ...]:
    """Certify how far tokens may move before a whole model's decision can change.

    What `OpenModel.decision` decides: the model's own class or next token, or which of some texts
    is nearest, or a read-out. Within the radius no move of the embeddings changes it.

    Holds for models that `read_network` takes apart; deterministic, up to float64 rounding. Proof:
    ``docs/theory/decision.md``. Dense: seconds for some 256 coordinates, and 4 GB at most.

    Args:
        model: As for `measure`.
        data: Text or a batch of one, as for `measure`; the default text if None.
        between: Texts: the one whose mean output is at the smallest angle decides.
        read_out: A matrix of classes in a file, or a `Classifier`, in their place.
        pool: Which tokens are read where the model does not pool them itself.
        ball: ``joint``: all tokens together; ``each``: every one by less than the radius;
            ``token``: one after the other, a certificate a token.
        tokens: Indices of the tokens that may move; all if None.
        at_layer: The attention layer before which they move; 0: the embeddings.
        length: Number of tokens of the text; all of it, at most 64, if None.
        out: Run folder for the row of sigma, of the map ``margin`` or ``model``, and the radii;
            tokens that it holds are not certified again.
        progress: As for `certify`; told after each certificate.
        **options: Those of `measure` about the input and the solver; ``dtype`` float64.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: derived here.
    """
    ball = argument(one_of(*BALLS), "ball", ball)
    given = decides_by(between, read_out)
    asked: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    loading = {name: asked.get(name) for name in _LOADING if asked.get(name) is not None}
    ready = ready_model(model, **loading)
    asked = {k: v for k, v in asked.items() if k not in ("tokenizer", "revision")}
    if length is None and is_text(data, asked):
        data = whole_input(ready, data, special_tokens=asked.get("special_tokens", True))
    own = given is None and between is None
    more = {"maps": ("margin" if own else "model",)}
    asked |= of_one_input(data, asked, length)
    tell, said = as_callback(progress), {"verb": "certify"}
    with LocalRun(ready, data, asked, _VERB, more=more, out=out, asked=said) as run:
        check_one_input(run.jobs)
        item = run.at(run.jobs[0]).item
        decision = decision_at(
            ready,
            item,
            given=given,
            between=between,
            pool=pool,
            at_layer=at_layer,
            special_tokens=run.spec.special_tokens,
        )
        groups = decision.groups(ball, tokens)
        tell(0, len(groups), None)
        rows = run.rows(keep=False) if run.folder is not None else None
        id = None if rows is None else rows[0].id
        about: dict[str, Any] = {"id": id, "between": between, "pool": pool, "at_layer": at_layer}
        about |= {"read_out": given and given.digests, "ball": ball}
        found = []
        for done, group in enumerate(groups, 1):
            key = stable_id(about | {"tokens": group})
            if key not in run.values(RADII):
                run.keep_value(RADII, key, replace(decision.certified(ball, group), id=id))
            found.append(_read(run.values(RADII)[key]))
            tell(done, len(groups), None)
        if rows is not None:
            mine = tuple(one for one in rows.tokens if one.id == id)
            run.keep([Finished(rows[0], mine, tuple(one.as_bound() for one in found))])
    return tuple(found)


def _read(held: dict[str, Any]) -> DecisionCertificate:
    lists: dict[str, Any] = {name: tuple(held[name]) for name in ("tokens", "words")}
    return DecisionCertificate(**held | lists)
