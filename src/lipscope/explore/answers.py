"""Questions from the page, validated, and their answers as streams of events."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from torch.overrides import TorchFunctionMode

from lipscope.charts import as_svg, spaced, visible
from lipscope.display import rounded_down
from lipscope.engine import DecisionCertificate, OpenModel, directions, push
from lipscope.errors import InputError
from lipscope.linalg import Watch
from lipscope.models import whole_text
from lipscope.pages import Rows, directions_in_words, pushes_in, window_shares
from lipscope.records import plain_values

Event = dict[str, Any]
Tell = Callable[[Event], None]
Check = Callable[[], None]
MOST_TOKENS = 256
MOST_LETTERS = 20_000
_MASKS = {"own": None, "yes": True, "no": False}
_FILES = ("report", "rows", "figure")
_KINDS = ("measure", "words", "push", "certify", *_FILES)
_BALLS = ("joint", "each", "token")
# Options of `measure` with their defaults.
_OPTIONS = {"map": "attention", "metric": "frobenius", "move": "all", "read": "all"}
_EVERY = 0.25  # seconds between two intervals of one layer: the refresh rate of the page
_ROUGH = 3  # steps before the first interval: earlier ones are too wide
_ROW = (
    *("id", "model", "layer", "head", "map", "metric", "move", "read", "num_tokens", "sigma"),
    *("upper", "delta", "relative", "status", "note", "error", "top_token", "top_share"),
    *("derivative_error", "products", "seconds"),
)
_CERTIFIED = (
    *("decision_name", "rival_name", "margin", "ball", "tokens", "words", "radius", "first_order"),
    *("attack", "nearest", "words_within", "seconds", "note"),
)


# --- questions


@dataclass(frozen=True)
class Question:
    """A question from a window of the page. Frozen, as it is the key of stored answers.

    Raises:
        InputError: If an entry has an invalid value.
    """

    text: str
    kind: str = "measure"  # or another request, such as ``push``
    model: int = 0  # index of the open model
    layer: int | None = None  # a single layer; None for all
    heads: bool = False  # each head of the layer separately
    map: str = "attention"
    metric: str = "frobenius"
    move: str = "all"
    read: str = "all"
    mask: str = "own"
    among: str = ""  # texts, one per line: the nearest is the reading, or the decision
    ball: str = "joint"

    def __post_init__(self) -> None:
        for name, known in (("kind", _KINDS), ("mask", tuple(_MASKS)), ("ball", _BALLS)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"`{name}` should be {', '.join(known)}. Found `{getattr(self, name)[:40]}`."
                )
        if len(self.text) + len(self.among) > MOST_LETTERS:
            raise InputError(
                f"The text should have at most {MOST_LETTERS:,} characters here. Found "
                f"{len(self.text) + len(self.among):,}; `lipscope measure` takes longer texts."
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
        """Whether it is sent on every keystroke."""
        return self.kind == "measure"

    @property
    def is_file(self) -> bool:
        """Whether the answer is a file to download."""
        return self.kind in _FILES

    @property
    def texts(self) -> list[str]:
        """The texts of ``among``."""
        return [line.strip() for line in self.among.splitlines() if line.strip()]


def question_of(given: Any, models: int) -> Question:
    """A question from the JSON of the page, for the given number of models.

    >>> question_of({"text": "It was late.", "layer": 3}, 1).layer
    3
    """
    if not isinstance(given, Mapping):
        raise InputError("A question should be a JSON object.")
    kinds = get_type_hints(Question)
    for name, value in given.items():
        wanted = kinds.get(name)
        # `type`, as in JSON: a bool is not an int.
        if wanted is None or type(value) not in getattr(wanted, "__args__", (wanted,)):
            raise InputError(
                f"A question should have only entries of the page. Found `{name[:40]}`."
            )
    if not isinstance(given.get("text"), str):
        raise InputError("A question should have a text. Found none.")
    asked = Question(**given)
    if not 0 <= asked.model < models or (asked.layer or 0) < 0:
        raise InputError("A question should refer to an open model and one of its layers.")
    return asked


def _options(asked: Question, length: int) -> dict[str, Any]:
    """The options of `measure` for the same rows."""
    layers = {} if asked.layer is None else {"layers": [asked.layer]}
    return {"lengths": length, "samples": 1} | layers | asked.options


def as_python(asked: Question, name: str, length: int) -> str:
    """Python code for the same rows."""
    more = ", ".join(f"{key}={value!r}" for key, value in _options(asked, length).items())
    return (
        f"import lipscope as ls\n\nmodel = ls.load_model({name!r})\ntext = {asked.text!r}\n"
        f"rows = ls.measure(model, text, {more})\nrows"
    )


def as_command(asked: Question, name: str, length: int) -> str:
    """The command line for the same rows."""
    words: list[Any] = ["lipscope", "measure", name, "--text", "-"]
    for option, value in _options(asked, length).items():
        words.append("--" + option.replace("_", "-"))
        if option == "causal":
            words.append("yes" if value else "no")
        elif value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else value)
    return f"printf %s {shlex.quote(asked.text)} | {shlex.join(map(str, words))}"


# --- answers


class _Interruptible(TorchFunctionMode):
    """Run ``check`` before every torch function, so that abandoned questions stop."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        return func(*args, **(kwargs or {}))


def events_of(
    model: OpenModel, asked: Question, check: Check, tell: Tell
) -> Generator[Event, None, None]:
    """The events of an answer; temporary progress events go to ``tell`` and are not stored.

    ``check`` is called between products and raises if the question is abandoned.
    """
    began = time.perf_counter()
    if not asked.text.strip():
        raise InputError("Type a text: there is none yet.")
    for event in _ANSWERS[asked.kind](model, asked, check, tell):
        check()
        yield event
    yield {"event": "done", "seconds": time.perf_counter() - began}


def length_of(model: OpenModel, text: str) -> tuple[int, bool]:
    """Number of tokens to read from a text, and whether the text is longer."""
    most = min(MOST_TOKENS, model.loaded.max_tokens or MOST_TOKENS)
    ids = whole_text(text, model.loaded.reader_of_text(), longest=most + 1)
    return min(ids.shape[1], most), ids.shape[1] > most


def _measured(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    length, cut = length_of(model, asked.text)
    code = {"python": as_python(asked, model.name, length)}
    code |= {"command": as_command(asked, model.name, length)}
    yield {"event": "asked", "length": length, "cut": cut} | code
    for layer, rows in _rows(model, asked, length, check, tell):
        tokens = {row.id: [t for t in rows.tokens if t.id == row.id] for row in rows}
        yield {
            "event": "rows",
            "layer": layer,
            "words": spaced(tokens[rows[0].id]),
            "rows": [
                {name: getattr(row, name) for name in _ROW} | window_shares(tokens[row.id])
                for row in rows
            ],
        }


def _rows(
    model: OpenModel, asked: Question, length: int, check: Check, tell: Tell
) -> Iterator[tuple[int | None, Rows]]:
    """The rows of each layer."""

    def watch(layer: int | None) -> Watch:
        """A callback that reports intervals as they narrow, at a limited rate."""
        steps, due = 0, 0.0

        def report(now: Callable[[], Sequence[tuple[float, float]]]) -> None:
            nonlocal steps, due
            check()
            steps += 1
            if steps < _ROUGH or time.perf_counter() < due:
                return
            ends = now()
            if all(math.isfinite(upper) for _, upper in ends):
                tell({"event": "rough", "layer": layer, "ends": ends})
            due = time.perf_counter() + _EVERY

        return report

    for at in model.layers(asked.text, watch=watch, **_options(asked, length)):
        yield at.layer, at.rows()
        check()


def _pushed(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    where = _one_layer(model, asked)
    options = {name: asked.options[name] for name in ("map", "causal") if name in asked.options}

    def report(done: int, total: int, _: Any) -> None:
        tell({"event": "progress", "text": f"{done} of {total} directions"})

    with _Interruptible(check):
        found = push(
            model,
            asked.text,
            draws=1,
            certificate=False,
            among=asked.texts or None,
            progress=report,
            **where,
            **options,
        )
    (shown,) = pushes_in(found.rows, found.places, found.directions, found.steps)
    yield {"event": "push", "push": shown.as_plain()}


def _in_words(model: OpenModel, asked: Question, check: Check, _: Tell) -> Iterator[Event]:
    where = _one_layer(model, asked)
    options = {name: v for name, v in asked.options.items() if name != "per_head"}
    with _Interruptible(check):
        found = directions(model, asked.text, k=1, **where, **options)
    yield {"event": "words", "directions": directions_in_words(found.directions)}


def _one_layer(model: OpenModel, asked: Question) -> dict[str, Any]:
    return {"layer": asked.layer or 0, "length": length_of(model, asked.text)[0]}


def _certified(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    line = ""

    def report(text: str) -> None:
        nonlocal line
        check()
        if text != line:
            line = text
            tell({"event": "progress", "text": text})

    with _Interruptible(check):
        found = model.decision(asked.text, between=asked.texts or None, causal=_MASKS[asked.mask])
    yield {"event": "decision", **{name: getattr(found, name) for name in _DECIDED}}
    ball: Any = asked.ball
    for tokens in found.groups(ball, None):
        yield {"event": "certificate", **_plain(found.certified(ball, tokens, report))}


_DECIDED = ("answer_name", "runner_up_name", "by", "margin", "words")


def _plain(one: DecisionCertificate) -> Event:
    values = {name: getattr(one, name) for name in _CERTIFIED}
    values["words"] = [visible(word) for word in one.words]
    values["radius"] = rounded_down(one.radius)  # the displayed value remains a lower bound
    return plain_values(values)


def _kept(model: OpenModel, asked: Question, check: Check, tell: Tell) -> Iterator[Event]:
    """A file of the displayed results: the static report, the rows, or the figure."""
    rows, tokens = [], []
    for _, some in _rows(model, asked, length_of(model, asked.text)[0], check, tell):
        rows += some
        tokens += some.tokens
    found = Rows(rows, tokens)
    files = {
        "report": ("html", "text/html", lambda: found.show().html),
        "rows": (
            "jsonl",
            "application/x-ndjson",
            lambda: "".join(f"{r.to_json()}\n" for r in found),
        ),
        "figure": ("svg", "image/svg+xml", lambda: as_svg(found.plot_layers())),
    }
    ending, kind, content = files[asked.kind]
    yield {"event": "file", "name": f"explore.{ending}", "type": kind, "content": content()}


_ANSWERS: dict[str, Callable[[OpenModel, Question, Check, Tell], Iterator[Event]]] = {
    "measure": _measured,
    "words": _in_words,
    "push": _pushed,
    "certify": _certified,
    **dict.fromkeys(("report", "rows", "figure"), _kept),
}
