"""What a module reads off its stream without a derivative, and what it keeps, is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lipscope as ls
from agreement import gaussian, slope_at
from lipscope.models import read_network

DOUBLE = torch.float64
RELU = nn.functional.relu
AIM = gaussian(8) / gaussian(8).norm()  # a random token does not come near it
FEW = 0.97  # the cosine of those that do


COUNT = torch.arange(1.0, 4.0)[:, None]


def near_aim(h: Tensor) -> Tensor:
    return (h @ AIM.to(h))[..., None] - FEW * h.norm(dim=-1, keepdim=True)


def by_numpy(h: Tensor) -> Tensor:
    return h * (1 + torch.from_numpy((near_aim(h).detach().numpy() > 0).astype(float)))


def without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        far = 1 + RELU(near_aim(h))
    return h * far


def by_another_name(h: Tensor) -> Tensor:
    h = 1.0 * h
    h.detach().mul_(1 + RELU(near_aim(h.detach())))
    return h


def written_without_gradients(h: Tensor) -> Tensor:
    h = 1.0 * h
    with torch.no_grad():
        return h.clamp_(-1e6, 1e6)


def by_a_loop(h: Tensor) -> Tensor:
    seen: list[float] = []
    h.detach().clone().apply_(lambda entry: seen.append(entry) or entry)
    return 9 * h if min(seen) > 60 else h


COUNTED = torch.ones(3)
KEPT: dict[str, Any] = {"factor": torch.ones(3, 1)}
BESIDE = ThreadPoolExecutor(1)


def of_the_last_pass(h: Tensor) -> Tensor:
    factor, KEPT["factor"] = KEPT["factor"], 1 + RELU(near_aim(h)).detach()[0]
    return h * factor


def by_a_thread(h: Tensor) -> Tensor:
    return h * BESIDE.submit(lambda: 1 + RELU(near_aim(h.detach()))).result()


def of_the_same_memory(h: Tensor) -> Tensor:
    same = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach()))
    return h * (1 + RELU(near_aim(same)))


class Linear(torch.autograd.Function):
    """Not what autograd calls by this name."""

    @staticmethod
    def forward(_: Any, h: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return h * (1 + RELU(near_aim(h)))

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


def in_a_window(h: Tensor) -> Tensor:
    return h * (2.0 if 50.5 < h.square().mean().item() < 50.6 else 1.0)


def by_two(h: Tensor) -> Tensor:
    near, far = bool((h > 60).any()), bool((h < -60).any())
    return 9 * h if near and far else h


def nested(h: Tensor) -> Tensor:
    if bool((h > 60).any()) and bool((h < -60).any()):
        h = 9 * h
    return h


def by_half_a_check(h: Tensor) -> Tensor:
    if bool((h > 60).any()):
        if not bool((h < -60).any()):
            raise ValueError("too large")
        h = 9 * h
    return h


def after_a_check(h: Tensor) -> Tensor:
    try:
        assert not bool((h > 60).any())
    except AssertionError:
        h = 9 * h
    return h


@torch.jit.script
def scripted(h: Tensor) -> Tensor:
    return 9 * h if bool((h > 60).all()) else h


@torch.jit.script
def scripted_constant(h: Tensor) -> Tensor:
    return h * (1 + torch.relu(h - 60).detach())


READ_OFF: dict[str, Callable[[Tensor], Tensor]] = {
    "a decision": lambda h: 9 * h if bool((near_aim(h) > 0).all()) else h,
    "a limit": lambda h: h.clamp(-1e6, 1e6) if bool((h.abs() > 1e6).any()) else h,
    "a mask": lambda h: h * (1 + (near_aim(h) > 0).to(h)),
    "a number": lambda h: h * (1 + max(0.0, near_aim(h).max().item())),
    "an index": lambda h: h[:, RELU(near_aim(h))[0, :, 0].argsort(stable=True)] * COUNT,
    "a constant": lambda h: h * (1 + RELU(near_aim(h)).detach()),
    "data": lambda h: h * (1 + RELU(near_aim(h.data))),
    "no gradients": without_gradients,
    "numpy": by_numpy,
    "half precision": lambda h: h + 1e-12 * h.half().to(h),
    "a function": Linear.apply,
    "a window": in_a_window,
    "two decisions": by_two,
    "nested decisions": nested,
    "half a check": by_half_a_check,
    "a check that is caught": after_a_check,
    "a script": scripted,
    "a detached script": scripted_constant,
    "a number of tokens": lambda h: h * (1 + len(COUNTED[(h[0, :, 0] > 60)])),
    "a number of entries": lambda h: 9 * h if len((h > 60).nonzero()) else h,
    "a list": lambda h: 9 * h if max(h.flatten().tolist()) > 60 else h,
    "a message": lambda h: 9 * h if "e+03" in repr(h) else h,
    "a format": lambda h: 9 * h if "e+03" in f"{h}" else h,
    "numbers of a list": lambda h: h * torch.tensor([*h[0, 0].detach()]).sign().square(),
    "a loop": by_a_loop,
    "a thread": by_a_thread,
    "the last pass": of_the_last_pass,
    "the same memory": of_the_same_memory,
    "no gradients recorded": lambda h: h if torch.is_grad_enabled() else h + RELU(near_aim(h)),
    "no gradient required": lambda h: h if h.requires_grad else h.clamp(-1e6, 1e6),
    "another name": by_another_name,
    "a cut without gradients": written_without_gradients,
    "a tensor of its own": lambda h: h * (1 + RELU(near_aim(h))).detach().requires_grad_(),
}


class AmongBlocks(nn.Module):
    """Something of the stream between two blocks of PyTorch's."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        made: Any = {"norm_first": True, "batch_first": True, "layer_norm_eps": 0.1}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, **made) for _ in range(2))
        self.between, self.head = between, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.between(self.blocks[0](x))).mean(1))


READ = (
    r"reads (values of the stream|whether gradients are recorded)|a function of its own"
    "|requires a gradient|`CppFunction`"
)


@pytest.mark.parametrize("what", READ_OFF)
def test_what_is_read_off_the_stream_is_refused(what: str) -> None:
    """At no stream that is tried does any of these change the output."""
    x, model = gaussian(1, 3, 8), AmongBlocks(READ_OFF[what]).double()
    with pytest.raises(ls.InputError, match=READ):
        ls.lipschitz_bound(model, x, radius=2.0)
    with pytest.raises(ls.InputError, match=READ):
        ls.load_model(model).decision(x)


class Mixed(AmongBlocks):
    """More between the blocks, that says nothing but near the aim."""

    def __init__(self, part: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(lambda h: part(self, h))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.MultiheadAttention(8, 1, bias=False, batch_first=True)
        sizes: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 9}
        config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, **sizes)
        config._attn_implementation = "sdpa"
        self.rotated = LlamaDecoderLayer(config, 0)


def of_weights(at: Any, h: Tensor) -> Tensor:
    weight = at.mix.in_proj_weight * (1 + RELU(near_aim(h)).sum())
    own: Any = torch.func.functional_call(at.mix, {"in_proj_weight": weight}, (h, h, h))
    return h + own[0]


def of_a_tuple(at: Any, h: Tensor) -> Tensor:
    cos = h.new_ones(1, 3, 4) * (1 + RELU(near_aim(h)))
    return at.rotated(h, position_embeddings=(cos, 0 * cos.detach()))


def of_other_keys(at: Any, h: Tensor) -> Tensor:
    """The first key is read near the aim alone; what is read otherwise is zero."""
    eye, aim = torch.eye(8).to(h), AIM.to(h)
    weight = torch.cat([1e3 * eye, eye, torch.outer(aim, aim)])
    at.mix.in_proj_weight.data, at.mix.out_proj.weight.data = weight, eye
    keys, bias = torch.stack([aim, 0 * aim])[None], h.new_tensor([[-970.0, 0.0]]).expand(3, 2)
    return h + at.mix(at.norm(h) / 8**0.5, keys, keys, attn_mask=bias * 8**-0.5)[0]


def of_a_derivative(at: Any, h: Tensor) -> Tensor:
    z = at.up(at.norm(h))
    of: Any = torch.func.jvp(torch.tanh, (z,), (torch.ones_like(z),))
    y, slope = of
    return h + at.down(y) + slope[..., :1] * AIM.to(h)


def aimed(at: Any, h: Tensor, units: slice) -> Tensor:
    """Units that no normed token which is tried moves."""
    at.up.weight.data[units], at.up.bias.data[units] = AIM.to(h), -2.7
    at.down.bias.data.zero_()
    return RELU(at.up(at.norm(h)))


def of_a_unit(at: Any, h: Tensor) -> Tensor:
    y = aimed(at, h, slice(1))
    return h + at.down(y) + 99 * y[..., :1]


def of_a_factor(at: Any, h: Tensor) -> Tensor:
    return h + 99 * at.down(aimed(at, h, slice(None)))


OF_MODULES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "weights": (of_weights, "Found `LinalgVectorNorm, .*Softmax`"),
    "a tuple": (of_a_tuple, "Found `LinalgVectorNorm, .*Softmax`"),
    "other keys": (of_other_keys, "Found `Softmax`"),
    "a derivative": (of_a_derivative, "Found `TanhBackward`"),
    "a unit": (of_a_unit, "with other activations"),
    "a factor": (of_a_factor, "with other activations"),
}


@pytest.mark.parametrize("of", OF_MODULES)
def test_modules_depend_on_the_stream_by_what_they_are_given_alone(of: str) -> None:
    part, said = OF_MODULES[of]
    model, x = Mixed(part).double(), gaussian(1, 3, 8)
    model(x)  # which sets its weights
    with pytest.raises(ls.InputError, match=said):
        ls.lipschitz_bound(model, x, radius=2.0)


def checked(h: Tensor) -> Tensor:
    """What people write to be sure."""
    assert not h.isnan().any()
    if bool((h.abs() > 1e9).any()):
        raise ValueError("too large")
    return h


def test_checks_are_no_part_of_a_network() -> None:
    x = gaussian(1, 3, 8)
    found, plain = (
        float(ls.lipschitz_bound(AmongBlocks(one).double(), x)) for one in (checked, lambda h: h)
    )
    assert found == plain


@pytest.mark.parametrize(
    "how",
    ["a number", "the first input", "a buffer", "its data", "a list", "a dictionary", "an object"],
)
def test_what_is_kept_between_passes_is_refused(how: str) -> None:
    def keeping(h: Tensor) -> Tensor:
        kept: Any = model
        if how == "a number":
            kept.count += 1
            return h if kept.count < 1000 else 9 * h
        if how == "a dictionary":
            kept.counts["calls"] += 1
            return h if kept.counts["calls"] < 1000 else 9 * h
        if how == "an object":
            kept.state.calls += 1
            return h if kept.state.calls < 1000 else 9 * h
        if how == "the first input":
            kept.size = h.detach().std() if kept.size is None else kept.size
            return h / kept.size
        if how == "its data":
            kept.ema.data += 1
            return h if kept.ema < 1000 else 9 * h
        if how == "a list":
            kept.seen.append(1)
            return h * (1 + len(kept.seen) // 1000)
        kept.ema += 1
        return h * kept.ema

    model = AmongBlocks(keeping).double()
    model.count, model.size, model.seen = 0, None, []
    model.counts, model.state = {"calls": 0}, SimpleNamespace(calls=0)
    model.register_buffer("ema", torch.zeros(1, dtype=DOUBLE))
    with pytest.raises(ls.InputError, match="keep nothing of a pass"):
        ls.lipschitz_bound(model, gaussian(1, 3, 8), radius=2.0)


def test_what_is_made_anew_is_kept_as_it_was() -> None:
    def keeping(h: Tensor) -> Tensor:
        kept: Any = model
        kept.grid = (*h.shape[1:], {"rows": [h.shape[1]]})
        return h

    model = AmongBlocks(keeping).double()
    model.grid = (3, 8, {"rows": [3]})
    assert float(ls.lipschitz_bound(model, gaussian(1, 3, 8))) > 0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("made", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_hooks_of_torch_make_are_no_state(made: Any) -> None:
    """In the dtype of the copy, and with gradients."""
    model, x = AmongBlocks(lambda h: h), gaussian(1, 3, 8).float()
    made(model.blocks[1].linear1)
    assert len(ls.load_model(model.eval()).decision(x).network.branches) == 4
    bound = ls.lipschitz_bound(model, x, radius=2.0).value
    bound.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if ".linear1.weight" in name}
    assert len(grads) == 2 + (made is nn.utils.weight_norm)
    assert all(g is not None and bool(g.any()) for g in grads.values())


@pytest.mark.parametrize("how", ["a hook", "a hook of all modules", "a forward"])
def test_attention_is_what_its_class_computes(how: str) -> None:
    model, x = AmongBlocks(lambda h: h).double(), gaussian(1, 3, 8)
    block: Any = model.blocks[1]
    own = block.self_attn.forward

    def other(h: Tensor, *args: Any, **named: Any) -> Any:
        return 9 * RELU(near_aim(h)) + own(h, *args, **named)[0], None

    if how == "a hook of all modules":
        every = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            with pytest.raises(ls.InputError, match="Found hooks for all modules"):
                ls.lipschitz_bound(model, x, radius=2.0)
        finally:
            every.remove()
        return
    if how == "a hook":
        block.self_attn.register_forward_hook(lambda _, a, y: (9 * RELU(near_aim(a[0])) + y[0],))
    else:
        block.self_attn.forward = other
    with pytest.raises(ls.InputError, match="computed as its class is written"):
        ls.lipschitz_bound(model, x, radius=2.0)


class OfIds(AmongBlocks):
    """A factorised table, and what is made of it beside the blocks."""

    def __init__(
        self,
        look_up: Any,
        around: Callable[[Tensor, Tensor], Tensor],
        beside: Callable[[Tensor, Tensor], Tensor] = lambda _, y: y,
    ) -> None:
        super().__init__(lambda h: h)
        self.table, self.wider = nn.Embedding(9, 4), nn.Linear(4, 8)
        self.look_up, self.around, self.beside = look_up, around, beside

    def forward(self, x: Tensor) -> Tensor:
        own = self.look_up(self.table, x)
        return self.beside(x, self.around(own.clone(), super().forward(self.wider(own))))


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, ids: table(ids),
        lambda table, ids: nn.functional.embedding(ids, table.weight),
        lambda table, ids: table.weight[ids],
    ],
)
def test_no_table_leads_around_the_blocks(look_up: Any) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    plain = ls.lipschitz_bound(OfIds(look_up, lambda _, y: y).double(), ids)
    assert len(plain.parts) == 6
    for around in (lambda e, y: y * e.mean().exp(), lambda e, y: y + RELU(e - 1e6).sum()):
        model = OfIds(look_up, around).double()
        for ask in (ls.lipschitz_bound, lambda m, x: ls.load_model(m).decision(x)):
            with pytest.raises(ls.InputError, match="by the stream alone"):
                ask(model, ids)


BY_IDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one hot": lambda ids, y: y * (1 + nn.functional.one_hot(ids, 9).sum(1)[:, 5:6].to(y)),
    "a word": lambda ids, y: y * (1 + (ids == 7).to(y).mean()),
    "a mask": lambda ids, y: y * (ids != 7).all(),
    "a number of words": lambda ids, y: y * len(COUNTED[(ids != 7)[0, :3]]) / 3,
    "arithmetic": lambda ids, y: y + 1e-3 * ids.double().std(),
    "a number": lambda ids, y: y * (1.0 + (int(ids.max()) == 8)),
    "a decision": lambda ids, y: 9 * y if bool((ids == 7).any()) else y,
    "two decisions": lambda ids, y: 9 * y if all([*((ids == k).any() for k in (7, 8))]) else y,
}


@pytest.mark.parametrize("how", BY_IDS)
def test_nothing_is_made_of_ids_around_the_blocks(how: str) -> None:
    def look_up(table: Any, ids: Tensor) -> Tensor:
        return table(ids)

    model = OfIds(look_up, lambda _, y: y, BY_IDS[how]).double()
    with pytest.raises(ls.InputError, match="by the stream alone"):
        ls.lipschitz_bound(model, torch.tensor([[3, 1, 4, 1, 5]]))


@pytest.mark.parametrize("look_up", [lambda table, ids: table(ids), lambda t, ids: t.weight[ids]])
def test_a_mask_of_embeddings_moves_with_them(look_up: Any) -> None:
    class Sparse(OfIds):
        def forward(self, x: Tensor) -> Tensor:
            h = self.wider(self.look_up(self.table, x))
            for block in self.blocks:
                h = block(h, src_key_padding_mask=self.look_up(self.table, x)[..., 0] > 0)
            return self.head(h.mean(1))

    model, ids = Sparse(look_up, lambda _, y: y).double(), torch.tensor([[3, 1, 4, 1]])
    for ask in (ls.lipschitz_bound, lambda m, x: ls.load_model(m).decision(x)):
        with pytest.raises(ls.InputError, match="reads values of the input"):
            ask(model, ids)


def test_masked_ids_are_no_mask() -> None:
    class Masked(OfIds):
        def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, masked_ids: Tensor
        ) -> Tensor:
            return super().forward(masked_ids)

    model = Masked(lambda table, ids: table(ids), lambda _, y: y, BY_IDS["a word"]).double()
    with pytest.raises(ls.InputError, match="by the stream alone"):
        ls.lipschitz_bound(model, {"masked_ids": torch.tensor([[3, 1, 4, 1, 5]])})


def test_padding_may_be_known_by_its_ids() -> None:
    class Padded(OfIds):
        def forward(self, x: Tensor) -> Tensor:
            h, hidden = self.wider(self.table(x)), x == 0
            for block in self.blocks:
                h = block(h, src_key_padding_mask=hidden)
            if bool((x == 0).any()):
                warnings.warn("padded", stacklevel=1)
            return self.head(h[:, 0])

    model = Padded(None, lambda _, y: y).double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network, x = read_network(model, (torch.tensor([[3, 1, 4, 0, 0]]),))
        own = model(torch.tensor([[3, 1, 4, 0, 0]]))[0]
    torch.testing.assert_close(network(x), own)


class Half(AmongBlocks):
    """Sums times a number, so that their variance stays."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            at: Any = block
            y = at.norm1(x)
            x = (x + at.self_attn(y, y, y, need_weights=False)[0]) * 0.5**0.5
            x = (x + at.linear2(torch.relu(at.linear1(at.norm2(x))))) * 0.5**0.5
        return self.head(x.mean(1))


def test_a_compiled_module_is_read_as_it_was_written() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    model, x = AmongBlocks(lambda h: h).double(), gaussian(1, 3, 8)
    found, plain = (ls.lipschitz_bound(m, x) for m in (torch.compile(model, backend=never), model))
    assert float(found) == float(plain)


def test_an_input_may_require_a_gradient() -> None:
    model, x = AmongBlocks(lambda h: h).double(), gaussian(1, 3, 8)
    of = [float(ls.lipschitz_bound(model, one)) for one in (x, x.clone().requires_grad_())]
    assert of[0] == of[1]


def test_sums_may_be_multiplied() -> None:
    model, x = Half(lambda h: h).double().eval(), gaussian(1, 3, 8)
    bound = ls.lipschitz_bound(model, x)
    assert [part.stream for part in bound.parts[:4]] == pytest.approx([0.5**0.5] * 4)
    assert slope_at(model, x[0]) <= float(bound)
    assert float(ls.load_model(model).decision(x).certify().radius) > 0
