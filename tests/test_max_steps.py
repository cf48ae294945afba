"""Steps that run out: asked of every verb, in the id and in the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lipscope as ls
from command import BERT, TEXT

ONE: dict[str, Any] = {"layer": 0, "length": 6, "max_steps": 2}


def test_steps_run_out_alike_in_every_verb(command) -> None:
    window = {"layers": [0], "lengths": [6], "samples": 1, "max_steps": 2}
    rows = {
        "measure": ls.measure(BERT, TEXT, **window, out="measure")[0],
        "bounds": ls.bounds(BERT, TEXT, **window, dtype="float32")[0],
        "attack": ls.attack(BERT, TEXT, steps=0, dtype="float32", **ONE).rows[0],
    }
    ls.certify(BERT, TEXT, eps=0.01, sharp=False, dtype="float32", out="certify", **ONE)
    rows["certify"] = ls.read_run("certify").measurements()[0]
    spec = {"models": [BERT], "texts": ["text.txt"], **window}
    rows["sweep"] = ls.sweep(spec, "sweep", workers=1)[0]
    place = [BERT, "--text", "text.txt", "--max-steps", "2", "--dtype", "float32"]
    asked = {
        "measure": ["--layers", "0", "--lengths", "6", "--samples", "1"],
        "bounds": ["--layer", "0", "--length", "6"],
        "attack": ["--layer", "0", "--length", "6", "--steps", "0"],
        "certify": ["--layer", "0", "--length", "6", "--no-sharp", "--random", "1"],
    }
    for verb, more in asked.items():
        assert command(verb, *place, *more, "--out", f"cli-{verb}").status == 0
        found = ls.read_run(f"cli-{verb}").measurements()
        (rows[f"lipscope {verb}"],) = [one for one in found if one.input == "text"]
    assert {row.status for row in rows.values()} == {"max_steps"}
    assert len({row.id for row in rows.values()}) == 1, {v: r.id for v, r in rows.items()}
    assert rows["measure"].id != ls.measure(BERT, TEXT, **window | {"max_steps": 3})[0].id
    assert '"max_steps": 2' in json.dumps(json.loads(Path("measure/manifest.json").read_text()))


def test_capture_solves_nothing() -> None:
    with pytest.raises(ls.InputError, match="`capture` has no option `max_steps`"):
        ls.capture(BERT, TEXT, **ONE)
