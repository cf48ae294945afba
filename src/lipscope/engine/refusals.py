"""What a call, a configuration or a file says against a request, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipscope.engine.checks import Entries, items, layers
from lipscope.engine.spec import AXES, CHECKS
from lipscope.sources import check_device, check_model, read_text

# Whose words stand in rooms that bring torch, or mean something else to a verb.
_LATER = ("metrics", "side", "inputs", "theorems", "tokens")


def refuse_early(model: str, options: Mapping[str, Any]) -> None:
    """Refuse what is certain without a look at the model itself; a verb looks at the rest.

    ``options`` are those of a verb, without those that are left to it.

    Raises:
        InputError: As the verb itself would.
    """
    for name, value in options.items():
        key = AXES.get(name, name)
        if key in CHECKS and key not in _LATER and value is not None:
            CHECKS[key](Entries("", {name: value}), name, value)
    check_device(options.get("device", "auto"))
    if isinstance(among := options.get("among"), Path):
        read_text(among, "`among`")
    asked: dict[str, Any] = {"allow_pickle": options.get("allow_pickle", False)}
    if "images" not in options:
        asked["lengths"] = items(options.get("lengths", options.get("length", [])))
    if options.get("modules") is None and options.get("side", "self") == "self":
        numbers = options.get("layers", options.get("layer", "all"))
        asked["layers"] = layers(Entries("", {}), "layers", numbers) or ()
        asked["head"] = options.get("head")
    check_model(model, **asked)
