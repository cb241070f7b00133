"""While an engine lives: starting, proving, serving."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.actions import Canary, EndTree, Proven
from supervisord_vllm.core.decision import Decision
from supervisord_vllm.core.diagnosis import Action, Evidence, Kind
from supervisord_vllm.core.facts import (
    CanaryDone,
    Exited,
    FatalSeen,
    HealthSeen,
    LedgerSeen,
    PhaseSeen,
    Spawned,
    SpawnFailed,
    Tick,
)
from supervisord_vllm.core.judgement import record
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.state import (
    FATAL_PATIENCE_NS,
    UNHEALTHY_PATIENCE_NS,
    Ending,
    Incident,
    State,
    StateName,
)
from supervisord_vllm.core.steps import Step, enter, to_given_up, to_stopping
from supervisord_vllm.core.stopping import leave_stopping


def spawned(policy: Policy, state: State, fact: Spawned) -> Step:
    """The main process exists."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, pid=fact.pid, argv=fact.argv, log=fact.log)), ()


def spawn_failed(policy: Policy, state: State, fact: SpawnFailed) -> Step:
    """→ given-up: the command cannot be executed, and would not be the next time either."""
    assert state.launch is not None
    sentence = (
        f"Launch {state.launch.number} could not be executed: {telling.quoted(fact.error)}. Correct [engine] command in"
        " the policy file, then start the daemon again; `vllm-supervise check --host` tests it."
    )
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=state.launch.number,
        kind=Kind.BAD_CONFIG,
        action=Action.STOP_EXPLAIN,
        sentence=sentence,
        evidence=(Evidence(0, "supervisor", fact.error),),
    )
    if state.name is StateName.STOPPING and state.ending is not None and state.ending.why != "failure":
        return leave_stopping(policy, state, fact.at_ns)
    state, recorded = record(state, decision)
    state, actions = to_given_up(policy, state, fact.at_ns, sentence)
    return state, (recorded, *actions)


def phase_seen(policy: Policy, state: State, fact: PhaseSeen) -> Step:
    """The start enters another phase."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, phase=fact.phase)), ()


def ledger_seen(policy: Policy, state: State, fact: LedgerSeen) -> Step:
    """Numbers of the memory account."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, ledger=state.launch.ledger.merged(fact.numbers))), ()


def fatal_seen(policy: Policy, state: State, fact: FatalSeen) -> Step:
    """The engine says that it is dying: not ready from now on, though only an exit or time proves it."""
    assert state.launch is not None
    at = state.launch.fatal_ns if state.launch.fatal_ns is not None else fact.at_ns
    return replace(state, launch=replace(state.launch, ready=False, fatal_ns=at)), ()


def first_health(policy: Policy, state: State, fact: HealthSeen) -> Step:
    """Starting → proving on the first 200."""
    assert state.launch is not None
    if fact.status != 200 or state.launch.fatal_ns is not None:
        return state, ()
    launch = replace(state.launch, healthy_ns=fact.at_ns, phase="serving")
    return enter(state, StateName.PROVING, fact.at_ns, launch=launch), (Canary(launch.number),)


def health_seen(policy: Policy, state: State, fact: HealthSeen) -> Step:
    """/health changed while the engine runs."""
    assert state.launch is not None
    unhealthy = None if fact.status == 200 else state.launch.unhealthy_ns or fact.at_ns
    return replace(state, launch=replace(state.launch, unhealthy_ns=unhealthy)), ()


def canary_done(policy: Policy, state: State, fact: CanaryDone) -> Step:
    """proving: the canary makes the engine ready, or fails the launch."""
    assert state.launch is not None
    if not fact.ok:
        text = f"/health says 200, but a request of one token failed: {telling.quoted(fact.detail, 160)}"
        return to_stopping(state, fact.at_ns, "failure", Kind.ENGINE_HUNG, text)
    if state.launch.fatal_ns is not None:
        return state, ()
    return replace(state, launch=replace(state.launch, ready=True, ready_ns=fact.at_ns)), ()


def running_tick(policy: Policy, state: State, fact: Tick) -> Step:
    """The timers of a living engine: said to be dying, unhealthy, not coming up, soaked."""
    launch, now = state.launch, fact.at_ns
    assert launch is not None
    if launch.fatal_ns is not None and now >= launch.fatal_ns + FATAL_PATIENCE_NS:
        text = f"the engine said that it is dying and still runs after {telling.span(FATAL_PATIENCE_NS)}"
        return to_stopping(state, now, "failure", Kind.ENGINE_DEAD, text)
    if launch.unhealthy_ns is not None and now >= launch.unhealthy_ns + UNHEALTHY_PATIENCE_NS:
        text = f"/health has not said 200 for {telling.span(UNHEALTHY_PATIENCE_NS)}"
        return to_stopping(state, now, "failure", Kind.ENGINE_HUNG, text)
    if state.name is StateName.STARTING and now >= launch.spawned_ns + policy.start_max_ns:
        text = f"not healthy {telling.span(policy.start_max_ns)} after it was spawned (phase {launch.phase})"
        return to_stopping(state, now, "failure", Kind.STARTUP_WEDGED, text)
    soaked = launch.ready_ns is not None and now >= launch.ready_ns + policy.soak_ns
    if state.name is StateName.PROVING and soaked and launch.ready and launch.unhealthy_ns is None:
        after = enter(
            state,
            StateName.SERVING,
            now,
            launch=replace(launch, proven=True),
            incident=Incident(),
            failures=0,
        )
        return after, (Proven(launch.number, launch.target),)
    return state, ()


def exited(policy: Policy, state: State, fact: Exited) -> Step:
    """→ stopping: nobody asked for this exit, whatever its status says."""
    assert state.launch is not None
    launch = replace(state.launch, exited=fact, ready=False)
    ending = Ending("failure", fact.at_ns)
    return enter(state, StateName.STOPPING, fact.at_ns, launch=launch, ending=ending), (EndTree(launch.number),)
