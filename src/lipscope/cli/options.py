"""Shared options of the commands, each declared once, and calls of a verb with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipscope.cli.terminal import COMPLETED, bar, complete_models, given_text, resumable
from lipscope.engine import AXES, OPTIONS, items, options_of, parse_integers
from lipscope.errors import InputError
from lipscope.records import Place
from lipscope.sources import uncollected

Command = TypeVar("Command", bound=Callable[..., Any])
# Options of the input and the solver, of the measurement, and of theorems.
INPUT, SOLVER = ("text", *options_of("input")), options_of("solver")
QUESTION, THEOREMS = options_of("question"), options_of("theorems")

Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="minilm, a folder, a hub id, timm:NAME, random:FAMILY…",
        autocompletion=complete_models,
    ),
]
# Options that exist only on the command line: type, default, help.
_OWN: dict[str, tuple[Any, Any, str]] = {
    "text": (str, None, "File, folder, -.  [default: Python's manual]"),
    "layer": (int, 0, "From 0; --layers is the same."),
    "layers": (str, "0", "An index, 0,3, or all."),
    "length": (int, 64, "Tokens in the window."),
    "lengths": (str, "64", "Tokens, or 16,64,128."),
    "samples": (int, 1, "Windows per length."),
    "among": (Path, None, "File, one text per line: show the nearest."),
    "read_out": (Path, None, "A decision: matrix in .npy or .safetensors."),
    "between": (list[str], None, "Decide by the nearest text (repeatable)."),
    "pool": (str, "mean", "Pool by mean or first."),
    "figures": (bool, False, "Draw figures into the run folder."),
    "out": (Path, None, "Run folder."),
    "force": (bool, False, "Replace a run with other options."),
    "jsonl": (bool, False, "One JSON object per {} on stdout."),
}
_LAST = ("force", "out", "jsonl")
_NOT_ASKED = (*_LAST, "figures", "text")


def with_options(
    *names: str, hidden: tuple[str, ...] = (), **words: str | tuple[Any, ...]
) -> Callable[[Command], Command]:
    """Add shared options and output options to a command that takes ``**options``.

    Hidden options are omitted from the help. ``words`` override the help, or default and help, of
    an option; ``jsonl`` names the object on each line. Tuples of type, default (``...`` if
    required) and help declare options of this command only, which come before the shared ones.
    """

    def give(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        new = [name for name, one in words.items() if isinstance(one, tuple) and len(one) == 3]
        every = (*new, *names, *(_LAST if isinstance(words.get("jsonl"), str) else ()))
        given = [_parameter(name, words.get(name), name in hidden) for name in every]
        found = [p.replace(kind=p.KEYWORD_ONLY) for p in (*kept, *given)]
        command.__signature__ = own.replace(parameters=found)  # pyright: ignore
        command.__annotations__ = {p.name: p.annotation for p in found}
        return command

    return give


def _parameter(name: str, words: str | tuple[Any, ...] | None, hidden: bool) -> inspect.Parameter:
    own, rare, left = True, False, False
    if isinstance(words, tuple) and len(words) == 3:
        kind, default, text = words
    elif name in _OWN:
        kind, default, text = _OWN[name]
        default, words = words if isinstance(words, tuple) else (default, words)
        text = text.format(words) if name == "jsonl" else words or text
    else:
        entry, own = OPTIONS[AXES.get(name, name)], False
        (default, *_), how = items(entry.default) or [None], entry.metadata
        kind, rare, left = str if default is None else type(default), how["rare"], how["left"]
        text = words or how["help"]
    flag = "--" + name.replace("_", "-")
    names = [flag] if kind is bool else []
    if kind is bool and default is not False:
        names = [f"{flag}/--no-{flag[2:]}"]
    default = None if left else default
    option = typer.Option(
        *names,
        help=str(text),
        hidden=hidden or rare,
        show_default=default is not None
        and (own or default not in ("all", "self", True, "attention")),
        autocompletion=COMPLETED.get(name),
        metavar="TEXT" if name == "between" else None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def ask(
    verb: str, model: str, options: Mapping[str, Any], stem: str | None = None, **more: Any
) -> tuple[Any, Any]:
    """Call a verb of the library with a progress bar; returns the result and its folder, if any.

    An interrupted run explains how to resume.

    ``options`` are those of `with_options`; None selects the default of the verb. ``stem`` is the
    base name of the run folder if ``out`` is not given; without both there is no folder.
    """
    given = {name: value for name, value in options.items() if name not in _NOT_ASKED}
    content = convert(given, options["text"])
    out, force = options["out"], options["force"]
    if options.get("figures") and stem is out is None:
        raise InputError("`--figures` draws into a run folder. Found none; name one with `--out`.")
    place = Place(out, stem or "", force=force) if stem or out is not None else None
    from lipscope import engine

    engine.refuse_early(model, {**given, **more})
    with uncollected():
        run = getattr(engine, verb)  # imports torch; not yet resumable
    with resumable(), bar() as progress:
        found = run(model, content, out=place, progress=progress.update, **given, **more)
    return found, None if place is None else place.path


def convert(found: dict[str, Any], text: str | None) -> str | None:
    """Convert command-line strings to arguments of a verb, in place; returns the text."""
    for name in [name for name, value in found.items() if value is None or value == []]:
        del found[name]
    pictures = "images" in found
    if pictures and text is not None:
        raise InputError("`--images` take the place of a text. Found `--text` too; leave one out.")
    content = None if pictures else given_text(text)
    if pictures:
        found["images"], found["resolutions"] = _folder_and_sides(found["images"])
        found |= {name: None for name in ("length", "lengths") if name in found}
    for name in ("inputs", "theorems"):
        if name in found:
            found[name] = found[name].split(",")
    if found.get("theorems") in (["all"], ["none"]):
        (found["theorems"],) = found["theorems"]
    into = {"causal": _yes_or_no, "radius": _number_or_word}
    into |= {"layers": indices, "lengths": lambda text: text and parse_integers(text, "lengths")}
    found |= {name: into[name](found[name]) for name in into if name in found}
    return content


def indices(text: str) -> Any:
    """Layers: ``all``, or integers such as ``0,3`` or ``0:5``."""
    return text if text == "all" else parse_integers(text, "layers")


def _folder_and_sides(text: str) -> tuple[str, list[int] | None]:
    """Split a folder of images from the side lengths in pixels after an ``@``.

    >>> _folder_and_sides("cats@224,448")
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


def _number_or_word(text: str) -> float | str:
    if text in ("norm", "inputs", "row"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`--radius` should be a number, or norm. Found `{text}`.") from None
