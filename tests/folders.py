"""Run folders made by hand, for what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lipscope import Bound, Direction, Measurement, TokenShare
from lipscope.records import (
    DIRECTIONS,
    EDITS,
    GAINS,
    PLACES,
    RADII,
    STEPS,
    PushDirection,
    PushPlace,
    PushStep,
    TextEdit,
    TokenGain,
)
from lipscope.records.folder import Finished, RunFolder
from lipscope.records.rows import provenance
from rows import row, write_lines

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
WORDS = ["[CLS]", NASTY, "smooth", "##ness", "grows", "[SEP]"]


def written(
    folder: Path,
    rows: Iterable[Measurement],
    words: Sequence[str] | None = WORDS,
    directions: Iterable[Direction] = (),
    **spec: Any,
) -> Path:
    """A finished run folder of these rows; every window says the same words."""
    with RunFolder(folder, {"windows": "spread"} | spec, provenance(device="cpu")):
        pass
    # All lines at once: a run appends row by row and waits for the disk each time.
    rows = list(rows)
    tokens = [vars(t) for one in rows for t in (shares(one, words) if words else ())]
    tables = {"rows": [one.to_dict() for one in rows], "tokens": tokens}
    for name, records in (tables | {"directions": [*map(vars, directions)]}).items():
        write_lines(folder / f"{name}.jsonl", records)
    return folder


def shares(of: Measurement, words: Sequence[str]) -> list[TokenShare]:
    """Tokens whose first one holds 93.4 % of the right vector and the last of the left one."""
    rest = (1 - 0.934) / (len(words) - 1)
    return [
        TokenShare(
            id=of.id,
            index=k,
            text=text,
            share_in=rest if k else 0.934,
            share_out=0.934 if k == len(words) - 1 else rest,
            norm=1.0 + k,
        )
        for k, text in enumerate(words)
    ]


def directed(of: Measurement) -> list[Direction]:
    """Two directions: the first moves a nasty token along a nasty word and is not determined."""
    assert of.sigma is not None
    found = []
    for rank in (1, 2):
        about: dict[str, Any] = {"id": of.id, "rank": rank, "sigma": of.sigma / rank}
        about |= {"upper": 1.1 * of.sigma / rank, "residual": 1e-4}
        about |= {"sine": None if rank == 1 else 0.01}
        read: dict[str, Any] = {"space": "vocabulary", "spanned": 0.3, "chance_spanned": 0.1}
        read |= {"chance_cosine": 0.2, "minus": "[]"}
        plus = json.dumps([[NASTY, 0.5], ["word", 0.25]])
        found += [
            Direction(
                side="right", index=1, text=NASTY, share=0.9, plus=plus, cosine=0.5, **read, **about
            ),
            Direction(
                side="left",
                index=5,
                text="[SEP]",
                share=0.4,
                plus=plus,
                cosine=0.1,
                **read,
                **about,
            ),
            *(
                Direction(side="head", index=h, text=f"head {h}", share=share, **about)
                for h, share in enumerate((1.25, -0.25))
            ),
        ]
    return found


def grown(
    layers: int = 3,
    heads: int = 0,
    lengths: Sequence[int] = (16, 32, 64),
    samples: int = 3,
    **values: Any,
) -> list[Measurement]:
    """Rows that grow like n^0.25, and like n^0.5 without their top token; every level its own."""
    places = [(k, h) for k in range(layers) for h in (range(heads) if heads else (None,))]
    return [
        row(
            layer=layer,
            head=head,
            num_tokens=n,
            sample=s,
            sigma=(1 + layer + (head or 0)) * (1 + 0.1 * s) * n**0.25,
            **{
                "sigma_rest": 0.2 * (1 + 0.1 * s) * n**0.5,
                "frobenius": 4.0 * (1 + layer + (head or 0)) * (1 + 0.1 * s) * n**0.25,
                "radius_max": 10.0 + layer + 0.1 * s + 0.01 * n,
                "tokens_sha256": f"{n}/{s}",
                "relative": 2.0 + layer,
            }
            | values,
        )
        for layer, head in places
        for n in lengths
        for s in range(samples)
    ]


def sandwiched(folder: Path, model: str = "minilm", layer: int = 0) -> Path:
    """A folder of `lipscope bounds`: sigma, an adversarial one, and bounds in two metrics."""
    rows, bounds = [], []
    for n in (16, 32, 64):
        sigma = (1 + layer) * n**0.25
        place: dict[str, Any] = {"model": model, "layer": layer, "num_tokens": n}
        real = row(sigma=sigma, upper=1.1 * sigma, **place)
        built = {"input": "adversarial", "id": f"adversarial-{model}-{layer}-{n}"}
        rows += [real, row(sigma=5 * sigma, upper=5.1 * sigma, **built, **place)]
        bounds += [
            _bound(real, "castin_thm_3_3", "castin2024", "global", 100 * math.sqrt(n)),
            _bound(real, "local_norms", "derived here", "local", 2 * sigma),
            _bound(real, "kim_thm_3_2", "kim2021", "global", 90.0 * n, metric="infinity"),
            _bound(real, "kim_thm_3_1", "kim2021", "global", None, reason="no L2 attention: <b>"),
        ]
    with RunFolder(folder, {"windows": "spread"}, provenance(device="cpu")) as run:
        run.extend([Finished(one) for one in rows])
        run.extend([Finished(rows[0], (), tuple(bounds))])
    return folder


def _bound(
    of: Measurement, name: str, cite: str, scope: str, value: float | None, **more: Any
) -> Bound:
    return Bound(
        id=of.id,
        theorem=name,
        statement=f"Statement of {name}",
        cite=cite,
        kind="upper",
        scope=scope,
        value=value,
        radius=10.0,
        **{"metric": "frobenius"} | more,
    )


def trained(folder: Path, steps: Sequence[int] = (0, 10, 100, 1000)) -> Path:
    """Checkpoints of one model, sigma of all of them like ``1 + log10(1 + step)``."""
    rows = []
    for step in steps:
        for one in grown(layers=2, model=f"org/lm@step{step}"):
            level = (1 + math.log10(1 + step)) * (one.sigma or 0.0)
            values: dict[str, Any] = {"step": step, "sigma": level, "upper": 1.02 * level}
            rows.append(row(**(vars(one) | values)))
    return written(folder, rows)


def pushed(folder: Path, model: str = "minilm") -> Path:
    """A folder of `lipscope push`: +v bends away from sigma · size, -v and chance do not."""
    of, sizes = row(model=model, sigma=2.0, upper=2.1, num_tokens=16), (0.1, 1.0, 10.0)
    about: dict[str, Any] = {"push": "p", "id": of.id}
    with RunFolder(folder, {"windows": "spread"}, provenance(device="cpu")) as run:
        run.extend([Finished(of)])
        place = PushPlace(
            **about,
            mean_norm=5.0,
            input_norm=20.0,
            grid=json.dumps([(eps, 3 * eps) for eps in sizes]),
            reading="next token",
            reads=json.dumps([[" sea", 0.5], [NASTY, 0.25]]),
            decision=NASTY,
            decided_by="the read-out given",
            radius=0.05,
        )
        run.add_value(PLACES, "p", vars(place))
        for name, bend in (("+v", 0.05), ("-v", 0.0), ("random 1", 0.0)):
            gain = 0.2 if "random" in name else 2.0
            for eps in sizes:
                flips = name == "+v" and eps == sizes[-1]
                step = PushStep(
                    **about,
                    direction=name,
                    eps=eps,
                    relative=eps / 5,
                    promise=2 * eps,
                    certificate=3 * eps,
                    layer=gain * eps / (1 + bend * eps),
                    block=eps,
                    model=eps / 2,
                    reads=json.dumps([[NASTY, 0.6], [" sea", 0.3]][:: 1 if flips else -1]),
                    decision=NASTY,
                )
                run.add_value(STEPS, f"p/{name}/{eps}", vars(step))
            ends: dict[str, Any] = {"leaves_1": 0.2, "leaves_10": 2.0, "flip": 7.0}
            own = ends | {"flip_to": NASTY} if bend else {}
            course = PushDirection(**about, direction=name, gain=gain, most=10.0, **own)
            run.add_value(DIRECTIONS, f"p/{name}", vars(course))
    return folder


def stacked(
    folder: Path,
    *,
    only: Sequence[int] = (0, 1, 2),
    end: float = 4.0,
    metric: str = "frobenius",
    **second: Any,
) -> Path:
    """Three blocks of sigma 2, 3, 4 on one stream, all of them 3.5; attention; the model's map 5.

    Args:
        folder: Where.
        only: Layers that are there.
        end: Norm of the model's output; that of the last block is 4.
        metric: Of all rows.
        second: Other values of block 1.
    """
    about: dict[str, Any] = {"metric": metric}
    rows = [row(map="model", layer=None, sigma=5.0, input_norm=1.0, output_norm=end, **about)]
    for k in only:
        norms: dict[str, Any] = {"input_norm": 1.0 + k, "output_norm": 2.0 + k}
        block = norms | (second if k == 1 else {})
        rows += [row(layer=k, sigma=1.0 + k, **about)]
        rows += [row(map="stack", layer=k, sigma=1.5 + k, **norms | {"input_norm": 1.0}, **about)]
        rows += [row(map="block", layer=k, sigma=2.0 + k, **block, **about)]
    return written(folder, rows)


def valued(folder: Path, part: str, values: Iterable[dict[str, Any]]) -> Path:
    """The folder, with values of a part."""
    with RunFolder(folder, {"windows": "spread"}) as run:
        for k, one in enumerate(values):
            run.add_value(part, f"{part}-{k}", one)
    return folder


def edited(folder: Path) -> Path:
    """The folder of `grown` rows, with two edits of its first window."""
    about: dict[str, Any] = {"id": row(layer=0).id, "sample": 0, "start": 0, "num_tokens": 16}
    about |= {"target": "model", "status": "succeeded", "changed": 1, "before": "the cat sat"}
    edits = [
        TextEdit(recipe="sigma", after="the bat sat", change_layer=0.1, change_model=0.2, **about),
        TextEdit(
            recipe="hotflip", after="the dog sat", change_layer=0.3, change_model=0.4, **about
        ),
    ]
    return valued(folder, EDITS, map(asdict, edits))


def gained(folder: Path) -> Path:
    """The folder of `grown` rows, with gains of two tokens: only the second is better split."""
    of = row(layer=0).id
    tokens = [
        TokenGain(of, 0, 0, 0, "[CLS]", 0.9, 1.0, 2.0, 2.1),
        TokenGain(of, 0, 0, 1, "▁cat", 1.5, 1.6, 1.2, 1.3),
    ]
    return valued(folder, GAINS, map(asdict, tokens))


def decided(folder: Path) -> Path:
    """The folder of `grown` rows, with radii of two tokens alone and of all together."""
    about = {"id": row(layer=0).id, "by": "its own scores", "decision_name": "good", "sample": 0}
    about |= {"at_layer": 0, "rival_name": "bad", "margin": 0.5, "attack": 0.9, "words_within": 3}
    about |= {"stopped": False}
    found = [
        about | {"ball": "token", "tokens": [1], "words": ["▁cat"], "radius": 0.2},
        about | {"ball": "token", "tokens": [0], "words": ["[CLS]"], "radius": 0.48129},
        about | {"ball": "joint", "tokens": [0, 1], "words": ["[CLS]", "▁cat"], "radius": 0.25009},
        about | {"ball": "each", "tokens": [0, 1], "words": ["[CLS]", "▁cat"], "radius": 0.1},
    ]
    return valued(folder, RADII, found)
