"""What the pages print runs: tutorials as they are, the other pages on a small model.

Python blocks run in their order and share their names, commands run one by one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import griffe
import pytest
import typer

import lipscope as ls
from lipscope.cli import app
from rows import row

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_ALONE = re.compile(r"^`(lipscope [^`]*)`$", re.MULTILINE)  # under a figure
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {"__name__": page.stem}
    for language, code in blocks:
        if language == "python":
            exec(compile(code, f"{page.name}", "exec"), names)
        else:
            for line in code.strip().splitlines():
                _command(line, monkeypatch)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_every_example_runs(script: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """In this process, which has imported what each of them would import for seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    status = None
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:  # what it needs is not installed, and it says so
        status = end.code
    assert status is None and capsys.readouterr().out


SMALL = "random:bert:hidden_size=16,num_attention_heads=4,num_hidden_layers=4,intermediate_size=16"
# What the reader of these pages brings along.
GIVEN = """
import torch
from pathlib import Path
import lipscope as ls

text = "It was a dark and stormy night; the rain fell in torrents. " * 60
error, weight = torch.zeros(()), torch.eye(2, 16)
f, x = torch.sin, torch.randn(6, 16)
layer = ls.DotProduct(torch.eye(16), torch.eye(16), torch.eye(16))
my_module = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
    num_layers=2, enable_nested_tensor=False,
)
batch = torch.randn(1, 6, 16)
SPEC = "models: ['%s']\\nlayers: [0]\\nlengths: [16]\\nsamples: 1\\ntheorems: [local_rows]\\n"
Path("growth.yaml").write_text(SPEC)
ls.measure("%s", text, layers=[0], lengths=[8], samples=1, out="runs/demo")
"""


@pytest.mark.usefixtures("unchecked")
def test_every_block_of_the_other_pages_runs(tmp_path: Path, monkeypatch) -> None:
    """One after another in one folder: the sweep of one page is read by the next one."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "pages"}
    exec(GIVEN.replace("%s", SMALL), names)
    for page in ("README.md", "docs/index.md", "docs/api.md", "docs/sweeps.md"):
        text = (ROOT / page).read_text(encoding="utf-8").replace('"minilm"', f'"{SMALL}"')
        text = text.replace("=64", "=12")  # tokens: what is asked is the code, not the size
        for language, code in _BLOCK.findall(text):
            if language == "python" and not code.startswith(">>>"):  # those are doctests
                exec(compile(code, page, "exec"), names)


PAIRS = (("\\langle", "\\rangle"), ("(", ")"), ("{", "}"))


def test_every_formula_of_the_register_is_typeset(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    plain = importlib.import_module("plain")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/theorems").glob("*.md")]
    spans = [span for text in pages for span in re.findall(r"`([^`]+)`", text)]
    made = [plain.latex(span) for span in spans if plain.is_formula(span)]
    assert len(made) > 100
    for one in made:
        assert not set(one) & set("√‖|Σ²⁻<≤"), one
        for opened, closed in (("\\lvert", "\\rvert"), ("\\lVert", "\\rVert"), *PAIRS):
            assert one.count(opened) == one.count(closed), one


def test_every_command_of_the_pages_can_be_read() -> None:
    """All printed ones have the commands and options that there are; the tutorials' are run."""
    known: Any = typer.main.get_command(app)
    found = 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for code in _FENCED.findall(text) + _ALONE.findall(text):
            for line in code.replace("\\\n", " ").splitlines():
                if line.split(" ")[0] not in ("lipscope", ".venv/bin/lipscope"):
                    continue
                words = shlex.split(line, comments=True)
                name, *rest = words[1:] if words[1] in known.commands else ["", *words[1:]]
                command = known.commands[name] if name else known
                context = command.context_class(command, **command.context_settings)
                command.make_parser(context).parse_args(rest)
                found += 1
    assert found > 40


def test_options_that_a_help_hides_are_on_the_page_of_commands() -> None:
    known: Any = typer.main.get_command(app)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, command in known.commands.items():
        hidden = {opt.opts[0] for opt in command.params if getattr(opt, "hidden", False)}
        told = re.search(rf"^\| `{name}` \| (`--.*) \|$", page, re.MULTILINE)
        assert set(re.findall(r"--[\w-]+", told[1] if told else "")) == hidden, name


def test_every_extra_is_in_the_table_of_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "installation.md").read_text()
    table = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(table) == sorted(project["optional-dependencies"])


def test_every_public_name_is_in_the_reference() -> None:
    """Where a name is a function and a module of one name, the page names the function itself."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert "lipscope.face" in named
    drawn = griffe.load("lipscope.face", search_paths=[ROOT / "src"]).members
    alone = {path.rpartition(".")[2] for path in named}
    kinds = griffe.Kind.CLASS, griffe.Kind.FUNCTION
    missing = {
        name
        for name in ls.__all__
        if name not in alone and (name not in drawn or drawn[name].kind not in kinds)
    }
    assert not missing


def test_the_readme_shows_the_table_of_the_demo() -> None:
    """Title and headings of what `make demo` prints, as the code writes them today."""
    rows = [
        row(num_tokens=n, sample=s, sigma=n**0.3, sigma_rest=1.0, delta=0.01)
        for n in (16, 32, 64, 128)
        for s in range(6)
    ]
    shown = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    told, readme = ls.Rows(rows).text(), shown[1] if shown else ""
    title = told.splitlines()[0].partition(", ")[2].strip()
    assert title == readme.splitlines()[0].partition(", ")[2]
    headings = [text.partition("─")[0].split()[-12:] for text in (told, readme)]
    assert headings[0] == headings[1]


def test_the_house_is_drawn_as_it_stands() -> None:
    """The floors of the import contract, from the top, drawn in one place."""
    house = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    floors = [
        {room for room in floor.split(" | ") if not room.startswith("(")}
        for floor in house["contracts"][0]["layers"]
    ]
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawn: list[set[str]] = []
    for number, room in re.findall(r"^( \d|\d\d| {2}) {3,}(\w+) {3,}", text, re.MULTILINE):
        if number.strip():
            drawn.append(set())
            assert int(number) == len(floors) + 1 - len(drawn)
        if drawn:
            drawn[-1].add(room)
    assert drawn == floors


FIGURE = re.compile(r"!\[[^\]]*\]\(([^)]+\.(?:svg|gif))\)(?:\n<!-- sha256 (\w+) -->)?")
PRINTED = re.compile(r"^\| \[.*\]\(([\w-]+\.md)\) \| `(.*)` \|$", re.MULTILINE)
FINDINGS = ROOT / "docs" / "findings"


def test_every_figure_is_of_the_run_that_its_page_names() -> None:
    """A page of findings carries the digests of the figures that were drawn when it was printed."""
    held: dict[str, str] = {}
    for page in FINDINGS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if (command := re.search(r"^Printed by `(lipscope [^`]+)`", text, re.MULTILINE)) is None:
            continue
        for name, digest in FIGURE.findall(text):
            found = hashlib.sha256((FINDINGS / name).read_bytes()).hexdigest()
            assert digest == found[:16], (
                f"{name} is not the figure that was drawn when {page.name} was printed. Copy both "
                f"from one run folder; if its look alone changed, the digest is {found[:16]}."
            )
            held[name] = command[1]
    assert set(held) == {one.name for one in FINDINGS.iterdir() if one.suffix in (".svg", ".gif")}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    for image in (ROOT / "docs" / "images").iterdir():
        assert f"images/{image.name}" in shown
        assert f'"{image.name}"' in (ROOT / "docs" / "figures.py").read_text(encoding="utf-8")
    index = (FINDINGS / "index.md").read_text(encoding="utf-8")
    assert {name for name, _ in FIGURE.findall(index)} <= set(held)
    for page, command in PRINTED.findall(index):
        assert f"Printed by `{command}`" in (FINDINGS / page).read_text(encoding="utf-8"), page


def _command(line: str, monkeypatch) -> None:
    from lipscope import cli

    words = shlex.split(line, comments=True)
    assert words[0] == "lipscope"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, line


def test_the_pages_of_benchmarks_are_written_from_what_was_kept(monkeypatch) -> None:
    """`python benchmarks/run.py --page`: rendered from raw numbers, which strict JSON can hold."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run = importlib.import_module("run")
    kept = run.kept()
    json.dumps(kept, allow_nan=False)
    assert any("raw" in one for one in kept.values())
    assert not any({"printed", "targets"} & set(one) for one in kept.values() if "raw" in one)
    assert run.page(kept) == run.PAGE.read_text(encoding="utf-8")
    assert run.tables(kept) == run.TABLES.read_text(encoding="utf-8")


def test_another_raw_number_is_another_table_of_benchmarks(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run = importlib.import_module("run")
    here = {"measured": "- Command: none", "commit": "0" * 12}
    planned = {"jobs": 1000, "import": 2.0, "plan": 0.5, "MB": 300.0}
    pairs = {"sweep": [7e-3] * 5, "alone": [5e-3] * 5}
    noisy = {"sweep": [8e-3, 3e-3, 9e-3, 7e-3, 14e-3], "alone": [6e-3] * 5}
    folder = {"rows": 1000, "compact": 0.1, "read": 0.2, "open": 0.3}

    def lines(with_tokens: dict[str, list[float]]) -> list[str]:
        raw = [planned, {"tokens": True, **with_tokens}, {"tokens": False, **pairs}, folder]
        stored = {"sweeps": {**here, "raw": raw}}
        page = run.page(stored) + run.tables(stored)
        return [line for line in page.splitlines() if "of a job, with tokens" in line]

    calm = lines(pairs)
    assert all("| 2 ms (2 to 2) |" in re.sub(" +", " ", line) for line in calm)
    assert "reached" in calm[-1]
    assert "2 ms (-3 to 8)" in lines(noisy)[1] and "not measured" in lines(noisy)[-1]
