"""Before a launch: the gate."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Spawn
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import DeviceMemory, GateSampled, Tick
from supervisord_vllm.core.judgement import beyond, fit_beside, patience_ns, record
from supervisord_vllm.core.ledger import room
from supervisord_vllm.core.levers import UTILIZATION, Levers, show
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.rules import fit_arithmetic
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.core.steps import Step, enter, to_given_up

UNREAD_NS = 45 * SECOND
"""Memory that cannot be read is waited for at most this long: NVML was seen to block for 45 s."""


def gate_sampled(policy: Policy, state: State, fact: GateSampled) -> Step:
    """Gating → starting when port, lock and memory allow it, at a lower utilization if a neighbour stays."""
    assert state.gate is not None
    now, gate = fact.at_ns, state.gate
    if fact.launch != state.next_launch:
        return replace(state, dropped=state.dropped + 1), ()
    if fact.port_owner is not None or fact.lock_owner is not None:
        if fact.port_owner is not None:
            waits = f"the engine's port is held by {telling.owner(fact.port_owner)}"
        else:
            assert fact.lock_owner is not None
            waits = f"the device's lock is held by {telling.owner(fact.lock_owner)}"
        taken = fact.port_owner is not None
        gate = replace(gate, samples=(), short_since_ns=None, waits_for=waits, port_taken=taken)
        return replace(state, gate=gate), ()
    if fact.memory_error is not None and gate.short_since_ns is not None:
        # It was short when it could last be read: not being able to look is no reason to start.
        waits = f"memory was short when it could last be read ({telling.quoted(fact.memory_error, 120)})"
        return replace(state, gate=replace(gate, waits_for=waits)), ()
    if fact.memory_error is not None:
        # vLLM looks for itself, so a launch without our look is better than none; but a driver that hangs or resets
        # may come back, and until then the engine would only hang as well.
        since = gate.unread_since_ns if gate.unread_since_ns is not None else now
        waits = f"memory cannot be read ({telling.quoted(fact.memory_error, 120)})"
        gate = replace(gate, unread_since_ns=since, waits_for=waits)
        if now - since < min(UNREAD_NS, policy.gate.patience_ns):
            return replace(state, gate=gate), ()
    samples = (*(s for s in gate.samples if s[0] >= now - policy.gate.window_ns), (now, fact.devices))
    covered = now - min(samples[0][0], gate.samples[0][0] if gate.samples else now) >= policy.gate.window_ns
    gate = replace(gate, samples=samples, waits_for="memory is watched until it holds still", port_taken=False)
    tight = room((devices for _, devices in samples), state.contexts)
    wanted = _wanted(state)
    if tight is None or wanted is None or tight.short_of(wanted) <= 0:
        gate = replace(gate, short_since_ns=None)
        if not covered and fact.memory_error is None:
            return replace(state, gate=gate), ()
        return _spawn(policy, state, now, state.target, fact.devices)
    holder = telling.largest_holder(fact.devices)
    short = telling.gate_short(tight, wanted, holder)
    since = gate.short_since_ns if gate.short_since_ns is not None else now
    gate = replace(gate, short_since_ns=since, waits_for=short)
    lowered = fit_beside(policy, state, tight, wanted, now)
    if lowered is None or not covered or now - since < patience_ns(policy, state, tight, wanted):
        return replace(state, gate=gate), ()
    move = Move(UTILIZATION, wanted, lowered, "down", "computed")
    decision = Decision(
        number=state.next_decision,
        at_ns=now,
        launch=state.next_launch,
        kind=Kind.GPU_BUSY_FOREIGN,
        action=Action.NEXT_CONFIG,
        moves=(move,),
        arithmetic=fit_arithmetic(tight.less(beyond(state))),
        acted=policy.act,
        sentence=(
            f"Before launch {state.next_launch}: {short}. So it starts with {telling.moved((move,))}, which fits beside"
            f" it; what is asked for stays {show(UTILIZATION, wanted)} and is tried again by the next launch."
            " `vllm-supervise explain` shows the arithmetic."
        ),
    )
    state, recorded = record(replace(state, gate=gate), decision)
    levers = state.target.with_(**{UTILIZATION: lowered}) if policy.act else state.target
    state, actions = _spawn(policy, state, now, levers, fact.devices)
    return state, (recorded, *actions)


def _wanted(state: State) -> int | None:
    """What the launch asks for: the target's utilization; undeclared, what vLLM printed of the launch before."""
    asked = state.target.number(UTILIZATION)
    if asked is not None or state.incident.cause is None:
        return asked
    printed = state.incident.cause.value(UTILIZATION)
    return printed if isinstance(printed, int) else None


def _spawn(policy: Policy, state: State, now_ns: int, levers: Levers, devices: tuple[DeviceMemory, ...]) -> Step:
    """Gating → starting."""
    number = state.next_launch
    after = enter(
        state,
        StateName.STARTING,
        now_ns,
        launch=Launch(
            number,
            levers,
            state.target,
            now_ns,
            devices,
            environment=state.environment,
            probe=state.probe,
            fingerprint=policy.fingerprint,
        ),
        probe=None,
        gate=None,
        next_launch=number + 1,
        incident=replace(state.incident, launches=state.incident.launches + 1),
    )
    return after, (Spawn(number, levers, state.environment),)


def gate_deadline(policy: Policy, state: State, fact: Tick) -> Step:
    """Gating → given-up: what keeps the gate shut has not gone away."""
    assert state.gate is not None
    if fact.at_ns < state.gate.since_ns + policy.gate.deadline_ns:
        return state, ()
    waits = state.gate.waits_for or "nothing could be sampled"
    sentence = (
        f"Launch {state.next_launch} was not started: for {telling.span(policy.gate.deadline_ns)} {waits}. Nothing of"
        f" that is ours, so it is not touched. Free it, then {telling.begin_again(policy)};"
        " `vllm-supervise preflight` shows who holds what."
    )
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=state.next_launch,
        kind=Kind.PORT_IN_USE if state.gate.port_taken else Kind.GPU_BUSY_FOREIGN,
        action=Action.STOP_EXPLAIN,
        sentence=sentence,
    )
    state, recorded = record(state, decision)
    state, actions = to_given_up(policy, state, fact.at_ns, sentence)
    return state, (recorded, *actions)
