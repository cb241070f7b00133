"""The proof of a launch through `decide` in virtual time: canary, burst, soak; a part that fails, and what follows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from supervisord_vllm.core import proof
from supervisord_vllm.core.actions import Adopt, Burst, Canary, Spawn, Weigh
from supervisord_vllm.core.adopting import carry
from supervisord_vllm.core.diagnosis import Action, Diagnosis, Evidence, Kind
from supervisord_vllm.core.facts import BurstDone, CanaryDone, Commanded, DaemonStarted, HealthSeen, SoakDone
from supervisord_vllm.core.ledger import GIB, MIB, Ledger
from supervisord_vllm.core.levers import Levers, Rung, Weights
from supervisord_vllm.core.machine import decide
from supervisord_vllm.core.policy import SECOND, Gate, Policy, Proof
from supervisord_vllm.core.proving import too_large
from supervisord_vllm.core.soaking import excess
from supervisord_vllm.core.state import Launch, State, StateName, outlook
from world import CONTEXT, TOTAL, Outcome, World

DECLARED = Levers({"gpu_memory_utilization": 900, "max_model_len": 8192, "max_num_seqs": 16, "weights": Weights("m")})
LADDER = (
    Rung("gpu_memory_utilization", step=50, min=700, max=950),
    Rung("max_num_seqs", factor=0.5, min=4),
    Rung("enforce_eager"),
)
GATE = Gate(2 * SECOND, 60 * SECOND, 600 * SECOND)
POLICY = Policy("qwen", DECLARED, LADDER, gate=GATE, proof=Proof())


def oom() -> Diagnosis:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 110.00 MiB."
    numbers = {"tried_gib": 0.1074, "free_gib": 0.0410, "total_gib": 139.8}
    return Diagnosis(
        Kind.OOM_RUNTIME, "runtime", numbers=numbers, evidence=(Evidence(9, "EngineCore", text),), signature="oom"
    )


def died() -> Diagnosis:
    return Diagnosis(Kind.WORKER_DIED, "runtime", evidence=(Evidence(9, "EngineCore", "exit code: -4"),), signature="w")


def fine(spawn: Spawn, world: World) -> Outcome:
    return Outcome()


def in_second(outcome: Outcome) -> World:
    """A launch that serves, a step of an operator, and a second launch that behaves like this; the third is fine."""
    world = World(POLICY, lambda spawn, _: outcome if spawn.launch == 2 else Outcome()).run(200)
    assert world.state.name is StateName.SERVING
    world.send(0, Commanded(at_ns=0, verb="step", lever="max_num_seqs", direction="down", by="ada"))
    return world.run(1200)


def test_canary_burst_and_soak_in_this_order_make_a_launch_proven_and_it_is_ready_after_the_canary() -> None:
    world = World(POLICY, fine)
    world.run(until=lambda world: world.state.ready)
    assert world.state.name.value == "proving"
    assert proof.part(POLICY, world.state.launch) == "burst"  # type: ignore[arg-type]
    assert outlook(POLICY, world.state)[0] == "a soak, once the burst of 16 requests is answered"
    world.run(until=lambda world: world.state.launch is not None and world.state.launch.burst is not None)
    began = world.now
    assert outlook(POLICY, world.state) == ("proven when the soak is over", began + POLICY.soak_ns)
    world.run()
    assert world.state.name is StateName.SERVING
    order = [type(fact) for fact in world.facts if isinstance(fact, (CanaryDone, BurstDone, SoakDone))]
    assert order == [CanaryDone, BurstDone, SoakDone]
    proven = next(at for at, name in world.states if name == "serving")
    assert proven == pytest.approx((began - world.began) / SECOND + POLICY.soak_ns / SECOND + 0.1, abs=0.01)
    assert world.decisions == []


def test_without_a_burst_or_a_soak_that_judges_the_proof_is_shorter() -> None:
    world = World(replace(POLICY, proof=Proof(concurrency=0, memory=False)), fine).run()
    assert world.state.name is StateName.SERVING
    assert not any(isinstance(fact, (BurstDone, SoakDone)) for fact in world.facts)


def launch_with(levers: Levers, **numbers: int) -> Launch:
    return Launch(1, levers, levers, 0, ledger=Ledger(numbers))


@pytest.mark.parametrize(
    ("wanted", "launch", "expected"),
    [
        (Proof(), launch_with(Levers({"max_num_seqs": 16})), (16, 128)),
        (Proof(), launch_with(Levers({"max_num_seqs": 256, "max_num_batched_tokens": 8192})), (32, 256)),
        (Proof(), launch_with(Levers(), max_num_seqs=8, max_num_batched_tokens=8192), (8, 1024)),
        (Proof(), launch_with(Levers()), (32, 64)),
        (Proof(), launch_with(Levers({"max_num_seqs": 1, "max_num_batched_tokens": 16384})), (1, 2048)),
        (Proof(concurrency=64, prompt_tokens=10), launch_with(Levers({"max_num_seqs": 16})), (64, 10)),
    ],
)
def test_the_burst_is_as_large_as_declared_else_as_the_slots_and_one_step_of_the_engine(
    wanted: Proof, launch: Launch, expected: tuple[int, int]
) -> None:
    burst = proof.burst_of(replace(POLICY, proof=wanted), launch)
    assert burst is not None
    assert (burst.requests, burst.prompt_tokens) == expected


def test_an_engine_that_dies_at_its_first_request_is_rolled_back_with_its_own_cause() -> None:
    world = in_second(Outcome(dies_in="canary", diagnosis=died()))
    decision = world.decisions[-1]
    assert (decision.launch, decision.kind, decision.moves[0].how) == (2, Kind.WORKER_DIED, "restored")
    assert "“exit code: -4”" in decision.sentence
    assert "Its proof failed in the canary, its first request." in decision.sentence
    assert "max_num_seqs 8 → 16" in decision.sentence
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 8, 16]
    assert world.state.name is StateName.SERVING


def test_memory_that_runs_out_in_the_burst_names_the_burst_lowers_and_is_remembered() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.levers["gpu_memory_utilization"] == 900:
            return Outcome(dies_in="burst", diagnosis=oom())
        return Outcome()

    world = World(POLICY, script).run()
    (decision,) = world.decisions
    assert decision.kind is Kind.OOM_RUNTIME
    assert decision.sentence.startswith("Launch 1 ran out of GPU memory while serving (tried 110 MiB, 42 MiB free).")
    assert "Its proof failed in the burst: 8 of 16 requests failed (“500 EngineCore" in decision.sentence
    assert [spawn.levers["gpu_memory_utilization"] for spawn in world.spawns] == [900, 850]
    assert [seen.outcome for seen in world.state.observations] == ["failed-high", "proven"]


def test_a_burst_that_fails_on_a_living_engine_waits_for_its_end_then_ends_it() -> None:
    world = in_second(Outcome(burst_failed=3))
    decision = world.decisions[-1]
    assert (decision.launch, decision.kind) == (2, Kind.ENGINE_BUG)
    assert "in its burst 3 of 8 requests failed" in decision.evidence[0].text
    assert "Its proof failed in the burst: 3 of 8 requests failed" in decision.sentence
    assert [spawn.levers["max_num_seqs"] for spawn in world.spawns] == [16, 8, 16]
    stopping = [at for at, name in world.states if name == "stopping"][1]
    failed = next(
        (fact.at_ns - world.began) / SECOND for fact in world.facts if isinstance(fact, BurstDone) and not fact.ok
    )
    assert stopping - failed == pytest.approx(6, abs=0.01), "its own end would have been the better witness"


def test_a_burst_without_any_answer_is_a_hang() -> None:
    world = in_second(Outcome(burst_silent=True))
    assert (world.decisions[-1].launch, world.decisions[-1].kind) == (2, Kind.ENGINE_HUNG)
    assert "none of 8 requests got an answer within 5 min" in world.decisions[-1].sentence


def test_the_same_failure_of_the_burst_three_times_without_a_proof_stops() -> None:
    world = World(POLICY, lambda spawn, _: Outcome(burst_failed=1)).run()
    assert [decision.action for decision in world.decisions[:2]] == [Action.RESTART_SAME] * 2
    assert world.decisions[-1].action is Action.STOP_EXPLAIN
    assert world.exit == 69
    assert world.proven == []


def test_a_stop_during_the_burst_is_carried_out_and_the_late_answer_says_nothing() -> None:
    world = World(POLICY, lambda spawn, _: Outcome(burst_silent=True))
    world.run(until=lambda world: world.state.ready)
    world.command("stop", 1.0)
    world.run()
    assert world.state.name is StateName.STOPPED
    assert world.decisions == []


ALL_BUT_100_MIB = TOTAL - 900 * TOTAL // 1000 - 100 * MIB


def test_a_launch_that_takes_more_than_it_requested_beside_free_memory_serves_on_and_that_is_said() -> None:
    world = World(POLICY, lambda spawn, world: Outcome(soak_takes=CONTEXT + 5 * GIB)).run()
    assert world.decisions == []
    assert world.proven == [DECLARED]
    found = too_large(POLICY, world.state)
    assert found is not None
    assert not found.fails
    assert found.text.startswith("it holds 131.33 GiB of GPU-0, more than the 125.82 GiB that it requested")


def test_a_launch_that_takes_more_than_it_requested_and_leaves_too_little_is_lowered_by_as_much() -> None:
    def script(spawn: Spawn, world: World) -> Outcome:
        takes = ALL_BUT_100_MIB if spawn.levers["gpu_memory_utilization"] == 900 else 0
        return Outcome(soak_takes=takes)

    world = World(POLICY, script).run()
    (decision,) = world.decisions
    assert decision.kind is Kind.OOM_RUNTIME
    assert decision.sentence.startswith("Launch 1 is too large for its memory: 100 MiB are left of GPU-0, and")
    assert "Its proof failed in the soak, after 30 s." in decision.sentence
    assert "too much" in decision.arithmetic
    lowered = decision.moves[0]
    beyond = ALL_BUT_100_MIB - 100 * MIB
    assert isinstance(lowered.after, int)
    assert (900 - lowered.after) * TOTAL / 1000 == pytest.approx(beyond + 150 * MIB, abs=TOTAL / 1000)
    assert world.state.name is StateName.SERVING
    assert world.proven == [DECLARED.with_(gpu_memory_utilization=lowered.after)]


def test_a_launch_that_leaves_too_little_is_lowered_too() -> None:
    policy = replace(POLICY, declared=DECLARED.with_(gpu_memory_utilization=950))

    def script(spawn: Spawn, world: World) -> Outcome:
        if spawn.launch == 1:
            world.on_sample = lambda world: None
            world.foreign = 0
            return Outcome(soak_takes=TOTAL - 950 * TOTAL // 1000 - 100 * MIB)
        return Outcome()

    world = World(policy, script).run()
    decision = world.decisions[0]
    assert decision.kind is Kind.OOM_RUNTIME
    assert world.state.name is StateName.SERVING
    assert world.spawns[1].levers.number("gpu_memory_utilization") < 950  # type: ignore[operator]


@pytest.mark.parametrize(
    "policy",
    [
        replace(POLICY, ladder=(Rung("max_num_seqs", factor=0.5, min=4),)),
        replace(POLICY, ladder=(Rung("gpu_memory_utilization", step=50, min=900),)),
        replace(POLICY, act=False),
    ],
    ids=["not movable", "at its floor", "only watching"],
)
def test_an_engine_that_works_is_not_given_up_for_a_finding_that_nothing_cures(policy: Policy) -> None:
    world = World(policy, lambda spawn, _: Outcome(soak_takes=ALL_BUT_100_MIB)).run()
    assert world.state.name is StateName.SERVING
    assert world.decisions == []


def test_a_soak_waits_for_health_before_it_is_over() -> None:
    world = World(POLICY, fine)
    world.send(60, HealthSeen(at_ns=0, launch=1, status=503))
    world.send(68, HealthSeen(at_ns=0, launch=1, status=200))
    world.run(until=lambda world: world.state.launch is not None and world.state.launch.burst is not None)
    world.run(30.5)
    assert world.state.name in (StateName.PROVING, StateName.SERVING)
    world.run()
    assert world.state.name is StateName.SERVING
    assert world.decisions == []


def test_what_a_new_daemon_asks_for_again_follows_from_the_launch() -> None:
    world = World(POLICY, fine)
    world.run(until=lambda world: world.state.name is StateName.PROVING)

    def again() -> list[object]:
        """What a daemon that follows asks for, besides the adoption itself."""
        started = DaemonStarted(
            at_ns=world.now,
            boot_id="b",
            next_launch=2,
            next_decision=1,
            carried=json.dumps(carry(world.state)),
            engine="lives",
        )
        after, (adopt, *more) = decide(POLICY, State.initial(), started)
        assert isinstance(adopt, Adopt)
        assert after.launch == world.state.launch
        return list(more)

    assert again() == [Canary(1)]
    world.run(until=lambda world: world.state.ready)
    assert again() == [Burst(1, 16, 128, 64, 300 * SECOND)]
    world.run(until=lambda world: world.state.launch is not None and world.state.launch.burst is not None)
    assert again() == [], "only time is missing"
    world.run(until=lambda world: world.state.launch is not None and world.state.launch.weighed)
    assert again() == [Weigh(1)]


def test_the_slope_of_a_soak_is_recorded_and_not_judged() -> None:
    world = World(POLICY, lambda spawn, _: Outcome(soak_takes=200 * MIB)).run()
    (done,) = [fact for fact in world.facts if isinstance(fact, SoakDone)]
    assert done.devices[0].growth_bytes == 200 * MIB
    steep = replace(done.devices[0], slope_bytes_per_hour=24e9)
    assert excess((steep,), 900, 0, {}) is None
    assert world.state.name is StateName.SERVING
