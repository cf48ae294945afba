"""What has to be known of models before jobs can be listed: layers, heads and inputs."""

from __future__ import annotations

from lipscope.engine.plan import Survey
from lipscope.engine.session import Session
from lipscope.engine.spec import Request


def surveys_of(request: Request) -> list[Survey]:
    """The survey of every model; the first checkpoint stands for all of its entry.

    Every map is built once here, which finds what no job could answer before any begins.

    Args:
        request: The specification and its texts.

    Returns:
        One survey for each model.

    Raises:
        InputError: If a model, text, length, layer or map is not to be had.
    """
    found: dict[int, Survey] = {}
    for index, model in enumerate(request.spec.models):
        if model.entry not in found:
            with Session(request.spec, request.sources) as session:
                found[model.entry] = session.survey(index)
    return [found[model.entry] for model in request.spec.models]
