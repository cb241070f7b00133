"""Steps that several cells of the table share: entering a state, always with the actions that belong to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from supervisord_vllm.core.actions import Action, CloseGate, Exit, GiveUp, Stop, WatchGate
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Draining, Ending, Opening, Plan, State, StateName

GIVEN_UP_STATUS = 69
"""Exit status of a daemon that gave up (EX_UNAVAILABLE)."""

Step = tuple[State, tuple[Action, ...]]


def enter(state: State, name: StateName, now_ns: int, **changes: Any) -> State:  # noqa: ANN401 - fields of `State`
    """The state under another name, since now."""
    return replace(state, name=name, since_ns=now_ns, **changes)


def to_gate(state: State, now_ns: int, target: Levers | None = None) -> Step:
    """→ gating: watch memory, port and locks for the next launch."""
    after = enter(
        state,
        StateName.GATING,
        now_ns,
        target=state.target if target is None else target,
        gate=Opening(now_ns),
        ending=None,
        draining=None,
        resume_ns=None,
        given_up=None,
    )
    return after, (WatchGate(state.next_launch),)


def to_stopping(
    state: State,
    now_ns: int,
    why: Literal["failure", "operator", "shutdown", "planned"],
    kind: Kind | None = None,
    text: str = "",
    plan: Plan | None = None,
) -> Step:
    """→ stopping a living engine."""
    assert state.launch is not None
    phase: Literal["starting", "serving", "hung"] = "starting" if state.name is StateName.STARTING else "serving"
    if kind is Kind.ENGINE_HUNG:
        phase = "hung"
    after = enter(
        state,
        StateName.STOPPING,
        now_ns,
        launch=replace(state.launch, ready=False),
        ending=Ending(why, now_ns, kind, text, plan),
        draining=None,
    )
    return after, (Stop(state.launch.number, phase),)


def to_draining(state: State, now_ns: int, plan: Plan | None) -> Step:
    """→ draining: not ready any more, requests finish; an idle engine is stopped at once. Without a plan: operator."""
    assert state.launch is not None
    if state.launch.load == "idle":
        return to_stopping(state, now_ns, "operator" if plan is None else "planned", plan=plan)
    why: Literal["planned", "operator"] = "operator" if plan is None else "planned"
    draining = Draining(now_ns, plan, why, counted=now_ns in state.planned)
    return enter(state, StateName.DRAINING, now_ns, draining=draining), ()


def to_given_up(policy: Policy, state: State, now_ns: int, text: str, until_ns: int | None = None) -> Step:
    """→ given-up: say why, and end the daemon unless the policy wants it to stay."""
    state = replace(state, gate=None, ending=None, draining=None, resume_ns=None)
    after = enter(state, StateName.GIVEN_UP, now_ns, given_up=text)
    actions: tuple[Action, ...] = (CloseGate(), GiveUp(text, until_ns))
    return after, (*actions, Exit(GIVEN_UP_STATUS)) if policy.on_give_up == "exit" else actions
