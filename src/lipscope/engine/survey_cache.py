"""Surveys of models kept in a run folder: a finished run answers without loading one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lipscope.engine.plan import InputKey, Shape, Survey
from lipscope.engine.spec import Spec
from lipscope.errors import remark
from lipscope.models import folder_stamp, source_stamp
from lipscope.records import SURVEY, RunFolder, stable_id, version

Held = Mapping[str, Mapping[str, Any]]


def surveys_in(folder: RunFolder | None) -> Held:
    """The surveys that a folder holds, by their keys."""
    return {} if folder is None else folder.values(SURVEY)


def survey_key(spec: Spec, model: int, more: Mapping[str, Any]) -> str | None:
    """Digest of everything that a survey depends on; None if it cannot be told.

    Args:
        spec: The specification, with the digests of its texts.
        model: Index of the model.
        more: What else it depends on, such as the revision that was asked for.
    """
    one = spec.models[model]
    revision = more.get("revision")
    is_now = source_stamp(f"{one.name}@{revision}" if revision else one.name)
    if is_now is None:
        return None
    pictures = Path(os.path.expanduser(spec.images)) if spec.images is not None else None
    seen = folder_stamp(pictures) if pictures is not None and os.path.isdir(pictures) else ""
    asked = spec.as_dict() | {"models": [one.name, one.step], "pictures": seen}
    return stable_id({**asked, **more, "is_now": is_now, "version": version()})


def surveyed(
    held: Held, folder: RunFolder | None, key: str | None, look: Callable[[], Survey]
) -> tuple[Survey, bool]:
    """A survey, from the folder if it is there, else made and kept.

    Args:
        held: Those of the folder.
        folder: The folder, if there is one.
        key: That of the survey.
        look: Makes it.

    Returns:
        The survey, and whether it was in the folder.
    """
    if key is not None and key in held:
        return _survey(held[key]), True
    found = look()
    if folder is not None and key is not None:
        plain = found._asdict() | {"items": {name: [*some] for name, some in found.items.items()}}
        folder.add_value(SURVEY, key, plain)
    return found, False


def _survey(plain: Mapping[str, Any]) -> Survey:
    layers, heads = plain["shape"]
    items = {name: [InputKey(*one) for one in some] for name, some in plain["items"].items()}
    return Survey(Shape(layers, heads and tuple(heads)), items, plain["revision"])


def tell_fewer(spec: Spec, survey: Survey) -> None:
    """Say where a text has fewer distinct windows than were asked for."""
    if spec.samples is None or spec.images is not None or spec.lengths is None:
        return
    for name, items in survey.items.items():
        counts = Counter(one.num_tokens for one in items)
        fewer = {n: count for n, count in counts.items() if count < spec.samples}
        if fewer:
            which = ", ".join(f"{count} of {n} tokens" for n, count in sorted(fewer.items()))
            remark(
                f"The text{f' `{name}`' * bool(name)} has fewer distinct windows than "
                f"`samples = {spec.samples}`: {which}. Each is measured once."
            )
