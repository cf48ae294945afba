"""A foreign package, installed beside lipscope: what it plugs in is found, asked and measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lipscope as ls
from lipscope.plugins import check_name, load_plugins

CAUCHY = '''
"""Attention whose weights fall like one over a squared distance."""
import torch
from lipscope.attention import Attention, variant


@variant
class CauchyAttention(Attention):
    """``S_ij = -log(1 + |q_i - k_j|²)``."""

    def __init__(self, query, key, value, output=None, *, heads=1):
        super().__init__(query, key, value, output, heads=heads, scale=1.0)

    def score(self, q, k, *, out=None):
        return -torch.log1p((q[..., :, None, :] - k[..., None, :, :]).square().sum(-1))

    def score_jvp(self, q, k, dq, dk, *, out=None):
        return torch.func.jvp(self.score, (q, k), (dq, dk))[1]

    def score_vjp(self, q, k, gs):
        return torch.func.vjp(self.score, q, k)[1](gs)
'''
FLAT = '''
"""A theorem of its own, of a variant of its own."""
import torch
from cauchy_plugin.cauchy import CauchyAttention
from lipscope.theorems import NotApplicableError, theorem


@theorem(cite="nobody2030", statement="Theorem 1")
def cauchy_flat(layer: CauchyAttention) -> float:
    """One head that gives all tokens the same weight: ``‖W_V‖``.

    Source: [nobody2030].
    """
    if layer.query.any() or layer.key.any() or layer.num_heads > 1 or layer.output is not None:
        raise NotApplicableError("one head with W_Q = W_K = 0 is asked for")
    return float(torch.linalg.matrix_norm(layer.value, 2))


@theorem(cite="nobody2030", statement="Theorem 2")
def cauchy_failing(layer: CauchyAttention) -> float:
    """One that fails."""
    raise ArithmeticError("one line\\nand another")


@theorem(cite="nobody2030", statement="Theorem 3")
def cauchy_negative(layer: CauchyAttention) -> float:
    """One that cannot be right."""
    return -1.0
'''
NAMED = '''
"""A module whose linear layers have names of their own."""
import torch
from torch import nn
from lipscope.models import family, projected


class TinyAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.asks, self.answers, self.says, self.mixes = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, hidden_states):
        b, n, d = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, 2, 3).transpose(1, 2)
            for f in (self.asks, self.answers, self.says)
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.mixes(o.transpose(1, 2).reshape(b, n, d))


@family("TinyAttention", package="tiny_plugin")
def tiny(call):
    return projected(call, "asks answers says mixes", heads=2)
'''
ASKED = """
import json, sys
import torch
import lipscope as ls

found = {"early": [name for name in ("cauchy_plugin", "tiny_plugin") if name in sys.modules]}
found["theorem"] = next(str(t) for t in ls.catalogue() if t.name == "cauchy_flat")
found["variants"] = [one.__name__ for one in ls.variants()]

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def dense(f, x):
    jacobian = torch.autograd.functional.jacobian(f, x).flatten(2).flatten(0, 1)
    return float(torch.linalg.matrix_norm(jacobian, 2))


from cauchy_plugin.cauchy import CauchyAttention

x = torch.randn(5, 6)
layer = CauchyAttention(*torch.randn(4, 6, 6), heads=2)
(row,) = ls.measure(layer, x, dtype="float64", tol=1e-6)
found["variant"] = row.sigma, dense(layer, x)
flat = CauchyAttention(torch.zeros(6, 6), torch.zeros(6, 6), torch.randn(6, 6))
(bound,) = ls.bounds(flat, x, theorems="cauchy_flat", dtype="float64").bounds
found["bound"] = bound.value, dense(flat, x)
wrong = ls.bounds(flat, x, theorems=["cauchy_failing", "cauchy_negative"], dtype="float64").bounds
found["wrong"] = [[one.value, one.reason] for one in wrong]

import tiny_plugin

model = torch.nn.Sequential(tiny_plugin.TinyAttention())
at = ls.load_model(model).at(x[None], dtype="float64", tol=1e-6)
found["family"] = at.sigma, dense(lambda z: model(z[None])[0], x)
key = model[0].answers.weight
found["closed form"] = type(at.attention).__name__, bool(torch.equal(at.attention.key, key))
print(json.dumps(found))
"""


def install(folder: Path, name: str, files: dict[str, str], groups: dict[str, str]) -> None:
    """What pip leaves of a package: its modules, its metadata and its entry points."""
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    text = "".join(f"[lipscope.{group}]\n{name} = {module}\n" for group, module in groups.items())
    (info / "entry_points.txt").write_text(text)


def test_a_foreign_package_is_found_measured_and_read(tmp_path) -> None:
    files = {"__init__.py": "", "cauchy.py": CAUCHY, "flat.py": FLAT}
    modules = {"variants": "cauchy_plugin.cauchy", "theorems": "cauchy_plugin.flat"}
    install(tmp_path, "cauchy_plugin", {f"cauchy_plugin/{n}": t for n, t in files.items()}, modules)
    install(tmp_path, "tiny_plugin", {"tiny_plugin.py": NAMED}, {"families": "tiny_plugin"})
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["early"] == [], "a plug-in is imported before a register is read"
    assert found["theorem"] == "<cauchy_flat: Theorem 1 [nobody2030], mean-field upper bound>"
    reasons = "it raised ArithmeticError: one line and another", "it gave -1.0"
    assert found["wrong"] == [[None, one] for one in reasons]
    house = [one.__name__ for one in ls.variants()]
    assert found["variants"] == sorted([*house, "CauchyAttention"])
    assert found["closed form"] == ["DotProduct", True]
    for name, tol in (("variant", 1e-6), ("bound", 1e-12), ("family", 1e-6)):
        value, dense = found[name]
        assert value == pytest.approx(dense, rel=tol), name


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """An installed plug-in that cannot be imported."""
    modules = {"theorems": "broken_plugin"}
    install(tmp_path, "broken", {"broken_plugin.py": "import nowhere"}, modules)
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()


def test_a_plugin_that_cannot_be_imported_is_named_in_one_line(broken) -> None:
    line = (
        r"The plug-in `broken` of broken \(lipscope.theorems\) should import `broken_plugin`. "
        "Found ModuleNotFoundError: No module named 'nowhere'; fix it, or uninstall its package."
    )
    for _ in range(2):  # and again when asked again
        with pytest.raises(ls.InputError, match=f"^{line}$"):
            ls.catalogue()
    assert ls.variants()


def test_no_plugin_takes_a_name_of_the_house() -> None:
    with pytest.raises(ls.InputError, match=r"`mine` in `lipscope.attention\.kinds"):
        check_name("variant", "mine", torch.nn.Linear, ls.DotProduct)
    check_name("variant", "mine", ls.DotProduct, ls.DotProduct)  # imported twice
