"""Adapters of peft on models of transformers: measured with what they add, merged or beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope as ls
from lipscope.models import load_model

peft = pytest.importorskip("peft")
IDS = torch.tensor([[101, 2054, 102]])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of its use of transformers
TARGETS = ["query", "key", "value", "attention.output.dense"]


def adapted(**options: Any) -> Any:
    """MiniLM with an adapter that changes it much, in float64."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False, **options)
    model: Any = load_model("minilm").model.double()
    model.set_attn_implementation("eager")  # differentiable twice
    return peft.get_peft_model(model, config).eval()


def truth(model: nn.Module, layer: int) -> float:
    """Of the modules themselves, between what the attention takes and its projection gives."""
    block = next(m for n, m in model.named_modules() if n.endswith(f"encoder.layer.{layer}"))
    site, taken = block.get_submodule("attention.self"), list[Tensor]()
    hook = site.register_forward_pre_hook(lambda _, args: taken.append(args[0].detach()))
    with torch.no_grad():
        model(input_ids=IDS)
    hook.remove()
    dense: Any = block.get_submodule("attention.output.dense")
    jacobian: Any = torch.func.jacrev(lambda x: dense(site(x)[0]))(taken[0])
    jacobian = jacobian.detach().reshape(-1, taken[0].numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


@pytest.mark.parametrize("options", [{}, pytest.param({"use_dora": True}, marks=pytest.mark.slow)])
def test_sigma_is_that_with_the_adapter_merged_or_not(options):
    model, found = adapted(**options), dict[str, float]()
    expected = truth(model, 3)

    def measured(what: str, model: nn.Module) -> ls.Measurement:
        row = ls.measure(model, {"input_ids": IDS}, layers=[3], dtype="float64", tol=1e-9)[0]
        found[what] = row.sigma or 0.0
        return row

    assert "adapter" in (measured("beside", model).note or "")
    model.merge_adapter()
    measured("merged in place", model)
    model.unmerge_adapter()
    with model.disable_adapter():
        measured("disabled", model)
    alone = found.pop("disabled")
    assert measured("merged", model.merge_and_unload()).note is None  # read in closed form again
    assert list(found.values()) == pytest.approx([expected] * 3, rel=1e-7)
    assert abs(alone - expected) > 0.01 * expected
