"""Rules that hold whatever happens: seeded days of random failures, and random facts in any order."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from days import DECLARED, LADDER, POLICY, day
from supervisord_vllm.core.actions import Decide, Spawn
from supervisord_vllm.core.diagnosis import Diagnosis, Kind
from supervisord_vllm.core.facts import (
    CanaryDone,
    Commanded,
    DaemonStarted,
    DeviceMemory,
    Diagnosed,
    Exited,
    Fact,
    FatalSeen,
    GateSampled,
    HealthSeen,
    LedgerSeen,
    LeftoversReaped,
    ProcessRef,
    Spawned,
    SpawnFailed,
    Tick,
    TreeEnded,
)
from supervisord_vllm.core.ledger import GIB
from supervisord_vllm.core.levers import Levers
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND, Policy
from supervisord_vllm.core.state import State, StateName, outlook, wake_at_ns

BOUNDS = {rung.lever: rung for rung in LADDER}


def within_bounds(levers: Levers) -> None:
    for name, value in levers.items():
        if name not in DECLARED and name != "enforce_eager":
            raise AssertionError(f"{name} was never declared")
        rung = BOUNDS.get(name)
        number = levers.number(name)
        if number is None or rung is None or value == DECLARED.get(name):
            continue
        assert rung.min is None or number >= rung.min, levers
        # The coupling seqs <= batched tokens may lower the sequences further, never anything up.
        assert rung.max is None or number <= rung.max, levers
        if rung.max is None:
            assert number <= (DECLARED.number(name) or 0), levers


@pytest.mark.parametrize("seed", range(60))
def test_a_day_of_random_failures_keeps_every_rule(seed: int) -> None:
    world = day(seed)
    launches = [spawn.launch for spawn in world.spawns]
    assert launches == sorted(set(launches)), "launches are numbered for ever"
    for spawn in world.spawns:
        within_bounds(spawn.levers)
    changes = sum(a.levers != b.levers for a, b in zip(world.spawns, world.spawns[1:], strict=False))
    caused = sum(bool(d.moves) for d in world.decisions)
    # A neighbour's lowering is for one launch: the launch after it asks for the target again, without a new decision.
    lowered = sum(bool(d.moves) and d.kind is Kind.GPU_BUSY_FOREIGN for d in world.decisions)
    assert changes <= caused + lowered, "every change of configuration has a decision as its cause"
    numbers = [decision.number for decision in world.decisions]
    assert numbers == list(range(1, len(numbers) + 1))
    for decision in world.decisions:
        assert decision.sentence.startswith(("Launch ", "Before launch ")), decision.sentence
        assert "`vllm-supervise " in decision.sentence, decision.sentence
        assert decision.sentence.isprintable(), decision.sentence
    settled = ("serving", "given-up", "stopped")
    assert world.exit == 69 or world.state.name.value in (*settled, "gating", "starting", "proving", "backing-off")


@pytest.mark.parametrize("kind", list(Kind))
def test_a_persistent_failure_ends_after_a_finite_number_of_launches(kind: Kind) -> None:
    """Whatever fails for ever at the start: the daemon gives up, and within max-launches."""
    from random import Random

    from days import verdict
    from world import Outcome, World

    rng = Random(7)
    world = World(POLICY, lambda spawn, world: Outcome(None, fails_s=20, code=1, diagnosis=verdict(rng, kind)))
    world.run(10**6)
    assert world.exit == 69
    assert 1 <= len(world.spawns) <= POLICY.max_launches
    assert world.given_up is not None
    assert len(world.given_up.text) > 60


def test_one_day_gives_the_same_bytes_in_two_interpreters_with_other_hash_seeds() -> None:
    script = Path(__file__).with_name("days.py")
    outputs = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(script.parent)}
        run = subprocess.run([sys.executable, str(script), "11"], env=environment, capture_output=True, check=True)
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") >= 2, "the day must have something to decide"


CARD = st.builds(
    DeviceMemory,
    device=st.just("GPU-0"),
    total_bytes=st.just(140 * GIB),
    free_bytes=st.integers(0, 140 * GIB),
    context_bytes=st.just(GIB // 2),
    own_bytes=st.integers(0, 100 * GIB),
    holders=st.just((ProcessRef(9, "a", "b", GIB),)),
)
CARDS = st.lists(CARD, max_size=2).map(tuple)
NUMBERS = st.dictionaries(
    st.sampled_from(["tried_gib", "free_gib", "total_gib", "available_kv_gib", "needed_kv_gib", "estimated_max_len"]),
    st.one_of(st.integers(-5, 200_000), st.floats(-50, 200, allow_nan=False)),
)
DIAGNOSES = st.builds(Diagnosis, kind=st.sampled_from(Kind), numbers=NUMBERS, signature=st.sampled_from(["a", "b"]))


@st.composite
def fact_streams(draw: st.DrawFn) -> list[Fact]:
    now = 0
    stream: list[Fact] = []
    for _ in range(draw(st.integers(1, 60))):
        now += draw(st.integers(0, 400)) * SECOND
        launch = draw(st.integers(0, 3))
        at = {"at_ns": now, "launch": launch}
        stream.append(
            draw(
                st.one_of(
                    st.just(DaemonStarted(at_ns=now, boot_id="b", next_launch=1, next_decision=1)),
                    st.just(LeftoversReaped(at_ns=now)),
                    st.builds(GateSampled, at_ns=st.just(now), launch=st.just(launch), devices=CARDS),
                    st.just(Spawned(**at, pid=1, start_ticks=1, argv=("v",), log="l")),
                    st.builds(
                        SpawnFailed,
                        at_ns=st.just(now),
                        launch=st.just(launch),
                        error=st.just("no such file"),
                        lasting=st.booleans(),
                    ),
                    st.just(LedgerSeen(**at, numbers={"weights_gib": 14.0})),
                    st.just(FatalSeen(**at, text="fatal")),
                    st.builds(
                        HealthSeen, at_ns=st.just(now), launch=st.just(launch), status=st.sampled_from([200, None])
                    ),
                    st.builds(CanaryDone, at_ns=st.just(now), launch=st.just(launch), ok=st.booleans()),
                    st.just(Exited(**at, code=0)),
                    st.builds(
                        Diagnosed,
                        at_ns=st.just(now),
                        launch=st.just(launch),
                        diagnosis=DIAGNOSES,
                        devices=CARDS,
                        after=CARDS,
                    ),
                    st.just(TreeEnded(at_ns=now, launch=launch)),
                    st.just(Tick(at_ns=now)),
                    st.builds(
                        Commanded,
                        at_ns=st.just(now),
                        verb=st.sampled_from(["start", "stop", "hold", "resume", "shutdown"]),
                    ),
                )
            )
        )
    return stream


@settings(max_examples=40)
@given(fact_streams(), st.booleans(), st.sampled_from(["exit", "stay"]))
def test_any_facts_in_any_order_never_break_decide(stream: list[Fact], act: bool, on_give_up: str) -> None:
    policy: Policy = replace(POLICY, act=act, on_give_up=on_give_up)  # type: ignore[arg-type]  # one of the two
    state = State.initial()
    running = False
    for fact in [
        DaemonStarted(at_ns=0, boot_id="b", next_launch=1, next_decision=1),
        LeftoversReaped(at_ns=0),
        *stream,
    ]:
        again = decide(policy, state, fact)
        before = state
        state, actions = decide(policy, state, fact)
        assert again == (state, actions), "the same arguments give the same result"
        current = before.launch is not None and fact.launch in (0, before.launch.number)
        if isinstance(fact, LeftoversReaped) or (current and isinstance(fact, (TreeEnded, SpawnFailed))):
            running = running and state.dropped > before.dropped  # the shell says that nothing of ours is left
        for action in actions:
            if isinstance(action, Spawn):
                assert not running, "two engines at once"
                running = True
                within_bounds(action.levers)
            if isinstance(action, Decide):
                assert "\n" not in action.decision.sentence
        assert not (running and state.name in (StateName.STOPPED, StateName.GATING, StateName.BACKING_OFF))
        wake_at_ns(policy, state)
        assert outlook(policy, state)[0]
