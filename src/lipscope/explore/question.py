"""A question of the page: checked as it comes in, and as Python and the command line say it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from lipscope.errors import InputError

MOST_TOKENS = 256
MOST_LETTERS = 20_000
_MASKS = {"own": None, "yes": True, "no": False}
_FILES = ("report", "rows", "figure")
_KINDS = ("measure", "words", "push", "certify", *_FILES)
_BALLS = ("joint", "each", "token")
# What `measure` has too, with what it takes for granted.
_OPTIONS = {"map": "attention", "metric": "frobenius", "move": "all", "read": "all"}


@dataclass(frozen=True)
class Question:
    """What a window of the page asks. Frozen, so that answers are kept by it.

    Raises:
        InputError: If an entry is none that the page has.
    """

    text: str
    kind: str = "measure"  # or what else is wanted, such as ``push``
    model: int = 0  # which of the open models
    layer: int | None = None  # one alone; None for all
    heads: bool = False  # each head of the layer by itself
    map: str = "attention"
    metric: str = "frobenius"
    move: str = "all"
    read: str = "all"
    mask: str = "own"
    among: str = ""  # texts, a line each: the nearest is read, or decides
    ball: str = "joint"

    def __post_init__(self) -> None:
        for name, known in (("kind", _KINDS), ("mask", tuple(_MASKS)), ("ball", _BALLS)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"`{name}` should be {', '.join(known)}. Found `{getattr(self, name)[:40]}`."
                )
        if len(self.text) + len(self.among) > MOST_LETTERS:
            raise InputError(
                f"The text should have at most {MOST_LETTERS:,} letters here. Found "
                f"{len(self.text) + len(self.among):,}; `lipscope measure` takes longer ones."
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options of `measure`."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name, usual in _OPTIONS.items()
            if getattr(self, name) != usual
        }
        if self.heads:
            found["per_head"] = True
        if _MASKS[self.mask] is not None:
            found["causal"] = _MASKS[self.mask]
        return found

    @property
    def is_quick(self) -> bool:
        """Whether it is asked at every key."""
        return self.kind == "measure"

    @property
    def is_file(self) -> bool:
        """Whether the answer is a file to keep."""
        return self.kind in _FILES

    @property
    def texts(self) -> list[str]:
        """The texts of ``among``."""
        return [line.strip() for line in self.among.splitlines() if line.strip()]


def question_of(given: Any, models: int) -> Question:
    """A question from the JSON of the page, for so many models.

    >>> question_of({"text": "It was late.", "layer": 3}, 1).layer
    3
    """
    if not isinstance(given, Mapping):
        raise InputError("A question should be a JSON object.")
    kinds = get_type_hints(Question)
    for name, value in given.items():
        wanted = kinds.get(name)
        # JSON tells true from 1, and so does this.
        if wanted is None or type(value) not in getattr(wanted, "__args__", (wanted,)):
            raise InputError(
                f"A question should have the entries of the page. Found `{name[:40]}`."
            )
    if not isinstance(given.get("text"), str):
        raise InputError("A question should have a text. Found none.")
    asked = Question(**given)
    if not 0 <= asked.model < models or (asked.layer or 0) < 0:
        raise InputError("A question should be of a model and a layer that are open here.")
    return asked


def as_python(asked: Question, name: str, length: int) -> str:
    """The lines of Python that give the same rows."""
    more = {"lengths": length, "samples": 1} | _layers(asked) | asked.options
    return "\n".join(
        [
            "import lipscope as ls",
            "",
            f"model = ls.load_model({name!r})",
            f"text = {asked.text!r}",
            f"rows = ls.measure(model, text, {', '.join(f'{k}={v!r}' for k, v in more.items())})",
            "rows",
        ]
    )


def as_command(asked: Question, name: str, length: int) -> str:
    """The command that gives the same rows."""
    words: list[Any] = ["lipscope", "measure", name, "--text", "-"]
    more = {"lengths": length, "samples": 1} | _layers(asked) | asked.options
    for option, value in more.items():
        words.append("--" + option.replace("_", "-"))
        if option == "causal":
            words.append("yes" if value else "no")
        elif value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else value)
    return f"printf %s {shlex.quote(asked.text)} | {shlex.join(map(str, words))}"


def _layers(asked: Question) -> dict[str, Sequence[int]]:
    return {} if asked.layer is None else {"layers": [asked.layer]}
