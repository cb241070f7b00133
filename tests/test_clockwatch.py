"""A clock that was set, and summer time, are facts; the jitter of reading two clocks is none."""

from __future__ import annotations

import time

import pytest

from supervisord_vllm.clock import SECOND_NS, Now, utc_offset_s
from supervisord_vllm.clockwatch import clock_seen
from supervisord_vllm.core.facts import ClockSeen
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import State

STATE = State(wall_offset_s=1_700_000_000, utc_offset_s=3600)


@pytest.mark.parametrize("jitter_s", [-2, -0.6, 0, 0.4, 2])
def test_two_clocks_read_one_after_the_other_are_the_same_clock(jitter_s: float) -> None:
    assert clock_seen(STATE, Now(50 * SECOND_NS + 999_999_999, 1_700_000_050 + jitter_s), 3600) is None


def test_a_clock_that_was_set_and_summer_time_are_facts_once() -> None:
    for now, offset in ((Now(50 * SECOND_NS, 1_700_000_057.9), 3600), (Now(50 * SECOND_NS, 1_700_000_050.0), 7200)):
        seen = clock_seen(STATE, now, offset)
        assert seen == ClockSeen(at_ns=50 * SECOND_NS, wall_s=int(now.wall), utc_offset_s=offset)
        after, actions = decide(Policy("p"), STATE, seen)
        assert actions == ()
        assert clock_seen(after, now, offset) is None


def test_the_offset_is_that_of_the_hosts_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XXX-05:30")
    assert utc_offset_s() == 19_800
    monkeypatch.setenv("TZ", "UTC")
    assert utc_offset_s() == 0
    monkeypatch.undo()
    time.tzset()
