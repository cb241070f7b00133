"""Sixty seeded days under load: the bound of the ski rental, no restart where the card is the limit, and the way back.
A thousand are played by ``make test-long``."""

from __future__ import annotations

import pytest

from pressed_days import KINDS, day


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_ten_days_under_load_keep_the_bounds(first: int) -> None:
    lived = [day(seed) for seed in range(first, first + 10)]
    assert sum(len(one.pressed) for one in lived) > 0, "a range in which nothing is ever worth a restart proves nothing"
    assert all(one.pages for number, one in enumerate(lived) if KINDS[number % len(KINDS)] != "neighbour")
