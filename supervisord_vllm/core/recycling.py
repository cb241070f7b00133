"""Recycling: a planned restart of the same configuration before memory that creeps has used up what is free.

Only where `[allow] planned-recycle` says so, on an occasion (`core.occasion`), once what is free would be gone within
`HORIZON_NS`. Where it is not permitted, or no occasion has come by then, that is said once, with its numbers.
"""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.creep import Growth
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Evidence, Kind
from supervisord_vllm.core.facts import CreepSeen
from supervisord_vllm.core.judgement import record
from supervisord_vllm.core.ledger import gib
from supervisord_vllm.core.occasion import occasion
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import Launch, Plan, State, StateName, creep_due_ns, recent_plans, recycles
from supervisord_vllm.core.steps import Step, to_draining


def creep_seen(policy: Policy, state: State, fact: CreepSeen) -> Step:
    """Own memory of the serving engine creeps, at another rate, or no longer."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, growth=fact.growth)), ()


def recycle(policy: Policy, state: State, now_ns: int) -> Step | None:
    """Serving → draining for the same configuration, or a word that it would be time; ``None`` where nothing is due."""
    due, launch = creep_due_ns(policy, state), state.launch
    if due is None or now_ns < due or launch is None or launch.growth is None:
        return None
    comes = occasion(policy, state, now_ns) if recycles(policy) else None
    if comes is not None and comes.at_ns is not None and comes.at_ns <= now_ns:
        return _begin(state, now_ns, launch, launch.growth)
    if launch.growth_told:  # its window was missed
        return replace(state, launch=replace(launch, recycle_after_ns=now_ns)), ()
    if comes is not None:
        step = f"A restart with the same configuration follows {comes.waits_for}; `vllm-supervise restart` does it now."
    else:
        step = (
            "`vllm-supervise restart` gives it back; `[allow] planned-recycle = true` would do that by itself, once no"
            " request is left."
        )
    told = replace(state, launch=replace(launch, growth_told=True))
    decision = _decision(state, now_ns, launch, launch.growth, Action.OBSERVE, StateName.SERVING, step)
    state, recorded = record(told, decision)
    return state, (recorded,)


def _begin(state: State, now_ns: int, launch: Launch, growth: Growth) -> Step:
    step = (
        f"Next: the same configuration as launch {state.next_launch}, once no request is left. `vllm-supervise hold`"
        " would keep this launch."
    )
    decision = _decision(state, now_ns, launch, growth, Action.PLANNED_RECYCLE, StateName.DRAINING, step)
    state, recorded = record(replace(state, planned=(*recent_plans(state, now_ns), now_ns)), decision)
    plan = Plan(StateName.GATING, launch.target, environment=launch.environment)
    state, actions = to_draining(state, now_ns, plan)
    return state, (recorded, *actions)


def _decision(
    state: State, now_ns: int, launch: Launch, growth: Growth, action: Action, then: StateName, step: str
) -> Decision:
    left = telling.span(max(0, growth.full_ns - now_ns))
    seen = f"{growth}, seen over {telling.span(growth.span_ns)}"
    return Decision(
        number=state.next_decision,
        at_ns=now_ns,
        launch=launch.number,
        kind=Kind.VRAM_CREEP,
        action=action,
        target=growth.device,
        evidence=(Evidence(0, "supervisor", f"own memory of {growth.device} grows {seen}"),),
        arithmetic=(
            f"{gib(growth.free_bytes)} were free and vLLM wants 150 MiB of them left; at {gib(growth.per_hour)}/h that"
            f" lasts {left} from now"
        ),
        then=then.value,
        sentence=(
            f"Launch {launch.number} takes more and more memory of {growth.device}: {seen}; it holds"
            f" {gib(growth.own_bytes)}, {gib(growth.free_bytes)} were free, which is used up in {left}. {step}"
        ),
    )
