"""Climbing: the way back up to what is declared, one planned launch at a time.

Only what changed the service is taken back by itself (length, weights, eager, KV dtype), and a utilization that only a
neighbour had lowered. It waits for `Policy.step_up_ns` of serving, doubled by each step up that failed, and for a
quiet moment or a declared window (`core.occasion`); at most `Policy.planned_per_day` planned restarts a day. Never
above what is declared. A service that is never quiet is said to be so once, with what a person can do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import DeviceMemory, LoadSeen, RoomSeen
from supervisord_vllm.core.judgement import record, restoring
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.ledger import BLOCK, Room, gib, room
from supervisord_vllm.core.levers import EAGER, KV_DTYPE, MODEL_LEN, UTILIZATION, WEIGHTS, Levers, LeverValue, show
from supervisord_vllm.core.occasion import DAY_NS, occasion
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.remedies import pinned
from supervisord_vllm.core.state import (
    Launch,
    Plan,
    Probe,
    State,
    StateName,
    climb_due_ns,
    climb_from_ns,
    degraded,
    recent_plans,
)
from supervisord_vllm.core.steps import Step, to_draining, to_stopping


def load_seen(policy: Policy, state: State, fact: LoadSeen) -> Step:
    """The engine became idle or busy; a draining engine that is idle is stopped."""
    assert state.launch is not None
    launch = replace(state.launch, load="idle" if fact.idle else "busy")
    state = replace(state, launch=launch)
    draining = state.draining
    if state.name is not StateName.DRAINING or draining is None or not fact.idle:
        return state, ()
    return to_stopping(state, fact.at_ns, draining.why, plan=draining.plan)


def beside(devices: tuple[DeviceMemory, ...], state: State) -> Room | None:
    """What would be free for the next launch while this one still lives: its own memory comes back."""
    own = tuple(replace(device, free_bytes=device.free_bytes + device.own_bytes) for device in devices)
    return room((own,), state.contexts)


def room_matters(state: State, devices: tuple[DeviceMemory, ...]) -> bool:
    """Whether a sample beside a serving engine is worth a `RoomSeen`: what a neighbour had taken fits again, or no
    longer."""
    launch = state.launch
    if launch is None or state.name is not StateName.SERVING:
        return False
    wanted, now, tight = launch.target.number(UTILIZATION), launch.levers.number(UTILIZATION), beside(devices, state)
    if wanted is None or now is None or now >= wanted or tight is None:
        return False
    return (tight.fits >= wanted) is not (launch.room is not None and launch.room.fits >= wanted)


def room_seen(policy: Policy, state: State, fact: RoomSeen) -> Step:
    """A neighbour left, or came back."""
    assert state.launch is not None
    launch = replace(state.launch, room=beside(fact.devices, state), proposed=False, after_ns=0)
    return replace(state, launch=launch), ()


def climb(policy: Policy, state: State, now_ns: int) -> Step | None:
    """Serving → draining for a step up; ``None`` where nothing is due."""
    due, launch = climb_due_ns(policy, state), state.launch
    if due is None or now_ns < due or launch is None:
        return None
    target = next((t for t in _targets(policy, state) if _possible(policy, state, t, now_ns)), None)
    if target is None:  # what is known to fail is forgotten with time
        return replace(state, launch=replace(launch, after_ns=now_ns + DAY_NS)), ()
    comes = occasion(policy, state, now_ns)
    if comes.at_ns is None:
        return _awaited(policy, state, launch, target, now_ns)
    if comes.at_ns > now_ns:  # its window was missed
        return replace(state, launch=replace(launch, after_ns=now_ns)), ()
    said = replace(state, launch=replace(launch, proposed=True))
    moves = restoring(launch.target if launch.room is None else launch.levers, target)
    patient = policy.step_up_ns << min(state.failed_climbs, 16)
    again = telling.span(patient * 2)
    decision = Decision(
        number=state.next_decision,
        at_ns=now_ns,
        launch=launch.number,
        kind=Kind.NONE,
        action=Action.NEXT_CONFIG,
        moves=moves,
        arithmetic=_why(state, moves),
        acted=policy.act,
        then=StateName.DRAINING.value if policy.act else state.name.value,
        sentence=(
            f"Launch {launch.number} has served for {telling.span(now_ns - (launch.serving_ns or now_ns))} below what"
            f" is declared and {'its window is open' if policy.windows else 'is idle'} now."
            f" {'Next' if policy.act else 'It would be time for'}: a step up,"
            f" {telling.moved(moves)} ({_why(state, moves)}), as launch {state.next_launch}; if that fails, back again"
            f" and the next try after {again}. `vllm-supervise hold` would keep it here."
        ),
    )
    state, recorded = record(said, decision)
    if not policy.act:
        return state, (recorded,)
    plan = Plan(StateName.GATING, target, environment=launch.environment, probe=Probe(launch.target, "step-up"))
    state, actions = to_draining(replace(state, planned=(*recent_plans(state, now_ns), now_ns)), now_ns, plan)
    return state, (recorded, *actions)


def _awaited(policy: Policy, state: State, launch: Launch, target: Levers, now_ns: int) -> Step:
    """A step up has been due for a day and no quiet moment came: said once."""
    moves = restoring(launch.target if launch.room is None else launch.levers, target)
    lever = moves[0].lever.replace("_", "-")
    since = telling.span(now_ns - climb_from_ns(policy, state, launch.serving_ns or now_ns))
    decision = Decision(
        number=state.next_decision,
        at_ns=now_ns,
        launch=launch.number,
        kind=Kind.NONE,
        action=Action.OBSERVE,
        skipped=(f"{telling.moved(moves)}: no quiet moment",),
        arithmetic=_why(state, moves),
        then=state.name.value,
        sentence=(
            f"Launch {launch.number} serves below what is declared and a step up, {telling.moved(moves)}, has been due"
            f" for {since}, but there is no quiet moment: two pages of its metrics in a row without a request. Nothing"
            ' is done. A window in which it may drain helps, such as `[step-up] window = "02:00-05:00"`, or'
            f" `vllm-supervise step {lever} up` now."
        ),
    )
    state, recorded = record(replace(state, launch=replace(launch, awaited=True)), decision)
    return state, (recorded,)


def _targets(policy: Policy, state: State) -> Iterator[Levers]:
    """Vectors to try, the best first: everything declared, what changed the service, one of it, half of the length."""
    launch = state.launch
    assert launch is not None
    names = degraded(policy, launch)
    meaning = [name for name in names if name != UTILIZATION]
    if not meaning:
        yield launch.target
        return
    raised = _raised(policy, launch.target)
    everything = {n: v for n, v in policy.declared.items() if policy.rung(n) and n not in raised}
    yield launch.target.with_(**everything, **_switches(policy, meaning))
    back = {**{name: v for name, v in policy.declared.items() if name in meaning}, **_switches(policy, meaning)}
    yield launch.target.with_(**back)
    for name in meaning:
        yield launch.target.with_(**{name: back[name]})
    now, declared = launch.target.number(MODEL_LEN), policy.declared.number(MODEL_LEN)
    if MODEL_LEN in meaning and now is not None and declared is not None:
        half = (now + declared) // 2 // BLOCK * BLOCK
        if now < half < declared:
            yield launch.target.with_(**{MODEL_LEN: half})


def _switches(policy: Policy, names: list[str]) -> dict[str, LeverValue]:
    """Switches that are not declared were off."""
    return {name: False for name in names if name == EAGER and EAGER not in policy.declared}


def _raised(policy: Policy, target: Levers) -> set[str]:
    """Levers that stand above what is declared, for a KV cache or against pressure: those stay."""
    return {
        name
        for name, value in policy.declared.items()
        if isinstance(value, int) and (now := target.number(name)) is not None and now > value
    }


def _possible(policy: Policy, state: State, target: Levers, now_ns: int) -> bool:
    launch = state.launch
    assert launch is not None
    if target == launch.levers:
        return False
    pool, length = launch.ledger.count("kv_tokens"), target.number(MODEL_LEN)
    same = all(target.get(name) == launch.levers.get(name) for name in (UTILIZATION, WEIGHTS, KV_DTYPE))
    if same and pool is not None and length is not None and length > pool:
        return False  # the KV cache that is there refutes it
    wanted, tight = target.number(UTILIZATION), launch.room
    if wanted is not None and tight is not None and wanted > tight.fits:
        return False
    return known(policy, state, now_ns).against(pinned(target, launch.ledger)) is None


def _why(state: State, moves: tuple[Move, ...]) -> str:
    tight = state.launch.room if state.launch is not None else None
    if tight is not None and any(move.lever == UTILIZATION for move in moves):
        return f"{gib(tight.free)} would be free on {tight.name}, {show(UTILIZATION, tight.fits)} fits"
    return "what is declared; nothing observed forbids it"
