"""The command as tests call it, and how one that is refused ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = "hidden_size=12,num_attention_heads=3,num_hidden_layers=2,intermediate_size=16"
BERT = f"random:bert:{SIZES}"
GPT2 = "random:gpt2:n_embd=12,n_head=3,n_layer=2,n_positions=2048"
NEOX = f"random:gpt_neox:{SIZES}"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 50
SHORT = ["--lengths", "6", "--samples", "2"]


@dataclass
class Result:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Result]


def in_a_process(folder: Path, *arguments: str) -> Result:
    """The installed command, as a user calls it."""
    command = Path(sys.executable).parent / "lipscope"
    done = subprocess.run(
        [str(command), "measure", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def refused(result: Result, *expected: str, left: list[str] | None = None) -> None:
    """Status 2, one line on standard error that says so, and nothing written."""
    assert result.status == 2, result.out + result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    said = result.err.strip("\n").split("\n")
    assert len(said) == 1, result.err
    for words in expected:
        assert re.search(words, said[0]), (words, said[0])
    assert sorted(os.listdir()) == sorted(left or [])
