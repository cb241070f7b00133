"""An operator's word in each state, and the end of a back-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from supervisord_vllm.core.actions import CloseGate, EndTree, Exit, Force, Reap
from supervisord_vllm.core.facts import ClockSeen, Commanded, Exited, Hold, Tick
from supervisord_vllm.core.operating import forget, step_lever
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import Ending, Incident, Plan, State, StateName
from supervisord_vllm.core.steps import Step, enter, to_draining, to_gate, to_stopping
from supervisord_vllm.core.stopping import leave_stopping


def drained(policy: Policy, state: State, fact: Tick) -> Step:
    """Draining → stopping when requests took too long."""
    draining = state.draining
    if draining is None or fact.at_ns < draining.since_ns + policy.drain_ns:
        return state, ()
    return to_stopping(state, fact.at_ns, draining.why, plan=draining.plan)


def drained_by_death(policy: Policy, state: State, fact: Exited) -> Step:
    """Draining → stopping: it died before it was stopped; the plan is kept."""
    assert state.launch is not None
    draining = state.draining
    assert draining is not None
    launch = replace(state.launch, exited=fact, ready=False)
    ending = Ending(draining.why, fact.at_ns, plan=draining.plan)
    after = enter(state, StateName.STOPPING, fact.at_ns, launch=launch, ending=ending, draining=None)
    return after, (EndTree(launch.number),)


def backoff_over(policy: Policy, state: State, fact: Tick) -> Step:
    """backing-off → gating when the delay is over."""
    if state.resume_ns is not None and fact.at_ns < state.resume_ns:
        return state, ()
    return to_gate(state, fact.at_ns)


def hold_over(state: State, now_ns: int) -> State:
    """The state without a hold whose end has come."""
    until_ns = state.hold.until_ns if state.hold is not None else None
    return replace(state, hold=None) if until_ns is not None and now_ns >= until_ns else state


def clock_seen(policy: Policy, state: State, fact: ClockSeen) -> Step:
    """The wall clock was set, or summer time began or ended: windows and the age of observations follow it."""
    return replace(state, wall_offset_s=fact.wall_s - fact.at_ns // SECOND, utc_offset_s=fact.utc_offset_s), ()


def _hold_of(fact: Commanded) -> Hold:
    return Hold(fact.by, fact.reason, fact.at_ns, None if fact.for_ns is None else fact.at_ns + fact.for_ns)


def _hold(policy: Policy, state: State, fact: Commanded) -> Step | None:
    """Hold and resume work in every state and change nothing else; a reset forgets in every state."""
    if fact.verb == "reset" and state.name is not StateName.GIVEN_UP:
        return forget(policy, state), ()
    if fact.verb not in ("hold", "resume"):
        return None
    return replace(state, hold=_hold_of(fact) if fact.verb == "hold" else None), ()


def command_running(policy: Policy, state: State, fact: Commanded) -> Step:
    """An operator's word while an engine lives: stop and shutdown end it, restart and step start another one."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb == "start":
        return state, ()
    if fact.verb == "step":
        return step_lever(policy, state, fact)
    if fact.verb == "drain" and state.name is StateName.SERVING:
        return to_draining(state, fact.at_ns, None)
    if fact.verb == "restart" and state.launch is not None:
        plan = Plan(StateName.GATING, state.target, environment=state.launch.environment)
        return to_stopping(state, fact.at_ns, "planned", plan=plan)
    return to_stopping(state, fact.at_ns, "shutdown" if fact.verb == "shutdown" else "operator")


def command_draining(policy: Policy, state: State, fact: Commanded) -> Step:
    """While requests finish: a hold takes a planned change back, stop and shutdown wait no longer."""
    if fact.verb == "hold" and state.draining is not None and state.draining.plan is not None:
        assert state.launch is not None
        launch = replace(state.launch, proposed=False)  # once the hold is over it is due again
        planned = state.planned[:-1] if state.draining.counted else state.planned
        after = enter(state, StateName.SERVING, fact.at_ns, hold=_hold_of(fact), draining=None, launch=launch)
        return replace(after, planned=planned), ()
    if held := _hold(policy, state, fact):
        return held
    if fact.verb == "restart" and state.draining is not None and state.draining.plan is not None:
        return to_stopping(state, fact.at_ns, "planned", plan=state.draining.plan)
    if fact.verb not in ("stop", "shutdown", "restart"):
        return state, ()
    return command_running(policy, state, fact)


def command_stopping(policy: Policy, state: State, fact: Commanded) -> Step:
    """While a tree is ended the operator may change where that leads; a failure's plan is then dropped. Asked for the
    same again, it no longer waits for the engine."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb not in ("stop", "shutdown") or state.ending is None:
        return state, ()
    why: Literal["operator", "shutdown"] = "shutdown" if fact.verb == "shutdown" else "operator"
    if why == state.ending.why and not state.ending.forced and state.launch is not None:
        return replace(state, ending=replace(state.ending, forced=True)), (Force(state.launch.number),)
    if state.ending.why == "shutdown":
        return state, ()
    state = replace(state, ending=replace(state.ending, why=why))
    return leave_stopping(policy, state, fact.at_ns) if state.ending and state.ending.gone else (state, ())


def command_idle(policy: Policy, state: State, fact: Commanded) -> Step:
    """An operator's word while no engine lives."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb == "shutdown":
        return enter(state, StateName.STOPPED, fact.at_ns, gate=None, resume_ns=None), (CloseGate(), Exit(0))
    if fact.verb == "stop":
        if state.name is StateName.STOPPED:
            return state, ()
        return enter(state, StateName.STOPPED, fact.at_ns, gate=None, resume_ns=None, given_up=None), (CloseGate(),)
    if fact.verb == "restart" and state.name is StateName.BACKING_OFF:
        return to_gate(state, fact.at_ns)
    if fact.verb in ("drain", "step") or state.name not in (StateName.STOPPED, StateName.GIVEN_UP):
        return state, ()
    if fact.verb == "reset":
        state = forget(policy, state)
    # What an earlier launch may have left is ended first: a start after a stop that hung must not make two engines.
    target = policy.declared if state.good is None else state.good
    fresh = replace(
        state,
        incident=Incident(),
        restarts=(),
        failures=0,
        recurring=(),
        launch=None,
        given_up=None,
        target=target,
        environment=(),
    )
    return enter(fresh, StateName.ADOPTING, fact.at_ns), (Reap(),)


def command_adopting(policy: Policy, state: State, fact: Commanded) -> Step:
    """While leftovers are ended: after stop and shutdown no launch follows, but they are ended: nobody else would."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb not in ("stop", "shutdown"):
        return state, ()
    if not state.since_ns:  # before the first fact: nothing was begun
        return enter(state, StateName.STOPPED, fact.at_ns), (Exit(0),) if fact.verb == "shutdown" else ()
    ending = state.ending or Ending("operator", fact.at_ns, gone=True)
    why: Literal["operator", "shutdown"] = "operator"
    if fact.verb == "shutdown" or ending.why == "shutdown":
        why = "shutdown"
    return replace(state, ending=replace(ending, why=why)), ()
