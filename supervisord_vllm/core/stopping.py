"""While a tree is being ended, and where that leads."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Action as Act
from supervisord_vllm.core.actions import Clean, Exit
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import Diagnosed, Exited, Signalled, Tick, TreeEnded
from supervisord_vllm.core.judgement import judge, record
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Incident, State, StateName
from supervisord_vllm.core.steps import GIVEN_UP_STATUS, Step, enter, to_gate, to_given_up

CLEANED = frozenset({Kind.STARTUP_WEDGED, Kind.COMPILE_CACHE_CORRUPT, Kind.SHM_EXHAUSTED})
"""Kinds that a lock or a segment of a dead owner can be the cause of: those are moved aside before the next start."""


def signalled(policy: Policy, state: State, fact: Signalled) -> Step:
    """Our first signal is on its way: what the engine prints from here on is no cause."""
    if state.launch is None or state.launch.cut is not None:
        return state, ()
    return replace(state, launch=replace(state.launch, cut=fact.position)), ()


def stopping_exited(policy: Policy, state: State, fact: Exited) -> Step:
    """The main process of a stopping engine is gone."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, exited=fact)), ()


def diagnosed(policy: Policy, state: State, fact: Diagnosed) -> Step:
    """stopping: the verdict of a failed launch makes the decision."""
    assert state.ending is not None
    if state.ending.why != "failure" or state.ending.plan is not None:
        return state, ()
    ending = state.ending
    state, recorded, plan = judge(policy, state, fact)
    state = replace(state, ending=replace(ending, plan=plan))
    first: tuple[Act, ...] = (recorded,)
    starts_again = plan.to is not StateName.GIVEN_UP
    if recorded.decision.kind in CLEANED and starts_again and not state.incident.cleaned and state.launch is not None:
        first = (recorded, Clean(state.launch.number))
    if recorded.decision.action is Action.CLEAN and starts_again and state.launch is not None:
        first = (recorded, Clean(state.launch.number, recorded.decision.target or ""))
    if not ending.gone:
        return state, first
    state, actions = leave_stopping(policy, state, fact.at_ns)
    return state, (*first, *actions)


def tree_ended(policy: Policy, state: State, fact: TreeEnded) -> Step:
    """The tree is gone (or cannot be ended): go where the reason of the stop leads."""
    assert state.ending is not None
    assert state.launch is not None
    if fact.survivors:
        return _cannot_stop(policy, state, fact.at_ns, ", ".join(str(process) for process in fact.survivors))
    ending = replace(state.ending, gone=True)
    state = replace(state, ending=ending)
    if ending.why == "failure" and ending.plan is None:
        return state, ()
    return leave_stopping(policy, state, fact.at_ns)


def stop_deadline(policy: Policy, state: State, fact: Tick) -> Step:
    """Stopping → given-up when the tree is not gone in time."""
    assert state.ending is not None
    if fact.at_ns < state.ending.since_ns + policy.stop_deadline_ns:
        return state, ()
    text = f"its tree was not gone after {telling.span(policy.stop_deadline_ns)}"
    return _cannot_stop(policy, state, fact.at_ns, text)


def _cannot_stop(policy: Policy, state: State, now_ns: int, names: str) -> Step:
    """→ given-up: a process of ours cannot be ended; starting beside it could only make things worse."""
    assert state.launch is not None
    sentence = (
        f"Launch {state.launch.number} cannot be ended: {names}. A process in state D waits for a driver or a disk and"
        f" cannot be killed; look with `ps -o pid,stat,wchan:32,cmd`, then {telling.begin_again(policy)}."
    )
    decision = Decision(
        number=state.next_decision,
        at_ns=now_ns,
        launch=state.launch.number,
        kind=Kind.STOP_HANG,
        action=Action.STOP_OPERATOR,
        sentence=sentence,
    )
    shutdown = state.ending is not None and state.ending.why == "shutdown"
    state, recorded = record(state, decision)
    state, actions = to_given_up(policy, state, now_ns, sentence)
    if shutdown and Exit(GIVEN_UP_STATUS) not in actions:
        actions = (*actions, Exit(GIVEN_UP_STATUS))
    return state, (recorded, *actions)


def leave_stopping(policy: Policy, state: State, now_ns: int) -> Step:
    """Stopping → where the reason of the stop leads."""
    ending = state.ending
    assert ending is not None
    if ending.why == "shutdown":
        return enter(state, StateName.STOPPED, now_ns, ending=None), (Exit(0),)
    if ending.why == "operator":
        return enter(state, StateName.STOPPED, now_ns, ending=None, incident=Incident(), failures=0), ()
    plan = ending.plan
    assert plan is not None
    state = replace(state, environment=plan.environment, probe=plan.probe)
    if plan.to is StateName.GIVEN_UP:
        return to_given_up(policy, state, now_ns, plan.text, plan.exhausted_until_ns)
    if plan.to is StateName.BACKING_OFF:
        after = enter(
            state, StateName.BACKING_OFF, now_ns, target=plan.target, ending=None, resume_ns=now_ns + plan.delay_ns
        )
        return after, ()
    return to_gate(state, now_ns, plan.target)
