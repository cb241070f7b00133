"""The judgement of a failed launch: from a verdict and what was sampled to a decision and where it leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Decide
from supervisord_vllm.core.case import Bracket, Case
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import DeviceMemory, Diagnosed
from supervisord_vllm.core.ledger import GIB, MIB, Ledger, Room, room
from supervisord_vllm.core.levers import UTILIZATION, show
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.remedies import FAILED_HIGH, FAILED_LOW, Choice, apply, choose, pinned
from supervisord_vllm.core.state import Ending, Launch, Plan, State, StateName, backoff_ns, recent_restarts

GROWN = 512 * MIB
"""A neighbour that took less than this since the gate is not blamed."""
STILL = 256 * MIB
"""Two samples of free memory that differ by less show the same situation."""


_STORY = "`vllm-supervise history` tells the whole story; `vllm-supervise run --reset` begins afresh."


def record(state: State, decision: Decision) -> tuple[State, Decide]:
    """The state that remembers a decision, and the action that records it."""
    return replace(state, next_decision=state.next_decision + 1, last_decision=decision), Decide(decision)


def fit_beside(policy: Policy, state: State, tight: Room, wanted: int) -> int | None:
    """The utilization that fits beside a neighbour, where the policy permits it and it is worth trying."""
    rung = policy.rung(UTILIZATION)
    if rung is None or state.held:
        return None
    low = max(rung.min if rung.min is not None else 1, state.incident.bracket.low + 1)
    return tight.fits if low <= tight.fits < wanted else None


def judge(policy: Policy, state: State, fact: Diagnosed) -> tuple[State, Decide, Plan]:
    """The decision about a failed launch, the action that records it, and where it leads."""
    launch, ending, now = state.launch, state.ending, fact.at_ns
    assert launch is not None
    assert ending is not None
    diagnosis = _named(fact.diagnosis, ending)
    signatures = (*state.incident.signatures, diagnosis.signature or diagnosis.kind.value)
    state = replace(state, contexts=_learnt(state, launch, fact))
    case = Case(
        diagnosis=diagnosis,
        launch=launch.number,
        levers=launch.levers,
        target=launch.target,
        ledger=launch.ledger,
        room=room((fact.after or fact.devices,), state.contexts),
        grown=_grown(launch.gate_devices, fact.devices, fact.after),
        holder=telling.largest_holder(fact.after, launch.gate_devices)
        or telling.largest_holder(fact.devices, launch.gate_devices),
        host_memory=any(d.device == "host-memory" for d in (fact.devices or launch.gate_devices)),
        repeated=signatures.count(signatures[-1]),
        bracket=state.incident.bracket,
        barred=state.incident.barred,
    )
    case, note = _own_step_refused(state, case)
    incident = replace(state.incident, signatures=signatures, bracket=_bracket(case), barred=case.barred, cause=case)
    choice = choose(policy, replace(case, bracket=incident.bracket))
    step, plan, choice = _plan(policy, state, case, choice, now)
    happened = telling.happened(
        case if not note else replace(case, diagnosis=diagnosis), launch.exited, ending.suspicion
    )
    decision = Decision(
        number=state.next_decision,
        at_ns=now,
        launch=launch.number,
        kind=diagnosis.kind,
        action=choice.action,
        sentence=f"Launch {launch.number} {happened}. {note}{step}",
        moves=choice.moves,
        target=choice.target,
        evidence=diagnosis.evidence,
        arithmetic=choice.arithmetic,
        skipped=choice.skipped,
        acted=policy.act,
    )
    same = choice.action in (Action.RESTART_SAME, Action.KILL_TREE_RESTART)
    if any(move.lever != UTILIZATION for move in choice.moves):
        incident = replace(incident, bracket=Bracket())  # what failed, failed beside other levers
    state = replace(
        state,
        incident=replace(incident, moved=choice.moves),
        restarts=(*recent_restarts(policy, state, now), now) if same else state.restarts,
        failures=state.failures + 1 if same else state.failures,
    )
    state, recorded = record(state, decision)
    if not policy.act and plan.to is not StateName.GIVEN_UP:
        text = f"{decision.sentence} Not done, since act = false: the engine stays down."
        plan = Plan(StateName.GIVEN_UP, state.target, text=text)
    elif plan.to is StateName.GIVEN_UP:
        plan = replace(plan, text=decision.sentence)
    return state, recorded, plan


def _named(diagnosis: Diagnosis, ending: Ending) -> Diagnosis:
    """The verdict of the output; where it found nothing, what the supervisor saw itself."""
    if ending.suspected is None or diagnosis.kind not in (Kind.NONE, Kind.UNKNOWN, Kind.ENGINE_DEAD):
        return diagnosis
    seen = Evidence(0, "supervisor", ending.suspicion)
    return replace(
        diagnosis, kind=ending.suspected, evidence=(seen, *diagnosis.evidence), signature=ending.suspected.value
    )


def _grown(before: tuple[DeviceMemory, ...], now: tuple[DeviceMemory, ...], after: tuple[DeviceMemory, ...]) -> int:
    """Bytes that processes which are not ours took since the gate, on the device where they took most.

    ``after`` is as unclouded as ``before``: no engine is there. ``now`` also shows a neighbour that came and went, but
    only where memory could be attributed to the engine (NVML names no pids of another pid namespace).
    """
    earlier = {d.device: d.foreign_bytes for d in before}
    seen = (*after, *(d for d in now if d.own_bytes))
    grown = max((d.foreign_bytes - earlier[d.device] for d in seen if d.device in earlier), default=0)
    return grown if grown >= GROWN else 0


def _learnt(state: State, launch: Launch, fact: Diagnosed) -> Mapping[str, int]:
    """What the engine takes for itself before it looks at free memory, learnt from a refusal.

    Only where memory stands still (as much free after the engine as before it) does the difference between what was
    sampled and what vLLM printed belong to the engine.
    """
    printed = Ledger(fact.diagnosis.numbers).size("free_gib")
    if fact.diagnosis.kind is not Kind.GPU_BUSY_FOREIGN or printed is None or len(fact.after) != 1:
        return state.contexts
    after = fact.after[0]
    before = next((d for d in launch.gate_devices if d.device == after.device), None)
    if before is None or abs(before.free_bytes - after.free_bytes) > STILL:
        return state.contexts
    context = before.free_bytes - printed
    if not after.context_bytes < context < 4 * GIB:
        return state.contexts
    return {**state.contexts, after.device: max(context, state.contexts.get(after.device, 0))}


def _bracket(case: Case) -> Bracket:
    value = case.value(UTILIZATION)
    if not isinstance(value, int) or case.grown:
        return case.bracket
    if case.diagnosis.kind in FAILED_LOW:
        return replace(case.bracket, low=max(case.bracket.low, value))
    if case.diagnosis.kind in FAILED_HIGH:
        return replace(case.bracket, high=min(case.bracket.high, value))
    return case.bracket


def _own_step_refused(state: State, case: Case) -> tuple[Case, str]:
    """A value of our own last step that vLLM refuses bars that lever, and the failure before it is judged again."""
    before, moved = state.incident.cause, state.incident.moved
    if case.diagnosis.kind is not Kind.BAD_CONFIG or before is None or not moved:
        return case, ""
    levers = ", ".join(move.lever for move in moved)
    again = replace(
        before, launch=case.launch, room=case.room, barred=case.barred | {move.lever for move in moved}, grown=0
    )
    return again, f"That value came from our own last step ({levers}), so this rung is passed over. "


def _plan(policy: Policy, state: State, case: Case, choice: Choice, now: int) -> tuple[str, Plan, Choice]:
    """Where the choice leads, in words and as data. Held changes become same-again; budgets may turn it into a stop."""
    if choice.moves and state.held:
        skipped = (*choice.skipped, f"held: {telling.moved(choice.moves)} would be next")
        choice = Choice(Action.RESTART_SAME, skipped=skipped)
    target = pinned(apply(case.target, choice.moves), case.ledger) if choice.moves else case.target
    if choice.stops:
        advice = case.diagnosis.advice.strip()
        reasons = f" Passed over: {'; '.join(choice.skipped)}." if choice.skipped else ""
        text = (
            f"Nothing automatic is right.{reasons}{' ' + advice if advice else ''}"
            " `vllm-supervise explain` shows the evidence; after the fix, start the daemon again."
        )
        return text, Plan(StateName.GIVEN_UP, target), choice
    if state.incident.launches >= policy.max_launches:
        stop = replace(choice, action=Action.STOP_EXPLAIN, moves=())
        text = (
            f"That was launch {state.incident.launches} of at most {policy.max_launches} without a proof"
            f" (max-launches), so it stops here. {_STORY}"
        )
        return text, Plan(StateName.GIVEN_UP, target, exhausted_until_ns=now + policy.window_ns), stop
    if choice.moves:
        text = (
            f"Next: {telling.moved(choice.moves)} ({choice.arithmetic}), as launch {state.next_launch}."
            " `vllm-supervise hold` would keep the configuration as it is."
        )
        return text, Plan(StateName.GATING, target), choice
    if choice.action in (Action.WAIT_VRAM, Action.WAIT_PORT, Action.REAP):
        return _waiting(policy, state, case, choice), Plan(StateName.GATING, target), choice
    recent = recent_restarts(policy, state, now)
    if len(recent) >= policy.budget:
        stop = replace(choice, action=Action.STOP_EXPLAIN)
        text = (
            f"All {policy.budget} same-again restarts within {telling.span(policy.window_ns)} are used, so it stops"
            f" here. {_STORY}"
        )
        until = (recent[0] if recent else now) + policy.window_ns
        return text, Plan(StateName.GIVEN_UP, target, exhausted_until_ns=until), stop
    delay = backoff_ns(policy, state.failures, case.launch)
    held = " (held)" if state.held else ""
    text = (
        f"The same configuration starts again{held} in {telling.span(delay)} as launch {state.next_launch}, restart"
        f" {len(recent) + 1} of {policy.budget} within {telling.span(policy.window_ns)}."
        " `vllm-supervise stop` keeps it down."
    )
    return text, Plan(StateName.BACKING_OFF, case.target, delay), choice


def _waiting(policy: Policy, state: State, case: Case, choice: Choice) -> str:
    if choice.action is Action.WAIT_PORT:
        return (
            f"Waiting up to {telling.span(policy.gate.deadline_ns)} for the port, then it stops."
            " `vllm-supervise preflight` names its owner."
        )
    wanted = case.target.number(UTILIZATION)
    deadline = telling.span(policy.gate.deadline_ns)
    lowered = None if case.room is None or wanted is None else fit_beside(policy, state, case.room, wanted)
    if lowered is None or wanted is None:
        why = "since it is held" if state.held else "since no lower utilization that fits is permitted"
        return (
            f"Waiting up to {deadline} for memory, then it stops, {why}. `vllm-supervise preflight` shows who holds it."
        )
    return (
        f"Waiting up to {telling.span(policy.gate.patience_ns)} for memory, then utilization"
        f" {show(UTILIZATION, wanted)} → {show(UTILIZATION, lowered)}, which fits beside it."
        " `vllm-supervise hold` would keep it waiting."
    )
