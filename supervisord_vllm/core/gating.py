"""Before a launch: ending what an earlier daemon left (adopting), and the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Reap, Spawn
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import DaemonStarted, DeviceMemory, GateSampled, LeftoversReaped, Tick
from supervisord_vllm.core.judgement import fit_beside, record
from supervisord_vllm.core.ledger import room
from supervisord_vllm.core.levers import UTILIZATION, Levers, show
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.remedies import apply
from supervisord_vllm.core.rules import fit_arithmetic
from supervisord_vllm.core.state import Launch, State, StateName
from supervisord_vllm.core.steps import Step, enter, to_gate, to_given_up


def started(policy: Policy, state: State, fact: DaemonStarted) -> Step:
    """The first fact: what the store remembers decides where the run begins; leftovers are ended first."""
    state = replace(
        state,
        since_ns=fact.at_ns,
        next_launch=fact.next_launch,
        next_decision=fact.next_decision,
        target=policy.declared,
        held=fact.held,
    )
    if fact.exhausted is not None:
        return to_given_up(policy, state, fact.at_ns, fact.exhausted)
    good = fact.last_known_good
    if good is None or good == policy.declared:
        return state, (Reap(),)
    moves = tuple(
        Move(name, policy.declared.get(name), value, _way(policy.declared.get(name), value), "restored")
        for name, value in good.items()
        if policy.declared.get(name) != value and (policy.rung(name) or name not in policy.declared)
    )
    if not moves or not policy.act:
        return state, (Reap(),)
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
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
    return state, (recorded, Reap())


def _way(before: object, after: object) -> Literal["up", "down", "switch"]:
    numbers = isinstance(before, int) and isinstance(after, int) and not isinstance(after, bool)
    return "switch" if not numbers else "up" if after > before else "down"  # type: ignore[operator]  # both are ints


def reaped(policy: Policy, state: State, fact: LeftoversReaped) -> Step:
    """Adopting → gating once nothing of ours is left."""
    if fact.survivors:
        names = ", ".join(str(process) for process in fact.survivors)
        text = (
            f"Processes of an earlier launch cannot be ended: {names}. Look at their state with `ps -o pid,stat,wchan`."
        )
        return to_given_up(policy, state, fact.at_ns, text)
    return to_gate(state, fact.at_ns)


def gate_sampled(policy: Policy, state: State, fact: GateSampled) -> Step:
    """Gating → starting when port, lock and memory allow it, at a lower utilization if a neighbour stays."""
    assert state.gate is not None
    now, gate = fact.at_ns, state.gate
    if fact.launch != state.next_launch:
        return replace(state, dropped=state.dropped + 1), ()
    if fact.port_owner is not None or fact.lock_owner is not None:
        if fact.port_owner is not None:
            waits = f"the engine's port is held by {fact.port_owner}"
        else:
            waits = f"the device's lock is held by {fact.lock_owner}"
        taken = fact.port_owner is not None
        gate = replace(gate, samples=(), short_since_ns=None, waits_for=waits, port_taken=taken)
        return replace(state, gate=gate), ()
    samples = (*(s for s in gate.samples if s[0] >= now - policy.gate.window_ns), (now, fact.devices))
    covered = now - min(samples[0][0], gate.samples[0][0] if gate.samples else now) >= policy.gate.window_ns
    gate = replace(gate, samples=samples, waits_for="memory is watched until it holds still", port_taken=False)
    tight = room((devices for _, devices in samples), state.contexts)
    wanted = state.target.number(UTILIZATION)
    if tight is None or wanted is None or tight.short_of(wanted) <= 0:
        gate = replace(gate, short_since_ns=None)
        if not covered and fact.memory_error is None:
            return replace(state, gate=gate), ()
        return _spawn(state, now, state.target, fact.devices)
    holder = telling.largest_holder(fact.devices)
    short = telling.gate_short(tight, wanted, holder)
    since = gate.short_since_ns if gate.short_since_ns is not None else now
    gate = replace(gate, short_since_ns=since, waits_for=short)
    lowered = fit_beside(policy, state, tight, wanted)
    # A shortfall of at most 1 % of the card is not worth waiting for.
    patience = 0 if tight.short_of(wanted) * 100 <= tight.total else policy.gate.patience_ns
    if lowered is None or not covered or now - since < patience:
        return replace(state, gate=gate), ()
    move = Move(UTILIZATION, wanted, lowered, "down", "computed")
    decision = Decision(
        number=state.next_decision,
        at_ns=now,
        launch=state.next_launch,
        kind=Kind.GPU_BUSY_FOREIGN,
        action=Action.NEXT_CONFIG,
        moves=(move,),
        arithmetic=fit_arithmetic(tight),
        acted=policy.act,
        sentence=(
            f"Before launch {state.next_launch}: {short}. So it starts with {telling.moved((move,))}, which fits beside"
            f" it; what is asked for stays {show(UTILIZATION, wanted)} and is tried again by the next launch."
            " `vllm-supervise explain` shows the arithmetic."
        ),
    )
    state, recorded = record(replace(state, gate=gate), decision)
    levers = state.target.with_(**{UTILIZATION: lowered}) if policy.act else state.target
    state, actions = _spawn(state, now, levers, fact.devices)
    return state, (recorded, *actions)


def _spawn(state: State, now_ns: int, levers: Levers, devices: tuple[DeviceMemory, ...]) -> Step:
    """Gating → starting."""
    number = state.next_launch
    after = enter(
        state,
        StateName.STARTING,
        now_ns,
        launch=Launch(number, levers, state.target, now_ns, devices),
        gate=None,
        next_launch=number + 1,
        incident=replace(state.incident, launches=state.incident.launches + 1),
    )
    return after, (Spawn(number, levers),)


def gate_deadline(policy: Policy, state: State, fact: Tick) -> Step:
    """Gating → given-up: what keeps the gate shut has not gone away."""
    assert state.gate is not None
    if fact.at_ns < state.gate.since_ns + policy.gate.deadline_ns:
        return state, ()
    waits = state.gate.waits_for or "nothing could be sampled"
    sentence = (
        f"Launch {state.next_launch} was not started: for {telling.span(policy.gate.deadline_ns)} {waits}. Nothing of"
        " that is ours, so it is not touched. Free it, then start the daemon again;"
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
