"""A daemon's start: what the one before left is resumed where that is certain, else it is ended and started anew.

The shell keeps the whole state (`carry`) beside the recorded facts. The next daemon of the same boot gets it back with
its first fact, and with it what became of the engine: it *lives* (pid, start time and marker agree) or *ended* while
nobody looked, so that its log is still to be judged; ``none`` means that it is not certainly ours, or was ended with
the daemon (systemd's ``KillMode=mixed``). Then everything of ours is ended, and the plan that was there goes on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from supervisord_vllm.core import codec, proof, telling
from supervisord_vllm.core.actions import Action as Act
from supervisord_vllm.core.actions import Adopt, Canary, EndTree, Exit, Reap, Stop, Weigh
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import DaemonStarted, Hold, LeftoversReaped
from supervisord_vllm.core.judgement import record
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.observations import Known
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.remedies import apply
from supervisord_vllm.core.state import Ending, Incident, Launch, Plan, State, StateName
from supervisord_vllm.core.steps import GIVEN_UP_STATUS, Step, enter, to_gate, to_given_up
from supervisord_vllm.core.stopping import leave_stopping

_WITH_ENGINE = frozenset(
    {StateName.STARTING, StateName.PROVING, StateName.SERVING, StateName.DRAINING, StateName.STOPPING}
)


def carry(state: State) -> dict[str, Any]:
    """The state as JSON for the next daemon. Observations are kept elsewhere, the gate is watched afresh."""
    cause = state.incident.cause
    if cause is not None:
        cause = replace(cause, known=Known())
    lean = replace(state, observations=(), gate=None, incident=replace(state.incident, cause=cause))
    return codec.to_json(lean)


def carried(text: str) -> State | None:
    """The state that `carry` made, from JSON text; ``None`` where this version cannot read it."""
    try:
        return codec.from_json(State, json.loads(text))
    except (ValueError, RecursionError):
        return None


def started(policy: Policy, state: State, fact: DaemonStarted) -> Step:
    """The first fact: what the store remembers decides where the run begins."""
    state = replace(
        state,
        since_ns=fact.at_ns,
        fingerprint=policy.fingerprint,
        next_launch=fact.next_launch,
        next_decision=fact.next_decision,
        target=policy.declared,
        hold=fact.hold or (Hold(since_ns=fact.at_ns) if fact.held else None),
        observations=fact.observations,
        wall_offset_s=fact.wall_s - fact.at_ns // SECOND,
        utc_offset_s=fact.utc_offset_s,
        good=fact.last_known_good,
        failed_climbs=fact.failed_climbs,
        roll_backs=fact.roll_backs,
        planned=fact.planned,
    )
    before = carried(fact.carried) if fact.carried is not None else None
    if before is not None and (step := _resumed(policy, state, before, fact)) is not None:
        return step
    if fact.exhausted is not None:
        return to_given_up(policy, state, fact.at_ns, fact.exhausted)
    state, first = _best_known(policy, state, fact.at_ns)
    return state, (*first, Reap())


def _best_known(policy: Policy, state: State, now_ns: int) -> tuple[State, tuple[Act, ...]]:
    """The last known good as the next target, instead of what is declared; said as a decision."""
    good = state.good
    if good is None or good == policy.declared:
        return state, ()
    moves = tuple(
        Move(name, policy.declared.get(name), value, telling.way(policy.declared.get(name), value), "restored")
        for name, value in good.items()
        if policy.declared.get(name) != value and (policy.rung(name) or name not in policy.declared)
    )
    if not moves or not policy.act or not all(_permitted(policy, move) for move in moves):
        return state, ()
    decision = Decision(
        number=state.next_decision,
        at_ns=now_ns,
        launch=state.next_launch,
        kind=Kind.NONE,
        action=Action.NEXT_CONFIG,
        moves=moves,
        sentence=(
            f"The daemon starts again: {telling.moved(moves)}, the last known good of this policy, instead of what is"
            " declared. Launch "
            f"{state.next_launch} follows at once. `vllm-supervise history` shows how it was found."
        ),
    )
    state, recorded = record(replace(state, target=apply(policy.declared, moves)), decision)
    return state, (recorded,)


def _permitted(policy: Policy, move: Move) -> bool:
    """Whether the ladder still lets a lever be where it last was good; its bounds may have been edited since."""
    rung = policy.rung(move.lever)
    if rung is None or not isinstance(move.after, int) or isinstance(move.after, bool):
        return True
    return (rung.min is None or move.after >= rung.min) and (rung.max is None or move.after <= rung.max)


def _resumed(policy: Policy, fresh: State, before: State, fact: DaemonStarted) -> Step | None:
    """Adopting → where the daemon before was; ``None`` where nothing of that counts any more."""
    now = fact.at_ns
    if before.ending is not None and before.ending.why == "shutdown":
        return None  # its operator had ended it: this is a start of its own
    state = replace(
        before,
        next_launch=max(before.next_launch, fresh.next_launch),
        next_decision=max(before.next_decision, fresh.next_decision),
        observations=fresh.observations,
        wall_offset_s=fresh.wall_offset_s,
        utc_offset_s=fresh.utc_offset_s,
        memory_error=None,
        gate=None,
    )
    if (cause := state.incident.cause) is not None:
        cause = replace(cause, known=known(policy, state, now))
        state = replace(state, incident=replace(state.incident, cause=cause))
    first: tuple[Act, ...] = ()
    edited = before.fingerprint != policy.fingerprint
    if edited:
        # An edited wish is tried, not ignored; what lives goes on until something ends it.
        state = replace(
            state,
            fingerprint=policy.fingerprint,
            target=policy.declared,
            good=fresh.good,
            incident=Incident(),
            failures=0,
            recurring=(),
            given_up=None,
        )
        state, first = _best_known(policy, state, now)
        if state.name is StateName.GIVEN_UP:
            state = replace(state, name=StateName.ADOPTING)
    if state.name is StateName.GIVEN_UP:
        return to_given_up(policy, state, now, state.given_up or "")
    launch = state.launch
    if state.name in _WITH_ENGINE and launch is not None and launch.pid is not None and fact.engine != "none":
        return _adopted(policy, state, launch, fact, first)
    plan = _plan_of(state, now)
    if edited and plan is not None:
        plan = Plan(StateName.GATING, state.target)
    ending = Ending("operator" if plan is None else "planned", now, plan=plan, gone=True)
    after = enter(state, StateName.ADOPTING, now, ending=ending, draining=None, resume_ns=None, launch=None, probe=None)
    return after, (*first, Reap())


def _adopted(policy: Policy, state: State, launch: Launch, fact: DaemonStarted, first: tuple[Act, ...]) -> Step:
    """The same launch goes on, in the state that it was in; what was in progress is asked for again."""
    adopt = Adopt(
        launch.number,
        launch.levers,
        launch.environment,
        launch.pid or 0,
        launch.start_ticks,
        healthy=launch.healthy_ns is not None,
        cut=launch.cut,
    )
    again: tuple[Act, ...] = ()
    ending = state.ending
    if state.name is StateName.STOPPING and ending is not None:
        if launch.exited is not None or fact.engine == "ended":
            again = (EndTree(launch.number),)
        else:
            waited = fact.at_ns - ending.since_ns
            again = (Stop(launch.number, _phase(launch, ending), waited, signalled=launch.cut is not None),)
    elif fact.engine == "lives" and state.name is StateName.PROVING:
        again = _proof(policy, launch)
    elif fact.engine == "lives" and launch.fatal_asked:
        again = (Canary(launch.number),)
    return state, (*first, adopt, *again)


def _proof(policy: Policy, launch: Launch) -> tuple[Act, ...]:
    """The part of the proof that was in progress."""
    part, burst = proof.part(policy, launch), proof.burst_of(policy, launch)
    if part == "canary" or launch.fatal_asked:
        return (Canary(launch.number),)
    if part == "burst" and launch.burst is None and burst is not None:
        return (burst,)
    return (Weigh(launch.number),) if launch.weighed and launch.soak is None else ()


def _phase(launch: Launch, ending: Ending) -> Literal["starting", "serving", "hung"]:
    if ending.suspected is Kind.ENGINE_HUNG:
        return "hung"
    return "starting" if launch.healthy_ns is None else "serving"


def _plan_of(state: State, now_ns: int) -> Plan | None:
    """Where a state leads once nothing of ours is left; ``None``: it stays stopped, as its operator wanted."""
    launch, ending, draining = state.launch, state.ending, state.draining
    if state.name is StateName.STOPPED:
        return None
    if state.name is StateName.DRAINING and draining is not None:
        return draining.plan
    if ending is not None and (ending.why == "operator" or ending.plan is not None):
        return None if ending.why == "operator" else ending.plan
    if state.name is StateName.BACKING_OFF and state.resume_ns is not None:
        delay = max(0, state.resume_ns - now_ns)
        return Plan(StateName.BACKING_OFF, state.target, delay, environment=state.environment, probe=state.probe)
    if state.name in _WITH_ENGINE and launch is not None:
        return Plan(StateName.GATING, state.target, environment=launch.environment, probe=launch.probe)
    return Plan(StateName.GATING, state.target, environment=state.environment, probe=state.probe)


def reaped(policy: Policy, state: State, fact: LeftoversReaped) -> Step:
    """Adopting → where the daemon before was going, or gating, once nothing of ours is left."""
    if fact.survivors:
        names = ", ".join(str(process) for process in fact.survivors)
        text = (
            f"Processes of an earlier launch cannot be ended: {names}. Look at their state with `ps -o pid,stat,wchan`."
        )
        shutdown = state.ending is not None and state.ending.why == "shutdown"
        state, actions = to_given_up(policy, state, fact.at_ns, text)
        if shutdown and Exit(GIVEN_UP_STATUS) not in actions:
            actions = (*actions, Exit(GIVEN_UP_STATUS))
        return state, actions
    if state.ending is not None:
        return leave_stopping(policy, state, fact.at_ns)
    return to_gate(state, fact.at_ns)
