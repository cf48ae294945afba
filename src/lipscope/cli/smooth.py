"""`lipscope smooth`: a pretrained model rescaled to a largest sigma, saved beside what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli.options import Model, indices
from lipscope.cli.terminal import Force, errors, read_text, show

EXAMPLE = "Example: lipscope smooth minilm --layers 3 --target 2 --out smooth-minilm"


def smooth(
    model: Model = "minilm",
    target: Annotated[float, typer.Option(help="Largest sigma.")] = ...,  # pyright: ignore
    out: Annotated[Path, typer.Option(help="Folder for the model.")] = ...,  # pyright: ignore
    layers: Annotated[str, typer.Option(help="all, or 0,3,5 or 0:5.")] = "all",
    text: Annotated[
        str | None, typer.Option(help="File, folder, -.  [default: Python's manual]")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 64,
    samples: Annotated[int, typer.Option(help="Windows.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of training towards the old outputs.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random starts.")] = 0,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights, weights only.")
    ] = False,
    force: Force = False,
) -> None:
    """Rescale attention layers to a largest sigma on a text.

    The output projection of every layer above the target is multiplied by what is missing, at all
    windows of the text. Shown before and after: sigma; perplexity (decoders) or agreement of
    embeddings (others); how much an attack on the embeddings changes the outputs. The model is
    saved in the format of Hugging Face.
    """
    content = read_text(text)
    from lipscope.engine import smooth as run

    found = run(
        model,
        content,
        target=target,
        out=out,
        layers=indices(layers, "layers"),
        length=length,
        samples=samples,
        steps=steps,
        force=force,
        seed=seed,
        allow_pickle=allow_pickle,
        progress=lambda what: errors.print(f"{what} …", markup=False),
    )
    show(found)
    errors.print(f"Model: {found.path}", markup=False, soft_wrap=True)
