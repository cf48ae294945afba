"""The script that measures the house, on a house small enough to count by hand."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = {
    "lipscope/__init__.py": "",
    "lipscope/low/__init__.py": "from lipscope.low.inside import f\n",
    "lipscope/low/inside.py": "def f(a):\n    return a\n",
    "lipscope/high/__init__.py": "from lipscope.low import f\n",
    "lipscope/high/inside.py": "from lipscope.low.inside import f as g\n\n\n"
    "def f(a, b, c, d, e, h, i, j, *, k, m):\n"
    "    return g(a)\n",
}  # fmt: skip
PLUGGED = "from lipscope.high.inside import f\nfrom lipscope.low import f as g\n"


@pytest.mark.parametrize("name", ["house", "lipscope/src/lipscope"])  # wherever it stands
def test_counts(tmp_path, monkeypatch, name) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    counts = importlib.import_module("house").counts
    root = tmp_path / name
    files = {f"src/{path}": text for path, text in FILES.items()}
    for path, text in {**files, "experiments/src/foreign/__init__.py": PLUGGED}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    assert list(counts(root).values()) == ["11", "6", "0.8", "1", "2 / 2 / 2", "1", "2"]
