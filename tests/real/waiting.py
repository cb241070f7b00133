"""Waiting for a condition, with a deadline and words for the case that it never comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float, otherwise: Callable[[], str] | str, every: float = 0.1) -> T:
    """The first true value of ``condition``; after ``seconds`` the test fails with what ``otherwise`` says."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            words = otherwise if isinstance(otherwise, str) else otherwise()
            raise AssertionError(f"not within {seconds:g} s: {words}")
        time.sleep(every)
    return value
