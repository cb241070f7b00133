"""Relief: what is changed when an engine serves too slowly, and when that is taken back.

Slot-bound: more sequences, as many as the KV cache holds of the requests seen, at most the rung's ``max``. KV-bound: a
higher utilization, and only if that cannot cover it fewer sequences as well, both in one launch. Compute-bound: our own
eager or batched-token step is taken back; else nothing helps but more cards, and that is said once.
"""

from __future__ import annotations

from dataclasses import replace

from supervisord_vllm.core import telling
from supervisord_vllm.core.decision import Decision, Move
from supervisord_vllm.core.diagnosis import Action, Evidence, Kind
from supervisord_vllm.core.facts import Pressed, ReliefJudged, Verdict
from supervisord_vllm.core.judgement import record, restoring
from supervisord_vllm.core.knowledge import known
from supervisord_vllm.core.ledger import per_mille_up, requested, room
from supervisord_vllm.core.levers import BATCHED_TOKENS, EAGER, NUM_SEQS, UTILIZATION, show
from supervisord_vllm.core.policy import Policy
from supervisord_vllm.core.remedies import apply, pinned
from supervisord_vllm.core.state import Launch, Plan, Probe, State, StateName, recent_plans
from supervisord_vllm.core.steps import Step, to_draining

Found = tuple[tuple[Move, ...], str]
Cures = dict[Verdict, tuple[Move, ...]]
VERDICTS: tuple[Verdict, ...] = ("kv", "slot", "compute")
WARM = frozenset({UTILIZATION, EAGER})
"""Levers whose change keeps vLLM's compile cache: every other one makes the next start a cold one."""


def cures(policy: Policy, state: State, sequences: int | None, now_ns: int) -> Cures:
    """The verdicts that a permitted change may help against now, each with its moves; ``sequences`` is how many of the
    requests seen the KV cache holds. A hold or a used-up day does not make a cure none: it waits."""
    if state.launch is None:
        return {}
    found: Cures = {}
    for verdict in VERDICTS:
        asked = Pressed(at_ns=now_ns, verdict=verdict, loss=0.0, lost_s=0.0, cost_s=0.0, sequences=sequences)
        cure = _cure(policy, state, state.launch, asked)
        if not isinstance(cure, str):
            found[verdict] = cure[0]
    return found


def starts_cold(moves: tuple[Move, ...]) -> bool:
    """Whether the launch with these moves has to compile anew."""
    return any(move.lever not in WARM for move in moves)


def pressed(policy: Policy, state: State, fact: Pressed) -> Step:
    """Serving → draining where a restart would pay and something permitted can help."""
    launch = state.launch
    assert launch is not None
    found = _cure(policy, state, launch, fact)
    if isinstance(found, str):
        return (state, ()) if launch.told else _said(state, fact, found)
    waits = _waits(policy, state, fact.at_ns)
    if waits and policy.act:
        return (state, ()) if launch.told else _said(state, fact, f"{telling.moved(found[0])} would help, {waits}")
    moves, why = found
    decision = _decision(
        state,
        fact,
        f"Next: {telling.moved(moves)} ({why}), as launch {state.next_launch}, once no request is left; if it does not"
        " help, back again. `vllm-supervise hold` would keep it here.",
        moves=moves,
        arithmetic=why,
        acted=policy.act,
    )
    if not policy.act:
        if launch.told:
            return state, ()
        state, recorded = record(replace(state, launch=replace(launch, told=True)), decision)
        return state, (recorded,)
    state, recorded = record(state, decision)
    probe = Probe(launch.target, "pressure", fact.verdict)
    plan = Plan(
        StateName.GATING,
        pinned(apply(launch.target, moves), launch.ledger),
        0,
        environment=launch.environment,
        probe=probe,
    )
    planned = (*recent_plans(state, fact.at_ns), fact.at_ns)
    state, actions = to_draining(replace(state, planned=planned), fact.at_ns, plan)
    return state, (recorded, *actions)


def relief_judged(policy: Policy, state: State, fact: ReliefJudged) -> Step:
    """A change against pressure is kept, or serving → draining to take it back."""
    launch = state.launch
    assert launch is not None
    probe = launch.probe
    if probe is None or probe.verdict is None:
        return state, ()
    kept = replace(state, launch=replace(launch, probe=None))
    if fact.keep:
        return replace(kept, roll_backs={**state.roll_backs, probe.verdict: 0}), ()
    if state.held or not policy.act:
        return state, ()
    moves = restoring(launch.target, probe.back)
    decision = Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=launch.number,
        kind=Kind.PERF_REGRESSION,
        action=Action.NEXT_CONFIG,
        moves=moves,
        arithmetic="the last known good",
        evidence=(Evidence(0, "supervisor", fact.text),),
        then=StateName.DRAINING.value,
        sentence=(
            f"Launch {launch.number} is no faster than the one before it ({fact.text or 'as measured'}). Next:"
            f" {telling.moved(moves)}, as it was, as launch {state.next_launch}."
            " `vllm-supervise explain` shows the measurement."
        ),
    )
    count = state.roll_backs.get(probe.verdict, 0) + 1
    state, recorded = record(replace(kept, roll_backs={**state.roll_backs, probe.verdict: count}), decision)
    plan = Plan(StateName.GATING, probe.back, environment=launch.environment)
    state, actions = to_draining(state, fact.at_ns, plan)
    return state, (recorded, *actions)


def _waits(policy: Policy, state: State, now_ns: int) -> str:
    if state.held:
        return "but it is held"
    if len(recent_plans(state, now_ns)) >= policy.planned_per_day:
        return f"but {policy.planned_per_day} planned restarts were made within 24 h (planned-per-day)"
    return ""


def _said(state: State, fact: Pressed, reason: str) -> Step:
    assert state.launch is not None
    needs = "More engines, or more cards, carry more load"
    if fact.engines is not None:
        needs = f"The load needs about {fact.engines:.1f} engines of this size"
    decision = _decision(
        state, fact, f"No restart: {reason}. {needs}; `vllm-supervise status` shows it.", action=Action.OBSERVE
    )
    state, recorded = record(replace(state, launch=replace(state.launch, told=True)), decision)
    return state, (recorded,)


_BOUND = {"kv": "its KV cache", "slot": "its number of sequences", "compute": "the card itself"}


def _decision(
    state: State,
    fact: Pressed,
    step: str,
    *,
    moves: tuple[Move, ...] = (),
    arithmetic: str = "",
    action: Action = Action.NEXT_CONFIG,
    acted: bool = True,
) -> Decision:
    number = state.launch.number if state.launch is not None else 0
    seen = f" ({fact.text})" if fact.text else ""
    return Decision(
        number=state.next_decision,
        at_ns=fact.at_ns,
        launch=number,
        kind=Kind.OVERLOAD,
        action=action,
        moves=moves,
        arithmetic=arithmetic or f"lost {fact.lost_s:.0f} s against a restart of {fact.cost_s:.0f} s",
        evidence=(Evidence(0, "supervisor", fact.text or f"{fact.loss:.0%} of the answers are too slow"),),
        acted=acted,
        then=StateName.DRAINING.value if moves and acted else StateName.SERVING.value,
        sentence=(
            f"Launch {number} is too slow{seen}: {fact.loss:.0%} of what it should serve is late, bound by"
            f" {_BOUND[fact.verdict]}; that has cost {fact.lost_s:.0f} s, a restart costs {fact.cost_s:.0f} s. {step}"
        ),
    )


def _cure(policy: Policy, state: State, launch: Launch, fact: Pressed) -> Found | str:
    if fact.verdict == "slot":
        found = _more_sequences(policy, launch, fact)
    elif fact.verdict == "kv":
        found = _more_cache(policy, state, launch, fact)
    else:
        found = _undo(policy, launch)
    if isinstance(found, str):
        return found
    target = pinned(apply(launch.target, found[0]), launch.ledger)
    if known(policy, state, fact.at_ns).against(target) is not None:
        return f"{telling.moved(found[0])} is known to fail"
    return found


def _sequences(launch: Launch) -> int | None:
    return launch.levers.number(NUM_SEQS) or launch.ledger.count(NUM_SEQS)


def _more_sequences(policy: Policy, launch: Launch, fact: Pressed) -> Found | str:
    rung, now = policy.rung(NUM_SEQS), _sequences(launch)
    if rung is None or now is None:
        return "max_num_seqs is not declared movable"
    most = rung.max if rung.max is not None else policy.declared.number(NUM_SEQS) or now
    tokens = launch.levers.number(BATCHED_TOKENS)
    wanted = fact.sequences if fact.sequences is not None else 2 * now
    after = min(most, wanted, tokens if tokens is not None else wanted)
    if after <= now:
        return f"{now:,} sequences are as many as the KV cache and the bounds permit"
    why = f"the KV cache holds {wanted:,} such requests, at most {most:,} are permitted"
    return (Move(NUM_SEQS, now, after, "up", "computed"),), why


def _more_cache(policy: Policy, state: State, launch: Launch, fact: Pressed) -> Found | str:
    """Utilization up until the pool holds what runs; fewer sequences for what it still cannot hold."""
    rung, now, seqs = policy.rung(UTILIZATION), launch.levers.number(UTILIZATION), _sequences(launch)
    pool = launch.ledger.size("available_kv_gib")
    beside = launch.room or room((launch.gate_devices,), state.contexts)
    wanted, why = seqs, ""
    moves: list[Move] = []
    if rung is not None and now is not None and pool is not None and beside is not None and seqs and fact.sequences:
        most = min(rung.max if rung.max is not None else policy.declared.number(UTILIZATION) or now, beside.fits)
        more = pool * max(0, seqs - fact.sequences) // fact.sequences
        after = max(now, min(most, now + max(1, per_mille_up(more, beside.total))))
        gained = requested(after, beside.total) - requested(now, beside.total)
        wanted = fact.sequences * (pool + gained) // pool
        if after > now:
            moves.append(Move(UTILIZATION, now, after, "up", "computed"))
            factor = seqs / fact.sequences
            why = f"{seqs:,} sequences need {factor:.2f} times the KV cache, {show(UTILIZATION, most)} fits"
    permit = policy.rung(NUM_SEQS)
    least = permit.min if permit is not None and permit.min is not None else 1
    if permit is not None and seqs and wanted and fact.sequences and least <= wanted < seqs:
        moves.append(Move(NUM_SEQS, seqs, wanted, "down", "computed"))
        why = f"{why}; " * bool(why) + f"the KV cache holds {wanted:,} such requests"
    return (tuple(moves), why) if moves else "no larger KV cache is permitted and free"


def _undo(policy: Policy, launch: Launch) -> Found | str:
    if policy.rung(EAGER) is not None and launch.target.eager and not policy.declared.get(EAGER):
        return (Move(EAGER, True, False, "switch", "restored"),), "our own step that made it slower is taken back"
    now, declared = launch.target.number(BATCHED_TOKENS), policy.declared.number(BATCHED_TOKENS)
    if policy.rung(BATCHED_TOKENS) is not None and now is not None and declared is not None and now < declared:
        return (Move(BATCHED_TOKENS, now, declared, "up", "restored"),), "our own step is taken back"
    return "the card computes as fast as it can"
