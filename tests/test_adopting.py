"""A daemon that follows another one goes on exactly where that one was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from days import POLICY, day
from supervisord_vllm.core.actions import Adopt, Canary, EndTree, Exit, Reap, Spawn, Stop
from supervisord_vllm.core.adopting import carried, carry
from supervisord_vllm.core.facts import (
    Commanded,
    DaemonStarted,
    Exited,
    Fact,
    LeftoversReaped,
    ProcessRef,
    Signalled,
    Verb,
)
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.observations import Known
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import Plan, State, StateName
from supervisord_vllm.core.steps import Step
from world import Outcome, World

WITH_ENGINE = ("starting", "proving", "serving", "draining", "stopping")
SEEDS = range(5)
LOWER = POLICY.declared.with_(gpu_memory_utilization=850)


def states(world: World) -> Iterator[tuple[int, State]]:
    """Every state of a run with its time."""
    state = State.initial()
    for fact in world.facts:
        state, _ = decide(world.policy, state, fact)
        yield fact.at_ns, state


def follow(policy: Policy, state: State, at_ns: int, engine: str = "lives", **more: object) -> Step:
    """The first step of a daemon that follows one in this state."""
    fact = DaemonStarted(
        at_ns=at_ns,
        boot_id="b",
        next_launch=state.next_launch,
        next_decision=state.next_decision,
        observations=state.observations,
        wall_s=at_ns // SECOND + state.wall_offset_s,
        utc_offset_s=state.utc_offset_s,
        carried=json.dumps(carry(state)),
        engine=engine,  # type: ignore[arg-type]
    )
    return decide(policy, State.initial(), replace(fact, **more))  # type: ignore[arg-type]


def forgetful(state: State) -> State:
    """The state but for what was known of other vectors when its failure was judged: that is looked up afresh."""
    cause = state.incident.cause
    if cause is None:
        return state
    return replace(state, incident=replace(state.incident, cause=replace(cause, known=Known())))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_living_engine_the_next_daemon_is_in_the_very_same_state(seed: int) -> None:
    seen = set()
    for at_ns, state in states(day(seed)):
        if state.name.value not in WITH_ENGINE or state.launch is None or state.launch.pid is None:
            continue
        after, actions = follow(POLICY, state, at_ns)
        assert forgetful(after) == forgetful(replace(state, memory_error=None))
        assert isinstance(actions[0], Adopt)
        assert actions[0].launch == state.launch.number
        assert not any(isinstance(action, (Spawn, Reap)) for action in actions)
        seen.add(state.name)
    assert StateName.SERVING in seen or StateName.STARTING in seen


@pytest.mark.parametrize("engine", ["lives", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_moment_a_daemon_that_follows_never_starts_beside_what_is_left(seed: int, engine: str) -> None:
    for at_ns, state in states(day(seed)):
        after, actions = follow(POLICY, state, at_ns, engine)
        assert not any(isinstance(action, Spawn) for action in actions)
        if after.name is not StateName.ADOPTING:
            continue
        assert isinstance(actions[-1], Reap)
        gone, _ = decide(POLICY, after, LeftoversReaped(at_ns=at_ns))
        if state.name is StateName.STOPPED:
            assert gone.name is StateName.STOPPED
        elif state.name is StateName.BACKING_OFF:
            assert (gone.name, gone.resume_ns) == (StateName.BACKING_OFF, max(state.resume_ns or 0, at_ns))
        elif state.name in (StateName.GATING, StateName.STARTING, StateName.PROVING, StateName.SERVING):
            assert (gone.name, gone.target) == (StateName.GATING, state.target)
        assert gone.restarts == state.restarts or state.name is StateName.STOPPED
        assert gone.next_launch == state.next_launch


def running(*facts: Fact, policy: Policy = POLICY, until: str = "serving") -> tuple[World, State]:
    """A world that serves (or is in another state), with these facts more."""
    world = World(policy, lambda spawn, world: Outcome())
    world.run(until=lambda world: world.state.name.value == until)
    state = world.state
    for fact in facts:
        state, _ = decide(policy, state, replace(fact, at_ns=world.now))
    return world, state


def commanded(verb: Verb) -> Commanded:
    return Commanded(at_ns=0, verb=verb, by="test")


def test_an_engine_that_ended_in_the_gap_is_judged_as_one_that_ended_before_our_eyes() -> None:
    world, state = running()
    after, actions = follow(POLICY, state, world.now, "ended")
    assert after == state
    assert [type(action) for action in actions] == [Adopt]
    stopping, then = decide(POLICY, after, Exited(at_ns=world.now, launch=1))
    assert stopping.name is StateName.STOPPING
    assert isinstance(then[0], EndTree)


def test_a_stop_that_was_signalled_is_waited_for_with_what_is_left_of_its_time_and_not_signalled_again() -> None:
    world, state = running(commanded("stop"), Signalled(at_ns=0, launch=1, position=700))
    after, actions = follow(POLICY, state, world.now + 7 * SECOND)
    assert after.name is StateName.STOPPING
    adopt, stop = actions
    assert isinstance(adopt, Adopt)
    assert adopt.cut == 700
    assert stop == Stop(1, "serving", 7 * SECOND, signalled=True)


def test_a_stop_whose_engine_ended_in_the_gap_only_has_its_tree_ended() -> None:
    world, state = running(commanded("stop"))
    _, actions = follow(POLICY, state, world.now, "ended")
    assert [type(action) for action in actions] == [Adopt, EndTree]


def test_a_proof_in_progress_asks_again_for_the_part_that_was_open() -> None:
    world, state = running(until="proving")
    assert not state.ready
    _, actions = follow(POLICY, state, world.now)
    assert isinstance(actions[1], Canary)


def test_a_shutdown_in_progress_is_not_resumed_by_a_start_that_somebody_asked_for() -> None:
    world, state = running(commanded("shutdown"))
    after, actions = follow(POLICY, state, world.now, "none")
    assert after.name is StateName.ADOPTING
    gone, _ = decide(POLICY, after, LeftoversReaped(at_ns=world.now))
    assert gone.name is StateName.GATING
    assert isinstance(actions[-1], Reap)


def test_under_an_edited_policy_the_engine_goes_on_and_the_next_launch_is_as_the_policy_says_now() -> None:
    world, state = running()
    edited = replace(POLICY, declared=POLICY.declared.with_(gpu_memory_utilization=800), fingerprint="edited")
    after, _ = follow(edited, state, world.now)
    assert after.name is StateName.SERVING
    assert after.launch is not None
    assert after.launch.levers == state.launch.levers  # type: ignore[union-attr]
    assert after.target.number("gpu_memory_utilization") == 800


def test_given_up_stays_given_up_until_its_policy_is_edited() -> None:
    stay = replace(POLICY, on_give_up="stay")
    state = State(name=StateName.GIVEN_UP, given_up="no", target=POLICY.declared, next_launch=4)
    after, _ = follow(stay, state, 9 * SECOND)
    assert (after.name, after.given_up) == (StateName.GIVEN_UP, "no")
    again, actions = follow(replace(stay, fingerprint="edited"), state, 9 * SECOND)
    assert again.name is StateName.ADOPTING
    assert isinstance(actions[-1], Reap)


UNREADABLE = ["", "null", "[]", "{}x", '{"name": "no-such-state"}', '{"launch": {"number": "x"}}', "[" * 50_000]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_state_that_cannot_be_read_is_a_start_from_nothing(text: str) -> None:
    assert carried(text) is None
    fact = DaemonStarted(at_ns=5, boot_id="b", next_launch=3, next_decision=2, carried=text, engine="lives")
    after, actions = decide(POLICY, State.initial(), fact)
    assert after.name is StateName.ADOPTING
    assert [type(action) for action in actions] == [Reap]
    assert after.target == POLICY.declared


def test_the_budget_that_was_spent_before_counts_on() -> None:
    world, state = running()
    state = replace(state, restarts=(world.now - SECOND,), failures=3, recurring=(("boom", world.now - SECOND),))
    after, _ = follow(POLICY, state, world.now, "none")
    gone, _ = decide(POLICY, after, LeftoversReaped(at_ns=world.now))
    assert (gone.restarts, gone.failures, gone.recurring) == (state.restarts, 3, state.recurring)


def test_a_drain_by_the_operator_leads_to_stopped_though_its_engine_is_gone() -> None:
    world, state = running(commanded("drain"))
    assert state.name in (StateName.DRAINING, StateName.STOPPING)
    after, _ = follow(POLICY, state, world.now, "none")
    gone, _ = decide(POLICY, after, LeftoversReaped(at_ns=world.now))
    assert gone.name is StateName.STOPPED


def test_a_planned_change_whose_engine_is_gone_is_carried_out_as_it_was_decided() -> None:
    world, state = running(commanded("restart"))
    state = replace(state, ending=replace(state.ending, plan=Plan(StateName.GATING, LOWER)))  # type: ignore[type-var]
    after, _ = follow(POLICY, state, world.now, "none")
    gone, _ = decide(POLICY, after, LeftoversReaped(at_ns=world.now))
    assert (gone.name, gone.target) == (StateName.GATING, LOWER)


@pytest.mark.parametrize("verb", ["shutdown", "stop"])
def test_a_daemon_that_is_told_to_end_while_leftovers_are_ended_ends_them_first(verb: Verb) -> None:
    begun = DaemonStarted(at_ns=SECOND, boot_id="b", next_launch=1, next_decision=1)
    state, actions = decide(POLICY, State.initial(), begun)
    assert Reap() in actions
    state, actions = decide(POLICY, state, Commanded(at_ns=2 * SECOND, verb=verb))
    assert (state.name, actions) == (StateName.ADOPTING, ())
    state, actions = decide(POLICY, state, LeftoversReaped(at_ns=3 * SECOND))
    assert state.name is StateName.STOPPED
    assert actions == ((Exit(0),) if verb == "shutdown" else ())


def test_a_daemon_told_to_end_that_cannot_end_leftovers_still_ends() -> None:
    stays = replace(POLICY, on_give_up="stay")
    state, _ = decide(stays, State.initial(), DaemonStarted(at_ns=SECOND, boot_id="b", next_launch=1, next_decision=1))
    state, _ = decide(stays, state, Commanded(at_ns=2 * SECOND, verb="shutdown"))
    state, actions = decide(stays, state, LeftoversReaped(at_ns=3 * SECOND, survivors=(ProcessRef(7),)))
    assert state.name is StateName.GIVEN_UP
    assert Exit(69) in actions
