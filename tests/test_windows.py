"""Windows: times of day that are open and shut when a person would say so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord_vllm.config.values import windows
from supervisord_vllm.core.windows import DAY_S, Window, until_open

QUICK = settings(derandomize=True, deadline=None, max_examples=100)
NIGHT = Window(120, 300)
AROUND_MIDNIGHT = Window(23 * 60, 60)


@pytest.mark.parametrize(
    ("window", "clock", "wait_s"),
    [
        (NIGHT, "01:59", 60),
        (NIGHT, "02:00", 0),
        (NIGHT, "04:59", 0),
        (NIGHT, "05:00", 21 * 3600),
        (AROUND_MIDNIGHT, "22:00", 3600),
        (AROUND_MIDNIGHT, "23:30", 0),
        (AROUND_MIDNIGHT, "00:59", 0),
        (AROUND_MIDNIGHT, "01:00", 22 * 3600),
        (Window(0, 1440), "13:13", 0),
    ],
)
def test_a_window_is_open_from_its_begin_up_to_its_end(window: Window, clock: str, wait_s: int) -> None:
    hours, minutes = map(int, clock.split(":"))
    assert window.until_open(20_000 * DAY_S + hours * 3600 + minutes * 60) == wait_s


@QUICK
@given(st.integers(0, 1439), st.integers(0, 1440), st.integers(-(10**9), 4 * 10**9))
def test_what_is_waited_for_is_the_first_open_second(begin: int, end: int, local_s: int) -> None:
    if begin == end:
        return
    window = Window(begin, end)
    wait = window.until_open(local_s)
    assert 0 <= wait < DAY_S
    assert window.until_open(local_s + wait) == 0
    assert wait == 0 or window.until_open(local_s + wait - 1) == 1


def test_the_next_of_several_counts_and_without_any_it_is_always_open() -> None:
    assert until_open((NIGHT, Window(720, 780)), 11 * 3600) == 3600
    assert until_open((), 123) == 0


def test_a_policy_writes_them_as_a_person_would() -> None:
    assert windows("02:00-05:00") == (NIGHT,)
    assert windows("02:00-05:00, 23:00-01:00") == windows(["02:00-05:00", "23:00-01:00"]) == (NIGHT, AROUND_MIDNIGHT)
    assert str(NIGHT) == "02:00-05:00"
    assert str(windows("00:00-24:00")[0]) == "00:00-24:00"


@pytest.mark.parametrize("text", ["2-5", "02:00", "02:00-25:00", "02:60-03:00", "24:00-02:00", "02:00-24:30", 5, [5]])
def test_what_is_no_time_of_day_is_refused_with_how_to_write_it(text: object) -> None:
    with pytest.raises(ValueError, match='"02:00-05:00"'):
        windows(text)


def test_a_window_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="open for no time"):
        windows("03:00-03:00")
