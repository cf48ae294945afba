"""The exponent, its interval and its test, against closed forms and simulated rows."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lipscope import Measurement
from lipscope.errors import InputError
from lipscope.records.power_law import Growth, groups, growth
from lipscope.records.sampling import paired_lack_of_fit, unpaired_lack_of_fit
from rows import curve, row

LENGTHS = [16, 32, 64, 128, 256]
X = np.log(LENGTHS)


def of(rows: list[Measurement], *, paired: bool = True) -> Growth:
    found = growth(rows, paired=paired)
    assert found is not None
    return found


def rows_of(table: np.ndarray, lengths: list[int] = LENGTHS) -> list[Measurement]:
    """Rows whose log sigma is the table, samples by lengths."""
    place = {n: k for k, n in enumerate(lengths)}
    return curve(lambda n, s: math.exp(table[s, place[n]]), lengths, len(table))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("exponent", [-0.3, 0.0, 0.25, 1.0])
def test_an_exact_power_law_is_recovered(exponent: float, paired: bool):
    fit = of(curve(lambda n, s: (3 + s) * n**exponent), paired=paired)
    assert fit.slope == pytest.approx(exponent, abs=1e-12)
    assert fit.local == pytest.approx([exponent] * 4, abs=1e-12)
    assert fit.fits
    assert fit.low is not None and fit.high is not None
    assert fit.low - 1e-9 <= exponent <= fit.high + 1e-9
    assert (len(fit.lengths), fit.num_samples, fit.num_rows) == (5, 5, 25)


def test_paired_rows_are_not_blurred_by_what_samples_have_in_common():
    rows = curve(lambda n, s: 10**s * n**0.25)
    paired, unpaired = of(rows), of(rows, paired=False)
    assert paired.high is not None and paired.low is not None
    assert unpaired.high is not None and unpaired.low is not None
    assert paired.high - paired.low < 1e-9
    assert unpaired.high - unpaired.low > 0.5


def test_slope_is_that_of_least_squares_when_lengths_have_different_numbers_of_rows():
    random = np.random.default_rng(0)
    sizes = [2, 7, 3, 5, 4]
    rows, x, y = [], [], []
    for n, size in zip(LENGTHS, sizes, strict=True):
        for sample in range(size):
            x.append(math.log(n))
            y.append(0.3 * math.log(n) + random.normal())
            rows.append(row(num_tokens=n, sample=sample, sigma=math.exp(y[-1])))
    fit = of(rows, paired=False)
    assert fit.slope == pytest.approx(np.polyfit(x, y, 1)[0])
    assert fit.num_samples == 2


def test_paired_p_value_is_that_of_comparing_two_linear_models():
    table = 0.3 * X + np.random.default_rng(1).normal(size=(6, 5))

    def residual(columns: list[np.ndarray]) -> tuple[float, int]:
        design = np.column_stack(columns)
        left = np.linalg.lstsq(design, table.ravel(), rcond=None)[0]
        rank = int(np.linalg.matrix_rank(design))
        return float(((table.ravel() - design @ left) ** 2).sum()), table.size - rank

    blocks = [np.repeat(np.eye(6)[k], 5) for k in range(6)]
    slopes = [block * np.tile(X, 6) for block in blocks]
    line, free_line = residual([*blocks, *slopes])
    full, free_full = residual([*blocks, *slopes, *(np.tile(np.eye(5)[k], 6) for k in range(5))])
    assert free_full == (6 - 1) * (5 - 2)
    ratio = ((line - full) / (free_line - free_full)) / (full / free_full)
    expected = stats.f.sf(ratio, free_line - free_full, free_full)
    assert paired_lack_of_fit(list(table.T), LENGTHS) == pytest.approx(expected)


def test_unpaired_p_value_is_that_of_the_pure_error_table():
    """Montgomery & Peck's layout: SS_lof = SS_residual - SS_pure, here unbalanced."""
    random = np.random.default_rng(2)
    columns = [0.3 * x + random.normal(size=k) for x, k in zip(X, [3, 5, 2, 4, 6], strict=True)]
    x, y = np.repeat(X, [3, 5, 2, 4, 6]), np.concatenate(columns)
    residual = float(((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2).sum())
    pure = sum(float(((c - c.mean()) ** 2).sum()) for c in columns)
    ratio = ((residual - pure) / 3) / (pure / 15)
    expected = stats.f.sf(ratio, 3, 15)
    assert unpaired_lack_of_fit(columns, LENGTHS) == pytest.approx(expected)


@pytest.mark.parametrize("paired", [True, False])
def test_lack_of_fit_is_found_as_often_as_it_should_be(paired: bool):
    random = np.random.default_rng(3)

    def rejected(bend: float, runs: int) -> float:
        found = 0
        for _ in range(runs):
            block = random.normal(size=(5, 1)) if paired else 0.0
            table = 0.3 * X + block + bend * (X - X.mean()) ** 2
            table = table + 0.1 * random.normal(size=(5, 5))
            test = paired_lack_of_fit if paired else unpaired_lack_of_fit
            p = test(list(table.T), LENGTHS)
            assert p is not None
            found += p < 0.05
        return found / runs

    assert rejected(0.0, 1200) == pytest.approx(0.05, abs=0.02)
    assert rejected(0.15, 200) > 0.9


def test_a_curve_is_reported_with_its_local_slopes_instead_of_an_exponent():
    noise = np.random.default_rng(4).normal(size=(5, 5)) * 0.01
    rows = rows_of(0.1 * (X - X[0]) ** 2 + noise)
    fit = of(rows)
    assert fit.fits is False
    assert re.match(r"no power law \(off by \d+ %, p < 0.001\): 0\.0", fit.verdict)
    assert fit.verdict.count(",") == 4
    assert list(fit.local) == sorted(fit.local)


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_covers_as_often_as_it_says(paired: bool):
    random = np.random.default_rng(5)
    runs, hit = 150, 0
    for seed in range(runs):
        slopes = 0.3 + 0.1 * random.normal(size=(12, 1)) * paired
        block = random.normal(size=(12, 1)) * paired
        table = slopes * X[:3] + block + 0.2 * random.normal(size=(12, 3))
        fit = growth(rows_of(table, LENGTHS[:3]), paired=paired, seed=seed)
        assert fit is not None and fit.low is not None and fit.high is not None
        hit += fit.low <= 0.3 <= fit.high
    assert hit / runs == pytest.approx(0.95, abs=0.05)


def test_the_same_rows_have_the_same_interval_in_any_order():
    rows = rows_of(0.3 * X + np.random.default_rng(6).normal(size=(5, 5)))
    assert of(rows) == of(rows[::-1])


def test_nothing_is_said_below_three_lengths():
    assert growth(curve(lambda n, s: 1.0 * n, [16, 64]), paired=True) is None
    assert growth([], paired=True) is None
    rows = curve(lambda n, s: None if n == 256 else 1.0 * n, [16, 64, 256])
    assert growth(rows, paired=True) is None


def test_one_sample_has_a_slope_and_no_interval():
    fit = of(curve(lambda n, s: n**0.25, samples=1))
    assert fit.verdict == "0.25"
    assert (fit.low, fit.high, fit.lack_of_fit_p, fit.fits) == (None, None, None, None)
    assert fit.note == "one sample: no interval and no test"


def test_few_samples_say_how_far_their_interval_reaches():
    fit = of(curve(lambda n, s: n ** (0.2 + 0.1 * s), samples=2))
    assert (fit.low, fit.high) == (pytest.approx(0.2), pytest.approx(0.3))
    assert (fit.level, fit.note) == (0.5, None)
    assert fit.interval == "range of 2 samples, a 50 % interval of the median"
    four = of(curve(lambda n, s: (1 + 0.01 * s * n % 7) * n**0.25, samples=4))
    assert four.interval == "range of 4 samples, an 88 % interval of the median"


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_the_range_of_few_samples_holds_the_median_as_often_as_it_says(samples: int):
    """Slopes of a skewed distribution, whose median is exp(-1) and not its mean."""
    random = np.random.default_rng(samples)
    hit, runs, level = 0, 600, 1 - 2.0 ** (1 - samples)
    for _ in range(runs):
        slopes = np.exp(random.normal(size=(samples, 1)) - 1)
        fit = of(rows_of(slopes * X[:3], LENGTHS[:3]))
        assert fit.low is not None and fit.high is not None and fit.level == level
        hit += fit.low <= math.exp(-1) <= fit.high
    # Four standard deviations of a share of 600.
    assert hit / runs == pytest.approx(level, abs=4 * math.sqrt(0.25 / runs))


def test_six_samples_have_a_95_percent_interval():
    fit = of(curve(lambda n, s: n ** (0.2 + 0.1 * s), samples=6))
    assert (fit.level, fit.interval) == (0.95, "95 % interval")


def test_the_interval_of_unpaired_samples_is_that_of_students_t():
    """Against the textbook line through all rows, with the spread within lengths for its error."""
    random = np.random.default_rng(7)
    table = 0.3 * X + random.normal(size=(2, 5))
    fit = of(rows_of(table), paired=False)
    spread = math.sqrt(table.var(axis=0, ddof=1).mean())
    error = spread / math.sqrt(2 * float(((X - X.mean()) ** 2).sum()))
    slope = stats.linregress(np.tile(X, 2), table.ravel()).slope
    expected = stats.t.interval(0.95, 5, loc=slope, scale=error)
    assert (fit.low, fit.high) == pytest.approx(expected)


def test_the_largest_deviation_of_the_means_is_told_beside_p():
    """Geometric means off the line n^0.25 by a sine that is orthogonal to lines."""
    bend = np.array([-1.0, 2.0, 0.0, -2.0, 1.0]) * 0.02  # third-order contrast: sum and slope 0
    noise = 1e-4 * np.random.default_rng(8).normal(size=(5, 5))
    fit = of(rows_of(0.25 * X + bend + noise - noise.mean(axis=0)))
    assert fit.slope == pytest.approx(0.25)
    assert fit.off == pytest.approx(math.exp(0.04) - 1)
    assert fit.fits and fit.nearly  # certain, and small
    assert fit.verdict == "0.25 [0.25, 0.25] (off by 4.1 %, p < 0.001)"
    far = of(rows_of(0.25 * X + 4 * bend + noise))
    assert far.fits is False and far.law == "no power law"
    assert far.verdict.startswith("no power law (off by 17 %, p < 0.001): ")


@pytest.mark.parametrize("paired", [True, False])
def test_windows_that_share_text_have_no_interval_and_no_test(paired: bool):
    rows = rows_of(0.3 * X + np.random.default_rng(9).normal(size=(5, 5)))
    # Sample s of n tokens from s n on: those of one length do not overlap, and lengths share text.
    shared = [replace(r, start=r.sample * (200 if paired else r.num_tokens)) for r in rows]
    fit = of(shared, paired=paired)
    assert (fit.low, fit.high, fit.level, fit.lack_of_fit_p, fit.fits) == (None,) * 5
    assert fit.note is not None and fit.note.startswith("windows share text")
    # 1,000 tokens for every sample, and 10,000 for every length where lengths have their own.
    gap = 0 if paired else 10_000
    apart = [replace(r, start=1000 * r.sample + gap * r.num_tokens) for r in rows]
    assert of(apart, paired=paired).fits is not None


def test_inputs_beyond_the_trained_length_are_fitted_apart():
    rows = [
        replace(r, trained_length=128, sigma=r.num_tokens**0.25 * (1 if r.num_tokens < 129 else 9))
        for n in (16, 32, 64, 128, 256, 512, 1024)
        for r in curve(lambda m, s: 1.0, lengths=(n,))
    ]
    fit = of(rows)
    assert fit.lengths == (16, 32, 64, 128) and fit.slope == pytest.approx(0.25)  # without the jump
    assert fit.beyond is not None and fit.beyond.lengths == (256, 512, 1024)
    assert fit.beyond.slope == pytest.approx(0.25)
    assert fit.note is not None and fit.note.endswith("trained on are fitted separately")
    few = of([r for r in rows if r.num_tokens < 512])
    assert few.beyond is None and few.note is not None and few.note.endswith("are left out")
    long = of([r for r in rows if r.num_tokens > 64])
    assert long.lengths == (256, 512, 1024) and "are longer than the 128" in (long.note or "")
    # An input that was built is none of the text that a model was trained on.
    assert len(of([replace(r, input="two_cluster") for r in rows]).lengths) == 7


def test_a_sample_that_lacks_a_length_is_dropped_whole_and_counted():
    def sigma(n: int, s: int) -> float | None:
        if s < 4:
            return (1 + s) * n**0.25
        return None if n == 64 else 1e6 * n**-2.0

    fit = of(curve(sigma))
    assert fit.slope == pytest.approx(0.25)
    assert (fit.num_samples, fit.num_excluded, fit.num_dropped) == (4, 1, 4)
    assert fit.note is not None and "4 rows of samples that lack a length" in fit.note


def test_without_any_complete_sample_there_is_a_slope_and_no_interval():
    fit = of(curve(lambda n, s: None if LENGTHS[s] == n else n**0.25))
    assert fit.slope == pytest.approx(0.25)
    assert fit.low is None and fit.lack_of_fit_p is None
    assert fit.note is not None and fit.note.startswith("no sample has every length")


@pytest.mark.parametrize("value", [None, 0.0, float("nan"), float("inf")])
def test_rows_without_a_logarithm_are_excluded_and_counted(value: float | None):
    rows = [*curve(lambda n, s: n**0.5), *curve(lambda n, s: value, [512], 5)]
    fit = of(rows)
    assert fit.slope == pytest.approx(0.5)
    assert fit.num_excluded == 5
    assert fit.lengths == tuple(LENGTHS)


def test_without_scatter_a_bend_is_certain():
    bent = curve(lambda n, s: (1 + s) * math.exp(0.1 * math.log(n) ** 2))
    assert of(bent).lack_of_fit_p == 0.0
    assert of(curve(lambda n, s: 5.0 * n)).lack_of_fit_p == 1.0


def test_rows_of_two_groups_or_twice_the_same_are_refused():
    rows = curve(lambda n, s: 1.0 * n)
    with pytest.raises(InputError, match="Found 2 different groups"):
        growth([*rows, *curve(lambda n, s: 1.0 * n, layer=1)], paired=True)
    with pytest.raises(InputError, match="Found two for sample 0 at 16 tokens"):
        growth([*rows, rows[0]], paired=True)


def test_groups_keep_layers_heads_maps_and_metrics_apart():
    rows = [
        row(),
        row(layer=1),
        row(head=2),
        row(map="heads"),
        row(metric="token-relative"),
        row(move="last"),
        row(read="last"),
        row(num_tokens=64),
    ]
    assert [len(part) for part in groups(rows).values()] == [2, 1, 1, 1, 1, 1, 1]
