"""The state machine: `TABLE` maps every state and every fact to what happens, and `decide` is the only way in.

The table is total: each cell is a handler with every state it may lead to, or an explicit `IGNORE`. Nothing here knows
a clock (facts carry times), does I/O or draws a random number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from supervisord_vllm.core.adopting import reaped, started
from supervisord_vllm.core.climbing import load_seen, room_seen
from supervisord_vllm.core.commands import (
    backoff_over,
    clock_seen,
    command_adopting,
    command_draining,
    command_idle,
    command_running,
    command_stopping,
    drained,
    drained_by_death,
    hold_over,
)
from supervisord_vllm.core.facts import (
    FACTS,
    BurstDone,
    CanaryDone,
    Cleaned,
    ClockSeen,
    Commanded,
    CreepSeen,
    DaemonStarted,
    DevicesSeen,
    Diagnosed,
    Exited,
    Fact,
    FatalSeen,
    GateSampled,
    HealthSeen,
    KernelSeen,
    LedgerSeen,
    LeftoversReaped,
    LoadSeen,
    OomKilled,
    PhaseSeen,
    Pressed,
    ReliefJudged,
    RoomSeen,
    Signalled,
    SoakDone,
    Spawned,
    SpawnFailed,
    Stalled,
    Tick,
    TreeEnded,
)
from supervisord_vllm.core.gating import gate_deadline, gate_sampled
from supervisord_vllm.core.outside import cleaned, devices_seen, kernel_seen, oom_killed, stalled
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.proving import burst_done, soak_done
from supervisord_vllm.core.recycling import creep_seen
from supervisord_vllm.core.relief import pressed, relief_judged
from supervisord_vllm.core.running import (
    canary_done,
    exited,
    fatal_seen,
    first_health,
    health_seen,
    ledger_seen,
    phase_seen,
    running_tick,
    spawn_failed,
    spawned,
)
from supervisord_vllm.core.state import State, StateName
from supervisord_vllm.core.steps import Step
from supervisord_vllm.core.stopping import diagnosed, signalled, stop_deadline, stopping_exited, tree_ended

Handler = Callable[[Policy, State, Any], Step]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a fact does in a state: the handler and every state it may lead to (staying is always allowed)."""

    handler: Handler
    to: frozenset[StateName] = frozenset()


class _Ignore:
    def __repr__(self) -> str:
        return "IGNORE"


IGNORE = _Ignore()
"""A fact that says nothing in a state, on purpose."""
Entry = Cell | _Ignore


def decide(policy: Policy, state: State, fact: Fact) -> Step:
    """The next state and what the shell shall do. The same arguments always give the same result.

    A fact of another launch than the present one is dropped and counted. A hold ends with the first fact after its end,
    in every state.
    """
    state = hold_over(state, fact.at_ns)
    expected = state.next_launch if isinstance(fact, GateSampled) else state.launch.number if state.launch else 0
    if fact.launch not in (0, expected):
        return replace(state, dropped=state.dropped + 1), ()
    entry = TABLE[state.name][type(fact)]
    if isinstance(entry, _Ignore):
        return state, ()
    after, actions = entry.handler(policy, state, fact)
    if after.name is not state.name and after.name not in entry.to:
        raise AssertionError(f"{state.name.value} --{type(fact).__name__}--> {after.name.value} is not in the table")
    return after, actions


def _on(handler: Handler, *to: StateName) -> Cell:
    return Cell(handler, frozenset(to))


_EVERYWHERE: Mapping[type[Fact], Cell] = {
    DevicesSeen: Cell(devices_seen),
    Cleaned: Cell(cleaned),
    ClockSeen: Cell(clock_seen),
}
_OUTSIDE: Mapping[type[Fact], Cell] = {KernelSeen: Cell(kernel_seen), OomKilled: Cell(oom_killed)}
"""Witnesses of a living or dying engine."""

_OF_THE_PROOF = (BurstDone, SoakDone)
"""Said while a launch is proven; a late word says nothing in any other state."""


def _row(cells: Mapping[type[Fact], Cell], ignores: Iterable[type[Fact]]) -> Mapping[type[Fact], Entry]:
    named = dict.fromkeys((*_OF_THE_PROOF, *ignores), IGNORE)
    row: dict[type[Fact], Entry] = {**_EVERYWHERE, **named, **cells}
    missing = [fact.__name__ for fact in FACTS if fact not in row]
    if missing:
        raise AssertionError(f"the table says nothing about {', '.join(missing)}")
    return row


_S = StateName
_WITH_ENGINE = (_S.STARTING, _S.PROVING, _S.SERVING, _S.DRAINING, _S.STOPPING)
_WHEREVER = (_S.STOPPED, _S.GATING, _S.BACKING_OFF, _S.GIVEN_UP)
_OF_A_LAUNCH = (
    Spawned,
    SpawnFailed,
    PhaseSeen,
    LedgerSeen,
    FatalSeen,
    HealthSeen,
    CanaryDone,
    Signalled,
    Exited,
    Diagnosed,
    TreeEnded,
    Stalled,
    KernelSeen,
    OomKilled,
    LoadSeen,
    RoomSeen,
    Pressed,
    ReliefJudged,
    CreepSeen,
)
_OF_SERVICE = (RoomSeen, Pressed, ReliefJudged, CreepSeen)
_OF_THE_DAEMON = (DaemonStarted, LeftoversReaped)

TABLE: Mapping[StateName, Mapping[type[Fact], Entry]] = {
    _S.ADOPTING: _row(
        {
            DaemonStarted: _on(started, *_WITH_ENGINE, _S.GIVEN_UP),
            LeftoversReaped: _on(reaped, *_WHEREVER),
            Commanded: _on(command_adopting, _S.STOPPED),
        },
        ignores=(*_OF_A_LAUNCH, GateSampled, Tick),
    ),
    _S.STOPPED: _row(
        {Commanded: _on(command_idle, _S.ADOPTING)},
        ignores=(*_OF_THE_DAEMON, *_OF_A_LAUNCH, GateSampled, Tick),
    ),
    _S.GATING: _row(
        {
            GateSampled: _on(gate_sampled, _S.STARTING),
            Tick: _on(gate_deadline, _S.GIVEN_UP),
            Commanded: _on(command_idle, _S.STOPPED),
        },
        ignores=(*_OF_THE_DAEMON, *_OF_A_LAUNCH),
    ),
    _S.STARTING: _row(
        {
            **_OUTSIDE,
            Stalled: _on(stalled, _S.STOPPING),
            Spawned: _on(spawned),
            SpawnFailed: _on(spawn_failed, _S.GIVEN_UP, _S.BACKING_OFF),
            PhaseSeen: _on(phase_seen),
            LedgerSeen: _on(ledger_seen),
            FatalSeen: _on(fatal_seen),
            HealthSeen: _on(first_health, _S.PROVING),
            Exited: _on(exited, _S.STOPPING),
            Tick: _on(running_tick, _S.STOPPING),
            Commanded: _on(command_running, _S.STOPPING),
        },
        ignores=(*_OF_THE_DAEMON, *_OF_SERVICE, GateSampled, CanaryDone, Signalled, Diagnosed, TreeEnded, LoadSeen),
    ),
    _S.PROVING: _row(
        {
            **_OUTSIDE,
            Stalled: _on(stalled, _S.STOPPING),
            LedgerSeen: _on(ledger_seen),
            FatalSeen: _on(fatal_seen),
            LoadSeen: _on(load_seen),
            HealthSeen: _on(health_seen),
            CanaryDone: _on(canary_done, _S.STOPPING),
            BurstDone: _on(burst_done),
            SoakDone: _on(soak_done, _S.SERVING, _S.STOPPING),
            Exited: _on(exited, _S.STOPPING),
            Tick: _on(running_tick, _S.SERVING, _S.STOPPING),
            Commanded: _on(command_running, _S.STOPPING),
        },
        ignores=(
            *_OF_THE_DAEMON,
            *_OF_SERVICE,
            GateSampled,
            Spawned,
            SpawnFailed,
            PhaseSeen,
            Signalled,
            Diagnosed,
            TreeEnded,
        ),
    ),
    _S.SERVING: _row(
        {
            **_OUTSIDE,
            Stalled: _on(stalled, _S.STOPPING),
            LedgerSeen: _on(ledger_seen),
            FatalSeen: _on(fatal_seen),
            HealthSeen: _on(health_seen),
            CanaryDone: _on(canary_done, _S.STOPPING),
            LoadSeen: _on(load_seen),
            RoomSeen: _on(room_seen),
            Pressed: _on(pressed, _S.DRAINING, _S.STOPPING),
            ReliefJudged: _on(relief_judged, _S.DRAINING, _S.STOPPING),
            CreepSeen: _on(creep_seen),
            Exited: _on(exited, _S.STOPPING),
            Tick: _on(running_tick, _S.DRAINING, _S.STOPPING),
            Commanded: _on(command_running, _S.DRAINING, _S.STOPPING),
        },
        ignores=(*_OF_THE_DAEMON, GateSampled, Spawned, SpawnFailed, PhaseSeen, Signalled, Diagnosed, TreeEnded),
    ),
    _S.DRAINING: _row(
        {
            **_OUTSIDE,
            Stalled: _on(stalled, _S.STOPPING),
            LedgerSeen: _on(ledger_seen),
            FatalSeen: _on(fatal_seen),
            HealthSeen: _on(health_seen),
            LoadSeen: _on(load_seen, _S.STOPPING),
            Exited: _on(drained_by_death, _S.STOPPING),
            Tick: _on(drained, _S.STOPPING),
            Commanded: _on(command_draining, _S.SERVING, _S.STOPPING),
        },
        ignores=(
            *_OF_THE_DAEMON,
            *_OF_SERVICE,
            GateSampled,
            Spawned,
            SpawnFailed,
            PhaseSeen,
            CanaryDone,
            Signalled,
            Diagnosed,
            TreeEnded,
        ),
    ),
    _S.STOPPING: _row(
        {
            **_OUTSIDE,
            Spawned: _on(spawned),
            SpawnFailed: _on(spawn_failed, *_WHEREVER),
            LedgerSeen: _on(ledger_seen),
            Signalled: _on(signalled),
            Exited: _on(stopping_exited),
            Diagnosed: _on(diagnosed, *_WHEREVER),
            TreeEnded: _on(tree_ended, *_WHEREVER),
            Tick: _on(stop_deadline, _S.GIVEN_UP),
            Commanded: _on(command_stopping, *_WHEREVER),
        },
        ignores=(
            *_OF_THE_DAEMON,
            *_OF_SERVICE,
            GateSampled,
            PhaseSeen,
            FatalSeen,
            HealthSeen,
            CanaryDone,
            Stalled,
            LoadSeen,
        ),
    ),
    _S.BACKING_OFF: _row(
        {
            Tick: _on(backoff_over, _S.GATING),
            Commanded: _on(command_idle, _S.STOPPED, _S.GATING),
        },
        ignores=(*_OF_THE_DAEMON, *_OF_A_LAUNCH, GateSampled),
    ),
    _S.GIVEN_UP: _row(
        {Commanded: _on(command_idle, _S.STOPPED, _S.ADOPTING)},
        ignores=(*_OF_THE_DAEMON, *_OF_A_LAUNCH, GateSampled, Tick),
    ),
}
"""Read a row as: in this state, this fact does that and may lead there; everything else is ignored by name."""
