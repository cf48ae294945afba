"""One question has one id, one sigma and one upper end, whichever verb asks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model

import lipscope as ls
from command import BERT, TEXT
from lipscope import Measurement
from lipscope.pages.points import items_of, points_of
from sweeps import in_this_process

WINDOW: dict[str, Any] = {"lengths": [6], "samples": 1}
IDS = torch.tensor([[7, 80, 33, 7, 251, 104]])


def gpt2(heads: int) -> GPT2Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"n_embd": 8, "n_layer": 1, "vocab_size": 300, "n_positions": 8}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2Model(GPT2Config(n_head=heads, **sizes, **ends)).eval()


def masked(mask: torch.Tensor) -> ls.DotProduct:
    return ls.DotProduct(*torch.eye(8).expand(3, 8, 8), mask=mask.bool())


def held(folder: str) -> Measurement:
    """The row of the real input of a run folder."""
    (row,) = [one for one in ls.read_run(folder).measurements() if one.input == "text"]
    return row


def in_python(dtype: str) -> dict[str, Measurement]:
    """Every verb that answers with a row."""
    about: dict[str, Any] = {"dtype": dtype}
    one: dict[str, Any] = {"layer": 1, "length": 6, **about}
    ls.certify(BERT, TEXT, eps=0.01, sharp=False, out="certify", **one)
    spec = {"models": [BERT], "layers": [1], **WINDOW, "dtypes": [dtype]}
    return {
        "measure": ls.measure(BERT, TEXT, layers=[1], **WINDOW, **about, out="measure")[0],
        "bounds": ls.bounds(BERT, TEXT, layers=[1], **WINDOW, **about, out="bounds")[0],
        "attack": ls.attack(BERT, TEXT, steps=0, **one).rows[0],
        "certify": held("certify"),
        "sweep": ls.sweep({**spec, "texts": ["text.txt"]}, "sweep", workers=1)[0],
    }


def on_the_command_line(command: Any, dtype: str) -> dict[str, Measurement]:
    about = [BERT, "--text", "text.txt", "--dtype", dtype]
    one = [*about, "--layer", "1", "--length", "6"]
    window = ["--layers", "1", "--lengths", "6", "--samples", "1"]
    spec = {"models": [BERT], "layers": [1], **WINDOW, "texts": ["text.txt"], "dtypes": [dtype]}
    Path("spec.yaml").write_text(json.dumps(spec))
    asked = {
        "measure": [*about, *window],
        "bounds": one,
        "attack": [*one, "--steps", "0"],
        "certify": [*one, "--no-sharp", "--random", "1", "--ascents", "0"],
        "sweep": ["spec.yaml", "--workers", "1"],
    }
    for verb, arguments in asked.items():
        result = command(verb, *arguments, "--out", f"cli-{verb}")
        assert result.status == 0, result.err
    return {f"lipscope {verb}": held(f"cli-{verb}") for verb in asked}


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "float32"])
def test_every_verb_gives_one_measurement_one_identity(command, monkeypatch, dtype: str) -> None:
    if dtype == "float64":  # in float32 the sweep of the command line has a worker process
        monkeypatch.setattr("lipscope.engine.sweeps.driver.local_results", in_this_process)
    found = on_the_command_line(command, dtype)
    monkeypatch.setattr("lipscope.engine.sweeps.driver.local_results", in_this_process)
    found |= in_python(dtype)
    assert len({row.id for row in found.values()}) == 1, {v: r.id for v, r in found.items()}
    assert {row.dtype for row in found.values()} == {dtype}
    # A worker process has its own number of threads, no other verb: see below.
    worker = found.pop("lipscope sweep")
    ((sigma, upper),) = {(row.sigma, row.upper) for row in found.values()}
    assert (worker.sigma, worker.upper) == pytest.approx((sigma, upper), rel=1e-6)
    items = items_of([ls.read_run(folder) for folder in ("measure", "bounds", "cli-sweep")])
    assert len(points_of(items).points) == 1


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("float64", 1e-13)])
def test_the_number_of_threads_changes_no_more_than_rounding(dtype, rounding) -> None:
    """It decides how a sum of 36,864 entries is split: its last bits, and no others."""
    before, found = torch.get_num_threads(), list[Measurement]()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found += ls.measure(
                "minilm", TEXT * 9, layers=[3], lengths=[96], samples=1, dtype=dtype
            )
    finally:
        torch.set_num_threads(before)
    one, other = found
    assert (one.id, one.num_tokens) == (other.id, 96)
    assert (other.sigma, other.upper) == pytest.approx((one.sigma, one.upper), rel=rounding)


def test_bounds_and_certificates_stand_beside_their_row(command) -> None:
    """Another radius in the same folder is one more certificate of the same row."""
    for eps in (0.01, 0.02):
        for _ in range(2):
            ls.certify(BERT, TEXT, layer=1, length=6, eps=eps, sharp=False, out="out")
    run = ls.read_run("out")
    assert len(run.measurements()) == 1 and len(run.tokens) == 6
    assert [(b.scope, b.eps) for b in run.bound_values()] == [("ball", 0.01)] * 2 + [
        ("ball", 0.02)
    ] * 2
    assert command("rows", "out", "--to", "csv").out.count("\n") == 1 + 1
    assert command("report", "out", "-o", "page.html").status == 0


def test_attacks_that_look_elsewhere_are_other_measurements() -> None:
    rows = [ls.attack(BERT, TEXT, length=6, steps=k).rows for k in (0, 1)]
    assert rows[0][0].id == rows[1][0].id
    assert rows[0][1].id != rows[1][1].id


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (ls.certify, {"metric": "infinity"}),
        (ls.certify, {"inputs": "ascent"}),
        (ls.attack, {"per_head": True}),
        (ls.attack, {"side": "key"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_option_that_makes_no_sense_is_refused_in_one_line(verb, options) -> None:
    name = list(options)[-1]
    with pytest.raises(ls.InputError, match=f"`{verb.__name__}` has no option `{name}`") as error:
        verb(BERT, TEXT, length=6, **options)
    assert "\n" not in str(error.value)


class Keeping(torch.nn.Module):
    """Attention that keeps what it last gave, and for how many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.weights = self.inner(x, x, x)
        self.num_tokens, self.seen = x.shape[1], [self.weights]
        return x + out


def test_what_passes_leave_is_no_setting(tmp_path: Path) -> None:
    """A model is opened again after passes of its own, which record hidden states."""
    keeping = torch.nn.Sequential(Keeping(), Keeping()).eval()
    for model, x, more in (
        (keeping, torch.randn(1, 5, 8), {}),
        (gpt2(heads=2), IDS, {"output_hidden_states": True}),
    ):
        opened, folder = ls.load_model(model), tmp_path / type(model).__name__
        ids = {row.id for row in ls.measure(opened, x, layers=[0], out=folder)}
        model(x[:, :4], **more)
        for again in (opened, model):
            ids |= {row.id for row in ls.measure(again, x, layers=[0], out=folder)}
        assert len(ids) == 1


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (gpt2(heads=2), gpt2(heads=4)),  # the same weights
        (masked(torch.eye(6)), masked(torch.ones(6, 6).tril())),
    ],
)
def test_models_that_differ_in_a_setting_alone_share_no_row(
    mine: Any, other: Any, tmp_path: Path
) -> None:
    data = torch.ones(6, 8) if isinstance(mine, ls.DotProduct) else IDS
    ls.measure(mine, data, layers=[0], out=tmp_path)
    first, second = (ls.measure(one, data, layers=[0])[0] for one in (mine, other))
    assert first.revision != second.revision and first.id != second.id
    with pytest.raises(ls.InputError, match="Found another one"):
        ls.measure(other, data, layers=[0], out=tmp_path)
