"""Smooth Transformers: their caps, their bound beside attacks, files, and every verb."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipscope as ls
from agreement import gaussian
from lipscope import InputError, SmoothTransformer, lipschitz_bound
from lipscope.control import NormCap

KINDS: dict[str, dict[str, Any]] = {
    "dot-product": {},
    "l2": {},
    "scaled-cosine": {"temperature": 2.0, "gain": 2.0, "eps": 4.0},
}
IDS = torch.tensor([[0, 4, 1, 4, 2], [3, 3, 0, 1, 2]])


def smooth(variant: str = "dot-product", seed: int = 0, **options: Any) -> SmoothTransformer:
    torch.manual_seed(seed)
    sizes = {"outputs": 3, "length": 6, "vocabulary": 5} | KINDS[variant] | options
    return SmoothTransformer(8, sizes.pop("heads", 2), 2, variant=variant, **sizes)


def largest_norms(model: SmoothTransformer, cap: float) -> list[float]:
    """Norms of all matrices over what each may have."""
    return [
        float(torch.linalg.matrix_norm(getattr(holder, name).detach().double(), 2)) / (cap * share)
        for holder, name, share in model._capped_weights()
    ]


def steps(model: SmoothTransformer, count: int, weight: float = 0.0, most: float = 1.0) -> None:
    """Steps at rates that are far too high, with a weight on what the bound has above ``most``."""
    muon = torch.optim.Muon(model.matrices, lr=0.3)
    adam = torch.optim.AdamW(model.others, lr=0.1)
    for _ in range(count):
        scores = model(IDS)
        wanted = IDS % 2 if scores.ndim == 3 else IDS[:, 0] % 2
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), wanted.flatten())
        if weight:
            loss = loss + weight * (model.bound.log() - math.log(most)).clamp_min(0)
        for optimiser in (muon, adam):
            optimiser.zero_grad()
        loss.backward()
        for optimiser in (muon, adam):
            optimiser.step()
        model.cap_weights()


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("capped", ["parametrised", "after-step"])
def test_caps_hold_after_every_step_of_muon_and_adamw(variant, capped):
    model = smooth(variant, cap=0.8, capped=capped)
    assert max(largest_norms(model, 0.8)) <= 1 + 1e-5
    before = model.head.weight.detach().clone()
    for _ in range(3):
        steps(model, 1)
        assert max(largest_norms(model, 0.8)) <= 1 + 1e-5
    assert not torch.equal(before, model.head.weight)
    assert max(largest_norms(model, 0.8)) > 0.95


def test_without_a_cap_norms_are_free():
    model = smooth(cap=None)
    steps(model, 3)
    assert max(largest_norms(model, 1.0)) > 1.1


def test_matrices_and_others_are_all_parameters_once():
    for capped in ("parametrised", "after-step"):
        model = smooth(capped=capped)
        split = [*model.matrices, *model.others]
        assert {id(p) for p in split} == {id(p) for p in model.parameters()}
        assert len(split) == len({id(p) for p in split})
        assert all(p.ndim == 2 for p in model.matrices)


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_cap_is_from_above_and_close(shape, dtype):
    gen = torch.Generator().manual_seed(1)
    for scale in (1e-6, 1.0, 1e6):
        weight = scale * torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)
        norm = float(torch.linalg.matrix_norm(weight.double(), 2))
        kept = NormCap(2 * norm)(weight)
        assert torch.equal(kept, weight)
        cut = float(torch.linalg.matrix_norm(NormCap(norm / 2)(weight).double(), 2))
        assert norm / 2 * min(shape) ** (-1 / 128) * (1 - 1e-5) <= cut <= norm / 2 * (1 + 1e-5)
    assert not NormCap(1.0)(torch.zeros(shape, dtype=dtype)).any()


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_no_input_found_by_ascent_moves_the_scores_by_more_than_the_bound(variant, causal):
    for seed, pool in enumerate(("mean", None)):
        model = smooth(variant, seed, cap=1.5, causal=causal, pool=pool).double().eval()
        steps(model, 2)
        found, tokens = model.attack(6, steps=25)
        assert tokens.shape == (6, 8) and found <= float(model.bound.detach())


@pytest.mark.parametrize("pool", ["mean", None])
@pytest.mark.parametrize("of", [{"vocabulary": 5}, {"vocabulary": None, "features": 4}])
def test_sigma_is_the_norm_of_the_jacobian_that_the_bound_bounds(of, pool):
    """Of one score per row it is a sum of norms; an attack finds more than inputs at random."""
    model = smooth(outputs=1, pool=pool, **of)  # in training, and in float32
    before = copy.deepcopy(model.state_dict())
    double = copy.deepcopy(model).double()
    read, moves = torch.randn(6, 4), model
    if of["vocabulary"]:
        read, moves = IDS[0], model.scores
    x = (model.tokens(read) if of["vocabulary"] else read).detach()
    rows = torch.autograd.functional.jacobian(lambda x: moves(x[None]).flatten(), x)
    known = model.sigma(read)
    assert known.lower == pytest.approx(float(rows.norm(dim=-1).sum(-1).max()), rel=1e-5)
    assert known.upper == pytest.approx(known.lower, rel=1e-4)
    most, where = model.attack(5, steps=20)
    assert where.shape == (5, x.shape[-1]) and where.dtype == torch.float32
    moves = double.scores if of["vocabulary"] else double
    rows = torch.autograd.functional.jacobian(lambda x: moves(x[None]).flatten(), where.double())
    assert most == pytest.approx(float(rows.norm(dim=-1).sum(-1).max()), rel=1e-9)
    assert known.lower < most <= float(double.bound.detach())
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_the_bound_knows_the_most_tokens():
    model = smooth("l2", cap=1.5)
    free, known = ls.lipschitz_bound(model, num_tokens=10**9), ls.lipschitz_bound(model)
    assert known.num_tokens == 6 and known.value.item() == model.bound.item()
    assert known.value.item() < 0.5 * free.value.item()
    for variant in ("sigmoid", "sinkhorn", "lipschitz-norm"):  # no bound for any number of tokens
        own = SmoothTransformer(8, 2, 1, variant=variant, outputs=3, length=6, vocabulary=5)
        assert own.double().sigma(IDS[0]).lower <= own.bound.item() < math.inf


def test_the_bound_of_vectors_is_of_the_vectors():
    model = smooth(vocabulary=None, features=4, pool="mean").double().eval()
    inside = float(ls.lipschitz_bound(model).value.detach())
    norm = float(torch.linalg.matrix_norm(model.embedding.weight.detach(), 2))
    sigma = model.sigma(torch.randn(6, 4, dtype=torch.float64))
    assert sigma.lower <= float(model.bound.detach()) == pytest.approx(inside * norm)


@pytest.mark.parametrize("variant", KINDS)
def test_a_bound_in_the_loss_is_limited(variant):
    free, held = smooth(variant, cap=1.5), smooth(variant, cap=1.5)
    most = 0.7 * float(held.bound.detach())
    steps(free, 30)
    steps(held, 30, weight=10.0, most=most)
    assert float(held.bound.detach()) < 1.1 * most < float(free.bound.detach())


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("pool", ["mean", None])
def test_the_parts_are_the_model(variant, pool):
    model = smooth(variant, pool=pool).double().eval()
    ids = torch.tensor([[0, 4, 1, 4, 2, 1]])
    network = model.as_network()
    torch.testing.assert_close(network(model.tokens(ids)), model(ids))


def test_a_head_of_a_vocabulary_costs_no_square_of_it():
    sizes = {"vocabulary": 50_000, "outputs": 50_000, "length": 4, "causal": True}
    head = SmoothTransformer(8, 2, 1, **sizes).as_network().branches[-1].part
    assert (head.outer.shape, head.inner.shape) == ((50_000, 8), (8, 8))


class Adapter(nn.Linear):
    def forward(self, input):
        return 3 * super().forward(input)


class Tripled(nn.Sequential):
    def forward(self, input):
        return 3 * super().forward(input)


PLACES = ("pool", "head", "clip", "blocks", "activation", "hook", "scores")
HOOKED = ("", "clip", "head", "blocks.0", "blocks.0.0", "blocks.0.1.part", "blocks.0.1.part.1")


@pytest.mark.parametrize("place", [*PLACES, "class", "longer"])
def test_a_part_that_is_replaced_has_no_bound(place):
    model = smooth(pool="mean")
    block = model.blocks[0]
    if place == "pool":
        model.pool = nn.AdaptiveMaxPool1d(1)
    elif place == "head":
        model.head = Adapter(*model.head.weight.T.shape)
    elif place == "clip":
        model.clip = nn.Identity()
    elif place == "blocks":
        model.blocks[0] = nn.Sequential(block, nn.LayerNorm(model.sizes["width"]))
    elif place == "activation":
        block[1].part[1] = nn.Hardswish()
    elif place == "hook":
        block[0].part.register_forward_hook(lambda _, __, y: (3 * y[0], None))
    elif place == "class":
        model.blocks[0] = Tripled(block[0], block[1])
    elif place == "longer":
        block[1].part.append(nn.ReLU())
    else:
        model.scores = lambda tokens: 3 * type(model).scores(model, tokens)
    words = "parts that it was built of|as its class is written|what `SmoothTransformer` computes"
    with pytest.raises(InputError, match=words):
        lipschitz_bound(model)


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
@pytest.mark.parametrize("path", HOOKED)
def test_a_part_that_is_hooked_or_patched_has_no_bound(path, how):
    model = smooth(pool="mean")
    part = model.get_submodule(path)
    if how == "hook":
        part.register_forward_hook(lambda _, __, y: 3 * y)
    elif how == "pre-hook":
        part.register_forward_pre_hook(lambda _, x: (3 * x[0],))
    else:
        part.forward = lambda x: 3 * type(part).forward(part, x)
    words = "as its class is written|should tell what `SmoothTransformer` computes"
    with pytest.raises(InputError, match=words):
        _ = model.bound


def test_hooks_for_all_modules_leave_no_bound():
    handle = nn.modules.module.register_module_forward_hook(lambda _, __, y: None)
    try:
        with pytest.raises(InputError, match="Found hooks for all modules"):
            _ = smooth().bound
    finally:
        handle.remove()


def test_a_map_with_a_bias_is_refused():
    """It adds to the norm of tokens, on which constants of attention depend; as other GELUs do."""
    for change in ("bias", "tanh"):
        model = smooth(cap=1.5)
        network = model.blocks[0][1].part
        if change == "bias":
            network[2] = nn.Linear(*network[2].weight.T.shape)
        else:
            network[1].approximate = "tanh"
        with pytest.raises(InputError, match="should have the parts that it was built of") as told:
            _ = model.bound
        assert change in str(told.value)


def test_sigma_and_attack_read_one_input_of_at_most_the_length():
    """In any dtype, with dropout, under inference mode; nothing random is drawn."""
    model = smooth("l2", dropout=0.5).train()
    before = torch.get_rng_state()
    most, where = model.attack(6, starts=1, steps=3)
    assert torch.equal(before, torch.get_rng_state()) and model.training
    with torch.inference_mode():
        assert model.attack(6, starts=1, steps=3)[0] == most
        assert model.sigma(IDS[0].clone()).lower == model.eval().sigma(IDS[0]).lower
    half = copy.deepcopy(model).bfloat16()
    assert half.attack(6, starts=1, steps=3)[1].dtype == torch.bfloat16
    assert half.sigma(IDS[0]).lower == pytest.approx(model.sigma(IDS[0]).lower, rel=0.05)
    assert where.shape == (6, 8)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda model: model.attack(7, steps=1), "at most 6 tokens. Found 7"),
        (lambda model: model.attack(0), "`num_tokens` should be a positive integer"),
        (lambda model: model.attack(True), "`num_tokens` should be a positive integer"),
        (lambda model: model.attack(steps=0), "`steps` should be a positive integer"),
        (lambda model: model.attack(starts=False), "`starts` should be a positive integer"),
        (lambda model: model.scores(torch.zeros(7, 8)), "at most 6 tokens. Found 7"),
        (lambda model: model.sigma(IDS), r"should be one input. Found shape torch.Size\("),
        (lambda model: model.sigma([1, 2]), "`input_ids` should be ids.* Found list"),
    ],
)
def test_mistakes_about_inputs_are_told_in_one_line(ask, words, unchecked):
    with pytest.raises(InputError, match=words) as told:
        ask(smooth("l2"))
    assert "\n" not in str(told.value)


def test_vectors_and_weights_are_numbers(unchecked):
    model = smooth(vocabulary=None, features=4)
    for wrong in (torch.full((2, 4), torch.nan), torch.randn(4), [[1.0] * 4]):
        with pytest.raises(InputError, match=r"`(input_ids|scores)` should be "):
            model.sigma(wrong)
    with torch.no_grad():
        model.positions[0, 0] = torch.nan
    for ask in (model.attack, lambda: model.sigma(torch.randn(2, 4))):
        with pytest.raises(InputError, match="`scores` should be finite"):
            ask()


def test_a_decoder_reads_no_later_token():
    model = smooth(causal=True).eval()
    other = IDS.clone()
    other[:, -1] = 0
    torch.testing.assert_close(model(IDS)[:, :-1], model(other)[:, :-1])


def test_a_variant_that_knows_no_causal_mask_is_trained_and_bounded():
    model = SmoothTransformer(
        8, 2, 2, variant="lipschitz-norm", outputs=3, length=6, vocabulary=5, pool="mean"
    )
    steps(model, 1)
    assert math.isfinite(model.bound.item())


@pytest.mark.parametrize("capped", ["parametrised", "after-step"])
def test_saved_and_loaded(capped, tmp_path):
    model = smooth("scaled-cosine", capped=capped).double().eval()
    model.save(tmp_path / "model.safetensors")
    again = SmoothTransformer.load(tmp_path / "model.safetensors")
    assert torch.equal(again(IDS), model(IDS)) and not again.training
    assert again.sizes == model.sizes and torch.equal(again.bound, model.bound)


def test_files_of_another_kind_are_refused_in_one_line(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    for path in (tmp_path / "model.safetensors", tmp_path / "missing"):
        with pytest.raises(InputError, match=r"a file that `SmoothTransformer.save` wrote"):
            SmoothTransformer.load(path)


@pytest.mark.parametrize("variant", KINDS)
def test_layers_are_measured_in_closed_form_and_monitored(variant, tmp_path):
    model = smooth(variant, pool="mean").eval()
    rows = ls.measure(model, IDS, out=tmp_path / "run")
    assert [row.layer for row in rows] == [0, 1, 0, 1] and not any(row.note for row in rows)
    page = ls.report([tmp_path / "run"], out=tmp_path / "page.html")[0]
    assert "SmoothTransformer" in page.read_text("utf-8")
    with pytest.raises(InputError, match="should not be a file of a run's record"):
        model.save(tmp_path / "run" / "rows.jsonl")
    monitor = ls.Monitor(model, IDS[:1], every=1, out=tmp_path / "monitor")
    with monitor.step():
        steps(model, 1)
    assert monitor.read()[0].sigma != pytest.approx(rows[0].sigma, rel=1e-3)


@pytest.mark.parametrize("capped", ["parametrised", "after-step"])
def test_a_decision_is_certified_and_no_attack_gets_below(capped):
    model = smooth(pool="mean", outputs=2, capped=capped).eval()
    (found,) = ls.certify_decision(model, IDS[:1])
    assert found.attack is not None and 0 < found.radius <= found.attack
    # The bound of the network knows less, and is no contradiction.
    scores = model.double()(IDS[:1])[0].detach()
    rows = model.head.weight.detach()
    margin = float((scores[found.decision] - scores[1 - found.decision]).abs())
    slope = float(model.bound.detach() * (rows[0] - rows[1]).norm())
    slope /= float(torch.linalg.matrix_norm(rows, 2))
    assert margin / slope <= found.attack


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocabulary": None}, "`vocabulary`, or vectors, `features`"),
        ({"features": 3}, "Found `vocabulary` and `features`"),
        ({"cap": -1.0}, "`cap` should be positive"),
        ({"variant": "cubic"}, "`variant` should be one of"),
        ({"variant": ["l2"]}, r"`variant` should be one of .* Found \['l2'\]"),
        ({"bias": True}, "`bias` should be left out.* Found `bias = True`"),
        ({"dtype": torch.float64}, "`dtype` should be left out"),
        (
            {"heads": 3},
            "`width` should be a multiple of `heads`. Found `width = 8` and `heads = 3`",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(options, words, unchecked):
    sizes = {"heads": 2, "outputs": 3, "length": 6, "vocabulary": 5} | options
    with pytest.raises(InputError, match=words) as told:
        SmoothTransformer(8, depth=2, **sizes)
    assert "\n" not in str(told.value)


def test_a_norm_cap_is_a_number_and_of_a_matrix(unchecked):
    with pytest.raises(InputError, match=r"`cap` should be positive. Found `cap = '1'`"):
        NormCap("1")
    with pytest.raises(InputError, match=r"A cap is of a matrix. Found the shape \(3,\)"):
        NormCap(1.0)(torch.ones(3))


@pytest.mark.parametrize("place", ["", "none/x.safetensors"])
def test_a_file_that_cannot_be_written(tmp_path, place):
    with pytest.raises(InputError, match="`path` should be a file in a folder that is there"):
        smooth().save(tmp_path / place)


def test_what_goes_into_no_file_says_so(tmp_path, unchecked):
    with pytest.raises(InputError, match=r"`path` should be a file .* Found `None`"):
        smooth().save(None)
    masked = smooth(mask=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(InputError, match="Options should be numbers or words to be in a file"):
        masked.save(tmp_path / "model.safetensors")


def test_a_cap_of_another_precision_is_a_number(tmp_path, unchecked):
    model = smooth(cap=np.float32(1.3)).eval()
    model.save(tmp_path / "model.safetensors")
    again = SmoothTransformer.load(tmp_path / "model.safetensors")
    assert torch.equal(again(IDS), model(IDS)) and again.sizes == model.sizes


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"vocabulary": 7}, r"`embedding\.weight` of shape \(7, 8\) instead of \(5, 8\); make"),
        ({"capped": "after-step"}, r"no `.*original` and \d+ more that do not fit; make"),
        ({"variant": "l2"}, r"no `.*key\.original`"),
        ({"heads": 4}, r"`heads = 4` instead of 2; make"),
        ({"cap": 1.5}, r"`cap = 1\.5` instead of 1\.0; make"),
        ({"cap": 1.5, "causal": True}, r"`cap = 1\.5` instead of 1\.0 and 1 more that do not fit"),
    ],
)
def test_weights_of_other_sizes_are_refused_and_none_is_taken_over(other, words):
    model, variant = smooth(), other.pop("variant", "dot-product")
    before = model(IDS)
    with pytest.raises(InputError, match=rf"the same `sizes`. Found {words}"):
        model.load_state_dict(smooth(variant, seed=1, **other).state_dict())
    assert torch.equal(model(IDS), before)


def test_what_is_no_state_is_refused_and_the_own_is_taken(unchecked):
    model, other = smooth(), smooth(seed=1)
    with pytest.raises(InputError, match=r"weights by their names\. Found `SmoothTransformer`"):
        model.load_state_dict(other)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(IDS), other(IDS))
    kept = {n: w for n, w in other.state_dict().items() if n != "positions"}
    assert model.load_state_dict(kept, strict=False).missing_keys == ["positions"]


def test_heads_are_kept_with_a_safe_checkpoint_and_inside_of_a_module(tmp_path):
    torch.save(nn.Sequential(smooth(heads=4)).state_dict(), tmp_path / "state.pt")
    state, model = torch.load(tmp_path / "state.pt", weights_only=True), nn.Sequential(smooth())
    for strict in (True, False):
        with pytest.raises(InputError, match="`heads = 4` instead of 2"):
            model.load_state_dict(state, strict=strict)
    nn.Sequential(smooth(heads=4)).load_state_dict(state)
    model.load_state_dict(dict(state))  # a plain dictionary has weights alone
    (again,) = copy.deepcopy(model)
    with pytest.raises(InputError, match="`cap = None` instead of 1\\.0"):
        again.load_state_dict(smooth(cap=None).state_dict(), strict=False)


def test_too_many_tokens_are_refused():
    with pytest.raises(InputError, match=r"at most 6 tokens\. Found 7"):
        smooth()(torch.zeros(1, 7, dtype=torch.long))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (torch.tensor([[1, 5]]), "Found ids from 1 to 5"),
        (torch.tensor([[-1, 4]]), "Found ids from -1 to 4"),
        (torch.tensor([[1.0]]), r"Found torch\.float32 of shape \(1, 1\)"),
        (torch.tensor([[1, 2]], dtype=torch.uint8), r"Found torch\.uint8 of shape \(1, 2\)"),
        (torch.tensor(3), r"Found torch\.int64 of shape \(\)"),
    ],
)
def test_ids_that_it_has_not_are_refused(given, found):
    model = SmoothTransformer(8, 2, 1, outputs=3, length=4, vocabulary=5)
    with pytest.raises(InputError, match=rf"ids from 0 to 4, \(b, n\), int64\. {found}"):
        model(given)


def test_vectors_of_another_width_are_refused():
    model = SmoothTransformer(8, 2, 1, outputs=3, length=4, features=6)
    with pytest.raises(InputError, match=r"vectors \(b, n, 6\), float32\. Found .* \(1, 3, 5\)"):
        model(torch.zeros(1, 3, 5))
    with pytest.raises(InputError, match=r"vectors .*, float32\. Found torch.float64"):
        model(torch.zeros(1, 3, 6, dtype=torch.float64))
    for shape in ((6,), (1, 1, 3, 6)):
        with pytest.raises(InputError, match=r"vectors \(b, n, 6\)"):
            model(torch.zeros(shape))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.zeros(1, 3, 6, dtype=torch.bfloat16)).shape == (1, 3, 3)


@pytest.mark.parametrize("size", [1e-13, 1e-30, 1e10, 1e30])
def test_a_cap_holds_for_weights_of_any_size(size):
    weight = gaussian(8, 8).float()
    weight = size * weight / torch.linalg.matrix_norm(weight, 2)
    capped = float(torch.linalg.matrix_norm(NormCap(1.0)(weight), 2))
    assert capped == pytest.approx(min(size, 1.0), rel=0.02)


@pytest.mark.parametrize("n", [41, 61])
def test_a_mean_of_that_many_tokens_is_no_less_than_a_mean(n):
    """In float32, 61 times 1/61 is below 1."""
    model = SmoothTransformer(8, 2, 1, outputs=3, length=n, vocabulary=5, pool="mean")
    bound = float(lipschitz_bound(model))
    assert float(lipschitz_bound(model, num_tokens=n)) == pytest.approx(bound, rel=1e-14)


@pytest.mark.parametrize("norm", ["max-token", "frobenius"])
def test_a_bound_holds_for_shorter_sequences(norm):
    """A mean of fewer tokens moves more: of one by as much as it."""
    model = SmoothTransformer(8, 2, 1, outputs=3, length=8, vocabulary=5, pool="mean").double()
    with torch.no_grad():
        for one in model.sums:
            weight = (
                one.part.attention.parametrizations.value.original
                if hasattr(one.part, "attention")
                else one.part[2].parametrizations.weight.original
            )
            weight *= 1e-6
    bound = float(lipschitz_bound(model, norm=norm))
    for n in (1, 2, 8):
        x = gaussian(n, 8) / 8
        jacobian = torch.func.jacrev(lambda z: model.scores(z[None])[0])(x).detach()
        if norm == "frobenius":
            moved = float(torch.linalg.matrix_norm(jacobian.flatten(1), 2))
        else:  # all tokens alike
            moved = float(torch.linalg.matrix_norm(jacobian.sum(1), 2))
        exact = float(lipschitz_bound(model, norm=norm, num_tokens=n))
        assert moved <= exact <= bound * (1 + 1e-12)
        assert moved == pytest.approx(exact, rel=1e-4)
    with pytest.raises(InputError, match="should be 8, the number of pooled tokens"):
        lipschitz_bound(model, num_tokens=9)
