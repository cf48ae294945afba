"""`lipscope attack`: inputs on which a layer is far from smooth."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lipscope.cli.bounds import parse_radius, table
from lipscope.cli.terminal import default_folder, errors, read_text
from lipscope.errors import InputError
from lipscope.pages.table import number

if TYPE_CHECKING:
    from lipscope.attacks import WorstInput
    from lipscope.engine.capture import Captured

EXAMPLE = "Example: lipscope attack minilm --layer 3 --length 64 --like-text --steps 20"


def attack(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="minilm, smollm2, a folder, a hub id, or random:FAMILY…"
        ),
    ] = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    length: Annotated[int, typer.Option(help="Number of tokens.")] = 64,
    radius: Annotated[
        str | None,
        typer.Option(help="Largest token norm: a number, or norm for that before the layer."),
    ] = None,
    like_text: Annotated[
        bool,
        typer.Option("--like-text", help="The largest token norm of the text.  [default]"),
    ] = False,
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or - for standard input. Default: Python's manual."),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps of gradient ascent; 0 for constructions only.")
    ] = 20,
    restarts: Annotated[int, typer.Option(help="Random starts of the ascent.")] = 4,
    tight: Annotated[
        bool,
        typer.Option(
            "--tight", help="Narrow intervals of the worst input and of the text (float64)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    special_tokens: Annotated[
        bool, typer.Option(help="Put the model's special tokens around the text.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the worst input.  [default: runs/<date>-<model>-attack]"),
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per input on stdout, no table.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights (weights only).")
    ] = False,
) -> None:
    """Find the inputs that make sigma of a layer large.

    Next to sigma on real text: every construction for every head, then gradient ascent
    from the best of them and from the text; the worst is kept as worst.npz (x, v) with worst.json.
    """
    if radius is not None and like_text:
        raise InputError("`--radius` and `--like-text` exclude each other. Found both.")
    wanted = parse_radius(radius)
    content = read_text(text)
    import torch

    from lipscope.attacks import worst
    from lipscope.engine.bounds import radius_of, sigmas
    from lipscope.engine.capture import captures

    (real,) = captures(
        model,
        content,
        layers=[layer],
        lengths=[length],
        special_tokens=special_tokens,
        dtype="float64" if tight else "float32",
        seed=seed,
        allow_pickle=allow_pickle,
    )
    at = radius_of([real], wanted)
    found = worst(
        real.attention,
        num_tokens=length,
        radius=at,
        restarts=restarts,
        steps=steps,
        start=[real.x],
        tight=tight,
        generator=torch.Generator().manual_seed(seed),
    )
    ((sigma, upper),) = sigmas(real, "attention", per_head=False, seed=seed, tight=tight)
    folder = out if out is not None else default_folder(model, "-attack")
    first = found[0]
    if first.x is None:
        raise InputError(f"No input is available for this layer: {first.reason}.")
    told = {"model": model, "layer": layer, "num_tokens": length, "radius": at}
    told |= {"sigma_text": sigma, "upper_text": upper, "radius_text": real.radius}
    _save(folder, first, told)
    if jsonl:
        for one in found:
            sys.stdout.write(json.dumps(told | _plain(one), ensure_ascii=False) + "\n")
    else:
        _show(found, real, at, (sigma, upper))
    errors.print(f"Worst input: {folder / 'worst.npz'}", markup=False, soft_wrap=True)


def _plain(one: WorstInput) -> dict[str, Any]:
    """An input without its tensors."""
    return {name: value for name, value in vars(one).items() if name not in ("x", "v")}


def _save(folder: Path, first: WorstInput, told: dict[str, Any]) -> None:
    import numpy as np

    assert first.x is not None
    v = first.v if first.v is not None else first.x.new_zeros(first.x.shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "worst.npz", x=first.x.cpu().numpy(), v=v.cpu().numpy())
        about = json.dumps(told | _plain(first), indent=2, ensure_ascii=False)
        (folder / "worst.json").write_text(about + "\n", encoding="utf-8")
    except OSError as problem:
        raise InputError(
            f"`--out` should be a folder that can be written. Found `{folder}`: {problem.strerror}."
        ) from None


def _show(
    found: list[WorstInput], real: Captured, radius: float, measured: tuple[float, float]
) -> None:
    made = table(
        f"{real.model}, layer {real.layer}, map attention, {len(real.x)} tokens, "
        f"radius {radius:.4g}",
        ("input", "where from", "source", "head"),
        ("sigma", "upper", "× text"),
    )
    seen: set[str] = set()
    for one in found:
        if one.sigma is None or one.name in seen:
            continue
        seen.add(one.name)
        head = "" if one.head is None else str(one.head)
        made.add_row(
            *(Text(cell) for cell in (one.name, one.statement, one.cite, head)),
            number(one.sigma),
            number(one.upper),
            number(one.sigma / measured[0], 3) if measured[0] > 0 else "–",
        )
    made.add_section()
    made.add_row(
        "real text", f"radius {real.radius:.4g}", "", "", *(number(s) for s in measured), "1"
    )
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(made)
    console.print(
        "Of each construction the head with the largest sigma of the whole layer; all of "
        "them with --jsonl. A lower value of the worst case, no proof that nothing is worse.",
        markup=False,
    )
    reasons = dict.fromkeys((one.name, one.reason) for one in found if one.sigma is None)
    for name, reason in reasons:
        console.print(f"{name}: not available, {reason}", markup=False)
