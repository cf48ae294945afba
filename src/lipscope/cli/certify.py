"""`lipscope certify`: how far outputs can move while the input stays in a ball."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from lipscope.cli.terminal import read_text
from lipscope.errors import InputError

EXAMPLE = "Example: lipscope certify minilm --layer 3 --length 32 --eps 0.01"


def certify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="minilm, smollm2, a folder, a hub id, or random:FAMILY…"
        ),
    ] = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    eps: Annotated[float, typer.Option(help="Radius of the ball around the input.")] = 0.01,
    ball: Annotated[
        str, typer.Option(help="token: each token moves by eps; frobenius: all together.")
    ] = "token",
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or - for standard input. Default: Python's manual."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    head: Annotated[
        int | None, typer.Option(help="One query head alone.  [default: all together]")
    ] = None,
    map_name: Annotated[str, typer.Option("--map", help="attention or heads.")] = "attention",
    steps: Annotated[int, typer.Option(help="Radii over which the bound is averaged.")] = 4,
    sharp: Annotated[
        bool, typer.Option(help="Also the sharpest bound at the input, which takes longer.")
    ] = True,
    random: Annotated[int, typer.Option(help="Random points of the attack.")] = 20,
    ascents: Annotated[int, typer.Option(help="Ascents of each kind.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    special_tokens: Annotated[
        bool, typer.Option(help="Put the model's special tokens around the window.")
    ] = True,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object on stdout.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights (weights only).")
    ] = False,
) -> None:
    """Bound all moves in a ball around a text.

    Certify L with ‖f(X') − f(X)‖ ≤ L ‖X' − X‖ for every X' in the ball, then attack it:
    the largest ratio found inside the ball must stay below L.
    """
    if map_name not in ("attention", "heads"):
        raise InputError(
            f"`map` should be attention or heads, of which theorems speak. Found `{map_name}`."
        )
    if ball not in ("token", "frobenius"):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")
    if random < 0 or ascents < 0:
        raise InputError("`random` and `ascents` should not be negative. Found a negative one.")
    content = read_text(text)
    from lipscope import certify as run
    from lipscope.captured import captures
    from lipscope.certify import attack_in_ball

    (real,) = captures(
        model,
        content,
        layers=[layer],
        lengths=[length],
        special_tokens=special_tokens,
        seed=seed,
        allow_pickle=allow_pickle,
    )
    options: dict[str, Any] = {"ball": ball, "head": head, "part": map_name, "seed": seed}
    found = run(real.attention, real.x, eps=eps, steps=steps, sharp=sharp, **options)
    tried = attack_in_ball(real.attention, real.x, eps, random=random, ascents=ascents, **options)
    violated = tried.ratio > found.value * (1 + 1e-9)
    row = {
        "model": model,
        "layer": layer,
        "head": head,
        "map": map_name,
        "num_tokens": length,
        "ball": ball,
        "eps": found.eps,
        "relative_eps": found.relative_eps,
        "certificate": found.value,
        "sigma_bound": found.sigma_bound,
        "form": found.form,
        "sigma": found.sigma,
        "upper": found.upper,
        "largest_ratio": tried.ratio,
        "largest_sigma": tried.sigma,
        "attempts": tried.attempts,
        "violated": violated,
        "note": found.note,
    }
    if jsonl:
        sys.stdout.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _show(row)
    if violated:
        raise typer.Exit(1)


def _show(row: dict[str, Any]) -> None:
    console = Console(highlight=False)
    head = "" if row["head"] is None else f", head {row['head']}"
    kind = "every token moves" if row["ball"] == "token" else "all tokens together move"
    lines = [
        f"{row['model']}, layer {row['layer']}{head}, map {row['map']}, {row['num_tokens']} tokens",
        f"ball          {kind} by at most {row['eps']:.4g} "
        f"({row['relative_eps']:.2g} of the largest token norm)",
        f"certificate   ‖f(X') − f(X)‖ ≤ {_up(row['certificate'])} ‖X' − X‖ in the ball "
        f"(heads put together by: {row['form']})",
        f"sigma         at most {_up(row['sigma_bound'])} everywhere in the ball; at X measured "
        f"in [{row['sigma']:.4g}, {row['upper']:.4g}]",
        f"attack        largest ratio found {row['largest_ratio']:.4g}, largest sigma "
        f"{row['largest_sigma']:.4g}, in {row['attempts']} attempts",
    ]
    if row["violated"]:
        lines.append("VIOLATED: the attack found more than the certificate allows. Please report.")
    elif row["largest_ratio"] > 0:
        share = row["certificate"] / row["largest_ratio"]
        lines.append(f"The certificate holds; it is {share:.3g} times the best attack.")
    if row["note"]:
        lines.append(f"Note: {row['note']}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _up(value: float) -> str:
    """Rounded upwards, so that what is printed still holds."""
    return f"{value * (1 + 5e-4):.4g}"
