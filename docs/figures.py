"""Draw the figures of the README: the default job of `make demo`, and one of its windows.

Run: make figures
"""

from pathlib import Path

import lipscope as ls
from lipscope.figure import save, shaded_text

FOLDER = Path(__file__).parent / "images"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    rows = ls.measure("minilm", lengths=[16, 32, 64, 128, 256], samples=5, rest=True)
    save(rows.plot(), FOLDER / "growth.svg")
    # One window of prose, at the layer where the most sensitive token varies most.
    windows = ls.measure("minilm", lengths=[96], samples=8, layers=[5])
    row = next(row for row in windows if row.sample == 6)
    tokens = [token for token in windows.tokens if token.id == row.id]
    title = f"Layer {row.layer}, {row.num_tokens} tokens: sigma {row.sigma:.1f}"
    save(shaded_text(tokens, title=title, columns=46), FOLDER / "sensitivity.svg")
