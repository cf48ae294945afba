"""The measures of the house: how long it is, how it hangs together, what one question takes.

Usage: ``python benchmarks/house.py [ROOT …]``, one column for each tree, this one by default. It
counts the library and the experiments; calls are counted in a process of each tree's own.
"""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MANY = 10
# A random BERT of 2 layers (2 heads, width 32) with 16 tokens, given as a module. What is imported
# on the way does not count, nor what a call does inside its own file.
CALLS = """
import sys
from pathlib import Path
import torch
import lipscope as ls
from transformers import BertConfig, BertModel

sources = str(Path(ls.__file__).parent)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 300}
bert = BertModel(BertConfig(num_hidden_layers=2, **sizes)).eval()
ids = torch.arange(1, 17)[None]
ls.measure  # makes the face


def counted(ask):
    files, calls = set(), 0

    def seen(frame, event, _):
        nonlocal calls
        own, caller = frame.f_code.co_filename, frame.f_back
        if event == "call" and own.startswith(sources) and frame.f_code.co_name != "<module>":
            files.add(own)
            other = own if caller is None else caller.f_code.co_filename
            calls += other != own and other.startswith(sources)

    sys.setprofile(seen)
    try:
        ask()
    finally:
        sys.setprofile(None)
    print(len(files), calls)


counted(lambda: ls.measure(bert, ids, layers=0))
counted(lambda: ls.certify(bert, ids, layer=0))
if hasattr(ls, "OpenModel"):
    model = ls.load_model(bert)
    counted(lambda: model.at(ids, layer=0).sigma)
"""
ASKED = ("`measure`, one row", "`certify`, one ball", "`model.at(…).sigma` of an open model")


def counts(root: Path) -> dict[str, str]:
    """What the sources of a tree say of themselves."""
    files = [f for folder in ("src", "experiments") for f in sorted((root / folder).rglob("*.py"))]
    trees = {file: ast.parse(file.read_text()) for file in files}
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = sorted(1 + (one.end_lineno or 0) - one.lineno for one in functions)
    defined = Counter(
        name
        for tree in trees.values()
        for name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    )
    imports = [(file, name) for file, tree in trees.items() for name in _imported(tree)]
    middle = statistics.mean(lengths), statistics.median(lengths), lengths[len(lengths) * 9 // 10]
    return {
        "lines": f"{sum(len(file.read_text().splitlines()) for file in files):,}",
        "modules": str(len(files)),
        "imports of the house per module": f"{len(imports) / len(files):.1f}",
        "names defined at the top of two modules": str(sum(n > 1 for n in defined.values())),
        "length of a function, mean / median / p90": " / ".join(f"{n:.0f}" for n in middle),
        f"functions with {MANY} parameters or more": str(
            sum(_parameters(one.args) >= MANY for one in functions)
        ),
        "imports of another room past its front door": str(
            sum(_past_the_door(file, name) for file, name in imports)
        ),
    }


def _imported(tree: ast.Module) -> list[str]:
    """The module of every statement that imports from the house."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lipscope"):
            found.append(str(node.module))
        elif isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.startswith("lipscope")]
    return found


def _parameters(given: ast.arguments) -> int:
    return len(given.posonlyargs + given.args + given.kwonlyargs)


def _past_the_door(file: Path, name: str) -> bool:
    """Whether a module of one room imports from the inside of another."""
    package, *inside = name.split(".")
    own, *parts = str(file).replace(os.sep, "/").rpartition("/src/")[2].split("/")
    outside = own != package or (len(parts) > 1 and inside[:1] != parts[:1])
    return len(inside) > 1 and outside


def asked(root: Path) -> dict[str, str]:
    """Files of the library that one question goes through, and calls from one into another."""
    path = os.pathsep.join([str(root / "src"), str(root / "experiments" / "src")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {
        f"{question}: files, calls between files": f"{int(files)}, {int(calls):,}"
        for question, (files, calls) in zip(ASKED, pairs, strict=False)
    }


def main(roots: list[Path]) -> None:
    """Print the table, one column a tree."""
    columns = [counts(root) | asked(root) for root in roots]
    names = [
        subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=False,
        ).stdout.strip()
        or root.name
        for root in roots
    ]  # fmt: skip
    print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(roots)}")
    for key in dict.fromkeys(key for column in columns for key in column):
        print(f"| {key} | {' | '.join(column.get(key, '–') for column in columns)} |")


if __name__ == "__main__":
    main([Path(word).resolve() for word in sys.argv[1:]] or [ROOT])
