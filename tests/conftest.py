"""Settings that hold for every test: one thread, no network, fixed examples."""

import os

# Before transformers is first imported, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch

import checked
from browser import chromium
from command import TEXT, Command, Result

checked.install()

# A matrix product takes milliseconds cold and microseconds warm: no deadline per example.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# A script that starts the tests in the background has them ignore Ctrl-C, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads on matrices of 72 columns cost ten times what they compute.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser():
    """A browser for the tests of pages."""
    with chromium() as started:
        yield started


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not go through it again."""
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # it counts a million objects, at every command and model


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what counts its own objects at the end would call them leaked


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No types are checked meanwhile, as outside of the tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def lipscope(tmp_path, monkeypatch, capsys) -> Command:
    """The command in this process, in an empty folder with one text in it."""
    # Not above: whatever is imported before the tests goes without checks of its types.
    from lipscope import cli

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path, stdin: bytes | None = None) -> Result:
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        words = [str(a) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["lipscope", "measure", *words])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        Path("text.txt").unlink()
        assert isinstance(end.value.code, int)
        return Result(end.value.code, said.out, said.err)

    return run


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Command:
    """Any command in this process, in a folder with one text in it."""
    from lipscope import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("text.txt").write_text(TEXT, encoding="utf-8")

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lipscope", *map(str, arguments)])
        # As Python opens it: what no encoding has is written with a backslash.
        sys.stderr.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Result(end.value.code, said.out, said.err)

    return run
