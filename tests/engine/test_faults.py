"""Memory that runs out: the measurement goes on with less, and the row says so."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lipscope as ls
from lipscope.attention import jacobian as chunked
from lipscope.errors import InputError
from opened import layer_of
from rows import lines
from tiny import TEXT, tiny

IDS = torch.arange(24)[None] % 11


def limited(monkeypatch: pytest.MonkeyPatch, limit: int, error: Exception) -> list[int]:
    """Refuse every core whose budget is larger than ``limit``; the budgets that were tried."""
    tried: list[int] = []
    real = chunked.ChunkedCore.__init__

    def allocate(self: Any, layer: Any, x: Any, memory: int, *rest: Any, **more: Any) -> None:
        tried.append(memory)
        if memory > limit and memory != 8 * chunked.CHUNK_BYTES:  # the forward pass has its own
            raise error
        real(self, layer, x, memory, *rest, **more)

    monkeypatch.setattr(chunked.ChunkedCore, "__init__", allocate)
    return tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate"
                     " memory: you tried to allocate 17179869184 bytes."),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)  # fmt: skip
def test_memory_that_runs_out_is_halved(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = tiny("gpt2").model
    options: dict[str, Any] = {"layers": [0], "memory": "64MiB", "map": "attention"}
    (expected,) = ls.measure(model, IDS, **options)
    tried = limited(monkeypatch, 2**24, error)
    (row,) = ls.measure(model, IDS, **options)
    assert [m for m in tried if m != 8 * chunked.CHUNK_BYTES] == [2**26, 2**25, 2**24]
    assert row.status == "converged" and row.error is None
    assert row.sigma == pytest.approx(expected.sigma, rel=1e-6)
    assert "out of memory: repeated with `memory = 16MiB`" in (row.note or "")
    assert "memory" not in (expected.note or "")


def test_memory_that_never_suffices_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 0, MemoryError("nothing left"))
    (row,) = ls.measure(tiny("gpt2").model, IDS, layers=[0], memory="96MiB")
    assert row.status == "failed" and row.passing
    assert row.error == "MemoryError: nothing left; the next run tries it again"


def test_a_model_that_needs_more_memory_ends_in_one_line_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass is the model's own: no smaller block helps it."""
    module = sys.modules["lipscope.engine.ready_model"]
    real = module.run_traced

    def trace(model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if max(v.shape[1] for v in inputs.values()) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(model, inputs, *rest, **more)

    monkeypatch.setattr(module, "run_traced", trace)
    small = "random:gpt2:n_layer=1,n_embd=12,n_head=3,vocab_size=300"
    with pytest.raises(InputError, match=r"own forward pass ran out of memory\. Use shorter"):
        ls.measure(small, TEXT, lengths=[6, 12], samples=2, out=tmp_path / "run")
    kept = lines(tmp_path / "run" / "rows.jsonl")
    assert [(row["num_tokens"], row["status"]) for row in kept] == [(6, "converged")] * 2


@pytest.mark.parametrize(("dtype", "advised"), [("float32", False), ("float64", True)])
def test_less_memory_by_float32_is_advised_where_it_is_less(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, advised: bool
) -> None:
    def trace(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(sys.modules["lipscope.engine.ready_model"], "run_traced", trace)
    with pytest.raises(InputError, match=r"ran out of memory\. Use shorter inputs") as refused:
        ls.measure(tiny("gpt2").model, IDS, dtype=dtype)
    assert ("float32" in str(refused.value)) == advised


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_gpu_that_is_not_there_says_what_to_install() -> None:
    with pytest.raises(InputError, match=r"`cuda`, and .*\. Install .* leave `device` out\."):
        ls.measure(tiny("gpt2").model, IDS, device="cuda")


def test_another_error_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = limited(monkeypatch, 0, RuntimeError("a broken kernel"))
    (row,) = ls.measure(tiny("gpt2").model, IDS, layers=[0], memory="96MiB")
    assert row.error == "RuntimeError: a broken kernel"
    assert len([m for m in tried if m != 8 * chunked.CHUNK_BYTES]) == 1


def test_a_layer_that_overflows_in_half_precision_is_computed_in_float32() -> None:
    """Weights that float16 holds, and whose products it does not."""
    model: Any = tiny("gpt2").model
    model.h[0].attn.c_attn.weight.data[:, -12:] *= 3e3
    model.h[0].attn.c_proj.weight.data *= 3e3
    half = copy.deepcopy(model).half()
    rounded = copy.deepcopy(half).float()
    assert all(p.isfinite().all() for p in half.parameters())
    layer, x = layer_of(rounded, IDS, layer=0)
    with pytest.raises(ls.InputError, match="float16"):
        ls.top_singular(layer.half().linearise(x.half()), tol=0.1)
    (row,), (expected,) = (ls.measure(m, IDS, layers=[0]) for m in (half, rounded))
    assert row.status == "converged"
    assert row.sigma == pytest.approx(expected.sigma, rel=1e-5)
    assert "the weights are float16: every layer was computed in float32" in (row.note or "")
    assert "float16" not in (expected.note or "")


def test_where_a_model_in_half_precision_overflows_is_said() -> None:
    """As hooks on the model itself see it; in float32 every layer has its sigma."""
    model: Any = tiny("gpt2").model
    model.h[1].attn.c_attn.weight.data[:, -12:] *= 3e3
    model.h[1].attn.c_proj.weight.data *= 3e3
    half, seen = copy.deepcopy(model).half().train(), []
    for block in half.h:
        hook = block.attn.register_forward_hook(lambda *a: seen.append(a[2][0].isfinite().all()))
        half(IDS)
        hook.remove()
    assert seen == [True, False]
    rows = ls.measure(half, IDS, layers=[0, 1])
    assert [row.status for row in rows] == ["converged", "converged"] and half.training
    said = "in float16 layer 1 overflows at this input"
    assert [said in (row.note or "") for row in rows] == [False, True]
    (whole,) = ls.measure(half, IDS, map="model")
    assert said in (whole.note or "") and whole.status == "converged"
    # float32 holds as much as bfloat16, and is looked at by the solver itself.
    for other in (model, copy.deepcopy(model).bfloat16(), tiny("gpt2").model.half()):
        for row in ls.measure(other, IDS):
            assert row.status == "converged" and "overflows" not in (row.note or "")


# In a process of its own: in one that ran other tests what the allocator keeps and returns differs.
LONG = """
from pathlib import Path
import lipscope as ls

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

model = "random:gpt2:n_layer=1,n_embd=16,n_head=4,n_positions=4096,vocab_size=300"
options = {"samples": 1, "memory": 2**26, "tol": 0.5}
ls.measure(model, lengths=[64], **options)  # what a first measurement imports
Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there
before = memory("VmRSS")
(row,) = ls.measure(model, lengths=[4096], **options)
print(row.status, row.error, memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_long_causal_measurement_holds_no_matrix_of_scores() -> None:
    """n = 4096 with 4 heads: the scores alone would take 268 MB; the budget is 67 MB.

    The peak is 47 to 62 MB above what the process holds before, with room for them 170 MB.
    """
    done = subprocess.run([sys.executable, "-c", LONG], check=True, capture_output=True, text=True)
    status, error, growth = done.stdout.split()
    assert (status, error) == ("converged", "None")
    assert int(growth) < 110e6
