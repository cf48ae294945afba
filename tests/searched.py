"""How long a random search is: a sample of it in the fast lane, all of it in the slow one."""

from __future__ import annotations

import pytest


def searched(sample: int, whole: int) -> pytest.MarkDecorator:
    """The test takes ``count``, the number of draws."""
    return pytest.mark.parametrize("count", [sample, pytest.param(whole, marks=pytest.mark.slow)])
