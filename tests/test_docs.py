"""The tutorials run as they are printed: Python blocks in order, commands one by one."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


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


def _command(line: str, monkeypatch) -> None:
    from lipscope import cli

    words = shlex.split(line, comments=True)
    assert words[0] == "lipscope"
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, line
