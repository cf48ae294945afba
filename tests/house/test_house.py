"""The house rules that no linter checks: names, sizes, docstrings, what the face imports."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *EXPERIMENTS.rglob("*.py")])
BIBLIOGRAPHY = ROOT / "docs" / "references.bib"
CITATION = r"\[([a-z]+(?:19|20)\d\d[a-z]?)\]"
MAX_LINES = 700
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# The files test_NAME.py on the inside of a room; all others import `lipscope` and `lipscope.ROOM`.
INSIDE = {
    "attacks": "ascent",
    "attention": "blocks faults functional gradient multihead weighting",
    "certificates": "certify expansion hostile map_ball network_ball network_margin push read_out",
    "charts": "engine_bounds figure page",
    "cli": "cli_habits",
    "control": "control monitor",
    "engine": "changed cli_habits directions measure model_decision monitor push ranges "
    "reliability_sweep split sweep sweep_cluster sweep_spec",
    "explore": "explore_server",
    "linalg": "ascent interval operator singular",
    "measures": "splitting",
    "models": "block_by_block block_run capture changed dinov2 directions families settings sides",
    "pages": "compare identity page",
    "records": "changed charlm cli_rows compare engine_bounds folder growth normed parquet perturb "
    "questions record reliability reliability_sweep reproduce residual_bounds run sweep",
    "theorems": "bounds bounds_values certify control inputs local normed zero_token",
}
# What they share: all that a layer says of what it does; sweeps in this process; run folders.
SHARED = {
    "attention": "agreement",
    "engine": "abuse sweeps",
    "models": "zoo_models",
    "records": "damage folders rows",
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_what_importing_does_not_import() -> None:
    heavy = {"transformers", "altair", "vl_convert", "IPython", "polars"}
    code = "import sys, lipscope; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not heavy & set(done.stdout.split())


def test_face_has_every_name_it_promises() -> None:
    import lipscope

    assert len(lipscope.__all__) == len(set(lipscope.__all__))
    assert all(hasattr(lipscope, name) for name in lipscope.__all__)


def test_no_name_of_the_face_is_that_of_a_room() -> None:
    """A later import would put the room in the place of the function: but one is the function."""
    import lipscope

    rooms = {path.stem for path in (ROOT / "src" / "lipscope").iterdir()}
    assert rooms & set(lipscope.__all__) == {"attention"}
    assert callable(lipscope.attention) and lipscope.attention is sys.modules["lipscope.attention"]


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, folder in (("lipscope", ROOT), ("lipscope-experiments", EXPERIMENTS)):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == name and project["version"] == version
        assert importlib.metadata.version(name) == version, "run make again"
    assert project["dependencies"] == [f"lipscope=={version}"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "the module has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_module_name_says_something(path: Path) -> None:
    parts = {part.removesuffix(".py").strip("_") for part in path.relative_to(ROOT).parts}
    assert not parts & {"utils", "util", "helpers", "helper", "common", "misc", "config"}


def test_tests_come_in_by_the_front_door() -> None:
    """What a room exports may be asked anywhere, its inside in tests of that room alone."""
    found = {
        (parts[1], path.stem)
        for path in TESTS
        for module in _imported(path)
        if len(parts := module.split(".")) > 2 and parts[0] == "lipscope"
    }
    inside = {(room, f"test_{name}") for room in INSIDE for name in INSIDE[room].split()}
    shared = {(room, name) for room in SHARED for name in SHARED[room].split()}
    assert found == inside | shared


def _imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, also those it takes out of a room as a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names if _is_module(node, one))


def _is_module(node: ast.ImportFrom, name: ast.alias) -> bool:
    path = ROOT / "src" / f"{node.module}.{name.name}".replace(".", "/")
    if not (path.is_dir() or path.with_suffix(".py").exists()):
        return False
    return name.name not in getattr(importlib.import_module(str(node.module)), "__all__", ())


def test_every_dependency_bound_has_its_reason() -> None:
    """Each core requirement in pyproject.toml follows a comment of its own."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("\ndependencies = [\n")[1].split("\n]")[0].splitlines()
    stripped = [line.strip() for line in block]
    bare = [b for a, b in zip(["", *stripped], stripped, strict=False) if b[0] == a[:1] == '"']
    assert stripped[0].startswith("#")
    assert not bare, f"no reason given above {bare}"


def test_no_second_bibliography() -> None:
    """One references.bib: a theorem that is cited elsewhere would drift from it."""
    built = {".venv", ".venv-lowest", "dist", "runs", "site"}
    found = [p for p in ROOT.rglob("*.bib") if not built & set(p.relative_to(ROOT).parts)]
    assert found == [BIBLIOGRAPHY]


def test_bibliography_keys_are_unique() -> None:
    keys = re.findall(r"^@\w+\{(\w+),", BIBLIOGRAPHY.read_text(), flags=re.MULTILINE)
    assert keys
    assert len(keys) == len(set(keys))


def test_every_citation_is_in_the_bibliography() -> None:
    keys = set(re.findall(r"^@\w+\{(\w+),", BIBLIOGRAPHY.read_text(), flags=re.MULTILINE))
    pages = [*SOURCES, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    cited = {key for page in pages for key in re.findall(CITATION, page.read_text())}
    assert cited <= keys, f"not in docs/references.bib: {sorted(cited - keys)}"


def test_api_page_names_exist() -> None:
    import lipscope

    names = set(re.findall(r"\bls\.([A-Za-z_]\w*)", (ROOT / "docs" / "api.md").read_text()))
    assert names == set(lipscope.__all__)
