"""Penalties and constraints, on models' own weights: beside dense Jacobians and singular values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

import lipscope as ls
from agreement import gaussian
from lipscope import InputError
from lipscope.control import restraints
from lipscope.control.restraint import cap_singular_values
from lipscope.theorems import LayerSubject
from lipscope.theorems.derived.row_gram import JacobianRows, weighted_rows
from opened import layer_of
from tiny import encoder, tiny

IDS = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(0))


def model(family: str = "gpt2") -> nn.Module:
    """In float64, so that differences of values mean something."""
    return tiny(family).model.double().train()


def captured(of: nn.Module, layer: int, entry: int = 0) -> tuple[Any, Tensor]:
    return layer_of(of, IDS[entry : entry + 1], layer=layer)


def dense(of: nn.Module, layer: int, entry: int = 0) -> float:
    attention, x = captured(of, layer, entry)
    jacobian = torch.func.jacrev(attention)(x).reshape(-1, x.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


def weight_of(of: Any) -> Tensor:
    return of.h[0].attn.c_attn.weight if hasattr(of, "h") else of.layers[0].self_attn.q_proj.weight


def slope(weight: Tensor, e: Tensor, value: Callable[[], float], h: float = 1e-5) -> float:
    """A central difference along ``e``."""
    ends = []
    for step in (h, -h):
        with torch.no_grad():
            weight += step * e
        ends.append(value())
        with torch.no_grad():
            weight -= step * e
    return (ends[0] - ends[1]) / (2 * h)


def direction(weight: Tensor) -> Tensor:
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight)


# --- penalties


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_sigma_is_the_mean_of_the_dense_ones_above_the_cap(family):
    m = model(family)
    truth = {(i, e): dense(m, i, e) for i in (0, 1) for e in (0, 1)}
    found = float(ls.restrain(m, IDS, "sigma").penalty().detach())
    assert found == pytest.approx(sum(truth.values()) / 4, rel=1e-3)  # the solver's tolerance
    cap = 0.5 * truth[1, 0]
    over = [max(0.0, truth[1, e] - cap) for e in (0, 1)]
    held = ls.restrain(m, IDS, "sigma", layers=[1], cap=cap)
    assert float(held.penalty().detach()) == pytest.approx(sum(over) / 2, rel=4e-3)


def test_an_estimate_is_never_above_sigma_and_comes_near_it():
    m = model()
    truth, held = dense(m, 0), ls.restrain(m, IDS[:1], "sigma-estimate", layers=0)
    found = [float(held.penalty().detach()) for _ in range(25)]
    assert all(one <= truth * (1 + 1e-12) for one in found)
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(found))
    assert found[-1] == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize(
    "how", ["sigma", "sigma-estimate", "softmax-spread", "softmax-spread-ratio", "weight-norms"]
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_the_value_in_the_weights_of_the_model(family, how):
    m = model(family)
    weight, held = weight_of(m), ls.restrain(m, IDS[:1], how, layers=[0])
    for _ in range(30 if how == "sigma-estimate" else 0):  # until u and v are those of sigma
        held.penalty()
    held.penalty().backward()
    e = direction(weight)
    expected = slope(weight, e, lambda: float(held.penalty().detach()))
    # Gradients of sigma are as good as its vectors: residual 1e-3 over the relative gap.
    assert weight.grad is not None
    assert float((weight.grad * e).sum()) == pytest.approx(expected, rel=2e-2, abs=1e-6)
    others = [n for n, p in m.named_parameters() if p.grad is not None and "0" not in n]
    assert not others


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_row_gram_is_the_certificate_and_its_gradient_that_of_the_value(family):
    """Within a twentieth of its length: the weights p are nearly the best ones."""
    m = model(family)
    weight, held = weight_of(m), ls.restrain(m, IDS[:1], "row-gram", layers=[0])
    layer, x = captured(m, 0)
    value = held.penalty()
    fixed = weighted_rows(JacobianRows(LayerSubject(layer, x=x).together))
    assert float(value.detach()) == pytest.approx(fixed.value, rel=1e-9)
    assert float(value.detach()) >= dense(m, 0)
    with torch.no_grad():
        assert float(held.penalty()) == float(value)
    value.backward()
    assert weight.grad is not None
    gradient = weight.grad.clone()

    def found() -> float:
        return float(held.penalty().detach())

    size = float(gradient.norm())
    for along in (gradient, direction(weight)):
        e = along / along.norm()
        change = slope(weight, e, found, h=1e-4)
        assert float((gradient * e).sum()) == pytest.approx(change, abs=0.05 * size)


def test_the_softmax_spread_is_that_of_the_weights():
    m = model("bert")
    m.set_attn_implementation("eager")
    m.eval()
    with torch.no_grad():
        p = m(IDS, output_attentions=True).attentions
    top = torch.stack([one.sort(-1, descending=True).values for one in p])
    g = [top[..., k] * (1 - top[..., k] + top[..., k + 1]) for k in (0, 1)]
    norm = torch.linalg.matrix_norm(torch.diag_embed(top) - top[..., None] * top[..., None, :], 2)
    assert bool((norm <= g[0] + 1e-12).all())
    for how, values in (("softmax-spread", g[0]), ("softmax-spread-ratio", g[0] / g[1])):
        found = float(ls.restrain(m, IDS, how).penalty().detach())
        assert found == pytest.approx(float(values.amax(-1).log().mean()), rel=1e-9)


def test_a_penalty_on_sigma_lowers_it_and_leaves_everything_else_alone():
    m = model("bert")
    modes = {part: part.training for part in m.modules()}
    held = ls.restrain(m, IDS, "sigma-estimate")
    optimiser = torch.optim.SGD(m.parameters(), lr=0.3)
    before, state = dense(m, 0), torch.get_rng_state()
    for _ in range(15):
        optimiser.zero_grad()
        held.penalty().backward()
        optimiser.step()
        held.step()
    assert torch.equal(state, torch.get_rng_state())
    assert modes == {part: part.training for part in m.modules()}
    assert all(p.requires_grad for p in m.parameters())
    assert dense(m, 0) < 0.8 * before


def test_a_layer_by_itself_is_its_own_model():
    torch.manual_seed(0)  # an upper end fails with a chance of one in a hundred
    weights = [nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in range(4)]
    layer = ls.DotProduct(*weights, heads=2, causal=True)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    truth = [ls.top_singular(ls.linearise(layer, one)).sigma for one in x]
    value = ls.restrain(layer, x, "sigma").penalty()
    assert float(value.detach()) == pytest.approx(sum(truth) / 2, rel=2e-3)
    value.backward()
    assert all(w.grad is not None for w in weights)
    ls.restrain(layer, x, "sigma-cap", cap=0.1).step()
    assert max(row.sigma for row in ls.measure(layer, x)) <= 0.1


# --- constraints


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "distilbert", "qwen3"])
def test_sigma_cap_holds_at_every_entry_and_takes_no_more_than_it_must(family):
    m = model(family)
    cap = 0.7 * dense(m, 0)
    done = ls.restrain(m, IDS, "sigma-cap", cap=cap).step()
    for i in (0, 1):
        largest = max(dense(m, i, e) for e in (0, 1))
        assert largest <= cap * (1 + 2e-4)  # what it allows for rounding
        assert i not in done or done[i] < 1
    assert max(dense(m, 0, e) for e in (0, 1)) >= cap * 0.98  # a hundredth, and the solver's own
    assert not ls.restrain(m, IDS, "sigma-cap", cap=cap).step()


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_largest_logit_is_the_cap_after_clipping(family):
    m = model(family)
    held = ls.restrain(m, IDS, "query-key-clip", cap=0.05, layers=[0])

    def logits() -> float:
        m.set_attn_implementation("eager")
        layers = [captured(m, 0, e) for e in (0, 1)]
        found = []
        for layer, x in layers:
            q, k, _ = layer.project(x)
            hidden = ~torch.ones(7, 7).tril().bool() & layer.causal
            found.append(float((q @ k.mT).masked_fill(hidden, -1e9).max()))
        return max(found)

    before = logits()
    done = held.step()
    assert before > 0.05
    assert done[0] == pytest.approx(0.05 / before)
    assert logits() == pytest.approx(0.05, rel=1e-6)
    assert not held.step()


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_spectral_cap_does_not_overshoot_and_leaves_what_is_below(shape, dtype):
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    cap = float(s[2] + s[1]) / 2
    assert cap_singular_values(weight, cap) == pytest.approx(cap / float(s[0]))
    expected = u @ torch.diag(s.clamp_max(cap)) @ v
    rounding = 8 * torch.finfo(dtype).eps
    assert float(torch.linalg.matrix_norm(weight.double(), 2)) <= cap * (1 + rounding)
    assert torch.allclose(weight.double(), expected, rtol=0, atol=rounding * float(s[0]))
    assert cap_singular_values(weight, 2 * cap) == 1.0


def test_a_spectral_cap_holds_for_every_matrix_of_the_chosen_layers():
    m: Any = model("llama")
    other = m.layers[0].self_attn.q_proj.weight.clone()
    done = ls.restrain(m, IDS, "spectral-cap", cap=0.3, layers=[1]).step()
    own = m.layers[1].self_attn
    for part in (own.q_proj, own.k_proj, own.v_proj, own.o_proj):
        assert float(torch.linalg.matrix_norm(part.weight.detach(), 2)) <= 0.3 * (1 + 1e-12)
    assert [*done] == [1]
    assert torch.equal(other, m.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "torch"])
def test_spectral_norm_and_gain_are_measured_in_closed_form_and_taken_off(family, tmp_path):
    m: Any = encoder().double() if family == "torch" else model(family)
    data = torch.randn(2, 7, 8, dtype=torch.float64) if family == "torch" else IDS
    before = [row.sigma for row in ls.measure(m, data, dtype="float64")]
    gains = ls.restrain(m, data, "spectral-gain")
    rows = ls.measure(m, data, dtype="float64")
    assert [row.sigma for row in rows] == pytest.approx(before, rel=2e-3)  # two solver tolerances
    assert not any("generic" in (row.note or "") for row in rows)
    assert sum(n.endswith("value") for n, _ in m.named_parameters()) in (4, 8)
    gains.remove()
    held = ls.restrain(m, data, "spectral-norm", cap=0.5)
    rows = ls.measure(m, data, dtype="float64")
    assert not any("generic" in (row.note or "") for row in rows)
    held.remove()
    assert not any("parametrizations" in n for n, _ in m.named_parameters())
    norms = [
        float(torch.linalg.matrix_norm(p.detach(), 2))
        for n, p in m.named_parameters()
        if p.ndim == 2 and ("attn" in n or "attention" in n)
    ]
    # 30 steps of the power iteration leave the norm this far below its own.
    assert norms and norms == pytest.approx([0.5] * len(norms), rel=0.02)
    if family != "torch":
        m.save_pretrained(tmp_path)
        again = AutoModel.from_pretrained(tmp_path).double().eval()
        assert torch.allclose(again(IDS)[0], m.eval()(IDS)[0], atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_normalised_queries_and_keys_bound_logits_and_stay_in_closed_form(family):
    m: Any = model(family)
    held = ls.restrain(m, IDS, "query-key-norm")
    rows = ls.measure(m, IDS, dtype="float64")
    assert not any("generic" in (row.note or "") for row in rows)
    layer, x = captured(m, 0)
    q, k, _ = layer.project(x)
    limit = layer.query_norm.weight.abs().max() * layer.key_norm.weight.abs().max()
    limit = limit * layer.head_width * layer.scale
    assert float((q @ k.mT).abs().max()) <= float(limit)
    # Scaling the weights up changes no logit any more.
    part = m.layers[0].self_attn.q_proj if family == "llama" else None
    part = m.encoder.layer[0].attention.self.query if part is None else part
    with torch.no_grad():
        part[0].weight.mul_(1e3)
        if part[0].bias is not None:
            part[0].bias.mul_(1e3)
    assert float((captured(m, 0)[0].project(x)[0] @ k.mT).abs().max()) <= float(limit)
    assert float(held.penalty()) == 0.0 and not held.step()
    with pytest.raises(InputError, match=r"without a norm\. Found one in layer 0"):
        ls.restrain(m, IDS, "query-key-norm")


# --- what is refused


def test_mistakes_are_one_line(unchecked):
    m = model("bert")
    for words, data, how, options in (
        (r"`how` should be one of .*sigma-cap.*Found `sigma_cap`", IDS, "sigma_cap", {}),
        (r"`layers` should be between 0 and 1\. Found 7", IDS, "sigma", {"layers": [7]}),
        (
            r"`layers` should be whole numbers.*Found `attention`",
            IDS,
            "sigma",
            {"layers": "attention"},
        ),
        (
            r"`modules` should match .*Found none for `nothing`",
            IDS,
            "sigma",
            {"modules": "nothing"},
        ),
        (r"`sigma-cap` needs a `cap`", IDS, "sigma-cap", {}),
        (r"`cap` should be positive.*Found `cap = 0`", IDS, "sigma-cap", {"cap": 0}),
        (r"`cap` should be positive.*Found `cap = nan`", IDS, "sigma", {"cap": float("nan")}),
        (r"`softmax-spread` takes no `cap`", IDS, "softmax-spread", {"cap": 1.0}),
        (r"`data` should be a batch", "It was late.", "sigma", {}),
    ):
        with pytest.raises(InputError, match=words):
            ls.restrain(m, data, how, **options)
    with pytest.raises(InputError, match=r"should all be float32, or all float64\..*bfloat16"):
        ls.restrain(model("bert").bfloat16(), IDS, "sigma")
    padded = {"input_ids": IDS, "attention_mask": (IDS[0, 6] != IDS).long()}
    with pytest.raises(InputError, match="should have no padding"):
        ls.restrain(m, padded, "sigma").penalty()


def _act(of: nn.Module, how: str, cap: float | None) -> None:
    held = ls.restrain(of, IDS, how, cap=cap)
    held.penalty()
    held.step()


def test_what_cannot_act_on_a_layer_says_so():
    unknown, fused, normed = model("olmo"), model("gpt2"), model("qwen3")
    for words, of, how in (
        ("no closed form is known for `OlmoAttention`", unknown, "sigma"),
        (r"linear maps of their own.*layer 0 \(`GPT2Attention`\)", fused, "query-key-norm"),
        ("without a norm. Found one in layer 0", normed, "query-key-norm"),
        ("logits that follow the weights", normed, "query-key-clip"),
        ("queries and keys are normalised", normed, "row-gram"),
    ):
        with pytest.raises(InputError, match=words):
            _act(of, how, 1e-3 if how == "query-key-clip" else None)
    ls.restrain(fused, IDS, "spectral-gain")
    for how in ("sigma-cap", "query-key-clip"):
        with pytest.raises(InputError, match="are computed from others"):
            _act(fused, how, 1e-3)
    with pytest.raises(InputError, match="without a parametrisation"):
        ls.restrain(fused, IDS, "spectral-norm")


def test_weights_that_are_no_number_are_refused_by_layer():
    m: Any = model("gpt2")
    held = ls.restrain(m, IDS, "sigma")
    with torch.no_grad():
        m.h[0].mlp.c_proj.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="input of layer 1 should be finite"):
        held.penalty()
    cap = ls.restrain(m, IDS, "sigma-cap", cap=1.0, layers=[0])
    with torch.no_grad():
        m.h[0].attn.c_proj.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"Sigma of layer 0 .* Found that a product"):
        cap.step()


@pytest.mark.parametrize(
    ("how", "cap"), [("spectral-cap", 1.0), ("weight-norms", None), ("spectral-norm", None)]
)
def test_matrices_that_are_no_numbers_are_refused(how, cap):
    m: Any = model("gpt2")
    held: Any = None if how == "spectral-norm" else ls.restrain(m, IDS, how, cap=cap)
    act = {"spectral-cap": "step", "weight-norms": "penalty"}
    with torch.no_grad():
        m.h[1].attn.c_proj.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"weight.* should be finite\. Found NaN or Inf"):
        getattr(held, act[how])() if how in act else ls.restrain(m, IDS, how)
    assert not nn.utils.parametrize.is_parametrized(m.h[0].attn.c_attn)


def test_a_part_that_is_compiled_is_restrained_as_it_was_written():
    m: Any = encoder()
    x = gaussian(1, 5, 8).to(next(m.parameters()))
    alone = ls.restrain(m, x, "sigma").penalty().item()
    m.layers[1] = torch.compile(m.layers[1], backend="eager")
    held = ls.restrain(m, x, "sigma")
    assert held.penalty().item() == pytest.approx(alone)
    assert all("_orig_mod" not in name for name in held.probe.names.values())


def test_every_restraint_is_in_the_table_of_the_function():
    assert all(f"``{name}``" in (ls.restrain.__doc__ or "") for name in restraints())
