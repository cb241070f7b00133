"""While an engine lives: starting, proving, serving."""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import proving, telling
from supervisord_vllm.core.actions import Canary, CloseGate, EndTree
from supervisord_vllm.core.climbing import climb
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
from supervisord_vllm.core.ledger import uncounted_graphs
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.recycling import recycle
from supervisord_vllm.core.state import (
    FATAL_PATIENCE_NS,
    UNHEALTHY_PATIENCE_NS,
    Ending,
    State,
    StateName,
    backoff_ns,
    recent_restarts,
)
from supervisord_vllm.core.steps import Step, enter, to_given_up, to_stopping
from supervisord_vllm.core.stopping import leave_stopping


def spawned(policy: Policy, state: State, fact: Spawned) -> Step:
    """The main process exists."""
    assert state.launch is not None
    launch = replace(state.launch, pid=fact.pid, start_ticks=fact.start_ticks, argv=fact.argv, log=fact.log)
    return replace(state, launch=launch), ()


def spawn_failed(policy: Policy, state: State, fact: SpawnFailed) -> Step:
    """→ given-up where the command cannot be executed; → backing-off where the machine is out of something now."""
    assert state.launch is not None
    if state.name is StateName.STOPPING and state.ending is not None and state.ending.why != "failure":
        return leave_stopping(policy, state, fact.at_ns)
    recent = recent_restarts(policy, state, fact.at_ns)
    again = not fact.lasting and policy.act and len(recent) < policy.budget
    what = f"Launch {state.launch.number} could not be executed: {telling.quoted(fact.error)}."
    delay = backoff_ns(policy, state.failures, state.launch.number)
    if again:
        step = (
            f"It is tried again in {telling.span(delay)}, restart {len(recent) + 1} of {policy.budget} within"
            f" {telling.span(policy.window_ns)}. `vllm-supervise stop` keeps it down."
        )
    elif fact.lasting:
        step = (
            f"Correct [engine] command in the policy file, then {telling.begin_again(policy)};"
            " `vllm-supervise check --host` tests it."
        )
    else:
        step = f"Free what it names, then {telling.begin_again(policy)}; `vllm-supervise history` tells the story."
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=state.launch.number,
        kind=Kind.BAD_CONFIG if fact.lasting else Kind.OS_LIMIT,
        action=Action.RESTART_SAME if again else Action.STOP_EXPLAIN,
        sentence=f"{what} {step}",
        evidence=(Evidence(0, "supervisor", fact.error),),
    )
    state, recorded = record(state, decision)
    if again:
        resume = fact.at_ns + delay
        after = enter(state, StateName.BACKING_OFF, fact.at_ns, resume_ns=resume, ending=None)
        return replace(after, restarts=(*recent, fact.at_ns), failures=state.failures + 1), (recorded, CloseGate())
    state, actions = to_given_up(policy, state, fact.at_ns, decision.sentence)
    return state, (recorded, *actions)


def phase_seen(policy: Policy, state: State, fact: PhaseSeen) -> Step:
    """The start enters another phase."""
    assert state.launch is not None
    return replace(state, launch=replace(state.launch, phase=fact.phase)), ()


def ledger_seen(policy: Policy, state: State, fact: LedgerSeen) -> Step:
    """Numbers of the memory account."""
    assert state.launch is not None
    launch = replace(state.launch, ledger=state.launch.ledger.tightened(fact.numbers))
    graphs = uncounted_graphs(launch.ledger.numbers) or state.graphs
    return replace(state, launch=launch, graphs=graphs), ()


def fatal_seen(policy: Policy, state: State, fact: FatalSeen) -> Step:
    """The engine says that it is dying: not ready from now on, though only an exit or time proves it."""
    assert state.launch is not None
    if state.launch.fatal_ns is not None:
        return state, ()
    return replace(state, launch=replace(state.launch, ready=False, fatal_ns=fact.at_ns)), ()


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
    """The canary makes the engine ready, or fails the launch; after a fatal line it tells text from truth."""
    assert state.launch is not None
    launch = state.launch
    if not fact.ok:
        if launch.fatal_asked:
            text = f"the engine said that it is dying and answers no request: {telling.quoted(fact.detail, 160)}"
            return to_stopping(state, fact.at_ns, "failure", Kind.ENGINE_DEAD, text)
        if fact.status in (401, 403):
            text = (
                f"the engine refused the canary's API key ({fact.status}): give the key that it asks for as [engine]"
                " api-key-file"
            )
            return to_stopping(state, fact.at_ns, "failure", Kind.BAD_CONFIG, text)
        text = f"/health says 200, but a request of one token failed: {telling.quoted(fact.detail, 160)}"
        return to_stopping(state, fact.at_ns, "failure", Kind.ENGINE_HUNG, text)
    if launch.fatal_ns is not None and not launch.fatal_asked:
        return state, ()
    ready_ns = fact.at_ns if launch.ready_ns is None else launch.ready_ns
    first = launch.ready_ns is None
    told = fact.first_token_s if first else launch.first_token_s
    launch = replace(launch, ready=True, ready_ns=ready_ns, fatal_ns=None, fatal_asked=False, first_token_s=told)
    return replace(state, launch=launch), proving.after_canary(policy, launch) if first else ()


def running_tick(policy: Policy, state: State, fact: Tick) -> Step:
    """The timers of a living engine: said to be dying, unhealthy, not coming up, soaked."""
    launch, now = state.launch, fact.at_ns
    assert launch is not None
    if launch.fatal_ns is not None and not launch.fatal_asked and now >= launch.fatal_ns + FATAL_PATIENCE_NS:
        if state.name is not StateName.STARTING and launch.unhealthy_ns is None:
            # Text alone proves nothing, and /health says 200: a request decides.
            return replace(state, launch=replace(launch, fatal_asked=True)), (Canary(launch.number),)
        text = f"the engine said that it is dying and still runs after {telling.span(FATAL_PATIENCE_NS)}"
        return to_stopping(state, now, "failure", Kind.ENGINE_DEAD, text)
    if launch.unhealthy_ns is not None and now >= launch.unhealthy_ns + UNHEALTHY_PATIENCE_NS:
        text = f"/health has not said 200 for {telling.span(UNHEALTHY_PATIENCE_NS)}"
        return to_stopping(state, now, "failure", Kind.ENGINE_HUNG, text)
    if state.name is StateName.STARTING and now >= launch.spawned_ns + policy.start_max_ns:
        text = f"not healthy {telling.span(policy.start_max_ns)} after it was spawned (phase {launch.phase})"
        return to_stopping(state, now, "failure", Kind.STARTUP_WEDGED, text)
    if state.name is StateName.PROVING and (step := proving.due(policy, state, now)) is not None:
        return step
    if state.name is not StateName.SERVING:
        return state, ()
    return climb(policy, state, now) or recycle(policy, state, now) or (state, ())


def exited(policy: Policy, state: State, fact: Exited) -> Step:
    """→ stopping: nobody asked for this exit, whatever its status says."""
    assert state.launch is not None
    launch = replace(state.launch, exited=fact, ready=False)
    ending = Ending("failure", fact.at_ns)
    return enter(state, StateName.STOPPING, fact.at_ns, launch=launch, ending=ending), (EndTree(launch.number),)
