"""Pushes of a layer's input, against closed forms and models that are run by hand."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import lipscope as ls
from command import BERT, TEXT
from lipscope.certificates.balls import certified_changes, certify_ball
from opened import layer_of
from tiny import TINY, tiny

GPT2, LLAMA = (f"random:{name}:{TINY[name]}" for name in ("gpt2", "llama"))
ONE = torch.eye(1, dtype=torch.float64)
SHORT = {"length": 6, "draws": 1}


def top_of(layer: ls.Attention, x: Tensor) -> tuple[float, Tensor]:
    """Sigma and v by a dense singular value decomposition, the largest entry positive."""
    _, values, rows = torch.linalg.svd(ls.to_dense(layer.linearise(x)))
    v = rows[0].view_as(x)
    return float(values[0]), v * v.flatten()[v.abs().argmax()].sign()


def along(found: ls.Pushed, direction: str) -> list:
    return [one for one in found.steps if one.direction == direction]


def test_a_linear_layer_keeps_its_promise_at_every_size() -> None:
    """One token: f(X) = V X."""
    value = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    two = torch.eye(2, dtype=torch.float64)
    x = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    found = ls.push(ls.DotProduct(two, two, value), x, draws=1, eps=[1e-3, 1.0, 1e3])
    for one in (*along(found, "+v"), *along(found, "-v"), *along(found, "+top")):
        assert one.layer == pytest.approx(one.promise, rel=1e-9)
        assert one.promise == pytest.approx(3.0 * one.eps, rel=1e-3)
        assert one.certificate == pytest.approx(one.promise, rel=1e-3)
    for direction in found.directions:
        assert (direction.leaves_1, direction.leaves_10) == (None, None)
        for one in along(found, direction.direction):
            assert one.layer == pytest.approx(direction.gain * one.eps, rel=1e-9)


def test_the_sizes_of_a_grid() -> None:
    """Four a decade, from a thousandth of the mean token norm to the norm of all tokens."""
    layer, x = ls.DotProduct(ONE, ONE, ONE), torch.tensor([[1.0], [-19.0]]).double()
    found = ls.push(layer, x, draws=0, certificate=False)
    place, steps = found.places[0], along(found, "+v")
    assert place.mean_norm == pytest.approx(10)
    assert steps[0].relative == pytest.approx(1e-3)
    assert steps[-1].eps == pytest.approx(place.input_norm)
    assert steps[-1].eps == pytest.approx(math.sqrt(362))
    ratios = [b.eps / a.eps for a, b in itertools.pairwise(steps)]
    assert ratios[:-1] == pytest.approx([10**0.25] * 13) and 1 < ratios[-1] <= 10**0.25
    assert all(one.certificate is None for one in steps)


def test_one_head_in_closed_form() -> None:
    """Scalar tokens, Q = -1: o_i = sum_j p_ij x_j, p_ij as exp(-x_i x_j)."""
    x = [-1.5, 0.4, 0.7]
    at = torch.tensor(x, dtype=torch.float64)[:, None]
    layer = ls.DotProduct(-ONE, ONE, ONE)
    sigma, v = top_of(layer, at)

    def by_hand(x: list[float]) -> list[float]:
        rows = [[math.exp(-a * b) for b in x] for a in x]
        return [sum(p * b for p, b in zip(r, x, strict=True)) / sum(r) for r in rows]

    found = ls.push(layer, at, tol=1e-9)
    own = {one.direction: one for one in found.directions}
    for sign, name in ((1, "+v"), (-1, "-v")):
        for one in along(found, name):
            moved = [a + sign * one.eps * float(e) for a, e in zip(x, v, strict=True)]
            change = math.dist(by_hand(moved), by_hand(x))
            assert one.layer == pytest.approx(change, rel=1e-6)
            assert one.promise == pytest.approx(sigma * one.eps, rel=1e-6)
        for share, end in ((0.01, own[name].leaves_1), (0.1, own[name].leaves_10)):
            assert end is not None

            def off(eps: float, sign: int = sign) -> float:
                moved = [a + sign * eps * float(e) for a, e in zip(x, v, strict=True)]
                return abs(math.dist(by_hand(moved), by_hand(x)) / (sigma * eps) - 1)

            assert off(end) > share * (1 - 1e-5) and off(end / 1.0101) < share * (1 + 1e-5)
    assert all(one.certificate >= one.layer for one in found.steps)


def test_flips_of_the_next_token_against_the_model_run_by_hand() -> None:
    """The same tensor put in by a hook of our own, into transformers' own class."""
    loaded = tiny("gpt2", scale=3.0)
    how = {"eps": [0.01, 1.0, 9.0], "certificate": False, "draws": 0, "length": 6}
    gpt2 = ls.push(loaded, TEXT, layer=1, tol=1e-9, **how)
    _, v = top_of(*layer_of(loaded, TEXT, layer=1, length=6))
    whole = AutoModelForCausalLM.from_config(loaded.config)
    whole.transformer = copy.deepcopy(loaded.model)
    whole.tie_weights()
    whole = whole.double().eval()
    ids = torch.tensor([loaded.tokenizer(TEXT)["input_ids"][:6]])
    assert gpt2.rows[0].start == 0

    def run(eps: float) -> tuple[Tensor, Tensor]:
        def put(_, args, kwargs):
            return (args[0] + eps * v, *args[1:]), kwargs

        hook = whole.transformer.h[1].attn.register_forward_pre_hook(put, with_kwargs=True)
        try:
            with torch.no_grad():
                found = whole(ids, output_hidden_states=True)
        finally:
            hook.remove()
        return torch.softmax(found.logits[0, -1], -1), found.hidden_states[-1][0]

    before, hidden = run(0.0)
    names = loaded.tokenizer
    place = gpt2.places[0]
    assert place.reading == "next token"
    for name, sign in (("+v", 1), ("-v", -1)):
        for one in along(gpt2, name):
            shares, there = run(sign * one.eps)
            assert one.model == pytest.approx(float((there - hidden).norm()), rel=1e-3)
            best = shares.topk(5)
            said = json.loads(one.reads)
            assert [p for _, p in said] == pytest.approx(best.values.tolist(), rel=1e-5)
            first = [int(best.indices[0])]
            # Half a letter has no text: it has a name.
            assert said[0][0] in (names.decode(first), *names.convert_ids_to_tokens(first))
        (own,) = (one for one in gpt2.directions if one.direction == name)
        assert own.flip is not None  # of both signs, or this test shows nothing
        assert int(run(sign * own.flip * 1.001)[0].argmax()) != int(before.argmax())
        assert int(run(sign * own.flip / 1.012)[0].argmax()) == int(before.argmax())


@pytest.mark.parametrize("model", [BERT, LLAMA])
def test_no_push_exceeds_its_certificate(model) -> None:
    """Nor does one below the radius change the decision, of every direction at every size."""
    how = {"eps": [0.05, 1.0, 5.0], "between": ["a b c", "d e f"]}
    found = ls.push(model, TEXT, layer=1, **how, **SHORT)
    place = found.places[0]
    assert found.rows[0].dtype == "float64" and place.radius is not None
    for one in found.steps:
        assert one.certificate is not None and one.certificate >= one.layer
        assert one.decision == place.decision or one.eps >= place.radius
        assert one.block is not None and one.model is not None
    for direction in found.directions:
        assert direction.decision_flip is None or direction.decision_flip >= place.radius


def test_the_certificate_of_a_curve_is_close_to_those_of_its_radii() -> None:
    layer, x = layer_of(GPT2, TEXT, layer=0, length=6)
    sizes = [1e-4, 0.1, 1e3]
    curve = certified_changes(layer, x, sizes)
    for eps, value in zip(sizes[:2], curve, strict=False):
        alone = certify_ball(layer, x, eps=eps, ball="frobenius").value * eps
        assert value is not None and alone / 2 <= value <= 2 * alone
    assert None not in curve and list(curve) == sorted(curve)
    sigma = certify_ball(layer, x, eps=1e-4, ball="frobenius").sigma
    assert curve[0] == pytest.approx(sigma * 1e-4, rel=0.05)  # sharp, and nearly linear there


@pytest.mark.parametrize("map", ["normed", "residual", "block", "stack", "model"])
def test_other_maps_move_their_own_input(map) -> None:
    """To first order the map itself moves by sigma times the size; what it holds for is said."""
    found = ls.push(GPT2, TEXT, layer=1, map=map, eps=[1e-5, 1.0], **SHORT)
    first = found.steps[0]
    assert first.layer == pytest.approx(first.promise, rel=1e-3)
    place = found.places[0]
    assert "certificate: it is for the map attention" in place.note
    assert (place.block_norm is None) == (map in ("block", "stack", "model"))
    assert (place.model_norm is None) == (map == "model")


def test_a_change_that_is_largest_before_the_end_is_said() -> None:
    found = ls.push(GPT2, TEXT, layer=1, eps=[0.1, 1.0, 10.0], certificate=False, **SHORT)
    rising = [replace(s, layer=s.eps, block=s.eps, model=s.eps) for s in found.steps]
    assert "changes most" not in repr(replace(found, steps=tuple(rising)))
    inside = [replace(s, model=5.0) if s.eps == 1.0 else replace(s, model=4.0) for s in rising]
    said = " ".join(repr(replace(found, steps=tuple(inside))).split())
    assert "The model's output changes most, by 5.00, along +v at 1.00 (" in said
    assert "; at the largest size by 4.00." in said and said.count("changes most") == 1


def test_the_nearest_text_by_hand() -> None:
    loaded, texts = ls.load_model(BERT).loaded, ["the fox", "a dog sleeps", "smooth and flat"]
    how = {"among": texts, "eps": [0.1], "dtype": "float32", "certificate": False}
    found = ls.push(loaded, TEXT, layer=1, **how, **SHORT)
    with torch.no_grad():
        means = [
            loaded.model(torch.tensor([loaded.tokenizer(text)["input_ids"]])).last_hidden_state
            for text in (TEXT[:6], *texts)
        ]
    own, *others = (torch.nn.functional.normalize(y[0].mean(0), dim=0) for y in means)
    place = found.places[0]
    assert found.rows[0].start == 0
    expected = sorted(((float(own @ y), t) for y, t in zip(others, texts, strict=True)))[::-1]
    assert place.reading == "nearest text"
    assert [name for name, _ in json.loads(place.reads)] == [text for _, text in expected]
    assert [c for _, c in json.loads(place.reads)] == pytest.approx(
        [cosine for cosine, _ in expected], rel=1e-4
    )


def test_what_a_model_cannot_say_is_said() -> None:
    """An untied read-out is not among the weights; an encoder says nothing; no tokenizer: ids."""
    llama = ls.push(LLAMA, TEXT, eps=[0.1], certificate=False, **SHORT).places[0]
    assert llama.reading == "" and "`lm_head.weight` left behind" in llama.note
    bert = ls.push(BERT, TEXT, eps=[0.1], certificate=False, **SHORT).places[0]
    assert (bert.reading, bert.note) == ("", None)
    whole = AutoModelForCausalLM.from_config(ls.load_model(LLAMA).config).eval()
    found = ls.push(whole, torch.arange(6)[None], eps=[0.1], certificate=False, draws=0)
    place = found.places[0]
    assert place.reading == "next token" and "no tokenizer" in place.note
    with torch.no_grad():
        best = int(whole(torch.arange(6)[None]).logits[0, -1].argmax())
    assert json.loads(place.reads)[0][0] == f"#{best}"


def test_pictures() -> None:
    vit = (
        "random:vit:hidden_size=12,num_attention_heads=3,num_hidden_layers=2,"
        "intermediate_size=16,image_size=8,patch_size=4"
    )
    found = ls.push(vit, images="random", samples=2, draws=0, eps=[0.1])
    assert len(found.rows) == len(found.places) == 2
    assert all(one.certificate >= one.layer > 0 for one in found.steps)
    assert not any(one.patches for one in found.places)  # behind a norm
    again = ls.push(vit, images="random", samples=1, draws=0, eps=[0.1], map="block")
    shown = {one.direction: one.pixels for one in again.directions}
    # The class token is no pixel's; what v moves besides is.
    assert shown["+v"] is None and json.loads(shown["+patches"])["moves"]["height"] == 8


class _OfPatches(torch.nn.Module):
    """Patches of 4 x 4 pixels without a class token, then torch's own layers, norm first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch = torch.nn.Conv2d(3, 8, 4, 4)
        block = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.blocks(self.patch(pixel_values).flatten(2).transpose(1, 2))


def test_pixels_that_move_the_patches_as_asked() -> None:
    """The patch moves so when the model is given the changed picture; not behind a norm."""
    with torch.random.fork_rng():
        model, picture = _OfPatches().eval(), torch.rand(1, 3, 8, 8)
    found = ls.push(model, picture, map="block", draws=0, eps=[1.0], dtype="float32")
    assert found.places[0].reading == "most changed patch"
    step = found.steps[2]
    assert step.direction == "+top"  # one patch alone: its pixels are all that changes
    said = json.loads(found.directions[2].pixels)
    row, column = map(int, said["name"].removeprefix("patch ").split(", "))
    place = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
    assert torch.allclose(2 * torch.tensor(said["before"]) - 1, picture[0, :, *place], atol=1e-4)
    other = picture.clone()
    other[0, :, *place] += 2 * torch.tensor(said["move"])  # in pixels from 0 to 1
    with torch.no_grad():
        change = float((model(other) - model(picture)).norm())
    assert change == pytest.approx(step.model, rel=1e-3)
    shown = [
        np.frombuffer(base64.b64decode(said[k]["bytes"]), np.uint8).reshape(8, 8, 3)
        for k in ("picture", "moves")
    ]
    before, move = (torch.tensor(one.copy()).double().permute(2, 0, 1) for one in shown)
    whole = (before / 255) + said["scale"] * (move - 128) / 127  # at size 1, in bytes
    off = (whole - (other[0].double() + 1) / 2).abs().max()
    assert float(off) <= 0.5 / 255 + 0.5 * said["scale"] / 127 + 1e-6 and said["at"] == [
        4 * row,
        4 * column,
    ]
    behind = ls.push(model, picture, map="attention", draws=0, eps=[1.0], certificate=False)
    assert [one.pixels for one in behind.directions] == [None] * 4


def test_a_run_folder_goes_on_and_is_read(command, monkeypatch) -> None:
    import lipscope.engine.verbs.push as inside

    arguments = ("push", GPT2, "--text", "text.txt", "--layer", "1", "--length", "6")
    arguments += ("--draws", "1", "--eps", "0.01,0.1,1", "--no-certificate", "--out", "run")
    first = command(*arguments, "--figures")
    assert first.status == 0, first.err
    assert "Along ±v the map's output changes" in first.out and "says, +v" in first.out
    assert {p.name for p in Path("run").glob("push.*")} == {"push.svg", "push.png"}
    run = ls.read_run("run")
    assert len(run.values("push")) == 15 and len(run.values("push-directions")) == 5
    # As if it had been killed in the last direction, with one damaged line in another.
    lines = Path("run/values.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    broken = next(i for i, line in enumerate(lines) if "-top/0.1" in line)
    lines[broken] = lines[broken].replace("promise", "premise")
    Path("run/values.jsonl").write_text("".join(lines[:-3]), encoding="utf-8")
    Path("run/values.parquet").unlink()
    done: list[str] = []
    pushed = inside.PushProbe.pushed

    def counted(self, name, about):
        done.append(name)
        return pushed(self, name, about)

    monkeypatch.setattr(inside.PushProbe, "pushed", counted)
    again = command(*arguments, "--jsonl")
    assert again.status == 0, again.err
    assert "1 damaged in `values.jsonl`" in again.err
    assert done == ["-top", "random 1"] and len(again.rows) == 15
    monkeypatch.setattr(inside.PushProbe, "pushed", None)  # nothing is computed anew
    third = command(*arguments, "--jsonl")
    assert third.rows == again.rows
    sheet = command("rows", "run", "--part", "push", "--to", "csv")
    assert sheet.status == 0 and len(sheet.out.splitlines()) == 16
    other = command(*arguments, "--map", "block")
    assert other.status == 2 and "another" in other.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": [0.1, -1.0]}, "`eps` should be positive numbers. Found `eps = -1.0`."),
        ({"eps": []}, "`eps` should be 1 to 1,000 sizes. Found 0."),
        ({"map": "heads"}, "`map` should be one of attention, normed"),
        ({"draws": -1}, "`draws` should be a whole number of at least 0. Found `-1`."),
        ({"among": ["one"]}, "`among` should name at least two"),
        ({"among": Path("gone.txt")}, "`among` should be a readable file"),
        ({"between": ["a", "b"], "map": "block"}, "A decision reads the layer's attention."),
        ({"between": ["a", "b"], "read_out": "x.npy"}, "`between` and `read_out` exclude"),
        ({"metric": "infinity"}, "`push` has no option `metric`; leave it out."),
        ({"layer": 7}, "`layers` should be between 0 and 1"),
        ({"dtype": "float16"}, "`dtype` should be one of float32, float64. Found `float16`."),
    ],
)
def test_what_cannot_be_pushed_is_said_in_one_line(options, message) -> None:
    with pytest.raises(ls.InputError) as problem:
        ls.push(BERT, TEXT, **({"length": 6} | options))
    assert message in str(problem.value) and "\n" not in str(problem.value)


def test_a_map_that_does_not_move() -> None:
    layer = ls.DotProduct(ONE, ONE, 0 * ONE)
    with pytest.raises(ls.InputError, match="finite, positive sigma"):
        ls.push(layer, torch.ones(2, 1).double())
    with pytest.raises(ls.InputError, match="`eps` should say how far to push"):
        ls.push(ls.DotProduct(ONE, ONE, ONE), torch.zeros(2, 1).double())


def test_a_matrix_is_no_read_out(unchecked) -> None:
    """Compared with None, and never with a number for each of its elements."""
    with pytest.raises(ls.InputError, match="a file or a `Classifier`"):
        ls.push(BERT, TEXT, layer=0, length=6, read_out=np.eye(2))
