"""Surveys of models before jobs are listed: layers, heads and inputs."""

from __future__ import annotations

from lipscope.engine.plan import Survey
from lipscope.engine.session import Session
from lipscope.engine.spec import Request
from lipscope.engine.survey_cache import Held, survey_key, surveyed, tell_fewer
from lipscope.records import RunFolder


def surveys_of(request: Request, held: Held, folder: RunFolder | None = None) -> list[Survey]:
    """The survey of every model; the first checkpoint stands for all of its entry.

    Every map is built once here, which finds what no job could answer before any begins; what
    the folder knows already is not looked at again.

    Args:
        request: The specification and its texts.
        held: The surveys that the folder holds.
        folder: Where new ones are kept; None for nowhere.

    Returns:
        One survey for each model.

    Raises:
        InputError: If a model, text, length, layer or map is not to be had.
    """

    def look(index: int) -> Survey:
        with Session(request.spec, request.sources) as session:
            return session.survey(index)

    found: dict[int, Survey] = {}
    for index, model in enumerate(request.spec.models):
        if model.entry not in found:
            key = survey_key(request.spec, index, {})
            found[model.entry], _ = surveyed(held, folder, key, lambda i=index: look(i))
    first = next(iter(found.values()))
    tell_fewer(request.spec, first)
    return [found[model.entry] for model in request.spec.models]
