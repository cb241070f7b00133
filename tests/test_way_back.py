"""Holds with an end, windows, services that are never quiet, memory that creeps: lived through in virtual time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord_vllm.core import actions as act
from supervisord_vllm.core.actions import Spawn
from supervisord_vllm.core.adopting import carried, carry
from supervisord_vllm.core.creep import HOUR_NS, Growth
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Kind
from supervisord_vllm.core.facts import ClockSeen, Commanded, CreepSeen, DaemonStarted, Fact, Hold, LoadSeen, RoomSeen
from supervisord_vllm.core.ledger import GIB, MIB
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.machine import TABLE, decide
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import State, StateName, outlook, wake_at_ns
from supervisord_vllm.core.wayback import way_back
from supervisord_vllm.core.windows import Window, until_open
from world import Outcome, Script, World

DECLARED = Levers({"gpu_memory_utilization": 700, "max_model_len": 65536, "max_num_seqs": 16, "weights": Weights("m")})
SHORTER = DECLARED.with_(max_model_len=30000)
LADDER = (
    Rung("gpu_memory_utilization", step=50, min=500, max=700),
    Rung("max_num_seqs", factor=0.5, min=4, max=64),
    Rung("max_model_len", min=4096),
)
POLICY = Policy("p", DECLARED, LADDER, step_up_ns=1800 * SECOND)
RECYCLE = replace(POLICY, allow=frozenset({"planned-recycle"}))
NIGHT = replace(POLICY, windows=(Window(120, 300),))
HOUR = 3600
NOON = 20_000 * 24 * HOUR + 12 * HOUR
"""A wall time of 12:00 in UTC."""
NUMBERS: dict[str, int | float | str] = {"version": "0.26.0", "available_kv_gib": 20.0, "kv_tokens": 100_000}


def fine(spawn: Spawn, world: World) -> Outcome:
    return Outcome(numbers=NUMBERS)


def begun(policy: Policy, script: Script = fine, made: type[World] = World, **started: object) -> World:
    """A daemon that starts at the shorter length which was last known good, at noon unless told otherwise."""
    world = made(policy, script, last_known_good=SHORTER)
    at, serial, fact = world.queue[0]
    assert isinstance(fact, DaemonStarted)
    world.queue[0] = (at, serial, replace(fact, **{"wall_s": NOON, **started}))  # type: ignore[arg-type]
    return world.run(until=lambda w: w.state.name is StateName.SERVING)


def told(world: World, fact: Fact, seconds: float = 5) -> World:
    assert world.state.launch is not None
    world.send(0, replace(fact, launch=world.state.launch.number))
    return world.run(seconds)


def idle(world: World) -> World:
    return told(world, LoadSeen(at_ns=0))


def busy(world: World) -> World:
    return told(world, LoadSeen(at_ns=0, running=3))


def clock(world: World) -> float:
    """The local hour of day."""
    local = world.state.wall_s(world.now) + world.state.utc_offset_s
    return local % (24 * HOUR) / HOUR


# --- hold ---


def test_a_hold_for_a_time_ends_by_itself_and_what_waited_for_it_follows() -> None:
    world = idle(begun(POLICY))
    world.send(0, Commanded(at_ns=0, verb="hold", by="ada", reason="demo", for_ns=2 * HOUR * SECOND))
    world.run(5)
    hold = world.state.hold
    assert hold is not None
    assert (hold.by, hold.reason) == ("ada", "demo")
    assert hold.until_ns == hold.since_ns + 2 * HOUR * SECOND
    what, at_ns = outlook(POLICY, world.state)
    assert (what, at_ns) == ("a step up, once the hold is over", hold.until_ns)
    assert world.run(2 * HOUR - 60).state.held
    assert len(world.spawns) == 1
    after = world.run(120).state
    assert not after.held
    assert [spawn.levers for spawn in world.spawns] == [SHORTER, DECLARED]


@pytest.mark.parametrize("name", list(StateName))
def test_the_end_of_a_hold_wakes_and_is_taken_in_every_state(name: StateName) -> None:
    state = State(name=name, hold=Hold("ada", "", 0, 7 * SECOND))
    assert wake_at_ns(POLICY, state) == 7 * SECOND
    fact = next(kind for kind in TABLE[name] if kind.__name__ == "DevicesSeen")
    early, _ = decide(POLICY, state, fact(at_ns=7 * SECOND - 1, error=None))  # type: ignore[call-arg]
    late, _ = decide(POLICY, state, fact(at_ns=7 * SECOND, error=None))  # type: ignore[call-arg]
    assert early.held
    assert not late.held


def test_a_hold_outlives_the_daemon_and_the_boot_but_not_its_end() -> None:
    # It began before this boot: at a negative time.
    before = Hold("ada", "demo", since_ns=-HOUR * SECOND, until_ns=(1000 + 2 * HOUR) * SECOND)
    world = idle(begun(POLICY, hold=before))
    assert world.state.hold == before
    world.run(1 * HOUR)
    assert len(world.spawns) == 1
    world.run(2 * HOUR)
    assert world.spawns[-1].levers == DECLARED
    over = begun(POLICY, hold=replace(before, until_ns=999 * SECOND))
    assert not over.state.held
    assert begun(POLICY, held=True).state.hold == Hold(since_ns=begun(POLICY).began), "as older versions kept it"


def test_another_hold_replaces_the_first_and_resume_ends_it() -> None:
    world = idle(begun(POLICY))
    world.send(0, Commanded(at_ns=0, verb="hold", for_ns=60 * SECOND))
    world.send(1, Commanded(at_ns=0, verb="hold", by="bob"))
    world.run(3 * HOUR)
    assert world.state.hold is not None
    assert world.state.hold.until_ns is None
    assert outlook(POLICY, world.state)[0] == "a step up, once `vllm-supervise resume` ends the hold"
    world.command("resume")
    world.run(HOUR)
    assert world.spawns[-1].levers == DECLARED


def test_a_hold_that_takes_a_planned_change_back_only_delays_it_and_counts_as_no_restart() -> None:
    world = busy(begun(NIGHT, wall_s=NOON + 13 * HOUR))
    world.run(until=lambda w: w.state.name is StateName.DRAINING)
    assert len(world.state.planned) == 1
    world.send(1, Commanded(at_ns=0, verb="hold", for_ns=HOUR * SECOND))
    after = world.run(60).state
    assert after.name is StateName.SERVING
    assert after.planned == ()
    world.run(2 * HOUR)
    assert world.spawns[-1].levers == DECLARED


# --- windows ---


def test_inside_a_window_a_busy_engine_is_drained_and_outside_an_idle_one_waits() -> None:
    for prepare in (idle, busy):
        world = prepare(begun(NIGHT))
        world.run(13 * HOUR)
        assert len(world.spawns) == 1, "idle or not, noon is no time for it"
        what, at_ns = outlook(NIGHT, world.state)
        assert what == "a step up, within 02:00-05:00 local time"
        assert at_ns is not None
        assert (world.state.wall_s(at_ns) % (24 * HOUR)) == 2 * HOUR
        world.run(3 * HOUR, until=lambda w: len(w.spawns) == 2)
        assert world.spawns[-1].levers == DECLARED
        assert clock(world) == pytest.approx(2.0, abs=0.1)
    assert "its window is open now" in world.decisions[-1].sentence


def test_a_window_is_in_the_local_time_of_the_host_and_summer_time_moves_it() -> None:
    world = idle(begun(NIGHT, utc_offset_s=-5 * HOUR))
    world.run(60)
    _, before = outlook(NIGHT, world.state)
    assert before is not None
    assert world.state.wall_s(before) % (24 * HOUR) == 7 * HOUR
    world.send(0, ClockSeen(at_ns=0, wall_s=world.state.wall_s(world.now), utc_offset_s=-4 * HOUR))
    world.run(60)
    _, after = outlook(NIGHT, world.state)
    assert after == before - HOUR * SECOND
    world.run(24 * HOUR, until=lambda w: len(w.spawns) == 2)
    assert clock(world) == pytest.approx(2.0, abs=0.1)


def test_a_window_that_was_slept_through_is_missed_and_the_next_one_counts() -> None:
    world = idle(begun(NIGHT))
    world.run(60)
    # The wall clock is set from about noon to 06:00 of the next day; the daemon's own time goes on.
    world.send(0, ClockSeen(at_ns=0, wall_s=NOON + 18 * HOUR, utc_offset_s=0))
    world.run(19 * HOUR)
    assert len(world.spawns) == 1
    world.run(3 * HOUR)
    assert len(world.spawns) == 2


def test_a_timer_that_fires_late_does_not_climb_outside_of_its_window() -> None:
    world = idle(begun(NIGHT))
    world.now += 18 * HOUR * SECOND  # the machine slept from noon until 06:00
    world.run(10)
    assert len(world.spawns) == 1
    world.run(24 * HOUR)
    assert len(world.spawns) == 2
    assert [state for _, state in world.states].count("stopping") == 1


class Witness(World):
    """Looks at every decision that begins a planned change, with the state that it was made in."""

    begun_plans = 0

    def step(self, fact: Fact) -> None:
        self.before, self.local = self.state, fact.at_ns // SECOND + self.state.wall_offset_s + self.state.utc_offset_s
        self.hold_over = self.state.hold is None or (self.state.hold.until_ns or 2**62) <= fact.at_ns
        super().step(fact)

    def carry_out(self, action: act.Action) -> None:
        if isinstance(action, act.Decide) and action.decision.then == "draining":
            self.begun_plans += 1
            launch, windows = self.before.launch, self.policy.windows
            assert self.hold_over
            assert until_open(windows, self.local) == 0
            assert windows or (launch is not None and launch.load == "idle")
            assert len(self.state.planned) <= self.policy.planned_per_day
        super().carry_out(action)


MOMENTS = st.sampled_from(["idle", "busy", "clock", "hold", "creep"])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1439), st.integers(1, 1440)).filter(lambda span: span[0] != span[1]), max_size=2),
    st.lists(st.tuples(st.integers(60, 40_000), MOMENTS), max_size=12),
)
def test_whatever_happens_a_planned_change_begins_on_an_occasion(
    spans: list[tuple[int, int]], happenings: list[tuple[int, str]]
) -> None:
    policy = replace(RECYCLE, windows=tuple(Window(*span) for span in spans), planned_per_day=3)
    world = begun(policy, made=Witness)
    for seconds, what in happenings:
        launch = world.state.launch
        if what == "clock":
            wall_s = world.state.wall_s(world.now) + 7 * seconds
            world.send(0, ClockSeen(at_ns=0, wall_s=wall_s, utc_offset_s=seconds % 7 * HOUR))
        elif what == "hold":
            world.send(0, Commanded(at_ns=0, verb="hold", for_ns=seconds * SECOND))
        elif what == "creep" and world.state.name is StateName.SERVING:
            creep(world, free=GIB)
        elif launch is not None:
            world.send(0, LoadSeen(at_ns=0, launch=launch.number, running=int(what == "busy")))
        world.send(seconds, ClockSeen(at_ns=0, wall_s=world.state.wall_s(world.now) + seconds, utc_offset_s=0))
        world.run(seconds)


# --- no quiet moment, nothing to try ---


def test_a_service_that_is_never_quiet_is_said_so_once_after_a_day_with_what_a_person_can_do() -> None:
    world = busy(begun(POLICY))
    world.run(5 * 24 * HOUR)
    assert len(world.spawns) == 1
    said = world.decisions[-1]
    assert [decision.action for decision in world.decisions].count(Action.OBSERVE) == 1
    assert "has been due for 24 h" in said.sentence
    assert 'window = "02:00-05:00"' in said.sentence
    assert "step max-model-len up" in said.sentence
    assert outlook(POLICY, world.state)[0] == "a step up, at a quiet moment (requests run or wait now)"
    idle(world).run(300)
    assert world.spawns[-1].levers == DECLARED


def test_what_is_known_to_fail_is_tried_again_once_that_is_forgotten() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers.number("max_model_len") != 30000 and world.elapsed() < 3 * 24 * HOUR:
            numbers = {"max_model_len": 65536, "estimated_max_len": 30000}
            verdict = Diagnosis(Kind.KV_LEN_TOO_LONG, numbers=numbers, signature="l")
            return Outcome(None, fails_s=30, code=1, diagnosis=verdict)
        return Outcome(numbers=NUMBERS)

    def tried(world: World) -> list[float | None]:
        return [spawn.levers.number("max_model_len") for spawn in world.spawns]

    world = World(POLICY, script)
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    idle(world).run(2000)
    idle(world).run(6 * 24 * HOUR)
    assert tried(world) == [65536, 30000, 47760, 30000], "half of the way, and then nothing is left to try"
    why = way_back(POLICY, world.state, world.now)
    assert why is not None
    (below,) = why.levers
    assert below.climbs
    assert "was seen to fail (kv_len_too_long)" in below.why
    assert why.waits_for == "nothing that is not known to fail is left to try before"
    world.run(3 * 24 * HOUR)
    assert tried(world)[-1] == 65536


def test_each_failed_step_up_doubles_the_wait_also_after_a_restart_of_the_daemon() -> None:
    world = idle(begun(POLICY, failed_climbs=3))
    world.run(8 * 1800 - 120)
    assert len(world.spawns) == 1
    world.run(300)
    assert len(world.spawns) == 2
    full = idle(begun(replace(POLICY, planned_per_day=2), planned=(-3 * HOUR * SECOND, -2 * HOUR * SECOND)))
    full.run(20 * HOUR)
    assert len(full.spawns) == 1, "two planned restarts of the boot before count in the 24 h"
    full.run(2 * HOUR)
    assert len(full.spawns) == 2


def test_after_a_reboot_it_starts_at_the_last_known_good_and_climbs_within_the_declared_patience() -> None:
    world = idle(begun(POLICY))
    world.run(2000)
    assert [spawn.levers for spawn in world.spawns] == [SHORTER, DECLARED]
    assert world.elapsed() < 1800 + 300
    assert world.state.good == DECLARED


def test_after_a_transient_neighbour_it_is_back_within_the_patience() -> None:
    world = World(POLICY, fine)
    world.foreign = 50 * GIB
    world.run(200)
    assert world.spawns[0].levers["gpu_memory_utilization"] == 637
    idle(world).send(HOUR, LoadSeen(at_ns=0, launch=1))
    world.run(HOUR)
    why = way_back(POLICY, world.state, world.now)
    assert why is not None
    assert why.levers[0].why.startswith("a neighbour held memory at its start")
    assert not why.levers[0].climbs
    world.foreign = 0
    left = world.now
    told(world, RoomSeen(at_ns=0, devices=world.devices()))
    world.run(600, until=lambda w: len(w.spawns) == 2 and w.state.name is StateName.SERVING)
    assert world.spawns[-1].levers == DECLARED
    assert world.now - left < 300 * SECOND, "it had served for longer than the patience"


# --- creep ---


def creep(world: World, free: int = 2 * GIB, per_hour: int = 100 * MIB) -> World:
    growth = Growth("GPU-0", world.now, per_hour, per_hour - MIB, per_hour + MIB, 5 * HOUR_NS, 60 * GIB, free)
    return told(world, CreepSeen(at_ns=0, growth=growth))


def declared(policy: Policy) -> World:
    world = World(policy, fine)
    at, serial, fact = world.queue[0]
    assert isinstance(fact, DaemonStarted)
    world.queue[0] = (at, serial, replace(fact, wall_s=NOON))
    return world.run(until=lambda w: w.state.name is StateName.SERVING)


def test_memory_that_creeps_is_recycled_at_a_quiet_moment_where_that_is_allowed() -> None:
    world = creep(busy(declared(RECYCLE)))
    (said,) = world.decisions
    assert (said.kind, said.action) == (Kind.VRAM_CREEP, Action.OBSERVE)
    assert "follows at a quiet moment (requests run or wait now)" in said.sentence
    world.run(5 * HOUR)
    assert len(world.spawns) == 1
    idle(world).run(200)
    assert [spawn.levers for spawn in world.spawns] == [DECLARED, DECLARED]
    decision = world.decisions[-1]
    assert decision.action is Action.PLANNED_RECYCLE
    assert "100 MiB/h (95 %: 99 MiB to 101 MiB), seen over 5 h" in decision.sentence
    assert world.state.launch is not None
    assert world.state.launch.growth is None
    assert len(world.state.planned) == 1


def test_memory_that_creeps_is_said_once_where_nothing_may_be_done_by_itself() -> None:
    for policy in (POLICY, replace(RECYCLE, act=False)):
        world = creep(idle(declared(policy)))
        creep(world, per_hour=150 * MIB).run(48 * HOUR)
        assert len(world.spawns) == 1
        (said,) = world.decisions
        assert said.action is Action.OBSERVE
        assert "planned-recycle = true" in said.sentence
        assert "used up in 19 h" in said.sentence or "used up in 1139 min" in said.sentence


def test_creep_that_leaves_enough_for_longer_than_the_horizon_is_only_recorded() -> None:
    world = creep(idle(declared(RECYCLE)), free=10 * GIB)
    assert world.decisions == []
    assert outlook(RECYCLE, world.state)[0] == (
        "a restart with the same configuration, since its memory grows, at a quiet moment"
    )
    world.run(60 * HOUR)
    assert len(world.spawns) == 1, "10 GiB last 101 h: 65 h until 36 h are left"
    world.run(7 * HOUR)
    assert len(world.spawns) == 2
    over = creep(idle(declared(RECYCLE)), free=10 * GIB)
    told(over, CreepSeen(at_ns=0, growth=None)).run(100 * HOUR)
    assert len(over.spawns) == 1


def test_a_recycle_obeys_windows_hold_and_planned_per_day() -> None:
    night = replace(RECYCLE, windows=NIGHT.windows)
    world = creep(busy(declared(night)), free=GIB)
    world.run(20 * HOUR, until=lambda w: len(w.spawns) == 2)
    assert clock(world) == pytest.approx(2.0, abs=0.15)
    held = idle(declared(RECYCLE))
    held.command("hold")
    creep(held.run(5)).run(48 * HOUR)
    assert len(held.spawns) == 1
    none = creep(idle(declared(replace(RECYCLE, planned_per_day=0)))).run(48 * HOUR)
    assert len(none.spawns) == 1
    assert "never by itself (planned-per-day = 0)" in none.decisions[0].sentence


# --- told ---


def test_why_it_is_below_and_when_it_comes_back_is_told_lever_by_lever() -> None:
    world = idle(begun(NIGHT))
    told_why = way_back(NIGHT, world.state, world.now)
    assert told_why is not None
    assert [(below.lever, below.now, below.declared) for below in told_why.levers] == [("max_model_len", 30000, 65536)]
    assert told_why.levers[0].why == "a failure lowered it; nothing that is known forbids what is declared"
    assert told_why.waits_for == "a step up, within 02:00-05:00 local time"
    assert told_why.at_ns is not None
    world.run(16 * HOUR)
    assert way_back(NIGHT, world.state, world.now) is None
    seqs = World(POLICY, fine, last_known_good=DECLARED.with_(max_num_seqs=8))
    seqs.run(until=lambda w: w.state.name is StateName.SERVING)
    stays = way_back(POLICY, seqs.state, seqs.now)
    assert stays is not None
    assert stays.waits_for == "nothing of that comes back by itself"
    assert "step max-num-seqs up" in stays.levers[0].why


def test_a_hold_and_what_creeps_are_carried_to_the_daemon_that_follows() -> None:
    world = creep(busy(declared(RECYCLE)))
    world.send(0, Commanded(at_ns=0, verb="hold", by="ada", for_ns=HOUR * SECOND))
    state = world.run(5).state
    again = carried(json.dumps(carry(state)))
    assert again is not None
    assert again.hold == state.hold
    assert again.launch is not None
    assert state.launch is not None
    assert again.launch.growth == state.launch.growth
    assert (again.launch.growth_told, again.planned) == (True, state.planned)


def test_a_step_up_that_is_impossible_does_not_keep_creeping_memory_from_its_recycle() -> None:
    world = World(RECYCLE, lambda spawn, w: Outcome(numbers={**NUMBERS, "kv_tokens": 31_000}), last_known_good=SHORTER)
    world.run(until=lambda w: w.state.name is StateName.SERVING)
    idle(world).run(2000)
    assert world.state.launch is not None
    assert world.state.launch.after_ns > world.now, "the KV cache refutes every step"
    reset, _ = decide(RECYCLE, world.state, Commanded(at_ns=world.now, verb="reset"))
    assert reset.launch is not None
    assert reset.launch.after_ns == 0
    creep(world).run(300)
    assert [spawn.levers for spawn in world.spawns] == [SHORTER, SHORTER]
