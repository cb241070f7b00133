"""Operating: an operator moves a lever by one rung, or makes the daemon forget what went wrong."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Kind
from supervisord_vllm.core.facts import Commanded
from supervisord_vllm.core.judgement import record
from supervisord_vllm.core.levers import EAGER, LEVERS, UTILIZATION, LeverValue, Rung, couple
from supervisord_vllm.core.observations import forgiven
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.rules import DEFAULT_STEP, next_of
from supervisord_vllm.core.state import Incident, Plan, Probe, State, StateName
from supervisord_vllm.core.steps import Step, to_draining


def forget(policy: Policy, state: State) -> State:
    """Every failure, the budget and the last known good are forgotten: the next launch asks for what is declared."""
    living = state.name in (StateName.STARTING, StateName.PROVING, StateName.SERVING, StateName.DRAINING)
    return replace(
        state,
        target=state.target if living else policy.declared,
        incident=Incident(launches=1 if living else 0),
        restarts=(),
        failures=0,
        observations=forgiven(state.observations),
        good=None,
        failed_climbs=0,
        roll_backs={},
        recurring=(),
        planned=(),
        launch=replace(state.launch, proposed=False, told=False, after_ns=0) if state.launch is not None else None,
    )


def step_lever(policy: Policy, state: State, fact: Commanded) -> Step:
    """Serving → draining for one rung of a lever, within its bounds; anything else changes nothing."""
    launch, rung = state.launch, policy.rung(fact.lever)
    if state.name is not StateName.SERVING or launch is None or rung is None or state.held:
        return state, ()
    now = launch.target.get(fact.lever, launch.ledger.count(fact.lever) if fact.lever != UTILIZATION else None)
    after = _after(policy, rung, now, up=fact.direction == "up")
    if after is None or after == now:
        return state, ()
    target = couple(launch.target.with_(**{fact.lever: after}))
    move = Move(fact.lever, now, after, telling.way(now, after), "stepped")
    who = f" ({telling.quoted(fact.reason, 120)})" if fact.reason else ""
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=launch.number,
        kind=Kind.NONE,
        action=Action.NEXT_CONFIG,
        moves=(move,),
        arithmetic="one step of the ladder",
        then=StateName.DRAINING.value,
        sentence=(
            f"Launch {launch.number} is ended at the word of {fact.by or 'an operator'}{who}: {telling.moved((move,))},"
            f" as launch {state.next_launch}; if that fails, back again. `vllm-supervise step {fact.lever}"
            f" {'down' if fact.direction == 'up' else 'up'}` takes it back."
        ),
    )
    state, recorded = record(state, decision)
    plan = Plan(StateName.GATING, target, environment=launch.environment, probe=Probe(launch.target, "operator"))
    state, actions = to_draining(state, fact.at_ns, plan)
    return state, (recorded, *actions)


def why_no_step(policy: Policy, state: State, lever: str, direction: str) -> str:
    """Why `step_lever` changed nothing, for the one who asked."""
    if policy.rung(lever) is None:
        movable = ", ".join(rung.lever for rung in policy.ladder) or "none"
        return f"step: {lever or 'no lever'} is not declared movable; movable are {movable}"
    if state.held:
        return "step: the configuration is held; `vllm-supervise resume` ends that"
    if state.name is not StateName.SERVING:
        return f"step: only a serving engine is stepped, the instance is {state.name.value}"
    return f"step: {lever} is already as far {direction} as its rung goes, or its value is not known"


def _after(policy: Policy, rung: Rung, now: LeverValue | None, *, up: bool) -> LeverValue | None:
    """The value one rung further; ``None`` where the ladder ends."""
    lever, declared = rung.lever, policy.declared.get(rung.lever)
    if lever == EAGER:
        return not up
    if LEVERS[lever].kind in ("str", "weights"):
        if not up:
            return next_of(rung, now)
        place = rung.use.index(now) if now in rung.use else 0
        return rung.use[place - 1] if place > 0 else declared
    if not isinstance(now, int):
        return None
    step, factor = rung.step or (DEFAULT_STEP if lever == UTILIZATION else None), rung.factor or 0.5
    moved = (now + step if up else now - step) if step else int(now / factor if up else now * factor)
    most = rung.max if rung.max is not None else declared if isinstance(declared, int) else now
    return max(rung.min if rung.min is not None else 1, min(int(most), moved))
