"""The decision of a model, or of one of its layers, certified: rows beside a sigma."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from lipscope.certificates import DecisionBall
from lipscope.engine import model_decision, runs
from lipscope.engine.checks import argument, one_of, whole_number
from lipscope.engine.classifier import Classifier, read_out_at
from lipscope.engine.plan import check_one_input
from lipscope.engine.ready_model import AnyModel, ready_model
from lipscope.engine.spec import OF_QUESTION, Options, Verb
from lipscope.errors import InputError, shown
from lipscope.models import Pooled
from lipscope.pages import Rows
from lipscope.records import RADII, Finished

_VERB = Verb("certify_decision", OF_QUESTION, "float64")
_LOADING = ("tokenizer", "revision", "seed", "allow_pickle")


def certify_decision(
    model: AnyModel = "minilm",
    data: runs.AnyData = None,
    *,
    between: Sequence[str] | None = None,
    read_out: str | Path | Classifier | None = None,
    pool: Pooled | None = None,
    ball: DecisionBall = "joint",
    tokens: Sequence[int] | None = None,
    at_layer: int = 0,
    length: int | None = None,
    out: runs.AnyFolder = None,
    progress: runs.Progress | None = None,
    **options: Unpack[Options],
) -> tuple[model_decision.DecisionCertificate, ...]:
    """Certify how far tokens may move before a decision can change, of a model or of one layer.

    What `OpenModel.decision` decides: the model's own class or next token, or which of some texts
    is nearest, or a read-out. Within the radius no move of the embeddings changes it. With
    ``map="attention"`` that of texts, or of a read-out, on one layer's pooled output.

    Holds for models that `read_network` takes apart, and for dot-product layers in closed form;
    deterministic, up to float64 rounding. Proofs: ``docs/theory/decision.md`` and, where an
    expansion of a layer does not fit, ``docs/theory/ball-certificate.md``. Dense: seconds for some
    256 coordinates, and 4 GB at most.

    An interrupt from the keyboard ends it: the last certificate has what was proved so far and is
    ``stopped``. The same request on the same folder goes on from there.
    ``model`` and ``data`` are as for `measure`.

    Args:
        between: Texts: the one whose mean output is at the smallest angle decides.
        read_out: A matrix of classes in a file, or a `Classifier`, in their place.
        pool: Which tokens are read where the model does not pool them itself.
        ball: ``joint``: all tokens together; ``each``: every one by less than the radius;
            ``token``: one after the other, a certificate a token.
        tokens: Indices of the tokens that may move; all if None.
        at_layer: The attention layer before which they move; 0: the embeddings.
        length: Number of tokens of the text; all of it, at most 64, if None.
        out: Run folder for the row of sigma, of the map ``margin``, ``model`` or ``attention``, and
            the radii; tokens that it holds are not certified again.
        progress: As for `certify`; told after each certificate. A bar says how far one is.
        **options: Those of `measure` about the input and the solver; ``dtype`` float64. The map is
            ``model``, all that comes after the moves, or ``attention``, that layer by itself.

    Raises:
        InputError: For every request that cannot be answered as asked.

    Source: derived here.
    """
    ball = argument(one_of(*model_decision.BALLS), "ball", ball)
    given = model_decision.decides_by(between, read_out)
    asked: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    map = argument(one_of("model", "attention"), "map", asked.pop("map", "model"))
    if length is None and runs.is_text(data, asked):
        model = ready_model(model, **{name: asked[name] for name in _LOADING if name in asked})
        asked = {k: v for k, v in asked.items() if k not in ("tokenizer", "revision")}
        data = model_decision.whole_input(
            model, data, special_tokens=asked.get("special_tokens", True)
        )
    own = given is None and between is None
    if own and map == "attention":
        raise InputError("A layer decides by `between` or a `read_out`. Found neither.")
    asked |= runs.of_one_input(data, asked, length)
    maps = "margin" if own else map
    if map == "attention":
        asked["layers"] = [argument(whole_number(0, 10_000), "at_layer", at_layer)]
    tell, said = runs.as_callback(progress), {"verb": "certify"}
    with runs.LocalRun(
        model, data, asked, _VERB, more={"maps": (maps,)}, out=out, asked=said
    ) as run:
        check_one_input(run.jobs)
        about: dict[str, Any] = {
            "between": between,
            "pool": pool,
            "at_layer": at_layer,
            "read_out": given and given.digests,
        }

        def decide() -> model_decision.ModelDecision:
            if map == "attention":
                return _at_layer(run, given, between, pool)
            return model_decision.decision_at(
                run.model,
                run.at(run.jobs[0]).item,
                given=given,
                between=between,
                pool=pool,
                at_layer=at_layer,
                special_tokens=run.spec.special_tokens,
            )

        def find() -> dict[str, Any]:
            decision = decide()
            groups = decision.groups(ball, tokens)
            tell(0, len(groups), None)
            rows = run.rows(keep=False) if run.folder is not None else None
            id, keys = None if rows is None else rows[0].id, []
            found: model_decision.DecisionCertificate | None = None
            try:
                for done, group in enumerate(groups, 1):
                    keys.append(model_decision.radius_key(id, ball, group, **about))
                    before = run.values(RADII).get(keys[-1])
                    found = None if before is None else _read(before)
                    if found is None or found.stopped:
                        found = decision.certified(ball, group, runs.as_voice(tell), found)
                        run.keep_value(RADII, keys[-1], replace(found, id=id))
                    if found.stopped:
                        break
                    tell(done, len(groups), None)
            finally:  # what was measured stays, whatever a later token comes to
                if rows is not None:
                    _keep_row(run, rows, keys)
            if found is not None and found.stopped:
                raise _StoppedError(keys)
            return {"keys": keys}

        whole = about | {"ball": ball, "tokens": tokens and list(tokens)}
        try:
            keys = run.once("decision", whole, find)["keys"]
        except _StoppedError as stopped:
            (keys,) = stopped.args
        return tuple(_read(run.values(RADII)[key]) for key in keys)


def _keep_row(run: runs.LocalRun, rows: Rows, keys: Sequence[str]) -> None:
    """Keep the row of a decision's sigma with the radii that are known at `keys`."""
    row = rows[0]
    mine = tuple(one for one in rows.tokens if one.id == row.id)
    known = (run.values(RADII).get(key) for key in keys)
    bounds = tuple(_read(one).as_bound() for one in known if one is not None)
    run.keep([Finished(row, mine, bounds)])


class _StoppedError(Exception):
    """An interrupt, with the keys of what was found before."""


def _at_layer(
    run: runs.LocalRun, given: Classifier | None, between: Sequence[str] | None, pool: Any
) -> model_decision.ModelDecision:
    """The decision of a layer's pooled output, at the input of a run."""
    job, at = run.jobs[0], run.at(run.jobs[0])
    if given is None and pool not in (None, "mean", "first"):
        raise InputError(f"`pool` should be mean or first with `between`. Found `{shown(pool)}`.")
    given = read_out_at(run, given, between or (), pool or "mean")
    assert given is not None
    how: dict[str, Any] = {"words": at.tokens, "model": run.model.name, "sample": job.sample}
    return model_decision.decision_of_layer(
        at.attention, at.x, given, pool, at_layer=job.layer or 0, **how
    )


def _read(held: dict[str, Any]) -> model_decision.DecisionCertificate:
    lists: dict[str, Any] = {name: tuple(held[name]) for name in ("tokens", "words")}
    return model_decision.DecisionCertificate(**held | lists)
