"""Options that commands share: each declared once, and given to every command that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipscope.cli.completion import COMPLETED, models
from lipscope.cli.terminal import read_text
from lipscope.engine.ranges import parse_integers
from lipscope.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])
_SWITCHES = ("special_tokens", "sharp")  # with a --no-… of their own
# What determines which input is read, how a question is answered, and what is asked besides.
INPUT = ("text", "windows", "special_tokens", "position_offset", "images")
SOLVER = ("tol", "delta", "dtype", "device", "seed", "memory", "modules", "allow_pickle")
QUESTION = ("map", "per_head", "metric", "move", "read", "side", "rest", "average")
THEOREMS = ("inputs", "ascent_steps", "theorems", "sharp", "radius")
_RARE = ("modules",)  # in no help, for want of room: documented

# Type, default, and one line of help.
Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="minilm, a folder, a hub id, timm:NAME, random:FAMILY…",
        autocompletion=models,
    ),
]
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "text": (str | None, None, "File, folder, -.  [default: Python's manual]"),
    "windows": (str, "spread", "the same passages at every length; or disjoint."),
    "special_tokens": (bool, True, "Put [CLS] and the like around each window."),
    "position_offset": (int, 0, "First position id."),
    "images": (str | None, None, "DIR or random, then @224,448."),
    "map": (str, "attention", "heads, normed, residual, block, stack, model"),
    "per_head": (bool, False, "One row per head."),
    "metric": (str | None, None, "or token-relative, max-token, infinity."),
    "move": (str, "all", "first, last, not-first, a:b, a%:b%, copies."),
    "read": (str, "all", "Outputs that are read."),
    "side": (str, "self", "Across: query, key."),
    "rest": (bool, False, "Also with the top token held fixed."),
    "average": (bool, False, "Also Frobenius norm and stable rank."),
    "inputs": (str, "real", "or adversarial, ascent, a construction; several by commas."),
    "ascent_steps": (int | None, None, "Steps of gradient ascent."),
    "theorems": (str | None, None, "Names, or all that are quick."),
    "sharp": (bool | None, None, "Bounds that may take long; unset: up to seconds."),
    "radius": (str | None, None, "Largest token norm of bounds: a number, norm, inputs, row."),
    "tol": (float, 1e-3, "How wide intervals may be."),
    "delta": (float, 0.01, "Their failure probability."),
    "dtype": (str | None, None, "float32 or float64."),
    "device": (str, "auto", "auto, cpu, cuda, …"),
    "seed": (int, 0, "Seed of the random starts."),
    "memory": (str, "1GiB", "Budget such as 1GiB."),
    "modules": (str | None, None, "Regular expression for attention modules."),
    "allow_pickle": (bool, False, "Load pickled weights, weights only."),
}


def with_options(
    *names: str, hidden: tuple[str, ...] = (), **words: str
) -> Callable[[Command], Command]:
    """Give a command, which takes ``**options``, some of the shared options.

    Args:
        *names: Which.
        hidden: Which others its help leaves to the documentation, for want of room.
        **words: Help of its own for some of them.

    Returns:
        The decorator.
    """

    def give(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        last = [p for p in kept if p.name in ("out", "jsonl")]
        kept = [p for p in kept if p not in last]
        given = [_parameter(name, words.get(name), name in (*hidden, *_RARE)) for name in names]
        found = [p.replace(kind=p.KEYWORD_ONLY) for p in (*kept, *given, *last)]
        command.__signature__ = own.replace(parameters=found)  # pyright: ignore
        command.__annotations__ = {p.name: p.annotation for p in found}
        return command

    return give


def _parameter(name: str, words: str | None, hidden: bool) -> inspect.Parameter:
    kind, default, usual = OPTIONS[name]
    flag = "--" + name.replace("_", "-")
    names = [flag] if kind in (bool, bool | None) and name not in _SWITCHES else []
    if name in _SWITCHES:
        names = [f"{flag}/--no-{flag[2:]}"]
    shown = default not in (None, "all", "self", True, "attention")
    option = typer.Option(
        *names,
        help=words or usual,
        hidden=hidden,
        show_default=shown,
        autocompletion=COMPLETED.get(name),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def asked(options: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """What a verb is called with: its text, and its other options.

    Args:
        options: As the command line gives them; what is None is left to the verb.

    Returns:
        The text, or None, and keyword arguments.
    """
    found = {name: value for name, value in options.items() if value is not None}
    if "images" in found and "text" in found:
        raise InputError("`--images` take the place of a text. Found `--text` too; leave one out.")
    content = read_text(found.pop("text", None)) if "images" not in found else None
    if "images" in found:
        found["images"], found["resolutions"] = _images(found["images"])
    for name in ("inputs", "theorems"):
        if name in found:
            found[name] = found[name].split(",")
    if found.get("theorems") in (["all"], ["none"]):
        (found["theorems"],) = found["theorems"]
    if "radius" in found:
        found["radius"] = _radius(found["radius"])
    return content, found


def indices(text: str, option: str) -> Any:
    """``all``, or whole numbers such as ``0,3`` or ``0:5``."""
    return text if text == "all" else parse_integers(text, option)


def _images(text: str) -> tuple[str, list[int] | None]:
    """A folder of pictures and, after an ``@``, their sides in pixels.

    >>> _images("cats@224,448")
    ('cats', [224, 448])
    """
    if Path(text).exists() or "@" not in text:
        return text, None
    where, _, sides = text.rpartition("@")
    return where, parse_integers(sides, "images")


def _radius(text: str) -> float | str:
    """A number, or a word for how it is found."""
    if text in ("norm", "inputs", "row"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--radius` should be a number, or norm. Found `{text}`.") from None
