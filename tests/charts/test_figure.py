"""Charts that open, say what they show, keep text as text, and ask no network."""

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from lipscope import Rows, TokenShare
from lipscope.charts.curves import Panel, Series, curves_chart
from lipscope.charts.look import Chart, save_each
from lipscope.charts.marks import lay_out, palette, readable, tick_values, training_end
from lipscope.charts.tokens import shaded_text
from lipscope.errors import InputError
from rows import curve, row, tokens_of

NASTY = "</script><script>alert(1)</script><!--&\"'"


def grown(layers: int = 3, **values: Any):
    return [
        r for k in range(layers) for r in curve(lambda n, s: (1 + s) * n**0.25, layer=k, **values)
    ]


def save(chart: Chart, path: Path) -> Path:
    return save_each(chart, [path])[0]


def words(path: Path) -> str:
    """The text of an SVG file, one element a line."""
    elements = ElementTree.parse(path).iter()
    return "\n".join(e.text or "" for e in elements if e.tag.endswith(("text", "tspan")))


def spec_of(page: str) -> dict[str, Any]:
    start = page.index("const spec = ") + len("const spec = ")
    return json.JSONDecoder().raw_decode(page[start:])[0]


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_svg_says_what_is_shown(tmp_path: Path):
    text = words(save(Rows(grown(model="my model")).plot(), tmp_path / "a.svg"))
    for part in (
        "Growth of sigma with the number of tokens: my model",
        "map attention, metric frobenius, move all, read all",
        "bars: its 95 % interval",
        "geometric mean of 5 samples",
        "number of tokens n",
        "sigma: norm of output change per norm of input change",
        "all tokens may move",
        "Dashed: like n^(1/4) and n^(1/2).",
        "0: n^0.25",
        "256",
    ):
        assert part in text
    assert "top token held fixed" not in text


def test_png_is_drawn_at_twice_the_size(tmp_path: Path):
    data = save(Rows(grown()).plot(width=300, height=200), tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    wide, high = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
    assert wide > 2 * 300 and high > 2 * 200


def test_page_fetches_nothing_and_keeps_text_as_text(tmp_path: Path):
    rows = grown(1, model=NASTY)
    tokens = [t for r in rows for t in tokens_of(r, [NASTY, "b"])]
    page = save(Rows(rows, tokens).plot(), tmp_path / "a.html").read_text()
    tags = Tags(page).found
    assert not [a for _, attrs in tags for a in attrs if a in ("src", "href", "srcset", "data")]
    assert [tag for tag, _ in tags].count("script") == page.count("</script>") == 2
    assert not {tag for tag, _ in tags} & {"link", "iframe", "object", "embed", "img", "base"}
    policy = next(a["content"] for _, a in tags if "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    spec = spec_of(page)
    assert "http" not in json.dumps(spec)
    assert NASTY in spec["title"]["text"]
    values = [v for rows in spec["datasets"].values() for v in rows] if "datasets" in spec else []
    assert any(NASTY in str(v) for v in values) or NASTY in json.dumps(spec).replace('\\"', '"')


def test_svg_keeps_text_as_text(tmp_path: Path):
    chart = shaded_text(tokens_of(row(), [NASTY, "b"]), title=NASTY)
    path = save(chart, tmp_path / "a.svg")
    assert "<script" not in path.read_text()
    assert NASTY in words(path)


def test_a_menu_brings_a_layer_forward() -> None:
    """One menu for all panels, and one axis: two of a name end the compilation."""
    rows = [replace(r, sigma_rest=1.0) for r in grown() + grown(map="heads")]
    vega = vl_convert.vegalite_to_vega(Rows(rows).plot().to_dict())
    (menu,) = (one for one in vega["signals"] if one["name"] == "layer")
    assert menu["bind"]["options"] == [None, "0", "1", "2"]


def test_sigma_without_the_top_token_has_its_own_panel(tmp_path: Path):
    rows = grown(1, sigma_rest=0.5)
    chart = Rows(rows).plot()
    assert "top token held fixed" in words(save(chart, tmp_path / "a.svg"))
    (axes,) = (one["value"] for one in chart.to_dict()["params"] if one["name"] == "axes")
    assert axes["y"][0] < 0.5 and axes["y"][1] > 5 * 4


def test_rows_that_cannot_be_drawn_are_counted(tmp_path: Path):
    lost = [row(layer=7, sample=k, sigma=s) for k, s in enumerate((None, 0.0, math.nan))]
    text = words(save(Rows(grown(1) + lost).plot(), tmp_path / "a.svg"))
    assert "Not drawn: 3 of 28 rows, without a finite, positive sigma." in text
    with pytest.raises(InputError, match="Found none among 3 rows"):
        Rows(lost).plot()


def test_one_length_draws_points_and_claims_no_growth(tmp_path: Path):
    rows = curve(lambda n, s: 1.0 + s, [64])
    text = words(save(Rows(rows).plot(), tmp_path / "a.svg"))
    assert "Sigma: minilm" in text
    assert "Growth" not in text and "~ n" not in text and "Lines" not in text


def test_null_values_are_drawn(tmp_path: Path):
    rows = curve(lambda n, s: 2.0, upper=None, relative=None, top_token=None, top_share=None)
    assert save(Rows(rows).plot(), tmp_path / "a.svg").stat().st_size > 1000


def test_palette_has_as_many_colours_as_layers_all_dark_enough_for_white_paper():
    colours = palette(30)
    assert len(set(colours)) == 30
    for colour in colours:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.72
    assert len(palette(1)) == 1


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (8, 10), (3, 90), (1e-3, 1e6), (5, 6.25)])
def test_every_axis_has_a_few_labels(low: float, high: float):
    ticks = tick_values(float(low), float(high))
    assert 3 <= len(ticks) <= 25
    assert all(low <= tick <= high for tick in ticks)


_NARROW = [(1e-4, 1e60), (2.9, 4.1), (1e-3, 0.3), (20.0, 9e3), (300.0, 1400.0), (9.9, 13.0)]


@pytest.mark.parametrize(("low", "high"), _NARROW)
def test_few_labels_where_there_is_little_room(low: float, high: float):
    ticks = tick_values(low, high, most=7)
    assert 3 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)


def test_labels_of_a_short_axis_are_evenly_spaced():
    assert tick_values(9.9, 13.0) == [10.0, 11.0, 12.0, 13.0]  # and no 9.9, which stood on 10
    assert tick_values(11.2, 12.6) == [11.5, 12.0, 12.5]
    assert tick_values(6.6, 36.0, most=7) == [7.0, 10.0, 15.0, 20.0, 30.0]


def test_the_legend_of_a_dashed_line_is_dashed(tmp_path: Path):
    curves = (Series("found", ((1, 1), (9, 3))), Series("law", ((1, 1), (9, 9)), "dashes"))
    save(curves_chart("Laws", [Panel("one", curves)]), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert drawn.count('stroke-dasharray="5,4"') == 2  # the line itself and its symbol


def test_other_endings_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"should end in .svg, .png or .html. Found `a.pdf`"):
        save(Rows(grown(1)).plot(), tmp_path / "a.pdf")


# --- text -----------------------------------------------------------------------------------


def lines_of(texts: list[str], **options: int) -> list[str]:
    """The text as it is laid out."""
    lines: dict[int, str] = {}
    for placed in lay_out(tokens_of(row(), texts), **options):
        gap = placed.column - len(lines.get(placed.line, ""))
        lines[placed.line] = lines.get(placed.line, "") + " " * gap + placed.text
    return list(lines.values())


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (
            ["[CLS]", "how", "smooth", "##ness", "grows", "?", "[SEP]"],
            "[CLS] how smoothness grows? [SEP]",
        ),
        (["<s>", "▁The", "▁Lip", "sch", "itz", "."], "<s> The Lipschitz."),
        (["The", "ĠcafÃ©", "âĢĻ", "s", "<|end|>"], "The café’s <|end|>"),
        (["104", "105", "106"], "104 105 106"),
    ],
)
def test_pieces_are_joined_as_their_tokenizer_means_them(texts: list[str], expected: str):
    assert lines_of(texts) == [expected]


def test_lines_are_wrapped_between_words_and_after_line_ends():
    assert lines_of(["Ġone", "Ġtwo", "Ġthree", "ly"], columns=9) == ["one two", "threely"]
    assert lines_of(["Ġa", "Ċ", "b"]) == ["a↵", "b"]
    assert lines_of(["Ġ" + "x" * 50], columns=9) == ["x" * 8 + "…"]
    assert max(map(len, lines_of(["ab"] + ["##cd"] * 9, columns=9))) <= 9


def test_nothing_is_lost_from_tokens_that_only_look_like_bytes():
    assert readable("É") == "É"
    assert readable("##") == "##"
    assert readable("Ġ") == " "


def test_blank_tokens_are_shown_by_signs() -> None:
    assert lines_of(["Ġa", "ĠĠ", "čĊ", "ĉ"]) == ["a ␣␣␍↵", "⇥"]
    chart = shaded_text(tokens_of(row(), ["a", " "])).to_dict()
    assert [one["token"] for one in chart["datasets"].popitem()[1]] == ["a", "␣"]


def test_wide_characters_take_two_cells():
    placed = lay_out(tokens_of(row(), ["世界", "a"]))
    assert [p.width for p in placed] == [4, 1]


def test_shades_are_the_shares(tmp_path: Path):
    chart = shaded_text(tokens_of(row(), ["[CLS]", "how", "##ever"]), title="layer 3")
    values = {v["text"]: v for v in chart.to_dict()["datasets"].popitem()[1]}
    assert {text: v["share"] for text, v in values.items()} == {
        "[CLS]": 0.5,
        "how": 0.25,
        "ever": 0.25,
    }
    assert values["[CLS]"]["share in"] == "50.00%" and values["how"]["share out"] == "–"
    text = words(save(chart, tmp_path / "a.svg"))
    assert "layer 3" in text and "share of the most sensitive direction" in text


def test_long_text_is_cut_with_a_remark(tmp_path: Path):
    chart = shaded_text(tokens_of(row(), ["word"] * 300), columns=50, max_lines=2)
    text = words(save(chart, tmp_path / "a.svg"))
    assert "Cut: the first 20 of 300 tokens, which hold 53% of the direction." in text


@pytest.mark.parametrize("share", [None, 0.0, math.nan])
def test_text_without_shares_is_refused(share: float | None):
    token = TokenShare(id="x", index=0, text="a", share_in=share, share_out=None, norm=None)
    with pytest.raises(InputError, match="Found 1 tokens without a share"):
        shaded_text([token])


def test_the_end_of_training_is_marked_where_inputs_are_longer(tmp_path):
    rows = [replace(r, trained_length=128) for r in grown(lengths=[32, 128, 512])]
    svg = words(save(Rows(rows).plot(), tmp_path / "a.svg"))
    assert "trained to 128" in svg
    assert training_end(rows) == 128  # the mark stands at what it names
    short = [r for r in rows if r.num_tokens <= 128]
    assert "trained to" not in words(save(Rows(short).plot(), tmp_path / "b.svg"))
    fresh = [replace(r, weights="random, seed 0") for r in rows]
    assert "trained to" not in words(save(Rows(fresh).plot(), tmp_path / "c.svg"))


def test_panels_mark_the_end_of_training(tmp_path):
    line = Series("sigma", ((32, 1.0), (128, 2.0), (512, 3.0)))
    panels = [Panel("longer", (line,), end=128), Panel("unknown", (line,))]
    svg = words(save(curves_chart("Lengths", panels), tmp_path / "a.svg"))
    assert svg.count("trained to 128") == 1


def test_references_far_from_what_was_measured_leave_the_frame(tmp_path):
    found = Series("sigma", ((1, 1.0), (9, 100.0)))
    bound = Series("bound", ((1, 2.0), (9, 1e56)), "dashes")
    svg = words(save(curves_chart("Bounds", [Panel("one", (found, bound))]), tmp_path / "a.svg"))
    assert "1e+8" in svg
    assert "1e+9" not in svg  # a million times the largest sigma, and a little room
    alone = words(save(curves_chart("Bounds", [Panel("one", (bound,))]), tmp_path / "b.svg"))
    assert "1e+53" in alone  # nothing was measured: all of it
