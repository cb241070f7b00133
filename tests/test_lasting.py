"""What outlives a boot comes back as it was, on the clock of the boot that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord_vllm.api import Exporter
from supervisord_vllm.chronicle import Chronicle
from supervisord_vllm.core.facts import DaemonStarted, Hold, Tick
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import Launch, Probe, State, StateName
from supervisord_vllm.lasting import Lasting, counts_key, entries, hold_document, lasting
from supervisord_vllm.store import Store

QUICK = settings(derandomize=True, deadline=None, max_examples=60)
WALL = 1_700_000_000


def again(state: State, *, boot: str, now_s: int, wall_s: int, told_boot: str = "a") -> Lasting:
    kept = json.loads(json.dumps(entries(state, told_boot, "f")))
    return lasting(
        kept["held"], kept[counts_key("f")], kept["planned"], boot_id=boot, now_ns=now_s * SECOND, wall_s=wall_s
    )


def test_within_a_boot_a_hold_lasts_as_long_as_was_said_whatever_the_wall_clock_does() -> None:
    hold = Hold("ada", "demo", 100 * SECOND + 7, 7300 * SECOND + 7)
    state = State(hold=hold, wall_offset_s=WALL)
    assert again(state, boot="a", now_s=5000, wall_s=WALL + 5000 + 3600).hold == hold
    assert again(state, boot="a", now_s=7299, wall_s=WALL).hold == hold
    assert again(state, boot="a", now_s=7301, wall_s=WALL).hold is None


def test_after_a_reboot_a_hold_ends_at_the_same_wall_time() -> None:
    state = State(hold=Hold("ada", "demo", 100 * SECOND, 7300 * SECOND), wall_offset_s=WALL)
    hold = again(state, boot="b", now_s=30, wall_s=WALL + 1000).hold
    assert hold == Hold("ada", "demo", (30 + 100 - 1000) * SECOND, (30 + 7300 - 1000) * SECOND)
    assert again(state, boot="b", now_s=30, wall_s=WALL + 7300).hold is None


def test_a_hold_without_an_end_has_none_afterwards_and_the_older_form_is_read() -> None:
    state = State(hold=Hold("ada", "", 100 * SECOND), wall_offset_s=WALL)
    assert again(state, boot="b", now_s=30, wall_s=WALL + 10**6).hold is not None
    assert lasting(True, None, None, boot_id="b", now_ns=5, wall_s=WALL).hold == Hold(since_ns=5)


def test_counts_and_planned_restarts_of_a_day_are_kept() -> None:
    hour = 3600 * SECOND
    state = State(failed_climbs=2, roll_backs={"slot": 1}, planned=(-2 * hour, 5 * hour), wall_offset_s=WALL)
    later = again(state, boot="b", now_s=60, wall_s=WALL + 23 * 3600)
    assert (later.failed_climbs, later.roll_backs) == (2, {"slot": 1})
    assert later.planned == ((60 - 18 * 3600) * SECOND,), "the older one is more than a day ago"
    assert again(State(wall_offset_s=WALL), boot="b", now_s=60, wall_s=WALL) == Lasting()


@pytest.mark.parametrize(
    ("name", "proven", "count"), [("starting", False, 2), ("serving", True, 1), ("stopping", False, 1)]
)
def test_a_step_up_that_is_not_proven_counts_as_failed_if_the_host_dies_of_it(
    name: str, proven: bool, count: int
) -> None:
    launch = Launch(3, Levers(), Levers(), 0, proven=proven, probe=Probe(Levers(), "step-up"))
    state = State(StateName(name), launch=launch, failed_climbs=1)
    assert again(state, boot="b", now_s=60, wall_s=WALL).failed_climbs == count


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["by", "since", "until", "until_ns", "boot", "failed_climbs", "roll_backs"]), inner
        )
    ),
    max_leaves=8,
)


@QUICK
@given(junk, junk, junk)
def test_what_cannot_be_read_is_forgotten(held: Any, counts: Any, planned: Any) -> None:  # noqa: ANN401 - junk
    found = lasting(held, counts, planned, boot_id="b", now_ns=10**12, wall_s=WALL)
    assert found.hold is None or found.hold.until_ns is None or found.hold.until_ns > 10**12
    assert all(at <= 10**12 for at in found.planned)


def test_a_recorded_hold_is_shown_until_it_is_over() -> None:
    kept = entries(State(hold=Hold("ada", "demo", 0, 60 * SECOND), wall_offset_s=WALL), "a", "f")["held"]
    assert hold_document(kept, WALL + 59) == {
        "by": "ada",
        "reason": "demo",
        "since": "2023-11-14T22:13:20.000Z",
        "until": "2023-11-14T22:14:20.000Z",
    }
    assert hold_document(kept, WALL + 60) is None
    assert hold_document(None, WALL) is None
    assert hold_document(True, WALL) == {"by": None, "reason": None, "since": None, "until": None}


class Nobody:
    """An exporter's daemon that nobody asks."""

    def snapshot(self) -> object:
        raise AssertionError


def test_the_chronicle_keeps_it_after_the_first_fact_and_forgets_what_is_over(tmp_path: Path) -> None:
    policy, hold = Policy("p", fingerprint="f"), Hold("ada", "demo", 5 * SECOND, 60 * SECOND)
    started = DaemonStarted(at_ns=0, boot_id="a", next_launch=1, next_decision=1)
    held = State(hold=hold, failed_climbs=2, planned=(3 * SECOND,), wall_offset_s=WALL)

    def opened() -> tuple[Store, Chronicle]:
        store = Store.open(tmp_path / "history.sqlite3", warn=lambda text: None)
        chronicle = Chronicle(store, Exporter(Nobody(), "1"), policy)  # type: ignore[arg-type]  # only what it counts
        chronicle.begin("a")
        return store, chronicle

    store, first = opened()
    first.note(State(), held, started)
    store.close()
    store, second = opened()
    second.note(State(), State(), Tick(at_ns=1))  # before the first fact the state knows nothing
    assert second.lasting(9 * SECOND, WALL + 9) == Lasting(hold, 2, {}, (3 * SECOND,))
    assert second.lasting(61 * SECOND, WALL + 61).hold is None
    second.note(State(), State(wall_offset_s=WALL), started)
    store.close()
    store, third = opened()
    assert third.lasting(9 * SECOND, WALL + 9) == Lasting()
    assert store.get_meta("held") is None
    store.close()
