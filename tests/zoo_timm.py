"""Every family of timm that has attention, small and random, against the truth of `zoo`.

One small model stands for each of timm's modules. Its weights are drawn larger than timm's own, so
that scores differ and a wrong scale would show.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.errors import InputError
from zoo import _agrees, _said, limited, truth
from zoo_models import run

VERDICTS = ("exact", "refused", "not compared", "wrong")
_SECONDS = 60  # of processor time, for the building, the measurement and the comparison each
_VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
_SWIN = {"embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2), "window_size": 2}
_FOUR = {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}
_DIMS = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
# Of each module of timm with attention: a model, and what makes it small.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", _VIT),
    "byoanet (BoTNet)": ("botnet26t_256", {}),
    "byoanet (HaloNet)": ("halonet26t", {}),
    "cait": ("cait_xxs24_224", _VIT),
    "coat": ("coat_tiny", {"embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1),
                           "parallel_depth": 1, "num_heads": 2}),
    "convit": ("convit_tiny", _VIT),
    "cpubone": ("cpubone_t0", {}),
    "crossvit": ("crossvit_9_240", {"embed_dim": (8, 16), "num_heads": (2, 2),
                                    "depth": ((1, 1, 0), (1, 1, 0))}),
    "csatv2": ("csatv2", {}),
    "davit": ("davit_tiny", {**_FOUR, "num_heads": (1, 1, 2, 2), "window_size": 2}),
    "deepseek_vit": ("deepseek_vit_412m_enc", _VIT),
    "deit": ("deit_tiny_distilled_patch16_224", _VIT),
    "edgenext": ("edgenext_xx_small", _DIMS),
    "efficientformer": ("efficientformer_l1", {**_FOUR, "num_vit": 1}),
    "efficientformer_v2": ("efficientformerv2_s0", {**_FOUR, "num_vit": 1}),
    "efficientvim": ("efficientvim_m1", {}),
    "efficientvit_mit": ("efficientvit_b0", {}),
    "efficientvit_msra": ("efficientvit_m0", {}),
    "eva": ("eva02_tiny_patch14_224", _VIT),
    "fastvit": ("fastvit_sa12", {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}),
    "gcvit": ("gcvit_xxtiny", {}),
    "gemma4_vit": ("gemma4_vit_167m", _VIT),
    "hiera": ("hiera_tiny_224", {"embed_dim": 8, "stages": (1, 1, 1, 1)}),
    "hieradet_sam2": ("sam2_hiera_tiny", {"embed_dim": 8, "stages": (1, 1, 1, 1)}),
    "iformer": ("iformer_t", {}),
    "levit": ("levit_128s", {"embed_dim": (16, 16, 32), "key_dim": 4, "depth": (1, 1, 1)}),
    "lowformer": ("lowformer_b0", {}),
    "maxxvit (CoAtNet)": ("test_coatnet", {"embed_dim": (8, 16, 16, 16)}),
    "maxxvit (MaxViT)": ("test_maxvit", {}),
    "metaformer": ("caformer_s18", _DIMS),
    "mobilenetv5": ("mobilenetv5_base", {}),
    "mobilevit": ("mobilevit_xxs", {}),
    "mobilevit (v2)": ("mobilevitv2_050", {}),
    "mvitv2": ("mvitv2_tiny", {}),
    "naflexvit": ("naflexvit_base_patch16_gap", _VIT),
    "nest": ("nest_tiny", {}),
    "nextvit": ("nextvit_small", {}),
    "pit": ("pit_ti_224", {"base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 2)}),
    "pvt_v2": ("pvt_v2_b0", {**_FOUR, "num_heads": (1, 1, 2, 2)}),
    "qwen3_vit": ("qwen3_vit_88m", _VIT),
    "shvit": ("shvit_s1", {}),
    "swiftformer": ("swiftformer_xs", {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 16, 16)}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", _SWIN),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", _SWIN),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", _SWIN),
    "tiny_vit": ("tiny_vit_5m_224", {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1),
                                     "num_heads": (1, 1, 2, 2), "window_sizes": (1, 2, 2, 1)}),
    "tnt": ("tnt_s_patch16_224", {"embed_dim": 16, "inner_dim": 8, "depth": 2,
                                  "num_heads_outer": 2, "num_heads_inner": 2}),
    "twins": ("twins_svt_small", {**_FOUR, "num_heads": (1, 1, 2, 2), "wss": (2, 2, 2, 2)}),
    "twins (PCPVT)": ("twins_pcpvt_small", {**_FOUR, "num_heads": (1, 1, 2, 2)}),
    "visformer": ("visformer_tiny", {}),
    "vision_transformer": ("vit_tiny_patch16_224", _VIT),
    "vision_transformer (parallel)": ("vit_small_patch16_18x2_224", _VIT),
    "vision_transformer (SigLIP)": ("vit_base_patch16_siglip_224", _VIT),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", {"embed_dim": 16, "depth": 2,
                                                            "num_heads": 2}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", _VIT),
    "vision_transformer_sam": ("samvit_base_patch16", {**_VIT, "window_size": 2}),
    "vitamin": ("vitamin_small_224", {}),
    "volo": ("volo_d1_224", {}),
    "xcit": ("xcit_nano_12_p16_224", {**_VIT}),
}  # fmt: skip
_SIDES = (16, 32, 64, 96, 128, 192, 224, 256)


class Found(NamedTuple):
    """What became of a family: ``exact``, ``refused``, ``not compared`` or ``wrong``."""

    family: str
    model: str
    verdict: str
    why: str


def model_of(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the smallest image that it takes."""
    import timm  # pyright: ignore[reportMissingImports]

    name, small = FAMILIES[family]
    first: Exception | None = None
    for side in _SIDES:
        for sized in ({"img_size": side}, {}):
            torch.manual_seed(0)
            try:
                model = timm.create_model(name, **small, **sized).eval().requires_grad_(False)
                with contextlib.suppress(AssertionError, AttributeError):  # not without it
                    model.reset_classifier(0, "")
                drawn(model)
                inputs = {"x": torch.randn(1, 3, side, side)}
                with torch.no_grad():
                    run(model.double(), inputs)
            except (TimeoutError, MemoryError):
                raise
            except Exception as problem:
                if os.environ.get("V"):
                    print("  ", side, sized, _said(problem))
                first = first or problem
            else:
                return model, inputs
    assert first is not None
    raise first


def drawn(model: nn.Module) -> None:
    """Weights of a size at which attention is not the mean of its values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                width = parameter.numel() / parameter.shape[0]
                parameter.copy_(1.5 * torch.randn_like(parameter) / max(width, 1) ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))


def found_in(family: str) -> Found:
    name = FAMILIES[family][0]
    try:
        with limited(_SECONDS):
            model, inputs = model_of(family)
    except Exception as problem:
        return Found(family, name, "not compared", f"not built: {_said(problem)}")
    try:
        with limited(_SECONDS):
            rows = list(ls.measure(model, inputs["x"], dtype="float64", tol=1e-6))
    except InputError as refusal:
        return Found(family, name, "refused", " ".join(str(refusal).split()))
    except TimeoutError as late:
        return Found(family, name, "not compared", str(late))
    except Exception as problem:
        return Found(family, name, "wrong", _said(problem))
    return compared(Found(family, name, "", ""), model, inputs, rows)


def compared(one: Found, model: nn.Module, inputs: dict[str, Tensor], rows: list[Any]) -> Found:
    turns: dict[tuple[str, str], int] = {}
    exact, problem = 0, ""
    try:
        with limited(_SECONDS):
            for row in rows:
                turn = turns.get((row.module, row.argument), 0)
                turns[row.module, row.argument] = turn + 1
                expected = truth(model, inputs, row, turn, follows=False)
                sigma = nan if row.status == "non_finite" else row.sigma
                if expected and not any(_agrees(sigma, s) for s in expected):
                    instead = " or ".join(f"{s:.8g}" for s in expected)
                    why = f"{row.module} ({row.argument}): {row.sigma} instead of {instead}"
                    return one._replace(verdict="wrong", why=why)
                exact += bool(expected)
    except Exception as late:
        problem = _said(late)
    if not exact:
        return one._replace(verdict="not compared", why=problem or "over 1600 entries")
    return one._replace(verdict="exact", why=f"{exact} of {len(rows)}")


def answered(family: str, results: Path) -> None:
    """The outcome of a family, by a process of its own, appended to the results."""
    process = os.fork()
    if process == 0:
        one = found_in(family)
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(one)}\n")
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        one = Found(family, FAMILIES[family][0], "not compared", "out of memory")
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(one)}\n")


def as_page(found: Sequence[Found]) -> str:
    """The page of the documentation on a run."""
    import timm  # pyright: ignore[reportMissingImports]

    count = Counter(one.verdict for one in found)
    counts = ", ".join(f"{count[kind]} {kind}" for kind in VERDICTS)
    untried = [family for family in FAMILIES if family not in {one.family for one in found}]
    text = [
        "# Vision models of timm",
        "",
        f"One small model with random weights of each module of timm {timm.__version__} that holds "
        "attention, and some modules twice. Every layer that `ls.measure(model, pixels)` gives was "
        "compared, in float64, with the dense Jacobian of the unmodified module between the tensor "
        "that its row says moves and the output of the module "
        f"(`python tests/zoo_timm.py RESULTS` writes this page). Of {len(found)}: {counts}. Layers "
        "are not compared above 1600 entries of their input. A refusal names the first layer that "
        "is refused; with other sizes others may be. Pictures are as small as a model takes: where "
        "a layer then has one token (all of levit, perhaps last stages of others), softmax is "
        "constant, and *exact* says nothing about its attention."
        + (f" Not tried: {', '.join(untried)}." if untried else ""),
        "",
        "| module of timm | model | verdict | layers compared, or why not |",
        "|---|---|---|---|",
    ]
    for one in found:
        why = one.why.replace("|", "\\|")
        text.append(f"| {one.family} | `{one.model}` | {one.verdict} | {why} |")
    return "\n".join(text) + "\n"


def main(results: Path) -> None:
    """Ask for the families that the results lack, and print the page."""
    results.touch()
    done = {json.loads(line)[0] for line in results.read_text(encoding="utf-8").splitlines()}
    for family in FAMILIES:
        if family not in done:
            answered(family, results)
    lines = results.read_text(encoding="utf-8").splitlines()
    found = [Found(*json.loads(line)) for line in lines]
    print(as_page(sorted(found, key=lambda one: (VERDICTS.index(one.verdict), one))), end="")


if __name__ == "__main__":  # python tests/zoo_timm.py RESULTS > docs/timm-models.md
    main(Path(sys.argv[1]))
