"""An exponent of growth with its interval and its test, and what they say in words."""

from __future__ import annotations

from dataclasses import dataclass

from lipscope.records.sampling import CONFIDENCE

LACK_OF_FIT = 0.01
"""A lack-of-fit p-value below this says that the means leave the line."""
NEAR = 0.1
"""Means that leave the line by more than this part, and not by chance, withdraw the power law."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of sigma with the number of tokens in one group of rows.

    Attributes:
        slope: Exponent ``s`` of ``sigma ~ n^s`` by least squares on the logarithms.
        low: Lower end of its interval over the sampling of text; null if there is none.
        high: Upper end.
        level: Confidence level of the interval; null if there is none.
        lengths: Numbers of tokens that were compared, increasing.
        local: Slopes between neighbouring lengths, from the mean of log sigma per length.
        lack_of_fit_p: p-value of the lack-of-fit test; null where it cannot be made.
        off: Largest deviation of the geometric means from the fitted line, as a part of it.
        num_samples: Samples (paired), or the smallest number of rows at a length.
        num_rows: Rows that entered.
        num_excluded: Rows without a finite, positive sigma.
        num_dropped: Rows of samples that lack another length (paired only).
        paired: Whether a sample is the same passage at every length.
        note: What limits the result; null if nothing does.
        beyond: The growth over inputs longer than those that the model was trained on, which this
            one leaves out; null if there are none, or fewer than three lengths of them.
    """

    slope: float
    low: float | None
    high: float | None
    level: float | None
    lengths: tuple[int, ...]
    local: tuple[float, ...]
    lack_of_fit_p: float | None
    off: float
    num_samples: int
    num_rows: int
    num_excluded: int
    num_dropped: int
    paired: bool
    note: str | None
    beyond: Growth | None = None

    @property
    def num_lengths(self) -> int:
        """Number of lengths that were compared."""
        return len(self.lengths)

    @property
    def fits(self) -> bool | None:
        """Whether a power law describes the means; null if that was not tested.

        It does where the test finds no deviation, and where it finds one of at most `NEAR`.
        """
        if self.lack_of_fit_p is None:
            return None
        return self.lack_of_fit_p >= LACK_OF_FIT or self.off <= NEAR

    @property
    def nearly(self) -> bool:
        """Whether the means leave the line by little, and not by chance."""
        return bool(self.fits) and (self.lack_of_fit_p or 0.0) < LACK_OF_FIT

    @property
    def deviation(self) -> str:
        """How far the means leave the line, and whether by chance: "off by 3.2 %, p = 0.002"."""
        p = "not tested" if self.lack_of_fit_p is None else format_p(self.lack_of_fit_p)
        return f"off by {percent_off(self.off)} %, {p}"

    @property
    def interval(self) -> str:
        """What the interval is: "95 % interval", or the range of few samples with its level."""
        if self.level is None:
            return "no interval"
        if self.level >= CONFIDENCE:
            return f"{CONFIDENCE:.0%} interval".replace("%", " %")
        level = f"{100 * self.level:.0f} %"
        article = "an" if level.startswith("8") else "a"
        return f"range of {self.num_samples} samples, {article} {level} interval of the median"

    @property
    def verdict(self) -> str:
        """The exponent with its interval, or "no power law" with the local slopes."""
        if self.fits is False:
            local = ", ".join(f"{slope:.2f}" for slope in self.local)
            return f"no power law ({self.deviation}): {local}"
        ends = f" [{self.low:.2f}, {self.high:.2f}]" if self.level is not None else ""
        return f"{self.slope:.2f}{ends}" + f" ({self.deviation})" * self.nearly

    @property
    def law(self) -> str:
        """Which of the laws ``n^0``, ``n^(1/4)``, ``n^(1/2)`` the interval holds, in words."""
        if self.fits is False:
            return "no power law"
        if self.low is None or self.high is None:
            return "no interval"
        laws = {"no growth": 0.0, "n^(1/4)": 0.25, "n^(1/2)": 0.5}
        held = [name for name, s in laws.items() if self.low <= s <= self.high]
        if held:
            return " or ".join(held)
        places = ["falls", "slower than n^(1/4)", "between n^(1/4) and n^(1/2)"]
        passed = sum(self.slope > s for s in laws.values())
        return [*places, "faster than n^(1/2)"][passed]


def percent_off(share: float) -> str:
    """Two digits of a share in per cent; 0 below a hundredth of one.

    >>> percent_off(0.0413), percent_off(9e-16)
    ('4.1', '0')
    """
    return f"{100 * share:.2g}" if share >= 1e-4 else "0"


def format_p(p: float) -> str:
    """A p-value in words.

    >>> format_p(0.0021), format_p(1e-9)
    ('p = 0.002', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
