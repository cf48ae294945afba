"""Draw the figures of the README and the tutorials: `make demo`, its page, a window, two runs.

Run: make figures
"""

import copy
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import lipscope as ls
from lipscope.charts.look import save_each
from lipscope.charts.tokens import shaded_text
from lipscope.pages.rows import report

FOLDER = Path(__file__).parent / "images"
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # which find the browser


def photograph(page: Path, image: Path) -> None:
    """The opening view of a report, at one and a half pixels a point."""
    from browser import chromium

    with chromium() as browser:
        size = {"width": 1240, "height": 760}
        opened = browser.new_page(viewport=size, device_scale_factor=1.5, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        opened.wait_for_function("document.documentElement.dataset.drawn === 'yes'")
        opened.screenshot(path=image)


def explored() -> None:
    """The live page: every layer, a push, and typing as moving pictures."""
    from io import BytesIO

    from PIL import Image

    from browser import chromium
    from lipscope.explore import served

    server = served(["minilm"])
    server.start()
    with chromium() as browser:
        size = {"width": 1180, "height": 930}
        page = browser.new_page(viewport=size, device_scale_factor=1.5, color_scheme="light")
        page.goto(server.address)
        page.wait_for_selector("html[data-drawn=yes]")
        page.wait_for_timeout(500)
        page.screenshot(path=FOLDER / "explore.png")
        page.click("#panels >> text=Push it")
        page.wait_for_selector("#push svg")
        page.wait_for_selector("#words-tokens .reading")
        page.locator("#pushed").screenshot(path=FOLDER / "explore-push.png")
        small = {"width": 980, "height": 700}
        page = browser.new_page(viewport=small, reduced_motion="reduce", color_scheme="light")
        page.goto(server.address + "#text=The+film")
        frames: list[tuple[Image.Image, int]] = []

        def frame(milliseconds: int) -> None:
            content = Image.open(BytesIO(page.screenshot())).convert("RGB")
            frames.append((content.quantize(48, dither=Image.Dither.NONE), milliseconds))

        page.wait_for_selector("html[data-drawn=yes]")
        page.locator("#text").focus()
        page.keyboard.press("End")
        frame(900)
        for words in (" was", " not", " good,", " and", " nobody", " said", " so."):
            page.keyboard.type(words)
            page.wait_for_selector("html[data-drawn=yes]")
            frame(450)
        frame(900)
        for token in (0, 4):
            page.locator("#in [role=option]").nth(token).click()
            page.wait_for_selector("html[data-drawn=yes]")
            frame(1400)
    server.end()
    first, *others = [image for image, _ in frames]
    first.save(
        FOLDER / "explore.gif",
        save_all=True,
        append_images=others,
        duration=[milliseconds for _, milliseconds in frames],
        loop=0,
        optimize=True,
    )
    for name in ("explore.png", "explore-push.png"):  # few colours: a third of the bytes
        with Image.open(FOLDER / name) as image:
            image.convert("RGB").quantize(128).save(FOLDER / name, optimize=True)


def compared(image: Path) -> None:
    """Sigma before and after all matrices are rounded to four bits, by layer."""
    before = ls.load_model("minilm")
    after = copy.deepcopy(before.model)
    with torch.no_grad():
        for weight in (w for w in after.parameters() if w.ndim == 2):
            step = weight.abs().amax(1, keepdim=True) / 7
            weight.copy_((weight / step).round() * step)
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / name for name in ("before", "rounded")]
        for run, model in zip(runs, (before, after), strict=True):
            ls.measure(model, tokenizer=before.tokenizer, lengths=[64], samples=6, out=run)
        report(runs, runs[0] / "page.html", svg=runs[0], compare=True)
        shutil.copy(runs[0] / "ratios-sigma-attention-frobenius.svg", image)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    explored()
    compared(FOLDER / "compared.svg")
    with tempfile.TemporaryDirectory() as run:
        rows = ls.measure("minilm", lengths=[16, 32, 64, 128], samples=6, rest=True, out=run)
        photograph(report([run])[0], FOLDER / "page.png")
    save_each(rows.plot(), [FOLDER / "growth.svg"])
    # A typical window, by the share of its top token, of the layer where that token varies most.
    windows = ls.measure("minilm", lengths=[96], samples=9, layers=[5])
    row = sorted(windows, key=lambda row: row.top_share)[len(windows) // 2]
    tokens = [token for token in windows.tokens if token.id == row.id]
    title = f"MiniLM, layer {row.layer}, {row.num_tokens} tokens: sigma {row.sigma:.1f}"
    save_each(shaded_text(tokens, title=title, columns=46), [FOLDER / "sensitivity.svg"])
