"""`lipscope measure`, `bounds`, `directions`, `split`, `attack` and `push`: layers at inputs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lipscope import charts, engine, pages, records
from lipscope.cli.options import (
    INPUT,
    QUESTION,
    SOLVER,
    THEOREMS,
    Model,
    ask,
    indices,
    with_options,
)
from lipscope.cli.terminal import Screen, errors, note, say, say_table, show, write_lines
from lipscope.errors import InputError

_PLACE = ("model", "layer", "head", "map", "num_tokens", "sample")
_ASKED = ("map", "per_head", "metric", "radius", "theorems", "sharp", "ascent_steps")
_EDITS = ("budget", "recipes", "queries", "target", "samples", "read_out", "between")
_ASIDE = "`--budget` edits a text. Found `--steps`, `--like-text` or `--radius` too; leave it out."
_ALONE = "`--{}` goes with edits of a text. Found no `--budget`."


@with_options(
    *("layers", "lengths", "samples", *INPUT, *QUESTION, *THEOREMS, *SOLVER, "figures"),
    hidden=(*THEOREMS, "position_offset"),
    layers=("all", "all, or 0,3,5 or 0:5."),
    lengths=("16,64,256", "Tokens, or 2:512:10."),
    samples=(10, "Windows per length."),
    out="Run folder.  [default: runs/<date>-<model>]",
    jsonl="row",
)
def measure(model: Model = "minilm", **options: Any) -> None:
    """Measure sigma of attention, with intervals. More options: docs/commands.md."""
    rows, folder = ask("measure", model, options, model)
    if options["jsonl"]:
        for row in rows:
            sys.stdout.write(row.to_json() + "\n")
    console = errors if options["jsonl"] else Screen()
    console.print(rows.table(), crop=False)
    console.print()
    console.print(rows.summary(), markup=False, soft_wrap=True)
    # Each different remark once: bytes for tokens, steps that ran out, dropout.
    notes = {row.note for row in rows if row.note is not None}
    parts = {part for one in notes for part in one.split("; ") if "frobenius" not in part}
    for part in sorted(parts):
        note(f"Note: {part}.")
    if options["figures"]:
        rows.save(folder)
    note(f"Rows: {folder}")


@with_options(
    *("layers", "lengths", "samples", *INPUT, *_ASKED, *SOLVER, "figures"),
    hidden=("windows", "position_offset", "delta", "memory", "allow_pickle"),
    map="or heads, normed, residual.",
    per_head="Each query head alone.",
    metric="Only in this metric, measured in it too.",
    radius="A number, norm, or row (the input's own).",
    theorems="Only these.",
    out="Run folder for rows and bounds.",
    attack=(bool, False, "Also the worst input within the radius."),
    jsonl="row",
)
def bounds(model: Model = "minilm", **options: Any) -> None:
    """Every bound of a layer next to its sigma.

    Every theorem that applies, with its value, source and looseness against the measured
    sigma (same metric and map), and those that do not, with the reason. More
    options: docs/commands.md.
    """
    found, folder = ask("bounds", model, options)
    if options["jsonl"]:
        write_lines(_rows_and_bounds(found))
    else:
        say_table(found.bounds_table())
    if folder is not None:
        if options["figures"]:
            found.save(folder)
        note(f"Rows and bounds: {folder}")


def _rows_and_bounds(found: pages.Rows) -> Iterator[dict[str, Any]]:
    """Each row, then each of its bounds, which says of what it speaks."""
    of = records.by_row(found.bounds)
    for row in found:
        kind = records.MEASURED if records.given(row) else records.ADVERSARIAL
        yield {"theorem": kind} | row.to_dict()
        place = {name: getattr(row, name) for name in _PLACE}
        for bound in of.get(row.id, []):
            more = {"applicable": bound.applicable, "looseness": records.looseness(bound, row)}
            yield vars(bound) | place | more


@with_options(
    *("layers", "length", "among", *INPUT, "map", "metric", "move", "read", *SOLVER),
    hidden=("windows", "position_offset", "delta", "dtype", "memory"),
    among="File, a text a line: which one the output turns to.",
    metric="or token-relative.",
    move="first, last, not-first, a:b.",
    jsonl="token or head",
)
def directions(
    model: Model = "minilm",
    k: Annotated[int, typer.Option("-k", help="Number of directions.")] = 5,
    **options: Any,
) -> None:
    """Put the worst directions of a layer in words.

    The leading singular directions, each with an interval: at which tokens they move the
    input and the output, what these moves read as in the vocabulary, the model's logits or
    the other tokens, and which heads carry the answer. More options: docs/commands.md.
    """
    options["layer"] = indices(options.pop("layers"), "layers")
    found, folder = ask("directions", model, options, k=k)
    if options["jsonl"]:
        for one in found.directions:
            line = vars(one) | {sign: one.words(sign) for sign in ("plus", "minus")}
            write_lines([line | {"reads": one.reads, "determined": one.determined}])
    else:
        say_table(found.directions_table(), 120)
        say(f"Note: {text}." for text in sorted({row.note for row in found if row.note}))
    if folder is not None:
        note(f"Rows and directions: {folder}")


@with_options(
    *("layers", "length", *INPUT, "map", *SOLVER, "figures"),
    hidden=("windows", "position_offset", "images", "delta", "memory"),
    map="or heads.",
    out="Run folder for rows and tokens.",
    jsonl="token",
)
def split(model: Model = "minilm", **options: Any) -> None:
    """Compare moving tokens with taking them apart.

    Two halves of a token that move against each other can change the output more than any
    move of whole tokens (mass splitting). For every layer and head sigma and the largest
    gain of splitting one token; for every token of the window both of its own. More
    options: docs/commands.md.
    """
    found, folder = ask("split", model, options)
    if options["jsonl"]:
        write_lines(vars(one) | {"better_split": one.better_split} for one in found.tokens)
    else:
        show(found)
    if folder is not None:
        if options["figures"]:
            _draw_splitting(found, folder)
        note(f"Rows and tokens: {folder}")


def _draw_splitting(found: engine.Splitting, folder: Path) -> None:
    """Gains of every token, layer by layer, beside sigma of the layer."""
    panels = []
    for row in found.moved:
        mine = [t for t in found.tokens if (t.layer, t.sample) == (row.layer, row.sample)]
        if row.head is not None or row.sigma is None or not mine:
            continue
        series = (
            charts.Series("one token moved", tuple((t.index, t.moved) for t in mine), "points"),
            charts.Series("one token split", tuple((t.index, t.split) for t in mine), "points"),
            charts.Series("sigma", tuple((x, row.sigma) for x in (0, len(mine) - 1)), "dashes"),
        )
        panels.append(charts.Panel(f"layer {row.layer}", series, x="token", y="gain", log_x=False))
    if panels:
        chart = charts.curves_chart(f"{found.moved[0].model}: tokens split and moved", panels)
        charts.save_each(chart, [folder / f"split.{kind}" for kind in ("svg", "png")])


# --- inputs, texts and moves on which a layer is not smooth


@with_options(
    *("layer", "length", "read_out", "between", *INPUT, "radius", *SOLVER),
    hidden=("windows", "position_offset", "tol", "delta", "dtype", "device", "memory"),
    radius="A number, or norm.",
    out="Run folder.  [default: runs/<date>-<model>-attack]",
    like_text=(bool, False, "Radius of the text.  [default]"),
    steps=(int, None, "Of ascent; 0 for none.  [default: 40]"),
    budget=(int, None, "Edit this many tokens of the text instead."),
    recipes=(str, None, "sigma,hotflip,duplicate,random.  [all]"),
    queries=(int, None, "Edited texts to run.  [default: 32]"),
    target=(str, None, "Or layer: whose output.  [default: model]"),
    samples=(int, None, "Windows.  [default: 10]"),
    jsonl="input",
)
def attack(model: Model = "minilm", **options: Any) -> None:
    """Find the inputs that make sigma of a layer large.

    Next to sigma on real text: every construction for every head, then gradient ascent
    from the best of them and from the text; the worst is kept as worst.npz. Some 15 s for
    MiniLM. With --budget, edits of a text. More options: docs/commands.md.
    """
    steps, like_text, radius = options.pop("steps"), options.pop("like_text"), options["radius"]
    edits = {name: options.pop(name) for name in _EDITS}
    edits = {name: value for name, value in edits.items() if value not in (None, [])}
    budget = edits.get("budget")
    if radius is not None and like_text:
        raise InputError("`--radius` and `--like-text` exclude each other. Found both.")
    if budget is not None and (steps is not None or like_text or radius is not None):
        raise InputError(_ASIDE)
    if budget is None and edits:
        raise InputError(_ALONE.format(sorted(edits)[0].replace("_", "-")))
    if budget is not None:
        if "recipes" in edits:
            edits["recipes"] = edits["recipes"].split(",")
        if options["images"] is not None:
            raise InputError("`--budget` edits a text. Found `--images`; leave one out.")
        found, folder = ask("attack_text", model, options, f"{model}-attack", **edits)
        first = found.rows[0]
        about = {"model": first.model, "layer": first.layer, "by": found.by}
        lines, kept = (about | vars(one) for one in found.edits), f"Rows and edits: {folder}"
    else:
        steps = 40 if steps is None else steps
        found, folder = ask("attack", model, options, f"{model}-attack", steps=steps)
        lines, kept = _tried_inputs(found), f"Worst input: {folder / 'worst.npz'}"
    if options["jsonl"]:
        write_lines(lines)
    else:
        show(found)
    note(kept)


def _tried_inputs(attacked: engine.Attacked) -> Iterator[dict[str, Any]]:
    """Every construction for every head, and the ascent."""
    real, worst = attacked.rows
    about = {"model": real.model, "layer": real.layer, "num_tokens": real.num_tokens}
    about |= {"radius": attacked.radius, "radius_text": attacked.given_radius}
    about |= {"sigma_text": real.sigma, "upper_text": real.upper}
    for one in attacked.found:
        plain = {name: value for name, value in vars(one).items() if name not in ("x", "v")}
        if one is attacked.found[0]:  # measured again
            plain |= {"sigma": worst.sigma, "upper": worst.upper}
        yield about | plain


@with_options(
    *("layer", "length", "among", "between", "read_out", "pool", *INPUT, "map", *SOLVER, "figures"),
    hidden=("windows", "position_offset", "tol", "delta", "device", "memory", "allow_pickle"),
    map="attention|normed|residual|block|stack|model",
    out="Run folder for rows and sizes.",
    eps=(str, None, "Sizes by commas.  [default: up to ‖X‖]"),
    draws=(int, 3, "Random directions."),
    certificate=(bool, None, "Certify changes; unset: up to a minute."),
    jsonl="move",
)
def push(model: Model = "minilm", **options: Any) -> None:
    """Push a layer's input, and see where sigma ends.

    The input moves along the top singular vector, its top token alone, and at random; the
    model runs on as it is. Beside what happens: sigma · size, and a certificate for every
    move. A decoder says its next tokens, --among the nearest text. More options:
    docs/commands.md.
    """
    if options["eps"] is not None:
        options["eps"] = _numbers(options["eps"])
    found, folder = ask("push", model, options)
    if options["jsonl"]:
        write_lines(vars(step) | {"reads": json.loads(step.reads)} for step in found.steps)
    else:
        show(found)
    if folder is not None:
        if options["figures"]:
            _draw_pushes(found, folder)
        note(f"Rows and sizes: {folder}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as problem:
        one = str(problem).partition(": '")[2][:-1]
        raise InputError(f"`--eps` should be numbers by commas. Found `{one}`.") from None


def _draw_pushes(found: engine.Pushed, folder: Path) -> None:
    pushes = pages.pushes_in(found.rows, found.places, found.directions, found.steps)
    for name, chart in pages.push_charts(pushes):
        charts.save_each(chart, [folder / f"{name}.{kind}" for kind in ("svg", "png")])
