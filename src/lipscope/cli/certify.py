"""`lipscope certify`: how far outputs can move while the input stays in a ball."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from lipscope.cli import decision
from lipscope.cli.terminal import errors, read_text
from lipscope.errors import InputError

if TYPE_CHECKING:
    from lipscope.engine.capture import Captured

EXAMPLE = "Example: lipscope certify minilm --layer 3 --length 32 --eps 0.01"
_EPS = 0.01
_BALLS = ("token", "frobenius")


def certify(
    model: Annotated[
        str,
        typer.Argument(metavar="[MODEL]", help="minilm, a folder, a hub id, random:FAMILY…"),
    ] = "minilm",
    layer: Annotated[int, typer.Option(help="Index of the layer, from 0.")] = 0,
    eps: Annotated[float | None, typer.Option(help="Radius of the ball.  [default: 0.01]")] = None,
    ball: Annotated[
        str | None,
        typer.Option(
            help="token: each token moves by eps; frobenius: all together.  [default: token; both]"
        ),
    ] = None,
    read_out: Annotated[
        Path | None,
        typer.Option(help="A decision: matrix (classes, width), .npy or .safetensors."),
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="The same: nearest of these texts, one option each.",
        ),
    ] = None,
    pool: Annotated[str, typer.Option(help="Pool by mean or first.")] = "mean",
    text: Annotated[
        str | None,
        typer.Option(help="Text file, or -.  [default: Python's manual]"),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens in the window.")] = 64,
    head: Annotated[int | None, typer.Option(help="One query head alone.  [default: all]")] = None,
    map_name: Annotated[str, typer.Option("--map", help="attention or heads.")] = "attention",
    steps: Annotated[int | None, typer.Option(help="Radii of the bound.  [default: 4; 8]")] = None,
    sharp: Annotated[bool, typer.Option(help="Also the sharpest bound, slow.")] = True,
    random: Annotated[int, typer.Option(help="Random points of the attack.")] = 20,
    ascents: Annotated[int, typer.Option(help="Ascents of each kind.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    special_tokens: Annotated[
        bool, typer.Option(help="Put [CLS] and the like around.", show_default=False)
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for row and worst inputs.")] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="One JSON object per ball on stdout.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights (weights only).")
    ] = False,
) -> None:
    """Bound all moves in a ball around a text.

    Certify L with ‖f(X') − f(X)‖ ≤ L ‖X' − X‖ for every X' in the ball, then attack it:
    the largest ratio found inside the ball must stay below L. With --read-out or --between:
    the radius within which a decision on the pooled output cannot change.
    """
    asked = read_out is not None or bool(between)
    if map_name not in ("attention", "heads"):
        raise InputError(
            f"`map` should be attention or heads, of which theorems speak. Found `{map_name}`."
        )
    if ball not in (None, *_BALLS):
        raise InputError(f"`ball` should be token or frobenius. Found `{ball}`.")
    if pool not in ("mean", "first"):
        raise InputError(f"`pool` should be mean or first. Found `{pool}`.")
    if random < 0 or ascents < 0:
        raise InputError("`random` and `ascents` should not be negative. Found a negative one.")
    if asked and (eps is not None or head is not None or map_name != "attention"):
        raise InputError(
            "A decision has its own radius and reads the whole layer. Found `--eps`, `--head` or "
            "`--map` beside `--read-out` or `--between`; leave them out."
        )
    content = read_text(text)
    from lipscope.engine.capture import captures
    from lipscope.models import load_model

    loaded = load_model(model, seed=seed, allow_pickle=allow_pickle)
    (real,) = captures(
        loaded, content, layers=[layer], lengths=[length], special_tokens=special_tokens
    )
    attempts = {"random": random, "ascents": ascents, "seed": seed}
    if asked:
        pooled = cast("decision.Pool", pool)
        rows, points = decision.decide(
            real,
            decision.classifier_for(
                loaded, layer, read_out, between or [], pooled, special_tokens=special_tokens
            ),
            [cast("decision.BallName", one) for one in (_BALLS if ball is None else [ball])],
            pooled,
            steps=8 if steps is None else steps,
            **attempts,
        )
    else:
        options = {"ball": ball or "token", "head": head, "map": map_name}
        options |= {"steps": 4 if steps is None else steps, "sharp": sharp}
        rows, points = _bound(real, _EPS if eps is None else eps, options, attempts)
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    if out is not None:
        _save(out, lines, points)
    if jsonl:
        sys.stdout.write("".join(lines))
    elif asked:
        decision.show(rows)
    else:
        _show(rows[0])
    if any(row["violated"] for row in rows):
        raise typer.Exit(1)


def _bound(
    real: Captured, eps: float, options: dict[str, Any], attempts: dict[str, int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The ball certificate and the attack on it: one row, and the worst input found."""
    from lipscope import certify as run
    from lipscope.attacks import attack_in_ball

    same = {name: options[name] for name in ("ball", "head", "map")}
    found = run(real.attention, real.x, eps=eps, **options)
    tried = attack_in_ball(real.attention, real.x, eps, **attempts, **same)
    row = {
        "model": real.model,
        "layer": real.layer,
        "head": options["head"],
        "map": options["map"],
        "num_tokens": len(real.x),
        "ball": found.ball,
        "eps": found.eps,
        "relative_eps": found.relative_eps,
        "certificate": found.value,
        "sigma_bound": found.sigma_bound,
        "form": found.form,
        "sigma": found.sigma,
        "upper": found.upper,
        "largest_ratio": tried.ratio,
        "largest_sigma": tried.sigma,
        "over_attack": found.value / tried.ratio if tried.ratio > 0 else None,
        "attempts": tried.attempts,
        "violated": tried.ratio > found.value * (1 + 1e-9),
        "note": found.note,
    }
    return [decision.plain(row)], {"x": real.x, "worst": tried.worst}


def _save(folder: Path, lines: list[str], points: dict[str, Any]) -> None:
    """The rows, and the inputs that the attack found."""
    import numpy as np

    arrays: dict[str, Any] = {name: point.numpy() for name, point in points.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "certificate.jsonl").write_text("".join(lines), encoding="utf-8")
        np.savez(folder / "worst.npz", **arrays)
    except OSError as problem:
        raise InputError(
            f"`--out` should be a folder that can be written. Found `{folder}`: {problem.strerror}."
        ) from None
    errors.print(f"Row and inputs: {folder}", markup=False, soft_wrap=True)


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
    elif row["over_attack"] is not None:
        share = row["over_attack"]
        lines.append(f"The certificate holds; it is {share:.3g} times the best attack.")
    if row["note"]:
        lines.append(f"Note: {row['note']}.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _up(value: float) -> str:
    """Rounded upwards, so that what is printed still holds."""
    return f"{value * (1 + 5e-4):.4g}"
