"""Commands on layers at inputs, from `measure` to `smooth`, the live page and sweeps."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lipscope import charts, engine, pages, records
from lipscope.cli import interrupts
from lipscope.cli.options import (
    INPUT,
    QUESTION,
    SOLVER,
    THEOREMS,
    Model,
    ask,
    convert,
    indices,
    with_options,
)
from lipscope.cli.terminal import (
    Screen,
    bar,
    errors,
    given_text,
    note,
    resumable,
    say,
    say_table,
    show,
    write_lines,
)
from lipscope.display import rounded_down, rounded_up
from lipscope.errors import InputError

_PLACE = ("model", "layer", "head", "map", "num_tokens", "sample")
_ASKED = ("map", "per_head", "metric", "radius", "theorems", "sharp", "ascent_steps")
_EDITS = ("budget", "recipes", "queries", "target", "samples", "read_out", "between")
_ASIDE = "`--budget` edits a text. Found `--steps`, `--like-text` or `--radius` too; leave it out."
_ALONE = "`--{}` goes with edits of a text. Found no `--budget`."
_MOVES = {"token": "every token moves", "frobenius": "all tokens together move"}
_FORMS = {
    "sum": "heads combined by the sum of their bounds",
    "projection": "heads combined by the norm of the output projection",
    "joint": "heads combined in one bound of the whole layer",
    "expansion": "a bound of sigma at X plus a second-order term",
    "slopes": "the derivatives of the parts at X, composed, plus a bound of the remainder",
}
_OF_BALL = ("eps", "head", "steps", "sharp", "random", "ascents")
_REASONS = 5  # maximum number of failures in the report
_HIDDEN = ("windows", "position_offset", "device", "dtype", "delta", "tol")


@with_options(
    *("layers", "lengths", "samples", *INPUT, *QUESTION, *THEOREMS, *SOLVER, "figures"),
    hidden=(*THEOREMS, "position_offset"),
    layers=("all", "all, or 0,3,5 or 0:5."),
    lengths=("16,64,128,256", "or 2:512:10."),
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
    # Each distinct note once, such as on byte tokens, the step limit or dropout.
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
    metric="Metric of bounds and measurement.",
    radius="A number, norm, or row (the input's own).",
    theorems="Only these.",
    out="Run folder for rows and bounds.",
    attack=(bool, False, "Also the worst input within the radius."),
    jsonl="row",
)
def bounds(model: Model = "minilm", **options: Any) -> None:
    """Compare every bound of a layer with its sigma.

    Each applicable theorem with its value, source and looseness relative to the measured
    sigma (same metric and map), and the others with the reason. More options:
    docs/commands.md.
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
    """Each row, followed by its bounds with the fields that identify the row."""
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
    among="File, one text per line: which one the output moves to.",
    metric="or token-relative.",
    move="first, last, not-first, a:b.",
    jsonl="token or head",
)
def directions(
    model: Model = "minilm",
    k: Annotated[int, typer.Option("-k", help="Number of directions.")] = 5,
    **options: Any,
) -> None:
    """Describe the most sensitive directions of a layer in words.

    The leading singular directions, each with an interval: which input and output tokens
    they move, the nearest words in the vocabulary, the model's logits or the other tokens,
    and the contribution of each head. More options: docs/commands.md.
    """
    options["layer"] = indices(options.pop("layers"))
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
    """Compare moving tokens with splitting them.

    Moving the two halves of a token in opposite directions can change the output more than
    any move of whole tokens (mass splitting). For every layer and head: sigma and the
    largest gain of splitting one token; for every token of the window: both gains. More
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
    """Draw the gains of every token, with sigma of the layer, for each layer."""
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


# --- worst-case inputs, text edits and perturbations


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
    """Find inputs that maximise sigma of a layer.

    Compared with sigma on real text: every construction for every head, then gradient
    ascent from the best of them and from the text; the worst input is saved as worst.npz.
    Takes 15 s for MiniLM. With --budget, edits of a text. More options: docs/commands.md.
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
    """One record per construction and head, and for the ascent."""
    real, worst = attacked.rows
    about = {"model": real.model, "layer": real.layer, "num_tokens": real.num_tokens}
    about |= {"radius": attacked.radius, "radius_text": attacked.given_radius}
    about |= {"sigma_text": real.sigma, "upper_text": real.upper}
    for one in attacked.found:
        plain = {name: value for name, value in vars(one).items() if name not in ("x", "v")}
        if one is attacked.found[0]:  # with the independent measurement
            plain |= {"sigma": worst.sigma, "upper": worst.upper}
        yield about | plain


@with_options(
    *("layer", "length", "among", "between", "read_out", "pool", *INPUT, "map", *SOLVER, "figures"),
    hidden=("windows", "position_offset", "tol", "delta", "device", "memory", "allow_pickle"),
    map="attention|normed|residual|block|stack|model",
    out="Run folder for rows and sizes.",
    eps=(str, None, "Comma-separated sizes.  [default: up to ‖X‖]"),
    draws=(int, 3, "Random directions."),
    certificate=(bool, None, "Certify changes; unset: up to a minute."),
    jsonl="move",
)
def push(model: Model = "minilm", **options: Any) -> None:
    """Perturb a layer's input, and see up to which size sigma predicts the change.

    The input moves along the top singular vector, along its top token alone, and at random;
    the rest of the model is unchanged. The actual changes are shown with sigma · size and a
    certificate; decoders also show their next tokens, and --among the nearest text. More
    options: docs/commands.md.
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
        raise InputError(f"`--eps` should be comma-separated numbers. Found `{one}`.") from None


def _draw_pushes(found: engine.Pushed, folder: Path) -> None:
    pushes = pages.pushes_in(found.rows, found.places, found.directions, found.steps)
    for name, chart in pages.push_charts(pushes):
        charts.save_each(chart, [folder / f"{name}.{kind}" for kind in ("svg", "png")])


# --- certificates in a ball, of outputs or of a decision


@with_options(
    *("layer", "length", "read_out", "between", "pool", *(n for n in INPUT if n != "map"), *SOLVER),
    hidden=(*_HIDDEN, "images", "memory", "special_tokens", "tokens"),
    eps=(float, None, "Radius of the ball.  [default: 0.01]"),
    decision=(bool, False, "Radius within which a decision is constant."),
    ball=(
        str,
        None,
        "token, frobenius; for a decision joint, token, each.  [default: token; joint]",
    ),
    tokens=(str, None, "Tokens that may move, for a decision."),
    head=(int, None, "One query head alone.  [default: all]"),
    steps=(int, None, "Radii of the bound.  [default: 4]"),
    sharp=(bool, None, "Sharpest bound, slow; unset: up to seconds."),
    random=(int, None, "Random points of the attack.  [default: 20]"),
    ascents=(int, None, "Ascents of each kind.  [default: 2]"),
    map=(str, None, "Or residual, block, …  [default: attention; model]"),
    length=(None, "Tokens in the window.  [default: 64; the text]"),
    pool=(None, "Pool by mean or first.  [default: mean]"),
    out="Run folder for the row, and worst inputs.",
    jsonl="ball",
)
def certify(model: Model = "minilm", **options: Any) -> None:
    """Bound the effect of all perturbations in a ball around a text.

    Certify L with ‖f(X') − f(X)‖ ≤ L ‖X' − X‖ for every X' in the ball, then attack it:
    the largest ratio found inside the ball must stay below L. Takes 15 s for MiniLM. With
    --decision, --between or --read-out: the radius within which a decision cannot change, for
    the whole model from --layer on or, with --map attention, for that layer's pooled output.
    More options: docs/commands.md.
    """
    given = {name: options.pop(name) for name in _OF_BALL}
    ball, tokens = options.pop("ball"), options.pop("tokens")
    if options.pop("decision") or options["read_out"] is not None or options["between"]:
        return _decision(model, ball, tokens, given, options)
    for name, value in (("tokens", tokens), ("pool", options.pop("pool"))):
        if value is not None:
            raise InputError(f"`--{name}` goes with a decision. Found it alone; leave it out.")
    if ball not in (None, *_MOVES):
        raise InputError(f"`ball` should be {' or '.join(_MOVES)}. Found `{ball}`.")
    options["map"] = options["map"] or "attention"
    default: dict[str, Any] = {"eps": 0.01, "random": 20, "ascents": 2}
    how = {name: default.get(name) if value is None else value for name, value in given.items()}
    one, folder = ask("certify", model, options, ball=ball or "token", **how)
    return _tell([one], folder, () if options["jsonl"] else _of_ball(one))


def _tell(found: Sequence[Any], folder: Any, lines: Iterable[str]) -> None:
    """Print the results as lines, or as JSON if there are none, and the location of the files."""
    lines = list(lines)
    if not lines:
        write_lines(map(_certificate_line, found))
    say(lines)
    if lines and getattr(found[0], "words", None) and found[0].ball == "token":
        show(engine.TokenRadii(tuple(found)))
    if folder is not None:
        file = getattr(found[0], "file", None)
        note(f"Row: {folder}" + (f"; inputs: {folder / file}" if file else ""))
    if getattr(found[-1], "stopped", False):
        kept = "are saved; rerun the same command to resume."
        note(f"Stopped. Bounds proved so far {'are shown above.' if folder is None else kept}")
        raise typer.Exit(130)
    if any(one.violated for one in found):
        raise typer.Exit(1)


def _decision(
    model: str,
    ball: str | None,
    tokens: str | None,
    given: Mapping[str, Any],
    options: dict[str, Any],
) -> None:
    if wrong := [f"`--{name}`" for name, value in given.items() if value is not None]:
        raise InputError(f"A decision has no {wrong[0]}. Found it; leave it out.")
    how: dict[str, Any] = {"ball": ball or "joint", "at_layer": options.pop("layer")}
    how["tokens"] = None if tokens is None else engine.parse_integers(tokens, "tokens")
    found, folder = ask("certify_decision", model, options, **how)
    _tell(found, folder, () if options["jsonl"] else _of_decision(found))


def _of_decision(found: Sequence[engine.DecisionCertificate]) -> Iterator[str]:
    """The decision and its radius; radii of single tokens are shown in a table."""
    one = found[0]
    later = f"from the input of layer {one.at_layer} on" if one.at_layer else "whole model"
    what = later if one.map == "model" else f"layer {one.at_layer}"
    yield f"{one.model}, {what}, decided by {one.by}"
    yield (
        f"decision      “{one.decision_name}”; “{one.rival_name}” is behind by a margin of "
        f"{pages.number(one.margin)}"
    )
    if one.ball == "token":
        return
    if math.isinf(one.radius):
        yield f"{one.ball:<14}certified at any radius: {one.note}"
        return
    below = pages.number(one.radius, 4, rounded_down)
    yield f"{one.ball:<14}certified radius {below}: the decision stands while {one.moves} by less"
    attack = "no attack changed it" if one.margin else "the two are tied"
    if one.attack:
        attack = f"an attack changes it at {pages.number(one.attack)}"
    yield f"{'':14}{attack}; to first order it ends at {pages.number(one.first_order)}"
    if one.words_within is not None:
        yield (
            f"{'':14}{one.words_within} embeddings of other words lie within it; the nearest is "
            f"at {pages.number(one.nearest)}"
        )
    if one.violated:
        yield "VIOLATED: the attack found less than the certified radius. Please report."
    if one.note:
        yield f"Note: {one.note}."


def _certificate_line(
    found: engine.CertifiedBall | engine.DecisionCertificate,
) -> dict[str, Any]:
    """A certificate as a JSON object, without the per-head values; non-finite numbers are null."""
    left = ("heads", "value", "ratio", "file")
    values = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in left}
    if hasattr(found, "heads"):
        more = {"certificate": "value", "over_attack": "over_attack"}
        values |= {name: getattr(found, key) for name, key in more.items()}
    return records.plain_values(values | {"violated": found.violated})


def _of_ball(found: engine.CertifiedBall) -> Iterator[str]:
    head = "" if found.head is None else f", head {found.head}"
    layer = "" if found.layer is None else f", layer {found.layer}"
    yield f"{found.model}{layer}{head}, map {found.map}, {found.num_tokens} tokens"
    yield (
        f"ball          {_MOVES[found.ball]} by at most {rounded_down(found.eps):.4g} "
        f"({found.relative_eps:.2g} of the largest token norm)"
    )
    value, sigma = (f"{rounded_up(one):.4g}" for one in (found.value, found.sigma_bound))
    yield (
        f"certificate   ‖f(X') − f(X)‖ ≤ {value} ‖X' − X‖ from the centre X to "
        f"every X' in the ball ({_FORMS.get(found.form, found.form)})"
    )
    yield (
        f"sigma         at most {sigma} anywhere in the ball, hence between any two of its inputs; "
        f"at X measured in {pages.interval(found.sigma, found.upper)}"
    )
    yield (
        f"attack        largest ratio found {found.largest_ratio:.4g}, largest sigma "
        f"{found.largest_sigma:.4g}, in {found.attempts} attempts"
    )
    if found.violated:
        yield "VIOLATED: the attack found more than the certificate allows. Please report."
    elif found.over_attack is not None:
        yield f"The certificate holds; it is {found.over_attack:.3g} times the best attack."
    if found.note:
        yield f"Note: {found.note}."


# --- the live page


@with_options(
    text=(str, None, "File with the initial text, or -."),
    beside=(str, None, "A second model for comparison."),
    browser=(bool, True, "Open a browser."),
)
def explore(model: Model = "minilm", **options: Any) -> None:
    """Open a local page that shows, as you type, where attention is fragile.

    The page is only available on this machine, at a secret address. To use it from another
    machine, forward its port. Press Ctrl-C to stop it.
    """
    begin, beside = given_text(options["text"]), options["beside"]
    from lipscope.explore import served

    interrupts.as_usual()
    server = served([model] if beside is None else [model, beside], begin)
    note(f"{server.address}\nPress Ctrl-C to stop.")
    if options["browser"]:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    errors.print("Stopped.")
    raise typer.Exit(130)


# --- sweeps, and rescaling of a model


@with_options(
    "force",
    out=(Path, None, "Run folder.  [default: runs/SPEC]"),
    workers=(int, None, "Processes on this machine.  [default: 2]"),
    cluster=(str, None, "A Dask scheduler, such as tcp://host:8786."),
    dry_run=(bool, False, "Only estimate the number of jobs and the time."),
)
def sweep(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.yaml", help="Models, layers, …: see docs/sweeps.md.")
    ],
    **options: Any,
) -> None:
    """Measure every combination of models, layers, maps, lengths, texts, … in a file.

    Finished rows are written to disk immediately. Rerun the same command with the same
    folder to resume.
    """
    place = records.Place(options.pop("out"), spec.stem, dated=False, force=options.pop("force"))
    if options.pop("dry_run"):
        found = engine.estimate(spec, place, **options)
        jobs = f"{found.jobs:,} job{'s' * (found.jobs != 1)}"
        say([f"{jobs}: {found.done:,} done, {found.jobs - found.done:,} to go."])
        if found.jobs > found.done:
            count = f"{found.decisions:,} decision{'s' * (found.decisions > 1)}"
            besides = f", besides {count}, whose time is not known before" * bool(found.decisions)
            say([f"About {in_words(found.seconds)}{besides}. {found.basis}"])
        return
    with resumable(), bar() as progress:
        rows = engine.sweep(spec, place, progress=progress.update, **options)
    _tell_rows(rows, place.path)
    if any(row.passing for row in rows):
        raise typer.Exit(1)


def in_words(seconds: float) -> str:
    """A duration to two digits.

    >>> in_words(5.2), in_words(754.0), in_words(9000.0), in_words(4e5)
    ('5 s', '13 min', '2.5 h', '4.6 days')
    """
    for size, unit in ((86400, "days"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 99.5:
        return f"{seconds / 60:.0f} min"
    return f"{max(seconds, 1):.0f} s"


def _job(row: records.Measurement) -> str:
    layer = "" if row.layer is None else f", layer {row.layer}"
    return f"{row.model}{layer}, {row.map}, {row.num_tokens} tokens, sample {row.sample}"


def _tell_rows(rows: pages.Rows, folder: Path) -> None:
    """Print the number of rows, the failures with their reasons, and the next step."""
    lost = [row for row in rows if row.passing]
    reasons = Counter(row.error for row in rows if row.status == "failed" and not row.passing)
    failed = f" ({sum(reasons.values()) + len(lost):,} failed)" if reasons or lost else ""
    lines = [f"{len(rows):,} rows{failed} in {folder}."]
    lines += [f"  {count:,} failed: {why}" for why, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        lines.append(
            f"  and {len(reasons) - _REASONS} other reasons: --where \"status = 'failed'\""
        )
    lines += [f"  {_job(row)}: {row.error}" for row in lost[:_REASONS]]
    if len(lost) > _REASONS:
        lines.append(f"  and {len(lost) - _REASONS} others that the next run tries again")
    lines += filter(None, [rows.confidence()])
    say(lines)
    note(f"To show them: lipscope rows {folder}")


@with_options(
    *("layers", "text", "length", "samples", "seed", "allow_pickle", "force"),
    layers=("all", "all, or 0,3,5 or 0:5."),
    length="Tokens of a window.",
    samples=(4, "Windows."),
    target=(float, ..., "Largest sigma."),
    out=(Path, ..., "Folder for the model."),
    steps=(int, 0, "Training steps towards the original outputs."),
)
def smooth(model: Model = "minilm", **options: Any) -> None:
    """Rescale attention layers to a maximum sigma on a text.

    The output projection of every layer above the target is scaled down, so that sigma meets the
    target on all windows of the text. Reported before and after: sigma; perplexity (decoders) or
    agreement of embeddings (others); the effect of an attack on the embeddings. The model is
    saved in Hugging Face format.
    """
    content = convert(options, options.pop("text"))
    options["progress"] = lambda what: errors.print(f"{what} …", markup=False)
    found = engine.smooth(model, content, **options)
    show(found)
    note(f"Model: {found.path}")
