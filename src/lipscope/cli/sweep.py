"""`lipscope sweep` and `lipscope smooth`: many questions resumed, and a model rescaled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from lipscope import engine, pages, records
from lipscope.cli.options import Model, convert, with_options
from lipscope.cli.terminal import bar, errors, note, resumable, say, show

_REASONS = 5  # of failed rows that are told


@with_options(
    "force",
    out=(Path, None, "Run folder.  [default: runs/SPEC]"),
    workers=(int, None, "Processes on this machine.  [default: 2]"),
    cluster=(str, None, "A Dask scheduler, such as tcp://host:8786."),
    dry_run=(bool, False, "Only say how many jobs and how long."),
)
def sweep(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.yaml", help="Models, layers, …: see docs/sweeps.md.")
    ],
    **options: Any,
) -> None:
    """Measure every combination of models, layers, maps, lengths, texts, … of a file.

    Finished rows are on the disk at once. The same command on the same folder goes on with
    what is missing.
    """
    place = records.Place(options.pop("out"), spec.stem, dated=False, force=options.pop("force"))
    if options.pop("dry_run"):
        found = engine.estimate(spec, place, **options)
        say([f"{found.jobs:,} jobs: {found.done:,} done, {found.jobs - found.done:,} to go."])
        if found.jobs > found.done:
            say([f"About {in_words(found.seconds)}. {found.basis}"])
        return
    with resumable(), bar() as told:
        rows = engine.sweep(spec, place, progress=told.update, **options)
    _tell_rows(rows, place.path)
    if any(row.passing for row in rows):
        raise typer.Exit(1)


def in_words(seconds: float) -> str:
    """A time to two digits.

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
    """What there is now, why some failed, and where to go on."""
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
    note(f"Look at them: lipscope rows {folder}")


@with_options(
    *("layers", "text", "length", "samples", "seed", "allow_pickle", "force"),
    layers=("all", "all, or 0,3,5 or 0:5."),
    length="Tokens of a window.",
    samples=(4, "Windows."),
    target=(float, ..., "Largest sigma."),
    out=(Path, ..., "Folder for the model."),
    steps=(int, 0, "Steps of training towards the old outputs."),
)
def smooth(model: Model = "minilm", **options: Any) -> None:
    """Rescale attention layers to a largest sigma on a text.

    The output projection of every layer above the target is multiplied by what is missing, at all
    windows of the text. Shown before and after: sigma; perplexity (decoders) or agreement of
    embeddings (others); how much an attack on the embeddings changes the outputs. The model is
    saved in the format of Hugging Face.
    """
    content = convert(options, options.pop("text"))
    options["progress"] = lambda what: errors.print(f"{what} …", markup=False)
    found = engine.smooth(model, content, **options)
    show(found)
    note(f"Model: {found.path}")
