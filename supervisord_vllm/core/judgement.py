"""The judgement of a failed launch: from a verdict and what was sampled to a decision and where it leads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Decide
from supervisord_vllm.core.case import Case
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import DeviceMemory, Diagnosed
from supervisord_vllm.core.feasibility import whole_story
from supervisord_vllm.core.knowledge import free_for, known, setting_of
from supervisord_vllm.core.ledger import GIB, MIB, Ledger, Room, room
from supervisord_vllm.core.levers import UTILIZATION, Levers, show
from supervisord_vllm.core.observations import Observation, noted
from supervisord_vllm.core.outside import witnessed
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.proof import failed_in
from supervisord_vllm.core.remedies import FAILED_HIGH, FAILED_LOW, KEPT_VARIABLES, TABLE, Choice, apply, choose, pinned
from supervisord_vllm.core.soaking import SIGNATURE
from supervisord_vllm.core.state import Ending, Launch, Plan, State, StateName, backoff_ns, recent_restarts

GROWN = 512 * MIB
"""A neighbour that took less than this since the gate is not blamed."""
SAME_GIB = 0.002
"""Sizes that torch prints this close are the same: two decimals of a MiB."""
STILL = 256 * MIB
"""Two samples of free memory that differ by less show the same situation."""


_STORY = "`vllm-supervise history` tells the whole story; `vllm-supervise run --reset` begins afresh."


def record(state: State, decision: Decision) -> tuple[State, Decide]:
    """The state that remembers a decision, and the action that records it."""
    return replace(state, next_decision=state.next_decision + 1, last_decision=decision), Decide(decision)


def fit_beside(policy: Policy, state: State, tight: Room, wanted: int, now_ns: int) -> int | None:
    """The utilization that fits beside a neighbour, where the policy permits it and it is worth trying."""
    rung = policy.rung(UTILIZATION)
    if rung is None or state.held:
        return None
    low = rung.min if rung.min is not None else 1
    tight = tight.less(beyond(state))
    if not low <= tight.fits < wanted:
        return None
    vector = state.target.with_(**{UTILIZATION: tight.fits})
    if state.launch is not None:
        vector = pinned(vector, state.launch.ledger)
    return None if known(policy, state, now_ns).against(vector) else tight.fits


def beyond(state: State) -> int:
    """Bytes that the next launch takes beyond its request, as far as a launch has shown it."""
    return 0 if state.target.eager else state.graphs


def patience_ns(policy: Policy, state: State, tight: Room, wanted: int) -> int:
    """How long a neighbour is waited for where less would fit: not at all for at most 1 % of the card, nor where it was
    waited for in this incident already, in vain."""
    last = state.launch
    if last is not None and state.incident.launches > 0 and not last.proven:
        before, asked = last.levers.number(UTILIZATION), last.target.number(UTILIZATION)
        if before is not None and asked is not None and before < asked:
            return 0
    return 0 if _little(tight, wanted) else policy.gate.patience_ns


def _little(tight: Room, wanted: int) -> bool:
    """Whether at most 1 % of the card is missing."""
    return tight.short_of(wanted) * 100 <= tight.total


def judge(policy: Policy, state: State, fact: Diagnosed) -> tuple[State, Decide, Plan]:
    """The decision about a failed launch, the action that records it, and where it leads."""
    launch, ending, now = state.launch, state.ending, fact.at_ns
    assert launch is not None
    assert ending is not None
    diagnosis = witnessed(_named(fact.diagnosis, ending), launch)
    signatures = (*state.incident.signatures, diagnosis.signature or diagnosis.kind.value)
    state = replace(state, contexts=_learnt(state, launch, fact))
    roomy = room((fact.after or fact.devices,), state.contexts)
    case = Case(
        diagnosis=diagnosis,
        launch=launch.number,
        levers=launch.levers,
        target=launch.target,
        ledger=launch.ledger,
        room=roomy.less(beyond(state)) if roomy is not None else None,
        grown=_grown(launch.gate_devices, fact.devices, fact.after),
        holder=telling.largest_holder(fact.after, launch.gate_devices)
        or telling.largest_holder(fact.devices, launch.gate_devices),
        host_memory=any(d.device == "host-memory" for d in (fact.devices or launch.gate_devices)),
        repeated=signatures.count(signatures[-1]),
        known=known(policy, state, now),
        barred=state.incident.barred,
        during_start=launch.healthy_ns is None,
        environment=launch.environment,
    )
    case, note = _own_step_refused(state, case)
    if not note:
        case, note = _step_without_effect(state, case)
    state = replace(
        state, observations=_observed(state, launch, case, now), recurring=_recurring(policy, state, case, now)
    )
    incident = replace(state.incident, signatures=signatures, barred=case.barred, cause=case)
    case = replace(case, known=known(policy, state, now))
    back = _roll_back(launch, case)
    choice = choose(policy, case) if back is None else back
    step, plan, choice = _plan(policy, state, case, choice, now)
    if launch.fingerprint != policy.fingerprint:
        back, choice = None, Choice(Action.RESTART_SAME)
        plan = Plan(StateName.GATING, state.target)
        step = (
            f"The policy was edited while it ran, so launch {state.next_launch} starts as the policy says now."
            " `vllm-supervise check` shows what that is."
        )
    if back is not None and launch.probe is not None and choice is back:
        state = _climb_failed(state, launch)
    elif launch.probe is not None and not launch.proven and plan.target == launch.target:
        plan = replace(plan, probe=launch.probe)
    happened = telling.happened(
        case if not note else replace(case, diagnosis=diagnosis), launch.exited, ending.suspicion
    )
    decision = Decision(
        number=state.next_decision,
        at_ns=now,
        launch=launch.number,
        kind=diagnosis.kind,
        action=choice.action,
        sentence=f"Launch {launch.number} {happened}. {failed_in(policy, launch, ending.since_ns)}{note}{step}",
        moves=choice.moves,
        target=choice.target,
        evidence=diagnosis.evidence,
        arithmetic=choice.arithmetic,
        skipped=choice.skipped,
        acted=policy.act,
        then=plan.to.value,
        then_ns=plan.delay_ns,
    )
    same = choice.action in (Action.RESTART_SAME, Action.KILL_TREE_RESTART)
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
        state = replace(state, restarts=recent_restarts(policy, state, now))
    elif plan.to is StateName.GIVEN_UP:
        plan = replace(plan, text=decision.sentence)
    return state, recorded, plan


def _named(diagnosis: Diagnosis, ending: Ending) -> Diagnosis:
    """The verdict of the output; where it found nothing, what the supervisor saw itself."""
    if ending.suspected is None or diagnosis.kind not in (Kind.NONE, Kind.UNKNOWN, Kind.ENGINE_DEAD):
        return diagnosis
    seen = Evidence(0, "supervisor", ending.suspicion)
    return replace(
        diagnosis,
        kind=ending.suspected,
        evidence=(seen, *diagnosis.evidence),
        numbers={**diagnosis.numbers, **ending.numbers},
        signature=SIGNATURE if ending.numbers else ending.suspected.value,
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


def _observed(state: State, launch: Launch, case: Case, now: int) -> tuple[Observation, ...]:
    """What the failure says about its lever vector; nothing where the cause lies outside the configuration."""
    kind = case.diagnosis.kind
    if kind not in FAILED_HIGH | FAILED_LOW or TABLE[kind].external or case.grown or case.races or case.warms:
        return state.observations
    seen = Observation(
        pinned(case.levers, case.ledger),
        "failed-low" if kind in FAILED_LOW else "failed-high",
        kind,
        state.wall_s(now),
        cold=kind in FAILED_LOW and bool(case.numbers.numbers.get("compile_cold_s")),
        setting=setting_of(launch),
        free=free_for(state),
    )
    return noted(state.observations, seen)


def _recurring(policy: Policy, state: State, case: Case, now: int) -> tuple[tuple[str, int], ...]:
    """The failures of the window by signature, across proofs."""
    signature = case.diagnosis.signature or case.diagnosis.kind.value
    return (*(seen for seen in state.recurring if seen[1] > now - policy.window_ns), (signature, now))


def _roll_back(launch: Launch, case: Case) -> Choice | None:
    """A planned launch that fails by its own configuration goes back to what was proven before it."""
    probe, kind = launch.probe, case.diagnosis.kind
    blamed = case.grown and kind in FAILED_HIGH | {Kind.KV_NO_BLOCKS}  # as in `choose`: the neighbour's doing
    if probe is None or launch.proven or TABLE[kind].external or blamed or probe.back == launch.target:
        return None
    moves = restoring(launch.target, probe.back)
    return Choice(Action.NEXT_CONFIG, moves, "the last known good") if moves else None


def restoring(now: Levers, to: Levers) -> tuple[Move, ...]:
    """The moves from one vector to another one that was there before."""
    return tuple(
        Move(name, now.get(name), value, telling.way(now.get(name), value), "restored")
        for name, value in to.items()
        if now.get(name) != value
    )


def _climb_failed(state: State, launch: Launch) -> State:
    assert launch.probe is not None
    if launch.probe.why == "step-up":
        return replace(state, failed_climbs=state.failed_climbs + 1)
    verdict = launch.probe.verdict
    if verdict is None:
        return state
    return replace(state, roll_backs={**state.roll_backs, verdict: state.roll_backs.get(verdict, 0) + 1})


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


def _step_without_effect(state: State, case: Case) -> tuple[Case, str]:
    """A profile run that fails with the very same numbers as before our own step was not helped by it: that lever is
    passed over from now on. Utilization never enters a profile run, and the other levers may not be its peak."""
    before, moved = state.incident.cause, state.incident.moved
    if case.diagnosis.kind is not Kind.OOM_PROFILE or before is None or before.diagnosis.kind is not Kind.OOM_PROFILE:
        return case, ""
    useless = {move.lever for move in moved if move.direction == "down"}
    for name in ("tried_gib", "free_gib"):
        mine, theirs = case.diagnosis.number(name), before.diagnosis.number(name)
        if mine is None or theirs is None or abs(mine - theirs) > SAME_GIB:
            return case, ""
    if not useless:
        return case, ""
    levers = ", ".join(sorted(useless))
    return replace(case, barred=case.barred | useless), f"The step of {levers} changed nothing of it. "


def _plan(policy: Policy, state: State, case: Case, choice: Choice, now: int) -> tuple[str, Plan, Choice]:
    """Where the choice leads, in words and as data. Held changes become same-again; budgets may turn it into a stop."""
    if choice.moves and state.held:
        skipped = (*choice.skipped, f"held: {telling.moved(choice.moves)} would be next")
        choice = Choice(Action.RESTART_SAME, skipped=skipped)
    if choice.action is Action.WAIT_VRAM and case.room is None:
        # Memory cannot be read, so there is nothing to watch at the gate: time and the budget have to do.
        choice = replace(choice, action=Action.RESTART_SAME)
    target = pinned(apply(case.target, _wished(case, choice.moves)), case.ledger) if choice.moves else case.target
    kept = tuple(pair for pair in state.launch.environment if pair[0] in KEPT_VARIABLES) if state.launch else ()
    environment = tuple(sorted({**dict(kept), **dict(choice.environment)}.items()))
    if choice.stops:
        advice = case.diagnosis.advice.strip()
        reasons = f" Passed over: {'; '.join(choice.skipped)}." if choice.skipped else ""
        text = (
            f"{whole_story(policy, case)}{reasons}{' ' + advice if advice else ''}"
            f" `vllm-supervise explain` shows the evidence; after the fix, {telling.begin_again(policy)}."
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
        return text, Plan(StateName.GATING, target, environment=environment), choice
    if choice.action in (Action.WAIT_VRAM, Action.WAIT_PORT, Action.REAP):
        return (
            _waiting(policy, state, case, choice, now),
            Plan(StateName.GATING, target, environment=environment),
            choice,
        )
    recent = recent_restarts(policy, state, now)
    if len(recent) >= policy.budget:
        stop = replace(choice, action=Action.STOP_EXPLAIN)
        text = (
            f"All {policy.budget} same-again restarts within {telling.span(policy.window_ns)} are used, so it stops"
            f" here. {_STORY}"
        )
        until = (recent[0] if recent else now) + policy.window_ns
        return text, Plan(StateName.GIVEN_UP, target, exhausted_until_ns=until), stop
    signature = case.diagnosis.signature or case.diagnosis.kind.value
    again = sum(1 for seen, _ in state.recurring if seen == signature)
    proofs = again > case.repeated and again >= 3
    delay = backoff_ns(policy, max(state.failures, again - 1) if proofs else state.failures, case.launch)
    held = " (held)" if state.held else ""
    text = (
        f"The same configuration starts again{held} in {telling.span(delay)} as launch {state.next_launch}, restart"
        f" {len(recent) + 1} of {policy.budget} within {telling.span(policy.window_ns)}."
        " `vllm-supervise stop` keeps it down."
    )
    if environment:
        text = f"{text} It gets {', '.join(f'{name}={value}' for name, value in environment)}."
    if proofs:
        span = telling.span(policy.window_ns)
        text = f"{text} That was failure number {again} of this kind within {span}: a restart does not cure it."
    return text, Plan(StateName.BACKING_OFF, case.target, delay, environment=environment), choice


def _wished(case: Case, moves: tuple[Move, ...]) -> tuple[Move, ...]:
    """The moves that change what is asked for: a raise from where a neighbour pushed it to is no lower wish."""
    asked = case.target.number(UTILIZATION)
    return tuple(
        move
        for move in moves
        if not (move.lever == UTILIZATION and move.direction == "up" and asked is not None and move.after <= asked)  # type: ignore[operator]
    )


def _waiting(policy: Policy, state: State, case: Case, choice: Choice, now: int) -> str:
    if choice.action is Action.WAIT_PORT:
        return (
            f"Waiting up to {telling.span(policy.gate.deadline_ns)} for the port, then it stops."
            " `vllm-supervise preflight` names its owner."
        )
    wanted = case.value(UTILIZATION) if UTILIZATION not in case.target else case.target.number(UTILIZATION)
    wanted = wanted if isinstance(wanted, int) else None
    deadline = telling.span(policy.gate.deadline_ns)
    raw = None if case.room is None else case.room.less(-beyond(state))
    lowered = None if raw is None or wanted is None else fit_beside(policy, state, raw, wanted, now)
    if lowered is None or wanted is None:
        why = "since it is held" if state.held else "since no lower utilization that fits is permitted"
        return (
            f"Waiting up to {deadline} for memory, then it stops, {why}. `vllm-supervise preflight` shows who holds it."
        )
    patience = 0 if case.room is None else patience_ns(policy, state, case.room, wanted)
    if patience:
        waits = f"Waiting up to {telling.span(patience)} for memory, then"
    elif case.room is None or _little(case.room, wanted):
        waits = "Too little is missing to wait:"
    else:
        waits = "It was waited for already, in vain:"
    return (
        f"{waits} utilization {show(UTILIZATION, wanted)} → {show(UTILIZATION, lowered)}, which fits beside it."
        " `vllm-supervise hold` would keep it waiting."
    )
