"""An operator's word in each state, and the end of a back-off."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from supervisord_vllm.core.actions import CloseGate, Exit, Reap
from supervisord_vllm.core.facts import Commanded, Tick
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Incident, State, StateName
from supervisord_vllm.core.steps import Step, enter, to_gate, to_stopping
from supervisord_vllm.core.stopping import leave_stopping


def backoff_over(policy: Policy, state: State, fact: Tick) -> Step:
    """backing-off → gating when the delay is over."""
    if state.resume_ns is not None and fact.at_ns < state.resume_ns:
        return state, ()
    return to_gate(state, fact.at_ns)


def _hold(policy: Policy, state: State, fact: Commanded) -> Step | None:
    """Hold and resume work in every state and change nothing else."""
    return (replace(state, held=fact.verb == "hold"), ()) if fact.verb in ("hold", "resume") else None


def command_running(policy: Policy, state: State, fact: Commanded) -> Step:
    """An operator's word while an engine lives: stop and shutdown end it."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb == "start":
        return state, ()
    return to_stopping(state, fact.at_ns, "shutdown" if fact.verb == "shutdown" else "operator")


def command_stopping(policy: Policy, state: State, fact: Commanded) -> Step:
    """While a tree is ended the operator may change where that leads; a failure's plan is then dropped."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb == "start" or state.ending is None:
        return state, ()
    why: Literal["operator", "shutdown"] = "shutdown" if fact.verb == "shutdown" else "operator"
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
    if state.name not in (StateName.STOPPED, StateName.GIVEN_UP):
        return state, ()
    # What an earlier launch may have left is ended first: a start after a stop that hung must not make two engines.
    fresh = replace(state, incident=Incident(), restarts=(), failures=0, launch=None, given_up=None)
    return enter(fresh, StateName.ADOPTING, fact.at_ns), (Reap(),)


def command_adopting(policy: Policy, state: State, fact: Commanded) -> Step:
    """While leftovers are ended only hold, resume and shutdown are heard."""
    if held := _hold(policy, state, fact):
        return held
    if fact.verb != "shutdown":
        return state, ()
    return enter(state, StateName.STOPPED, fact.at_ns), (Exit(0),)
