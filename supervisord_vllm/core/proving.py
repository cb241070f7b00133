"""While a launch is proven: from the canary's answer over burst and soak to serving, or to its end."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import proof
from supervisord_vllm.core.actions import Action, Proven, Weigh
from supervisord_vllm.core.diagnosis import Kind
from supervisord_vllm.core.facts import BurstDone, SoakDone
from supervisord_vllm.core.knowledge import setting_of
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import UTILIZATION
from supervisord_vllm.core.observations import Observation, noted
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.remedies import pinned
from supervisord_vllm.core.soaking import Excess, excess
from supervisord_vllm.core.state import Incident, Launch, State, StateName
from supervisord_vllm.core.steps import Step, enter, to_stopping


def after_canary(policy: Policy, launch: Launch) -> tuple[Action, ...]:
    """What follows the first answered canary: the burst, if there is one."""
    burst = proof.burst_of(policy, launch)
    return () if burst is None else (burst,)


def burst_done(policy: Policy, state: State, fact: BurstDone) -> Step:
    """The soak begins, or the engine is given a moment to exit by itself: then its own last words name the cause."""
    assert state.launch is not None
    if proof.part(policy, state.launch) != "burst" or state.launch.burst is not None:
        return state, ()
    return replace(state, launch=replace(state.launch, burst=fact)), ()


def soak_done(policy: Policy, state: State, fact: SoakDone) -> Step:
    """What memory did is known: proven, or too large for the card."""
    launch = state.launch
    assert launch is not None
    if not launch.weighed or launch.soak is not None:
        return state, ()
    state = replace(state, launch=replace(launch, soak=fact))
    return due(policy, state, fact.at_ns) or (state, ())


def due(policy: Policy, state: State, now_ns: int) -> Step | None:
    """Proving → serving at the end of the soak, → stopping where burst or soak failed; ``None``: nothing is due."""
    launch = state.launch
    assert launch is not None
    wake = proof.next_wake_ns(policy, launch)
    if wake is None or now_ns < wake:
        return None
    if launch.burst is not None and not launch.burst.ok:
        kind = Kind.ENGINE_HUNG if launch.burst.silent else Kind.ENGINE_BUG
        return to_stopping(state, now_ns, "failure", kind, f"in its burst {proof.burst_words(launch)}")
    if policy.proof is not None and policy.proof.memory and not launch.weighed:
        return replace(state, launch=replace(launch, weighed=True)), (Weigh(launch.number),)
    found = too_large(policy, state)
    if found is not None and found.fails and _curable(policy, state):
        return _too_large(state, now_ns, found)
    return _proven(policy, state, now_ns)


def too_large(policy: Policy, state: State) -> Excess | None:
    """What the memory of the present launch's soak says against it, if anything."""
    launch = state.launch
    if launch is None or launch.soak is None:
        return None
    graphs = 0 if launch.levers.eager else state.graphs
    return excess(launch.soak.devices, _bound(policy, launch), graphs, state.contexts)


def _bound(policy: Policy, launch: Launch) -> int | None:
    """The utilization that bounds the engine, per mille: what was passed, else what vLLM printed."""
    if policy.proof is None or not policy.proof.bounded:
        return None
    asked = launch.levers.number(UTILIZATION)
    printed = launch.ledger.numbers.get("util")
    return asked if asked is not None else round(printed * 1000) if isinstance(printed, (int, float)) else None


def _curable(policy: Policy, state: State) -> bool:
    """Whether ending a launch that takes too much can lead to a better one: an engine that works is not given up for
    none, nor for the same again."""
    launch, rung = state.launch, policy.rung(UTILIZATION)
    assert launch is not None
    if state.held or not policy.act:
        return False
    if launch.probe is not None and launch.probe.back != launch.target:
        return True
    now = launch.levers.number(UTILIZATION)
    return rung is not None and now is not None and now > (rung.min if rung.min is not None else 1)


def _too_large(state: State, now_ns: int, found: Excess) -> Step:
    """Proving → stopping: it works, but not for long, or at the cost of others."""
    state, actions = to_stopping(state, now_ns, "failure", Kind.OOM_RUNTIME, found.text)
    assert state.ending is not None
    numbers = {
        "tried_gib": round(found.missing_bytes / GIB, 4),
        "free_gib": round(found.free_bytes / GIB, 4),
        "total_gib": round(found.total_bytes / GIB, 2),
    }
    return replace(state, ending=replace(state.ending, numbers=numbers)), actions


def _proven(policy: Policy, state: State, now_ns: int) -> Step:
    """Proving → serving."""
    launch = state.launch
    assert launch is not None
    seen = Observation(
        pinned(launch.levers, launch.ledger), "proven", wall_s=state.wall_s(now_ns), setting=setting_of(launch)
    )
    climbed = launch.probe is not None and launch.probe.why == "step-up"
    good = launch.fingerprint == policy.fingerprint  # else it runs on under a policy that was edited since
    after = enter(
        state,
        StateName.SERVING,
        now_ns,
        launch=replace(launch, proven=True, serving_ns=now_ns),
        incident=Incident(),
        failures=0,
        observations=noted(state.observations, seen) if good else state.observations,
        good=launch.target if good else state.good,
        failed_climbs=0 if climbed else state.failed_climbs,
    )
    return after, (Proven(launch.number, launch.target, good=good),)
