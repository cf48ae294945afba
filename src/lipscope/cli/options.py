"""Options that commands share: each declared once, and given to every command that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipscope.cli.completion import COMPLETED, models
from lipscope.cli.terminal import read_text
from lipscope.engine import AXES, OPTIONS, items, options_of, parse_integers
from lipscope.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])
# What determines which input is read, how a question is answered, and what is asked besides.
INPUT, SOLVER = ("text", *options_of("input")), options_of("solver")
QUESTION, THEOREMS = options_of("question"), options_of("theorems")

Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="minilm, a folder, a hub id, timm:NAME, random:FAMILY…",
        autocompletion=models,
    ),
]
_TEXT = "File, folder, -.  [default: Python's manual]"


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
        given = [_parameter(name, words.get(name), name in hidden) for name in names]
        found = [p.replace(kind=p.KEYWORD_ONLY) for p in (*kept, *given, *last)]
        command.__signature__ = own.replace(parameters=found)  # pyright: ignore
        command.__annotations__ = {p.name: p.annotation for p in found}
        return command

    return give


def _parameter(name: str, words: str | None, hidden: bool) -> inspect.Parameter:
    kind, default, told = str, None, {"help": _TEXT, "left": False, "rare": False}
    if name != "text":
        entry = OPTIONS[AXES.get(name, name)]
        (default, *_), told = items(entry.default) or [None], entry.metadata
        kind = str if default is None else type(default)
    flag = "--" + name.replace("_", "-")
    names = [flag] if kind is bool else []
    if default is True:
        names = [f"{flag}/--no-{flag[2:]}"]
    if told["left"]:
        default = None
    option = typer.Option(
        *names,
        help=words or told["help"],
        hidden=hidden or told["rare"],
        show_default=default not in (None, "all", "self", True, "attention"),
        autocompletion=COMPLETED.get(name),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
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
    if "causal" in found:
        found["causal"] = _yes_or_no(found["causal"])
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


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise InputError(f"`--causal` should be yes or no. Found `{text}`.")
    return text == "yes"


def _radius(text: str) -> float | str:
    """A number, or a word for how it is found."""
    if text in ("norm", "inputs", "row"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--radius` should be a number, or norm. Found `{text}`.") from None
