"""Rows as a sequence, a frame, a table and a few sentences."""

import dataclasses
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from lipscope import Direction, Measurement, Rows, TokenShare
from lipscope.errors import InputError
from rows import KEYS, curve, row, tokens_of


def measured(**values: Any) -> Rows:
    """Three layers of three lengths and five samples; layer 1 is the largest."""
    rows = [
        r
        for layer, scale in enumerate((1.0, 6.0, 2.0))
        for r in curve(
            lambda n, s, scale=scale: scale * (1 + s / 10) * n**0.25,
            [16, 64, 256],
            layer=layer,
            relative=[0.5, 0.9, 1.25][layer],
            **values,
        )
    ]
    return Rows(rows, [t for r in rows for t in tokens_of(r, ["[CLS]", "how", "##ever"])])


def test_rows_are_a_sequence_with_their_tokens():
    rows = measured()
    assert len(rows) == 45
    assert rows[0].sigma == pytest.approx(2.0)
    assert rows[-1].layer == 2
    part = rows[:2]
    assert isinstance(part, Rows)
    assert [r.id for r in part] == [rows[0].id, rows[1].id]
    assert len(part.tokens) == 6 and part.windows == "spread"
    assert rows[3] in rows


def test_frames_have_the_same_types_whatever_the_values():
    full = measured(sigma_rest=1.0, revision="a", note="b").to_polars()
    bare = Rows([row(sigma=None, layer=None, status="failed", relative=math.nan)]).to_polars()
    assert full.schema == bare.schema == Rows([]).to_polars().schema
    assert bare.columns == KEYS
    assert bare["relative"].null_count() == 1
    assert full.schema["layer"] == pl.Int64 and full.schema["sigma"] == pl.Float64
    assert full.schema["status"] == pl.String
    tokens = measured().tokens_to_polars()
    assert tokens.schema == Rows([]).tokens_to_polars().schema
    assert tokens.columns == [f.name for f in dataclasses.fields(TokenShare)]
    assert full.join(tokens, on="id").height == 45 * 3


def test_pandas_has_the_same_columns():
    pytest.importorskip("pandas")
    rows = Rows([row(), row(layer=1)])
    assert list(rows.to_pandas().columns) == rows.to_polars().columns


def test_table_shows_the_middle_row_at_the_largest_length():
    text = measured(sigma_rest=11.04).text()
    lines = text.splitlines()
    assert lines[0] == "minilm, map attention, metric frobenius, move all, read all, 256 tokens"
    # 6 * 1.2 * 256^(1/4) is 28.799999999999997, and upper is 2 % above
    line = next(x for x in lines if x.startswith("     1 "))
    for part in (
        "28.79",
        "[28.79, 29.38]",
        "0.900",
        "'[CLS]' (0)",
        "93 %",
        "11.04",
        "0.25 [0.25, 0.25]",
    ):
        assert part in line
    for part in (
        "of the 5 samples at the largest length",
        "with probability at least 1 - 1e-06 over random starts, at most upper",
        "All 45 intervals hold at once",
        "at least 1 - 4.5e-05",
        "for the sampling",
        "not the solver's error",
    ):
        assert part in " ".join(text.split())


def test_of_an_even_number_the_lower_middle_is_one_coherent_row():
    rows = [row(sample=k, sigma=s, relative=s / 100) for k, s in enumerate((9.0, 3.0, 1.0, 5.0))]
    assert "    0  3.000  [3.000, 3.060]    0.0300" in Rows(rows).text()


def test_ends_are_rounded_outwards():
    assert "[13.04, 13.06]" in Rows([row(sigma=13.047189, upper=13.0588)]).text()
    assert "[1.000, 1.001]" in Rows([row(sigma=1.0, upper=1.00001)]).text()
    assert "[1.000, 1.020]" in Rows([row(sigma=1.0, upper=1.02)]).text()


def test_growth_says_so_where_no_power_law_fits():
    rows = curve(lambda n, s: math.exp(0.1 * math.log(n / 8) ** 2 + 1e-3 * (s * n % 7)))
    text = Rows(rows).text()
    assert "no power law" in text and "p < 0.001)" in text
    assert "F test, p < 0.01" in " ".join(text.split())
    assert re.search(r"its growth is no power law \(off by \d+ %, p < 0.001\): ", text)
    assert "grows like" not in text


def test_growth_says_nothing_below_three_lengths():
    text = Rows(curve(lambda n, s: 1.0 * n, [16, 64])).text()
    assert "growth: needs three lengths" in text
    assert "needs three lengths" in text
    rows = curve(lambda n, s: 1.0 * n, [16, 64, 256])
    text = Rows([replace(row, trained_length=128) for row in rows]).text()
    assert "none beyond the 128 tokens of training." in " ".join(text.split())


def test_windows_decide_whether_samples_are_paired():
    rows = curve(lambda n, s: 10.0**s * n**0.25)
    (paired,) = Rows(rows).growth().values()
    (unpaired,) = Rows(rows, windows="disjoint").growth().values()
    assert paired is not None and paired.paired
    assert unpaired is not None and not unpaired.paired


@pytest.mark.parametrize("frobenius", [None, 300.0])
@pytest.mark.parametrize("rest", [None, 11.0])
@pytest.mark.parametrize("heads", [[None], [0, 11]])
@pytest.mark.parametrize("scale", [0.01, 1.0, 12345.0])
def test_table_fits_in_a_hundred_columns(frobenius, rest, heads, scale: float):
    rows = [
        r
        for layer in (0, 29)
        for head in heads
        for r in curve(
            lambda n, s: scale * math.exp(-0.05 * math.log(n) ** 2 + 1e-3 * (s * n % 7)),
            layer=layer,
            head=head,
            sigma_rest=rest,
            frobenius=frobenius and frobenius * scale,
            relative=scale,
        )
    ]
    tokens = [t for r in rows for t in tokens_of(r, ["a long and odd token", "b"])]
    out = Rows(rows, tokens).text().split("\n\n")[0:3]
    lines = "\n".join(out).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines if "'a lon" not in line)
    assert ("stable" in "".join(lines)) == (frobenius is not None)
    assert ("head" in "".join(lines).split("growth")[0]) == (heads != [None])


def test_a_narrow_console_can_show_the_whole_table():
    console = Console(file=io.StringIO(), width=40, color_system=None)
    console.print(measured(sigma_rest=1.0).table(), crop=False)
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "[28.79, 29.38]" in shown and "0.25 [0.25, 0.25]" in shown


def test_token_text_is_no_markup():
    r = row()
    assert "'0'" not in Rows([r], tokens_of(r, ["0"])).text()  # of what has neither text nor id
    assert "'[/bold]' (0)" in Rows([r], tokens_of(r, ["[/bold]"])).text()
    assert "'␛[31m' (0)" in Rows([r], tokens_of(r, ["\x1b[31m"])).text()
    assert "'↵' (0)" in Rows([r], tokens_of(r, ["\n"])).text()  # nor a blank cell


def test_summary_speaks_of_the_largest_sigma():
    rows = measured(sigma_rest=11.04)
    assert rows.summary() == (
        "Layer 1: sigma 28.8 means that a small change of the layer's input, of size ε, can move"
        " its output by up to 28.8 ε; 93 % of that direction sits on the first token, '[CLS]';"
        " without it, 11.0. Relative to the norms of input and output this is 0.900: to first"
        " order, the output moves by up to 0.900 times the input's relative change; compare"
        " layers by this number, of which the largest is 1.25, at layer 2. From 16 to 256 tokens it"
        " grows like n^0.25 (0.25 to"
        " 0.25, range of 5 samples, a 94 % interval of the median for the sampling of text)."
        " The means leave n^0.25 by up to 0 %, no more than chance explains (p = 1.000).\n"
        "All 45 intervals hold at once with probability at least 1 - 4.5e-05."
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"map": "model"}, "the model's embedded input, of size ε, can move its last hidden state"),
        ({"map": "model", "layer": None}, "Whole model: sigma 2.00 means"),
        ({"map": "heads", "head": 3}, "Layer 0, head 3: sigma 2.00"),
        ({"map": "heads"}, "can move the output of its heads by"),
        ({"metric": "token-relative"}, "each token moving in proportion to its norm, of size"),
        ({"metric": "infinity"}, "no entry moving by more than ε, can move an entry of its output"),
        ({"move": "last"}, "a small change of the layer's input at the last token, of size ε, can"),
        ({"read": "0:4"}, "of size ε, can move its output at tokens 0:4 by"),
        ({"top_token": 15}, "93 % of that direction sits on the last token."),
        ({"top_token": 7}, "93 % of that direction sits on token 7."),
        ({"top_share": 0.04}, "that direction is spread, its largest part (4 %) sits on the first"),
        ({"top_token": None, "top_share": None}, "by up to 2.00 ε. Relative"),
        ({"relative": None}, "'. The growth exponent"),
        ({"status": "max_steps", "upper": 9.0}, "ran out of steps, the interval is [2.000, 9.000]"),
    ],
)  # fmt: skip
def test_summary_has_the_right_words(values: dict[str, object], expected: str):
    r = row(**values)
    tokens = tokens_of(r, ["a"]) if "relative" in values else []
    assert expected in Rows([r], tokens).summary()


def test_summary_does_not_call_noise_growth():
    noise = (1.3, 0.8, 1.1, 0.9, 1.2)
    text = Rows(curve(lambda n, s: 2 * n ** (noise[s] - 1.06))).summary()
    assert "no growth can be told from none" in text
    assert "falls like n^-0.50" in Rows(curve(lambda n, s: n**-0.5)).summary()
    for tiny in (0.003, -0.003):
        single = Rows(curve(lambda n, s, tiny=tiny: n**tiny, samples=1)).summary()
        exact = Rows(curve(lambda n, s, tiny=tiny: n**tiny)).summary()
        assert "it hardly changes; there is no interval: " in single
        assert "it hardly changes (0.00 to 0.00, range of 5 samples" in exact
        assert "-0.00" not in single + exact
    assert "it falls like n^-0.50; there is no interval: " in (
        Rows(curve(lambda n, s: n**-0.5, samples=1)).summary()
    )


def test_rows_without_a_number_are_named_and_counted():
    lost = [
        row(layer=1, num_tokens=256, sample=k, sigma=None, relative=None, status=status, error=e)
        for k, (status, e) in enumerate((("non_finite", None), ("failed", "out of memory")))
    ]
    both = " ".join(Rows([*curve(lambda n, s: 1.0 * n), *lost]).text().split())
    assert "1 failed, non_finite – –" in both
    assert "2 of 27 rows have no finite sigma (1 failed, 1 non_finite)." in both
    assert "Layer 0: sigma 256" in both
    none = Rows(lost)
    assert none.summary() == (
        "No row at 256 tokens has a finite sigma: failed, non_finite (out of memory)."
    )
    assert none.text()
    short = row(status="max_steps")
    assert "1 of 1 rows ran out of steps: their intervals hold" in Rows([short]).text()


def test_the_failure_probabilities_of_all_intervals_are_added_up():
    """Rows without an interval have none; the average change has one of its own."""
    rows = [row(sample=0), row(sample=1, delta=1e-3, frobenius=9.0), row(sample=2, sigma=None)]
    assert math.isclose(Rows(rows).failure_probability(), 1e-6 + 2e-3, rel_tol=1e-12)
    # rounded up: 0.002001 is more than 0.0020
    assert "All 3 intervals hold at once with probability at least 0.9979." in Rows(rows).summary()
    assert "The interval holds with probability at least 1 - 1e-06." in Rows(rows[:1]).summary()
    assert "hold" not in Rows(rows[2:]).summary()


def test_several_maps_are_told_apart_and_not_compared():
    rows = [*curve(lambda n, s: 1.0), *curve(lambda n, s: 9.0, map="block")]
    text = Rows(rows).text()
    assert "attention" in text and "block" in text
    assert text.splitlines()[0].startswith("minilm, metric frobenius")
    assert len(Rows(rows).summary().splitlines()) == 2 + 1


def test_texts_and_inputs_of_a_sweep_are_told_apart():
    given = curve(lambda n, s: 1.0, text="alice")
    built = curve(lambda n, s: n**0.5, text="alice", input="two_cluster")
    rows = Rows([*given, *built])
    slopes = {key.input: fit.slope for key, fit in rows.growth().items() if fit}
    assert slopes == {"text": pytest.approx(0.0), "two_cluster": pytest.approx(0.5)}
    assert "two_cluster" in rows.text() and "alice" not in rows.text()


def test_built_inputs_of_several_radii_are_told_apart():
    built = [
        r
        for radius in (3.0, 10.0)
        for r in curve(lambda n, s: n**0.5, input="ascent", radius_max=radius)
    ]
    rows = Rows([*curve(lambda n, s: 1.0), *built])
    assert {key.input for key in rows.growth()} == {"text", "ascent, radius 3", "ascent, radius 10"}
    assert "ascent, radius 10" in rows.text()


def test_no_exponent_is_minus_zero():
    assert "-0.00" not in Rows(curve(lambda n, s: n**-1e-4)).text()


def test_no_rows_are_no_error(tmp_path: Path):
    rows = Rows([])
    assert "There are no rows." in rows.text()
    assert rows.save(tmp_path) == [] == list(tmp_path.iterdir())
    assert rows.growth() == {}
    with pytest.raises(InputError):
        rows.plot()
    with pytest.raises(InputError, match="among 0 rows"):
        rows.shade()


def test_save_writes_three_figures(tmp_path: Path):
    files = measured()[:3].save(tmp_path / "new")
    assert [f.name for f in files] == ["growth.svg", "growth.png", "growth.html"]
    assert all(f.stat().st_size > 1000 for f in files)


def test_shade_takes_the_row_of_the_summary_or_a_named_one():
    rows = measured()
    chart = rows.shade().to_dict()
    assert chart["title"]["text"] == "minilm, layer 1, 256 tokens: sigma 28.8"
    named = rows.shade(rows[0].id).to_dict()
    assert named["title"]["text"] == "minilm, layer 0, 16 tokens: sigma 2.00"
    with pytest.raises(InputError, match="`row_id` should be the `id` of one of these rows"):
        rows.shade("nothing")
    with pytest.raises(InputError, match="Found 0 tokens"):
        Rows([row()]).shade()


def test_measurement_columns_all_have_a_plain_type():
    """`to_polars` takes text where an annotation is none of these."""
    names = {f.name: str(f.type) for f in dataclasses.fields(Measurement)}
    odd = [n for n, t in names.items() if t.split(" | ")[0] not in ("int", "float", "str", "bool")]
    assert odd == ["status"]


def test_a_joint_probability_is_told_only_where_it_says_something():
    """Below 0.95 the intervals are counted that may miss: delta each, added up."""
    five, six = ([row(sample=k, delta=0.01) for k in range(count)] for count in (5, 6))
    assert Rows(five).confidence() == (
        "All 5 intervals hold at once with probability at least 0.95."
    )
    assert Rows(six).confidence() == "Of 6 intervals, at most 0.06 are expected to miss."


def test_a_small_deviation_beyond_chance_is_said_in_two_sentences():
    """An exponent whose means leave the line by a few per cent, in every sample alike."""
    bend = dict(zip((16, 32, 64, 128, 256), (-0.02, 0.04, 0.0, -0.04, 0.02), strict=True))
    noise = np.random.default_rng(0).normal(size=(5, 6))
    rows = [
        row(num_tokens=n, sample=s, sigma=math.exp(bend[n] + 1e-4 * noise[i, s]) * n**0.25)
        for i, n in enumerate(bend)
        for s in range(6)
    ]
    said = Rows(rows).summary()
    assert "it grows like n^0.25 (0.25 to 0.25, 95 % interval for the sampling of text). " in said
    assert "The means leave n^0.25 by up to 4.1 %, more than chance explains (p < 0.001)." in said
    told = " ".join(Rows(rows).text().split())
    assert "The means leave that law by 4.1 % (F test, p < 0.001)." in told
    others = [dataclasses.replace(one, id=f"o{one.id}", layer=7) for one in rows]
    told = " ".join(Rows([*rows, *others]).text().split())
    assert "(F test, smallest of 2: p < 0.001)." in told


def test_the_intervals_of_directions_are_added_up_too():
    """Ranks behind the first have one each; an angle rests on the rank behind it."""
    one = row(sample=0, delta=1e-3)
    about: dict = {"id": one.id, "index": 0, "text": "", "share": 1.0, "residual": 0.0}
    parts = [
        Direction(**about, rank=rank, side=side, sigma=1.0, upper=1.0, sine=sine)
        for rank, sine in ((1, 0.01), (2, None), (3, None))
        for side in ("right", "left")
    ]
    assert math.isclose(Rows([one], directions=parts).failure_probability(), 4e-3)
    assert "All 3 intervals hold at once" in Rows([one], directions=parts).summary()
    alone = [dataclasses.replace(part, sine=None) for part in parts]
    assert math.isclose(Rows([one], directions=alone).failure_probability(), 3e-3)
